#include "artifact.h"

#include <stdlib.h>

#include "file.h"
#include "safetensors.h"

#define DAMAGED ". The file is damaged or was changed: copy it again, or compile it again."

const member_t* fx_artifact_member(const fixstep_artifact_t* artifact, const char* name) {
  for (size_t i = 1; i < artifact->member_count; ++i) {
    if (strcmp(artifact->members[i].name, name) == 0) return &artifact->members[i];
  }
  return NULL;
}

// The manifest has to be the first member, and the comment at the end of the file to vouch for it.
static status_t check_comment(const fixstep_artifact_t* artifact, fixstep_error_t** out_error) {
  const member_t* first = &artifact->members[0];
  if (strcmp(first->name, MANIFEST_NAME) != 0) {
    return fx_fail(out_error, FIXSTEP_ARTIFACT_ERROR, "the first member is '%s', expected '%s'", first->name,
                   MANIFEST_NAME);
  }
  char digest[DIGEST_LENGTH + 1];
  fx_digest_of(first->data, first->byte_length, digest);
  if (memcmp(artifact->file + artifact->file_byte_length - DIGEST_LENGTH, digest, DIGEST_LENGTH) == 0) {
    return FIXSTEP_OK;
  }
  return fx_fail(out_error, FIXSTEP_ARTIFACT_ERROR, "%s does not have the SHA-256 that the end of the file states",
                 MANIFEST_NAME);
}

static status_t check_state(const fixstep_artifact_t* artifact, fixstep_error_t** out_error) {
  const member_t* member = fx_artifact_member(artifact, STATE_NAME);
  if (!member) return FIXSTEP_OK;
  const void** data = fx_allocate_zeroed(artifact->state.count, sizeof(*data));
  if (!data) return fx_fail_memory(out_error);
  status_t status = fx_safetensors_decode(member->data, member->byte_length, &artifact->state, FIXSTEP_ARTIFACT_ERROR,
                                          data, out_error);
  free(data);
  return status;
}

// Every check of a file, from the outside to the inside; `advice` ends the message of the one that fails.
static status_t check(fixstep_artifact_t* artifact, const char** advice, fixstep_error_t** out_error) {
  *advice = DAMAGED;
  status_t status = fx_container_open(artifact->file, artifact->file_byte_length, &artifact->members,
                                      &artifact->member_count, out_error);
  if (status == FIXSTEP_OK) status = check_comment(artifact, out_error);
  if (status != FIXSTEP_OK) return status;
  // From here on the manifest is what somebody wrote on purpose: what is wrong with it is no damage.
  *advice = ".";
  status = fx_manifest_read(artifact, out_error);
  if (status != FIXSTEP_OK) return status;
  *advice = DAMAGED;
  status = fx_manifest_check_members(artifact, out_error);
  if (status != FIXSTEP_OK) return status;
  *advice = ". Compile it again with this version of fixstep.";
  return check_state(artifact, out_error);
}

// Takes the file's memory.
static status_t open_file(const char* where, uint8_t* file, size_t byte_length, fixstep_artifact_t** out_artifact,
                          fixstep_error_t** out_error) {
  fixstep_artifact_t* artifact = fx_allocate_zeroed(1, sizeof(*artifact));
  if (!artifact) {
    free(file);
    return fx_fail_memory(out_error);
  }
  artifact->file = file;
  artifact->file_byte_length = byte_length;
  const char* advice;
  fixstep_error_t* inner = NULL;
  status_t status = check(artifact, &advice, &inner);
  if (status == FIXSTEP_OK) {
    *out_artifact = artifact;
    return FIXSTEP_OK;
  }
  text_t before = {0};
  fx_text_add(&before, "%s: ", where);
  status = fx_fail_prefixed(out_error, status, inner, before.data ? before.data : "", advice);
  fx_text_release(&before);
  fixstep_artifact_release(artifact);
  return status;
}

fixstep_status_t fixstep_artifact_open(const char* path, fixstep_artifact_t** out_artifact,
                                       fixstep_error_t** out_error) {
  if (out_error) *out_error = NULL;
  *out_artifact = NULL;
  uint8_t* file;
  size_t byte_length;
  status_t status =
      fx_file_read(path, MAX_CONTAINER_BYTE_LENGTH, FIXSTEP_ARTIFACT_ERROR, &file, &byte_length, out_error);
  return status == FIXSTEP_OK ? open_file(path, file, byte_length, out_artifact, out_error) : status;
}

