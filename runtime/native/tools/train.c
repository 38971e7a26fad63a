// fixstep-train: trains an artifact on a file of data, without Python.

#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fixstep.h"
#include "fixstep_backend.h"
#include "position.h"

#ifdef FIXSTEP_TRAIN_BACKEND
// The tests build this program once more, on a backend of theirs.
const fixstep_backend_t* FIXSTEP_TRAIN_BACKEND(const char* program);
#endif

static const char usage[] =
    "Usage: fixstep-train ARTIFACT --data FILE [options]\n"
    "\n"
    "Trains an artifact. FILE is a .npz with one array for each leaf of a batch, named by leaf path; where a batch "
    "has\n"
    "one leaf, a .npy or a raw file. Each epoch has its own random order, that of `fixstep run` with the same seed.\n"
    "\n"
    "  --validate FILE        evaluate this data after each epoch\n"
    "  --epochs N             how often to go over the data in all (1)\n"
    "  --batch-size N         where the artifact takes any size (the largest); a short last batch then trains too\n"
    "  --checkpoint-dir DIR   save after each epoch, and resume from the newest checkpoint there\n"
    "  --keep N               checkpoints to keep (3)\n"
    "  --target TARGET        one of the artifact's targets, or a family, `cpu`\n"
    "  --device DEVICE        which device of the target\n"
    "  --seed N               for the program's init and for the order of the examples (0)\n"
    "  --no-shuffle           take the batches in the order of the file\n";

typedef struct options_t {
  const char* artifact;
  const char* data;
  const char* validate;
  const char* folder;
  unsigned long long batch_size;  // 0: the largest
  unsigned long long epochs;
  unsigned long long keep;
  unsigned long long seed;
  bool in_order;
  fixstep_session_options_t session;
} options_t;

// All that is open, where the run stands, and the error that ended it.
typedef struct run_t {
  fixstep_artifact_t* artifact;
  fixstep_session_t* session;
  fixstep_data_t* data;
  fixstep_data_t* validation;
  position_t position;
  fixstep_error_t* error;  // of the library, or
  char* message;           // of this program
} run_t;

static bool parse_number(const char* text, unsigned long long* out_number) {
  char* end = NULL;
  errno = 0;
  *out_number = strtoull(text, &end, 10);
  return *text >= '0' && *text <= '9' && !*end && !errno;
}

static bool parse(int count, char** words, options_t* options) {
  static const struct option known[] = {
      {"data", required_argument, NULL, 'd'},   {"validate", required_argument, NULL, 'v'},
      {"epochs", required_argument, NULL, 'e'}, {"checkpoint-dir", required_argument, NULL, 'c'},
      {"keep", required_argument, NULL, 'k'},   {"target", required_argument, NULL, 't'},
      {"device", required_argument, NULL, 'D'}, {"batch-size", required_argument, NULL, 'b'},
      {"seed", required_argument, NULL, 's'},   {"no-shuffle", no_argument, NULL, 'n'},
      {"help", no_argument, NULL, 'h'},         {NULL, 0, NULL, 0},
  };
  *options = (options_t){.epochs = 1, .keep = 3};
  fixstep_session_options_initialize(&options->session);
  bool good = true;
  for (int code; (code = getopt_long(count, words, "", known, NULL)) != -1;) {
    if (code == 'd') options->data = optarg;
    if (code == 'v') options->validate = optarg;
    if (code == 'c') options->folder = optarg;
    if (code == 't') options->session.target = optarg;
    if (code == 'D') options->session.device = optarg;
    if (code == 'e') good = parse_number(optarg, &options->epochs) && good;
    if (code == 'b') good = parse_number(optarg, &options->batch_size) && options->batch_size && good;
    if (code == 'k') good = parse_number(optarg, &options->keep) && good;
    if (code == 's') good = parse_number(optarg, &options->seed) && good;
    if (code == 'n') options->in_order = true;
    if (code == 'h') return false;
    good = good && code != '?';
  }
  if (optind + 1 == count) options->artifact = words[optind];
  return good && options->artifact && options->data;
}

