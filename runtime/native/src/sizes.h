// Batches of any size: which sizes an artifact takes, and how a batch is padded to one that it was compiled for.

#ifndef FIXSTEP_SRC_SIZES_H_
#define FIXSTEP_SRC_SIZES_H_

#include "leaf.h"

// The sizes that a batch may have; without `compiled`, one alone.
typedef struct sizes_t {
  const char* symbol;  // the name of the dimension, `b`
  int64_t low, high, multiple;
  int64_t* compiled;  // [compiled_count], the largest, `high`, first
  size_t compiled_count;
  const json_t* axes;  // by role and leaf path, the axes that have the batch's size
} sizes_t;

// Reads them from the manifest; its JSON has to outlive them.
status_t fx_sizes_parse(const json_t* json, sizes_t* out_sizes, fixstep_error_t** out_error);
void fx_sizes_release(sizes_t* sizes);
// Whether the axes of a role are axes of its leaves that have the largest size there.
status_t fx_sizes_check(const sizes_t* sizes, const char* role, const leaf_list_t* leaves, fixstep_error_t** out_error);
// The size of a batch, from the first of its tensors that has one; `role` is `batch` or `inputs`. `out_where` gets what
// messages call the dimension.
status_t fx_sizes_of(const sizes_t* sizes, const char* role, const leaf_list_t* leaves, const fixstep_tensor_t* tensors,
                     size_t count, int64_t* out_size, text_t* out_where, fixstep_error_t** out_error);
// The index of the smallest compiled size that holds a batch.
size_t fx_sizes_padded(const sizes_t* sizes, int64_t size);
// The leaves of a role at a size, given those at the largest. Release them with fx_leaf_list_release.
status_t fx_sizes_leaves(const sizes_t* sizes, const char* role, const leaf_list_t* leaves, int64_t size,
                         leaf_list_t* out_leaves, fixstep_error_t** out_error);
// Copies the elements that two shapes of one leaf have in common.
void fx_sizes_copy(const fixstep_leaf_t* to, void* to_data, const fixstep_leaf_t* from, const void* from_data);

#endif  // FIXSTEP_SRC_SIZES_H_
