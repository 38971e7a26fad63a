#include "position.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NUMBER_LENGTH 32

// What was found wrong first.
typedef struct reader_t {
  const json_t* position;
  const char* key;  // NULL while all is well
  const char* expected;
} reader_t;

bool position_start(position_t* out_position) {
  *out_position = (position_t){.epoch = 1, .validated_at = -1, .averages = json_object(), .validation = json_object()};
  return out_position->averages && out_position->validation;
}

void position_release(position_t* position) {
  json_decref(position->averages);
  json_decref(position->validation);
  *position = (position_t){0};
}

void position_end_epoch(position_t* position) {
  position->epoch += 1;
  position->batch = position->skipped_in_epoch = 0;
  position->halting = false;
}

// The one text that Python's float.hex has for a number. Built from its bits, as C leaves the digits of %a open.
static void write_number(double value, char out_text[NUMBER_LENGTH]) {
  uint64_t bits;
  memcpy(&bits, &value, sizeof(bits));
  uint64_t fraction = bits & ((UINT64_C(1) << 52) - 1);
  int exponent = (int)(bits >> 52 & 0x7ff);
  const char* sign = bits >> 63 ? "-" : "";
  if (exponent == 0x7ff) {
    snprintf(out_text, NUMBER_LENGTH, "%s%s", fraction ? "" : sign, fraction ? "nan" : "inf");
  } else if (!exponent && !fraction) {
    snprintf(out_text, NUMBER_LENGTH, "%s0x0.0p+0", sign);
  } else {
    snprintf(out_text, NUMBER_LENGTH, "%s0x%d.%013" PRIx64 "p%+d", sign, exponent != 0, fraction,
             exponent ? exponent - 1023 : -1022);
  }
}

bool position_add_number(json_t* numbers, const char* name, double value) {
  char text[NUMBER_LENGTH];
  write_number(value, text);
  return json_object_set_new(numbers, name, json_string(text)) == 0;
}

static void write_order(FILE* out, const order_t* order) {
  fprintf(out, "{\"examples\":%zu,\"batch_size\":%zu,\"shuffle\":%s,\"seed\":%" PRIu64 ",\"drop_last\":%s}",
          order->examples, order->batch_size, order->shuffle ? "true" : "false", order->seed,
          order->drop_last ? "true" : "false");
}

// Ends a text that grew in memory; NULL if there was too little.
static char* close_text(FILE* out, char** text) {
  bool good = !ferror(out);
  good = fclose(out) == 0 && good;
  if (good) return *text;
  free(*text);
  return *text = NULL;
}

char* position_text(const position_t* position, const order_t* order) {
  char* text = NULL;
  size_t length;
  FILE* out = open_memstream(&text, &length);
  if (!out) return NULL;
  fprintf(out, "{\"epoch\":%" PRIu64 ",\"batch\":%" PRIu64 ",\"iteration\":%" PRIu64, position->epoch, position->batch,
          position->iteration);
  fprintf(out, ",\"skipped\":%" PRIu64 ",\"skipped_in_epoch\":%" PRIu64 ",\"skipped_in_a_row\":%" PRIu64,
          position->skipped, position->skipped_in_epoch, position->skipped_in_a_row);
  fprintf(out, ",\"begun\":false,\"halting\":false,\"averages\":");
  bool good = json_dumpf(position->averages, out, JSON_COMPACT) == 0;
  fprintf(out, ",\"validation\":");
  good = json_dumpf(position->validation, out, JSON_COMPACT) == 0 && good;
  fprintf(out, ",\"validations\":%" PRIu64 ",\"validated_at\":%" PRId64 ",\"data\":", position->validations,
          position->validated_at);
  write_order(out, order);
  fprintf(out, ",\"handlers\":{}}");
  if (close_text(out, &text) && good) return text;
  free(text);
  return NULL;
}

// Parses JSON. Integers of more than 18 digits, which Python writes and jansson has no room for, become text.
static json_t* parse(const char* text) {
  char* copy = malloc(2 * strlen(text) + 1);
  char* out = copy;
  bool in_string = false;
  while (copy && *text) {
    size_t sign = *text == '-', length = in_string ? 0 : strspn(text, "-+.0123456789eE");
    bool large = length > 18 && strspn(text + sign, "0123456789") == length - sign;
    if (!length) length = in_string && *text == '\\' && text[1] ? 2 : 1;
    if (*text == '"') in_string = !in_string;
    if (large) *out++ = '"';
    memcpy(out, text, length);
    out += length;
    text += length;
    if (large) *out++ = '"';
  }
  if (!copy) return NULL;
  *out = '\0';
  json_t* value = json_loads(copy, JSON_DECODE_ANY, NULL);
  free(copy);
  return value;
}

