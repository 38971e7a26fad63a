// Where a run stands, as Python's loop keeps it in a checkpoint, so that either program goes on from the other's.

#ifndef FIXSTEP_TOOLS_POSITION_H_
#define FIXSTEP_TOOLS_POSITION_H_

#include <jansson.h>

#include "fixstep.h"

// What the order of the examples depends on.
typedef struct order_t {
  size_t examples;
  size_t batch_size;
  bool shuffle;
  uint64_t seed;
  bool drop_last;  // whether a short last batch is left out
} order_t;

typedef struct position_t {
  uint64_t epoch;      // that runs, from 1
  uint64_t batch;      // how many of its batches were gone through, skipped ones too
  uint64_t iteration;  // the same since the start of the run, over all epochs
  uint64_t skipped;    // batches whose step Python undid, because a metric was not finite
  uint64_t skipped_in_epoch;
  uint64_t skipped_in_a_row;
  uint64_t validations;
  int64_t validated_at;  // steps at the last validation; -1 before the first
  bool halting;          // whether a handler in Python ended the epoch before its last batch
  json_t* averages;      // of the last epoch that ended: texts of numbers by metric
  json_t* validation;    // the same of the last validation
} position_t;

// The start of a run; false without memory. Release it in either case.
bool position_start(position_t* out_position);
void position_release(position_t* position);

// Adds a number to `averages` or `validation`; false without memory.
bool position_add_number(json_t* numbers, const char* name, double value);
// Ends the epoch: the position is the start of the next one.
void position_end_epoch(position_t* position);

// The JSON of a position between epochs; NULL without memory. Free it.
char* position_text(const position_t* position, const order_t* order);
// Takes up the position that the checkpoint at `path` holds, and says which handlers' states are dropped. An empty one
// changes nothing. Nor does an error, which sets `out_message` to what is wrong (NULL without memory); free it.
fixstep_status_t position_take(position_t* position, const char* path, const char* text, const order_t* order,
                               char** out_message);

#endif  // FIXSTEP_TOOLS_POSITION_H_
