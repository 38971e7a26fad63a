#include "leaf.h"

#include <inttypes.h>
#include <stdlib.h>

static const dtype_info_t dtypes[] = {
    [FIXSTEP_INVALID_DTYPE] = {"invalid", 0, "", 1},
    [FIXSTEP_BOOL] = {"bool", 1, "BOOL", 1},
    [FIXSTEP_INT8] = {"int8", 1, "I8", 1},
    [FIXSTEP_INT16] = {"int16", 2, "I16", 1},
    [FIXSTEP_INT32] = {"int32", 4, "I32", 1},
    [FIXSTEP_INT64] = {"int64", 8, "I64", 1},
    [FIXSTEP_UINT8] = {"uint8", 1, "U8", 1},
    [FIXSTEP_UINT16] = {"uint16", 2, "U16", 1},
    [FIXSTEP_UINT32] = {"uint32", 4, "U32", 1},
    [FIXSTEP_UINT64] = {"uint64", 8, "U64", 1},
    [FIXSTEP_FLOAT16] = {"float16", 2, "F16", 1},
    [FIXSTEP_BFLOAT16] = {"bfloat16", 2, "BF16", 1},
    [FIXSTEP_FLOAT32] = {"float32", 4, "F32", 1},
    [FIXSTEP_FLOAT64] = {"float64", 8, "F64", 1},
    [FIXSTEP_COMPLEX64] = {"complex64", 8, "F32", 2},
    [FIXSTEP_COMPLEX128] = {"complex128", 16, "F64", 2},
    [FIXSTEP_FLOAT8_E4M3FN] = {"float8_e4m3fn", 1, "F8_E4M3", 1},
    [FIXSTEP_FLOAT8_E5M2] = {"float8_e5m2", 1, "F8_E5M2", 1},
    [FIXSTEP_FLOAT8_E4M3FNUZ] = {"float8_e4m3fnuz", 1, "U8", 1},
    [FIXSTEP_FLOAT8_E5M2FNUZ] = {"float8_e5m2fnuz", 1, "U8", 1},
    [FIXSTEP_INT1] = {"int1", 1, "U8", 1},
    [FIXSTEP_INT2] = {"int2", 1, "U8", 1},
    [FIXSTEP_INT4] = {"int4", 1, "U8", 1},
    [FIXSTEP_UINT1] = {"uint1", 1, "U8", 1},
    [FIXSTEP_UINT2] = {"uint2", 1, "U8", 1},
    [FIXSTEP_UINT4] = {"uint4", 1, "U8", 1},
    [FIXSTEP_FLOAT8_E3M4] = {"float8_e3m4", 1, "U8", 1},
    [FIXSTEP_FLOAT8_E4M3] = {"float8_e4m3", 1, "U8", 1},
    [FIXSTEP_FLOAT8_E4M3B11FNUZ] = {"float8_e4m3b11fnuz", 1, "U8", 1},
    [FIXSTEP_FLOAT8_E8M0FNU] = {"float8_e8m0fnu", 1, "U8", 1},
    [FIXSTEP_FLOAT4_E2M1FN] = {"float4_e2m1fn", 1, "U8", 1},
    [FIXSTEP_FLOAT6_E2M3FN] = {"float6_e2m3fn", 1, "U8", 1},
    [FIXSTEP_FLOAT6_E3M2FN] = {"float6_e3m2fn", 1, "U8", 1},
};
#define DTYPE_COUNT (sizeof(dtypes) / sizeof(dtypes[0]))

const dtype_info_t* fx_dtype_info(fixstep_dtype_t dtype) {
  return (size_t)dtype < DTYPE_COUNT ? &dtypes[dtype] : &dtypes[FIXSTEP_INVALID_DTYPE];
}

fixstep_dtype_t fx_dtype_from_name(const char* name) {
  for (size_t i = 1; i < DTYPE_COUNT; ++i) {
    if (strcmp(dtypes[i].name, name) == 0) return (fixstep_dtype_t)i;
  }
  return FIXSTEP_INVALID_DTYPE;
}

const char* fixstep_dtype_name(fixstep_dtype_t dtype) { return fx_dtype_info(dtype)->name; }
size_t fixstep_dtype_byte_length(fixstep_dtype_t dtype) { return fx_dtype_info(dtype)->byte_length; }

