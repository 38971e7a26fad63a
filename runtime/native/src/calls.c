// The calls of a session's functions: check, upload, invoke, swap.

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "session.h"
#include "template.h"

// What a call is about: the batch on the device, and where it may have any size, that and the one it is padded to.
typedef struct taken_t {
  char name[32];  // of the compiled function
  const buffers_t* batch;
  const buffers_t* size;  // its size as an argument; without leaves where there is none
  const leaf_list_t* results;
  int64_t real_size;
} taken_t;

static const leaf_list_t no_leaves = {NULL, 0, NULL, NULL};
static const buffers_t no_buffers = {&no_leaves, NULL};

static const leaf_list_t* leaves_taken(const fixstep_session_t* session, int function) {
  return function == FUNCTION_PREDICT ? &session->artifact->inputs : &session->artifact->batch;
}

const leaf_list_t* fx_session_results(const fixstep_session_t* session, int function) {
  return fx_function_leaves(&session->artifact->functions[function],
                            function == FUNCTION_PREDICT ? "outputs" : "metrics");
}

const char* fx_session_results_role(int function) {
  return function == FUNCTION_PREDICT ? "outputs" : function == FUNCTION_EVALUATE ? "evaluation" : "metrics";
}

// Puts the checked tensors into the buffers of the last ones of their size. `real` are the leaves as the tensors have
// them.
static status_t upload(fixstep_session_t* session, const leaf_list_t* padded, const leaf_list_t* real,
                       buffers_t* buffers, fixstep_error_t** out_error) {
  status_t status = FIXSTEP_OK;
  if (!buffers->items) status = fx_buffers_make(session, padded, NULL, buffers, out_error);
  for (size_t i = 0; i < padded->count && status == FIXSTEP_OK; ++i) {
    const void* data = session->ordered[i]->data;
    void* filled = NULL;
    if (padded->items[i].byte_length != real->items[i].byte_length) {
      filled = fx_allocate_zeroed(padded->items[i].byte_length, 1);
      if (!filled) return fx_fail_memory(out_error);
      fx_sizes_copy(&padded->items[i], filled, &real->items[i], data);
      data = filled;
    }
    status = session->backend->write(session->device, buffers->items[i], &padded->items[i], data, out_error);
    free(filled);
  }
  return status;
}

// The leaves of a function at one of the compiled sizes, made at its first call.
static status_t prepare(fixstep_session_t* session, int function, int64_t size, variant_t* variant,
                        fixstep_error_t** out_error) {
  if (variant->is_ready) return FIXSTEP_OK;
  const sizes_t* sizes = &session->artifact->sizes;
  const char* role = function == FUNCTION_PREDICT ? "inputs" : "batch";
  status_t status = fx_sizes_leaves(sizes, role, leaves_taken(session, function), size, &variant->taken, out_error);
  if (status == FIXSTEP_OK) {
    status = fx_sizes_leaves(sizes, fx_session_results_role(function), fx_session_results(session, function), size,
                             &variant->results, out_error);
    if (status != FIXSTEP_OK) fx_leaf_list_release(&variant->taken);
  }
  variant->is_ready = status == FIXSTEP_OK;
  return status;
}

// Checks a batch of any size and puts it on the device.
static status_t take_sized(fixstep_session_t* session, int function, const fixstep_tensor_t* tensors, size_t count,
                           taken_t* out_taken, fixstep_error_t** out_error) {
  const sizes_t* sizes = &session->artifact->sizes;
  const char* role = function == FUNCTION_PREDICT ? "inputs" : "batch";
  const leaf_list_t* leaves = leaves_taken(session, function);
  text_t advice = {0};
  leaf_list_t real = {0};
  int64_t size;
  status_t status = fx_sizes_of(sizes, role, leaves, tensors, count, &size, &advice, out_error);
  if (status == FIXSTEP_OK) status = fx_sizes_leaves(sizes, role, leaves, size, &real, out_error);
  if (status == FIXSTEP_OK) {
    fx_text_add(&advice, " is %" PRId64 ", and every leaf needs the same. Nothing was run.", size);
    status = fx_template_check(&real, tensors, count, role, advice.data, session->ordered, out_error);
  }
  size_t index = status == FIXSTEP_OK ? fx_sizes_padded(sizes, size) : 0;
  variant_t* variant = &session->variants[(size_t)function * sizes->compiled_count + index];
  if (status == FIXSTEP_OK) status = prepare(session, function, sizes->compiled[index], variant, out_error);
  if (status == FIXSTEP_OK) status = upload(session, &variant->taken, &real, &variant->buffers, out_error);
  const leaf_list_t* size_leaf = fx_function_leaves(&session->artifact->functions[function], "size");
  if (status == FIXSTEP_OK && !session->size.items) {
    status = fx_buffers_make(session, size_leaf, NULL, &session->size, out_error);
  }
  int32_t number = (int32_t)size;
  if (status == FIXSTEP_OK) {
    status = session->backend->write(session->device, session->size.items[0], &size_leaf->items[0], &number, out_error);
  }
  const char* name = session->artifact->functions[function].name;
  *out_taken = (taken_t){"", &variant->buffers, &session->size, &variant->results, size};
  if (index) {
    snprintf(out_taken->name, sizeof(out_taken->name), "%s_%" PRId64, name, sizes->compiled[index]);
  } else {
    snprintf(out_taken->name, sizeof(out_taken->name), "%s", name);
  }
  fx_leaf_list_release(&real);
  fx_text_release(&advice);
  return status;
}

