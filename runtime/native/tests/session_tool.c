// Runs a list of commands on one session and prints a line for each, for the tests that compare it with Python.
//
//   session_tool <iree-run-module or -> <artifact> <command>...
//
// A command is one argument; its words are separated by `|`. A call that fails prints `error` and its message. A line
// `--` follows each command.

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend_run_module.h"
#include "fixstep.h"

typedef struct tool_t {
  const fixstep_backend_t* backend;
  fixstep_artifact_t* artifact;
  fixstep_session_t* session;
} tool_t;

static void finish(fixstep_status_t status, fixstep_error_t* error) {
  if (status == FIXSTEP_OK) {
    printf("ok\n");
  } else {
    printf("error %d %s\n", (int)status, fixstep_error_message(error));
  }
  fixstep_error_release(error);
}

// `open|1`, `open|1|vulkan` and `open|1|vulkan|llvmpipe`; no text stands for no choice.
static fixstep_status_t open_session(tool_t* tool, char** words, size_t count, fixstep_error_t** out_error) {
  fixstep_session_options_t options;
  fixstep_session_options_initialize(&options);
  options.backend = tool->backend;
  options.seed = strtoull(words[1], NULL, 10);
  options.target = count > 2 && *words[2] ? words[2] : NULL;
  options.device = count > 3 ? words[3] : NULL;
  return fixstep_session_open(tool->artifact, &options, &tool->session, out_error);
}

// A call on the first batch of a file.
static fixstep_status_t call(tool_t* tool, const char* function, const char* path, fixstep_error_t** out_error) {
  bool predict = strcmp(function, "predict") == 0;
  fixstep_leaves_t leaves = fixstep_artifact_leaves(tool->artifact, function, predict ? "inputs" : "batch");
  fixstep_data_t* data = NULL;
  // With any size, all examples of the file are the batch.
  int64_t low, high, multiple;
  fixstep_status_t status = fixstep_artifact_sizes(tool->artifact, &low, &high, &multiple)
                                ? fixstep_data_open_batches(path, leaves, 1 << 20, true, &data, out_error)
                                : fixstep_data_open(path, leaves, &data, out_error);
  if (status == FIXSTEP_OK) {
    const fixstep_tensor_t* batch = fixstep_data_batch(data, 0);
    status = predict ? fixstep_session_predict(tool->session, batch, leaves.count, out_error)
             : strcmp(function, "evaluate") == 0
                 ? fixstep_session_evaluate(tool->session, batch, leaves.count, out_error)
                 : fixstep_session_step(tool->session, batch, leaves.count, out_error);
  }
  fixstep_data_release(data);
  return status;
}

static fixstep_dtype_t dtype_named(const char* name) {
  for (int i = 1; fixstep_dtype_byte_length((fixstep_dtype_t)i); ++i) {
    if (strcmp(fixstep_dtype_name((fixstep_dtype_t)i), name) == 0) return (fixstep_dtype_t)i;
  }
  return FIXSTEP_INVALID_DTYPE;
}

// `fit|step|x float32 8,4|y int32 8`: a call with tensors of zeros.
static fixstep_status_t fit(tool_t* tool, char** words, size_t count, fixstep_error_t** out_error) {
  fixstep_tensor_t tensors[16];
  int64_t shapes[16][8];
  static const unsigned char zeros[1 << 16];
  for (size_t i = 2; i < count; ++i) {
    char* dtype = strchr(words[i], ' ');
    char* shape = dtype ? strchr(dtype + 1, ' ') : NULL;
    if (!shape) return FIXSTEP_INVALID_ARGUMENT;
    *dtype++ = *shape++ = '\0';
    size_t rank = 0;
    while (*shape && rank < 8) {
      shapes[i - 2][rank++] = strtoll(shape, &shape, 10);
      if (*shape == ',') ++shape;
    }
    tensors[i - 2] = (fixstep_tensor_t){words[i], dtype_named(dtype), rank, shapes[i - 2], zeros};
  }
  if (strcmp(words[1], "state") == 0) return fixstep_session_write_state(tool->session, tensors, count - 2, out_error);
  return strcmp(words[1], "predict") == 0 ? fixstep_session_predict(tool->session, tensors, count - 2, out_error)
                                          : fixstep_session_step(tool->session, tensors, count - 2, out_error);
}

static void print_bytes(const unsigned char* bytes, size_t byte_length) {
  for (size_t i = 0; i < byte_length; ++i) printf("%02x", bytes[i]);
  printf("\n");
}