// The metric that a sum is of; NULL for what sums are divided by.
static const char* metric_of(const char* path) {
  static const char* const words[] = {"sum/", "logsum/", "ratios/", "total/"};
  for (size_t i = 0; i < sizeof(words) / sizeof(*words); ++i) {
    size_t length = strlen(words[i]);
    if (strncmp(path, words[i], length) == 0) return path + length;
  }
  return NULL;
}

// The averages of a function in place of those in `texts`.
static fixstep_status_t read_averages(run_t* run, const char* function, json_t* texts) {
  fixstep_leaves_t sums = fixstep_artifact_leaves(run->artifact, function, "accumulators");
  fixstep_status_t status = FIXSTEP_OK;
  json_object_clear(texts);
  for (size_t i = 0; i < sums.count && status == FIXSTEP_OK; ++i) {
    const char* metric = metric_of(sums.data[i].path);
    double value;
    if (!metric) continue;
    status = fixstep_session_read_average(run->session, function, metric, &value, &run->error);
    if (status == FIXSTEP_INVALID_ARGUMENT) {  // no single number: a confusion matrix
      fixstep_error_release(run->error);
      run->error = NULL;
      status = FIXSTEP_OK;
    } else if (status == FIXSTEP_OK && !position_add_number(texts, metric, value)) {
      status = FIXSTEP_OUT_OF_MEMORY;
    }
  }
  return status;
}

static void print_averages(json_t* texts) {
  const char* metric;
  json_t* text;
  json_object_foreach(texts, metric, text) { printf("  %s %.6g", metric, strtod(json_string_value(text), NULL)); }
}

// What an epoch still has: all of it, or the batches that a checkpoint has not behind it.
static fixstep_status_t train(const options_t* options, run_t* run) {
  position_t* position = &run->position;
  size_t leaves = fixstep_artifact_leaves(run->artifact, "step", "batch").count;
  fixstep_status_t status = FIXSTEP_OK;
  if (!position->batch) status = fixstep_session_reset_averages(run->session, "step", &run->error);
  if (status == FIXSTEP_OK && !options->in_order) {
    status = fixstep_data_shuffle(run->data, options->seed, position->epoch, &run->error);
  }
  while (status == FIXSTEP_OK && !position->halting && position->batch < fixstep_data_batch_count(run->data)) {
    const fixstep_tensor_t* batch = fixstep_data_batch(run->data, (size_t)position->batch);
    status = fixstep_session_step(run->session, batch, leaves, &run->error);
    position->batch += 1;
    position->iteration += 1;
    position->skipped_in_a_row = 0;
  }
  if (status != FIXSTEP_OK) return status;
  // Python may have skipped all there was; then there is nothing to average.
  if (position->batch > position->skipped_in_epoch) return read_averages(run, "step", position->averages);
  json_object_clear(position->averages);
  return FIXSTEP_OK;
}

static fixstep_status_t validate(run_t* run) {
  size_t leaves = fixstep_artifact_leaves(run->artifact, "evaluate", "batch").count;
  fixstep_status_t status = fixstep_session_reset_averages(run->session, "evaluate", &run->error);
  for (size_t i = 0; i < fixstep_data_batch_count(run->validation) && status == FIXSTEP_OK; ++i) {
    status = fixstep_session_evaluate(run->session, fixstep_data_batch(run->validation, i), leaves, &run->error);
  }
  run->position.validations += 1;
  run->position.validated_at = (int64_t)fixstep_session_steps(run->session);
  return status == FIXSTEP_OK ? read_averages(run, "evaluate", run->position.validation) : status;
}

