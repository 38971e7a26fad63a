// fixstep: train a compiled step inside a C or C++ program.
//
// Open an artifact (`name.fixstep`), open a session of it on a device, and call `fixstep_session_step` on each batch.
//
// Ownership. What a function hands out through a parameter `out_…` belongs to the caller, who releases it with the
// function named there; every release takes NULL. Text and arrays that a function returns belong to the handle and live
// as long as it. What the caller passes in is read during the call and never kept, but for the artifact of a session,
// which has to outlive it.
//
// Errors. A function that can fail returns a status. Its last parameter, `out_error`, may be NULL; otherwise it is set
// to NULL first, and where the status is not FIXSTEP_OK to an error that the caller releases. Its message says what was
// expected, what came instead, where (leaf path or file), and what to do. Other `out_…` parameters are then zero.
//
// Threads. A handle is for one thread at a time. Different handles are independent, and several sessions may share one
// artifact: nothing changes it after it was opened. The library has no state beside its handles, prints nothing, reads
// no environment variable and never ends the process.

#ifndef FIXSTEP_H_
#define FIXSTEP_H_

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define FIXSTEP_API
#else
#define FIXSTEP_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

// What a call came to.
typedef enum fixstep_status_e {
  FIXSTEP_OK = 0,
  FIXSTEP_INVALID_ARGUMENT,  // the program is at fault: a NULL, an unknown name, a buffer of another length
  FIXSTEP_OUT_OF_MEMORY,     // the host has no memory; nothing was changed
  FIXSTEP_TEMPLATE_ERROR,    // a batch, a state or inputs do not fit the template; the device saw nothing of them
  FIXSTEP_ARTIFACT_ERROR,    // an artifact is damaged, foreign or of another version
  FIXSTEP_CHECKPOINT_ERROR,  // a checkpoint is damaged, belongs to another program, or cannot be written
  FIXSTEP_TARGET_ERROR,      // no target of the artifact runs here
  FIXSTEP_DEVICE_ERROR,      // the device failed a call; the state is what it was before the call
  FIXSTEP_DATA_ERROR,        // data cannot be read, or does not fill a batch
} fixstep_status_t;

// Why a call failed.
typedef struct fixstep_error_t fixstep_error_t;

// The status that the call returned.
FIXSTEP_API fixstep_status_t fixstep_error_status(const fixstep_error_t* error);
// The message in UTF-8, of one or more lines, without a line break at the end; "" for NULL.
FIXSTEP_API const char* fixstep_error_message(const fixstep_error_t* error);
FIXSTEP_API void fixstep_error_release(fixstep_error_t* error);

// Frees memory that a function handed out as plain text.
FIXSTEP_API void fixstep_free(void* memory);

// The type of an element. Numbers never change; new ones come at the end.
typedef enum fixstep_dtype_e {
  FIXSTEP_INVALID_DTYPE = 0,
  FIXSTEP_BOOL,  // one byte, 0 or 1
  FIXSTEP_INT8,
  FIXSTEP_INT16,
  FIXSTEP_INT32,
  FIXSTEP_INT64,
  FIXSTEP_UINT8,
  FIXSTEP_UINT16,
  FIXSTEP_UINT32,
  FIXSTEP_UINT64,
  FIXSTEP_FLOAT16,
  FIXSTEP_BFLOAT16,
  FIXSTEP_FLOAT32,
  FIXSTEP_FLOAT64,
  FIXSTEP_COMPLEX64,   // two float32: real, imaginary
  FIXSTEP_COMPLEX128,  // two float64
  FIXSTEP_FLOAT8_E4M3FN,
  FIXSTEP_FLOAT8_E5M2,
  FIXSTEP_FLOAT8_E4M3FNUZ,
  FIXSTEP_FLOAT8_E5M2FNUZ,
  // Types below eight bits: one element a byte, as ml_dtypes holds them.
  FIXSTEP_INT1,
  FIXSTEP_INT2,
  FIXSTEP_INT4,
  FIXSTEP_UINT1,
  FIXSTEP_UINT2,
  FIXSTEP_UINT4,
  FIXSTEP_FLOAT4_E2M1FN,
  FIXSTEP_FLOAT6_E2M3FN,
  FIXSTEP_FLOAT6_E3M2FN,
  FIXSTEP_FLOAT8_E3M4,
  FIXSTEP_FLOAT8_E4M3,
  FIXSTEP_FLOAT8_E4M3B11FNUZ,
  FIXSTEP_FLOAT8_E8M0FNU,
} fixstep_dtype_t;

