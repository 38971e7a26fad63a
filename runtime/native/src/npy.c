#include "npy.h"

#include <stdlib.h>

// The text of a header, and how far it was read.
typedef struct cursor_t {
  const char* at;
  const char* end;
} cursor_t;

static void skip_space(cursor_t* cursor) {
  while (cursor->at < cursor->end && (*cursor->at == ' ' || *cursor->at == '\n' || *cursor->at == '\t')) ++cursor->at;
}

static bool take(cursor_t* cursor, const char* text) {
  skip_space(cursor);
  size_t length = strlen(text);
  if ((size_t)(cursor->end - cursor->at) < length || memcmp(cursor->at, text, length) != 0) return false;
  cursor->at += length;
  return true;
}

// A text in quotes, without escapes, that fits the room.
static bool take_text(cursor_t* cursor, char* out, size_t room) {
  skip_space(cursor);
  if (cursor->at >= cursor->end || (*cursor->at != '\'' && *cursor->at != '"')) return false;
  char quote = *cursor->at++;
  const char* start = cursor->at;
  while (cursor->at < cursor->end && *cursor->at != quote && *cursor->at != '\\') ++cursor->at;
  size_t length = (size_t)(cursor->at - start);
  if (cursor->at >= cursor->end || *cursor->at != quote || length >= room) return false;
  ++cursor->at;
  memcpy(out, start, length);
  out[length] = '\0';
  return true;
}

static bool take_integer(cursor_t* cursor, int64_t* out_value) {
  skip_space(cursor);
  *out_value = 0;
  const char* start = cursor->at;
  for (; cursor->at < cursor->end && *cursor->at >= '0' && *cursor->at <= '9'; ++cursor->at) {
    if (__builtin_mul_overflow(*out_value, 10, out_value)) return false;
    if (__builtin_add_overflow(*out_value, *cursor->at - '0', out_value)) return false;
  }
  return cursor->at > start;
}

static bool take_shape(cursor_t* cursor, npy_t* array) {
  if (!take(cursor, "(")) return false;
  while (!take(cursor, ")")) {
    if (array->rank == MAX_RANK || !take_integer(cursor, &array->shape[array->rank])) return false;
    ++array->rank;
    if (!take(cursor, ",")) return take(cursor, ")");
  }
  return true;
}

static bool set_type(npy_t* array, const char* text) {
  static const struct {
    const char* text;
    fixstep_dtype_t dtype;
  } types[] = {{"b1", FIXSTEP_BOOL},      {"i1", FIXSTEP_INT8},       {"i2", FIXSTEP_INT16},   {"i4", FIXSTEP_INT32},
               {"i8", FIXSTEP_INT64},     {"u1", FIXSTEP_UINT8},      {"u2", FIXSTEP_UINT16},  {"u4", FIXSTEP_UINT32},
               {"u8", FIXSTEP_UINT64},    {"f2", FIXSTEP_FLOAT16},    {"f4", FIXSTEP_FLOAT32}, {"f8", FIXSTEP_FLOAT64},
               {"c8", FIXSTEP_COMPLEX64}, {"c16", FIXSTEP_COMPLEX128}};
  if (*text != '<' && *text != '|') return false;  // big-endian
  for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); ++i) {
    if (strcmp(types[i].text, text + 1) != 0) continue;
    array->dtype = types[i].dtype;
    array->item_byte_length = fixstep_dtype_byte_length(array->dtype);
    return true;
  }
  // numpy stores the dtypes of other packages as raw bytes.
  if (text[1] != 'V' || (strcmp(text + 2, "1") != 0 && strcmp(text + 2, "2") != 0)) return false;
  array->dtype = FIXSTEP_INVALID_DTYPE;
  array->item_byte_length = (size_t)(text[2] - '0');
  return true;
}

// `{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }`
static const char* parse_header(cursor_t* cursor, npy_t* array) {
  bool has_type = false, has_order = false, has_shape = false;
  if (!take(cursor, "{")) return "its header is no dictionary";
  while (!take(cursor, "}")) {
    char key[16], type[16];
    if (!take_text(cursor, key, sizeof(key)) || !take(cursor, ":")) return "its header is damaged";
    if (strcmp(key, "descr") == 0 && !has_type) {
      if (!take_text(cursor, type, sizeof(type)) || !set_type(array, type)) {
        return "its elements are no little-endian numbers";
      }
      has_type = true;
    } else if (strcmp(key, "fortran_order") == 0 && !has_order) {
      if (!take(cursor, "False")) return "its elements stand column by column; write it with numpy.ascontiguousarray";
      has_order = true;
    } else if (strcmp(key, "shape") == 0 && !has_shape) {
      if (!take_shape(cursor, array)) return "its shape is damaged";
      has_shape = true;
    } else {
      return "its header has unknown keys";
    }
    if (!take(cursor, ",")) {
      if (!take(cursor, "}")) return "its header is damaged";
      break;
    }
  }
  skip_space(cursor);
  if (cursor->at != cursor->end) return "more follows its header";
  return has_type && has_order && has_shape ? NULL : "its header is incomplete";
}

status_t fx_npy_parse(const uint8_t* file, size_t byte_length, npy_t* out_array, fixstep_error_t** out_error) {
  *out_array = (npy_t){0};
  if (byte_length < 10 || memcmp(file, "\x93NUMPY", 6) != 0) {
    return fx_fail(out_error, FIXSTEP_DATA_ERROR, "not an array of numpy's; write it with numpy.save or numpy.savez");
  }
  size_t start = file[6] == 1 ? 10 : 12;
  if ((file[6] != 1 && file[6] != 2) || file[7] != 0 || byte_length < start) {
    return fx_fail(out_error, FIXSTEP_DATA_ERROR, "array format %d.%d, expected 1.0 or 2.0", file[6], file[7]);
  }
  size_t length = file[6] == 1 ? load_u16(file + 8) : load_u32(file + 8);
  if (length > byte_length - start) return fx_fail(out_error, FIXSTEP_DATA_ERROR, "damaged: it ends within its header");
  cursor_t cursor = {(const char*)file + start, (const char*)file + start + length};
  const char* problem = parse_header(&cursor, out_array);
  if (problem) return fx_fail(out_error, FIXSTEP_DATA_ERROR, "damaged, or no plain array: %s", problem);
  out_array->data = file + start + length;
  out_array->byte_length = byte_length - start - length;
  size_t expected = out_array->item_byte_length;
  bool empty = false, fits = true;
  for (size_t i = 0; i < out_array->rank; ++i) {
    empty = empty || out_array->shape[i] == 0;
    fits = fits && multiply(expected, (size_t)out_array->shape[i], &expected);
  }
  if (empty) expected = 0;
  if ((!empty && !fits) || expected != out_array->byte_length) {
    return fx_fail(out_error, FIXSTEP_DATA_ERROR, "damaged: its header does not speak of the %zu bytes that follow",
                   out_array->byte_length);
  }
  return FIXSTEP_OK;
}