static fixstep_status_t open_data(const options_t* options, run_t* run, const char* path, const char* function,
                                  fixstep_data_t** out_data) {
  fixstep_leaves_t leaves = fixstep_artifact_leaves(run->artifact, function, "batch");
  int64_t low, high, multiple;
  if (!fixstep_artifact_sizes(run->artifact, &low, &high, &multiple)) {
    return fixstep_data_open(path, leaves, out_data, &run->error);
  }
  size_t batch_size = options->batch_size ? (size_t)options->batch_size : (size_t)high;
  fixstep_status_t status =
      fixstep_data_open_batches(path, leaves, batch_size, /*keep_last=*/true, out_data, &run->error);
  if (status != FIXSTEP_OK) return status;
  int64_t rest = (int64_t)(fixstep_data_example_count(*out_data) % batch_size);
  if (!rest || (rest >= low && rest % multiple == 0)) return FIXSTEP_OK;
  // Only the file says how short the last batch is. Where the artifact does not take it, it is left out.
  fixstep_data_release(*out_data);
  return fixstep_data_open_batches(path, leaves, batch_size, /*keep_last=*/false, out_data, &run->error);
}

// Refuses a batch size that the artifact does not take, as `fixstep run` does.
static fixstep_status_t check_batch_size(const options_t* options, run_t* run) {
  int64_t low, high, multiple;
  bool several = fixstep_artifact_sizes(run->artifact, &low, &high, &multiple);
  unsigned long long asked = options->batch_size, least = (unsigned long long)low, most = (unsigned long long)high;
  if (!asked || asked == most) return FIXSTEP_OK;
  if (several && asked >= least && asked <= most && asked % (unsigned long long)multiple == 0) return FIXSTEP_OK;
  const size_t room = 160;  // four numbers of 20 digits and 60 characters
  run->message = malloc(room);
  if (!run->message) return FIXSTEP_OUT_OF_MEMORY;
  int length = snprintf(run->message, room, "--batch-size %llu: the artifact takes ", asked);
  char* rest = run->message + length;
  if (several) {
    snprintf(rest, room - (size_t)length, "%llu to %llu, multiples of %lld", least, most, (long long)multiple);
  } else {
    snprintf(rest, room - (size_t)length, "%llu alone", most);
  }
  return FIXSTEP_DATA_ERROR;
}

static fixstep_status_t open_all(const options_t* options, run_t* run) {
  fixstep_status_t status = fixstep_artifact_open(options->artifact, &run->artifact, &run->error);
  if (status == FIXSTEP_OK) status = check_batch_size(options, run);
  if (status == FIXSTEP_OK) status = open_data(options, run, options->data, "step", &run->data);
  if (status == FIXSTEP_OK && options->validate) {
    status = open_data(options, run, options->validate, "evaluate", &run->validation);
  }
  if (status == FIXSTEP_OK) {
    fixstep_session_options_t session = options->session;
    // Where the program brings its own first state, the seed is that of the order alone.
    if (fixstep_artifact_has_function(run->artifact, "init")) session.seed = options->seed;
    status = fixstep_session_open(run->artifact, &session, &run->session, &run->error);
  }
  return status;
}

static order_t order_of(const options_t* options, const run_t* run) {
  size_t examples = fixstep_data_example_count(run->data), batch_size = fixstep_data_batch_size(run->data);
  return (order_t){
      .examples = examples,
      .batch_size = batch_size,
      .shuffle = !options->in_order,
      .seed = options->seed,
      .drop_last = fixstep_data_batch_count(run->data) == examples / batch_size,
  };
}

// Goes on where the checkpoint at `path` stands.
static fixstep_status_t take_up(const options_t* options, run_t* run, const char* path) {
  char* text = NULL;
  fixstep_status_t status = fixstep_session_restore(run->session, path, &text, &run->error);
  if (status != FIXSTEP_OK) return status;
  // A checkpoint without a position was saved by hand; its steps tell.
  uint64_t steps = fixstep_session_steps(run->session), batches = fixstep_data_batch_count(run->data);
  run->position.epoch = steps / batches + 1;
  run->position.batch = steps % batches;
  run->position.iteration = steps;
  order_t order = order_of(options, run);
  status = position_take(&run->position, path, text, &order, &run->message);
  fixstep_free(text);
  if (status == FIXSTEP_OK) printf("resumed after %llu steps\n", (unsigned long long)steps);
  return status;
}

