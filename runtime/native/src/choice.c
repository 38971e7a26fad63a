// The target that a session runs on.

#include <stdlib.h>

#include "devices.h"
#include "session.h"

static size_t bytes_of(const leaf_list_t* leaves) {
  size_t total = 0;
  for (size_t i = 0; i < leaves->count; ++i) {
    if (!add(total, leaves->items[i].byte_length, &total)) return SIZE_MAX;
  }
  return total;
}

// Opens one target's device, or adds the reason why not. `devices`: the list of its family, NULL for the CPU.
static bool try_target(fixstep_session_t* session, const target_t* target, const device_list_t* devices,
                       const char* device, text_t* reason) {
  fixstep_device_options_t options = {
      .device = device, .module = target->module->data, .module_byte_length = target->module->byte_length};
  fx_target_unavailable(target, reason);
  if (reason->length) return false;
  if (devices && !fx_devices_choose(devices, target, device, &options.index, reason)) return false;
  size_t bytes_per_step;
  if (!add(bytes_of(&session->artifact->state), bytes_of(&session->artifact->batch), &bytes_per_step)) {
    bytes_per_step = SIZE_MAX;
  }
  options.threaded = fx_target_is_threaded(bytes_per_step);
  char* family = fx_target_family(target->text);
  options.family = family;
  fixstep_error_t* error = NULL;
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

// The devices of a target's family, which are listed when they are first asked for; NULL for the CPU. `lists` has room
// for the family of each target.
static const device_list_t* devices_of(const fixstep_session_t* session, const target_t* target, device_list_t* lists) {
  if (fx_target_is_cpu(target->text)) return NULL;
  while (lists->family && !is_wanted(target->text, lists->family)) ++lists;
  if (!lists->family) fx_devices_read(session->backend, target, lists);
  return lists;
}

// Tries the targets of a rank that are wanted, in the artifact's order, until one opens.
static bool try_rank(fixstep_session_t* session, const fixstep_session_options_t* options, int rank,
                     device_list_t* lists) {
  bool opened = false;
  for (size_t i = 0; i < session->artifact->target_count && !opened; ++i) {
    const target_t* target = &session->artifact->targets[i];
    if (!is_wanted(target->text, options->target)) continue;
    const device_list_t* devices = devices_of(session, target, lists);
    if (fx_target_rank(target->text, devices && fx_devices_has_gpu(devices)) != rank) continue;
    text_t reason = {0};
    session->target = target;
    opened = try_target(session, target, devices, options->device, &reason);
    if (!opened) {
      fx_text_add(&session->passed_over, "%s%s: %s", session->passed_over.length ? "\n" : "", target->text,
                  reason.data ? reason.data : "");
    }
    fx_text_release(&reason);
  }
  return opened;
}

static status_t fail_choice(const fixstep_session_t* session, const char* wanted, fixstep_error_t** out_error) {
  if (session->target) {
    return fx_fail(out_error, FIXSTEP_TARGET_ERROR, "no target of the artifact runs on this machine:\n%s",
                   session->passed_over.data ? session->passed_over.data : "");
  }
  text_t message = {0};
  fx_text_add(&message, "the artifact has no code for target ");
  fx_text_add_repr(&message, wanted);
  fx_text_add(&message, "; it was compiled for ");
  for (size_t i = 0; i < session->artifact->target_count; ++i) {
    fx_text_add(&message, "%s%s", i ? ", " : "", session->artifact->targets[i].text);
  }
  return fx_fail_with_text(out_error, FIXSTEP_TARGET_ERROR, &message);
}

// The first target, best rank first, whose device opens and whose code loads.
status_t fx_session_choose_target(fixstep_session_t* session, const fixstep_session_options_t* options,
                                  fixstep_error_t** out_error) {
  size_t count = session->artifact->target_count;
  device_list_t* lists = fx_allocate_zeroed(count, sizeof(*lists));
  if (!lists) return fx_fail_memory(out_error);
  bool opened = false;
  for (int rank = 0; rank < TARGET_RANKS && !opened; ++rank) opened = try_rank(session, options, rank, lists);
  for (size_t i = 0; i < count; ++i) fx_devices_release(&lists[i]);
  free(lists);
  return opened ? FIXSTEP_OK : fail_choice(session, options->target, out_error);
}
