#include "devices.h"

#include <stdlib.h>
#include <strings.h>

static void release_device(fixstep_listed_t* device) {
  free((char*)device->name);
  free((char*)device->description);
}

static void add_device(void* context, const fixstep_listed_t* device) {
  device_list_t* list = context;
  fixstep_listed_t* items = realloc(list->items, (list->count + 1) * sizeof(*items));
  if (items) list->items = items;
  fixstep_listed_t copy = {fx_copy_text(device->name, strlen(device->name)),
                           fx_copy_text(device->description, strlen(device->description)), device->software};
  if (items && copy.name && copy.description) {
    items[list->count++] = copy;
  } else {
    list->failed = true;
    release_device(&copy);
  }
}

void fx_devices_read(const fixstep_backend_t* backend, const target_t* target, device_list_t* list) {
  fx_devices_release(list);
  list->family = fx_target_family(target->text);
  fixstep_error_t* error = NULL;
  status_t status = FIXSTEP_OK;
  if (list->family) status = backend->list(list->family, add_device, list, &error);
  if (!list->family || list->failed) {
    fx_text_add(&list->reason, "out of memory");
  } else if (status != FIXSTEP_OK) {
    fx_text_add(&list->reason, "%s", fixstep_error_message(error));
  } else if (!list->count) {
    fx_text_add(&list->reason, "the driver of this machine lists no device");
  }
  fixstep_error_release(error);
}

void fx_devices_release(device_list_t* list) {
  for (size_t i = 0; i < list->count; ++i) release_device(&list->items[i]);
  free(list->items);
  free(list->family);
  fx_text_release(&list->reason);
  *list = (device_list_t){0};
}

bool fx_devices_has_gpu(const device_list_t* list) {
  for (size_t i = 0; i < list->count; ++i) {
    if (!list->items[i].software) return !list->reason.length;
  }
  return false;
}

static bool contains(const char* name, const char* part) {
  size_t length = strlen(part);
  for (; strlen(name) >= length; ++name) {
    if (strncasecmp(name, part, length) == 0) return true;
  }
  return false;
}

static bool is_named(const device_list_t* list, size_t index, const char* wanted) {
  if (!wanted) return true;
  bool number = *wanted && strspn(wanted, "0123456789") == strlen(wanted);
  return number ? strtoull(wanted, NULL, 10) == index : contains(list->items[index].name, wanted);
}

// Whether any device runs the code; adds why each of them does not, if none does.
static bool any_runs(const device_list_t* list, const target_t* target, text_t* out_reasons) {
  bool found = false;
  for (size_t i = 0; i < list->count && !found; ++i) {
    text_t reason = {0};
    fx_target_lacks(target, &list->items[i], &reason);
    found = !reason.length;
    if (!found) fx_text_add(out_reasons, "%s%s", i ? "; " : "", reason.data);
    fx_text_release(&reason);
  }
  if (found) fx_text_release(out_reasons);
  return found;
}

// The first device of a kind that `wanted` names and that runs the code. Adds why the first of that name does not.
static bool find(const device_list_t* list, bool software, const target_t* target, const char* wanted,
                 size_t* out_index, text_t* out_reason) {
  bool found = false;
  for (size_t i = 0; i < list->count && !found; ++i) {
    if (list->items[i].software != software || !is_named(list, i, wanted)) continue;
    text_t reason = {0};
    fx_target_lacks(target, &list->items[i], &reason);
    found = !reason.length;
    if (found) *out_index = i;
    if (!found && !out_reason->length) fx_text_add(out_reason, "%s", reason.data);
    fx_text_release(&reason);
  }
  return found;
}

static void add_no_device(const device_list_t* list, const char* wanted, text_t* out_reason) {
  fx_text_add(out_reason, "no device ");
  fx_text_add_repr(out_reason, wanted);
  fx_text_add(out_reason, " of target %s; there are: ", list->family);
  for (size_t i = 0; i < list->count; ++i) {
    fx_text_add(out_reason, "%s%zu: %s", i ? ", " : "", i, list->items[i].name);
  }
}

bool fx_devices_choose(const device_list_t* list, const target_t* target, const char* wanted, size_t* out_index,
                       text_t* out_reason) {
  if (list->reason.length) fx_text_add(out_reason, "%s", list->reason.data);
  if (list->reason.length || !any_runs(list, target, out_reason)) return false;
  bool found = find(list, /*software=*/false, target, wanted, out_index, out_reason) ||
               find(list, /*software=*/true, target, wanted, out_index, out_reason);
  if (found) fx_text_release(out_reason);
  if (!found && !out_reason->length) add_no_device(list, wanted, out_reason);
  return found;
}
