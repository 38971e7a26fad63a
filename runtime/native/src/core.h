// What every file of the library uses: errors, text that grows, checked arithmetic.
//
// Names that the library shares among its files and with nobody else begin with `fx_`.

#ifndef FIXSTEP_SRC_CORE_H_
#define FIXSTEP_SRC_CORE_H_

#include <stdarg.h>
#include <string.h>

#include "fixstep.h"

#define FIXSTEP_PRINTF(text, first) __attribute__((format(printf, text, first)))

typedef fixstep_status_t status_t;

// Sets `out_error`, which may be NULL, and returns `status`.
status_t fx_fail(fixstep_error_t** out_error, status_t status, const char* format, ...) FIXSTEP_PRINTF(3, 4);
status_t fx_fail_memory(fixstep_error_t** out_error);
// Replaces an error by one with a text before its message; takes the old one.
status_t fx_fail_prefixed(fixstep_error_t** out_error, status_t status, fixstep_error_t* inner, const char* before,
                          const char* after);

// Text that grows. Without memory it stays as it is and says so at the end.
typedef struct text_t {
  char* data;  // NULL while empty; ends with '\0' otherwise
  size_t length;
  size_t capacity;
  bool failed;
} text_t;

void fx_text_bytes(text_t* text, const void* bytes, size_t length);
void fx_text_add(text_t* text, const char* format, ...) FIXSTEP_PRINTF(2, 3);
void fx_text_add_arguments(text_t* text, const char* format, va_list arguments);
// Text as Python's repr shows it, which the messages of both runtimes use.
void fx_text_add_repr(text_t* text, const char* value);
void fx_text_release(text_t* text);
// Sets an error with the text as its message, and releases the text.
status_t fx_fail_with_text(fixstep_error_t** out_error, status_t status, text_t* text);

// a * b and a + b; false on overflow.
static inline bool multiply(size_t a, size_t b, size_t* out_product) {
  return !__builtin_mul_overflow(a, b, out_product);
}
static inline bool add(size_t a, size_t b, size_t* out_sum) { return !__builtin_add_overflow(a, b, out_sum); }

// Zeroed memory for `count` elements; never NULL for a count of 0.
void* fx_allocate_zeroed(size_t count, size_t element_byte_length);
// Memory at a multiple of 64 bytes, which free() takes.
void* fx_allocate_aligned(size_t byte_length);
char* fx_copy_text(const char* text, size_t length);

// 64 lowercase hexadecimal digits and '\0'.
#define DIGEST_LENGTH 64
void fx_digest_of(const void* data, size_t byte_length, char out_digest[DIGEST_LENGTH + 1]);

static inline uint16_t load_u16(const uint8_t* p) { return (uint16_t)(p[0] | p[1] << 8); }
static inline uint32_t load_u32(const uint8_t* p) { return (uint32_t)load_u16(p) | (uint32_t)load_u16(p + 2) << 16; }
static inline uint64_t load_u64(const uint8_t* p) { return (uint64_t)load_u32(p) | (uint64_t)load_u32(p + 4) << 32; }

#endif  // FIXSTEP_SRC_CORE_H_
