// What runs compiled modules: the one interface between the library and a runtime such as IREE.
//
// The library brings its own backend where it was built with IREE. Another one is for programs that already hold a
// runtime, and for tests. This interface may change from version to version.

#ifndef FIXSTEP_BACKEND_H_
#define FIXSTEP_BACKEND_H_

#include "fixstep.h"

#ifdef __cplusplus
extern "C" {
#endif

// One device with one loaded module; a buffer on it. Each backend defines its own.
typedef struct fixstep_device_t fixstep_device_t;
typedef struct fixstep_buffer_t fixstep_buffer_t;

// A device as its driver lists it.
typedef struct fixstep_listed_t {
  const char* name;         // what the driver calls it
  const char* description;  // what else IREE prints of it, such as `shaderInt8=yes`: code may require it; "" if unknown
  bool software;            // whether it is a program on the CPU
} fixstep_listed_t;

// Takes note of a device, whose text is read during the call alone.
typedef void (*fixstep_list_visitor_t)(void* context, const fixstep_listed_t* device);

typedef struct fixstep_device_options_t {
  const char* family;  // `cpu`, `vulkan`, `cuda`
  const char* device;  // of the CPU: as the caller named it, or NULL
  size_t index;        // of another family: the place in its list
  bool threaded;       // whether worker threads are worth their cost, and safe
  const void* module;  // the compiled module, at a multiple of 64 bytes; it outlives the device
  size_t module_byte_length;
} fixstep_device_options_t;

// All functions report through fixstep_backend_fail; each returns FIXSTEP_OK or what that returned.
typedef struct fixstep_backend_t {
  const char* name;
  // Visits the devices of a family in the order of its driver, which counts them from 0. It fails where there is no
  // driver. The CPU is never asked for: a machine has one, and how it runs code has names.
  fixstep_status_t (*list)(const char* family, fixstep_list_visitor_t visit, void* context,
                           fixstep_error_t** out_error);
  fixstep_status_t (*open)(const fixstep_device_options_t* options, fixstep_device_t** out_device,
                           fixstep_error_t** out_error);
  void (*close)(fixstep_device_t* device);
  // A buffer of its own storage for a leaf; `data` (leaf->byte_length bytes) is copied, NULL fills it with zeros.
  fixstep_status_t (*allocate)(fixstep_device_t* device, const fixstep_leaf_t* leaf, const void* data,
                               fixstep_buffer_t** out_buffer, fixstep_error_t** out_error);
  void (*release)(fixstep_device_t* device, fixstep_buffer_t* buffer);
  // Replaces the contents of a buffer, after every call that reads them.
  fixstep_status_t (*write)(fixstep_device_t* device, fixstep_buffer_t* buffer, const fixstep_leaf_t* leaf,
                            const void* data, fixstep_error_t** out_error);
  // Copies a buffer to the host, waiting for the call that writes it.
  fixstep_status_t (*read)(fixstep_device_t* device, fixstep_buffer_t* buffer, const fixstep_leaf_t* leaf, void* data,
                           fixstep_error_t** out_error);
  // Calls a function. Its arguments are [argument_count] buffers; the last `storage_count` of them are storage for its
  // first results. The [result_count] results after those are allocated by the call; the caller releases each.
  fixstep_status_t (*invoke)(fixstep_device_t* device, const char* function, fixstep_buffer_t* const* arguments,
                             const fixstep_leaf_t* const* argument_leaves, size_t argument_count, size_t storage_count,
                             const fixstep_leaf_t* result_leaves, size_t result_count, fixstep_buffer_t** out_results,
                             fixstep_error_t** out_error);
} fixstep_backend_t;

// Makes an error with a text that is formatted as printf does.
FIXSTEP_API fixstep_status_t fixstep_backend_fail(fixstep_error_t** out_error, fixstep_status_t status,
                                                  const char* format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 3, 4)))
#endif
    ;

#ifdef __cplusplus
}
#endif

#endif  // FIXSTEP_BACKEND_H_