// Checks the tensors and puts them on the device, in the buffers of the last ones.
static status_t take(fixstep_session_t* session, int function, const fixstep_tensor_t* tensors, size_t count,
                     taken_t* out_taken, fixstep_error_t** out_error) {
  if (session->artifact->sizes.compiled) return take_sized(session, function, tensors, count, out_taken, out_error);
  bool predict = function == FUNCTION_PREDICT;
  const leaf_list_t* leaves = leaves_taken(session, function);
  buffers_t* buffers = predict ? &session->inputs : &session->batch;
  *out_taken = (taken_t){"", buffers, &no_buffers, fx_session_results(session, function), 0};
  snprintf(out_taken->name, sizeof(out_taken->name), "%s", session->artifact->functions[function].name);
  status_t status = fx_template_check(leaves, tensors, count, predict ? "inputs" : "batch", /*advice=*/NULL,
                                      session->ordered, out_error);
  return status == FIXSTEP_OK ? upload(session, leaves, leaves, buffers, out_error) : status;
}

// Calls a function whose batch was taken.
static status_t call(fixstep_session_t* session, int function, const taken_t* taken, const buffers_t* const* sets,
                     size_t set_count, size_t storage_count, fixstep_error_t** out_error) {
  status_t status =
      fx_session_call(session, function, taken->name, sets, set_count, storage_count, taken->results, out_error);
  if (status == FIXSTEP_OK) session->result_sizes[function] = taken->real_size;
  return status;
}

fixstep_status_t fixstep_session_step(fixstep_session_t* session, const fixstep_tensor_t* batch, size_t count,
                                      fixstep_error_t** out_error) {
  if (out_error) *out_error = NULL;
  taken_t taken;
  pair_t* sums = &session->accumulators[FUNCTION_STEP];
  status_t status = take(session, FUNCTION_STEP, batch, count, &taken, out_error);
  if (status != FIXSTEP_OK) return status;
  const buffers_t* sets[] = {&session->state.current, &sums->current, taken.batch, taken.size,
                             &session->state.other,   &sums->other};
  status = call(session, FUNCTION_STEP, &taken, sets, 6, 2, out_error);
  if (status != FIXSTEP_OK) return status;
  fx_pair_swap(&session->state);
  fx_pair_swap(sums);
  ++session->steps;
  session->can_roll_back = true;
  return FIXSTEP_OK;
}

fixstep_status_t fixstep_session_rollback(fixstep_session_t* session, fixstep_error_t** out_error) {
  if (out_error) *out_error = NULL;
  if (!session->can_roll_back) {
    return fx_fail(out_error, FIXSTEP_INVALID_ARGUMENT,
                   "there is no step to take back: only the last step can be, and only once");
  }
  fx_pair_swap(&session->state);
  fx_pair_swap(&session->accumulators[FUNCTION_STEP]);
  --session->steps;
  session->can_roll_back = false;
  return FIXSTEP_OK;
}

fixstep_status_t fixstep_session_evaluate(fixstep_session_t* session, const fixstep_tensor_t* batch, size_t count,
                                          fixstep_error_t** out_error) {
  if (out_error) *out_error = NULL;
  int function = 0;
  taken_t taken;
  status_t status = fx_session_function(session, "evaluate", &function, out_error);
  if (status == FIXSTEP_OK) status = take(session, function, batch, count, &taken, out_error);
  if (status != FIXSTEP_OK) return status;
  pair_t* sums = &session->accumulators[FUNCTION_EVALUATE];
  const buffers_t* sets[] = {&session->state.current, &sums->current, taken.batch, taken.size, &sums->other};
  status = call(session, function, &taken, sets, 5, 1, out_error);
  if (status == FIXSTEP_OK) fx_pair_swap(sums);
  return status;
}

fixstep_status_t fixstep_session_predict(fixstep_session_t* session, const fixstep_tensor_t* inputs, size_t count,
                                         fixstep_error_t** out_error) {
  if (out_error) *out_error = NULL;
  int function = 0;
  taken_t taken;
  status_t status = fx_session_function(session, "predict", &function, out_error);
  if (status == FIXSTEP_OK) status = take(session, function, inputs, count, &taken, out_error);
  if (status != FIXSTEP_OK) return status;
  const buffers_t* sets[] = {&session->state.current, taken.batch, taken.size};
  return call(session, function, &taken, sets, 3, 0, out_error);
}