void fx_text_add_type(text_t* text, fixstep_dtype_t dtype, size_t rank, const int64_t* shape) {
  fx_text_add(text, "%s[", fixstep_dtype_name(dtype));
  for (size_t i = 0; i < rank; ++i) fx_text_add(text, "%s%" PRId64, i ? "," : "", shape[i]);
  fx_text_add(text, "]");
}

void fx_text_add_path(text_t* text, const char* path, const char* what) {
  if (*path) {
    fx_text_add(text, "%s", path);
  } else {
    fx_text_add(text, "<the %s itself>", what);
  }
}

void fx_text_add_leaf_json(text_t* text, const fixstep_leaf_t* leaf) {
  fx_text_add(text, "{\"path\":");
  fx_json_quote(text, leaf->path);
  fx_text_add(text, ",\"dtype\":\"%s\",\"shape\":[", fixstep_dtype_name(leaf->dtype));
  for (size_t i = 0; i < leaf->rank; ++i) fx_text_add(text, "%s%" PRId64, i ? "," : "", leaf->shape[i]);
  fx_text_add(text, "],\"key\":");
  if (leaf->key) {
    fx_json_quote(text, leaf->key);
  } else {
    fx_text_add(text, "null");
  }
  fx_text_add(text, "}");
}

static size_t character_count(const char* text) {
  size_t count = 0;
  for (; *text; ++text) count += ((unsigned char)*text & 0xC0) != 0x80;
  return count;
}

// Reads one leaf; its shape goes to `dimensions`, which has room for it.
static status_t leaf_parse(const json_t* json, const char* where, size_t index, status_t status, int64_t* dimensions,
                           fixstep_leaf_t* leaf, fixstep_error_t** out_error) {
  const json_t* path = json_object_get(json, "path");
  const json_t* dtype = json_object_get(json, "dtype");
  const json_t* shape = json_object_get(json, "shape");
  const json_t* key = json_object_get(json, "key");
  if (!json_is_object(json) || json_object_size(json) != 4 || !path || !dtype || !shape || !key) {
    return fx_fail(out_error, status, "%s/%zu: expected an object of path, dtype, shape, key", where, index);
  }
  if (!json_is_string(path) || character_count(json_string_value(path)) > MAX_PATH_LENGTH) {
    return fx_fail(out_error, status, "%s/%zu/path: expected a leaf path of at most %d characters", where, index,
                   MAX_PATH_LENGTH);
  }
  leaf->path = json_string_value(path);
  leaf->dtype = json_is_string(dtype) ? fx_dtype_from_name(json_string_value(dtype)) : FIXSTEP_INVALID_DTYPE;
  if (leaf->dtype == FIXSTEP_INVALID_DTYPE) {
    return fx_fail(out_error, status, "%s/%zu/dtype: expected the name of a dtype that this library holds, got %.40s",
                   where, index, json_is_string(dtype) ? json_string_value(dtype) : "no text");
  }
  if (!json_is_null(key) && !(json_is_string(key) && json_string_length(key))) {
    return fx_fail(out_error, status, "%s/%zu/key: expected null or the name of a PRNG implementation", where, index);
  }
  leaf->key = json_string_value(key);
  leaf->rank = json_array_size(shape);
  leaf->shape = dimensions;
  leaf->byte_length = fixstep_dtype_byte_length(leaf->dtype);
  bool empty = false, fits = true;
  for (size_t i = 0; i < leaf->rank; ++i) {
    uint64_t n;
    if (!fx_json_count(json_array_get(shape, i), INT64_MAX, &n)) {
      return fx_fail(out_error, status, "%s/%zu/shape: expected up to %d integers from 0", where, index, MAX_RANK);
    }
    dimensions[i] = (int64_t)n;
    empty = empty || n == 0;
    fits = fits && n <= SIZE_MAX && multiply(leaf->byte_length, (size_t)n, &leaf->byte_length);
  }
  if (empty) leaf->byte_length = 0;
  // Twice, so that the sum of two leaves is no overflow anywhere.
  if (!empty && (!fits || leaf->byte_length > PTRDIFF_MAX / 2)) {
    return fx_fail(out_error, status, "%s/%zu/shape: more bytes than memory can hold", where, index);
  }
  return FIXSTEP_OK;
}

