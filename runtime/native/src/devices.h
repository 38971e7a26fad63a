// The devices of one target family on this machine.

#ifndef FIXSTEP_SRC_DEVICES_H_
#define FIXSTEP_SRC_DEVICES_H_

#include "target.h"

typedef struct device_list_t {
  char* family;             // NULL before it was read
  fixstep_listed_t* items;  // [count], in the order of the driver
  size_t count;
  bool failed;    // whether there was no memory for one
  text_t reason;  // why none can be opened
} device_list_t;

// Fills an empty list with the devices for a target.
void fx_devices_read(const fixstep_backend_t* backend, const target_t* target, device_list_t* list);
void fx_devices_release(device_list_t* list);
// Whether there is one that is no program on the CPU.
bool fx_devices_has_gpu(const device_list_t* list);
// Finds the device that runs a target's code and that `wanted` names, an index or a part of its name in any case. NULL
// stands for any, the programs on the CPU last. False, with the reason, if there is none.
bool fx_devices_choose(const device_list_t* list, const target_t* target, const char* wanted, size_t* out_index,
                       text_t* out_reason);

#endif  // FIXSTEP_SRC_DEVICES_H_
