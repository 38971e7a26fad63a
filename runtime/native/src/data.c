// Arrays with one row per example: .npz, .npy and raw files.

#include <minizip/unzip.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "file.h"
#include "npy.h"
#include "order.h"

// Deflate makes at most 1032 bytes of one, so a larger claim is a lie.
#define MAX_RATIO 1032

typedef struct column_t {
  fixstep_leaf_t leaf;    // its path and shape are of its own memory
  int64_t* tensor_shape;  // of the batch that was asked for last
  uint8_t* picked;        // its rows, where the examples are shuffled
  size_t row_byte_length;
  uint8_t* memory;
  const uint8_t* rows;
} column_t;

struct fixstep_data_t {
  column_t* columns;
  fixstep_tensor_t* tensors;  // of the batch that was asked for last
  size_t count;
  size_t batch_size;
  bool keep_last;
  size_t examples;
  size_t* order;  // [examples], or NULL for that of the file
};

static status_t fail_at(fixstep_error_t** out_error, const char* path, const char* name, status_t status,
                        fixstep_error_t* inner) {
  text_t before = {0};
  fx_text_add(&before, "%s: %s%s", path, name, *name ? ": " : "");
  status = fx_fail_prefixed(out_error, status, inner, before.data ? before.data : "", "");
  fx_text_release(&before);
  return status;
}

// Whether an array holds rows of a leaf.
static bool has_rows_of(const npy_t* array, const fixstep_leaf_t* leaf) {
  bool same = array->dtype == leaf->dtype || (array->dtype == FIXSTEP_INVALID_DTYPE &&
                                              array->item_byte_length == fixstep_dtype_byte_length(leaf->dtype));
  if (!same || array->rank != leaf->rank) return false;
  for (size_t i = 1; i < leaf->rank; ++i) {
    if (array->shape[i] != leaf->shape[i]) return false;
  }
  return true;
}

// Takes an array for a leaf; on success the column owns `memory`.
static status_t take_array(fixstep_data_t* data, size_t index, uint8_t* memory, const npy_t* array,
                           fixstep_error_t** out_error) {
  column_t* column = &data->columns[index];
  const fixstep_leaf_t* leaf = &column->leaf;
  if (!has_rows_of(array, leaf)) {
    text_t text = {0};
    fx_text_add(&text, "expected rows of ");
    fx_text_add_type(&text, leaf->dtype, leaf->rank, leaf->shape);
    fx_text_add(&text, ", got ");
    fx_text_add_type(&text, array->dtype, array->rank, array->shape);
    return fx_fail_with_text(out_error, FIXSTEP_DATA_ERROR, &text);
  }
  if (column->memory) return fx_fail(out_error, FIXSTEP_DATA_ERROR, "occurs twice");
  column->memory = memory;
  column->rows = array->data;
  size_t examples = (size_t)array->shape[0];
  if (data->examples != SIZE_MAX && data->examples != examples) {
    return fx_fail(out_error, FIXSTEP_DATA_ERROR, "has %zu examples, and the arrays before it have %zu", examples,
                   data->examples);
  }
  data->examples = examples;
  return FIXSTEP_OK;
}

// Parses and takes an array in memory, which it frees unless a column keeps it.
static status_t take_npy(fixstep_data_t* data, size_t index, uint8_t* memory, size_t byte_length,
                         fixstep_error_t** out_error) {
  npy_t array;
  status_t status = fx_npy_parse(memory, byte_length, &array, out_error);
  if (status == FIXSTEP_OK) status = take_array(data, index, memory, &array, out_error);
  if (data->columns[index].memory != memory) free(memory);
  return status;
}

static size_t column_of(const fixstep_data_t* data, const char* path) {
  size_t index = 0;
  while (index < data->count && strcmp(data->columns[index].leaf.path, path) != 0) ++index;
  return index;
}

