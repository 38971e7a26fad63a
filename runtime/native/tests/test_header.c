// The headers alone, as a C11 program includes them.

#include "fixstep.h"
#include "fixstep_backend.h"

int main(void) {
  fixstep_session_options_t options;
  fixstep_session_options_initialize(&options);
  bool plain = !options.target && !options.seed && !options.state && !options.backend;
  return plain && fixstep_dtype_byte_length(FIXSTEP_BFLOAT16) == 2 && !*fixstep_error_message(NULL) ? 0 : 1;
}