// qsort has no argument for its context, and the library has no globals: sort pairs.
typedef struct path_index_t {
  const char* path;
  size_t index;
} path_index_t;

static int compare_paths(const void* a, const void* b) {
  return strcmp(((const path_index_t*)a)->path, ((const path_index_t*)b)->path);
}

static status_t sort_leaves(leaf_list_t* list, const char* where, status_t status, fixstep_error_t** out_error) {
  path_index_t* pairs = fx_allocate_zeroed(list->count, sizeof(*pairs));
  list->sorted = fx_allocate_zeroed(list->count, sizeof(*list->sorted));
  if (!pairs || !list->sorted) {
    free(pairs);
    return fx_fail_memory(out_error);
  }
  for (size_t i = 0; i < list->count; ++i) pairs[i] = (path_index_t){list->items[i].path, i};
  qsort(pairs, list->count, sizeof(*pairs), compare_paths);
  status_t result = FIXSTEP_OK;
  for (size_t i = 0; i < list->count; ++i) {
    list->sorted[i] = pairs[i].index;
    if (result == FIXSTEP_OK && i && strcmp(pairs[i - 1].path, pairs[i].path) == 0) {
      result = fx_fail(out_error, status, "%s: the leaf path '%s' occurs twice", where, pairs[i].path);
    }
  }
  free(pairs);
  return result;
}

status_t fx_leaf_list_parse(const json_t* json, const char* where, status_t status, leaf_list_t* out_list,
                            fixstep_error_t** out_error) {
  *out_list = (leaf_list_t){0};
  if (!json_is_array(json)) return fx_fail(out_error, status, "%s: expected a list of leaves", where);
  size_t count = json_array_size(json), dimension_count = 0, index;
  const json_t* item;
  json_array_foreach(json, index, item) {
    const json_t* shape = json_object_get(item, "shape");
    if (!json_is_array(shape) || json_array_size(shape) > MAX_RANK) {
      return fx_fail(out_error, status, "%s/%zu/shape: expected a list of up to %d integers", where, index, MAX_RANK);
    }
    dimension_count += json_array_size(shape);
  }
  leaf_list_t list = {fx_allocate_zeroed(count, sizeof(fixstep_leaf_t)), count,
                      fx_allocate_zeroed(dimension_count, sizeof(int64_t)), NULL};
  status_t result = list.items && list.dimensions ? FIXSTEP_OK : fx_fail_memory(out_error);
  int64_t* dimensions = list.dimensions;
  for (size_t i = 0; i < count && result == FIXSTEP_OK; ++i) {
    result = leaf_parse(json_array_get(json, i), where, i, status, dimensions, &list.items[i], out_error);
    dimensions += list.items[i].rank;
  }
  if (result == FIXSTEP_OK) result = sort_leaves(&list, where, status, out_error);
  if (result == FIXSTEP_OK) {
    *out_list = list;
  } else {
    fx_leaf_list_release(&list);
  }
  return result;
}

void fx_leaf_list_release(leaf_list_t* list) {
  free(list->items);
  free(list->dimensions);
  free(list->sorted);
  *list = (leaf_list_t){0};
}

const fixstep_leaf_t* fx_leaf_list_find(const leaf_list_t* list, const char* path) {
  size_t low = 0, high = list->count;
  while (low < high) {
    size_t middle = low + (high - low) / 2;
    const fixstep_leaf_t* leaf = &list->items[list->sorted[middle]];
    int order = strcmp(path, leaf->path);
    if (order == 0) return leaf;
    if (order < 0) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return NULL;
}

bool fx_leaf_equal(const fixstep_leaf_t* a, const fixstep_leaf_t* b, bool keys) {
  if (strcmp(a->path, b->path) != 0 || a->dtype != b->dtype || a->rank != b->rank) return false;
  for (size_t i = 0; i < a->rank; ++i) {
    if (a->shape[i] != b->shape[i]) return false;
  }
  if (!keys) return true;
  return (a->key == NULL) == (b->key == NULL) && (!a->key || strcmp(a->key, b->key) == 0);
}

bool fx_leaf_list_equal(const leaf_list_t* a, const leaf_list_t* b, bool keys) {
  if (a->count != b->count) return false;
  for (size_t i = 0; i < a->count; ++i) {
    if (!fx_leaf_equal(&a->items[i], &b->items[i], keys)) return false;
  }
  return true;
}
