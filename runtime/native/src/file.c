#include "file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sodium.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

// `.fixstep-<16 hexadecimal digits>.partial`
#define PARTIAL_PREFIX ".fixstep-"
#define PARTIAL_SUFFIX ".partial"
#define PARTIAL_LENGTH (sizeof(PARTIAL_PREFIX) - 1 + 16 + sizeof(PARTIAL_SUFFIX) - 1)
// A file that is still being written is touched all the time; one that rested this long belongs to nobody.
#define ABANDONED_AFTER_S 3600

static const char* advice_for(int code, const char* action) {
  switch (code) {
    case ENOENT:
      return strcmp(action, "write") == 0 ? "Make its folder first." : "Check the path.";
    case ENOSPC:
      return "Free some space or write elsewhere.";
    case EDQUOT:
      return "Free some space within the quota or write elsewhere.";
    case EFBIG:
      return "The system limits the size of files here (ulimit -f, or the file system): write elsewhere.";
    case EACCES:
    case EPERM:
      return "Change the permissions or use another place.";
    case EROFS:
      return "The file system is read-only: use another place.";
    case ENOTDIR:
      return "A part of the path is a file, not a folder: check the path.";
    case EISDIR:
      return "It is a folder: give the name of a file.";
    case ENAMETOOLONG:
      return "Use a shorter name.";
    case EINVAL:
      return "Give the name of an ordinary file.";
    default:
      return "Try again, or use another place.";
  }
}

status_t fx_fail_os(fixstep_error_t** out_error, status_t status, const char* action, const char* path, int code) {
  char reason[128];
  // The POSIX function, which returns an int; the text is that of the C locale or the program's.
  if (strerror_r(code, reason, sizeof(reason)) != 0) snprintf(reason, sizeof(reason), "error %d", code);
  return fx_fail(out_error, status, "%s: cannot %s it: %s. %s%s", path, action, reason, advice_for(code, action),
                 strcmp(action, "write") == 0 ? " What was there before is unchanged." : "");
}

status_t fx_file_read(const char* path, uint64_t most, status_t status, uint8_t** out_data, size_t* out_byte_length,
                      fixstep_error_t** out_error) {
  *out_data = NULL;
  *out_byte_length = 0;
  // Without waiting for a writer, should it be a pipe.
  int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  struct stat info;
  if (file < 0) return fx_fail_os(out_error, status, "read", path, errno);
  int code = fstat(file, &info) != 0 ? errno : S_ISDIR(info.st_mode) ? EISDIR : S_ISREG(info.st_mode) ? 0 : EINVAL;
  status_t result = code ? fx_fail_os(out_error, status, "read", path, code) : FIXSTEP_OK;
  uint64_t length = code ? 0 : (uint64_t)info.st_size;
  if (result == FIXSTEP_OK && (length > most || length > SIZE_MAX)) {
    result = fx_fail(out_error, status, "%s: %llu bytes, more than the %llu that are allowed", path,
                     (unsigned long long)length, (unsigned long long)most);
  }
  uint8_t* data = result == FIXSTEP_OK ? fx_allocate_aligned((size_t)length) : NULL;
  if (result == FIXSTEP_OK && !data) result = fx_fail_memory(out_error);
  size_t filled = 0;
  while (result == FIXSTEP_OK && filled < length) {
    ssize_t count = read(file, data + filled, (size_t)length - filled);
    if (count > 0) {
      filled += (size_t)count;
    } else if (count == 0) {
      result = fx_fail(out_error, status, "%s: it ended after %zu of %llu bytes; is it being written?", path, filled,
                       (unsigned long long)length);
    } else if (errno != EINTR) {
      result = fx_fail_os(out_error, status, "read", path, errno);
    }
  }
  close(file);
  if (result == FIXSTEP_OK) {
    *out_data = data;
    *out_byte_length = (size_t)length;
  } else {
    free(data);
  }
  return result;
}

static int write_all(int file, const span_t* spans, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const uint8_t* data = spans[i].data;
    size_t rest = spans[i].byte_length;
    while (rest) {
      ssize_t written = write(file, data, rest);
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) return errno;
      data += written;
      rest -= (size_t)written;
    }
  }
  return 0;
}

