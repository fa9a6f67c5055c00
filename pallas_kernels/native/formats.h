// Numbers as they are stored, and float32 made of them.
#ifndef PALLAS_KERNELS_NATIVE_FORMATS_H_
#define PALLAS_KERNELS_NATIVE_FORMATS_H_

#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#include "simd.h"
#include "xla/ffi/api/ffi.h"

// The 256 numbers of an 8-bit float: one bit of sign, then `exponent` bits, the rest mantissa.
template <int exponent_bits, bool has_infinity>
const std::array<float, 256>& numbers_of_float8() {
  static const std::array<float, 256> numbers = [] {
    constexpr int mantissa_bits = 7 - exponent_bits, bias = (1 << (exponent_bits - 1)) - 1;
    constexpr int most = (1 << exponent_bits) - 1, mantissas = 1 << mantissa_bits;
    std::array<float, 256> all;
    for (int bits = 0; bits < 256; ++bits) {
      const int exponent = bits >> mantissa_bits & most, mantissa = bits % mantissas;
      float number = exponent ? std::ldexp(1.0f + float(mantissa) / mantissas, exponent - bias)
                              : std::ldexp(float(mantissa) / mantissas, 1 - bias);
      if (has_infinity && exponent == most) number = mantissa ? NAN : INFINITY;
      if (!has_infinity && exponent == most && mantissa == mantissas - 1) number = NAN;
      all[bits] = bits < 128 ? number : -number;
    }
    return all;
  }();
  return numbers;
}

enum class Format { kFloat32, kBFloat16, kInt8, kFloat8E4M3, kFloat8E5M2, kInt4, kUnknown };

inline Format format_of(xla::ffi::DataType type) {
  switch (type) {
    case xla::ffi::F32:
      return Format::kFloat32;
    case xla::ffi::BF16:
      return Format::kBFloat16;
    case xla::ffi::S8:
      return Format::kInt8;
    case xla::ffi::U8:
      return Format::kInt4;
    case xla::ffi::F8E4M3FN:
      return Format::kFloat8E4M3;
    case xla::ffi::F8E5M2:
      return Format::kFloat8E5M2;
    default:
      return Format::kUnknown;
  }
}

// `count` numbers times a factor; not of int4.
INLINE void widen(Format format, const void* from, int64_t first, int64_t count, float factor, float* to) {
  const auto convert = [&](const auto* stored, auto value) {
    stored += first;
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) store(to + i, load(stored + i) * factor);
    for (; i < count; ++i) to[i] = value(stored[i]) * factor;
  };
  const auto look_up = [&](const std::array<float, 256>& numbers) {
    const auto* stored = static_cast<const uint8_t*>(from) + first;
    for (int64_t i = 0; i < count; ++i) to[i] = numbers[stored[i]] * factor;
  };
  switch (format) {
    case Format::kFloat32:
      return convert(static_cast<const float*>(from), [](float x) { return x; });
    case Format::kBFloat16:
      return convert(static_cast<const BFloat16*>(from), [](BFloat16 x) { return x.value(); });
    case Format::kInt8:
      return convert(static_cast<const int8_t*>(from), [](int8_t x) { return float(x); });
    case Format::kFloat8E4M3:
      return look_up(numbers_of_float8<4, false>());
    case Format::kFloat8E5M2:
      return look_up(numbers_of_float8<5, true>());
    default:
      return;
  }
}

// A weight [rows, columns] as pallas_kernels/quantized_matmul/weight.py has it, or one of plain floats.
struct Stored {
  Format format;
  const void* values;
  const float* scales;  // of the rows; for int4 [columns / group, rows]; null: none
  int64_t rows, columns, group;

  // Rows in float32: as they lie, or made in `scratch`.
  const float* as_float32(int64_t first, int64_t count, std::vector<float>& scratch) const {
    if (format == Format::kFloat32) return static_cast<const float*>(values) + first * columns;
    if (static_cast<int64_t>(scratch.size()) < count * columns) scratch.resize(count * columns);
    for (int64_t row = 0; row < count; ++row) {
      float* to = scratch.data() + row * columns;
      if (format == Format::kInt4)
        widen_int4(first + row, to);
      else
        widen(format, values, (first + row) * columns, columns, scales ? scales[first + row] : 1.0f, to);
    }
    return scratch.data();
  }

  void widen_int4(int64_t row, float* to) const {
    const auto* bytes = static_cast<const uint8_t*>(values) + row * columns / 2;
    const int64_t half = group / 2;
    for (int64_t start = 0, g = 0; start < columns; start += group, ++g, bytes += half) {
      const float scale = scales[g * rows + row];
      for (int64_t i = 0; i < half; ++i) {
        to[start + i] = ((bytes[i] & 15) - 8) * scale;
        to[start + half + i] = ((bytes[i] >> 4) - 8) * scale;
      }
    }
  }
};

inline bool describe(xla::ffi::AnyBuffer& values, xla::ffi::AnyBuffer& scales, int64_t columns, Stored& stored) {
  stored.format = format_of(values.element_type());
  stored.values = values.untyped_data();
  stored.scales = scales.element_count() ? scales.typed_data<float>() : nullptr;
  stored.columns = columns;
  const int64_t numbers = values.element_count() * (stored.format == Format::kInt4 ? 2 : 1);
  stored.rows = columns ? numbers / columns : 0;
  stored.group = stored.format == Format::kInt4 ? columns / scales.dimensions()[0] : columns;
  return stored.format != Format::kUnknown;
}

#endif  // PALLAS_KERNELS_NATIVE_FORMATS_H_
