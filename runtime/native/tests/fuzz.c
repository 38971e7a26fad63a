// Mutates the files of a corpus and hands them to the readers, for a given time. What a run does depends on the time
// alone; a crash, a leak or a report of a sanitizer ends it. Digests are made right again, so that readers get further.
//
//   fuzz <corpus> <seconds> [<seed>]

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "artifact.h"
#include "checkpoint.h"
#include "file.h"
#include "npy.h"
#include "safetensors.h"

#define MAX_FILES 64
#define MAX_GROWTH 256

typedef struct seed_file_t {
  char name[64];
  uint8_t* data;
  size_t byte_length;
} seed_file_t;

static uint64_t state;

static uint64_t next(uint64_t below) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state % below;
}

static void mutate_once(uint8_t* data, size_t* byte_length, size_t room) {
  static const uint8_t interesting[] = {0x00, 0x01, 0x7f, 0x80, 0xff, '0', '9', '"', '{', '[', '-', 'e', '\\'};
  size_t at = *byte_length ? next(*byte_length) : 0, length = next(16) + 1;
  switch (*byte_length ? next(6) : 0) {
    case 0:  // put bytes in
      if (*byte_length + length > room) return;
      memmove(data + at + length, data + at, *byte_length - at);
      for (size_t i = 0; i < length; ++i) data[at + i] = interesting[next(sizeof(interesting))];
      *byte_length += length;
      return;
    case 1:  // take bytes out
      if (length > *byte_length - at) length = *byte_length - at;
      memmove(data + at, data + at + length, *byte_length - at - length);
      *byte_length -= length;
      return;
    case 2:
      if (next(8) == 0) *byte_length = at;
      return;
    case 3:  // a piece of the file elsewhere
      if (length > *byte_length - at) length = *byte_length - at;
      memmove(data + at, data + next(*byte_length - length + 1), length);
      return;
    case 4:
      data[at] ^= (uint8_t)(1u << next(8));
      return;
    default:
      data[at] = interesting[next(sizeof(interesting))];
  }
}

// A mutated copy of its own length, so that the sanitizer sees a byte too far.
static uint8_t* mutate(const uint8_t* data, size_t* byte_length) {
  size_t room = *byte_length + MAX_GROWTH;
  uint8_t* work = malloc(room);
  memcpy(work, data, *byte_length);
  for (uint64_t i = next(8) + 1; i; --i) mutate_once(work, byte_length, room);
  uint8_t* exact = malloc(*byte_length ? *byte_length : 1);
  memcpy(exact, work, *byte_length);
  free(work);
  return exact;
}

static void read_artifact(const seed_file_t* file) {
  size_t byte_length = file->byte_length;
  uint8_t* data = mutate(file->data, &byte_length);
  fixstep_artifact_t* artifact;
  fixstep_error_t* error = NULL;
  fixstep_artifact_open_memory(data, byte_length, &artifact, &error);
  fixstep_error_release(error);
  fixstep_artifact_release(artifact);
  free(data);
}

// The manifest alone, as if its digest were right.
static void read_manifest(const seed_file_t* file) {
  fixstep_artifact_t* artifact = calloc(1, sizeof(*artifact));
  fixstep_error_t* error = NULL;
  uint8_t* data = NULL;
  if (fx_container_open(file->data, file->byte_length, &artifact->members, &artifact->member_count, NULL) ==
      FIXSTEP_OK) {
    member_t* manifest = &artifact->members[0];
    data = mutate(manifest->data, &manifest->byte_length);
    manifest->data = data;
    if (fx_manifest_read(artifact, &error) == FIXSTEP_OK) fx_manifest_check_members(artifact, &error);
  }
  fixstep_error_release(error);
  fixstep_artifact_release(artifact);
  free(data);
}

static void repair_digest(uint8_t* data, size_t byte_length) {
  static const char start[] = "\\\"sha256\\\":\\\"";
  for (size_t i = 0; i + sizeof(start) + DIGEST_LENGTH < byte_length; ++i) {
    if (memcmp(data + i, start, sizeof(start) - 1) != 0) continue;
    uint8_t* place = data + i + sizeof(start) - 1;
    char digest[DIGEST_LENGTH + 1];
    memset(place, '0', DIGEST_LENGTH);
    fx_digest_of(data, byte_length, digest);
    memcpy(place, digest, DIGEST_LENGTH);
    return;
  }
}

