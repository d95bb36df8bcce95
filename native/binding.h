// Memory arguments from Python: addresses, and whether the storage type is bf16.
#pragma once

#include <nanobind/nanobind.h>

#include <type_traits>

#include "vec.h"

namespace paceline {

using Address = uintptr_t;

template <typename T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

// Calls `f` with a null T* of the storage type, without the GIL.
template <typename Function>
void by_dtype(bool is_bf16, Function f) {
  nanobind::gil_scoped_release release;
  if (is_bf16)
    f(static_cast<bf16*>(nullptr));
  else
    f(static_cast<float*>(nullptr));
}

}  // namespace paceline

#define STORAGE(tag) std::remove_pointer_t<decltype(tag)>
