#include "template.h"

#include <inttypes.h>
#include <stdlib.h>
#include <strings.h>

// From how alike on a name is taken for another one misspelled, as in Python's difflib.
#define LIKE 0.6

static bool fits(const fixstep_leaf_t* leaf, const fixstep_tensor_t* tensor) {
  if (tensor->dtype != leaf->dtype || tensor->rank != leaf->rank) return false;
  for (size_t i = 0; i < leaf->rank; ++i) {
    if (tensor->shape[i] != leaf->shape[i]) return false;
  }
  return true;
}

// What is at fault in the program rather than in the data.
static status_t check_tensor(const fixstep_tensor_t* tensor, size_t index, bool by_path, const char* what,
                             fixstep_error_t** out_error) {
  if ((tensor->path != NULL) != by_path) {
    return fx_fail(out_error, FIXSTEP_INVALID_ARGUMENT, "%s tensor %zu: give every tensor a path, or none", what,
                   index);
  }
  if (!fixstep_dtype_byte_length(tensor->dtype)) {
    return fx_fail(out_error, FIXSTEP_INVALID_ARGUMENT, "%s tensor %zu: %d is no dtype", what, index,
                   (int)tensor->dtype);
  }
  if (tensor->rank && !tensor->shape) {
    return fx_fail(out_error, FIXSTEP_INVALID_ARGUMENT, "%s tensor %zu: a rank of %zu and no shape", what, index,
                   tensor->rank);
  }
  return FIXSTEP_OK;
}

// What is known of a check while its report is written. Arrays are [leaf count] and [tensor count].
typedef struct report_t {
  const leaf_list_t* leaves;
  const fixstep_tensor_t* const* got;  // the tensor of a leaf; NULL where it is missing
  const char* what;
  const char* advice;                   // about shapes, or NULL
  bool* inside;                         // the leaf has tensors below it instead
  const fixstep_tensor_t** unexpected;  // sorted by path
  size_t unexpected_count;
} report_t;

static bool is_below(const char* path, const char* above) {
  size_t length = strlen(above);
  return !length || (strncmp(path, above, length) == 0 && path[length] == '/');
}

static int compare_tensor_paths(const void* a, const void* b) {
  return strcmp((*(const fixstep_tensor_t* const*)a)->path, (*(const fixstep_tensor_t* const*)b)->path);
}

// Tensors below a missing leaf belong to it: what the template has there is one array.
static void gather(report_t* report, const fixstep_tensor_t* tensors, size_t count, bool* taken) {
  for (size_t i = 0; i < report->leaves->count; ++i) {
    const fixstep_leaf_t* leaf = &report->leaves->items[i];
    for (size_t j = 0; j < count && !report->got[i]; ++j) {
      if (!taken[j] && is_below(tensors[j].path, leaf->path)) {
        taken[j] = true;
        report->inside[i] = true;
      }
    }
  }
  for (size_t j = 0; j < count; ++j) {
    if (!taken[j] && !fx_leaf_list_find(report->leaves, tensors[j].path)) {
      report->unexpected[report->unexpected_count++] = &tensors[j];
    }
  }
  if (report->unexpected_count) {
    qsort(report->unexpected, report->unexpected_count, sizeof(*report->unexpected), compare_tensor_paths);
  }
}

static char* folded(const char* path) {
  char* copy = fx_copy_text(path, strlen(path));
  for (char* p = copy; p && *p; ++p) *p = *p >= 'A' && *p <= 'Z' ? (char)(*p + 'a' - 'A') : *p;
  return copy;
}

// The unexpected path that is most like a missing one in any case, or NULL.
static const char* nearest(const report_t* report, const char* path) {
  const char* best = NULL;
  char* wanted = folded(path);
  char* best_folded = NULL;
  double best_score = LIKE;
  for (size_t i = 0; wanted && i < report->unexpected_count; ++i) {
    char* candidate = folded(report->unexpected[i]->path);
    double score = candidate ? fx_similarity(candidate, wanted, LIKE) : 0;
    bool better = score > best_score || (score == best_score && (!best || strcmp(candidate, best_folded) > 0));
    if (candidate && score >= LIKE && better) {
      best = report->unexpected[i]->path;
      best_score = score;
      free(best_folded);
      best_folded = candidate;
    } else {
      free(candidate);
    }
  }
  free(best_folded);
  free(wanted);
  return best;
}

static bool is_wrong(const report_t* report, size_t leaf) {
  return report->inside[leaf] || (report->got[leaf] && !fits(&report->leaves->items[leaf], report->got[leaf]));
}

static void add_lines(const report_t* report, text_t* text) {
  const leaf_list_t* leaves = report->leaves;
  for (size_t pass = 0; pass < 2; ++pass) {  // the wrong ones, then the missing ones
    for (size_t i = 0; i < leaves->count; ++i) {
      size_t index = leaves->sorted[i];
      const fixstep_leaf_t* leaf = &leaves->items[index];
      const fixstep_tensor_t* got = report->got[index];
      bool missing = !got && !report->inside[index];
      if (pass ? !missing : !is_wrong(report, index)) continue;
      fx_text_add(text, "\n  ");
      fx_text_add_path(text, leaf->path, report->what);
      fx_text_add(text, ": expected ");
      fx_text_add_type(text, leaf->dtype, leaf->rank, leaf->shape);
      if (missing) {
        const char* near = nearest(report, leaf->path);
        fx_text_add(text, ", missing");
        if (near) fx_text_add(text, " (is it ");
        if (near) fx_text_add_repr(text, near);
        if (near) fx_text_add(text, "?)");
      } else if (report->inside[index]) {
        fx_text_add(text, ", got a Python list or another container, which has no dtype");
      } else {
        fx_text_add(text, ", got ");
        fx_text_add_type(text, got->dtype, got->rank, got->shape);
      }
    }
  }
  for (size_t i = 0; i < report->unexpected_count; ++i) {
    const fixstep_tensor_t* tensor = report->unexpected[i];
    fx_text_add(text, "\n  ");
    fx_text_add_path(text, tensor->path, report->what);
    fx_text_add(text, ": unexpected, got ");
    fx_text_add_type(text, tensor->dtype, tensor->rank, tensor->shape);
  }
}