static json_t* wrong(reader_t* reader, const char* key, const char* expected) {
  if (!reader->key) *reader = (reader_t){reader->position, key, expected};
  return NULL;
}

static int64_t take_integer(reader_t* reader, const char* key, int64_t least, const char* expected) {
  const json_t* value = json_object_get(reader->position, key);
  if (!json_is_integer(value) || json_integer_value(value) < least) {
    wrong(reader, key, expected);
    return least;
  }
  return json_integer_value(value);
}

static uint64_t take_count(reader_t* reader, const char* key) {
  return (uint64_t)take_integer(reader, key, 0, "an integer from 0");
}

static bool take_flag(reader_t* reader, const char* key) {
  const json_t* value = json_object_get(reader->position, key);
  if (!json_is_boolean(value)) wrong(reader, key, "true or false");
  return json_is_true(value);
}

static json_t* take_object(reader_t* reader, const char* key) {
  json_t* value = json_object_get(reader->position, key);
  return json_is_object(value) ? value : wrong(reader, key, "an object");
}

static json_t* take_numbers(reader_t* reader, const char* key) {
  json_t *numbers = take_object(reader, key), *number;
  const char* name;
  json_object_foreach(numbers, name, number) {
    const char* text = json_is_string(number) ? json_string_value(number) : "";
    char again[NUMBER_LENGTH];
    write_number(strtod(text, NULL), again);
    if (strcmp(text, again) != 0) return wrong(reader, key, "texts such as 0x1.8000000000000p+1");
  }
  return numbers;
}

// The position's numbers, which stay those of `value`; false if something is wrong.
static bool read_all(reader_t* reader, position_t* out_position) {
  *out_position = (position_t){
      .epoch = (uint64_t)take_integer(reader, "epoch", 1, "an integer from 1"),
      .batch = take_count(reader, "batch"),
      .iteration = take_count(reader, "iteration"),
      .skipped = take_count(reader, "skipped"),
      .skipped_in_epoch = take_count(reader, "skipped_in_epoch"),
      .skipped_in_a_row = take_count(reader, "skipped_in_a_row"),
      .validations = take_count(reader, "validations"),
      .validated_at = take_integer(reader, "validated_at", -1, "an integer from -1"),
      .halting = take_flag(reader, "halting"),
      .averages = take_numbers(reader, "averages"),
      .validation = take_numbers(reader, "validation"),
  };
  take_flag(reader, "begun");
  take_object(reader, "data");
  take_object(reader, "handlers");
  return !reader->key;
}

static char* message_of(const reader_t* reader, const char* path) {
  const json_t* value = json_object_get(reader->position, reader->key);
  char *text = NULL, *got = json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT | JSON_ENSURE_ASCII);
  size_t length;
  FILE* out = open_memstream(&text, &length);
  if (out) {
    fprintf(out, "%s: holds no position of a loop: %s: expected %s, got %.60s. ", path, reader->key, reader->expected,
            got ? got : "nothing");
    fprintf(out, "Move it elsewhere to go on from the checkpoint before it, or choose another folder.");
    close_text(out, &text);
  }
  free(got);
  return text;
}

// A value as Python prints it.
static void write_value(FILE* out, const json_t* value) {
  if (!value || json_is_null(value)) {
    fputs("None", out);
  } else if (json_is_boolean(value)) {
    fputs(json_is_true(value) ? "True" : "False", out);
  } else if (json_is_string(value)) {
    fputs(json_string_value(value), out);
  } else {
    json_dumpf(value, out, JSON_ENCODE_ANY);
  }
}

static int compare_keys(const void* a, const void* b) { return strcmp(*(const char* const*)a, *(const char* const*)b); }

