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

// Mesa's software driver ends every loop after this many rounds, without a word.
#define SOFTWARE_ROUNDS 65535

// Features of a Vulkan driver, as IREE prints them, by the element types that need them.
static const struct {
  const char* name;
  const char* types[5];
} vulkan_features[] = {
    {"storageBuffer8BitAccess", {"i1", "i8", "ui8"}},
    {"shaderInt8", {"i1", "i8", "ui8"}},
    {"storageBuffer16BitAccess", {"i16", "ui16", "f16", "bf16"}},
    {"shaderFloat16", {"f16"}},
};

char* fx_target_family(const char* text) { return fx_copy_text(text, strcspn(text, ":")); }

static bool is_of(const char* text, const char* family) {
  size_t length = strlen(family);
  return strcspn(text, ":") == length && strncmp(text, family, length) == 0;
}

bool fx_target_is_cpu(const char* text) { return is_of(text, "cpu"); }

int fx_target_rank(const char* text, bool has_gpu) {
  int kind = is_of(text, "cuda") ? 0 : has_gpu ? 1 : fx_target_is_cpu(text) ? 2 : 3;
  return 2 * kind + (strchr(text, ':') == NULL);
}

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
  if (!fx_target_is_cpu(target->text)) return;
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

// Adds which of the types are among those that need a feature.
static bool needs(const json_t* types, const char* const* needing, text_t* out_found) {
  size_t index;
  const json_t* type;
  json_array_foreach(types, index, type) {
    for (size_t i = 0; json_is_string(type) && needing[i]; ++i) {
      if (strcmp(needing[i], json_string_value(type)) != 0) continue;
      fx_text_add(out_found, "%s%s", out_found->length ? ", " : "", needing[i]);
    }
  }
  return out_found->length;
}

static bool has_feature(const fixstep_listed_t* device, const char* name) {
  size_t length = strlen(name);
  for (const char* p = device->description; (p = strstr(p, name)) != NULL; p += length) {
    bool whole = p == device->description || strchr(" \n", p[-1]) != NULL;
    if (whole && strncmp(p + length, "=yes", 4) == 0) return true;
  }
  return false;
}

static void vulkan_lacks(const json_t* requires, const fixstep_listed_t* device, text_t* out_reason) {
  json_int_t rounds = json_integer_value(json_object_get(requires, "longest_loop"));
  if (device->software && rounds > SOFTWARE_ROUNDS) {
    fx_text_add(out_reason,
                "%s ends loops after %d rounds, and the program reduces %" JSON_INTEGER_FORMAT
                " elements to one; use another device, or reduce in two stages",
                device->name, SOFTWARE_ROUNDS, rounds);
    return;
  }
  bool lacking = false;
  for (size_t i = 0; i < sizeof(vulkan_features) / sizeof(vulkan_features[0]); ++i) {
    text_t types = {0};
    if (!has_feature(device, vulkan_features[i].name) &&
        needs(json_object_get(requires, "types"), vulkan_features[i].types, &types)) {
      if (!lacking) fx_text_add(out_reason, "%s lacks ", device->name);
      fx_text_add(out_reason, "%s%s (for %s)", lacking ? ", " : "", vulkan_features[i].name, types.data);
      lacking = true;
    }
    fx_text_release(&types);
  }
}

static void cuda_lacks(const json_t* requires, const fixstep_listed_t* device, text_t* out_reason) {
  static const char label[] = "gpu-compute-capability: ";
  json_int_t wanted = json_integer_value(json_object_get(requires, "compute_capability"));
  const char* found = strstr(device->description, label);
  int major, minor;
  if (!found || sscanf(found + strlen(label), "%d.%d", &major, &minor) != 2) return;
  int own = 10 * major + minor;
  if (own >= wanted) return;
  fx_text_add(out_reason, "%s is sm_%d, and the code is for sm_%" JSON_INTEGER_FORMAT "; compile for cuda:sm_%d",
              device->name, own, wanted, own);
}

void fx_target_lacks(const target_t* target, const fixstep_listed_t* device, text_t* out_reason) {
  if (is_of(target->text, "vulkan")) vulkan_lacks(target->requires, device, out_reason);
  if (is_of(target->text, "cuda")) cuda_lacks(target->requires, device, out_reason);
}

bool fx_target_is_threaded(size_t bytes_per_step) {
  return bytes_per_step >= THREADED_BYTES && sysconf(_SC_NPROCESSORS_ONLN) > 1;
}
