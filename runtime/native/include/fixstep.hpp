// A thin C++17 layer on fixstep.h: handles that release themselves, errors as exceptions.

#ifndef FIXSTEP_HPP_
#define FIXSTEP_HPP_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "fixstep.h"

namespace fixstep {

// What every call throws that fails; `what()` is the library's message.
class Error : public std::runtime_error {
 public:
  Error(fixstep_status_t status, const std::string& message) : std::runtime_error(message), status_(status) {}
  fixstep_status_t status() const noexcept { return status_; }

 private:
  fixstep_status_t status_;
};

namespace detail {

template <typename T, void (*release)(T*)>
struct Deleter {
  void operator()(T* handle) const noexcept { release(handle); }
};
template <typename T, void (*release)(T*)>
using Handle = std::unique_ptr<T, Deleter<T, release>>;

// Calls a function that takes an error last, and throws what it says.
template <typename Function, typename... Arguments>
void call(Function function, Arguments&&... arguments) {
  fixstep_error_t* error = nullptr;
  fixstep_status_t status = function(std::forward<Arguments>(arguments)..., &error);
  if (status == FIXSTEP_OK) return;
  Handle<fixstep_error_t, fixstep_error_release> owned(error);
  throw Error(status, fixstep_error_message(error));
}

inline std::string take_text(char* text) {
  std::string copy = text ? text : "";
  fixstep_free(text);
  return copy;
}

}  // namespace detail

// The dtype of a C++ number.
template <typename T>
constexpr fixstep_dtype_t dtype_of() {
  if constexpr (std::is_same_v<T, bool>) return FIXSTEP_BOOL;
  if constexpr (std::is_same_v<T, std::int8_t>) return FIXSTEP_INT8;
  if constexpr (std::is_same_v<T, std::int16_t>) return FIXSTEP_INT16;
  if constexpr (std::is_same_v<T, std::int32_t>) return FIXSTEP_INT32;
  if constexpr (std::is_same_v<T, std::int64_t>) return FIXSTEP_INT64;
  if constexpr (std::is_same_v<T, std::uint8_t>) return FIXSTEP_UINT8;
  if constexpr (std::is_same_v<T, std::uint16_t>) return FIXSTEP_UINT16;
  if constexpr (std::is_same_v<T, std::uint32_t>) return FIXSTEP_UINT32;
  if constexpr (std::is_same_v<T, std::uint64_t>) return FIXSTEP_UINT64;
  if constexpr (std::is_same_v<T, float>) return FIXSTEP_FLOAT32;
  if constexpr (std::is_same_v<T, double>) return FIXSTEP_FLOAT64;
  return FIXSTEP_INVALID_DTYPE;
}

// Memory bound to a leaf; path, shape and data have to live as long as it is used.
template <typename T>
fixstep_tensor_t tensor(const char* path, const std::vector<std::int64_t>& shape, const T* data) {
  static_assert(dtype_of<T>() != FIXSTEP_INVALID_DTYPE, "no dtype for this type; fill in a fixstep_tensor_t");
  return {path, dtype_of<T>(), shape.size(), shape.data(), data};
}

class Artifact {
 public:
  explicit Artifact(const std::string& path) {
    fixstep_artifact_t* handle = nullptr;
    detail::call(fixstep_artifact_open, path.c_str(), &handle);
    handle_.reset(handle);
  }
  Artifact(const void* data, std::size_t byte_length) {
    fixstep_artifact_t* handle = nullptr;
    detail::call(fixstep_artifact_open_memory, data, byte_length, &handle);
    handle_.reset(handle);
  }

  std::string name() const { return fixstep_artifact_name(get()); }
  std::string program() const { return fixstep_artifact_program(get()); }
  bool has_function(const std::string& name) const { return fixstep_artifact_has_function(get(), name.c_str()); }
  fixstep_leaves_t leaves(const std::string& function, const std::string& role) const {
    return fixstep_artifact_leaves(get(), function.c_str(), role.c_str());
  }
  std::vector<std::string> targets() const {
    std::vector<std::string> texts;
    for (std::size_t i = 0; i < fixstep_artifact_target_count(get()); ++i) {
      texts.emplace_back(fixstep_artifact_target(get(), i));
    }
    return texts;
  }
  const fixstep_artifact_t* get() const noexcept { return handle_.get(); }

