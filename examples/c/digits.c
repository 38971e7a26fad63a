// Trains the digits example without Python: the compiled step is part of this program.
//
//   digits digits-train.npz digits-test.npz [checkpoint folder]

#include <fixstep.h>
#include <stdio.h>

// From fixstep_add_artifact in CMakeLists.txt.
extern const unsigned char digits_fixstep[];
extern const size_t digits_fixstep_byte_length;

enum { EPOCHS = 20 };

typedef struct run_t {
  fixstep_artifact_t* artifact;
  fixstep_session_t* session;
  fixstep_data_t* train;
  fixstep_data_t* test;
  fixstep_error_t* error;
} run_t;

static fixstep_status_t open_all(run_t* run, char** words) {
  fixstep_status_t status =
      fixstep_artifact_open_memory(digits_fixstep, digits_fixstep_byte_length, &run->artifact, &run->error);
  if (status == FIXSTEP_OK) {
    status =
        fixstep_data_open(words[1], fixstep_artifact_leaves(run->artifact, "step", "batch"), &run->train, &run->error);
  }
  if (status == FIXSTEP_OK) {
    status = fixstep_data_open(words[2], fixstep_artifact_leaves(run->artifact, "evaluate", "batch"), &run->test,
                               &run->error);
  }
  if (status == FIXSTEP_OK) status = fixstep_session_open(run->artifact, NULL, &run->session, &run->error);
  return status;
}

// One epoch of training, in a random order of its own. Each tensor of a batch names its leaf, `x` or `y`, so their
// order does not matter.
static fixstep_status_t train(run_t* run, int epoch, double* out_loss) {
  fixstep_status_t status = fixstep_session_reset_averages(run->session, "step", &run->error);
  if (status == FIXSTEP_OK) status = fixstep_data_shuffle(run->train, /*seed=*/0, (uint64_t)epoch, &run->error);
  for (size_t i = 0; i < fixstep_data_batch_count(run->train) && status == FIXSTEP_OK; ++i) {
    status = fixstep_session_step(run->session, fixstep_data_batch(run->train, i), /*count=*/2, &run->error);
  }
  if (status == FIXSTEP_OK) status = fixstep_session_read_average(run->session, "step", "loss", out_loss, &run->error);
  return status;
}

static fixstep_status_t test(run_t* run, double* out_accuracy) {
  fixstep_status_t status = fixstep_session_reset_averages(run->session, "evaluate", &run->error);
  for (size_t i = 0; i < fixstep_data_batch_count(run->test) && status == FIXSTEP_OK; ++i) {
    status = fixstep_session_evaluate(run->session, fixstep_data_batch(run->test, i), /*count=*/2, &run->error);
  }
  if (status == FIXSTEP_OK) {
    status = fixstep_session_read_average(run->session, "evaluate", "accuracy", out_accuracy, &run->error);
  }
  return status;
}

static fixstep_status_t train_and_test(run_t* run, const char* folder) {
  fixstep_status_t status = FIXSTEP_OK;
  for (int epoch = 1; epoch <= EPOCHS && status == FIXSTEP_OK; ++epoch) {
    double loss = 0, accuracy = 0;
    status = train(run, epoch, &loss);
    if (status == FIXSTEP_OK) status = test(run, &accuracy);
    if (status == FIXSTEP_OK) printf("epoch %d  loss %.4f  accuracy on held-out digits %.4f\n", epoch, loss, accuracy);
    // A checkpoint that Python resumes, too.
    if (status == FIXSTEP_OK && folder) {
      status = fixstep_session_save_in(run->session, folder, /*keep=*/3, /*position=*/NULL, &run->error);
    }
  }
  return status;
}

int main(int count, char** words) {
  run_t run = {0};
  if (count < 3) {
    fprintf(stderr, "usage: digits digits-train.npz digits-test.npz [checkpoint folder]\n");
    return 2;
  }
  fixstep_status_t status = open_all(&run, words);
  if (status == FIXSTEP_OK) {
    printf("on %s\n", fixstep_session_target(run.session));
    status = train_and_test(&run, count > 3 ? words[3] : NULL);
  }
  if (status != FIXSTEP_OK) fprintf(stderr, "digits: %s\n", fixstep_error_message(run.error));
  fixstep_error_release(run.error);
  fixstep_session_release(run.session);
  fixstep_data_release(run.test);
  fixstep_data_release(run.train);
  fixstep_artifact_release(run.artifact);
  return status == FIXSTEP_OK ? 0 : 1;
}
