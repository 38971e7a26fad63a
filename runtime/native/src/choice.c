// The target that a session runs on.

#include <stdlib.h>

#include "session.h"
#include "target.h"

static size_t bytes_of(const leaf_list_t* leaves) {
  size_t total = 0;
  for (size_t i = 0; i < leaves->count; ++i) {
    if (!add(total, leaves->items[i].byte_length, &total)) return SIZE_MAX;
  }
  return total;
}

// Opens one target's device, or adds the reason why not. An error that is about the machine ends the search.
static bool try_target(fixstep_session_t* session, const target_t* target, const char* device, text_t* reason) {
  fx_target_unavailable(target, reason);
  if (reason->length) return false;
  size_t bytes_per_step;
  if (!add(bytes_of(&session->artifact->state), bytes_of(&session->artifact->batch), &bytes_per_step)) {
    bytes_per_step = SIZE_MAX;
  }
  char* family = fx_target_family(target->text);
  fixstep_error_t* error = NULL;
  const fixstep_device_options_t options = {family, device, fx_target_is_threaded(bytes_per_step),
                                            target->module->data, target->module->byte_length};
  bool opened = family && session->backend->open(&options, &session->device, &error) == FIXSTEP_OK;
  if (!opened) fx_text_add(reason, "%s", family ? fixstep_error_message(error) : "out of memory");
  fixstep_error_release(error);
  free(family);
  return opened;
}

static bool is_wanted(const char* text, const char* wanted) {
  return !wanted || strcmp(text, wanted) == 0 ||
         (strlen(wanted) == strcspn(text, ":") && strncmp(text, wanted, strlen(wanted)) == 0);
}

// The first target, best rank first, whose device opens and whose code loads.
status_t fx_session_choose_target(fixstep_session_t* session, const fixstep_session_options_t* options,
                                  fixstep_error_t** out_error) {
  const fixstep_artifact_t* artifact = session->artifact;
  size_t matching = 0;
  for (int rank = 0; rank < 4; ++rank) {
    for (size_t i = 0; i < artifact->target_count; ++i) {
      const target_t* target = &artifact->targets[i];
      if (fx_target_rank(target->text) != rank || !is_wanted(target->text, options->target)) continue;
      ++matching;
      text_t reason = {0};
      session->target = target;
      bool opened = try_target(session, target, options->device, &reason);
      if (!opened) {
        fx_text_add(&session->passed_over, "%s%s: %s", session->passed_over.length ? "\n" : "", target->text,
                    reason.data ? reason.data : "");
      }
      fx_text_release(&reason);
      if (opened) return FIXSTEP_OK;
    }
  }
  if (matching) {
    return fx_fail(out_error, FIXSTEP_TARGET_ERROR, "no target of the artifact runs on this machine:\n%s",
                   session->passed_over.data ? session->passed_over.data : "");
  }
  text_t message = {0};
  fx_text_add(&message, "the artifact has no code for target ");
  fx_text_add_repr(&message, options->target);
  fx_text_add(&message, "; it was compiled for ");
  for (size_t i = 0; i < artifact->target_count; ++i) {
    fx_text_add(&message, "%s%s", i ? ", " : "", artifact->targets[i].text);
  }
  return fx_fail_with_text(out_error, FIXSTEP_TARGET_ERROR, &message);
}