// The name that artifacts and messages use, `float32`; "invalid" for no dtype.
FIXSTEP_API const char* fixstep_dtype_name(fixstep_dtype_t dtype);
// Bytes of one element; 0 for no dtype.
FIXSTEP_API size_t fixstep_dtype_byte_length(fixstep_dtype_t dtype);

// One leaf of a template.
typedef struct fixstep_leaf_t {
  const char* path;  // "params/dense/w"; "" for a value that is itself a leaf
  fixstep_dtype_t dtype;
  size_t rank;
  const int64_t* shape;  // [rank]
  size_t byte_length;    // of all elements
  const char* key;       // the implementation of the PRNG key whose uint32 data the leaf holds, or NULL
} fixstep_leaf_t;

// Leaves in template order.
typedef struct fixstep_leaves_t {
  const fixstep_leaf_t* data;  // [count]
  size_t count;
} fixstep_leaves_t;

// Host memory that is bound to a leaf for one call.
typedef struct fixstep_tensor_t {
  const char* path;  // the leaf path; NULL in all tensors of a call binds them by position, in template order
  fixstep_dtype_t dtype;
  size_t rank;
  const int64_t* shape;  // [rank]
  const void* data;      // the elements, row by row without gaps, little-endian; any alignment
} fixstep_tensor_t;

// An artifact that was read and checked whole, to the last byte. It lies in memory: the file may be replaced meanwhile.
typedef struct fixstep_artifact_t fixstep_artifact_t;

// Opens the artifact in a file. Release it with fixstep_artifact_release.
FIXSTEP_API fixstep_status_t fixstep_artifact_open(const char* path, fixstep_artifact_t** out_artifact,
                                                   fixstep_error_t** out_error);
// Opens the artifact in memory, which is copied.
FIXSTEP_API fixstep_status_t fixstep_artifact_open_memory(const void* data, size_t byte_length,
                                                          fixstep_artifact_t** out_artifact,
                                                          fixstep_error_t** out_error);
FIXSTEP_API void fixstep_artifact_release(fixstep_artifact_t* artifact);

// The program's name.
FIXSTEP_API const char* fixstep_artifact_name(const fixstep_artifact_t* artifact);
// The digest of the program, 64 hexadecimal digits, which its checkpoints carry too.
FIXSTEP_API const char* fixstep_artifact_program(const fixstep_artifact_t* artifact);
FIXSTEP_API size_t fixstep_artifact_target_count(const fixstep_artifact_t* artifact);
// The text of a target, `cpu:host`; NULL beyond the last one.
FIXSTEP_API const char* fixstep_artifact_target(const fixstep_artifact_t* artifact, size_t index);
// Whether there is a function `init`, `step`, `evaluate` or `predict`.
FIXSTEP_API bool fixstep_artifact_has_function(const fixstep_artifact_t* artifact, const char* function);
// The leaves that a function takes, or gives, in a role: `state`, `batch`, `inputs`, `metrics`, `outputs`,
// `accumulators`, `seed`. None where there is no such function or role.
FIXSTEP_API fixstep_leaves_t fixstep_artifact_leaves(const fixstep_artifact_t* artifact, const char* function,
                                                     const char* role);
// The sizes that a batch may have: from low to high, multiples of a number. False, and all three the batch size of the
// template, where there is one alone (0 where no leaf tells it). Shapes in the template are those at the largest size.
FIXSTEP_API bool fixstep_artifact_sizes(const fixstep_artifact_t* artifact, int64_t* out_low, int64_t* out_high,
                                        int64_t* out_multiple);
// The data of a member of the file; NULL and 0 if there is none.
FIXSTEP_API const void* fixstep_artifact_member(const fixstep_artifact_t* artifact, const char* name,
                                                size_t* out_byte_length);

// One artifact on one device, with its state held there.
typedef struct fixstep_session_t fixstep_session_t;

typedef struct fixstep_session_options_t {
  const char* target;  // one of the artifact's targets, `cpu:host`, or a family, `cpu`. NULL: the first that runs here,
                       // GPUs before the CPU, programs on the CPU that stand for a GPU after it, and code for one kind
                       // of device before portable code
  const char* device;  // which device of the target: a GPU by its index as the driver counts or a part of its name in
                       // any case, the CPU as `local-sync` or `local-task`. NULL: the first that runs the code, those
                       // that are programs on the CPU last
  uint64_t seed;       // for the program's `init`; 0 by default
  const fixstep_tensor_t* state;  // [state_count] the first state instead; NULL for the program's own
  size_t state_count;
  const struct fixstep_backend_t* backend;  // NULL for the one that the library was built with (fixstep_backend.h)
} fixstep_session_options_t;

