// The backend on IREE's C API: the one file that knows IREE.
//
// It keeps to the headers that hold from release to release (iree/runtime/api.h and what that includes), to
// iree/modules/hal/types.h for the fences of modules that return before the device is done, and to proactor_pool.h for
// what a device that is not the default one is made with.

#include <inttypes.h>
#include <iree/async/util/proactor_pool.h>
#include <iree/modules/hal/types.h>
#include <iree/runtime/api.h>
#include <stdlib.h>
#include <string.h>

#include "fixstep_backend.h"

#define MAX_RANK 32
// Calls that may be under way on the device; more would only hold memory.
#define IN_FLIGHT 8

// What a call reads, kept until it is done.
typedef struct held_t {
  uint64_t number;  // that the call signals
  iree_runtime_call_t call;
} held_t;

struct fixstep_device_t {
  iree_runtime_instance_t* instance;
  iree_runtime_session_t* session;
  iree_vm_module_t* module;         // belongs to the session
  iree_hal_semaphore_t* semaphore;  // of the calls that take fences; NULL before the first one
  uint64_t last;                    // the number that the last such call signals
  held_t held[IN_FLIGHT];           // the oldest first
  size_t held_count;
};

struct fixstep_buffer_t {
  iree_hal_buffer_view_t* view;
};

// Turns IREE's status into ours, with the first line of its text; takes it.
static fixstep_status_t fail_iree(fixstep_error_t** out_error, fixstep_status_t code, const char* what,
                                  iree_status_t status) {
  iree_allocator_t allocator = iree_allocator_system();
  char* text = NULL;
  iree_host_size_t length = 0;
  bool has_text = iree_status_to_string(status, &allocator, &text, &length);
  iree_status_free(status);
  int first_line = has_text ? (int)strcspn(text, "\n") : 0;
  code = fixstep_backend_fail(out_error, code, "%s%.*s", what, first_line, has_text ? text : "");
  if (has_text) iree_allocator_free(allocator, text);
  return code;
}

static iree_hal_element_type_t element_type(fixstep_dtype_t dtype) {
  switch (dtype) {
    case FIXSTEP_BOOL:
      return IREE_HAL_ELEMENT_TYPE_BOOL_8;
    case FIXSTEP_INT8:
      return IREE_HAL_ELEMENT_TYPE_SINT_8;
    case FIXSTEP_INT16:
      return IREE_HAL_ELEMENT_TYPE_SINT_16;
    case FIXSTEP_INT32:
      return IREE_HAL_ELEMENT_TYPE_SINT_32;
    case FIXSTEP_INT64:
      return IREE_HAL_ELEMENT_TYPE_SINT_64;
    case FIXSTEP_UINT8:
      return IREE_HAL_ELEMENT_TYPE_UINT_8;
    case FIXSTEP_UINT16:
      return IREE_HAL_ELEMENT_TYPE_UINT_16;
    case FIXSTEP_UINT32:
      return IREE_HAL_ELEMENT_TYPE_UINT_32;
    case FIXSTEP_UINT64:
      return IREE_HAL_ELEMENT_TYPE_UINT_64;
    case FIXSTEP_FLOAT16:
      return IREE_HAL_ELEMENT_TYPE_FLOAT_16;
    case FIXSTEP_BFLOAT16:
      return IREE_HAL_ELEMENT_TYPE_BFLOAT_16;
    case FIXSTEP_FLOAT32:
      return IREE_HAL_ELEMENT_TYPE_FLOAT_32;
    case FIXSTEP_FLOAT64:
      return IREE_HAL_ELEMENT_TYPE_FLOAT_64;
    case FIXSTEP_COMPLEX64:
      return IREE_HAL_ELEMENT_TYPE_COMPLEX_FLOAT_64;
    case FIXSTEP_COMPLEX128:
      return IREE_HAL_ELEMENT_TYPE_COMPLEX_FLOAT_128;
    default:  // types below eight bits and eight-bit floats travel as their bits
      return IREE_HAL_ELEMENT_TYPE_UINT_8;
  }
}

