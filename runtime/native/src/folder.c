// A folder of checkpoints named by step, `step-00000120.safetensors`; other files in it are left alone.

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <unistd.h>

#include "checkpoint.h"
#include "file.h"

#define PREFIX "step-"
#define SUFFIX ".safetensors"

typedef struct file_t {
  uint64_t step;
  char* path;
} file_t;

typedef struct files_t {
  file_t* items;
  size_t count;
} files_t;

// Whether a name is that of a checkpoint: 8 to 18 digits.
static bool step_of(const char* name, uint64_t* out_step) {
  if (strncmp(name, PREFIX, sizeof(PREFIX) - 1) != 0) return false;
  const char* digits = name + sizeof(PREFIX) - 1;
  size_t count = strspn(digits, "0123456789");
  if (count < 8 || count > 18 || strcmp(digits + count, SUFFIX) != 0) return false;
  *out_step = strtoull(digits, NULL, 10);
  return true;
}

static int compare_files(const void* a, const void* b) {
  const file_t *x = a, *y = b;
  return x->step == y->step ? strcmp(x->path, y->path) : x->step > y->step ? -1 : 1;
}

static void files_release(files_t* files) {
  for (size_t i = 0; i < files->count; ++i) free(files->items[i].path);
  free(files->items);
  *files = (files_t){0};
}

static bool files_add(files_t* files, const char* folder, const char* name, uint64_t step) {
  file_t* items = realloc(files->items, (files->count + 1) * sizeof(*items));
  if (!items) return false;
  files->items = items;
  text_t path = {0};
  fx_text_add(&path, "%s/%s", folder, name);
  if (path.failed) {
    fx_text_release(&path);
    return false;
  }
  items[files->count++] = (file_t){step, path.data};
  return true;
}

// The checkpoints of a folder, whole or not, the newest step first; none if there is no folder.
static status_t list_files(const char* folder, files_t* out_files, fixstep_error_t** out_error) {
  *out_files = (files_t){0};
  DIR* handle = opendir(folder);
  if (!handle) {
    return errno == ENOENT ? FIXSTEP_OK : fx_fail_os(out_error, FIXSTEP_CHECKPOINT_ERROR, "read", folder, errno);
  }
  status_t status = FIXSTEP_OK;
  const struct dirent* entry;
  while (status == FIXSTEP_OK && (entry = readdir(handle)) != NULL) {
    uint64_t step;
    if (step_of(entry->d_name, &step) && !files_add(out_files, folder, entry->d_name, step)) {
      status = fx_fail_memory(out_error);
    }
  }
  closedir(handle);
  if (status != FIXSTEP_OK) {
    files_release(out_files);
  } else if (out_files->count) {
    qsort(out_files->items, out_files->count, sizeof(file_t), compare_files);
  }
  return status;
}

static bool is_whole(const char* path, text_t* notes) {
  checkpoint_t checkpoint;
  fixstep_error_t* error = NULL;
  bool whole = fx_checkpoint_read(path, &checkpoint, &error) == FIXSTEP_OK;
  if (!whole && notes) fx_text_add(notes, "\n  %s", fixstep_error_message(error));
  fixstep_error_release(error);
  fx_checkpoint_release(&checkpoint);
  return whole;
}

fixstep_status_t fixstep_checkpoint_latest(const char* folder, char** out_path, char** out_passed_over,
                                           fixstep_error_t** out_error) {
  *out_path = NULL;
  if (out_passed_over) *out_passed_over = NULL;
  if (out_error) *out_error = NULL;
  text_t notes = {0};
  files_t files;
  status_t status = list_files(folder, &files, out_error);
  for (size_t i = 0; i < files.count && !*out_path; ++i) {
    if (!is_whole(files.items[i].path, &notes)) continue;
    *out_path = files.items[i].path;
    files.items[i].path = NULL;
  }
  // So that nobody starts anew by accident.
  if (files.count && !*out_path) {
    status = fx_fail(out_error, FIXSTEP_CHECKPOINT_ERROR, "%s: no checkpoint in the folder can be read:%s", folder,
                     notes.data ? notes.data : "");
  }
  if (*out_path && out_passed_over && notes.length) {
    *out_passed_over = fx_copy_text(notes.data + 1, notes.length - 1);
  }
  files_release(&files);
  fx_text_release(&notes);
  return status;
}

status_t fx_checkpoint_prune(const char* folder, uint64_t last, size_t keep, fixstep_error_t** out_error) {
  files_t files;
  status_t status = list_files(folder, &files, out_error);
  size_t kept = 1;
  for (size_t i = 0; i < files.count && status == FIXSTEP_OK; ++i) {
    if (files.items[i].step == last) continue;
    if (kept < keep) {
      kept += is_whole(files.items[i].path, NULL);
    } else if (unlink(files.items[i].path) != 0 && errno != ENOENT) {
      status = fx_fail_os(out_error, FIXSTEP_CHECKPOINT_ERROR, "remove", files.items[i].path, errno);
    }
  }
  files_release(&files);
  return status;
}
