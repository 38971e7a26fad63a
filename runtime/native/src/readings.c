// What a session gives to look at: results, metrics, averages, leaves of the state.

#include <math.h>
#include <stdlib.h>

#include "number.h"
#include "session.h"

status_t fx_session_read(fixstep_session_t* session, const buffers_t* buffers, const char* path, const char* what,
                         void* data, size_t byte_length, fixstep_error_t** out_error) {
  if (!buffers->items) return fx_fail(out_error, FIXSTEP_INVALID_ARGUMENT, "no %s: nothing was called yet", what);
  const fixstep_leaf_t* leaf = path ? fx_leaf_list_find(buffers->leaves, path) : NULL;
  if (!leaf) {
    text_t message = {0};
    fx_text_add(&message, "no %s '%s'; there are: ", what, path ? path : "");
    for (size_t i = 0; i < buffers->leaves->count; ++i) {
      fx_text_add(&message, "%s%s", i ? ", " : "", buffers->leaves->items[i].path);
    }
    if (!buffers->leaves->count) fx_text_add(&message, "none");
    return fx_fail_with_text(out_error, FIXSTEP_INVALID_ARGUMENT, &message);
  }
  if (byte_length != leaf->byte_length || (byte_length && !data)) {
    return fx_fail(out_error, FIXSTEP_INVALID_ARGUMENT, "%s: expected room for %zu bytes, got %zu", leaf->path,
                   leaf->byte_length, data ? byte_length : 0);
  }
  return session->backend->read(session->device, buffers->items[leaf - buffers->leaves->items], leaf, data, out_error);
}

// Reads a result of a batch that was padded, without the padding.
static status_t read_padded(fixstep_session_t* session, int function, const fixstep_leaf_t* padded, void* data,
                            size_t byte_length, fixstep_error_t** out_error) {
  const buffers_t* results = &session->results[function];
  size_t index = (size_t)(padded - results->leaves->items);
  leaf_list_t real;
  status_t status =
      fx_sizes_leaves(&session->artifact->sizes, fx_session_results_role(function),
                      fx_session_results(session, function), session->result_sizes[function], &real, out_error);
  if (status != FIXSTEP_OK) return status;
  const fixstep_leaf_t* leaf = &real.items[index];
  void* whole = fx_allocate_zeroed(padded->byte_length, 1);
  if (!whole) {
    status = fx_fail_memory(out_error);
  } else if (byte_length != leaf->byte_length || (byte_length && !data)) {
    status = fx_fail(out_error, FIXSTEP_INVALID_ARGUMENT, "%s: expected room for %zu bytes, got %zu", leaf->path,
                     leaf->byte_length, data ? byte_length : 0);
  } else {
    status = session->backend->read(session->device, results->items[index], padded, whole, out_error);
  }
  if (status == FIXSTEP_OK && byte_length) fx_sizes_copy(leaf, data, padded, whole);
  free(whole);
  fx_leaf_list_release(&real);
  return status;
}

fixstep_status_t fixstep_session_read_result(fixstep_session_t* session, const char* function, const char* path,
                                             void* data, size_t byte_length, fixstep_error_t** out_error) {
  if (out_error) *out_error = NULL;
  int index = 0;
  status_t status = fx_session_function(session, function, &index, out_error);
  if (status != FIXSTEP_OK) return status;
  const buffers_t* results = &session->results[index];
  const fixstep_leaf_t* leaf = results->items && path ? fx_leaf_list_find(results->leaves, path) : NULL;
  if (session->artifact->sizes.compiled && leaf) {
    return read_padded(session, index, leaf, data, byte_length, out_error);
  }
  return fx_session_read(session, results, path, "result", data, byte_length, out_error);
}

fixstep_status_t fixstep_session_read_metric(fixstep_session_t* session, const char* function, const char* path,
                                             double* out_value, fixstep_error_t** out_error) {
  *out_value = 0;
  if (out_error) *out_error = NULL;
  int index = 0;
  status_t status = fx_session_function(session, function, &index, out_error);
  if (status != FIXSTEP_OK) return status;
  const buffers_t* results = &session->results[index];
  const fixstep_leaf_t* leaf = results->items && path ? fx_leaf_list_find(results->leaves, path) : NULL;
  uint64_t room[2] = {0};  // the largest element
  size_t byte_length = leaf ? leaf->byte_length : 0;
  if (byte_length > sizeof(room)) byte_length = 0;  // no scalar; refused as a wrong length
  status = fx_session_read(session, results, path, "metric", room, byte_length, out_error);
  if (status == FIXSTEP_OK && !fx_number_of(leaf->dtype, room, out_value)) {
    status = fx_fail(out_error, FIXSTEP_INVALID_ARGUMENT, "%s: a %s is no plain number; read the result", path,
                     fixstep_dtype_name(leaf->dtype));
  }
  return status;
}

