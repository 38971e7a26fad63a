// Checkpoints: the state by leaf path in one safetensors file; docs/checkpoint.md specifies it.

#ifndef FIXSTEP_SRC_CHECKPOINT_H_
#define FIXSTEP_SRC_CHECKPOINT_H_

#include "leaf.h"

// What a checkpoint holds, read and checked. All pointers go to memory that it owns.
typedef struct checkpoint_t {
  uint8_t* file;
  json_t* header;
  json_t* contents;
  const char* program;
  uint64_t steps;
  const char* position;  // the text of an object, as it was written
  size_t position_length;
  leaf_list_t leaves;
  const void** data;  // [leaves.count]
} checkpoint_t;

// Writes a checkpoint. `data`: [leaves->count], each of its leaf's length. `position`: the text of a JSON object.
status_t fx_checkpoint_write(const char* path, const leaf_list_t* leaves, const void* const* data, const char* program,
                             uint64_t steps, const char* position, fixstep_error_t** out_error);
// Reads a checkpoint and checks it, to the last byte. Release it with checkpoint_release, also after an error.
status_t fx_checkpoint_read(const char* path, checkpoint_t* out_checkpoint, fixstep_error_t** out_error);
// The same of a file in memory, which it takes. Messages do not name the file.
status_t fx_checkpoint_parse(uint8_t* file, size_t byte_length, checkpoint_t* out_checkpoint,
                             fixstep_error_t** out_error);
void fx_checkpoint_release(checkpoint_t* checkpoint);
// Adds the difference of two templates by leaf path, one line a leaf, each after a line break.
void fx_text_add_mismatch(text_t* text, const leaf_list_t* expected, const leaf_list_t* got);

// Removes checkpoints that are older than the newest `keep` whole ones, of which `last` is one.
status_t fx_checkpoint_prune(const char* folder, uint64_t last, size_t keep, fixstep_error_t** out_error);

#endif  // FIXSTEP_SRC_CHECKPOINT_H_