// Makes the names in a folder durable. Some network file systems sync no folders.
static int sync_folder(const char* path) {
  int folder = open(path, O_RDONLY | O_CLOEXEC);
  if (folder < 0) return errno;
  int code = fsync(folder) == 0 || errno == EINVAL || errno == ENOTSUP ? 0 : errno;
  close(folder);
  return code;
}

// The folder of a path, as text of its own.
static char* folder_of(const char* path) {
  const char* slash = strrchr(path, '/');
  if (!slash) return fx_copy_text(".", 1);
  return slash == path ? fx_copy_text("/", 1) : fx_copy_text(path, (size_t)(slash - path));
}

static int write_renamed(const char* final, const char* folder, const span_t* spans, size_t count) {
  struct stat info;
  // A rename would put a file in the place of a device such as /dev/null.
  if (stat(final, &info) == 0 && !S_ISREG(info.st_mode)) return S_ISDIR(info.st_mode) ? EISDIR : EINVAL;
  if (sodium_init() < 0) return EIO;  // for randombytes_buf
  unsigned char random[8];
  char digits[17];
  randombytes_buf(random, sizeof(random));
  sodium_bin2hex(digits, sizeof(digits), random, sizeof(random));
  text_t partial = {0};
  fx_text_add(&partial, "%s/" PARTIAL_PREFIX "%s" PARTIAL_SUFFIX, folder, digits);
  if (partial.failed) {
    fx_text_release(&partial);
    return ENOMEM;
  }
  int file = open(partial.data, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  int code = file < 0 ? errno : write_all(file, spans, count);
  if (file >= 0) {
    if (!code && fsync(file) != 0) code = errno;
    if (close(file) != 0 && !code) code = errno;
    if (!code && rename(partial.data, final) != 0) code = errno;
    if (code) unlink(partial.data);
  }
  fx_text_release(&partial);
  return code ? code : sync_folder(folder);
}

status_t fx_file_write(const char* path, const span_t* spans, size_t count, status_t status,
                       fixstep_error_t** out_error) {
  char* linked = realpath(path, NULL);  // NULL where there is nothing yet
  const char* final = linked ? linked : path;
  char* folder = folder_of(final);
  status_t result = FIXSTEP_OK;
  if (!folder) {
    result = fx_fail_memory(out_error);
  } else {
    int code = write_renamed(final, folder, spans, count);
    if (code) result = fx_fail_os(out_error, status, "write", path, code);
  }
  free(folder);
  free(linked);
  return result;
}

status_t fx_folder_make(const char* path, status_t status, fixstep_error_t** out_error) {
  struct stat info;
  if (stat(path, &info) == 0 && S_ISDIR(info.st_mode)) return FIXSTEP_OK;
  char* parent = folder_of(path);
  if (!parent) return fx_fail_memory(out_error);
  status_t result = strcmp(parent, path) == 0 ? FIXSTEP_OK : fx_folder_make(parent, status, out_error);
  if (result == FIXSTEP_OK) {
    int code = mkdir(path, 0777) == 0 || errno == EEXIST ? sync_folder(parent) : errno;
    if (!code && stat(path, &info) == 0 && !S_ISDIR(info.st_mode)) code = ENOTDIR;
    if (code) result = fx_fail_os(out_error, status, "make", path, code);
  }
  free(parent);
  return result;
}

static bool is_partial(const char* name) {
  return strlen(name) == PARTIAL_LENGTH && strncmp(name, PARTIAL_PREFIX, sizeof(PARTIAL_PREFIX) - 1) == 0 &&
         strspn(name + sizeof(PARTIAL_PREFIX) - 1, "0123456789abcdef") == 16 &&
         strcmp(name + PARTIAL_LENGTH - (sizeof(PARTIAL_SUFFIX) - 1), PARTIAL_SUFFIX) == 0;
}

void fx_folder_clean(const char* path) {
  DIR* folder = opendir(path);
  if (!folder) return;
  for (const struct dirent* entry = readdir(folder); entry; entry = readdir(folder)) {
    struct stat info;
    if (is_partial(entry->d_name) && fstatat(dirfd(folder), entry->d_name, &info, AT_SYMLINK_NOFOLLOW) == 0 &&
        time(NULL) - info.st_mtime > ABANDONED_AFTER_S) {
      unlinkat(dirfd(folder), entry->d_name, 0);
    }
  }
  closedir(folder);
}
