// Leaves in the safetensors format, by leaf path; docs/checkpoint.md says what is stored how.

#ifndef FIXSTEP_SRC_SAFETENSORS_H_
#define FIXSTEP_SRC_SAFETENSORS_H_

#include "leaf.h"

// Reads the header of a file: a JSON object. Release it with json_decref.
status_t fx_safetensors_header(const uint8_t* data, size_t byte_length, status_t status, json_t** out_header,
                               fixstep_error_t** out_error);
// Finds the data of each leaf in a file: exactly those leaves, which cover the data without hole or overlap.
// `out_data`: [leaves->count], pointers into `data`, of any alignment.
status_t fx_safetensors_decode(const uint8_t* data, size_t byte_length, const leaf_list_t* leaves, status_t status,
                               const void** out_data, fixstep_error_t** out_error);
// Makes the header of a file as the safetensors library does, with its length and padding, and the order in which the
// data of the leaves follows it. `metadata` is the text of the entry `fixstep`. `out_order` is freed with free().
status_t fx_safetensors_encode_header(const leaf_list_t* leaves, const char* metadata, text_t* out_header,
                                      size_t** out_order, fixstep_error_t** out_error);

#endif  // FIXSTEP_SRC_SAFETENSORS_H_