// Whether only the number of examples differs: the first dimension, or a scalar where one dimension is expected.
static bool is_other_batch_size(const fixstep_leaf_t* leaf, const fixstep_tensor_t* got) {
  size_t rank = got->rank ? got->rank : 1;
  if (got->dtype != leaf->dtype || rank != leaf->rank) return false;
  for (size_t i = 1; i < rank; ++i) {
    if (got->shape[i] != leaf->shape[i]) return false;
  }
  return true;
}

static void add_advice(const report_t* report, text_t* text) {
  const leaf_list_t* leaves = report->leaves;
  fx_text_add(text, "\n");
  for (size_t i = 0; report->advice && i < leaves->count; ++i) {
    if (is_wrong(report, i) && report->got[i] && report->got[i]->dtype == leaves->items[i].dtype) {
      fx_text_add(text, "%s", report->advice);
      return;
    }
  }
  for (size_t i = 0; i < leaves->count; ++i) {
    const fixstep_leaf_t* leaf = &leaves->items[i];
    if (is_wrong(report, i) && report->got[i] && is_other_batch_size(leaf, report->got[i])) {
      fx_text_add(text,
                  "The artifact was compiled for %" PRId64
                  " examples a batch: leave a short last batch out, or compile for another size.",
                  leaf->shape[0]);
      return;
    }
  }
  for (size_t i = 0; i < leaves->count; ++i) {
    const char* dtype = fixstep_dtype_name(leaves->items[i].dtype);
    if (report->inside[i]) {
      fx_text_add(text, "Convert it first, for example numpy.asarray(value, dtype='%s'). Nothing was run.", dtype);
      return;
    }
    if (is_wrong(report, i) && report->got[i]->dtype != leaves->items[i].dtype) {
      fx_text_add(text, "Convert it first, for example array.astype('%s'). Nothing was run.", dtype);
      return;
    }
  }
  fx_text_add(text, "Pass the %s with exactly the leaves of the template. Nothing was run.", report->what);
}

// The message for tensors that do not fit; the same text that Python gives for the same arrays.
static status_t fail_check(const leaf_list_t* leaves, const fixstep_tensor_t* tensors, size_t count, const char* what,
                           const char* advice, const fixstep_tensor_t* const* got, fixstep_error_t** out_error) {
  bool* taken = fx_allocate_zeroed(count, sizeof(*taken));
  report_t report = {leaves,
                     got,
                     what,
                     advice,
                     fx_allocate_zeroed(leaves->count, sizeof(bool)),
                     fx_allocate_zeroed(count, sizeof(fixstep_tensor_t*)),
                     0};
  text_t text = {0};
  if (taken && report.inside && report.unexpected) {
    if (count && tensors[0].path) gather(&report, tensors, count, taken);
    fx_text_add(&text, "the %s %s not fit the template:", what, strcmp(what, "inputs") == 0 ? "do" : "does");
    add_lines(&report, &text);
    add_advice(&report, &text);
  } else {
    text.failed = true;
  }
  free(taken);
  free(report.inside);
  free(report.unexpected);
  return fx_fail_with_text(out_error, FIXSTEP_TEMPLATE_ERROR, &text);
}

status_t fx_template_check(const leaf_list_t* leaves, const fixstep_tensor_t* tensors, size_t count, const char* what,
                           const char* advice, const fixstep_tensor_t** out_ordered, fixstep_error_t** out_error) {
  memset(out_ordered, 0, leaves->count * sizeof(*out_ordered));
  if (count && !tensors) return fx_fail(out_error, FIXSTEP_INVALID_ARGUMENT, "%s: %zu tensors at NULL", what, count);
  bool by_path = count && tensors[0].path;
  bool good = count == leaves->count;
  if (count && !by_path && !good) {
    return fx_fail(out_error, FIXSTEP_TEMPLATE_ERROR, "the %s by position: expected %zu tensors, got %zu", what,
                   leaves->count, count);
  }
  for (size_t i = 0; i < count; ++i) {
    status_t status = check_tensor(&tensors[i], i, by_path, what, out_error);
    if (status != FIXSTEP_OK) return status;
    const fixstep_leaf_t* leaf = i < leaves->count ? &leaves->items[i] : NULL;
    if (by_path && (!leaf || strcmp(leaf->path, tensors[i].path) != 0))
      leaf = fx_leaf_list_find(leaves, tensors[i].path);
    if (!leaf) {
      good = false;
      continue;
    }
    size_t index = (size_t)(leaf - leaves->items);
    if (out_ordered[index]) {
      return fx_fail(out_error, FIXSTEP_INVALID_ARGUMENT, "%s: the path '%s' occurs twice", what, leaf->path);
    }
    out_ordered[index] = &tensors[i];
    good = good && fits(leaf, &tensors[i]);
  }
  if (!good) return fail_check(leaves, tensors, count, what, advice, out_ordered, out_error);
  for (size_t i = 0; i < leaves->count; ++i) {
    if (leaves->items[i].byte_length && !out_ordered[i]->data) {
      return fx_fail(out_error, FIXSTEP_INVALID_ARGUMENT, "%s: %s has no data", what, leaves->items[i].path);
    }
  }
  return FIXSTEP_OK;
}
