#include "safetensors.h"

#include <inttypes.h>
#include <stdlib.h>

#define MAX_HEADER_BYTE_LENGTH 100000000
#define METADATA "__metadata__"

status_t fx_safetensors_header(const uint8_t* data, size_t byte_length, status_t status, json_t** out_header,
                               fixstep_error_t** out_error) {
  *out_header = NULL;
  uint64_t length = byte_length < 8 ? UINT64_MAX : load_u64(data);
  if (length > MAX_HEADER_BYTE_LENGTH || length > byte_length - 8 || length < 2 || data[8] != '{') {
    return fx_fail(out_error, status, "not a whole safetensors file: its header does not fit");
  }
  fixstep_error_t* inner = NULL;
  status_t result = fx_json_parse((const char*)data + 8, (size_t)length, status, out_header, &inner);
  return result == FIXSTEP_OK ? result
                              : fx_fail_prefixed(out_error, result, inner, "not a whole safetensors file: ", "");
}

// The name of the tensor that holds a leaf: one name is taken by the format itself, and a slash more keeps all apart.
static void add_name(text_t* name, const char* path) {
  size_t length = sizeof(METADATA) - 1;
  bool taken = strncmp(path, METADATA, length) == 0 && strspn(path + length, "/") == strlen(path + length);
  name->length = 0;
  fx_text_add(name, "%s%s", path, taken ? "/" : "");
}

// Whether a tensor has the type and shape that a leaf is stored with.
static bool is_stored_as(const json_t* tensor, const fixstep_leaf_t* leaf) {
  const dtype_info_t* info = fx_dtype_info(leaf->dtype);
  const char* type = json_string_value(json_object_get(tensor, "dtype"));
  const json_t* shape = json_object_get(tensor, "shape");
  size_t rank = leaf->rank + (info->parts > 1);
  if (!type || strcmp(type, info->tensor_type) != 0 || !json_is_array(shape) || json_array_size(shape) != rank) {
    return false;
  }
  for (size_t i = 0; i < rank; ++i) {
    uint64_t n;
    uint64_t expected = i < leaf->rank ? (uint64_t)leaf->shape[i] : info->parts;
    if (!fx_json_count(json_array_get(shape, i), INT64_MAX, &n) || n != expected) return false;
  }
  return true;
}

static void add_stored_type(text_t* text, const fixstep_leaf_t* leaf) {
  const dtype_info_t* info = fx_dtype_info(leaf->dtype);
  fx_text_add(text, "%s[", info->tensor_type);
  for (size_t i = 0; i < leaf->rank; ++i) fx_text_add(text, "%s%" PRId64, i ? "," : "", leaf->shape[i]);
  if (info->parts > 1) fx_text_add(text, "%s%zu", leaf->rank ? "," : "", info->parts);
  fx_text_add(text, "]");
}

typedef struct range_t {
  uint64_t start, end;
} range_t;

static int compare_ranges(const void* a, const void* b) {
  const range_t *x = a, *y = b;
  if (x->start != y->start) return x->start < y->start ? -1 : 1;
  return x->end < y->end ? -1 : x->end > y->end;
}

// Finds each leaf's tensor and where its data lies; adds to `problems` what is wrong.
static void find_tensors(const json_t* header, const leaf_list_t* leaves, uint64_t data_length, range_t* ranges,
                         text_t* problems) {
  text_t name = {0};
  size_t found = json_object_get(header, METADATA) ? 1 : 0;
  for (size_t i = 0; i < leaves->count; ++i) {
    const fixstep_leaf_t* leaf = &leaves->items[i];
    add_name(&name, leaf->path);
    const json_t* tensor = name.failed ? NULL : json_object_get(header, name.data);
    const json_t* offsets = json_object_get(tensor, "data_offsets");
    found += tensor != NULL;
    if (!tensor || !is_stored_as(tensor, leaf)) {
      fx_text_add(problems, "\n  %s: expected ", name.data ? name.data : "");
      add_stored_type(problems, leaf);
      fx_text_add(problems, tensor ? ", got another type or shape" : ", missing");
    } else if (!fx_json_count(json_array_get(offsets, 0), data_length, &ranges[i].start) ||
               !fx_json_count(json_array_get(offsets, 1), data_length, &ranges[i].end) ||
               ranges[i].end < ranges[i].start || ranges[i].end - ranges[i].start != leaf->byte_length) {
      fx_text_add(problems, "\n  %s: its data does not lie within the file", name.data);
    }
  }
  if (json_object_size(header) != found) fx_text_add(problems, "\n  there are others beside them");
  problems->failed = problems->failed || name.failed;
  fx_text_release(&name);
}

static bool cover(const range_t* ranges, size_t count, uint64_t data_length, range_t* sorted) {
  if (count) memcpy(sorted, ranges, count * sizeof(*ranges));
  qsort(sorted, count, sizeof(*sorted), compare_ranges);
  uint64_t end = 0;
  for (size_t i = 0; i < count; ++i) {
    if (sorted[i].start != end) return false;
    end = sorted[i].end;
  }
  return end == data_length;
}

static status_t check_bools(const leaf_list_t* leaves, const void* const* data, status_t status,
                            fixstep_error_t** out_error) {
  for (size_t i = 0; i < leaves->count; ++i) {
    const fixstep_leaf_t* leaf = &leaves->items[i];
    for (size_t j = 0; leaf->dtype == FIXSTEP_BOOL && j < leaf->byte_length; ++j) {
      if (((const uint8_t*)data[i])[j] > 1) {
        return fx_fail(out_error, status, "%s: a bool is neither 0 nor 1", leaf->path);
      }
    }
  }
  return FIXSTEP_OK;
}

