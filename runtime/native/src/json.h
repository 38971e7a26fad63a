// JSON for files that may be damaged or hostile: bounded in size and depth, no key twice, no NaN.

#ifndef FIXSTEP_SRC_JSON_H_
#define FIXSTEP_SRC_JSON_H_

#include <jansson.h>

#include "core.h"

// Parses a text. `status` is that of an error. Release the value with json_decref.
status_t fx_json_parse(const char* data, size_t byte_length, status_t status, json_t** out_value,
                       fixstep_error_t** out_error);
// An integer from 0 to `most`; false for any other value.
bool fx_json_count(const json_t* value, uint64_t most, uint64_t* out_count);
// Adds text with its quotes.
void fx_json_quote(text_t* text, const char* value);
// Where the value of a key stands in the text of an object that json_parse took, byte for byte as it was written; false
// if there is no such key.
bool fx_json_find(const char* data, size_t byte_length, const char* key, const char** out_start, size_t* out_length);

#endif  // FIXSTEP_SRC_JSON_H_
