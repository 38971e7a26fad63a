// Which examples are in which batch: a pure function of a seed and the epoch, the same as Python's.

#ifndef FIXSTEP_SRC_ORDER_H_
#define FIXSTEP_SRC_ORDER_H_

#include "core.h"

// A permutation of `count` examples: the stable order of random 64-bit words, which are the raw stream of numpy's
// PCG64(SeedSequence([seed, epoch])). `out_order`: [count].
status_t fx_order_shuffle(uint64_t seed, uint64_t epoch, size_t count, size_t* out_order, fixstep_error_t** out_error);

#endif  // FIXSTEP_SRC_ORDER_H_