static status_t read_member(unzFile zip, const unz_file_info64* info, uint64_t file_byte_length, uint8_t** out_memory,
                            fixstep_error_t** out_error) {
  uint64_t length = info->uncompressed_size;
  bool fits = info->compressed_size <= file_byte_length && length / MAX_RATIO <= info->compressed_size;
  if (length > SIZE_MAX / 2 || !fits) {
    return fx_fail(out_error, FIXSTEP_DATA_ERROR, "damaged: %llu bytes out of %llu", (unsigned long long)length,
                   (unsigned long long)info->compressed_size);
  }
  if (unzOpenCurrentFile(zip) != UNZ_OK) {
    return fx_fail(out_error, FIXSTEP_DATA_ERROR, "damaged, encrypted or compressed in an unknown way");
  }
  uint8_t* memory = fx_allocate_aligned((size_t)length);
  size_t filled = 0;
  int count = 1;
  while (memory && filled < length && count > 0) {
    size_t rest = (size_t)length - filled;
    count = unzReadCurrentFile(zip, memory + filled, rest > (1u << 30) ? 1u << 30 : (unsigned)rest);
    if (count > 0) filled += (size_t)count;
  }
  int closed = unzCloseCurrentFile(zip);  // compares the checksum
  if (memory && filled == length && closed == UNZ_OK) {
    *out_memory = memory;
    return FIXSTEP_OK;
  }
  free(memory);
  return memory ? fx_fail(out_error, FIXSTEP_DATA_ERROR, "damaged; write it again with numpy.savez")
                : fx_fail_memory(out_error);
}

static status_t take_member(fixstep_data_t* data, unzFile zip, uint64_t file_byte_length, const char* path,
                            fixstep_error_t** out_error) {
  char name[MAX_PATH_LENGTH + 8];
  unz_file_info64 info;
  if (unzGetCurrentFileInfo64(zip, &info, name, sizeof(name), NULL, 0, NULL, 0) != UNZ_OK ||
      info.size_filename >= sizeof(name)) {
    return fx_fail(out_error, FIXSTEP_DATA_ERROR, "%s: damaged; write it again with numpy.savez", path);
  }
  size_t length = strlen(name);
  if (length < 4 || strcmp(name + length - 4, ".npy") != 0) {
    return fx_fail(out_error, FIXSTEP_DATA_ERROR,
                   "%s: holds '%.80s', which is no array; write the file with numpy.savez", path, name);
  }
  name[length - 4] = '\0';
  size_t index = column_of(data, name);
  if (index == data->count) {
    return fx_fail(out_error, FIXSTEP_DATA_ERROR, "%s: %.80s: unexpected; the leaves do not have it", path, name);
  }
  fixstep_error_t* inner = NULL;
  uint8_t* memory = NULL;
  status_t status = read_member(zip, &info, file_byte_length, &memory, &inner);
  if (status == FIXSTEP_OK) status = take_npy(data, index, memory, (size_t)info.uncompressed_size, &inner);
  return status == FIXSTEP_OK ? status : fail_at(out_error, path, name, status, inner);
}

static status_t open_npz(fixstep_data_t* data, const char* path, fixstep_error_t** out_error) {
  struct stat file;
  unzFile zip = stat(path, &file) == 0 && S_ISREG(file.st_mode) ? unzOpen64(path) : NULL;
  if (!zip) {
    return fx_fail(out_error, FIXSTEP_DATA_ERROR, "%s: absent, damaged, or not a .npz file; write it with numpy.savez",
                   path);
  }
  status_t status = FIXSTEP_OK;
  int code = unzGoToFirstFile(zip);
  for (; code == UNZ_OK && status == FIXSTEP_OK; code = unzGoToNextFile(zip)) {
    status = take_member(data, zip, (uint64_t)file.st_size, path, out_error);
  }
  if (status == FIXSTEP_OK && code != UNZ_END_OF_LIST_OF_FILE) {
    status =
        fx_fail(out_error, FIXSTEP_DATA_ERROR, "%s: its directory is damaged; write it again with numpy.savez", path);
  }
  unzClose(zip);
  return status;
}

