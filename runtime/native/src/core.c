#include "core.h"

#include <sodium.h>
#include <stdio.h>
#include <stdlib.h>

#include "fixstep_backend.h"

struct fixstep_error_t {
  status_t status;
  char* message;  // of its own memory, or NULL for the error that there is no memory
};

// There is no memory to say that there is none.
static fixstep_error_t out_of_memory = {FIXSTEP_OUT_OF_MEMORY, NULL};

status_t fx_fail_memory(fixstep_error_t** out_error) {
  if (out_error) *out_error = &out_of_memory;
  return FIXSTEP_OUT_OF_MEMORY;
}

status_t fx_fail_with_text(fixstep_error_t** out_error, status_t status, text_t* text) {
  fixstep_error_t* error = out_error && !text->failed ? malloc(sizeof(*error)) : NULL;
  if (!error) {
    bool failed = out_error != NULL;
    fx_text_release(text);
    if (failed) *out_error = &out_of_memory;
    return failed ? FIXSTEP_OUT_OF_MEMORY : status;
  }
  *error = (fixstep_error_t){status, text->data};
  *text = (text_t){0};
  *out_error = error;
  return status;
}

static status_t fail_arguments(fixstep_error_t** out_error, status_t status, const char* format, va_list arguments) {
  text_t text = {0};
  fx_text_add_arguments(&text, format, arguments);
  return fx_fail_with_text(out_error, status, &text);
}

status_t fx_fail(fixstep_error_t** out_error, status_t status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  status = fail_arguments(out_error, status, format, arguments);
  va_end(arguments);
  return status;
}

status_t fixstep_backend_fail(fixstep_error_t** out_error, status_t status, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  status = fail_arguments(out_error, status, format, arguments);
  va_end(arguments);
  return status;
}

status_t fx_fail_prefixed(fixstep_error_t** out_error, status_t status, fixstep_error_t* inner, const char* before,
                          const char* after) {
  if (fixstep_error_status(inner) == FIXSTEP_OUT_OF_MEMORY) return fx_fail_memory(out_error);
  status = fx_fail(out_error, status, "%s%s%s", before, fixstep_error_message(inner), after);
  fixstep_error_release(inner);
  return status;
}

fixstep_status_t fixstep_error_status(const fixstep_error_t* error) { return error ? error->status : FIXSTEP_OK; }

const char* fixstep_error_message(const fixstep_error_t* error) {
  if (error == &out_of_memory) return "out of memory";
  return error && error->message ? error->message : "";
}

void fixstep_error_release(fixstep_error_t* error) {
  if (!error || error == &out_of_memory) return;
  free(error->message);
  free(error);
}

void fixstep_free(void* memory) { free(memory); }

static bool text_reserve(text_t* text, size_t more) {
  size_t needed;
  if (!add(text->length, more, &needed) || !add(needed, 1, &needed)) text->failed = true;
  if (text->failed) return false;
  if (needed <= text->capacity) return true;
  size_t capacity = needed < 64 ? 64 : needed;
  if (capacity < SIZE_MAX / 2 && capacity < 2 * text->capacity) capacity = 2 * text->capacity;
  char* data = realloc(text->data, capacity);
  if (!data) {
    text->failed = true;
    return false;
  }
  text->data = data;
  text->capacity = capacity;
  return true;
}

void fx_text_bytes(text_t* text, const void* bytes, size_t length) {
  if (!text_reserve(text, length)) return;
  if (length) memcpy(text->data + text->length, bytes, length);
  text->length += length;
  text->data[text->length] = '\0';
}

void fx_text_add_arguments(text_t* text, const char* format, va_list arguments) {
  va_list again;
  va_copy(again, arguments);
  int length = vsnprintf(NULL, 0, format, arguments);
  if (length < 0) text->failed = true;
  if (length >= 0 && text_reserve(text, (size_t)length)) {
    vsnprintf(text->data + text->length, (size_t)length + 1, format, again);
    text->length += (size_t)length;
  }
  va_end(again);
}

void fx_text_add(text_t* text, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  fx_text_add_arguments(text, format, arguments);
  va_end(arguments);
}

void fx_text_add_repr(text_t* text, const char* value) {
  char quote = strchr(value, '\'') && !strchr(value, '"') ? '"' : '\'';
  fx_text_bytes(text, &quote, 1);
  for (const char* p = value; *p; ++p) {
    unsigned char c = (unsigned char)*p;
    if (*p == quote || *p == '\\') {
      fx_text_add(text, "\\%c", *p);
    } else if (c == '\n' || c == '\r' || c == '\t') {
      fx_text_add(text, "\\%c", c == '\n' ? 'n' : c == '\r' ? 'r' : 't');
    } else if (c < 0x20 || c == 0x7f) {
      fx_text_add(text, "\\x%02x", c);
    } else {
      fx_text_bytes(text, p, 1);
    }
  }
  fx_text_bytes(text, &quote, 1);
}

void fx_text_release(text_t* text) {
  free(text->data);
  *text = (text_t){0};
}

void* fx_allocate_zeroed(size_t count, size_t element_byte_length) {
  return calloc(count ? count : 1, element_byte_length ? element_byte_length : 1);
}

void* fx_allocate_aligned(size_t byte_length) {
  if (byte_length > SIZE_MAX - 128) return NULL;
  size_t rounded = (byte_length + 63) / 64 * 64;
  return aligned_alloc(64, rounded ? rounded : 64);
}

char* fx_copy_text(const char* text, size_t length) {
  char* copy = length < SIZE_MAX ? malloc(length + 1) : NULL;
  if (!copy) return NULL;
  if (length) memcpy(copy, text, length);
  copy[length] = '\0';
  return copy;
}

void fx_digest_of(const void* data, size_t byte_length, char out_digest[DIGEST_LENGTH + 1]) {
  unsigned char hash[crypto_hash_sha256_BYTES];
  static const unsigned char nothing = 0;
  crypto_hash_sha256(hash, byte_length ? data : &nothing, byte_length);
  sodium_bin2hex(out_digest, DIGEST_LENGTH + 1, hash, sizeof(hash));
}
