// Tests of the library without a device: files, templates, texts. The corpus was written by Python.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "artifact.h"
#include "checkpoint.h"
#include "file.h"
#include "npy.h"
#include "order.h"
#include "safetensors.h"
#include "template.h"

#define CHECK(condition)                                                       \
  do {                                                                         \
    if (!(condition)) {                                                        \
      fprintf(stderr, "%s:%d: expected %s\n", __FILE__, __LINE__, #condition); \
      exit(1);                                                                 \
    }                                                                          \
  } while (0)

// Checks status and message of an error, and releases it.
static void expect(fixstep_status_t got, fixstep_status_t status, fixstep_error_t* error, const char* part) {
  if (got != status || fixstep_error_status(error) != status || !strstr(fixstep_error_message(error), part)) {
    fprintf(stderr, "expected status %d and '%s', got status %d and '%s'\n", (int)status, part, (int)got,
            fixstep_error_message(error));
    exit(1);
  }
  fixstep_error_release(error);
}

// The same of a call that sets `error`.
#define EXPECT(call, status, part)           \
  do {                                       \
    fixstep_status_t got_status = (call);    \
    expect(got_status, status, error, part); \
  } while (0)

static uint8_t* read_corpus(const char* name, size_t* out_byte_length) {
  char path[1024];
  uint8_t* data;
  snprintf(path, sizeof(path), "%s/%s", CORPUS, name);
  CHECK(fx_file_read(path, 1 << 20, FIXSTEP_DATA_ERROR, &data, out_byte_length, NULL) == FIXSTEP_OK);
  return data;
}

static void test_artifact(void) {
  fixstep_artifact_t* artifact;
  CHECK(fixstep_artifact_open(CORPUS "/artifact-whole", &artifact, NULL) == FIXSTEP_OK);
  CHECK(strcmp(fixstep_artifact_name(artifact), "corpus") == 0);
  CHECK(fixstep_artifact_target_count(artifact) == 2);
  CHECK(strcmp(fixstep_artifact_target(artifact, 1), "vulkan") == 0 && !fixstep_artifact_target(artifact, 2));
  CHECK(fixstep_artifact_has_function(artifact, "predict") && !fixstep_artifact_has_function(artifact, "init"));
  fixstep_leaves_t state = fixstep_artifact_leaves(artifact, "step", "state");
  CHECK(state.count == 5 && strcmp(state.data[0].path, "params/w") == 0);
  CHECK(state.data[0].rank == 2 && state.data[0].shape[1] == 3 && state.data[0].byte_length == 48);
  CHECK(strcmp(state.data[2].key, "threefry2x32") == 0 && state.data[4].byte_length == 16);
  CHECK(fixstep_artifact_leaves(artifact, "predict", "outputs").count == 1);
  CHECK(fixstep_artifact_leaves(artifact, "predict", "batch").count == 0);
  size_t byte_length;
  const void* module = fixstep_artifact_member(artifact, "modules/cpu.vmfb", &byte_length);
  CHECK(byte_length == 9 && memcmp(module, "no module", 9) == 0 && (uintptr_t)module % 64 == 0);
  CHECK(!fixstep_artifact_member(artifact, "manifest.json", &byte_length) && byte_length == 0);
  fixstep_session_t* session;
  fixstep_error_t* error = NULL;
#ifdef FIXSTEP_WITH_IREE
  const char* reason = "no target of the artifact runs on this machine:";
#else
  const char* reason = "built without IREE";
#endif
  EXPECT(fixstep_session_open(artifact, NULL, &session, &error), FIXSTEP_TARGET_ERROR, reason);
  fixstep_artifact_release(artifact);
}

// Every byte counts: no file in which one changed, and none that was cut, is an artifact or a checkpoint.
static void test_damage(const char* name, bool artifact) {
  size_t byte_length;
  uint8_t* file = read_corpus(name, &byte_length);
  for (size_t i = 0; i < 2 * byte_length; ++i) {
    size_t at = i % byte_length, length = i < byte_length ? byte_length : at;
    uint8_t* copy = malloc(length + 1);
    memcpy(copy, file, length);
    if (i < byte_length) copy[at] ^= (uint8_t)(1 << at % 8);
    fixstep_error_t* error = NULL;
    if (artifact) {
      fixstep_artifact_t* opened;
      EXPECT(fixstep_artifact_open_memory(copy, length, &opened, &error), FIXSTEP_ARTIFACT_ERROR, "<bytes>: ");
      CHECK(!opened);
      free(copy);
    } else {
      checkpoint_t checkpoint;
      EXPECT(fx_checkpoint_parse(copy, length, &checkpoint, &error), FIXSTEP_CHECKPOINT_ERROR, "");
      fx_checkpoint_release(&checkpoint);
    }
  }
  free(file);
}

static void test_artifact_messages(void) {
  fixstep_artifact_t* artifact;
  fixstep_error_t* error;
  fixstep_status_t status = fixstep_artifact_open("/nowhere/at.fixstep", &artifact, &error);
  expect(status, FIXSTEP_ARTIFACT_ERROR, error,
         "/nowhere/at.fixstep: cannot read it: No such file or directory. Check");
  status = fixstep_artifact_open("/tmp", &artifact, &error);
  expect(status, FIXSTEP_ARTIFACT_ERROR, error, "It is a folder");
  status = fixstep_artifact_open("/dev/null", &artifact, &error);
  expect(status, FIXSTEP_ARTIFACT_ERROR, error, "Give the name of an ordinary file");
  status = fixstep_artifact_open_memory("", 0, &artifact, &error);
  expect(status, FIXSTEP_ARTIFACT_ERROR, error, "<bytes>: the file is empty. The file is damaged");
  status = fixstep_artifact_open_memory("hello, this is no zip", 21, &artifact, &error);
  expect(status, FIXSTEP_ARTIFACT_ERROR, error, "not a fixstep artifact");
}

// Reads the corpus's checkpoint and writes it again: the same bytes.
static void test_checkpoint(void) {
  checkpoint_t checkpoint;
  CHECK(fx_checkpoint_read(CORPUS "/checkpoint-whole", &checkpoint, NULL) == FIXSTEP_OK);
  CHECK(checkpoint.steps == 7 && checkpoint.leaves.count == 5);
  char* position = fx_copy_text(checkpoint.position, checkpoint.position_length);
  CHECK(strncmp(position, "{\"caller\":{\"epoch\":3,\"large\":1267650600228229401496703205376,", 60) == 0);
  char path[] = "/tmp/fixstep-checkpoint-XXXXXX";
  int file = mkstemp(path);
  CHECK(file >= 0 && close(file) == 0);
  CHECK(fx_checkpoint_write(path, &checkpoint.leaves, checkpoint.data, checkpoint.program, 7, position, NULL) ==
        FIXSTEP_OK);
  size_t old_length, new_length;
  uint8_t* old_file = read_corpus("checkpoint-whole", &old_length);
  uint8_t* new_file;
  CHECK(fx_file_read(path, 1 << 20, FIXSTEP_DATA_ERROR, &new_file, &new_length, NULL) == FIXSTEP_OK);
  CHECK(old_length == new_length && memcmp(old_file, new_file, old_length) == 0);
  fixstep_error_t* error = NULL;
  EXPECT(fx_checkpoint_write("/nowhere/a.safetensors", &checkpoint.leaves, checkpoint.data, "a", 0, "{}", &error),
         FIXSTEP_CHECKPOINT_ERROR,
         "/nowhere/a.safetensors: cannot write it: No such file or directory. Make its folder first. What was there "
         "before is unchanged.");
  unlink(path);
  free(position);
  free(old_file);
  free(new_file);
  fx_checkpoint_release(&checkpoint);
}

static leaf_list_t leaves_of(const char* text, json_t** out_json) {
  leaf_list_t leaves;
  CHECK(fx_json_parse(text, strlen(text), FIXSTEP_DATA_ERROR, out_json, NULL) == FIXSTEP_OK);
  CHECK(fx_leaf_list_parse(*out_json, "leaves", FIXSTEP_DATA_ERROR, &leaves, NULL) == FIXSTEP_OK);
  return leaves;
}

static void test_template(void) {
  json_t* json;
  leaf_list_t leaves = leaves_of(
      "[{\"path\":\"x\",\"dtype\":\"float32\",\"shape\":[8,4],\"key\":null},"
      "{\"path\":\"label\",\"dtype\":\"int32\",\"shape\":[8],\"key\":null}]",
      &json);
  const int64_t x_shape[] = {8, 4}, label_shape[] = {8};
  const float x[32] = {0};
  const int32_t label[8] = {0};
  fixstep_tensor_t tensors[] = {{"label", FIXSTEP_INT32, 1, label_shape, label}, {"x", FIXSTEP_FLOAT32, 2, x_shape, x}};
  const fixstep_tensor_t* ordered[2];
  fixstep_error_t* error = NULL;
  CHECK(fx_template_check(&leaves, tensors, 2, "batch", NULL, ordered, NULL) == FIXSTEP_OK);
  CHECK(ordered[0] == &tensors[1] && ordered[1] == &tensors[0]);
  tensors[0].path = "Labels";
  tensors[1].dtype = FIXSTEP_FLOAT64;
  EXPECT(fx_template_check(&leaves, tensors, 2, "batch", NULL, ordered, &error), FIXSTEP_TEMPLATE_ERROR,
         "the batch does not fit the template:\n"
         "  x: expected float32[8,4], got float64[8,4]\n"
         "  label: expected int32[8], missing (is it 'Labels'?)\n"
         "  Labels: unexpected, got int32[8]\n"
         "Convert it first, for example array.astype('float32'). Nothing was run.");
  tensors[0] = tensors[1];
  tensors[0].dtype = FIXSTEP_FLOAT32;
  EXPECT(fx_template_check(&leaves, tensors, 2, "batch", NULL, ordered, &error), FIXSTEP_INVALID_ARGUMENT,
         "the path 'x' occurs twice");
  tensors[0] = (fixstep_tensor_t){NULL, FIXSTEP_FLOAT32, 2, x_shape, x};
  tensors[1] = (fixstep_tensor_t){NULL, FIXSTEP_INT32, 1, label_shape, label};
  CHECK(fx_template_check(&leaves, tensors, 2, "batch", NULL, ordered, NULL) == FIXSTEP_OK &&
        ordered[0] == &tensors[0]);
  EXPECT(fx_template_check(&leaves, tensors, 1, "batch", NULL, ordered, &error), FIXSTEP_TEMPLATE_ERROR,
         "expected 2 tensors, got 1");
  tensors[1].data = NULL;
  EXPECT(fx_template_check(&leaves, tensors, 2, "batch", NULL, ordered, &error), FIXSTEP_INVALID_ARGUMENT,
         "label has no data");
  fx_leaf_list_release(&leaves);
  json_decref(json);
}

// Lists that no reader takes: each names what is wrong with it.
static void test_bad_leaves(void) {
  static const char* const cases[][2] = {
      {"[{\"path\":\"x\",\"dtype\":\"float32\",\"shape\":[9223372036854775807,3],\"key\":null}]",
       "more bytes than memory"},
      {"[{\"path\":\"x\",\"dtype\":\"float32\",\"shape\":[4611686018427387904,4611686018427387904],\"key\":null}]",
       "more bytes than memory"},
      {"[{\"path\":\"x\",\"dtype\":\"float33\",\"shape\":[],\"key\":null}]", "name of a dtype"},
      {"[{\"path\":\"x\",\"dtype\":\"float32\",\"shape\":[-1],\"key\":null}]", "integers from 0"},
      {"[{\"path\":\"x\",\"dtype\":\"float32\",\"shape\":[1.5],\"key\":null}]", "integers from 0"},
      {"[{\"path\":\"x\",\"dtype\":\"float32\",\"shape\":[]}]", "path, dtype, shape, key"},
      {"[{\"path\":\"x\",\"dtype\":\"bool\",\"shape\":[],\"key\":null},"
       "{\"path\":\"x\",\"dtype\":\"bool\",\"shape\":[],\"key\":null}]",
       "occurs twice"},
  };
  for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); ++i) {
    json_t* json;
    leaf_list_t leaves;
    fixstep_error_t* error = NULL;
    CHECK(fx_json_parse(cases[i][0], strlen(cases[i][0]), FIXSTEP_DATA_ERROR, &json, NULL) == FIXSTEP_OK);
    EXPECT(fx_leaf_list_parse(json, "leaves", FIXSTEP_DATA_ERROR, &leaves, &error), FIXSTEP_DATA_ERROR, cases[i][1]);
    json_decref(json);
  }
}