// The CPU has two drivers: one that runs in the calling thread, one with worker threads.
static const char* cpu_driver_of(const fixstep_device_options_t* options) {
  if (options->device) return options->device;
  return options->threaded ? "local-task" : "local-sync";
}

static bool is_cpu(const fixstep_device_options_t* options) { return strcmp(options->family, "cpu") == 0; }

static iree_status_t make_driver(iree_hal_driver_registry_t* registry, const char* name,
                                 iree_hal_driver_t** out_driver) {
  return iree_hal_driver_registry_try_create(registry, iree_make_cstring_view(name), iree_allocator_system(),
                                             out_driver);
}

// Visits one device. IREE marks a program on the CPU by a line of what it prints of a device.
static iree_status_t visit_device(iree_hal_driver_t* driver, const iree_hal_device_info_t* info,
                                  fixstep_list_visitor_t visit, void* context) {
  iree_string_builder_t name, description;
  iree_string_builder_initialize(iree_allocator_system(), &name);
  iree_string_builder_initialize(iree_allocator_system(), &description);
  iree_status_t status = iree_string_builder_append_string(&name, info->name);
  if (iree_status_is_ok(status)) status = iree_string_builder_append_cstring(&description, "\n");
  if (iree_status_is_ok(status)) status = iree_hal_driver_dump_device_info(driver, info->device_id, &description);
  if (iree_status_is_ok(status)) {
    const char* text = iree_string_builder_buffer(&description);
    const char* given = iree_string_builder_buffer(&name);
    visit(context, &(fixstep_listed_t){given ? given : "", text, strstr(text, "\ntype: cpu\n") != NULL});
  }
  iree_string_builder_deinitialize(&description);
  iree_string_builder_deinitialize(&name);
  return status;
}

static fixstep_status_t list_devices(const char* family, fixstep_list_visitor_t visit, void* context,
                                     fixstep_error_t** out_error) {
  iree_runtime_instance_options_t options;
  iree_runtime_instance_options_initialize(&options);
  iree_runtime_instance_options_use_all_available_drivers(&options);
  iree_hal_driver_t* driver = NULL;
  iree_hal_device_info_t* infos = NULL;
  iree_host_size_t count = 0;
  iree_status_t status = make_driver(options.driver_registry, family, &driver);
  if (iree_status_is_ok(status)) {
    status = iree_hal_driver_query_available_devices(driver, iree_allocator_system(), &count, &infos);
  }
  for (iree_host_size_t i = 0; i < count && iree_status_is_ok(status); ++i) {
    status = visit_device(driver, &infos[i], visit, context);
  }
  iree_allocator_free(iree_allocator_system(), infos);
  if (driver) iree_hal_driver_release(driver);
  if (iree_status_is_ok(status)) return FIXSTEP_OK;
  return fail_iree(out_error, FIXSTEP_TARGET_ERROR, "no such device: ", status);
}

// Opens a device by its place in the driver's list.
static iree_status_t open_listed(iree_runtime_instance_t* instance, const fixstep_device_options_t* options,
                                 iree_hal_device_t** out_device) {
  iree_hal_driver_t* driver = NULL;
  iree_async_proactor_pool_t* pool = NULL;
  iree_status_t status = make_driver(iree_runtime_instance_driver_registry(instance), options->family, &driver);
  if (iree_status_is_ok(status)) {
    status =
        iree_async_proactor_pool_create(/*node_count=*/1, /*node_ids=*/NULL, iree_async_proactor_pool_options_default(),
                                        iree_allocator_system(), &pool);
  }
  if (iree_status_is_ok(status)) {
    iree_hal_device_create_params_t parameters = iree_hal_device_create_params_default();
    parameters.proactor_pool = pool;
    status = iree_hal_driver_create_device_by_ordinal(driver, options->index, /*param_count=*/0, /*params=*/NULL,
                                                      &parameters, iree_allocator_system(), out_device);
  }
  if (pool) iree_async_proactor_pool_release(pool);
  if (driver) iree_hal_driver_release(driver);
  return status;
}

