#include "session.h"

#include <stdlib.h>

#include "safetensors.h"
#include "template.h"

#ifdef FIXSTEP_WITH_IREE
extern const fixstep_backend_t fixstep_backend_iree;
#endif

static const leaf_list_t no_leaves = {NULL, 0, NULL, NULL};

void fixstep_session_options_initialize(fixstep_session_options_t* out_options) {
  *out_options = (fixstep_session_options_t){0};
}

status_t fx_buffers_make(fixstep_session_t* session, const leaf_list_t* leaves, const void* const* data,
                         buffers_t* out_buffers, fixstep_error_t** out_error) {
  *out_buffers = (buffers_t){leaves, fx_allocate_zeroed(leaves->count, sizeof(fixstep_buffer_t*))};
  status_t status = out_buffers->items ? FIXSTEP_OK : fx_fail_memory(out_error);
  for (size_t i = 0; i < leaves->count && status == FIXSTEP_OK; ++i) {
    status = session->backend->allocate(session->device, &leaves->items[i], data ? data[i] : NULL,
                                        &out_buffers->items[i], out_error);
  }
  if (status != FIXSTEP_OK) fx_buffers_release(session, out_buffers);
  return status;
}

void fx_buffers_release(fixstep_session_t* session, buffers_t* buffers) {
  for (size_t i = 0; buffers->items && i < buffers->leaves->count; ++i) {
    if (buffers->items[i]) session->backend->release(session->device, buffers->items[i]);
  }
  free(buffers->items);
  *buffers = (buffers_t){0};
}

void fx_buffers_replace(fixstep_session_t* session, buffers_t* buffers, buffers_t* replacement) {
  fx_buffers_release(session, buffers);
  *buffers = *replacement;
  *replacement = (buffers_t){0};
}

static void pair_release(fixstep_session_t* session, pair_t* pair) {
  fx_buffers_release(session, &pair->current);
  fx_buffers_release(session, &pair->other);
}

void fx_pair_swap(pair_t* pair) {
  buffers_t current = pair->current;
  pair->current = pair->other;
  pair->other = current;
}

status_t fx_session_function(const fixstep_session_t* session, const char* name, int* out_function,
                             fixstep_error_t** out_error) {
  for (int i = 0; name && i < FUNCTION_COUNT; ++i) {
    const function_t* function = &session->artifact->functions[i];
    if (function->present && strcmp(function->name, name) == 0) {
      *out_function = i;
      return FIXSTEP_OK;
    }
  }
  return fx_fail(
      out_error, FIXSTEP_INVALID_ARGUMENT,
      "%s has no function '%s'; `fixstep inspect` lists those that it has. Give the Program one and compile it "
      "again.",
      session->artifact->name, name ? name : "");
}

status_t fx_session_call(fixstep_session_t* session, int function, const char* name, const buffers_t* const* sets,
                         size_t set_count, size_t storage_count, const leaf_list_t* results,
                         fixstep_error_t** out_error) {
  size_t count = 0, stored = 0;
  for (size_t i = 0; i < set_count; ++i) {
    for (size_t j = 0; j < sets[i]->leaves->count; ++j) {
      session->arguments[count] = sets[i]->items[j];
      session->argument_leaves[count++] = &sets[i]->leaves->items[j];
    }
    if (i + storage_count >= set_count) stored += sets[i]->leaves->count;
  }
  buffers_t made = {results, fx_allocate_zeroed(results->count, sizeof(fixstep_buffer_t*))};
  if (!made.items) return fx_fail_memory(out_error);
  fixstep_error_t* inner = NULL;
  status_t status = session->backend->invoke(session->device, name, session->arguments, session->argument_leaves, count,
                                             stored, results->items, results->count, made.items, &inner);
  if (status == FIXSTEP_OK) {
    fx_buffers_replace(session, &session->results[function], &made);
    return FIXSTEP_OK;
  }
  free(made.items);
  char before[64];
  snprintf(before, sizeof(before), "the device failed in %s: ", name);
  return fx_fail_prefixed(out_error, status, inner, before, "; the state is unchanged");
}

fixstep_status_t fixstep_session_write_state(fixstep_session_t* session, const fixstep_tensor_t* state, size_t count,
                                             fixstep_error_t** out_error) {
  if (out_error) *out_error = NULL;
  const leaf_list_t* leaves = &session->artifact->state;
  status_t status = fx_template_check(leaves, state, count, "state", /*advice=*/NULL, session->ordered, out_error);
  const void** data = fx_allocate_zeroed(leaves->count, sizeof(*data));
  if (status == FIXSTEP_OK && !data) status = fx_fail_memory(out_error);
  buffers_t made = {0};
  for (size_t i = 0; i < leaves->count && status == FIXSTEP_OK; ++i) data[i] = session->ordered[i]->data;
  if (status == FIXSTEP_OK) status = fx_buffers_make(session, leaves, data, &made, out_error);
  free(data);
  if (status != FIXSTEP_OK) return status;
  fx_buffers_replace(session, &session->state.current, &made);
  session->can_roll_back = false;
  return FIXSTEP_OK;
}

