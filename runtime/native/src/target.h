// The targets of an artifact on this machine. No other file knows a target by name.

#ifndef FIXSTEP_SRC_TARGET_H_
#define FIXSTEP_SRC_TARGET_H_

#include "artifact.h"

// `cpu` of `cpu:host`, as text of its own; NULL without memory.
char* fx_target_family(const char* text);
// The lower, the sooner a target is tried when nobody chose one.
int fx_target_rank(const char* text);
// Adds why this machine cannot run code with these requirements: an illegal instruction would end the process.
// Nothing if it can.
void fx_target_unavailable(const target_t* target, text_t* out_reason);
// Whether worker threads are worth their cost for a step that touches so many bytes.
bool fx_target_is_threaded(size_t bytes_per_step);

#endif  // FIXSTEP_SRC_TARGET_H_