// A file of one leaf: an array of numpy's, or its elements alone.
static status_t open_single(fixstep_data_t* data, const char* path, bool npy, fixstep_error_t** out_error) {
  if (data->count != 1) {
    return fx_fail(out_error, FIXSTEP_DATA_ERROR, "%s: holds one array, and %zu are needed; use a .npz file", path,
                   data->count);
  }
  uint8_t* memory = NULL;
  size_t byte_length;
  status_t status = fx_file_read(path, INT64_MAX, FIXSTEP_DATA_ERROR, &memory, &byte_length, out_error);
  if (status != FIXSTEP_OK) return status;
  fixstep_error_t* inner = NULL;
  if (npy) {
    status = take_npy(data, 0, memory, byte_length, &inner);
  } else {
    const fixstep_leaf_t* leaf = &data->columns[0].leaf;
    size_t row = leaf->byte_length / (size_t)leaf->shape[0];
    npy_t array = {leaf->dtype, fixstep_dtype_byte_length(leaf->dtype), leaf->rank, {0}, memory, byte_length};
    memcpy(array.shape, leaf->shape, leaf->rank * sizeof(int64_t));
    array.shape[0] = row ? (int64_t)(byte_length / row) : 0;
    if (!row || byte_length % row) {
      status = fx_fail(&inner, FIXSTEP_DATA_ERROR, "%zu bytes, which are no rows of %zu", byte_length, row);
    } else {
      status = take_array(data, 0, memory, &array, &inner);
    }
    if (data->columns[0].memory != memory) free(memory);
  }
  return status == FIXSTEP_OK ? status : fail_at(out_error, path, "", status, inner);
}

static status_t copy_leaf(const fixstep_leaf_t* leaf, size_t batch_size, column_t* column,
                          fixstep_error_t** out_error) {
  fixstep_leaf_t* out = &column->leaf;
  if (!leaf->rank || leaf->rank > MAX_RANK || leaf->shape[0] < 1 || (size_t)leaf->shape[0] != batch_size) {
    return fx_fail(out_error, FIXSTEP_DATA_ERROR,
                   "%s: its first dimension is not the batch of the others; bind it by hand", leaf->path);
  }
  int64_t* shape = fx_allocate_zeroed(leaf->rank, sizeof(*shape));
  if (shape) memcpy(shape, leaf->shape, leaf->rank * sizeof(*shape));
  *out = *leaf;
  out->key = NULL;
  out->shape = shape;
  out->path = fx_copy_text(leaf->path, strlen(leaf->path));
  column->tensor_shape = fx_allocate_zeroed(leaf->rank, sizeof(*shape));
  if (column->tensor_shape) memcpy(column->tensor_shape, leaf->shape, leaf->rank * sizeof(*shape));
  column->row_byte_length = leaf->byte_length / batch_size;
  return shape && out->path && column->tensor_shape ? FIXSTEP_OK : fx_fail_memory(out_error);
}

static bool has_end(const char* text, const char* end) {
  size_t length = strlen(text), end_length = strlen(end);
  return length >= end_length && strcmp(text + length - end_length, end) == 0;
}

// Room for the columns of leaves.
static status_t make_columns(fixstep_data_t* data, fixstep_leaves_t leaves, fixstep_error_t** out_error) {
  data->columns = fx_allocate_zeroed(leaves.count, sizeof(*data->columns));
  data->tensors = fx_allocate_zeroed(leaves.count, sizeof(*data->tensors));
  status_t status = data->columns && data->tensors ? FIXSTEP_OK : fx_fail_memory(out_error);
  size_t whole = (size_t)leaves.data[0].shape[0];
  for (; data->count < leaves.count && status == FIXSTEP_OK; ++data->count) {
    status = copy_leaf(&leaves.data[data->count], whole, &data->columns[data->count], out_error);
  }
  return status;
}

// Whether every leaf was found, and the examples make a batch.
static status_t check_columns(const fixstep_data_t* data, const char* path, fixstep_error_t** out_error) {
  for (size_t i = 0; i < data->count; ++i) {
    if (!data->columns[i].memory) {
      return fx_fail(out_error, FIXSTEP_DATA_ERROR, "%s: %s: missing", path, data->columns[i].leaf.path);
    }
  }
  if (data->examples >= (data->keep_last ? 1 : data->batch_size)) return FIXSTEP_OK;
  return fx_fail(out_error, FIXSTEP_DATA_ERROR, "%s: %zu examples do not fill one batch of %zu: add data", path,
                 data->examples, data->batch_size);
}

