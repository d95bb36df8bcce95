// Python binding of the low-bit products; models/ops/low_bit.py checks the arguments.
#include "binding.h"
#include "kernels.h"

namespace nb = nanobind;
using paceline::Address;
using paceline::at;
using paceline::by_dtype;
using paceline::LowBitWeight;

void bind_low_bit(nb::module_& m) {
  m.def("low_bit_packed_bytes", [](int64_t bits, int64_t columns, int64_t depth, int64_t groups) {
    return LowBitWeight{nullptr, bits, columns, depth, groups}.packed_bytes();
  });
  m.def("quantise_pack", [](bool half, int64_t stored_bits, int64_t bits, int64_t columns, int64_t depth,
                            int64_t groups, Address weight, Address out, int threads) {
    by_dtype(half, [&](auto* tag) {
      using T = STORAGE(tag);
      paceline::quantise_pack(at<const T>(weight), {nullptr, stored_bits, columns, depth, groups}, bits,
                              at<uint8_t>(out), threads);
    });
  });
  m.def("pack_low_bit", [](int64_t bits, int64_t columns, int64_t depth, int64_t groups, Address values,
                           Address scales, Address zeros, Address out, int threads) {
    nb::gil_scoped_release release;
    paceline::pack_low_bit({nullptr, bits, columns, depth, groups}, at<const uint8_t>(values), at<const float>(scales),
                           at<const uint8_t>(zeros), at<uint8_t>(out), threads);
  });
  m.def("quantise_rows", [](bool half, Address x, int64_t stride, int64_t rows, int64_t depth, Address values,
                            Address scales, int threads) {
    by_dtype(half, [&](auto* tag) {
      using T = STORAGE(tag);
      paceline::quantise_rows(at<const T>(x), stride, rows, depth, 1, at<int8_t>(values), depth, at<float>(scales),
                              nullptr, threads);
    });
  });
  m.def("low_bit_linear", [](bool half, Address x, int64_t stride, Address panels, int64_t bits, int64_t columns,
                             int64_t depth, int64_t groups, Address bias, Address out, int64_t rows, int threads,
                             Address values, Address scales) {
    by_dtype(half, [&](auto* tag) {
      using T = STORAGE(tag);
      paceline::low_bit_linear(at<const T>(x), stride, {at<const uint8_t>(panels), bits, columns, depth, groups},
                               at<const T>(bias), at<T>(out), rows, threads, at<int8_t>(values), at<float>(scales));
    });
  });
}