static void read_checkpoint(const seed_file_t* file) {
  size_t byte_length = file->byte_length;
  uint8_t* data = mutate(file->data, &byte_length);
  if (next(4)) repair_digest(data, byte_length);
  checkpoint_t checkpoint;
  fixstep_error_t* error = NULL;
  fx_checkpoint_parse(data, byte_length, &checkpoint, &error);
  fixstep_error_release(error);
  fx_checkpoint_release(&checkpoint);
}

static void read_array(const seed_file_t* file) {
  size_t byte_length = file->byte_length;
  uint8_t* data = mutate(file->data, &byte_length);
  npy_t array;
  fixstep_error_t* error = NULL;
  volatile uint8_t sum = 0;
  if (fx_npy_parse(data, byte_length, &array, &error) == FIXSTEP_OK) {
    for (size_t i = 0; i < array.byte_length; ++i) sum = (uint8_t)(sum + array.data[i]);
  }
  fixstep_error_release(error);
  free(data);
}

static void read_data(const seed_file_t* file, const char* path) {
  static const int64_t x_shape[] = {8, 4}, y_shape[] = {8};
  static const fixstep_leaf_t leaves[] = {{"x", FIXSTEP_FLOAT32, 2, x_shape, 128, NULL},
                                          {"y", FIXSTEP_INT32, 1, y_shape, 32, NULL}};
  size_t byte_length = file->byte_length;
  uint8_t* bytes = mutate(file->data, &byte_length);
  FILE* out = fopen(path, "wb");
  if (out) {
    fwrite(bytes, 1, byte_length, out);
    fclose(out);
  }
  fixstep_data_t* data;
  fixstep_error_t* error = NULL;
  fixstep_data_open(path, (fixstep_leaves_t){leaves, 2}, &data, &error);
  fixstep_error_release(error);
  fixstep_data_release(data);
  free(bytes);
}

static size_t load(const char* folder, seed_file_t* files) {
  size_t count = 0;
  DIR* handle = opendir(folder);
  for (struct dirent* entry; handle && count < MAX_FILES && (entry = readdir(handle)) != NULL;) {
    char path[1024];
    snprintf(path, sizeof(path), "%s/%s", folder, entry->d_name);
    snprintf(files[count].name, sizeof(files[count].name), "%.63s", entry->d_name);
    count += fx_file_read(path, 1 << 20, FIXSTEP_DATA_ERROR, &files[count].data, &files[count].byte_length, NULL) ==
             FIXSTEP_OK;
  }
  if (handle) closedir(handle);
  return count;
}

int main(int count, char** words) {
  if (count < 3) return 2;
  seed_file_t files[MAX_FILES];
  size_t file_count = load(words[1], files);
  double seconds = strtod(words[2], NULL);
  state = count > 3 ? strtoull(words[3], NULL, 10) : 1;
  char path[64];
  snprintf(path, sizeof(path), "/tmp/fixstep-fuzz-%ld.npz", (long)getpid());
  struct timespec start, now;
  clock_gettime(CLOCK_MONOTONIC, &start);
  unsigned long long runs = 0;
  double passed = 0;
  while (file_count && passed < seconds) {
    const seed_file_t* file = &files[next(file_count)];
    if (strncmp(file->name, "artifact", 8) == 0) {
      read_artifact(file);
      read_manifest(file);
    } else if (strncmp(file->name, "checkpoint", 10) == 0) {
      read_checkpoint(file);
    } else if (strncmp(file->name, "array", 5) == 0) {
      read_array(file);
    } else {
      read_data(file, path);
    }
    ++runs;
    clock_gettime(CLOCK_MONOTONIC, &now);
    passed = (double)(now.tv_sec - start.tv_sec) + 1e-9 * (double)(now.tv_nsec - start.tv_nsec);
  }
  unlink(path);
  for (size_t i = 0; i < file_count; ++i) free(files[i].data);
  printf("%llu files in %.1f s\n", runs, passed);
  return file_count ? 0 : 2;
}
