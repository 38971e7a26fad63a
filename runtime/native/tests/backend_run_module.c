#include "backend_run_module.h"

#include <fcntl.h>
#include <inttypes.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern char** environ;

static const char* program_path;

// A folder for the module and the files of a call.
struct fixstep_device_t {
  char folder[64];
};

// A buffer is host memory.
struct fixstep_buffer_t {
  size_t byte_length;
  unsigned char data[];
};

static const char* element_type(fixstep_dtype_t dtype) {
  static const char* const types[] = {
      [FIXSTEP_BOOL] = "i1",     [FIXSTEP_INT8] = "i8",        [FIXSTEP_INT16] = "i16",
      [FIXSTEP_INT32] = "i32",   [FIXSTEP_INT64] = "i64",      [FIXSTEP_UINT8] = "ui8",
      [FIXSTEP_UINT16] = "ui16", [FIXSTEP_UINT32] = "ui32",    [FIXSTEP_UINT64] = "ui64",
      [FIXSTEP_FLOAT16] = "f16", [FIXSTEP_BFLOAT16] = "bf16",  [FIXSTEP_FLOAT32] = "f32",
      [FIXSTEP_FLOAT64] = "f64", [FIXSTEP_COMPLEX64] = "cf64", [FIXSTEP_COMPLEX128] = "cf128",
  };
  // Types below eight bits and eight-bit floats travel as their bits.
  return (size_t)dtype < sizeof(types) / sizeof(types[0]) ? types[dtype] : "ui8";
}

static char* text(const char* before, const char* after) {
  size_t length = strlen(before) + strlen(after) + 1;
  char* joined = malloc(length);
  if (joined) snprintf(joined, length, "%s%s", before, after);
  return joined;
}

static bool write_file(const char* path, const void* data, size_t byte_length) {
  FILE* file = fopen(path, "wb");
  if (!file) return false;
  bool written = fwrite(data, 1, byte_length, file) == byte_length;
  return fclose(file) == 0 && written;
}

static bool read_file(const char* path, void* data, size_t byte_length) {
  FILE* file = fopen(path, "rb");
  if (!file) return false;
  bool whole = fread(data, 1, byte_length, file) == byte_length && fgetc(file) == EOF;
  fclose(file);
  return whole;
}

static fixstep_status_t list_devices(const char* family, fixstep_list_visitor_t visit, void* context,
                                     fixstep_error_t** out_error) {
  const char* given = getenv("FIXSTEP_TEST_DEVICES");
  char* lines = text(given ? given : "", "\n");
  bool found = false;
  for (char *line = lines, *end; line && (end = strchr(line, '\n')); line = end + 1) {
    *end = '\0';
    char* name = strchr(line, '|');
    char* description = name ? strchr(name + 1, '|') : NULL;
    if (!description) continue;
    *name++ = *description++ = '\0';
    if (strcmp(line, family) != 0) continue;
    visit(context, &(fixstep_listed_t){name, description, strstr(description, "type: cpu") != NULL});
    found = true;
  }
  free(lines);
  if (found) return FIXSTEP_OK;
  return fixstep_backend_fail(out_error, FIXSTEP_TARGET_ERROR, "there is no driver of %s", family);
}

static fixstep_status_t open_device(const fixstep_device_options_t* options, fixstep_device_t** out_device,
                                    fixstep_error_t** out_error) {
  *out_device = NULL;
  if (strcmp(options->family, "cpu") != 0) {
    return fixstep_backend_fail(out_error, FIXSTEP_TARGET_ERROR, "device %zu of %s does not open", options->index,
                                options->family);
  }
  if (options->device && strcmp(options->device, "local-sync") != 0) {
    return fixstep_backend_fail(out_error, FIXSTEP_TARGET_ERROR,
                                "unknown device '%s' of target cpu: expected local-sync or local-task",
                                options->device);
  }
  fixstep_device_t* device = calloc(1, sizeof(*device));
  char path[96];
  if (!device) return fixstep_backend_fail(out_error, FIXSTEP_OUT_OF_MEMORY, "no memory");
  strcpy(device->folder, "/tmp/fixstep-test-XXXXXX");
  bool made = mkdtemp(device->folder) != NULL;
  snprintf(path, sizeof(path), "%s/module.vmfb", device->folder);
  if (!made || !write_file(path, options->module, options->module_byte_length)) {
    free(device);
    return fixstep_backend_fail(out_error, FIXSTEP_DEVICE_ERROR, "no room for the module");
  }
  *out_device = device;
  return FIXSTEP_OK;
}

static void close_device(fixstep_device_t* device) {
  char path[96];
  snprintf(path, sizeof(path), "%s/module.vmfb", device->folder);
  unlink(path);
  rmdir(device->folder);
  free(device);
}

static fixstep_status_t allocate(fixstep_device_t* device, const fixstep_leaf_t* leaf, const void* data,
                                 fixstep_buffer_t** out_buffer, fixstep_error_t** out_error) {
  (void)device;
  *out_buffer = calloc(1, sizeof(fixstep_buffer_t) + leaf->byte_length);
  if (!*out_buffer) return fixstep_backend_fail(out_error, FIXSTEP_DEVICE_ERROR, "%s: no room", leaf->path);
  (*out_buffer)->byte_length = leaf->byte_length;
  if (data && leaf->byte_length) memcpy((*out_buffer)->data, data, leaf->byte_length);
  return FIXSTEP_OK;
}

