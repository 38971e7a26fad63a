// fixstep-train: trains an artifact on a file of data, without Python.

#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fixstep.h"
#include "fixstep_backend.h"

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

// All that is open, and the error that ended the run.
typedef struct run_t {
  fixstep_artifact_t* artifact;
  fixstep_session_t* session;
  fixstep_data_t* data;
  fixstep_data_t* validation;
  fixstep_error_t* error;
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
    if (code == 'b') good = parse_number(optarg, &options->batch_size) && good;
    if (code == 'k') good = parse_number(optarg, &options->keep) && good;
    if (code == 's') good = parse_number(optarg, &options->seed) && good;
    if (code == 'n') options->in_order = true;
    if (code == 'h') return false;
    good = good && code != '?';
  }
  if (optind + 1 == count) options->artifact = words[optind];
  return good && options->artifact && options->data;
}

static void print_averages(const run_t* run, const char* function) {
  fixstep_leaves_t metrics = fixstep_artifact_leaves(run->artifact, function, "metrics");
  for (size_t i = 0; i < metrics.count; ++i) {
    double value;
    if (fixstep_session_read_average(run->session, function, metrics.data[i].path, &value, NULL) == FIXSTEP_OK) {
      printf("  %s %.6g", metrics.data[i].path, value);
    }
  }
}

// One epoch, without its first batches where a checkpoint has them behind it.
static fixstep_status_t train(const options_t* options, run_t* run, unsigned long long epoch, size_t first) {
  size_t leaves = fixstep_artifact_leaves(run->artifact, "step", "batch").count;
  fixstep_status_t status = FIXSTEP_OK;
  if (!first) status = fixstep_session_reset_averages(run->session, "step", &run->error);
  if (status == FIXSTEP_OK && !options->in_order) {
    status = fixstep_data_shuffle(run->data, options->seed, epoch, &run->error);
  }
  for (size_t i = first; i < fixstep_data_batch_count(run->data) && status == FIXSTEP_OK; ++i) {
    status = fixstep_session_step(run->session, fixstep_data_batch(run->data, i), leaves, &run->error);
  }
  return status;
}

static fixstep_status_t validate(run_t* run) {
  size_t leaves = fixstep_artifact_leaves(run->artifact, "evaluate", "batch").count;
  fixstep_status_t status = fixstep_session_reset_averages(run->session, "evaluate", &run->error);
  for (size_t i = 0; i < fixstep_data_batch_count(run->validation) && status == FIXSTEP_OK; ++i) {
    status = fixstep_session_evaluate(run->session, fixstep_data_batch(run->validation, i), leaves, &run->error);
  }
  return status;
}

static fixstep_status_t open_data(const options_t* options, run_t* run, const char* path, const char* function,
                                  fixstep_data_t** out_data) {
  fixstep_leaves_t leaves = fixstep_artifact_leaves(run->artifact, function, "batch");
  int64_t low, high, multiple;
  if (!fixstep_artifact_sizes(run->artifact, &low, &high, &multiple)) {
    return fixstep_data_open(path, leaves, out_data, &run->error);
  }
  size_t batch_size = options->batch_size ? (size_t)options->batch_size : (size_t)high;
  return fixstep_data_open_batches(path, leaves, batch_size, low == 1 && multiple == 1, out_data, &run->error);
}

static fixstep_status_t open_all(const options_t* options, run_t* run) {
  fixstep_status_t status = fixstep_artifact_open(options->artifact, &run->artifact, &run->error);
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

// Takes up the newest checkpoint, also one of `fixstep run` with the same data and seed. `out_done`: the epochs that
// the run has behind it; `out_first`: the batches of the next one.
static fixstep_status_t resume(const options_t* options, run_t* run, unsigned long long* out_done, size_t* out_first) {
  bool found = false;
  char* passed_over = NULL;
  *out_done = 0;
  *out_first = 0;
  if (!options->folder) return FIXSTEP_OK;
  fixstep_status_t status =
      fixstep_session_restore_latest(run->session, options->folder, &found, NULL, &passed_over, &run->error);
  if (passed_over) fprintf(stderr, "passed over:\n%s\n", passed_over);
  fixstep_free(passed_over);
  if (found) {
    *out_done = fixstep_session_steps(run->session) / fixstep_data_batch_count(run->data);
    *out_first = (size_t)(fixstep_session_steps(run->session) % fixstep_data_batch_count(run->data));
    printf("resumed after %llu steps\n", (unsigned long long)fixstep_session_steps(run->session));
  }
  return status;
}

static fixstep_status_t run_epochs(const options_t* options, run_t* run) {
  unsigned long long done;
  size_t first;
  fixstep_status_t status = resume(options, run, &done, &first);
  for (unsigned long long epoch = done + 1; epoch <= options->epochs && status == FIXSTEP_OK; ++epoch) {
    status = train(options, run, epoch, first);
    first = 0;
    if (status == FIXSTEP_OK && run->validation) status = validate(run);
    if (status == FIXSTEP_OK && options->folder) {
      status = fixstep_session_save_in(run->session, options->folder, options->keep, NULL, &run->error);
    }
    if (status != FIXSTEP_OK) break;
    printf("epoch %llu", epoch);
    print_averages(run, "step");
    if (run->validation) printf("  validation:");
    if (run->validation) print_averages(run, "evaluate");
    printf("\n");
    fflush(stdout);
  }
  return status;
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
  if (status != FIXSTEP_OK) fprintf(stderr, "fixstep-train: %s\n", fixstep_error_message(run.error));
  fixstep_error_release(run.error);
  fixstep_session_release(run.session);
  fixstep_data_release(run.validation);
  fixstep_data_release(run.data);
  fixstep_artifact_release(run.artifact);
  return status == FIXSTEP_OK ? 0 : 2;
}