fixstep_status_t fixstep_session_write_leaf(fixstep_session_t* session, const fixstep_tensor_t* leaf,
                                            fixstep_error_t** out_error) {
  if (out_error) *out_error = NULL;
  const leaf_list_t* leaves = &session->artifact->state;
  const fixstep_leaf_t* found = leaf->path ? fx_leaf_list_find(leaves, leaf->path) : NULL;
  if (!found) {
    return fx_fail(out_error, FIXSTEP_TEMPLATE_ERROR, "the state has no leaf '%s'", leaf->path ? leaf->path : "");
  }
  size_t first = 0;
  const leaf_list_t one = {(fixstep_leaf_t*)found, 1, NULL, &first};
  const fixstep_tensor_t* ordered;
  status_t status = fx_template_check(&one, leaf, 1, "state", /*advice=*/NULL, &ordered, out_error);
  fixstep_buffer_t* made = NULL;
  if (status == FIXSTEP_OK) {
    status = session->backend->allocate(session->device, found, leaf->data, &made, out_error);
  }
  if (status != FIXSTEP_OK) return status;
  fixstep_buffer_t** place = &session->state.current.items[found - leaves->items];
  session->backend->release(session->device, *place);
  *place = made;
  session->can_roll_back = false;
  return FIXSTEP_OK;
}

// The first state, as `init` makes it of the seed.
static status_t run_init(fixstep_session_t* session, uint64_t seed, fixstep_error_t** out_error) {
  const function_t* init = &session->artifact->functions[FUNCTION_INIT];
  const leaf_list_t* words = &init->arguments[0].leaves;
  uint32_t high = (uint32_t)(seed >> 32), low = (uint32_t)seed;
  const void* data[] = {&high, &low};
  if (words->count != 2 || words->items[0].byte_length != 4 || words->items[1].byte_length != 4) {
    return fx_fail(out_error, FIXSTEP_ARTIFACT_ERROR, "/functions/init: expected two uint32 scalars as seed");
  }
  buffers_t seeds = {0}, made = {0};
  status_t status = fx_buffers_make(session, words, data, &seeds, out_error);
  if (status == FIXSTEP_OK) status = fx_buffers_make(session, &session->artifact->state, NULL, &made, out_error);
  if (status == FIXSTEP_OK) {
    const buffers_t* sets[] = {&seeds, &made};
    status = fx_session_call(session, FUNCTION_INIT, "init", sets, 2, 1, &no_leaves, out_error);
  }
  if (status == FIXSTEP_OK) fx_buffers_replace(session, &session->state.current, &made);
  fx_buffers_release(session, &seeds);
  fx_buffers_release(session, &made);
  return status;
}

// The first state, as the artifact brings it.
static status_t read_state(fixstep_session_t* session, fixstep_error_t** out_error) {
  const leaf_list_t* leaves = &session->artifact->state;
  const member_t* member = fx_artifact_member(session->artifact, STATE_NAME);
  const void** data = fx_allocate_zeroed(leaves->count, sizeof(*data));
  if (!data) return fx_fail_memory(out_error);
  status_t status =
      fx_safetensors_decode(member->data, member->byte_length, leaves, FIXSTEP_ARTIFACT_ERROR, data, out_error);
  buffers_t made = {0};
  if (status == FIXSTEP_OK) status = fx_buffers_make(session, leaves, data, &made, out_error);
  free(data);
  if (status == FIXSTEP_OK) fx_buffers_replace(session, &session->state.current, &made);
  return status;
}

