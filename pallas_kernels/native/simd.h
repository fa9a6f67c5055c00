// Vectors of float32 as wide as the CPU this is compiled for has them, by the vector extensions of GCC and Clang.
#ifndef PALLAS_KERNELS_NATIVE_SIMD_H_
#define PALLAS_KERNELS_NATIVE_SIMD_H_

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kRegisters = 32;
#elif defined(__AVX__)
constexpr int kLanes = 8;
constexpr int kRegisters = 16;
#elif defined(__aarch64__)
constexpr int kLanes = 4;
constexpr int kRegisters = 32;
#else
constexpr int kLanes = 4;
constexpr int kRegisters = 16;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4)));
typedef uint16_t HalfBits __attribute__((vector_size(kLanes * 2)));
typedef int16_t ShortVec __attribute__((vector_size(kLanes * 2)));
typedef int8_t ByteVec __attribute__((vector_size(kLanes)));

#define INLINE inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))

#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 32")
#endif

struct BFloat16 {
  uint16_t bits;
  BFloat16() = default;
  explicit BFloat16(float x) {  // to the nearest, ties to even
    uint32_t wide;
    __builtin_memcpy(&wide, &x, sizeof wide);
    bits = x == x ? (wide + 0x7FFF + (wide >> 16 & 1)) >> 16 : 0x7FC0;
  }
  float value() const {
    const uint32_t wide = uint32_t{bits} << 16;
    float x;
    __builtin_memcpy(&x, &wide, sizeof x);
    return x;
  }
};

INLINE Vec broadcast(float x) { return x - Vec{}; }

INLINE Vec load(const float* p) {
  Vec v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

INLINE Vec load(const BFloat16* p) {
  HalfBits bits;
  __builtin_memcpy(&bits, p, sizeof bits);
  return (Vec)(__builtin_convertvector(bits, IntVec) << 16);
}

INLINE Vec load(const int8_t* p) {
  ByteVec bytes;
  __builtin_memcpy(&bytes, p, sizeof bytes);
  // GCC takes such a conversion apart, or makes it one element at a time.
#if defined(__AVX512F__)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)bytes));
#elif defined(__AVX2__)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(__m128i{(long long)bytes}));
#else
  return __builtin_convertvector(__builtin_convertvector(__builtin_convertvector(bytes, ShortVec), IntVec), Vec);
#endif
}

// Keeps the compiler from reading an operand from memory once more for each use.
INLINE Vec in_register(Vec v) {
#if defined(__x86_64__)
  asm("" : "+v"(v));
#endif
  return v;
}

INLINE void store(float* p, Vec v) { __builtin_memcpy(p, &v, sizeof v); }

// The first `count` elements, zeros after them.
template <typename T>
INLINE Vec load_first(const T* p, int count) {
  T padded[kLanes] = {};
  __builtin_memcpy(padded, p, count * sizeof(T));
  return load(padded);
}

INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }
INLINE Vec min(Vec a, Vec b) { return a < b ? a : b; }

// Lane i of step `width`'s result comes from `a` and `b` as `Pick::index(i, width)` says, b's lanes being kLanes on.
template <typename Pick, int width, int... lane>
INLINE Vec shuffle(Vec a, Vec b, std::integer_sequence<int, lane...>) {
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 12
  return __builtin_shuffle(a, b, IntVec{Pick::index(lane, width)...});
#else
  return __builtin_shufflevector(a, b, Pick::index(lane, width)...);
#endif
}

template <typename Pick, int width>
INLINE Vec shuffle(Vec a, Vec b) {
  return shuffle<Pick, width>(a, b, std::make_integer_sequence<int, kLanes>{});
}

struct LowerParts {  // [a0 a1 | b0 b1] of [a0 a1 a2 a3], [b0 b1 b2 b3] at width 2
  static constexpr int index(int lane, int width) { return lane & width ? kLanes + lane - width : lane; }
};

struct UpperParts {
  static constexpr int index(int lane, int width) { return lane & width ? kLanes + lane : lane + width; }
};

// rows[i] lane j and rows[j] lane i change places.
template <int width = kLanes / 2>
INLINE void transpose(Vec (&rows)[kLanes]) {
  if constexpr (width > 0) {
    UNROLL for (int i = 0; i < kLanes; ++i) {
      if (i & width) continue;
      const Vec a = rows[i], b = rows[i + width];
      rows[i] = shuffle<LowerParts, width>(a, b);
      rows[i + width] = shuffle<UpperParts, width>(a, b);
    }
    transpose<width / 2>(rows);
  }
}

// Lane i combines all lanes of rows[i], as a binary tree, the same one for every row.
template <int width = kLanes / 2, typename Combine>
INLINE Vec combined(Vec (&rows)[kLanes], Combine combine) {
  if constexpr (width == 0) {
    return rows[0];
  } else {
    UNROLL for (int i = 0; i < width; ++i) {
      const Vec a = rows[i], b = rows[i + width];
      rows[i] = combine(shuffle<LowerParts, width>(a, b), shuffle<UpperParts, width>(a, b));
    }
    return combined<width / 2>(rows, combine);
  }
}

INLINE Vec sums(Vec (&rows)[kLanes]) {
  return combined(rows, [](Vec a, Vec b) INLINE_LAMBDA { return a + b; });
}

INLINE Vec maxima(Vec (&rows)[kLanes]) {
  return combined(rows, [](Vec a, Vec b) INLINE_LAMBDA { return max(a, b); });
}

// e to the power of x for x of at most 88, within 2 units in the last place; 0 below -87.
INLINE Vec exp(Vec x) {
  const IntVec is_tiny = x < -87.0f;
  x = is_tiny ? Vec{} : x;
  const Vec magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, in the lowest bits
  const Vec shifted = x * 1.44269504f + magic;
  const Vec n = shifted - magic;
  const Vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts (Cody and Waite)
  Vec p = broadcast(1.0f / 5040);
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  return is_tiny ? Vec{} : p * (Vec)(((IntVec)shifted << 23) + 0x3F800000);  // the second factor is 2 to the power n
}

INLINE Vec tanh(Vec x) {
  const Vec y = exp(min(broadcast(80.0f), x * -2.0f));  // in this order a NaN remains one
  return (1.0f - y) / (1.0f + y);
}

#endif  // PALLAS_KERNELS_NATIVE_SIMD_H_