// `leaf|w`, `result|predict|y` and `sum|step|total/n`: the bytes, of the length that a last word says.
static void print_leaf(tool_t* tool, const char* function, const char* path, bool sum, const char* length) {
  fixstep_error_t* error = NULL;
  const char* role = sum                                ? "accumulators"
                     : !function                        ? "state"
                     : strcmp(function, "predict") == 0 ? "outputs"
                                                        : "metrics";
  fixstep_leaves_t leaves = fixstep_artifact_leaves(tool->artifact, function ? function : "step", role);
  size_t byte_length = 0;
  for (size_t i = 0; i < leaves.count; ++i) {
    if (strcmp(leaves.data[i].path, path) == 0) byte_length = leaves.data[i].byte_length;
  }
  if (length) byte_length = strtoull(length, NULL, 10);
  unsigned char* bytes = calloc(1, byte_length + 1);
  fixstep_status_t status = sum ? fixstep_session_read_sum(tool->session, function, path, bytes, byte_length, &error)
                            : function
                                ? fixstep_session_read_result(tool->session, function, path, bytes, byte_length, &error)
                                : fixstep_session_read_leaf(tool->session, path, bytes, byte_length, &error);
  if (status == FIXSTEP_OK) {
    print_bytes(bytes, byte_length);
  } else {
    finish(status, error);
  }
  free(bytes);
}

static void print_number(tool_t* tool, bool average, const char* function, const char* name) {
  fixstep_error_t* error = NULL;
  double value;
  fixstep_status_t status = average ? fixstep_session_read_average(tool->session, function, name, &value, &error)
                                    : fixstep_session_read_metric(tool->session, function, name, &value, &error);
  if (status == FIXSTEP_OK) {
    printf("%.17g\n", value);
  } else {
    finish(status, error);
  }
}

static fixstep_status_t restore(tool_t* tool, const char* path, bool folder, fixstep_error_t** out_error) {
  char *position = NULL, *passed_over = NULL;
  bool found = true;
  fixstep_status_t status =
      folder ? fixstep_session_restore_latest(tool->session, path, &found, &position, &passed_over, out_error)
             : fixstep_session_restore(tool->session, path, &position, out_error);
  if (status == FIXSTEP_OK) printf("%s %s\n", found ? "found" : "none", position ? position : "");
  if (passed_over) printf("passed over %s\n", passed_over);
  fixstep_free(position);
  fixstep_free(passed_over);
  return status;
}

static void run(tool_t* tool, char* command) {
  char* words[18] = {command};
  size_t count = 0;
  for (char* word = command; word && count < 18; ++count) {
    words[count] = word;
    word = strchr(word, '|');
    if (word) *word++ = '\0';
  }
  const char* name = words[0];
  fixstep_error_t* error = NULL;
  fixstep_status_t status = FIXSTEP_INVALID_ARGUMENT;
  if (strcmp(name, "open") == 0) status = open_session(tool, words, count, &error);
  if (strcmp(name, "call") == 0) status = call(tool, words[1], words[2], &error);
  if (strcmp(name, "fit") == 0) status = fit(tool, words, count, &error);
  if (strcmp(name, "rollback") == 0) status = fixstep_session_rollback(tool->session, &error);
  if (strcmp(name, "reset") == 0) status = fixstep_session_reset_averages(tool->session, words[1], &error);
  if (strcmp(name, "save") == 0) status = fixstep_session_save(tool->session, words[1], words[2], &error);
  if (strcmp(name, "restore") == 0) status = restore(tool, words[1], false, &error);
  if (strcmp(name, "latest") == 0) status = restore(tool, words[1], true, &error);
  if (strcmp(name, "save_in") == 0) {
    status = fixstep_session_save_in(tool->session, words[1], strtoull(words[2], NULL, 10), NULL, &error);
  }
  if (strcmp(name, "leaf") == 0) {
    print_leaf(tool, NULL, words[1], false, NULL);
  } else if (strcmp(name, "result") == 0 || strcmp(name, "sum") == 0) {
    print_leaf(tool, words[1], words[2], *name == 's', count > 3 ? words[3] : NULL);
  } else if (strcmp(name, "metric") == 0 || strcmp(name, "average") == 0) {
    print_number(tool, *name == 'a', words[1], words[2]);
  } else if (strcmp(name, "target") == 0) {
    printf("%s\n%s\n", fixstep_session_target(tool->session), fixstep_session_passed_over(tool->session));
  } else if (strcmp(name, "steps") == 0) {
    printf("%" PRIu64 "\n", fixstep_session_steps(tool->session));
  } else {
    finish(status, error);
  }
}

int main(int count, char** words) {
  if (count < 3) return 2;
  tool_t tool = {strcmp(words[1], "-") ? backend_run_module(words[1]) : NULL, NULL, NULL};
  fixstep_error_t* error = NULL;
  fixstep_status_t status = fixstep_artifact_open(words[2], &tool.artifact, &error);
  if (status != FIXSTEP_OK) finish(status, error);
  for (int i = 3; i < count && status == FIXSTEP_OK; ++i) {
    if (!tool.session && strncmp(words[i], "open", 4) != 0) break;
    run(&tool, words[i]);
    printf("--\n");
    fflush(stdout);
  }
  fixstep_session_release(tool.session);
  fixstep_artifact_release(tool.artifact);
  return 0;
}
