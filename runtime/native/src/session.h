// The session: one artifact opened on one device, with its state held there.
//
// The state and the accumulators have two sets of buffers. A step reads one and writes the other, and only a step that
// succeeded swaps them: a failed step leaves the state as it was, and the last step can be taken back.

#ifndef FIXSTEP_SRC_SESSION_H_
#define FIXSTEP_SRC_SESSION_H_

#include "artifact.h"
#include "fixstep_backend.h"

// Buffers for a list of leaves. An entry may be NULL while a set is being made.
typedef struct buffers_t {
  const leaf_list_t* leaves;
  fixstep_buffer_t** items;  // [leaves->count]
} buffers_t;

// Two sets of buffers for the same leaves.
typedef struct pair_t {
  buffers_t current, other;
} pair_t;

// One function at one of the sizes that a batch is padded to.
typedef struct variant_t {
  bool is_ready;
  leaf_list_t taken, results;
  buffers_t buffers;  // of the last batch
} variant_t;

struct fixstep_session_t {
  const fixstep_artifact_t* artifact;
  const fixstep_backend_t* backend;
  fixstep_device_t* device;
  const target_t* target;
  text_t passed_over;
  uint64_t steps;
  bool can_roll_back;
  pair_t state;
  pair_t accumulators[FUNCTION_COUNT];  // of step and evaluate; the others have none
  buffers_t batch, inputs;
  buffers_t results[FUNCTION_COUNT];     // of the last call; without items before it
  int64_t result_sizes[FUNCTION_COUNT];  // the size of the batch that they are of, where it may be any
  variant_t* variants;                   // [FUNCTION_COUNT][sizes.compiled_count]
  buffers_t size;                        // the real size as an argument
  // Room for one call: each [leaves of the largest function].
  fixstep_buffer_t** arguments;
  const fixstep_leaf_t** argument_leaves;
  const fixstep_tensor_t** ordered;
};

// A set of buffers. `data`: [leaves->count], or NULL for zeros.
status_t fx_buffers_make(fixstep_session_t* session, const leaf_list_t* leaves, const void* const* data,
                         buffers_t* out_buffers, fixstep_error_t** out_error);
void fx_buffers_release(fixstep_session_t* session, buffers_t* buffers);
// Puts a new set in the place of an old one, which is released.
void fx_buffers_replace(fixstep_session_t* session, buffers_t* buffers, buffers_t* replacement);

void fx_pair_swap(pair_t* pair);
// The leaves of a function's results at the largest size, and their role among the axes.
const leaf_list_t* fx_session_results(const fixstep_session_t* session, int function);
const char* fx_session_results_role(int function);

// The number of a function that the artifact has: `init`, `step`, `evaluate`, `predict`.
status_t fx_session_function(const fixstep_session_t* session, const char* name, int* out_function,
                             fixstep_error_t** out_error);
// Calls a function, by its compiled name, with sets of buffers, the last `storage_count` of which are storage for
// results. The results after those replace `results[function]`, or are none.
status_t fx_session_call(fixstep_session_t* session, int function, const char* name, const buffers_t* const* sets,
                         size_t set_count, size_t storage_count, const leaf_list_t* results,
                         fixstep_error_t** out_error);
// Opens the device of the first target, best rank first, that runs here and whose code loads.
status_t fx_session_choose_target(fixstep_session_t* session, const fixstep_session_options_t* options,
                                  fixstep_error_t** out_error);
// Reads a buffer to memory of its leaf's length.
status_t fx_session_read(fixstep_session_t* session, const buffers_t* buffers, const char* path, const char* what,
                         void* data, size_t byte_length, fixstep_error_t** out_error);

#endif  // FIXSTEP_SRC_SESSION_H_
