// The C++ layer, compiled as C++17: an artifact opens, and what fails throws.

#include <cstdio>
#include <cstring>

#include "fixstep.hpp"
#include "fixstep_backend.h"

int main(int count, char** words) {
  if (count < 2) return 2;
  auto artifact = std::make_shared<const fixstep::Artifact>(words[1]);
  bool good = artifact->name() == "corpus" && artifact->targets().size() == 2 && artifact->has_function("step") &&
              artifact->leaves("step", "state").count == 5;
  try {
    fixstep::Artifact absent("/nowhere/at.fixstep");
    good = false;
  } catch (const fixstep::Error& error) {
    good = good && error.status() == FIXSTEP_ARTIFACT_ERROR && std::strstr(error.what(), "No such file");
  }
  try {
    fixstep_session_options_t options;
    fixstep_session_options_initialize(&options);
    options.target = "abacus";
    fixstep::Session session(artifact, &options);
    good = false;
  } catch (const fixstep::Error& error) {
    good = good && error.status() == FIXSTEP_TARGET_ERROR;
  }
  good = good && !fixstep::latest_checkpoint("/nowhere");
  const std::vector<std::int64_t> shape = {2, 3};
  const std::vector<float> values(6);
  const fixstep_tensor_t tensor = fixstep::tensor("x", shape, values.data());
  good = good && tensor.dtype == FIXSTEP_FLOAT32 && tensor.rank == 2 && tensor.shape[1] == 3;
  std::puts(good ? "all good" : "something is wrong");
  return good ? 0 : 1;
}
