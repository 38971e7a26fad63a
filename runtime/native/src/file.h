// Files that are whole or absent: atomic writing, bounded reading, and messages for what the system refuses.

#ifndef FIXSTEP_SRC_FILE_H_
#define FIXSTEP_SRC_FILE_H_

#include "core.h"

// Bytes in one piece or several.
typedef struct span_t {
  const void* data;
  size_t byte_length;
} span_t;

// Reads an ordinary file of at most `most` bytes into memory at a multiple of 64 bytes, which free() takes.
status_t fx_file_read(const char* path, uint64_t most, status_t status, uint8_t** out_data, size_t* out_byte_length,
                      fixstep_error_t** out_error);
// Writes spans to a temporary file in the same folder, syncs it, renames it over `path` and syncs the folder. Until the
// rename the old file is there, whole; after it, the new one. A link at `path` is followed.
status_t fx_file_write(const char* path, const span_t* spans, size_t count, status_t status,
                       fixstep_error_t** out_error);
// Makes a folder, with those above it, and makes its name durable; does nothing where it is there.
status_t fx_folder_make(const char* path, status_t status, fixstep_error_t** out_error);
// Removes the temporary files that killed processes left in a folder an hour ago or earlier.
void fx_folder_clean(const char* path);
// A message for what the system refused: `action` is `write`, `read`, `make`, `remove`.
status_t fx_fail_os(fixstep_error_t** out_error, status_t status, const char* action, const char* path, int code);

#endif  // FIXSTEP_SRC_FILE_H_