static iree_status_t open_session(fixstep_device_t* device, const fixstep_device_options_t* options) {
  iree_runtime_instance_options_t instance_options;
  iree_runtime_instance_options_initialize(&instance_options);
  iree_runtime_instance_options_use_all_available_drivers(&instance_options);
  iree_status_t status = iree_runtime_instance_create(&instance_options, iree_allocator_system(), &device->instance);
  iree_hal_device_t* hal_device = NULL;
  if (iree_status_is_ok(status) && is_cpu(options)) {
    status = iree_runtime_instance_try_create_default_device(
        device->instance, iree_make_cstring_view(cpu_driver_of(options)), &hal_device);
  } else if (iree_status_is_ok(status)) {
    status = open_listed(device->instance, options, &hal_device);
  }
  if (iree_status_is_ok(status)) {
    iree_runtime_session_options_t session_options;
    iree_runtime_session_options_initialize(&session_options);
    status = iree_runtime_session_create_with_device(device->instance, &session_options, hal_device,
                                                     iree_allocator_system(), &device->session);
  }
  if (hal_device) iree_hal_device_release(hal_device);
  if (iree_status_is_ok(status)) {
    iree_const_byte_span_t module = iree_make_const_byte_span(options->module, options->module_byte_length);
    status = iree_runtime_session_append_bytecode_module_from_memory(device->session, module, iree_allocator_null());
  }
  if (iree_status_is_ok(status)) {
    iree_vm_context_t* context = iree_runtime_session_context(device->session);
    device->module = iree_vm_context_module_at(context, iree_vm_context_module_count(context) - 1);
  }
  return status;
}

// Waits until at most `most` calls are under way.
static iree_status_t wait_until(fixstep_device_t* device, size_t most) {
  iree_status_t status = iree_ok_status();
  size_t done = device->held_count > most ? device->held_count - most : 0;
  if (done) {
    status = iree_hal_semaphore_wait(device->semaphore, device->held[done - 1].number, iree_infinite_timeout(),
                                     IREE_ASYNC_WAIT_FLAG_NONE);
  }
  for (size_t i = 0; i < done; ++i) iree_runtime_call_deinitialize(&device->held[i].call);
  device->held_count -= done;
  memmove(device->held, device->held + done, device->held_count * sizeof(held_t));
  return status;
}

// Begins the order anew after work that could not be handed over: nothing will ever signal its number.
static void forget_order(fixstep_device_t* device) {
  iree_status_free(wait_until(device, 0));
  if (device->semaphore) iree_hal_semaphore_release(device->semaphore);
  device->semaphore = NULL;
}

static void close_device(fixstep_device_t* device) {
  if (device->semaphore) iree_status_free(wait_until(device, 0));
  if (device->semaphore) iree_hal_semaphore_release(device->semaphore);
  if (device->session) iree_runtime_session_release(device->session);
  if (device->instance) iree_runtime_instance_release(device->instance);
  free(device);
}

static fixstep_status_t open_device(const fixstep_device_options_t* options, fixstep_device_t** out_device,
                                    fixstep_error_t** out_error) {
  *out_device = NULL;
  const char* driver = cpu_driver_of(options);
  if (is_cpu(options) && strcmp(driver, "local-sync") != 0 && strcmp(driver, "local-task") != 0) {
    return fixstep_backend_fail(out_error, FIXSTEP_TARGET_ERROR,
                                "unknown device '%s' of target cpu: expected local-sync or local-task", driver);
  }
  fixstep_device_t* device = calloc(1, sizeof(*device));
  if (!device) return fixstep_backend_fail(out_error, FIXSTEP_OUT_OF_MEMORY, "out of memory");
  iree_status_t status = open_session(device, options);
  if (iree_status_is_ok(status)) {
    *out_device = device;
    return FIXSTEP_OK;
  }
  bool has_device = device->session != NULL;
  close_device(device);
  return fail_iree(out_error, has_device ? FIXSTEP_DEVICE_ERROR : FIXSTEP_TARGET_ERROR,
                   has_device ? "the device does not load the compiled code: " : "no such device: ", status);
}