// A sum by its word and the metric's name, `sum/loss`; `out_found` is false where there is none.
static status_t read_sum(fixstep_session_t* session, const buffers_t* sums, const char* word, const char* metric,
                         bool* out_found, double* out_value, fixstep_error_t** out_error) {
  text_t path = {0};
  fx_text_add(&path, "%s%s%s", word, metric ? "/" : "", metric ? metric : "");
  const fixstep_leaf_t* leaf = path.failed ? NULL : fx_leaf_list_find(sums->leaves, path.data);
  status_t status = path.failed ? fx_fail_memory(out_error) : FIXSTEP_OK;
  // Integers, which the device adds up in two words, have one dimension.
  bool words = leaf && leaf->dtype == FIXSTEP_UINT32 && leaf->rank == 1 && leaf->shape[0] == 2;
  *out_found = leaf && (words || leaf->rank == 0);
  uint64_t room[2] = {0};
  if (*out_found && status == FIXSTEP_OK) {
    status = fx_session_read(session, sums, path.data, "average", room, leaf->byte_length, out_error);
  }
  if (*out_found && status == FIXSTEP_OK) {
    if (words) {
      *out_value = fx_number_of_words(room);
    } else {
      *out_found = fx_number_of(leaf->dtype, room, out_value);
    }
  }
  fx_text_release(&path);
  return status;
}

// The elements of a sum of one dimension; `out_values` is NULL where there is none, and freed by the caller.
static status_t read_sums(fixstep_session_t* session, const buffers_t* sums, const char* word, const char* metric,
                          size_t* out_count, double** out_values, fixstep_error_t** out_error) {
  *out_count = 0;
  *out_values = NULL;
  text_t path = {0};
  fx_text_add(&path, "%s/%s", word, metric);
  if (path.failed) return fx_fail_memory(out_error);
  const fixstep_leaf_t* leaf = fx_leaf_list_find(sums->leaves, path.data);
  bool words = leaf && leaf->dtype == FIXSTEP_UINT32 && leaf->rank == 2 && leaf->shape[1] == 2;
  size_t count = leaf && (words || leaf->rank == 1) ? (size_t)leaf->shape[0] : 0;
  if (!count) {
    fx_text_release(&path);
    return FIXSTEP_OK;
  }
  unsigned char* bytes = fx_allocate_zeroed(leaf->byte_length, 1);
  double* values = fx_allocate_zeroed(count, sizeof(*values));
  status_t status = bytes && values ? FIXSTEP_OK : fx_fail_memory(out_error);
  if (status == FIXSTEP_OK) {
    status = fx_session_read(session, sums, path.data, "average", bytes, leaf->byte_length, out_error);
  }
  for (size_t i = 0; i < count && status == FIXSTEP_OK; ++i) {
    const unsigned char* element = bytes + i * (leaf->byte_length / count);
    if (words) {
      values[i] = fx_number_of_words(element);
    } else if (!fx_number_of(leaf->dtype, element, &values[i])) {
      status = fx_fail(out_error, FIXSTEP_INVALID_ARGUMENT, "%s: a %s is no plain number", path.data,
                       fixstep_dtype_name(leaf->dtype));
    }
  }
  free(bytes);
  fx_text_release(&path);
  if (status != FIXSTEP_OK) {
    free(values);
    return status;
  }
  *out_count = count;
  *out_values = values;
  return FIXSTEP_OK;
}

