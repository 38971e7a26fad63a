// A session's checkpoints: what of it they hold, and how it takes them up.

#include <sodium.h>
#include <stdlib.h>

#include "checkpoint.h"
#include "file.h"
#include "session.h"
#include "template.h"

// A host copy of buffers; [leaves->count] pieces of one allocation, which the caller frees as `*out_memory`.
static status_t download(fixstep_session_t* session, const buffers_t* buffers, const void*** out_data,
                         uint8_t** out_memory, fixstep_error_t** out_error) {
  size_t total = 0, offset = 0;
  for (size_t i = 0; i < buffers->leaves->count; ++i) {
    if (!add(total, buffers->leaves->items[i].byte_length, &total)) return fx_fail_memory(out_error);
  }
  *out_memory = fx_allocate_aligned(total);
  *out_data = fx_allocate_zeroed(buffers->leaves->count, sizeof(**out_data));
  status_t status = *out_memory && *out_data ? FIXSTEP_OK : fx_fail_memory(out_error);
  for (size_t i = 0; i < buffers->leaves->count && status == FIXSTEP_OK; ++i) {
    const fixstep_leaf_t* leaf = &buffers->leaves->items[i];
    (*out_data)[i] = *out_memory + offset;
    status = session->backend->read(session->device, buffers->items[i], leaf, *out_memory + offset, out_error);
    offset += leaf->byte_length;
  }
  return status;
}

// The sums, exactly, as text.
static status_t add_sums(fixstep_session_t* session, const buffers_t* sums, text_t* text, fixstep_error_t** out_error) {
  const void** data = NULL;
  uint8_t* memory = NULL;
  status_t status = download(session, sums, &data, &memory, out_error);
  fx_text_add(text, "{");
  for (size_t i = 0; i < sums->leaves->count && status == FIXSTEP_OK; ++i) {
    if (i) fx_text_add(text, ",");
    fx_json_quote(text, sums->leaves->items[i].path);
    fx_text_add(text, ":\"");
    const uint8_t* bytes = data[i];
    for (size_t j = 0; j < sums->leaves->items[i].byte_length; ++j) fx_text_add(text, "%02x", bytes[j]);
    fx_text_add(text, "\"");
  }
  fx_text_add(text, "}");
  free(data);
  free(memory);
  return status;
}

static status_t add_position(fixstep_session_t* session, const char* caller, text_t* text,
                             fixstep_error_t** out_error) {
  fx_text_add(text, "{\"caller\":%s,\"averages\":{", caller);
  bool first = true;
  status_t status = FIXSTEP_OK;
  for (int f = FUNCTION_STEP; f <= FUNCTION_EVALUATE && status == FIXSTEP_OK; ++f) {
    const buffers_t* sums = &session->accumulators[f].current;
    if (!sums->items) continue;
    fx_text_add(text, "%s\"%s\":", first ? "" : ",", session->artifact->functions[f].name);
    first = false;
    status = add_sums(session, sums, text, out_error);
  }
  fx_text_add(text, "}}");
  return status == FIXSTEP_OK && text->failed ? fx_fail_memory(out_error) : status;
}

// Whether the caller's position is a JSON object that is not nested too deeply for its place in the file.
static status_t check_caller(const char* caller, fixstep_error_t** out_error) {
  text_t text = {0};
  json_t* value = NULL;
  fx_text_add(&text, "[[[%s]]]", caller);
  fixstep_error_t* inner = NULL;
  status_t status = text.failed ? fx_fail_memory(&inner)
                                : fx_json_parse(text.data, text.length, FIXSTEP_INVALID_ARGUMENT, &value, &inner);
  json_t* innermost = json_array_get(json_array_get(json_array_get(value, 0), 0), 0);
  bool one = json_array_size(json_array_get(json_array_get(value, 0), 0)) == 1 && json_array_size(value) == 1;
  if (status == FIXSTEP_OK && !(one && json_is_object(innermost))) {
    status = fx_fail(&inner, FIXSTEP_INVALID_ARGUMENT, "expected one JSON object");
  }
  fx_text_release(&text);
  json_decref(value);
  return status == FIXSTEP_OK ? status : fx_fail_prefixed(out_error, status, inner, "position: ", "");
}