fixstep_status_t fixstep_data_open_batches(const char* path, fixstep_leaves_t leaves, size_t batch_size, bool keep_last,
                                           fixstep_data_t** out_data, fixstep_error_t** out_error) {
  *out_data = NULL;
  if (out_error) *out_error = NULL;
  if (!leaves.count || !leaves.data[0].rank || !batch_size) {
    return fx_fail(out_error, FIXSTEP_DATA_ERROR, "%s: there are no leaves with a batch to read", path);
  }
  fixstep_data_t* data = fx_allocate_zeroed(1, sizeof(*data));
  if (!data) return fx_fail_memory(out_error);
  data->batch_size = batch_size;
  data->keep_last = keep_last;
  data->examples = SIZE_MAX;
  status_t status = make_columns(data, leaves, out_error);
  if (status == FIXSTEP_OK) {
    status = has_end(path, ".npz") ? open_npz(data, path, out_error)
                                   : open_single(data, path, has_end(path, ".npy"), out_error);
  }
  if (status == FIXSTEP_OK) status = check_columns(data, path, out_error);
  if (status == FIXSTEP_OK) {
    *out_data = data;
  } else {
    fixstep_data_release(data);
  }
  return status;
}

fixstep_status_t fixstep_data_open(const char* path, fixstep_leaves_t leaves, fixstep_data_t** out_data,
                                   fixstep_error_t** out_error) {
  size_t batch_size = leaves.count && leaves.data[0].rank ? (size_t)leaves.data[0].shape[0] : 0;
  return fixstep_data_open_batches(path, leaves, batch_size, /*keep_last=*/false, out_data, out_error);
}

void fixstep_data_release(fixstep_data_t* data) {
  if (!data) return;
  for (size_t i = 0; i < data->count; ++i) {
    free((void*)data->columns[i].leaf.path);
    free((void*)data->columns[i].leaf.shape);
    free(data->columns[i].tensor_shape);
    free(data->columns[i].picked);
    free(data->columns[i].memory);
  }
  free(data->columns);
  free(data->tensors);
  free(data->order);
  free(data);
}

fixstep_status_t fixstep_data_shuffle(fixstep_data_t* data, uint64_t seed, uint64_t epoch,
                                      fixstep_error_t** out_error) {
  if (out_error) *out_error = NULL;
  size_t rows = data->batch_size < data->examples ? data->batch_size : data->examples;
  for (size_t i = 0; i < data->count; ++i) {
    column_t* column = &data->columns[i];
    // No more than the file's own rows, so this is no overflow.
    if (!column->picked) column->picked = fx_allocate_zeroed(rows, column->row_byte_length);
    if (!column->picked) return fx_fail_memory(out_error);
  }
  size_t* order = fx_allocate_zeroed(data->examples, sizeof(*order));
  if (!order) return fx_fail_memory(out_error);
  status_t status = fx_order_shuffle(seed, epoch, data->examples, order, out_error);
  if (status == FIXSTEP_OK) {
    free(data->order);
    data->order = order;
  } else {
    free(order);
  }
  return status;
}

size_t fixstep_data_example_count(const fixstep_data_t* data) { return data->examples; }

size_t fixstep_data_batch_size(const fixstep_data_t* data) { return data->batch_size; }

size_t fixstep_data_batch_count(const fixstep_data_t* data) {
  size_t short_ones = data->keep_last && data->examples % data->batch_size;
  return data->examples / data->batch_size + short_ones;
}

size_t fixstep_data_left_out(const fixstep_data_t* data) {
  return data->keep_last ? 0 : data->examples % data->batch_size;
}

const fixstep_tensor_t* fixstep_data_batch(fixstep_data_t* data, size_t index) {
  if (index >= fixstep_data_batch_count(data)) return NULL;
  size_t first = index * data->batch_size, rest = data->examples - first;
  for (size_t i = 0; i < data->count; ++i) {
    const column_t* column = &data->columns[i];
    const fixstep_leaf_t* leaf = &column->leaf;
    size_t count = rest < data->batch_size ? rest : data->batch_size, row = column->row_byte_length;
    for (size_t j = 0; data->order && row && j < count; ++j) {
      memcpy(column->picked + j * row, column->rows + data->order[first + j] * row, row);
    }
    column->tensor_shape[0] = (int64_t)count;
    data->tensors[i] = (fixstep_tensor_t){leaf->path, leaf->dtype, leaf->rank, column->tensor_shape,
                                          data->order ? column->picked : column->rows + first * row};
  }
  return data->tensors;
}
