// Leaves: their dtypes, how messages show them, and how JSON holds them.

#ifndef FIXSTEP_SRC_LEAF_H_
#define FIXSTEP_SRC_LEAF_H_

#include "json.h"

#define MAX_RANK 32
#define MAX_PATH_LENGTH 4096  // in characters

// What the formats call a dtype. `tensor_type` is the safetensors type; `parts` is 2 for complex numbers.
typedef struct dtype_info_t {
  const char* name;
  size_t byte_length;
  const char* tensor_type;
  size_t parts;
} dtype_info_t;

// The facts of a dtype; those of FIXSTEP_INVALID_DTYPE for a number that is none.
const dtype_info_t* fx_dtype_info(fixstep_dtype_t dtype);
fixstep_dtype_t fx_dtype_from_name(const char* name);

// Leaves that own their shapes. `sorted` lists them by path.
typedef struct leaf_list_t {
  fixstep_leaf_t* items;  // [count]; paths belong to the JSON value that they were read from
  size_t count;
  int64_t* dimensions;
  size_t* sorted;  // [count]
} leaf_list_t;

// Reads a list of leaves. The JSON value has to outlive it. `where` is what messages call the list.
status_t fx_leaf_list_parse(const json_t* json, const char* where, status_t status, leaf_list_t* out_list,
                            fixstep_error_t** out_error);
void fx_leaf_list_release(leaf_list_t* list);
// The leaf of a path, or NULL.
const fixstep_leaf_t* fx_leaf_list_find(const leaf_list_t* list, const char* path);
// Whether paths, dtypes and shapes are the same, in the same order; with `keys` the keys too.
bool fx_leaf_list_equal(const leaf_list_t* a, const leaf_list_t* b, bool keys);
bool fx_leaf_equal(const fixstep_leaf_t* a, const fixstep_leaf_t* b, bool keys);

// Adds `float32[16,8]`.
void fx_text_add_type(text_t* text, fixstep_dtype_t dtype, size_t rank, const int64_t* shape);
// The path as messages print it: the root of a tree that is one leaf has no path of its own.
void fx_text_add_path(text_t* text, const char* path, const char* what);
// Adds the leaf as the manifest and a checkpoint hold it.
void fx_text_add_leaf_json(text_t* text, const fixstep_leaf_t* leaf);

#endif  // FIXSTEP_SRC_LEAF_H_
