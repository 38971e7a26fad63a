#include "target.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/utsname.h>
#include <unistd.h>

// Below it a step is too short to be worth handing to worker threads.
#define THREADED_BYTES (1u << 20)

// LLVM's names of processor features that compiled code may use, where /proc/cpuinfo spells them otherwise.
static const char* const x86_flags[][2] = {
    {"sse3", "pni"},
    {"sse4.1", "sse4_1"},
    {"sse4.2", "sse4_2"},
    {"bmi", "bmi1"},
    {"lzcnt", "abm"},
    {"pclmul", "pclmulqdq"},
    {"avxvnni", "avx_vnni"},
    {"avx512bf16", "avx512_bf16"},
    {"avx512fp16", "avx512_fp16"},
    {"avx512bitalg", "avx512_bitalg"},
    {"avx512vbmi2", "avx512_vbmi2"},
    {"avx512vnni", "avx512_vnni"},
    {"avx512vpopcntdq", "avx512_vpopcntdq"},
    {"amx-tile", "amx_tile"},
    {"amx-int8", "amx_int8"},
    {"amx-bf16", "amx_bf16"},
    {NULL, NULL},
};
static const char* const arm_flags[][2] = {
    {"neon", "asimd"},
    {"fullfp16", "asimdhp"},
    {"dotprod", "asimddp"},
    {NULL, NULL},
};

char* fx_target_family(const char* text) { return fx_copy_text(text, strcspn(text, ":")); }

static bool is_cpu(const char* text) { return strcspn(text, ":") == 3 && strncmp(text, "cpu", 3) == 0; }

int fx_target_rank(const char* text) { return (is_cpu(text) ? 0 : 2) + (strchr(text, ':') == NULL); }

static const char* architecture(const char* name) {
  if (strcmp(name, "amd64") == 0) return "x86_64";
  if (strcmp(name, "arm64") == 0 || strcmp(name, "arm_64") == 0) return "aarch64";
  return name;
}

// The line of features that Linux reports for the first processor, with a space at both ends; empty where there is
// none.
static void read_flags(text_t* out_flags) {
  FILE* file = fopen("/proc/cpuinfo", "re");
  if (!file) return;
  char piece[4096];
  bool at_start = true, wanted = false;
  while (fgets(piece, sizeof(piece), file)) {
    if (at_start) wanted = strncmp(piece, "flags", 5) == 0 || strncmp(piece, "Features", 8) == 0;
    const char* colon = at_start ? strchr(piece, ':') : piece - 1;
    size_t length = strlen(piece);
    at_start = length && piece[length - 1] == '\n';
    if (!wanted || !colon) continue;
    fx_text_bytes(out_flags, colon + 1, length - (size_t)(colon + 1 - piece) - at_start);
    if (at_start) break;
  }
  if (out_flags->length) fx_text_add(out_flags, " ");
  fclose(file);
}

static bool has_flag(const text_t* flags, const char* feature, bool arm) {
  const char* const(*names)[2] = arm ? arm_flags : x86_flags;
  text_t word = {0};
  while ((*names)[0] && strcmp((*names)[0], feature) != 0) ++names;
  fx_text_add(&word, " %s ", (*names)[0] ? (*names)[1] : feature);
  bool found = word.failed || strstr(flags->data, word.data) != NULL;
  fx_text_release(&word);
  return found;
}

void fx_target_unavailable(const target_t* target, text_t* out_reason) {
  if (!is_cpu(target->text)) return;
  struct utsname machine;
  const char* wanted = json_string_value(json_object_get(target->requires, "architecture"));
  if (uname(&machine) != 0 || !wanted) return;
  if (strcmp(architecture(machine.machine), architecture(wanted)) != 0) {
    fx_text_add(out_reason, "it is code for %s, and this machine is %s", wanted, machine.machine);
    return;
  }
  text_t flags = {0};
  read_flags(&flags);
  size_t index;
  const json_t* feature;
  json_array_foreach(json_object_get(target->requires, "features"), index, feature) {
    const char* name = json_string_value(feature);
    if (!name || !flags.length || has_flag(&flags, name, strcmp(wanted, "aarch64") == 0)) continue;
    fx_text_add(out_reason, "%s%s", out_reason->length ? ", " : "this processor lacks ", name);
  }
  if (out_reason->length) fx_text_add(out_reason, "; compile for `cpu`, which runs on any %s", wanted);
  fx_text_release(&flags);
}

bool fx_target_is_threaded(size_t bytes_per_step) {
  return bytes_per_step >= THREADED_BYTES && sysconf(_SC_NPROCESSORS_ONLN) > 1;
}