status_t fx_safetensors_decode(const uint8_t* data, size_t byte_length, const leaf_list_t* leaves, status_t status,
                               const void** out_data, fixstep_error_t** out_error) {
  json_t* header;
  status_t result = fx_safetensors_header(data, byte_length, status, &header, out_error);
  if (result != FIXSTEP_OK) return result;
  const uint8_t* start = data + 8 + load_u64(data);
  uint64_t data_length = byte_length - (uint64_t)(start - data);
  range_t* ranges = fx_allocate_zeroed(leaves->count, 2 * sizeof(*ranges));
  text_t problems = {0};
  if (ranges) find_tensors(header, leaves, data_length, ranges, &problems);
  if (!ranges || problems.failed) {
    result = fx_fail_memory(out_error);
  } else if (problems.length) {
    result = fx_fail(out_error, status, "the tensors are not the leaves of the template:%s", problems.data);
  } else if (!cover(ranges, leaves->count, data_length, ranges + leaves->count)) {
    result = fx_fail(out_error, status, "not a whole safetensors file: its tensors do not cover its data");
  }
  for (size_t i = 0; i < leaves->count && result == FIXSTEP_OK; ++i) out_data[i] = start + ranges[i].start;
  if (result == FIXSTEP_OK) result = check_bools(leaves, out_data, status, out_error);
  fx_text_release(&problems);
  free(ranges);
  json_decref(header);
  return result;
}

// The order in which the safetensors library lays out tensors: types first, the last of these at the start, then names.
static int type_order(const char* tensor_type) {
  static const char* const types[] = {"BOOL", "U8",  "I8",  "F8_E5M2", "F8_E4M3", "I16", "U16", "F16",
                                      "BF16", "I32", "U32", "F32",     "F64",     "I64", "U64"};
  int order = 0;
  while (order < (int)(sizeof(types) / sizeof(types[0])) && strcmp(types[order], tensor_type) != 0) ++order;
  return -order;
}

typedef struct tensor_t {
  int order;
  char* name;
  size_t index;
} tensor_t;

static int compare_tensors(const void* a, const void* b) {
  const tensor_t *x = a, *y = b;
  if (x->order != y->order) return x->order < y->order ? -1 : 1;
  return strcmp(x->name, y->name);
}

static void add_tensors(const leaf_list_t* leaves, const tensor_t* tensors, text_t* header) {
  uint64_t offset = 0;
  for (size_t i = 0; i < leaves->count; ++i) {
    const fixstep_leaf_t* leaf = &leaves->items[tensors[i].index];
    const dtype_info_t* info = fx_dtype_info(leaf->dtype);
    fx_text_add(header, ",");
    fx_json_quote(header, tensors[i].name);
    fx_text_add(header, ":{\"dtype\":\"%s\",\"shape\":[", info->tensor_type);
    for (size_t j = 0; j < leaf->rank; ++j) fx_text_add(header, "%s%" PRId64, j ? "," : "", leaf->shape[j]);
    if (info->parts > 1) fx_text_add(header, "%s%zu", leaf->rank ? "," : "", info->parts);
    fx_text_add(header, "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", offset, offset + leaf->byte_length);
    offset += leaf->byte_length;
  }
}

status_t fx_safetensors_encode_header(const leaf_list_t* leaves, const char* metadata, text_t* out_header,
                                      size_t** out_order, fixstep_error_t** out_error) {
  tensor_t* tensors = fx_allocate_zeroed(leaves->count, sizeof(*tensors));
  *out_order = fx_allocate_zeroed(leaves->count, sizeof(**out_order));
  text_t name = {0};
  bool failed = !tensors || !*out_order;
  for (size_t i = 0; i < leaves->count && !failed; ++i) {
    add_name(&name, leaves->items[i].path);
    tensors[i] = (tensor_t){type_order(fx_dtype_info(leaves->items[i].dtype)->tensor_type),
                            name.failed ? NULL : fx_copy_text(name.data, name.length), i};
    failed = !tensors[i].name;
  }
  static const uint8_t no_length[8] = {0};
  fx_text_bytes(out_header, no_length, sizeof(no_length));
  fx_text_add(out_header, "{\"" METADATA "\":{\"fixstep\":");
  fx_json_quote(out_header, metadata);
  fx_text_add(out_header, "}");
  if (!failed) {
    qsort(tensors, leaves->count, sizeof(*tensors), compare_tensors);
    for (size_t i = 0; i < leaves->count; ++i) (*out_order)[i] = tensors[i].index;
    add_tensors(leaves, tensors, out_header);
  }
  fx_text_add(out_header, "}");
  while (out_header->length % 8 && !out_header->failed) fx_text_add(out_header, " ");
  for (size_t i = 0; i < 8 && !out_header->failed; ++i) {
    out_header->data[i] = (char)((uint64_t)(out_header->length - 8) >> (8 * i) & 0xFF);
  }
  failed = failed || out_header->failed;
  for (size_t i = 0; tensors && i < leaves->count; ++i) free(tensors[i].name);
  free(tensors);
  fx_text_release(&name);
  if (!failed) return FIXSTEP_OK;
  free(*out_order);
  *out_order = NULL;
  return fx_fail_memory(out_error);
}