static void release(fixstep_device_t* device, fixstep_buffer_t* buffer) {
  (void)device;
  free(buffer);
}

static fixstep_status_t write_buffer(fixstep_device_t* device, fixstep_buffer_t* buffer, const fixstep_leaf_t* leaf,
                                     const void* data, fixstep_error_t** out_error) {
  (void)device;
  (void)out_error;
  if (leaf->byte_length) memcpy(buffer->data, data, leaf->byte_length);
  return FIXSTEP_OK;
}

static fixstep_status_t read_buffer(fixstep_device_t* device, fixstep_buffer_t* buffer, const fixstep_leaf_t* leaf,
                                    void* data, fixstep_error_t** out_error) {
  (void)device;
  (void)out_error;
  if (leaf->byte_length) memcpy(data, buffer->data, leaf->byte_length);
  return FIXSTEP_OK;
}

// The text and the files of one call.
typedef struct call_t {
  const fixstep_device_t* device;
  char** words;
  size_t count;
} call_t;

static char* path_of(const call_t* call, const char* kind, size_t index) {
  char* path = malloc(128);
  if (path) snprintf(path, 128, "%s/%s%zu.bin", call->device->folder, kind, index);
  return path;
}

static void add_word(call_t* call, char* word) {
  call->words[call->count++] = word;
  call->words[call->count] = NULL;
}

// `--input=8x4xf32=@file`
static bool add_input(call_t* call, size_t index, const fixstep_leaf_t* leaf, const fixstep_buffer_t* buffer) {
  char* path = path_of(call, "i", index);
  char word[1024];
  size_t length = (size_t)snprintf(word, sizeof(word), "--input=");
  const char* type = element_type(leaf->dtype);
  for (size_t i = 0; i < leaf->rank; ++i) {
    length += (size_t)snprintf(word + length, sizeof(word) - length, "%" PRId64 "x", leaf->shape[i]);
  }
  snprintf(word + length, sizeof(word) - length, "%s=@%s", type ? type : "", path ? path : "");
  bool written = path && type && write_file(path, buffer->data, buffer->byte_length);
  add_word(call, text(word, ""));
  free(path);
  return written;
}

static bool run(const call_t* call) {
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
  pid_t child;
  int status = -1;
  bool started = posix_spawn(&child, program_path, &actions, NULL, call->words, environ) == 0;
  posix_spawn_file_actions_destroy(&actions);
  return started && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static bool read_result(const call_t* call, size_t index, fixstep_buffer_t* buffer) {
  char* path = path_of(call, "o", index);
  bool whole = path && read_file(path, buffer->data, buffer->byte_length);
  free(path);
  return whole;
}

static fixstep_status_t invoke(fixstep_device_t* device, const char* function, fixstep_buffer_t* const* arguments,
                               const fixstep_leaf_t* const* argument_leaves, size_t argument_count,
                               size_t storage_count, const fixstep_leaf_t* result_leaves, size_t result_count,
                               fixstep_buffer_t** out_results, fixstep_error_t** out_error) {
  size_t outputs = storage_count + result_count;
  call_t call = {device, calloc(argument_count + outputs + 8, sizeof(char*)), 0};
  bool good = call.words != NULL;
  char module[96];
  snprintf(module, sizeof(module), "%s/module.vmfb", device->folder);
  if (good) {
    add_word(&call, text(program_path, ""));
    add_word(&call, text("--device=local-sync", ""));
    add_word(&call, text("--module=", module));
    add_word(&call, text("--function=", function));
  }
  for (size_t i = 0; i < argument_count && good; ++i) good = add_input(&call, i, argument_leaves[i], arguments[i]);
  for (size_t i = 0; i < outputs && good; ++i) {
    char* path = path_of(&call, "o", i);
    add_word(&call, text("--output=@", path ? path : ""));
    free(path);
  }
  good = good && run(&call);
  for (size_t i = 0; i < result_count && good; ++i) {
    good = allocate(device, &result_leaves[i], NULL, &out_results[i], out_error) == FIXSTEP_OK &&
           read_result(&call, storage_count + i, out_results[i]);
  }
  // Only a call that succeeded writes the storage.
  for (size_t i = 0; i < storage_count && good; ++i) {
    good = read_result(&call, i, arguments[argument_count - storage_count + i]);
  }
  for (size_t i = 0; i < argument_count + outputs; ++i) {
    char* path = i < argument_count ? path_of(&call, "i", i) : path_of(&call, "o", i - argument_count);
    if (path) unlink(path);
    free(path);
  }
  for (size_t i = 0; i < call.count; ++i) free(call.words[i]);
  free(call.words);
  if (good) return FIXSTEP_OK;
  for (size_t i = 0; i < result_count; ++i) {
    free(out_results[i]);
    out_results[i] = NULL;
  }
  return fixstep_backend_fail(out_error, FIXSTEP_DEVICE_ERROR, "iree-run-module failed");
}

const fixstep_backend_t* backend_run_module(const char* program) {
  static const fixstep_backend_t backend = {"run-module", list_devices, open_device, close_device, allocate,
                                            release,      write_buffer, read_buffer, invoke};
  program_path = program;
  return &backend;
}