fixstep_status_t fixstep_session_save(fixstep_session_t* session, const char* path, const char* position,
                                      fixstep_error_t** out_error) {
  if (out_error) *out_error = NULL;
  if (!position) position = "{}";
  text_t text = {0};
  const void** data = NULL;
  uint8_t* memory = NULL;
  status_t status = check_caller(position, out_error);
  if (status == FIXSTEP_OK) status = add_position(session, position, &text, out_error);
  if (status == FIXSTEP_OK) status = download(session, &session->state.current, &data, &memory, out_error);
  if (status == FIXSTEP_OK) {
    status = fx_checkpoint_write(path, &session->artifact->state, data, session->artifact->program, session->steps,
                                 text.data, out_error);
  }
  fx_text_release(&text);
  free(data);
  free(memory);
  return status;
}

// Refuses the checkpoint of another program, with each leaf that differs.
static status_t check_program(const fixstep_session_t* session, const char* path, const checkpoint_t* checkpoint,
                              fixstep_error_t** out_error) {
  const fixstep_artifact_t* artifact = session->artifact;
  if (strcmp(checkpoint->program, artifact->program) == 0) return FIXSTEP_OK;
  text_t text = {0};
  fx_text_add(&text, "%s belongs to another program than %s: expected digest %.12s, got %.12s", path, artifact->name,
              artifact->program, checkpoint->program);
  fx_text_add_mismatch(&text, &artifact->state, &checkpoint->leaves);
  fx_text_add(&text,
              "\nUse the artifact that wrote it, or take over the state alone with fixstep_session_write_state.");
  return fx_fail_with_text(out_error, FIXSTEP_CHECKPOINT_ERROR, &text);
}

// The data of the state's leaves, in template order, which the checkpoint's need not be.
static status_t order_state(const fixstep_session_t* session, const char* path, const checkpoint_t* checkpoint,
                            const void** out_data, fixstep_error_t** out_error) {
  const leaf_list_t* leaves = &session->artifact->state;
  size_t count = checkpoint->leaves.count;
  fixstep_tensor_t* tensors = fx_allocate_zeroed(count, sizeof(*tensors));
  if (!tensors) return fx_fail_memory(out_error);
  for (size_t i = 0; i < count; ++i) {
    const fixstep_leaf_t* leaf = &checkpoint->leaves.items[i];
    tensors[i] = (fixstep_tensor_t){leaf->path, leaf->dtype, leaf->rank, leaf->shape, checkpoint->data[i]};
  }
  fixstep_error_t* inner = NULL;
  status_t status = fx_template_check(leaves, tensors, count, "state", /*advice=*/NULL, session->ordered, &inner);
  for (size_t i = 0; i < leaves->count && status == FIXSTEP_OK; ++i) out_data[i] = session->ordered[i]->data;
  free(tensors);
  if (status == FIXSTEP_OK) return status;
  text_t before = {0};
  fx_text_add(&before, "%s: ", path);
  if (status == FIXSTEP_TEMPLATE_ERROR) status = FIXSTEP_CHECKPOINT_ERROR;
  status = fx_fail_prefixed(out_error, status, inner, before.data ? before.data : "", "");
  fx_text_release(&before);
  return status;
}

// Buffers that hold what add_sums wrote.
static status_t read_sums(fixstep_session_t* session, const json_t* texts, const leaf_list_t* leaves,
                          buffers_t* out_buffers, fixstep_error_t** out_error) {
  if (json_object_size(texts) != leaves->count) {
    return fx_fail(out_error, FIXSTEP_CHECKPOINT_ERROR,
                   "the checkpoint's running averages are those of another program");
  }
  status_t status = fx_buffers_make(session, leaves, NULL, out_buffers, out_error);
  for (size_t i = 0; i < leaves->count && status == FIXSTEP_OK; ++i) {
    const fixstep_leaf_t* leaf = &leaves->items[i];
    const char* digits = json_string_value(json_object_get(texts, leaf->path));
    size_t length = digits ? strlen(digits) : 0, written = 0;
    uint8_t* bytes = fx_allocate_zeroed(leaf->byte_length, 1);
    bool good = digits && bytes && length / 2 == leaf->byte_length && length % 2 == 0 &&
                sodium_hex2bin(bytes, leaf->byte_length, digits, length, NULL, &written, NULL) == 0 &&
                written == leaf->byte_length;
    if (good) {
      status = session->backend->write(session->device, out_buffers->items[i], leaf, bytes, out_error);
    } else if (!bytes) {
      status = fx_fail_memory(out_error);
    } else {
      status =
          fx_fail(out_error, FIXSTEP_CHECKPOINT_ERROR, "the checkpoint's running averages are damaged: %s", leaf->path);
    }
    free(bytes);
  }
  if (status != FIXSTEP_OK) fx_buffers_release(session, out_buffers);
  return status;
}