// Takes up the newest checkpoint, also one of `fixstep run` with the same data and seed.
static fixstep_status_t resume(const options_t* options, run_t* run) {
  char *path = NULL, *passed_over = NULL;
  if (!options->folder) return FIXSTEP_OK;
  fixstep_status_t status = fixstep_checkpoint_latest(options->folder, &path, &passed_over, &run->error);
  if (passed_over) fprintf(stderr, "passed over:\n%s\n", passed_over);
  if (path) status = take_up(options, run, path);
  fixstep_free(passed_over);
  fixstep_free(path);
  return status;
}

// Saves as Python does at an epoch's end.
static fixstep_status_t save(const options_t* options, run_t* run) {
  order_t order = order_of(options, run);
  char* text = position_text(&run->position, &order);
  fixstep_status_t status = text ? FIXSTEP_OK : FIXSTEP_OUT_OF_MEMORY;
  if (text) status = fixstep_session_save_in(run->session, options->folder, options->keep, text, &run->error);
  free(text);
  return status;
}

static fixstep_status_t run_epoch(const options_t* options, run_t* run) {
  unsigned long long epoch = run->position.epoch;
  bool validates = run->validation && !run->position.halting;
  fixstep_status_t status = train(options, run);
  if (status == FIXSTEP_OK && validates) status = validate(run);
  if (status == FIXSTEP_OK) status = fixstep_session_reset_averages(run->session, "step", &run->error);
  position_end_epoch(&run->position);
  if (status == FIXSTEP_OK && options->folder) status = save(options, run);
  if (status != FIXSTEP_OK) return status;
  printf("epoch %llu", epoch);
  print_averages(run->position.averages);
  if (validates) printf("  validation:");
  if (validates) print_averages(run->position.validation);
  printf("\n");
  fflush(stdout);
  return FIXSTEP_OK;
}

static fixstep_status_t run_epochs(const options_t* options, run_t* run) {
  fixstep_status_t status = position_start(&run->position) ? resume(options, run) : FIXSTEP_OUT_OF_MEMORY;
  while (status == FIXSTEP_OK && run->position.epoch <= options->epochs) status = run_epoch(options, run);
  return status;
}

static void print_error(const run_t* run) {
  const char* message = run->message ? run->message : fixstep_error_message(run->error);
  fprintf(stderr, "fixstep-train: %s\n", *message ? message : "the host has no memory");
}

int main(int count, char** words) {
  options_t options;
  run_t run = {0};
  if (!parse(count, words, &options)) {
    fputs(usage, stderr);
    return 2;
  }
#ifdef FIXSTEP_TRAIN_BACKEND
  options.session.backend = FIXSTEP_TRAIN_BACKEND(getenv("IREE_RUN_MODULE"));
#endif
  fixstep_status_t status = open_all(&options, &run);
  if (status == FIXSTEP_OK) {
    printf("%s on %s", fixstep_artifact_name(run.artifact), fixstep_session_target(run.session));
    if (fixstep_data_left_out(run.data)) printf(", %zu examples left out", fixstep_data_left_out(run.data));
    printf("\n");
    status = run_epochs(&options, &run);
  }
  if (status != FIXSTEP_OK) print_error(&run);
  free(run.message);
  fixstep_error_release(run.error);
  position_release(&run.position);
  fixstep_session_release(run.session);
  fixstep_data_release(run.validation);
  fixstep_data_release(run.data);
  fixstep_artifact_release(run.artifact);
  return status == FIXSTEP_OK ? 0 : 2;
}
