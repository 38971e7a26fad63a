// The check that tensors fit a template, and the text that says how they do not.

#ifndef FIXSTEP_SRC_TEMPLATE_H_
#define FIXSTEP_SRC_TEMPLATE_H_

#include "leaf.h"

// Puts the tensors in the order of the leaves: exactly those leaves, each with exactly its dtype and shape.
// `what` is the word for them in messages: `batch`, `state`, `inputs`; `advice` the
// last line of one about shapes, in place of the usual one, or NULL. `out_ordered`: [leaves->count].
status_t fx_template_check(const leaf_list_t* leaves, const fixstep_tensor_t* tensors, size_t count, const char* what,
                           const char* advice, const fixstep_tensor_t** out_ordered, fixstep_error_t** out_error);

// How alike two texts are, 0 to 1, as Python's difflib.SequenceMatcher(None, a, b).ratio() measures it; 0 where it is
// less than `least`, and without memory.
double fx_similarity(const char* a, const char* b, double least);

#endif  // FIXSTEP_SRC_TEMPLATE_H_