static status_t begin(fixstep_session_t* session, const fixstep_session_options_t* options,
                      fixstep_error_t** out_error) {
  const fixstep_artifact_t* artifact = session->artifact;
  bool has_init = artifact->functions[FUNCTION_INIT].present;
  if (options->seed && (options->state || !has_init)) {
    return fx_fail(out_error, FIXSTEP_INVALID_ARGUMENT, "seed has no effect: %s",
                   has_init ? "the first state is given" : "the program was compiled with a fixed first state");
  }
  status_t status = fx_buffers_make(session, &artifact->state, NULL, &session->state.other, out_error);
  for (int f = FUNCTION_STEP; f <= FUNCTION_EVALUATE && status == FIXSTEP_OK; ++f) {
    const leaf_list_t* sums = fx_function_leaves(&artifact->functions[f], "accumulators");
    if (!sums) continue;
    status = fx_buffers_make(session, sums, NULL, &session->accumulators[f].current, out_error);
    if (status == FIXSTEP_OK) status = fx_buffers_make(session, sums, NULL, &session->accumulators[f].other, out_error);
  }
  if (status != FIXSTEP_OK) return status;
  if (options->state) return fixstep_session_write_state(session, options->state, options->state_count, out_error);
  return has_init ? run_init(session, options->seed, out_error) : read_state(session, out_error);
}

// Room for the arguments of any call.
static status_t make_room(fixstep_session_t* session, fixstep_error_t** out_error) {
  const fixstep_artifact_t* artifact = session->artifact;
  size_t most = artifact->state.count + artifact->batch.count + artifact->inputs.count;
  for (size_t f = 0; f < FUNCTION_COUNT; ++f) {
    size_t count = 0;
    for (size_t g = 0; g < MAX_GROUPS; ++g) {
      count += artifact->functions[f].arguments[g].leaves.count + artifact->functions[f].results[g].leaves.count;
    }
    if (count > most) most = count;
  }
  session->arguments = fx_allocate_zeroed(most, sizeof(*session->arguments));
  session->argument_leaves = fx_allocate_zeroed(most, sizeof(*session->argument_leaves));
  session->ordered = fx_allocate_zeroed(most, sizeof(*session->ordered));
  session->variants = fx_allocate_zeroed(FUNCTION_COUNT * artifact->sizes.compiled_count, sizeof(variant_t));
  bool made = session->variants && session->arguments && session->argument_leaves && session->ordered;
  return made ? FIXSTEP_OK : fx_fail_memory(out_error);
}

static const fixstep_backend_t* default_backend(void) {
#ifdef FIXSTEP_WITH_IREE
  return &fixstep_backend_iree;
#else
  return NULL;
#endif
}

fixstep_status_t fixstep_session_open(const fixstep_artifact_t* artifact, const fixstep_session_options_t* options,
                                      fixstep_session_t** out_session, fixstep_error_t** out_error) {
  if (out_error) *out_error = NULL;
  *out_session = NULL;
  fixstep_session_options_t defaults;
  fixstep_session_options_initialize(&defaults);
  if (!options) options = &defaults;
  const fixstep_backend_t* backend = options->backend ? options->backend : default_backend();
  if (!backend) {
    return fx_fail(
        out_error, FIXSTEP_TARGET_ERROR,
        "this library was built without IREE: build it with -DIREERuntime_DIR=<folder of IREERuntimeConfig.cmake>, "
        "or give a backend");
  }
  fixstep_session_t* session = fx_allocate_zeroed(1, sizeof(*session));
  if (!session) return fx_fail_memory(out_error);
  session->artifact = artifact;
  session->backend = backend;
  status_t status = make_room(session, out_error);
  if (status == FIXSTEP_OK) status = fx_session_choose_target(session, options, out_error);
  if (status == FIXSTEP_OK) status = begin(session, options, out_error);
  if (status == FIXSTEP_OK) {
    *out_session = session;
  } else {
    fixstep_session_release(session);
  }
  return status;
}

void fixstep_session_release(fixstep_session_t* session) {
  if (!session) return;
  pair_release(session, &session->state);
  for (size_t f = 0; f < FUNCTION_COUNT; ++f) {
    pair_release(session, &session->accumulators[f]);
    fx_buffers_release(session, &session->results[f]);
  }
  for (size_t i = 0; session->variants && i < FUNCTION_COUNT * session->artifact->sizes.compiled_count; ++i) {
    fx_buffers_release(session, &session->variants[i].buffers);
    fx_leaf_list_release(&session->variants[i].taken);
    fx_leaf_list_release(&session->variants[i].results);
  }
  free(session->variants);
  fx_buffers_release(session, &session->size);
  fx_buffers_release(session, &session->batch);
  fx_buffers_release(session, &session->inputs);
  if (session->device) session->backend->close(session->device);
  fx_text_release(&session->passed_over);
  free(session->arguments);
  free((void*)session->argument_leaves);
  free((void*)session->ordered);
  free(session);
}

const char* fixstep_session_target(const fixstep_session_t* session) { return session->target->text; }

const char* fixstep_session_passed_over(const fixstep_session_t* session) {
  return session->passed_over.data ? session->passed_over.data : "";
}

uint64_t fixstep_session_steps(const fixstep_session_t* session) { return session->steps; }
