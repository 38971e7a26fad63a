// Arrays in numpy's .npy format.

#ifndef FIXSTEP_SRC_NPY_H_
#define FIXSTEP_SRC_NPY_H_

#include "leaf.h"

typedef struct npy_t {
  fixstep_dtype_t dtype;    // invalid for the raw bytes that numpy makes of bfloat16 and float8
  size_t item_byte_length;  // of one element
  size_t rank;
  int64_t shape[MAX_RANK];
  const uint8_t* data;  // in the file, of any alignment
  size_t byte_length;
} npy_t;

// Reads the header of an array and checks that exactly its data follows.
status_t fx_npy_parse(const uint8_t* file, size_t byte_length, npy_t* out_array, fixstep_error_t** out_error);

#endif  // FIXSTEP_SRC_NPY_H_
