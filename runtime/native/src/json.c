#include "json.h"

#include <stdlib.h>

// Lists and objects inside one another; the files need fewer than ten.
#define MAX_DEPTH 32

// Brackets outside strings, counted before the parser recurses over them.
static int depth_of(const char* data, size_t byte_length) {
  int depth = 0, deepest = 0;
  bool in_string = false;
  for (size_t i = 0; i < byte_length; ++i) {
    char c = data[i];
    if (in_string) {
      if (c == '\\') {
        ++i;
      } else if (c == '"') {
        in_string = false;
      }
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      if (++depth > deepest) deepest = depth;
      if (deepest > MAX_DEPTH) return deepest;
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return deepest;
}

status_t fx_json_parse(const char* data, size_t byte_length, status_t status, json_t** out_value,
                       fixstep_error_t** out_error) {
  *out_value = NULL;
  if (depth_of(data, byte_length) > MAX_DEPTH) {
    return fx_fail(out_error, status, "JSON nested more than the %d deep that are allowed", MAX_DEPTH);
  }
  json_error_t error;
  *out_value = json_loadb(data, byte_length, JSON_REJECT_DUPLICATES, &error);
  if (!*out_value && json_error_code(&error) == json_error_numeric_overflow) {
    // Python writes integers of any size. None of ours is so large; the caller's are kept as text.
    *out_value = json_loadb(data, byte_length, JSON_REJECT_DUPLICATES | JSON_DECODE_INT_AS_REAL, &error);
  }
  if (*out_value) return FIXSTEP_OK;
  if (json_error_code(&error) == json_error_out_of_memory) return fx_fail_memory(out_error);
  return fx_fail(out_error, status, "not JSON: %s (line %d column %d)", error.text, error.line, error.column);
}

bool fx_json_count(const json_t* value, uint64_t most, uint64_t* out_count) {
  *out_count = 0;
  if (json_is_integer(value)) {
    json_int_t count = json_integer_value(value);
    if (count < 0 || (uint64_t)count > most) return false;
    *out_count = (uint64_t)count;
    return true;
  }
  double real = json_is_real(value) ? json_real_value(value) : -1;
  if (!(real >= 0 && real <= 9007199254740992.0) || (double)(uint64_t)real != real || (uint64_t)real > most) {
    return false;
  }
  *out_count = (uint64_t)real;
  return true;
}

void fx_json_quote(text_t* text, const char* value) {
  json_t* string = json_string(value);
  char* quoted = string ? json_dumps(string, JSON_ENCODE_ANY) : NULL;
  if (quoted) {
    fx_text_bytes(text, quoted, strlen(quoted));
  } else {
    text->failed = true;
  }
  free(quoted);
  json_decref(string);
}

static size_t skip_space(const char* data, size_t byte_length, size_t at) {
  while (at < byte_length && (data[at] == ' ' || data[at] == '\t' || data[at] == '\n' || data[at] == '\r')) ++at;
  return at;
}

// The end of the value that begins at `at`, and the value itself.
static json_t* value_at(const char* data, size_t byte_length, size_t at, size_t* out_end) {
  json_error_t error;
  const size_t flags = JSON_DECODE_ANY | JSON_DISABLE_EOF_CHECK | JSON_DECODE_INT_AS_REAL;
  json_t* value = at < byte_length ? json_loadb(data + at, byte_length - at, flags, &error) : NULL;
  // For the end of a number or a word the parser looks one byte further, but counts what it took.
  *out_end = value ? at + (size_t)error.position : at;
  return value;
}

bool fx_json_find(const char* data, size_t byte_length, const char* key, const char** out_start, size_t* out_length) {
  size_t at = skip_space(data, byte_length, 0);
  if (at >= byte_length || data[at] != '{') return false;
  ++at;
  for (;;) {
    size_t end;
    json_t* name = value_at(data, byte_length, at = skip_space(data, byte_length, at), &end);
    bool found = json_is_string(name) && strcmp(json_string_value(name), key) == 0;
    bool is_name = json_is_string(name);
    json_decref(name);
    at = skip_space(data, byte_length, end);
    if (!is_name || at >= byte_length || data[at] != ':') return false;
    at = skip_space(data, byte_length, at + 1);
    json_t* value = value_at(data, byte_length, at, &end);
    if (!value) return false;
    json_decref(value);
    if (found) {
      *out_start = data + at;
      *out_length = end - at;
      return true;
    }
    at = skip_space(data, byte_length, end);
    if (at >= byte_length || data[at] != ',') return false;
    ++at;
  }
}
