// The artifact as the library holds it: the file, its members, and the parts of its manifest.

#ifndef FIXSTEP_SRC_ARTIFACT_H_
#define FIXSTEP_SRC_ARTIFACT_H_

#include "container.h"
#include "leaf.h"
#include "sizes.h"

#define MANIFEST_NAME "manifest.json"
#define STATE_NAME "state.safetensors"
#define MAX_GROUPS 4

// Leaves that travel together: one role of a function's arguments or results. `role` is NULL beyond the last one.
typedef struct group_t {
  const char* role;
  leaf_list_t leaves;
} group_t;

typedef struct function_t {
  const char* name;
  bool present;
  group_t arguments[MAX_GROUPS];
  group_t results[MAX_GROUPS];
} function_t;

enum { FUNCTION_INIT, FUNCTION_STEP, FUNCTION_EVALUATE, FUNCTION_PREDICT, FUNCTION_COUNT };

typedef struct target_t {
  const char* text;
  const member_t* module;
  const json_t*
    requires;
} target_t;

struct fixstep_artifact_t {
  uint8_t* file;
  size_t file_byte_length;
  member_t* members;
  size_t member_count;
  json_t* manifest;
  const char* name;
  const char* program;
  leaf_list_t state, batch, inputs;  // the template
  function_t functions[FUNCTION_COUNT];
  sizes_t sizes;
  target_t* targets;
  size_t target_count;
};

// Reads the manifest of an artifact whose members are known.
status_t fx_manifest_read(fixstep_artifact_t* artifact, fixstep_error_t** out_error);
// Compares the members with what the manifest says of them.
status_t fx_manifest_check_members(const fixstep_artifact_t* artifact, fixstep_error_t** out_error);
const member_t* fx_artifact_member(const fixstep_artifact_t* artifact, const char* name);
// The leaves of a role of a function, of the arguments if they have it, else of the results; NULL if there are none.
const leaf_list_t* fx_function_leaves(const function_t* function, const char* role);

#endif  // FIXSTEP_SRC_ARTIFACT_H_