static void test_json(void) {
  static const char* const refused[] = {"",
                                        "{",
                                        "{\"a\":1,\"a\":2}",
                                        "[NaN]",
                                        "[1e999]",
                                        "{\"a\":\"\\u0000\"}",
                                        "[\"\xff\"]",
                                        "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]"};
  for (size_t i = 0; i < sizeof(refused) / sizeof(refused[0]); ++i) {
    json_t* json;
    fixstep_error_t* error = NULL;
    EXPECT(fx_json_parse(refused[i], strlen(refused[i]), FIXSTEP_DATA_ERROR, &json, &error), FIXSTEP_DATA_ERROR,
           "JSON");
  }
  const char text[] = " { \"a\" : [1, 2.50] , \"b\":123456789012345678901234567890,\"c\" : {\"b\":0} }";
  const char* start;
  size_t length;
  CHECK(fx_json_find(text, strlen(text), "a", &start, &length) && length == 9 && strncmp(start, "[1, 2.50]", 9) == 0);
  CHECK(fx_json_find(text, strlen(text), "b", &start, &length) && length == 30 && *start == '1');
  CHECK(fx_json_find(text, strlen(text), "c", &start, &length) && length == 7 && *start == '{');
  CHECK(!fx_json_find(text, strlen(text), "d", &start, &length));
}

