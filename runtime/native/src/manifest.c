#include <stdlib.h>

#include "artifact.h"

#define MAX_MANIFEST_BYTE_LENGTH (64u << 20)
#define MAX_LEAVES 1000000

// What each function takes and gives, in order; a group without leaves is there all the same.
static const struct {
  const char* name;
  const char* arguments[MAX_GROUPS];
  const char* results[MAX_GROUPS];
} convention[FUNCTION_COUNT] = {
    [FUNCTION_INIT] = {"init", {"seed"}, {"state"}},
    [FUNCTION_STEP] = {"step", {"state", "accumulators", "batch"}, {"state", "accumulators", "metrics"}},
    [FUNCTION_EVALUATE] = {"evaluate", {"state", "accumulators", "batch"}, {"accumulators", "metrics"}},
    [FUNCTION_PREDICT] = {"predict", {"state", "inputs"}, {"outputs"}},
};

static status_t check_version(const json_t* manifest, fixstep_error_t** out_error) {
  const char* format = json_string_value(json_object_get(manifest, "format"));
  if (!format || strcmp(format, "fixstep") != 0) {
    return fx_fail(out_error, FIXSTEP_ARTIFACT_ERROR, "the manifest's format is not 'fixstep'");
  }
  const json_t* version = json_object_get(manifest, "version");
  if (json_is_integer(version) && json_integer_value(version) == 1) return FIXSTEP_OK;
  bool newer = json_is_integer(version) && json_integer_value(version) > 1;
  return fx_fail(out_error, FIXSTEP_ARTIFACT_ERROR, "version %lld, and this fixstep reads 1: %s",
                 json_is_integer(version) ? (long long)json_integer_value(version) : 0LL,
                 newer ? "upgrade fixstep" : "compile it again");
}

static bool is_digest(const char* text) {
  return text && strlen(text) == DIGEST_LENGTH && strspn(text, "0123456789abcdef") == DIGEST_LENGTH;
}

static status_t read_groups(const json_t* json, const char* function, const char* key, const char* const* roles,
                            group_t* groups, size_t* leaf_count, fixstep_error_t** out_error) {
  const json_t* list = json_object_get(json, key);
  size_t expected = 0;
  while (expected < MAX_GROUPS && roles[expected]) ++expected;
  status_t status = FIXSTEP_OK;
  if (!json_is_array(list) || json_array_size(list) != expected) {
    return fx_fail(out_error, FIXSTEP_ARTIFACT_ERROR, "/functions/%s/%s: expected %zu groups of leaves, got %zu",
                   function, key, expected, json_array_size(list));
  }
  for (size_t i = 0; i < expected && status == FIXSTEP_OK; ++i) {
    const json_t* group = json_array_get(list, i);
    const char* role = json_string_value(json_object_get(group, "role"));
    if (!role || json_object_size(group) != 2 || strcmp(role, roles[i]) != 0) {
      return fx_fail(out_error, FIXSTEP_ARTIFACT_ERROR, "/functions/%s/%s/%zu: expected the role %s, got %.40s",
                     function, key, i, roles[i], role ? role : "none");
    }
    const json_t* leaves = json_object_get(group, "leaves");
    *leaf_count += json_array_size(leaves);
    if (*leaf_count > MAX_LEAVES) {
      return fx_fail(out_error, FIXSTEP_ARTIFACT_ERROR, "more than %d leaves in all", MAX_LEAVES);
    }
    char where[64];
    snprintf(where, sizeof(where), "/functions/%s/%s/%s", function, key, role);
    status = fx_leaf_list_parse(leaves, where, FIXSTEP_ARTIFACT_ERROR, &groups[i].leaves, out_error);
    groups[i].role = roles[i];
  }
  return status;
}

static status_t read_functions(fixstep_artifact_t* artifact, size_t* leaf_count, fixstep_error_t** out_error) {
  const json_t* functions = json_object_get(artifact->manifest, "functions");
  size_t found = 0;
  status_t status = FIXSTEP_OK;
  for (size_t i = 0; i < FUNCTION_COUNT && status == FIXSTEP_OK; ++i) {
    function_t* function = &artifact->functions[i];
    const json_t* json = json_object_get(functions, convention[i].name);
    function->name = convention[i].name;
    function->present = json != NULL;
    found += function->present;
    if (!json) continue;
    const char* arguments[MAX_GROUPS];
    memcpy(arguments, convention[i].arguments, sizeof(arguments));
    size_t count = 0;
    while (arguments[count]) ++count;
    // Functions of a batch whose size is a range take the real one last.
    if (artifact->sizes.compiled && i != FUNCTION_INIT) arguments[count] = "size";
    status = read_groups(json, function->name, "arguments", arguments, function->arguments, leaf_count, out_error);
    if (status == FIXSTEP_OK) {
      status =
          read_groups(json, function->name, "results", convention[i].results, function->results, leaf_count, out_error);
    }
  }
  if (status != FIXSTEP_OK) return status;
  if (!json_is_object(functions) || found != json_object_size(functions)) {
    return fx_fail(out_error, FIXSTEP_ARTIFACT_ERROR,
                   "/functions: expected no others than init, step, evaluate, predict");
  }
  if (!artifact->functions[FUNCTION_STEP].present) {
    return fx_fail(out_error, FIXSTEP_ARTIFACT_ERROR, "/functions: step is missing");
  }
  return FIXSTEP_OK;
}

