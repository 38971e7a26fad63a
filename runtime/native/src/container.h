// The container of an artifact: a zip file of one exact layout, so that every byte of it is accounted for.

#ifndef FIXSTEP_SRC_CONTAINER_H_
#define FIXSTEP_SRC_CONTAINER_H_

#include "core.h"

#define MAX_CONTAINER_BYTE_LENGTH 4294967294u
#define MAX_MEMBERS 1024
#define MAX_NAME_LENGTH 255
#define COMMENT_START "fixstep manifest sha256 "
#define COMMENT_LENGTH (sizeof(COMMENT_START) - 1 + DIGEST_LENGTH)

typedef struct member_t {
  char name[MAX_NAME_LENGTH + 1];
  const uint8_t* data;  // in the file, at a multiple of 64 bytes
  size_t byte_length;
} member_t;

// Lists the members of a container, in order, and compares every byte that is not a member's data with what the format
// says. `out_members` is freed with free().
status_t fx_container_open(const uint8_t* data, size_t byte_length, member_t** out_members, size_t* out_count,
                           fixstep_error_t** out_error);

#endif  // FIXSTEP_SRC_CONTAINER_H_
