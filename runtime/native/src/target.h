// The targets of an artifact on this machine. No other file knows a target by name.

#ifndef FIXSTEP_SRC_TARGET_H_
#define FIXSTEP_SRC_TARGET_H_

#include "artifact.h"
#include "fixstep_backend.h"

// `cpu` of `cpu:host`, as text of its own; NULL without memory.
char* fx_target_family(const char* text);
// Whether it is code for the CPU, which no driver lists.
bool fx_target_is_cpu(const char* text);
#define TARGET_RANKS 8
// Below TARGET_RANKS; the lower, the sooner a target is tried when nobody chose one. `has_gpu`: whether its driver
// lists a device that is no program on the CPU.
int fx_target_rank(const char* text, bool has_gpu);
// Adds why this machine cannot run code with these requirements: an illegal instruction would end the process.
// Nothing if it can.
void fx_target_unavailable(const target_t* target, text_t* out_reason);
// Adds why a device that is not the CPU cannot run code with these requirements: drivers take some of it all the same,
// and compute something else. Nothing if it can.
void fx_target_lacks(const target_t* target, const fixstep_listed_t* device, text_t* out_reason);
// Whether worker threads are worth their cost for a step that touches so many bytes.
bool fx_target_is_threaded(size_t bytes_per_step);

#endif  // FIXSTEP_SRC_TARGET_H_