static status_t read_targets(fixstep_artifact_t* artifact, fixstep_error_t** out_error) {
  const json_t* list = json_object_get(artifact->manifest, "targets");
  size_t count = json_array_size(list);
  if (!count) return fx_fail(out_error, FIXSTEP_ARTIFACT_ERROR, "/targets: expected at least one target, got none");
  artifact->targets = fx_allocate_zeroed(count, sizeof(target_t));
  if (!artifact->targets) return fx_fail_memory(out_error);
  artifact->target_count = count;
  for (size_t i = 0; i < count; ++i) {
    const json_t* json = json_array_get(list, i);
    target_t* target = &artifact->targets[i];
    const char* module = json_string_value(json_object_get(json, "module"));
    target->text = json_string_value(json_object_get(json, "text"));
    target->
      requires
    = json_object_get(json, "requires");
    if (!target->text || !*target->text || !module || !json_is_object(target->requires)) {
      return fx_fail(out_error, FIXSTEP_ARTIFACT_ERROR, "/targets/%zu: expected text, module and requires", i);
    }
    target->module = fx_artifact_member(artifact, module);
    if (!target->module) {
      return fx_fail(out_error, FIXSTEP_ARTIFACT_ERROR, "/targets: the module '%.80s' of '%.80s' is no member", module,
                     target->text);
    }
    for (size_t j = 0; j < i; ++j) {
      if (strcmp(artifact->targets[j].text, target->text) == 0) {
        return fx_fail(out_error, FIXSTEP_ARTIFACT_ERROR, "/targets: '%.80s' occurs twice", target->text);
      }
    }
  }
  return FIXSTEP_OK;
}

static status_t read_template(fixstep_artifact_t* artifact, size_t* leaf_count, fixstep_error_t** out_error) {
  const json_t* template = json_object_get(artifact->manifest, "template");
  leaf_list_t* lists[] = {&artifact->state, &artifact->batch, &artifact->inputs};
  const char* const roles[] = {"state", "batch", "inputs"};
  const char* const where[] = {"/template/state", "/template/batch", "/template/inputs"};
  for (size_t i = 0; i < 3; ++i) {
    const json_t* leaves = json_object_get(template, roles[i]);
    *leaf_count += json_array_size(leaves);
    if (*leaf_count > MAX_LEAVES)
      return fx_fail(out_error, FIXSTEP_ARTIFACT_ERROR, "more than %d leaves in all", MAX_LEAVES);
    status_t status = fx_leaf_list_parse(leaves, where[i], FIXSTEP_ARTIFACT_ERROR, lists[i], out_error);
    if (status != FIXSTEP_OK) return status;
  }
  return FIXSTEP_OK;
}

static status_t check_sizes(const fixstep_artifact_t* artifact, fixstep_error_t** out_error) {
  const function_t* functions = artifact->functions;
  const leaf_list_t* metrics = fx_function_leaves(&functions[FUNCTION_STEP], "metrics");
  const leaf_list_t* evaluation = fx_function_leaves(&functions[FUNCTION_EVALUATE], "metrics");
  const leaf_list_t* outputs = fx_function_leaves(&functions[FUNCTION_PREDICT], "outputs");
  const leaf_list_t* const lists[] = {&artifact->batch, &artifact->inputs, metrics, evaluation, outputs};
  const char* const roles[] = {"batch", "inputs", "metrics", "evaluation", "outputs"};
  status_t status = FIXSTEP_OK;
  for (size_t i = 0; i < 5 && status == FIXSTEP_OK; ++i) {
    status = fx_sizes_check(&artifact->sizes, roles[i], lists[i], out_error);
  }
  for (size_t f = FUNCTION_STEP; f < FUNCTION_COUNT && status == FIXSTEP_OK; ++f) {
    const leaf_list_t* size = fx_function_leaves(&functions[f], "size");
    if (!functions[f].present) continue;
    if (!size || size->count != 1 || size->items[0].dtype != FIXSTEP_INT32 || size->items[0].rank) {
      status = fx_fail(out_error, FIXSTEP_ARTIFACT_ERROR, "/functions/%s/arguments: expected one int32 scalar as size",
                       functions[f].name);
    }
  }
  return status;
}