// The keys of both, which have `there` and `here` as their owners, each once and in order; NULL without memory.
static const char** keys_of(json_t* there, json_t* here, size_t* out_count) {
  const char** keys = calloc(json_object_size(there) + json_object_size(here) + 1, sizeof(*keys));
  const char* key;
  json_t* value;
  *out_count = 0;
  if (!keys) return NULL;
  json_object_foreach(there, key, value) { keys[(*out_count)++] = key; }
  json_object_foreach(here, key, value) {
    if (!json_object_get(there, key)) keys[(*out_count)++] = key;
  }
  qsort(keys, *out_count, sizeof(*keys), compare_keys);
  return keys;
}

// A line for each key whose value differs, without which the text is empty; NULL without memory.
static char* differences(json_t* there, json_t* here) {
  char* text = NULL;
  size_t length, count;
  const char** keys = keys_of(there, here, &count);
  FILE* out = keys ? open_memstream(&text, &length) : NULL;
  for (size_t i = 0; out && i < count; ++i) {
    const json_t *expected = json_object_get(there, keys[i]), *got = json_object_get(here, keys[i]);
    if (json_equal(expected, got) || (json_is_null(expected) && !got)) continue;
    fprintf(out, "  %s: expected ", keys[i]);
    write_value(out, expected);
    fprintf(out, ", got ");
    write_value(out, got);
    fprintf(out, "\n");
  }
  free(keys);
  return out ? close_text(out, &text) : NULL;
}

static json_t* order_value(const order_t* order) {
  char* text = NULL;
  size_t length;
  FILE* out = open_memstream(&text, &length);
  if (!out) return NULL;
  write_order(out, order);
  json_t* value = close_text(out, &text) ? parse(text) : NULL;
  free(text);
  return value;
}

// Refuses data other than the checkpoint's, with the text of Python's loop.
static fixstep_status_t check_data(json_t* there, const order_t* order, const char* path, char** out_message) {
  json_t* here = order_value(order);
  char* lines = here ? differences(there, here) : NULL;
  fixstep_status_t status = !lines ? FIXSTEP_OUT_OF_MEMORY : *lines ? FIXSTEP_DATA_ERROR : FIXSTEP_OK;
  size_t length;
  FILE* out = status == FIXSTEP_DATA_ERROR ? open_memstream(out_message, &length) : NULL;
  if (out) {
    fprintf(out, "the data is not that of the checkpoint, so the run would not be the same:\n%s", lines);
    fprintf(out, "Resume %s with the data that the run began with.", path);
    close_text(out, out_message);
  }
  free(lines);
  json_decref(here);
  return status;
}

static uint64_t batches_of(const order_t* order) {
  return order->examples / order->batch_size + (!order->drop_last && order->examples % order->batch_size);
}

// The states that handlers in Python have; empty ones say nothing.
static void print_dropped(json_t* handlers) {
  const char* name;
  json_t* state;
  json_object_foreach(handlers, name, state) {
    if (json_is_object(state) && !json_object_size(state)) continue;
    fprintf(stderr, "fixstep-train: the checkpoint's state of %s is dropped: no such handler\n", name);
  }
}

static fixstep_status_t take(position_t* position, const char* path, json_t* value, const order_t* order,
                             char** out_message) {
  reader_t reader = {.position = value};
  position_t taken;
  fixstep_status_t status = FIXSTEP_OK;
  if (read_all(&reader, &taken)) {
    status = check_data(json_object_get(value, "data"), order, path, out_message);
    if (status == FIXSTEP_OK && taken.batch > batches_of(order)) wrong(&reader, "batch", "no more than an epoch has");
  }
  if (reader.key) {
    *out_message = message_of(&reader, path);
    return FIXSTEP_CHECKPOINT_ERROR;
  }
  if (status != FIXSTEP_OK) return status;
  json_incref(taken.averages);
  json_incref(taken.validation);
  position_release(position);
  *position = taken;
  print_dropped(json_object_get(value, "handlers"));
  return FIXSTEP_OK;
}

fixstep_status_t position_take(position_t* position, const char* path, const char* text, const order_t* order,
                               char** out_message) {
  *out_message = NULL;
  json_t* value = parse(text);
  if (!value) return FIXSTEP_OUT_OF_MEMORY;  // the library has parsed it before
  bool empty = json_is_object(value) && !json_object_size(value);
  fixstep_status_t status = empty ? FIXSTEP_OK : take(position, path, value, order, out_message);
  json_decref(value);
  return status;
}