static fixstep_status_t allocate(fixstep_device_t* device, const fixstep_leaf_t* leaf, const void* data,
                                 fixstep_buffer_t** out_buffer, fixstep_error_t** out_error) {
  // Memory that the host can map, where the driver has it.
  static const iree_hal_buffer_params_t places[] = {
      {.type = IREE_HAL_MEMORY_TYPE_DEVICE_LOCAL | IREE_HAL_MEMORY_TYPE_HOST_VISIBLE,
       .usage = IREE_HAL_BUFFER_USAGE_DEFAULT | IREE_HAL_BUFFER_USAGE_MAPPING},
      {.type = IREE_HAL_MEMORY_TYPE_DEVICE_LOCAL, .usage = IREE_HAL_BUFFER_USAGE_DEFAULT},
  };
  *out_buffer = NULL;
  iree_hal_dim_t shape[MAX_RANK];
  fixstep_buffer_t* buffer = leaf->rank <= MAX_RANK ? calloc(1, sizeof(*buffer)) : NULL;
  void* zeros = data ? NULL : calloc(1, leaf->byte_length + 1);
  if (!buffer || (!data && !zeros)) {
    free(buffer);
    free(zeros);
    return fixstep_backend_fail(out_error, FIXSTEP_OUT_OF_MEMORY, "%s: out of memory", leaf->path);
  }
  for (size_t i = 0; i < leaf->rank; ++i) shape[i] = (iree_hal_dim_t)leaf->shape[i];
  iree_status_t status = iree_ok_status();
  for (size_t i = 0; i < sizeof(places) / sizeof(places[0]) && !buffer->view; ++i) {
    iree_status_free(status);
    status = iree_hal_buffer_view_allocate_buffer_copy(
        iree_runtime_session_device(device->session), iree_runtime_session_device_allocator(device->session),
        leaf->rank, shape, element_type(leaf->dtype), IREE_HAL_ENCODING_TYPE_DENSE_ROW_MAJOR, places[i],
        iree_make_const_byte_span(data ? data : zeros, leaf->byte_length), &buffer->view);
  }
  free(zeros);
  if (iree_status_is_ok(status)) {
    *out_buffer = buffer;
    return FIXSTEP_OK;
  }
  free(buffer);
  char what[128];
  snprintf(what, sizeof(what), "%.80s: the device has no room: ", leaf->path);
  return fail_iree(out_error, FIXSTEP_DEVICE_ERROR, what, status);
}

static void release(fixstep_device_t* device, fixstep_buffer_t* buffer) {
  (void)device;
  if (buffer->view) iree_hal_buffer_view_release(buffer->view);
  free(buffer);
}

static bool is_mapped(iree_hal_buffer_t* buffer) {
  return iree_all_bits_set(iree_hal_buffer_memory_type(buffer), IREE_HAL_MEMORY_TYPE_HOST_VISIBLE) &&
         iree_all_bits_set(iree_hal_buffer_allowed_usage(buffer), IREE_HAL_BUFFER_USAGE_MAPPING_SCOPED);
}

static fixstep_status_t write_buffer(fixstep_device_t* device, fixstep_buffer_t* buffer, const fixstep_leaf_t* leaf,
                                     const void* data, fixstep_error_t** out_error) {
  if (!leaf->byte_length) return FIXSTEP_OK;
  iree_hal_buffer_t* target = iree_hal_buffer_view_buffer(buffer->view);
  // While calls are under way that may read it, they keep the old buffer, and this gets a new one.
  if (!device->held_count && is_mapped(target)) {
    iree_status_t status = iree_hal_buffer_map_write(target, 0, data, leaf->byte_length);
    if (iree_status_is_ok(status)) return FIXSTEP_OK;
    return fail_iree(out_error, FIXSTEP_DEVICE_ERROR, "a buffer could not be written: ", status);
  }
  fixstep_buffer_t* made;
  fixstep_status_t status = allocate(device, leaf, data, &made, out_error);
  if (status != FIXSTEP_OK) return status;
  iree_hal_buffer_view_release(buffer->view);
  buffer->view = made->view;
  free(made);
  return FIXSTEP_OK;
}

