#include "container.h"

#include <minizip/unzip.h>
#include <stdlib.h>
#include <strings.h>
#include <zlib.h>

#define ALIGNMENT 64
#define LOCAL_LENGTH 30
#define CENTRAL_LENGTH 46
#define END_LENGTH 22

// Memory as a file for minizip.
typedef struct memory_file_t {
  const uint8_t* data;
  uint64_t length;
  uint64_t position;
} memory_file_t;

static voidpf open_memory(voidpf opaque, const void* name, int mode) {
  (void)name;
  return (mode & ZLIB_FILEFUNC_MODE_READWRITEFILTER) == ZLIB_FILEFUNC_MODE_READ ? opaque : NULL;
}

static uLong read_memory(voidpf opaque, voidpf stream, void* buffer, uLong size) {
  (void)opaque;
  memory_file_t* file = stream;
  uint64_t rest = file->length - file->position;
  if (size > rest) size = (uLong)rest;
  if (size) memcpy(buffer, file->data + file->position, size);
  file->position += size;
  return size;
}

static ZPOS64_T tell_memory(voidpf opaque, voidpf stream) {
  (void)opaque;
  return ((memory_file_t*)stream)->position;
}

static long seek_memory(voidpf opaque, voidpf stream, ZPOS64_T offset, int origin) {
  (void)opaque;
  memory_file_t* file = stream;
  uint64_t base = origin == ZLIB_FILEFUNC_SEEK_SET   ? 0
                  : origin == ZLIB_FILEFUNC_SEEK_END ? file->length
                                                     : file->position;
  if (offset > file->length - base) return -1;
  file->position = base + offset;
  return 0;
}

static int close_memory(voidpf opaque, voidpf stream) {
  (void)opaque;
  (void)stream;
  return 0;
}

static bool is_name_character(char c, bool first) {
  bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
  return plain || (!first && (c == '.' || c == '+' || c == '=' || c == '-'));
}

// A relative path: parts that start with a letter, a digit or `_` and do not end with a dot.
static bool is_name(const char* name) {
  bool first = true;
  for (const char* p = name; *p; ++p) {
    if (*p == '/') {
      if (first || p[-1] == '.') return false;
      first = true;
    } else {
      if (!is_name_character(*p, first)) return false;
      first = false;
    }
  }
  return !first && name[strlen(name) - 1] != '.';
}

static void put(uint8_t** at, uint32_t value, int byte_length) {
  for (int i = 0; i < byte_length; ++i) *(*at)++ = (uint8_t)(value >> (8 * i));
}

// The fields that a local header and a directory entry share.
static void put_description(uint8_t** at, uint32_t crc, const member_t* member) {
  put(at, 10, 2);          // version needed: stored members, nothing else
  put(at, 0, 2);           // flags
  put(at, 0, 2);           // method
  put(at, 0, 2);           // time
  put(at, 1 << 5 | 1, 2);  // date: 1980-01-01
  put(at, crc, 4);
  put(at, (uint32_t)member->byte_length, 4);
  put(at, (uint32_t)member->byte_length, 4);
  put(at, (uint32_t)strlen(member->name), 2);
}

static uint32_t crc_of(const member_t* member) {
  return (uint32_t)crc32_z(crc32(0, NULL, 0), member->data, member->byte_length);
}