// Sets every option to its default.
FIXSTEP_API void fixstep_session_options_initialize(fixstep_session_options_t* out_options);

// Opens a session. The artifact has to outlive it. Options may be NULL. Release it with fixstep_session_release.
FIXSTEP_API fixstep_status_t fixstep_session_open(const fixstep_artifact_t* artifact,
                                                  const fixstep_session_options_t* options,
                                                  fixstep_session_t** out_session, fixstep_error_t** out_error);
FIXSTEP_API void fixstep_session_release(fixstep_session_t* session);

// The target that it runs on, and why each target that was tried before was not taken, a line each ("" for none).
FIXSTEP_API const char* fixstep_session_target(const fixstep_session_t* session);
FIXSTEP_API const char* fixstep_session_passed_over(const fixstep_session_t* session);
// Steps taken since the state was made.
FIXSTEP_API uint64_t fixstep_session_steps(const fixstep_session_t* session);

// Trains on one batch, [count] tensors. On any error the state, the averages and the count of steps are what they were.
FIXSTEP_API fixstep_status_t fixstep_session_step(fixstep_session_t* session, const fixstep_tensor_t* batch,
                                                  size_t count, fixstep_error_t** out_error);
// Takes the last step back: state, averages and count. FIXSTEP_INVALID_ARGUMENT if there is none to take back: no step
// was taken, or the state was set since.
FIXSTEP_API fixstep_status_t fixstep_session_rollback(fixstep_session_t* session, fixstep_error_t** out_error);
// The metrics of a batch under the present state, which stays as it is.
FIXSTEP_API fixstep_status_t fixstep_session_evaluate(fixstep_session_t* session, const fixstep_tensor_t* batch,
                                                      size_t count, fixstep_error_t** out_error);
// The program's predictions under the present state.
FIXSTEP_API fixstep_status_t fixstep_session_predict(fixstep_session_t* session, const fixstep_tensor_t* inputs,
                                                     size_t count, fixstep_error_t** out_error);

// Where a batch may have any size, its results have the shapes at its size.
//
// Copies a result of the last call of `step`, `evaluate` (its metrics) or `predict` (its outputs) to memory of exactly
// the leaf's length. Results that nobody reads are never waited for. FIXSTEP_INVALID_ARGUMENT before the first call.
FIXSTEP_API fixstep_status_t fixstep_session_read_result(fixstep_session_t* session, const char* function,
                                                         const char* path, void* data, size_t byte_length,
                                                         fixstep_error_t** out_error);
// A scalar result as a double.
FIXSTEP_API fixstep_status_t fixstep_session_read_metric(fixstep_session_t* session, const char* function,
                                                         const char* path, double* out_value,
                                                         fixstep_error_t** out_error);

// The mean of a metric over the calls of `step` or `evaluate` since the last reset (a ratio of sums or a total where
// the program says so); NaN if there were none.
FIXSTEP_API fixstep_status_t fixstep_session_read_average(fixstep_session_t* session, const char* function,
                                                          const char* metric, double* out_value,
                                                          fixstep_error_t** out_error);
// Copies one of the sums that the averages are read from, `total/confusion`, to memory of exactly its length; they are
// leaves of the role `accumulators`. One of dtype uint32 whose last dimension is 2 holds 64-bit integers, as int64 does
// on a little-endian machine.
FIXSTEP_API fixstep_status_t fixstep_session_read_sum(fixstep_session_t* session, const char* function,
                                                      const char* path, void* data, size_t byte_length,
                                                      fixstep_error_t** out_error);
// Begins the averages of `step` or `evaluate` anew. A step taken before can then no longer be taken back.
FIXSTEP_API fixstep_status_t fixstep_session_reset_averages(fixstep_session_t* session, const char* function,
                                                            fixstep_error_t** out_error);

// Copies one leaf of the state to memory of exactly its length.
FIXSTEP_API fixstep_status_t fixstep_session_read_leaf(fixstep_session_t* session, const char* path, void* data,
                                                       size_t byte_length, fixstep_error_t** out_error);