// Reads through a buffer that the host can map. Which memory that is differs by driver.
static iree_status_t read_staged(fixstep_device_t* device, iree_hal_buffer_t* source, void* data, size_t byte_length) {
  static const iree_hal_buffer_params_t places[] = {
      {.type = IREE_HAL_MEMORY_TYPE_HOST_LOCAL | IREE_HAL_MEMORY_TYPE_DEVICE_VISIBLE,
       .usage = IREE_HAL_BUFFER_USAGE_TRANSFER_TARGET | IREE_HAL_BUFFER_USAGE_MAPPING_SCOPED},
      {.type = IREE_HAL_MEMORY_TYPE_DEVICE_LOCAL | IREE_HAL_MEMORY_TYPE_HOST_VISIBLE,
       .usage = IREE_HAL_BUFFER_USAGE_DEFAULT | IREE_HAL_BUFFER_USAGE_MAPPING},
  };
  iree_hal_buffer_t* staging = NULL;
  iree_status_t status = iree_ok_status();
  for (size_t i = 0; i < sizeof(places) / sizeof(places[0]) && !staging; ++i) {
    iree_status_free(status);
    status = iree_hal_allocator_allocate_buffer(iree_runtime_session_device_allocator(device->session), places[i],
                                                byte_length, &staging);
  }
  if (iree_status_is_ok(status)) {
    status = iree_hal_device_transfer_d2d(iree_runtime_session_device(device->session), source, 0, staging, 0,
                                          byte_length, IREE_HAL_TRANSFER_BUFFER_FLAG_DEFAULT, iree_infinite_timeout());
  }
  if (iree_status_is_ok(status)) status = iree_hal_buffer_map_read(staging, 0, data, byte_length);
  if (staging) iree_hal_buffer_release(staging);
  return status;
}

static fixstep_status_t read_buffer(fixstep_device_t* device, fixstep_buffer_t* buffer, const fixstep_leaf_t* leaf,
                                    void* data, fixstep_error_t** out_error) {
  if (!leaf->byte_length) return FIXSTEP_OK;
  iree_hal_buffer_t* source = iree_hal_buffer_view_buffer(buffer->view);
  if (iree_hal_buffer_byte_length(source) < leaf->byte_length) {
    return fixstep_backend_fail(out_error, FIXSTEP_DEVICE_ERROR, "%s: the device gave %zu bytes, expected %zu",
                                leaf->path, (size_t)iree_hal_buffer_byte_length(source), leaf->byte_length);
  }
  iree_status_t status = wait_until(device, 0);
  if (!iree_status_is_ok(status)) {
    return fail_iree(
        out_error, FIXSTEP_DEVICE_ERROR,
        "the device failed in a call that it had taken; this session's state is lost: open another one and "
        "restore the last checkpoint: ",
        status);
  }
  status = is_mapped(source) ? iree_hal_buffer_map_read(source, 0, data, leaf->byte_length)
                             : read_staged(device, source, data, leaf->byte_length);
  if (iree_status_is_ok(status)) return FIXSTEP_OK;
  return fail_iree(out_error, FIXSTEP_DEVICE_ERROR, "a buffer could not be read back: ", status);
}

// Adds the fence to wait for and the one to signal, for a function that returns before the device is done.
static iree_status_t push_fences(fixstep_device_t* device, iree_vm_list_t* inputs) {
  iree_status_t status = iree_ok_status();
  if (!device->semaphore) {
    status = iree_hal_semaphore_create(iree_runtime_session_device(device->session), IREE_HAL_QUEUE_AFFINITY_ANY,
                                       /*initial_value=*/0, IREE_HAL_SEMAPHORE_FLAG_DEFAULT, &device->semaphore);
    device->last = 0;
  }
  for (uint64_t i = 0; i < 2 && iree_status_is_ok(status); ++i) {
    iree_hal_fence_t* fence = NULL;
    status = iree_hal_fence_create_at(device->semaphore, device->last + i, iree_allocator_system(), &fence);
    if (!iree_status_is_ok(status)) break;
    iree_vm_ref_t ref = iree_hal_fence_move_ref(fence);
    status = iree_vm_list_push_ref_move(inputs, &ref);
    iree_vm_ref_release(&ref);
  }
  if (iree_status_is_ok(status)) ++device->last;
  return status;
}