// Where a member's data starts, given where its header does.
static uint64_t data_start(uint64_t header, const member_t* member) {
  uint64_t start = header + LOCAL_LENGTH + strlen(member->name) + 6;
  return (start + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

static bool is_local_header(const uint8_t* header, size_t byte_length, const member_t* member) {
  uint8_t expected[LOCAL_LENGTH + MAX_NAME_LENGTH + 6 + ALIGNMENT] = {0};
  uint8_t* at = expected;
  size_t name_length = strlen(member->name);
  size_t extra_length = byte_length - LOCAL_LENGTH - name_length;
  put(&at, 0x04034b50, 4);
  put_description(&at, crc_of(member), member);
  put(&at, (uint32_t)extra_length, 2);
  memcpy(at, member->name, name_length);
  at += name_length;
  put(&at, 0xD935, 2);
  put(&at, (uint32_t)extra_length - 4, 2);
  put(&at, ALIGNMENT, 2);
  return memcmp(header, expected, byte_length) == 0;
}

// The central directory and the end record, without the comment.
static size_t expected_tail(const member_t* members, size_t count, const uint8_t* file, uint8_t* out) {
  uint8_t* at = out;
  uint64_t header = 0;
  for (size_t i = 0; i < count; ++i) {
    put(&at, 0x02014b50, 4);
    put(&at, 0x0314, 2);
    put_description(&at, crc_of(&members[i]), &members[i]);
    put(&at, 0, 2);  // extra field
    put(&at, 0, 2);  // comment
    put(&at, 0, 2);  // disk
    put(&at, 0, 2);  // internal attributes
    put(&at, 0x81A40000, 4);
    put(&at, (uint32_t)header, 4);
    memcpy(at, members[i].name, strlen(members[i].name));
    at += strlen(members[i].name);
    header = (uint64_t)(members[i].data - file) + members[i].byte_length;
  }
  uint32_t directory_length = (uint32_t)(at - out);
  put(&at, 0x06054b50, 4);
  put(&at, 0, 2);
  put(&at, 0, 2);
  put(&at, (uint32_t)count, 2);
  put(&at, (uint32_t)count, 2);
  put(&at, directory_length, 4);
  put(&at, (uint32_t)header, 4);
  put(&at, COMMENT_LENGTH, 2);
  return (size_t)(at - out);
}

// Places the members one after the other, as the format does, and compares all that lies between and behind them.
static status_t check_layout(const uint8_t* data, size_t byte_length, member_t* members, size_t count,
                             fixstep_error_t** out_error) {
  uint64_t header = 0;
  for (size_t i = 0; i < count; ++i) {
    uint64_t start = data_start(header, &members[i]);
    if (start > byte_length || members[i].byte_length > byte_length - start) {
      return fx_fail(out_error, FIXSTEP_ARTIFACT_ERROR, "the member '%s' does not lie within the file",
                     members[i].name);
    }
    members[i].data = data + start;
    if (!is_local_header(data + header, (size_t)(start - header), &members[i])) {
      return fx_fail(out_error, FIXSTEP_ARTIFACT_ERROR, "the header of the member '%s', bytes %zu to %zu, is damaged",
                     members[i].name, (size_t)header, (size_t)start);
    }
    header = start + members[i].byte_length;
  }
  size_t room = count * (CENTRAL_LENGTH + MAX_NAME_LENGTH) + END_LENGTH;
  uint8_t* tail = malloc(room);
  if (!tail) return fx_fail_memory(out_error);
  size_t length = expected_tail(members, count, data, tail);
  bool same = byte_length - header == length + COMMENT_LENGTH && memcmp(data + header, tail, length) == 0;
  free(tail);
  if (same) return FIXSTEP_OK;
  return fx_fail(out_error, FIXSTEP_ARTIFACT_ERROR, "the directory, bytes %zu to %zu, is damaged", (size_t)header,
                 byte_length);
}

static status_t check_name(const member_t* members, size_t index, fixstep_error_t** out_error) {
  const char* name = members[index].name;
  if (!is_name(name)) {
    return fx_fail(
        out_error, FIXSTEP_ARTIFACT_ERROR,
        "the member %zu: the name is not a plain relative path of letters, digits and _.+=- that starts each part "
        "with a letter or digit",
        index);
  }
  for (size_t i = 0; i < index; ++i) {
    if (strcasecmp(members[i].name, name) == 0) {
      return fx_fail(out_error, FIXSTEP_ARTIFACT_ERROR, "bad member names: '%s' and '%s' are one name", members[i].name,
                     name);
    }
  }
  return FIXSTEP_OK;
}

static status_t list_members(unzFile zip, size_t count, member_t* members, fixstep_error_t** out_error) {
  status_t status = FIXSTEP_OK;
  int code = unzGoToFirstFile(zip);
  for (size_t i = 0; i < count && status == FIXSTEP_OK; ++i) {
    unz_file_info64 info;
    if (code == UNZ_OK) {
      code = unzGetCurrentFileInfo64(zip, &info, members[i].name, MAX_NAME_LENGTH + 1, NULL, 0, NULL, 0);
    }
    if (code != UNZ_OK || info.size_filename > MAX_NAME_LENGTH) {
      return fx_fail(out_error, FIXSTEP_ARTIFACT_ERROR, "entry %zu of the directory is damaged", i);
    }
    if (info.compression_method || info.flag || info.compressed_size != info.uncompressed_size ||
        info.uncompressed_size > MAX_CONTAINER_BYTE_LENGTH) {
      return fx_fail(out_error, FIXSTEP_ARTIFACT_ERROR, "the member '%s' is not stored as it is", members[i].name);
    }
    members[i].byte_length = (size_t)info.uncompressed_size;
    status = check_name(members, i, out_error);
    code = i + 1 < count ? unzGoToNextFile(zip) : UNZ_OK;
  }
  return status;
}

// Why a file does not end as a container does.
static status_t fail_at_end(const uint8_t* data, size_t byte_length, fixstep_error_t** out_error) {
  if (!byte_length) return fx_fail(out_error, FIXSTEP_ARTIFACT_ERROR, "the file is empty");
  if (byte_length < 4 || memcmp(data, "PK\3\4", 4) != 0) {
    return fx_fail(out_error, FIXSTEP_ARTIFACT_ERROR, "not a fixstep artifact: it does not start as a zip file does");
  }
  return fx_fail(out_error, FIXSTEP_ARTIFACT_ERROR,
                 "the end record is missing or damaged (was the file cut short, or packed again?)");
}

status_t fx_container_open(const uint8_t* data, size_t byte_length, member_t** out_members, size_t* out_count,
                           fixstep_error_t** out_error) {
  *out_members = NULL;
  *out_count = 0;
  size_t end = byte_length - END_LENGTH - COMMENT_LENGTH;
  if (byte_length < END_LENGTH + COMMENT_LENGTH || memcmp(data + end, "PK\5\6", 4) != 0 ||
      memcmp(data + end + END_LENGTH, COMMENT_START, sizeof(COMMENT_START) - 1) != 0) {
    return fail_at_end(data, byte_length, out_error);
  }
  memory_file_t file = {data, byte_length, 0};
  zlib_filefunc64_def functions = {open_memory, read_memory, NULL, tell_memory, seek_memory, close_memory, NULL, &file};
  functions.zerror_file = close_memory;
  unzFile zip = unzOpen2_64("", &functions);
  unz_global_info64 global = {0};
  if (zip) unzGetGlobalInfo64(zip, &global);
  status_t status = FIXSTEP_OK;
  if (!zip || global.number_entry < 1 || global.number_entry > MAX_MEMBERS) {
    status =
        fx_fail(out_error, FIXSTEP_ARTIFACT_ERROR, "the end record is damaged: expected 1 to %d members", MAX_MEMBERS);
  }
  size_t count = status == FIXSTEP_OK ? (size_t)global.number_entry : 0;
  member_t* members = fx_allocate_zeroed(count, sizeof(*members));
  if (status == FIXSTEP_OK && !members) status = fx_fail_memory(out_error);
  if (status == FIXSTEP_OK) status = list_members(zip, count, members, out_error);
  if (zip) unzClose(zip);
  if (status == FIXSTEP_OK) status = check_layout(data, byte_length, members, count, out_error);
  if (status == FIXSTEP_OK) {
    *out_members = members;
    *out_count = count;
  } else {
    free(members);
  }
  return status;
}