// Replaces one leaf of the state; the tensor has a path. On an error nothing changed.
FIXSTEP_API fixstep_status_t fixstep_session_write_leaf(fixstep_session_t* session, const fixstep_tensor_t* leaf,
                                                        fixstep_error_t** out_error);
// Replaces the whole state, [count] tensors; all of it or, on an error, nothing.
FIXSTEP_API fixstep_status_t fixstep_session_write_state(fixstep_session_t* session, const fixstep_tensor_t* state,
                                                         size_t count, fixstep_error_t** out_error);

// Writes state, averages and count of steps to a checkpoint. The file appears whole, synced, or an old one stays.
// `position`: a JSON object that fixstep_session_restore gives back; NULL for an empty one.
FIXSTEP_API fixstep_status_t fixstep_session_save(fixstep_session_t* session, const char* path, const char* position,
                                                  fixstep_error_t** out_error);
// Takes up a checkpoint of this program, written by this library or by Python; all of it or, on an error, nothing.
// `out_position` may be NULL; otherwise free what it is set to, the text given to save, with fixstep_free.
FIXSTEP_API fixstep_status_t fixstep_session_restore(fixstep_session_t* session, const char* path, char** out_position,
                                                     fixstep_error_t** out_error);

// Saves to `step-<steps>.safetensors` in a folder, which is made if absent, and then removes old checkpoints beyond the
// newest `keep` (0 keeps all).
FIXSTEP_API fixstep_status_t fixstep_session_save_in(fixstep_session_t* session, const char* folder, size_t keep,
                                                     const char* position, fixstep_error_t** out_error);
// Takes up the newest whole checkpoint of a folder. `out_found` is false, and nothing changed, if the folder holds
// none. If there are some and none can be read, that is an error. `out_passed_over`, if not NULL, is set to text that
// says why newer ones were not taken, or to NULL; free it with fixstep_free.
FIXSTEP_API fixstep_status_t fixstep_session_restore_latest(fixstep_session_t* session, const char* folder,
                                                            bool* out_found, char** out_position,
                                                            char** out_passed_over, fixstep_error_t** out_error);

// The newest whole checkpoint of a folder, for a program that names it: `out_path` is NULL if the folder holds none,
// and `out_passed_over` as above. Free both with fixstep_free.
FIXSTEP_API fixstep_status_t fixstep_checkpoint_latest(const char* folder, char** out_path, char** out_passed_over,
                                                       fixstep_error_t** out_error);

// Arrays with one row per example, in memory, by leaf path.
typedef struct fixstep_data_t fixstep_data_t;

// Opens the leaves `leaves` from a .npz file (arrays named by leaf path), a .npy file (for a single leaf), or a raw
// file of that leaf's elements. Every leaf has the batch as its first dimension. Release it with fixstep_data_release.
FIXSTEP_API fixstep_status_t fixstep_data_open(const char* path, fixstep_leaves_t leaves, fixstep_data_t** out_data,
                                               fixstep_error_t** out_error);
// The same in batches of another size, with a short last one, for artifacts that take it.
FIXSTEP_API fixstep_status_t fixstep_data_open_batches(const char* path, fixstep_leaves_t leaves, size_t batch_size,
                                                       bool keep_last, fixstep_data_t** out_data,
                                                       fixstep_error_t** out_error);
FIXSTEP_API void fixstep_data_release(fixstep_data_t* data);
// Puts the examples into a random order that depends on the seed and the epoch (from 1) alone. It is the order that
// Python's ArrayData gives that epoch. On an error the order is what it was.
FIXSTEP_API fixstep_status_t fixstep_data_shuffle(fixstep_data_t* data, uint64_t seed, uint64_t epoch,
                                                  fixstep_error_t** out_error);
// Examples in all, and in a batch that is not the short last one.
FIXSTEP_API size_t fixstep_data_example_count(const fixstep_data_t* data);
FIXSTEP_API size_t fixstep_data_batch_size(const fixstep_data_t* data);
// Batches, a short last one only where it is kept.
FIXSTEP_API size_t fixstep_data_batch_count(const fixstep_data_t* data);
// Examples that do not fill a batch.
FIXSTEP_API size_t fixstep_data_left_out(const fixstep_data_t* data);
// The tensors of a batch, as many as the leaves, valid until the next call or the release; NULL beyond the last batch.
FIXSTEP_API const fixstep_tensor_t* fixstep_data_batch(fixstep_data_t* data, size_t index);

#ifdef __cplusplus
}
#endif

#endif  // FIXSTEP_H_