// Runs a call, or hands it over where it takes fences.
static iree_status_t run(fixstep_device_t* device, iree_runtime_call_t* call, bool fenced) {
  if (!fenced) return iree_runtime_call_invoke(call, /*flags=*/0);
  iree_status_t status = wait_until(device, IN_FLIGHT - 1);
  if (iree_status_is_ok(status)) status = push_fences(device, iree_runtime_call_inputs(call));
  if (iree_status_is_ok(status)) status = iree_runtime_call_invoke(call, /*flags=*/0);
  if (!iree_status_is_ok(status)) forget_order(device);
  return status;
}

// Takes the results that do not lie in storage.
static iree_status_t take_results(iree_runtime_call_t* call, size_t storage_count, size_t result_count,
                                  fixstep_buffer_t** out_results) {
  iree_status_t status = iree_ok_status();
  for (size_t i = 0; i < storage_count + result_count && iree_status_is_ok(status); ++i) {
    iree_hal_buffer_view_t* view = NULL;
    status = iree_runtime_call_outputs_pop_front_buffer_view(call, &view);
    if (iree_status_is_ok(status) && i >= storage_count) {
      fixstep_buffer_t* buffer = calloc(1, sizeof(*buffer));
      out_results[i - storage_count] = buffer;
      if (buffer) {
        buffer->view = view;
        continue;
      }
      status = iree_make_status(IREE_STATUS_RESOURCE_EXHAUSTED, "out of memory");
    }
    if (view) iree_hal_buffer_view_release(view);
  }
  return status;
}

static fixstep_status_t invoke(fixstep_device_t* device, const char* function, fixstep_buffer_t* const* arguments,
                               const fixstep_leaf_t* const* argument_leaves, size_t argument_count,
                               size_t storage_count, const fixstep_leaf_t* result_leaves, size_t result_count,
                               fixstep_buffer_t** out_results, fixstep_error_t** out_error) {
  (void)argument_leaves;
  (void)result_leaves;
  iree_vm_function_t found;
  iree_runtime_call_t call;
  iree_status_t status = iree_vm_module_lookup_function_by_name(device->module, IREE_VM_FUNCTION_LINKAGE_EXPORT,
                                                                iree_make_cstring_view(function), &found);
  if (iree_status_is_ok(status)) status = iree_runtime_call_initialize(device->session, found, &call);
  if (!iree_status_is_ok(status)) return fail_iree(out_error, FIXSTEP_DEVICE_ERROR, "", status);
  for (size_t i = 0; i < argument_count && iree_status_is_ok(status); ++i) {
    status = iree_runtime_call_inputs_push_back_buffer_view(&call, arguments[i]->view);
  }
  iree_string_view_t model = iree_vm_function_lookup_attr_by_name(&found, IREE_SV("iree.abi.model"));
  bool fenced = iree_string_view_equal(model, IREE_SV("coarse-fences"));
  if (iree_status_is_ok(status)) status = run(device, &call, fenced);
  bool held = fenced && iree_status_is_ok(status);
  if (iree_status_is_ok(status)) status = take_results(&call, storage_count, result_count, out_results);
  if (held) {
    device->held[device->held_count++] = (held_t){device->last, call};
  } else {
    iree_runtime_call_deinitialize(&call);
  }
  if (iree_status_is_ok(status)) return FIXSTEP_OK;
  for (size_t i = 0; i < result_count; ++i) {
    if (out_results[i]) release(device, out_results[i]);
    out_results[i] = NULL;
  }
  return fail_iree(out_error, FIXSTEP_DEVICE_ERROR, "", status);
}

extern const fixstep_backend_t fixstep_backend_iree;
const fixstep_backend_t fixstep_backend_iree = {"iree",  list_devices, open_device, close_device, allocate,
                                                release, write_buffer, read_buffer, invoke};