static void test_npy(void) {
  size_t byte_length;
  npy_t array;
  uint8_t* file = read_corpus("array-float32", &byte_length);
  CHECK(fx_npy_parse(file, byte_length, &array, NULL) == FIXSTEP_OK);
  CHECK(array.dtype == FIXSTEP_FLOAT32 && array.rank == 2 && array.shape[0] == 8 && array.byte_length == 128);
  fixstep_error_t* error = NULL;
  EXPECT(fx_npy_parse(file, byte_length - 1, &array, &error), FIXSTEP_DATA_ERROR, "does not speak of the 127");
  EXPECT(fx_npy_parse(file, 12, &array, &error), FIXSTEP_DATA_ERROR, "ends within its header");
  EXPECT(fx_npy_parse(file + 1, 12, &array, &error), FIXSTEP_DATA_ERROR, "not an array of numpy's");
  char* order = strstr((char*)file + 10, "False");
  memcpy(order, "True ", 5);
  EXPECT(fx_npy_parse(file, byte_length, &array, &error), FIXSTEP_DATA_ERROR, "column by column");
  free(file);
}

static void test_similarity(void) {
  CHECK(fx_similarity("labels", "label", 0) > 0.9 && fx_similarity("abc", "xyz", 0) == 0);
  CHECK(fx_similarity("", "", 0) == 1 && fx_similarity("qabxcd", "abycdf", 0) > 0.66);
}

// What numpy's argsort of PCG64(SeedSequence([seed, epoch])).random_raw(10) is.
static void test_order(void) {
  static const size_t first[] = {7, 4, 5, 1, 9, 8, 6, 2, 0, 3}, second[] = {0, 2, 4, 3, 9, 8, 5, 1, 6, 7};
  size_t order[10];
  CHECK(fx_order_shuffle(0, 1, 10, order, NULL) == FIXSTEP_OK && memcmp(order, first, sizeof(order)) == 0);
  CHECK(fx_order_shuffle((1ull << 63) + 5, 7, 10, order, NULL) == FIXSTEP_OK);
  CHECK(memcmp(order, second, sizeof(order)) == 0);
}

int main(void) {
  test_artifact();
  test_artifact_messages();
  test_damage("artifact-whole", true);
  test_damage("checkpoint-whole", false);
  test_checkpoint();
  test_template();
  test_bad_leaves();
  test_json();
  test_npy();
  test_similarity();
  test_order();
  printf("all good\n");
  return 0;
}