// The mean of the ratios that count; `out_found` is false where the metric has none.
static status_t read_mean_ratio(fixstep_session_t* session, const buffers_t* sums, const char* metric, bool* out_found,
                                double* out_value, fixstep_error_t** out_error) {
  static const char* const words[] = {"ratios", "weight", "counted"};
  double* parts[3] = {NULL, NULL, NULL};
  size_t counts[3];
  status_t status = FIXSTEP_OK;
  for (size_t i = 0; i < 3 && status == FIXSTEP_OK; ++i) {
    status = read_sums(session, sums, words[i], metric, &counts[i], &parts[i], out_error);
  }
  *out_found = status == FIXSTEP_OK && parts[0] && parts[1] && parts[2] && counts[0] == counts[1] &&
               counts[0] == counts[2];
  double total = 0;
  size_t counted = 0;
  for (size_t i = 0; *out_found && i < counts[0]; ++i) {
    if (parts[2][i] == 0) continue;
    if (parts[1][i] != 0) total += parts[0][i] / parts[1][i];
    ++counted;
  }
  *out_value = counted ? total / (double)counted : (double)NAN;
  for (size_t i = 0; i < 3; ++i) free(parts[i]);
  return status;
}

fixstep_status_t fixstep_session_read_average(fixstep_session_t* session, const char* function, const char* metric,
                                              double* out_value, fixstep_error_t** out_error) {
  *out_value = (double)NAN;
  if (out_error) *out_error = NULL;
  int index = 0;
  status_t status = fx_session_function(session, function, &index, out_error);
  if (status != FIXSTEP_OK) return status;
  const buffers_t* sums = &session->accumulators[index].current;
  if (!sums->items || !metric) {
    return fx_fail(out_error, FIXSTEP_INVALID_ARGUMENT, "%s has no averages", function);
  }
  bool found, logarithm = false, weighted;
  double total = 0, weight = 0, count = 0;
  status = read_sum(session, sums, "count", NULL, &found, &count, out_error);
  if (status == FIXSTEP_OK) status = read_sum(session, sums, "total", metric, &found, &total, out_error);
  if (status != FIXSTEP_OK || found) {
    if (status == FIXSTEP_OK && count != 0) *out_value = total;
    return status;
  }
  status = read_mean_ratio(session, sums, metric, &found, out_value, out_error);
  if (status != FIXSTEP_OK || found) return status;
  status = read_sum(session, sums, "sum", metric, &found, &total, out_error);
  if (status == FIXSTEP_OK && !found) {
    status = read_sum(session, sums, "logsum", metric, &found, &total, out_error);
    logarithm = true;
  }
  if (status == FIXSTEP_OK && !found) {
    return fx_fail(out_error, FIXSTEP_INVALID_ARGUMENT, "%s has no average of a metric '%s'", function, metric);
  }
  if (status == FIXSTEP_OK) status = read_sum(session, sums, "weight", metric, &weighted, &weight, out_error);
  if (status != FIXSTEP_OK) return status;
  double divisor = weighted ? weight : count;
  double mean = divisor != 0 && count != 0 ? total / divisor : (double)NAN;
  *out_value = logarithm ? exp(mean) : mean;
  return FIXSTEP_OK;
}

fixstep_status_t fixstep_session_read_sum(fixstep_session_t* session, const char* function, const char* path,
                                          void* data, size_t byte_length, fixstep_error_t** out_error) {
  if (out_error) *out_error = NULL;
  int index = 0;
  status_t status = fx_session_function(session, function, &index, out_error);
  if (status != FIXSTEP_OK) return status;
  return fx_session_read(session, &session->accumulators[index].current, path, "sum", data, byte_length, out_error);
}

fixstep_status_t fixstep_session_reset_averages(fixstep_session_t* session, const char* function,
                                                fixstep_error_t** out_error) {
  if (out_error) *out_error = NULL;
  int index = 0;
  status_t status = fx_session_function(session, function, &index, out_error);
  if (status != FIXSTEP_OK) return status;
  buffers_t* sums = &session->accumulators[index].current;
  if (!sums->items) return fx_fail(out_error, FIXSTEP_INVALID_ARGUMENT, "%s has no averages", function);
  buffers_t zeros;
  status = fx_buffers_make(session, sums->leaves, NULL, &zeros, out_error);
  if (status != FIXSTEP_OK) return status;
  fx_buffers_replace(session, sums, &zeros);
  if (index == FUNCTION_STEP) session->can_roll_back = false;
  return FIXSTEP_OK;
}

fixstep_status_t fixstep_session_read_leaf(fixstep_session_t* session, const char* path, void* data, size_t byte_length,
                                           fixstep_error_t** out_error) {
  if (out_error) *out_error = NULL;
  return fx_session_read(session, &session->state.current, path, "leaf", data, byte_length, out_error);
}
