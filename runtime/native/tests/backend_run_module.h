// A backend for tests: each call runs IREE's program iree-run-module, which its runtime wheel ships, so that a compiled
// step runs without Python in the process and without IREE in the library.
//
// Devices other than the CPU are made up: the environment variable FIXSTEP_TEST_DEVICES has a line
// `family|name|description` for each, where `type: cpu` in the description stands for a program on the CPU. None opens.

#ifndef FIXSTEP_TESTS_BACKEND_RUN_MODULE_H_
#define FIXSTEP_TESTS_BACKEND_RUN_MODULE_H_

#include "fixstep_backend.h"

#ifdef __cplusplus
extern "C" {
#endif

// The backend on the program at a path, which has to outlive it. The next call replaces it.
const fixstep_backend_t* backend_run_module(const char* program);

#ifdef __cplusplus
}
#endif

#endif  // FIXSTEP_TESTS_BACKEND_RUN_MODULE_H_
