#include "sizes.h"

#include <inttypes.h>
#include <stdlib.h>

#define MAX_SIZES 1024

static status_t fail_sizes(fixstep_error_t** out_error, const char* what) {
  return fx_fail(out_error, FIXSTEP_ARTIFACT_ERROR, "/sizes: expected %s", what);
}

static bool read_number(const json_t* json, const char* key, int64_t* out_number) {
  uint64_t number;
  bool good = fx_json_count(json_object_get(json, key), INT32_MAX, &number);
  *out_number = good ? (int64_t)number : 0;
  return good;
}

status_t fx_sizes_parse(const json_t* json, sizes_t* out_sizes, fixstep_error_t** out_error) {
  *out_sizes = (sizes_t){.symbol = json_string_value(json_object_get(json, "symbol"))};
  sizes_t* sizes = out_sizes;
  const json_t* compiled = json_object_get(json, "compiled");
  size_t count = json_array_size(compiled);
  if (!sizes->symbol || !read_number(json, "low", &sizes->low) || !read_number(json, "high", &sizes->high) ||
      !read_number(json, "multiple", &sizes->multiple) || sizes->low < 1 || sizes->low > sizes->high ||
      sizes->multiple < 1 || sizes->multiple > sizes->high) {
    return fail_sizes(out_error, "symbol, 1 <= low <= high and 1 <= multiple <= high");
  }
  if (count < 1 || count > MAX_SIZES) return fail_sizes(out_error, "sizes that are compiled");
  sizes->compiled = fx_allocate_zeroed(count, sizeof(*sizes->compiled));
  if (!sizes->compiled) return fx_fail_memory(out_error);
  for (; sizes->compiled_count < count; ++sizes->compiled_count) {
    size_t i = sizes->compiled_count;
    uint64_t size;
    bool good = fx_json_count(json_array_get(compiled, i), INT32_MAX, &size);
    if (!good || (i ? (int64_t)size >= sizes->compiled[i - 1] : (int64_t)size != sizes->high) ||
        (int64_t)size < sizes->low) {
      return fail_sizes(out_error, "falling compiled sizes from high, none below low");
    }
    sizes->compiled[i] = (int64_t)size;
  }
  sizes->axes = json_object_get(json, "axes");
  return json_is_object(sizes->axes) ? FIXSTEP_OK : fail_sizes(out_error, "axes");
}

void fx_sizes_release(sizes_t* sizes) {
  free(sizes->compiled);
  *sizes = (sizes_t){0};
}

static const json_t* axes_of(const sizes_t* sizes, const char* role, const char* path) {
  return json_object_get(json_object_get(sizes->axes, role), path);
}

status_t fx_sizes_check(const sizes_t* sizes, const char* role, const leaf_list_t* leaves,
                        fixstep_error_t** out_error) {
  json_t* of_role = json_object_get(sizes->axes, role);
  const char* path;
  const json_t* axes;
  const json_t* axis;
  size_t index;
  if (!json_is_object(of_role)) return fail_sizes(out_error, "the axes of each role");
  json_object_foreach(of_role, path, axes) {
    const fixstep_leaf_t* leaf = leaves ? fx_leaf_list_find(leaves, path) : NULL;
    uint64_t number;
    if (!leaf || !json_array_size(axes)) return fail_sizes(out_error, "axes of leaves that there are");
    json_array_foreach(axes, index, axis) {
      if (!fx_json_count(axis, MAX_RANK, &number) || number >= leaf->rank || leaf->shape[number] != sizes->high) {
        return fx_fail(out_error, FIXSTEP_ARTIFACT_ERROR, "/sizes/axes/%s: '%s' has no such axis of %" PRId64, role,
                       path, sizes->high);
      }
    }
  }
  return FIXSTEP_OK;
}

// The tensor of a leaf, also where tensors are bound by position; NULL where there is none.
static const fixstep_tensor_t* tensor_of(const leaf_list_t* leaves, const fixstep_tensor_t* tensors, size_t count,
                                         const char* path) {
  const fixstep_leaf_t* leaf = fx_leaf_list_find(leaves, path);
  size_t index = leaf ? (size_t)(leaf - leaves->items) : 0;
  if (count && !tensors[0].path) return leaf && index < count ? &tensors[index] : NULL;
  for (size_t i = 0; i < count; ++i) {
    if (tensors[i].path && strcmp(tensors[i].path, path) == 0) return &tensors[i];
  }
  return NULL;
}

