// Elements of host memory as numbers.

#ifndef FIXSTEP_SRC_NUMBER_H_
#define FIXSTEP_SRC_NUMBER_H_

#include "core.h"

// The first element of an array as a double; false for a dtype that has no such number (complex, float8).
bool fx_number_of(fixstep_dtype_t dtype, const void* data, double* out_value);
// A 64-bit integer of its low and high 32 bits, in two's complement.
double fx_number_of_words(const void* data);

#endif  // FIXSTEP_SRC_NUMBER_H_