// Parts that are each valid and do not fit together.
static status_t check_agreement(const fixstep_artifact_t* artifact, fixstep_error_t** out_error) {
  const leaf_list_t* const held[] = {&artifact->state, &artifact->batch, &artifact->inputs};
  const char* const roles[] = {"state", "batch", "inputs"};
  for (size_t f = 0; f < FUNCTION_COUNT; ++f) {
    const function_t* function = &artifact->functions[f];
    for (size_t g = 0; g < 2 * MAX_GROUPS; ++g) {
      const group_t* group = g < MAX_GROUPS ? &function->arguments[g] : &function->results[g - MAX_GROUPS];
      for (size_t r = 0; group->role && r < 3; ++r) {
        if (strcmp(group->role, roles[r]) == 0 && !fx_leaf_list_equal(&group->leaves, held[r], false)) {
          return fx_fail(out_error, FIXSTEP_ARTIFACT_ERROR, "/functions/%s: %s differs from the template's",
                         function->name, roles[r]);
        }
      }
    }
    if (f != FUNCTION_STEP && f != FUNCTION_EVALUATE) continue;
    const leaf_list_t* results = &function->results[f == FUNCTION_STEP ? 1 : 0].leaves;
    if (!fx_leaf_list_equal(&function->arguments[1].leaves, results, false)) {
      return fx_fail(out_error, FIXSTEP_ARTIFACT_ERROR,
                     "/functions/%s: the accumulators of arguments and results differ", function->name);
    }
  }
  if (!artifact->functions[FUNCTION_INIT].present && !fx_artifact_member(artifact, STATE_NAME)) {
    return fx_fail(out_error, FIXSTEP_ARTIFACT_ERROR,
                   "/functions: neither init nor a member %s says what the first state is", STATE_NAME);
  }
  return FIXSTEP_OK;
}

static status_t read_parts(fixstep_artifact_t* artifact, fixstep_error_t** out_error) {
  artifact->name = json_string_value(json_object_get(artifact->manifest, "name"));
  artifact->program = json_string_value(json_object_get(artifact->manifest, "program"));
  if (!artifact->name || !*artifact->name) return fx_fail(out_error, FIXSTEP_ARTIFACT_ERROR, "/name: expected text");
  if (!is_digest(artifact->program)) {
    return fx_fail(out_error, FIXSTEP_ARTIFACT_ERROR, "/program: expected 64 lowercase hexadecimal digits");
  }
  size_t leaf_count = 0;
  const json_t* sizes = json_object_get(artifact->manifest, "sizes");
  status_t status = sizes ? fx_sizes_parse(sizes, &artifact->sizes, out_error) : FIXSTEP_OK;
  if (status == FIXSTEP_OK) status = read_template(artifact, &leaf_count, out_error);
  if (status == FIXSTEP_OK) status = read_functions(artifact, &leaf_count, out_error);
  if (status == FIXSTEP_OK) status = read_targets(artifact, out_error);
  if (status == FIXSTEP_OK) status = check_agreement(artifact, out_error);
  if (status == FIXSTEP_OK && sizes) status = check_sizes(artifact, out_error);
  return status;
}

status_t fx_manifest_read(fixstep_artifact_t* artifact, fixstep_error_t** out_error) {
  const member_t* member = &artifact->members[0];
  if (member->byte_length > MAX_MANIFEST_BYTE_LENGTH) {
    return fx_fail(out_error, FIXSTEP_ARTIFACT_ERROR, "%zu bytes, more than the %u allowed", member->byte_length,
                   MAX_MANIFEST_BYTE_LENGTH);
  }
  status_t status = fx_json_parse((const char*)member->data, member->byte_length, FIXSTEP_ARTIFACT_ERROR,
                                  &artifact->manifest, out_error);
  if (status == FIXSTEP_OK) status = check_version(artifact->manifest, out_error);
  if (status == FIXSTEP_OK) status = read_parts(artifact, out_error);
  return status;
}

static void describe_difference(text_t* text, const member_t* member, const json_t* described) {
  uint64_t byte_length;
  const char* expected = json_string_value(json_object_get(described, "sha256"));
  char got[DIGEST_LENGTH + 1];
  if (!is_digest(expected) || !fx_json_count(json_object_get(described, "byte_length"), INT64_MAX, &byte_length)) {
    fx_text_add(text, "\n  %s: expected its length and SHA-256 in the manifest", member->name);
  } else if (byte_length != member->byte_length) {
    fx_text_add(text, "\n  %s: expected %llu bytes, got %zu", member->name, (unsigned long long)byte_length,
                member->byte_length);
  } else {
    fx_digest_of(member->data, member->byte_length, got);
    if (strcmp(got, expected) != 0)
      fx_text_add(text, "\n  %s: expected SHA-256 %s, got %s", member->name, expected, got);
  }
}

status_t fx_manifest_check_members(const fixstep_artifact_t* artifact, fixstep_error_t** out_error) {
  const json_t* described = json_object_get(artifact->manifest, "members");
  text_t text = {0};
  size_t found = 0;
  for (size_t i = 1; i < artifact->member_count; ++i) {
    const json_t* json = json_object_get(described, artifact->members[i].name);
    if (json) {
      ++found;
      describe_difference(&text, &artifact->members[i], json);
    } else {
      fx_text_add(&text, "\n  %s: unexpected, %zu bytes", artifact->members[i].name, artifact->members[i].byte_length);
    }
  }
  if (!json_is_object(described) || json_object_size(described) != found) fx_text_add(&text, "\n  some are missing");
  if (!text.length && !text.failed) return FIXSTEP_OK;
  status_t status = fx_fail(out_error, FIXSTEP_ARTIFACT_ERROR, "the members are not those of the manifest:%s",
                            text.data ? text.data : "");
  fx_text_release(&text);
  return status;
}