static status_t copy_position(const checkpoint_t* checkpoint, char** out_position, fixstep_error_t** out_error) {
  const char* caller = "{}";
  size_t length = 2;
  fx_json_find(checkpoint->position, checkpoint->position_length, "caller", &caller, &length);
  *out_position = fx_copy_text(caller, length);
  return *out_position ? FIXSTEP_OK : fx_fail_memory(out_error);
}

static status_t take_up(fixstep_session_t* session, const char* path, const checkpoint_t* checkpoint,
                        char** out_position, fixstep_error_t** out_error) {
  const leaf_list_t* leaves = &session->artifact->state;
  buffers_t state = {0}, sums[FUNCTION_COUNT] = {{0}};
  const void** data = fx_allocate_zeroed(leaves->count, sizeof(*data));
  status_t status = data ? check_program(session, path, checkpoint, out_error) : fx_fail_memory(out_error);
  if (status == FIXSTEP_OK) status = order_state(session, path, checkpoint, data, out_error);
  if (status == FIXSTEP_OK) status = fx_buffers_make(session, leaves, data, &state, out_error);
  const json_t* averages = json_object_get(json_object_get(checkpoint->contents, "position"), "averages");
  for (int f = 0; f < FUNCTION_COUNT && status == FIXSTEP_OK; ++f) {
    const buffers_t* current = &session->accumulators[f].current;
    if (!current->items) continue;
    const json_t* texts = json_object_get(averages, session->artifact->functions[f].name);
    status = read_sums(session, texts, current->leaves, &sums[f], out_error);
  }
  if (status == FIXSTEP_OK && out_position) status = copy_position(checkpoint, out_position, out_error);
  if (status == FIXSTEP_OK) {
    fx_buffers_replace(session, &session->state.current, &state);
    for (int f = 0; f < FUNCTION_COUNT; ++f) {
      if (sums[f].items) fx_buffers_replace(session, &session->accumulators[f].current, &sums[f]);
    }
    session->steps = checkpoint->steps;
    session->can_roll_back = false;
  }
  fx_buffers_release(session, &state);
  for (int f = 0; f < FUNCTION_COUNT; ++f) fx_buffers_release(session, &sums[f]);
  free(data);
  return status;
}

fixstep_status_t fixstep_session_restore(fixstep_session_t* session, const char* path, char** out_position,
                                         fixstep_error_t** out_error) {
  if (out_error) *out_error = NULL;
  if (out_position) *out_position = NULL;
  checkpoint_t checkpoint;
  status_t status = fx_checkpoint_read(path, &checkpoint, out_error);
  if (status == FIXSTEP_OK) status = take_up(session, path, &checkpoint, out_position, out_error);
  fx_checkpoint_release(&checkpoint);
  return status;
}

fixstep_status_t fixstep_session_save_in(fixstep_session_t* session, const char* folder, size_t keep,
                                         const char* position, fixstep_error_t** out_error) {
  if (out_error) *out_error = NULL;
  text_t path = {0};
  fx_text_add(&path, "%s/step-%08llu.safetensors", folder, (unsigned long long)session->steps);
  status_t status = path.failed ? fx_fail_memory(out_error) : FIXSTEP_OK;
  if (status == FIXSTEP_OK) status = fx_folder_make(folder, FIXSTEP_CHECKPOINT_ERROR, out_error);
  if (status == FIXSTEP_OK) {
    fx_folder_clean(folder);
    status = fixstep_session_save(session, path.data, position, out_error);
  }
  if (status == FIXSTEP_OK && keep) status = fx_checkpoint_prune(folder, session->steps, keep, out_error);
  fx_text_release(&path);
  return status;
}

fixstep_status_t fixstep_session_restore_latest(fixstep_session_t* session, const char* folder, bool* out_found,
                                                char** out_position, char** out_passed_over,
                                                fixstep_error_t** out_error) {
  *out_found = false;
  if (out_position) *out_position = NULL;
  char *path = NULL, *passed_over = NULL;
  status_t status = fixstep_checkpoint_latest(folder, &path, &passed_over, out_error);
  if (status == FIXSTEP_OK && path) {
    status = fixstep_session_restore(session, path, out_position, out_error);
    *out_found = status == FIXSTEP_OK;
  }
  bool gives = out_passed_over && status == FIXSTEP_OK;
  if (out_passed_over) *out_passed_over = gives ? passed_over : NULL;
  if (!gives) free(passed_over);
  free(path);
  return status;
}