status_t fx_sizes_of(const sizes_t* sizes, const char* role, const leaf_list_t* leaves, const fixstep_tensor_t* tensors,
                     size_t count, int64_t* out_size, text_t* out_where, fixstep_error_t** out_error) {
  json_t* of_role = json_object_get(sizes->axes, role);
  const char* path;
  const char* source = "";
  const json_t* axes;
  int64_t size = sizes->high;  // where no tensor tells it, the check says what is missing
  json_object_foreach(of_role, path, axes) {
    const fixstep_tensor_t* tensor = tensor_of(leaves, tensors, tensors ? count : 0, path);
    uint64_t axis;
    if (!tensor || !tensor->shape || !fx_json_count(json_array_get(axes, 0), MAX_RANK, &axis)) continue;
    if (axis >= tensor->rank) continue;
    size = tensor->shape[axis];
    source = path;
    break;
  }
  out_where->length = 0;
  fx_text_add(out_where, "%s of ", sizes->symbol);
  fx_text_add_path(out_where, source, role);
  *out_size = size;
  if (out_where->failed) return fx_fail_memory(out_error);
  if (size >= sizes->low && size <= sizes->high && size % sizes->multiple == 0) return FIXSTEP_OK;
  text_t text = {0};
  fx_text_add(&text, "the %s %s %" PRId64 " examples (%s), expected %" PRId64 " to %" PRId64, role,
              strcmp(role, "inputs") == 0 ? "have" : "has", size, out_where->data, sizes->low, sizes->high);
  if (sizes->multiple > 1) fx_text_add(&text, ", a multiple of %" PRId64, sizes->multiple);
  fx_text_add(&text, ": split it, or compile for a larger range. Nothing was run.");
  return fx_fail_with_text(out_error, FIXSTEP_TEMPLATE_ERROR, &text);
}

size_t fx_sizes_padded(const sizes_t* sizes, int64_t size) {
  size_t index = sizes->compiled_count - 1;
  while (index && sizes->compiled[index] < size) --index;
  return index;
}

status_t fx_sizes_leaves(const sizes_t* sizes, const char* role, const leaf_list_t* leaves, int64_t size,
                         leaf_list_t* out_leaves, fixstep_error_t** out_error) {
  size_t dimension_count = 0, index;
  for (size_t i = 0; i < leaves->count; ++i) dimension_count += leaves->items[i].rank;
  leaf_list_t made = {fx_allocate_zeroed(leaves->count, sizeof(fixstep_leaf_t)), leaves->count,
                      fx_allocate_zeroed(dimension_count, sizeof(int64_t)),
                      fx_allocate_zeroed(leaves->count, sizeof(size_t))};
  *out_leaves = made;
  if (!made.items || !made.dimensions || !made.sorted) {
    fx_leaf_list_release(out_leaves);
    return fx_fail_memory(out_error);
  }
  int64_t* dimensions = made.dimensions;
  for (size_t i = 0; i < leaves->count; ++i) {
    fixstep_leaf_t* leaf = &made.items[i];
    const json_t* axis;
    *leaf = leaves->items[i];
    if (leaf->rank) memcpy(dimensions, leaf->shape, leaf->rank * sizeof(*dimensions));
    json_array_foreach(axes_of(sizes, role, leaf->path), index, axis) dimensions[json_integer_value(axis)] = size;
    leaf->shape = dimensions;
    // No size is larger than that of the leaves, so this is no overflow.
    leaf->byte_length = fixstep_dtype_byte_length(leaf->dtype);
    for (size_t j = 0; j < leaf->rank; ++j) leaf->byte_length *= (size_t)dimensions[j];
    made.sorted[i] = leaves->sorted[i];
    dimensions += leaf->rank;
  }
  return FIXSTEP_OK;
}

// The bytes from one element of an axis to the next.
static size_t stride_of(const fixstep_leaf_t* leaf, size_t axis) {
  size_t bytes = fixstep_dtype_byte_length(leaf->dtype);
  for (size_t i = axis + 1; i < leaf->rank; ++i) bytes *= (size_t)leaf->shape[i];
  return bytes;
}

static void copy_axis(const fixstep_leaf_t* to, uint8_t* to_data, const fixstep_leaf_t* from, const uint8_t* from_data,
                      size_t axis) {
  bool same = true;
  for (size_t i = axis; i < to->rank; ++i) same = same && to->shape[i] == from->shape[i];
  if (same) {
    size_t bytes = axis < to->rank ? (size_t)to->shape[axis] * stride_of(to, axis) : stride_of(to, axis);
    if (bytes) memcpy(to_data, from_data, bytes);
    return;
  }
  int64_t count = to->shape[axis] < from->shape[axis] ? to->shape[axis] : from->shape[axis];
  for (int64_t i = 0; i < count; ++i) {
    copy_axis(to, to_data + (size_t)i * stride_of(to, axis), from, from_data + (size_t)i * stride_of(from, axis),
              axis + 1);
  }
}

void fx_sizes_copy(const fixstep_leaf_t* to, void* to_data, const fixstep_leaf_t* from, const void* from_data) {
  copy_axis(to, to_data, from, from_data, 0);
}