fixstep_status_t fixstep_artifact_open_memory(const void* data, size_t byte_length, fixstep_artifact_t** out_artifact,
                                              fixstep_error_t** out_error) {
  if (out_error) *out_error = NULL;
  *out_artifact = NULL;
  if (byte_length > MAX_CONTAINER_BYTE_LENGTH) {
    return fx_fail(out_error, FIXSTEP_ARTIFACT_ERROR, "<bytes>: %zu bytes, more than the %u an artifact may have",
                   byte_length, MAX_CONTAINER_BYTE_LENGTH);
  }
  uint8_t* file = fx_allocate_aligned(byte_length);
  if (!file) return fx_fail_memory(out_error);
  if (byte_length) memcpy(file, data, byte_length);
  return open_file("<bytes>", file, byte_length, out_artifact, out_error);
}

void fixstep_artifact_release(fixstep_artifact_t* artifact) {
  if (!artifact) return;
  for (size_t f = 0; f < FUNCTION_COUNT; ++f) {
    for (size_t g = 0; g < MAX_GROUPS; ++g) {
      fx_leaf_list_release(&artifact->functions[f].arguments[g].leaves);
      fx_leaf_list_release(&artifact->functions[f].results[g].leaves);
    }
  }
  fx_leaf_list_release(&artifact->state);
  fx_leaf_list_release(&artifact->batch);
  fx_leaf_list_release(&artifact->inputs);
  free(artifact->targets);
  fx_sizes_release(&artifact->sizes);
  json_decref(artifact->manifest);
  free(artifact->members);
  free(artifact->file);
  free(artifact);
}

const char* fixstep_artifact_name(const fixstep_artifact_t* artifact) { return artifact->name; }
const char* fixstep_artifact_program(const fixstep_artifact_t* artifact) { return artifact->program; }
size_t fixstep_artifact_target_count(const fixstep_artifact_t* artifact) { return artifact->target_count; }

const char* fixstep_artifact_target(const fixstep_artifact_t* artifact, size_t index) {
  return index < artifact->target_count ? artifact->targets[index].text : NULL;
}

static const function_t* find_function(const fixstep_artifact_t* artifact, const char* name) {
  for (size_t i = 0; i < FUNCTION_COUNT; ++i) {
    if (artifact->functions[i].present && strcmp(artifact->functions[i].name, name) == 0)
      return &artifact->functions[i];
  }
  return NULL;
}

bool fixstep_artifact_has_function(const fixstep_artifact_t* artifact, const char* function) {
  return find_function(artifact, function) != NULL;
}

const leaf_list_t* fx_function_leaves(const function_t* function, const char* role) {
  for (size_t g = 0; g < MAX_GROUPS; ++g) {
    const group_t* group = &function->arguments[g];
    if (group->role && strcmp(group->role, role) == 0) return &group->leaves;
  }
  for (size_t g = 0; g < MAX_GROUPS; ++g) {
    const group_t* group = &function->results[g];
    if (group->role && strcmp(group->role, role) == 0) return &group->leaves;
  }
  return NULL;
}

fixstep_leaves_t fixstep_artifact_leaves(const fixstep_artifact_t* artifact, const char* function, const char* role) {
  const function_t* found = find_function(artifact, function);
  const leaf_list_t* leaves = found ? fx_function_leaves(found, role) : NULL;
  return leaves ? (fixstep_leaves_t){leaves->items, leaves->count} : (fixstep_leaves_t){NULL, 0};
}

bool fixstep_artifact_sizes(const fixstep_artifact_t* artifact, int64_t* out_low, int64_t* out_high,
                            int64_t* out_multiple) {
  const sizes_t* sizes = &artifact->sizes;
  const fixstep_leaf_t* first = artifact->batch.count ? &artifact->batch.items[0] : NULL;
  int64_t fixed = first && first->rank ? first->shape[0] : 0;
  *out_low = sizes->compiled ? sizes->low : fixed;
  *out_high = sizes->compiled ? sizes->high : fixed;
  *out_multiple = sizes->compiled ? sizes->multiple : fixed;
  return sizes->compiled != NULL;
}

const void* fixstep_artifact_member(const fixstep_artifact_t* artifact, const char* name, size_t* out_byte_length) {
  const member_t* member = fx_artifact_member(artifact, name);
  *out_byte_length = member ? member->byte_length : 0;
  return member ? member->data : NULL;
}