 private:
  detail::Handle<fixstep_artifact_t, fixstep_artifact_release> handle_;
};

class Data {
 public:
  Data(const std::string& path, fixstep_leaves_t leaves) : count_(leaves.count) {
    fixstep_data_t* handle = nullptr;
    detail::call(fixstep_data_open, path.c_str(), leaves, &handle);
    handle_.reset(handle);
  }
  // Batches of another size, with a short last one, for artifacts that take it.
  Data(const std::string& path, fixstep_leaves_t leaves, std::size_t batch_size, bool keep_last)
      : count_(leaves.count) {
    fixstep_data_t* handle = nullptr;
    detail::call(fixstep_data_open_batches, path.c_str(), leaves, batch_size, keep_last, &handle);
    handle_.reset(handle);
  }
  // The random order of an epoch, which depends on the seed and the epoch alone.
  void shuffle(std::uint64_t seed, std::uint64_t epoch) {
    detail::call(fixstep_data_shuffle, handle_.get(), seed, epoch);
  }
  std::size_t example_count() const { return fixstep_data_example_count(handle_.get()); }
  std::size_t batch_size() const { return fixstep_data_batch_size(handle_.get()); }
  std::size_t batch_count() const { return fixstep_data_batch_count(handle_.get()); }
  std::size_t left_out() const { return fixstep_data_left_out(handle_.get()); }
  // The tensors of a batch, [size()], until the next call; null beyond the last one.
  const fixstep_tensor_t* batch(std::size_t index) { return fixstep_data_batch(handle_.get(), index); }
  // Tensors of a batch.
  std::size_t size() const noexcept { return count_; }

 private:
  detail::Handle<fixstep_data_t, fixstep_data_release> handle_;
  std::size_t count_;
};

// The path of the newest whole checkpoint of a folder, or nothing if it holds none.
inline std::optional<std::string> latest_checkpoint(const std::string& folder) {
  char* path = nullptr;
  detail::call(fixstep_checkpoint_latest, folder.c_str(), &path, static_cast<char**>(nullptr));
  return path ? std::optional<std::string>(detail::take_text(path)) : std::nullopt;
}

// A session keeps its artifact alive.
class Session {
 public:
  explicit Session(std::shared_ptr<const Artifact> artifact, const fixstep_session_options_t* options = nullptr)
      : artifact_(std::move(artifact)) {
    fixstep_session_t* handle = nullptr;
    detail::call(fixstep_session_open, artifact_->get(), options, &handle);
    handle_.reset(handle);
  }

  const Artifact& artifact() const noexcept { return *artifact_; }
  std::string target() const { return fixstep_session_target(get()); }
  std::uint64_t steps() const { return fixstep_session_steps(get()); }

  void step(const fixstep_tensor_t* batch, std::size_t count) {
    detail::call(fixstep_session_step, get(), batch, count);
  }
  void evaluate(const fixstep_tensor_t* batch, std::size_t count) {
    detail::call(fixstep_session_evaluate, get(), batch, count);
  }
  void predict(const fixstep_tensor_t* inputs, std::size_t count) {
    detail::call(fixstep_session_predict, get(), inputs, count);
  }
  void rollback() { detail::call(fixstep_session_rollback, get()); }

  // A metric of the last `step` or `evaluate`; reading it waits for the device.
  double metric(const std::string& function, const std::string& name) {
    double value = 0;
    detail::call(fixstep_session_read_metric, get(), function.c_str(), name.c_str(), &value);
    return value;
  }
  double average(const std::string& function, const std::string& name) {
    double value = 0;
    detail::call(fixstep_session_read_average, get(), function.c_str(), name.c_str(), &value);
    return value;
  }
  void reset_averages(const std::string& function) {
    detail::call(fixstep_session_reset_averages, get(), function.c_str());
  }
  // A result of the last call, or a leaf of the state, as its elements.
  template <typename T>
  std::vector<T> result(const std::string& function, const std::string& path, std::size_t count) {
    std::vector<T> values(count);
    detail::call(fixstep_session_read_result, get(), function.c_str(), path.c_str(), static_cast<void*>(values.data()),
                 count * sizeof(T));
    return values;
  }
  template <typename T>
  std::vector<T> leaf(const std::string& path, std::size_t count) {
    std::vector<T> values(count);
    detail::call(fixstep_session_read_leaf, get(), path.c_str(), static_cast<void*>(values.data()), count * sizeof(T));
    return values;
  }
  void write_leaf(const fixstep_tensor_t& leaf) { detail::call(fixstep_session_write_leaf, get(), &leaf); }

  void save(const std::string& path, const std::string& position = "{}") {
    detail::call(fixstep_session_save, get(), path.c_str(), position.c_str());
  }
  // Returns the position that was given to save.
  std::string restore(const std::string& path) {
    char* position = nullptr;
    detail::call(fixstep_session_restore, get(), path.c_str(), &position);
    return detail::take_text(position);
  }
  void save_in(const std::string& folder, std::size_t keep = 0, const std::string& position = "{}") {
    detail::call(fixstep_session_save_in, get(), folder.c_str(), keep, position.c_str());
  }
  // The position, or nothing if the folder holds no checkpoint.
  std::optional<std::string> restore_latest(const std::string& folder) {
    bool found = false;
    char* position = nullptr;
    detail::call(fixstep_session_restore_latest, get(), folder.c_str(), &found, &position,
                 static_cast<char**>(nullptr));
    std::string text = detail::take_text(position);
    return found ? std::optional<std::string>(std::move(text)) : std::nullopt;
  }
  fixstep_session_t* get() const noexcept { return handle_.get(); }

 private:
  std::shared_ptr<const Artifact> artifact_;
  detail::Handle<fixstep_session_t, fixstep_session_release> handle_;
};

}  // namespace fixstep

#endif  // FIXSTEP_HPP_
