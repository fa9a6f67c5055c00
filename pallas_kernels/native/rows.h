// What products have in common: rows of activations, of which the last may be padding.
#ifndef PALLAS_KERNELS_NATIVE_ROWS_H_
#define PALLAS_KERNELS_NATIVE_ROWS_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "simd.h"
#include "xla/ffi/api/ffi.h"

// How many rows of x are real, `num_real` (none: all) says; those of y that are not become zeros.
inline int64_t real_rows(xla::ffi::AnyBuffer& x, xla::ffi::Buffer<xla::ffi::S32>& num_real, xla::ffi::AnyBuffer& y) {
  if (!x.element_count() || !y.element_count()) {
    std::memset(y.untyped_data(), 0, y.size_bytes());
    return 0;
  }
  int64_t rows = x.dimensions()[0];
  if (!num_real.element_count()) return rows;
  const size_t row_bytes = y.size_bytes() / rows;
  rows = std::clamp<int64_t>(num_real.typed_data()[0], 0, rows);
  std::memset(static_cast<char*>(y.untyped_data()) + rows * row_bytes, 0, y.size_bytes() - rows * row_bytes);
  return rows;
}

// The first `count` numbers of x, which holds bfloat16, in float32.
inline std::vector<float> widened(xla::ffi::AnyBuffer& x, int64_t count) {
  const auto* narrow = reinterpret_cast<const BFloat16*>(x.untyped_data());
  std::vector<float> wide(count);
  for (int64_t i = 0; i < count; ++i) wide[i] = narrow[i].value();
  return wide;
}

#endif  // PALLAS_KERNELS_NATIVE_ROWS_H_
