// NumPy arrays as Python buffers: nanobind's ndarray asks NumPy for DLPack, which costs more than the work on them.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace paceline {

namespace nb = nanobind;

template <typename T>
constexpr bool is_format(char code) {
  if constexpr (std::is_same_v<T, int64_t>) return (code == 'l' && sizeof(long) == 8) || code == 'q';
  if constexpr (std::is_same_v<T, int32_t>) return code == 'i' || (code == 'l' && sizeof(long) == 4);
  if constexpr (std::is_same_v<T, float>) return code == 'f';
  if constexpr (std::is_same_v<T, uint8_t>) return code == 'B';
  if constexpr (std::is_same_v<T, uint16_t>) return code == 'H';
  if constexpr (std::is_same_v<T, bool>) return code == '?';
}

// A NumPy array without conversion; None gives a null pointer. Only the last axis must be dense.
template <typename T>
class Array {
 public:
  Array(nb::handle source, const char* name, int rank, bool writable = false) {
    if (source.is_none()) return;
    if (PyObject_GetBuffer(source.ptr(), &buffer_, PyBUF_RECORDS_RO | (writable ? PyBUF_WRITABLE : 0)) != 0)
      throw nb::python_error();
    held_ = true;
    const char* format = buffer_.format == nullptr ? "B" : buffer_.format;
    bool dense = buffer_.ndim >= 1 &&
                 (buffer_.shape[buffer_.ndim - 1] <= 1 ||
                  buffer_.strides[buffer_.ndim - 1] == static_cast<Py_ssize_t>(sizeof(T)));
    if (buffer_.ndim != rank || !dense || !is_format<T>(format[0]) || format[1] != '\0') {
      PyBuffer_Release(&buffer_);
      throw std::invalid_argument(std::string(name) + ": unexpected dtype, rank or strides");
    }
  }
  ~Array() {
    if (held_) PyBuffer_Release(&buffer_);
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  T* data() const { return held_ ? static_cast<T*>(buffer_.buf) : nullptr; }
  bool there() const { return held_; }
  int64_t size(int axis) const { return buffer_.shape[axis]; }
  int64_t stride() const { return buffer_.strides[0] / static_cast<Py_ssize_t>(sizeof(T)); }  // of rank 2

 private:
  Py_buffer buffer_{};
  bool held_ = false;
};

inline void check(bool fits, const char* what) {
  if (!fits) throw std::invalid_argument(what);
}

}  // namespace paceline
