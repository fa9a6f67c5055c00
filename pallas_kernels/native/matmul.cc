// y[T, F] = x[T, D] w[F, D]^T, with w as it is stored: read once from memory, in the order in which it lies there.
#include <algorithm>
#include <vector>

#include "formats.h"
#include "rows.h"
#include "simd.h"
#include "threads.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

// The sums of a tile fill the registers but for those of the operands.
constexpr int kTokens = kRegisters == 32 ? 8 : 4;
constexpr int kFeatures = kRegisters == 32 ? 3 : 2;
constexpr int64_t kBlockBytes = 96 * 1024;  // of weights in float32 that a thread takes at a time, from its own cache
constexpr int64_t kStretch = 768;  // of the depth that is summed at a time: a few tokens of it stay in the innermost cache

// Sums in the making of a few tokens and features.
template <int tokens, int features>
struct Tile {
  Vec sums_of[features][tokens];

  // Adds the products of a stretch of the depth. Meanwhile asks for the weights of the next tile, which an outer cache
  // should have, and for those at `ahead` (in the shape of those at `w`), which may be in memory.
  INLINE void add(const float* x, const float* w, const float* ahead, int64_t stretch, int64_t depth) {
    int64_t d = 0;
    for (; d + kLanes <= stretch; d += kLanes) {
      Vec weights[features];
      UNROLL for (int f = 0; f < features; ++f) {
        weights[f] = load(w + f * depth + d);
        __builtin_prefetch(w + (f + features) * depth + d, 0, 3);
        __builtin_prefetch(ahead + f * depth + d, 0, 2);
      }
      UNROLL for (int t = 0; t < tokens; ++t) {
        const Vec token = in_register(load(x + t * depth + d));
        UNROLL for (int f = 0; f < features; ++f) sums_of[f][t] += weights[f] * token;
      }
    }
    if (d < stretch) {
      UNROLL for (int f = 0; f < features; ++f) {
        const Vec weights = load_first(w + f * depth + d, stretch - d);
        UNROLL for (int t = 0; t < tokens; ++t) sums_of[f][t] += weights * load_first(x + t * depth + d, stretch - d);
      }
    }
  }

  template <typename Out>
  INLINE void finish(Out* y, int64_t y_stride) {
    constexpr int count = features * tokens;
    UNROLL for (int first = 0; first < count; first += kLanes) {
      Vec rows[kLanes] = {};
      UNROLL for (int i = 0; i < kLanes; ++i)
        if (first + i < count) rows[i] = sums_of[(first + i) / tokens][(first + i) % tokens];
      float results[kLanes];
      store(results, sums(rows));
      UNROLL for (int i = 0; i < kLanes; ++i)
        if (first + i < count) y[(first + i) % tokens * y_stride + (first + i) / tokens] = Out(results[i]);
    }
  }
};

// y of a few tokens and all features of a block. A product is summed along the depth in vectors, whose lanes are added
// up at the end: in the same order whatever the tile, so that a token's result depends on that token alone. Of every
// `strips` tiles one asks for weights of the next block.
template <int tokens, typename Out>
void strip(const float* x, const float* w, Out* y, int64_t features, int64_t depth, int64_t y_stride, int64_t which,
           int64_t strips) {
  constexpr int wide = tokens == 1 ? 8 : kFeatures;
  Vec room[kBlockBytes / 4 / kStretch * tokens];  // for the sums of the block, between stretches
  for (int64_t begin = 0; begin < depth; begin += kStretch) {
    const int64_t stretch = std::min(kStretch, depth - begin);
    const auto do_tile = [&](auto tile, int64_t f) INLINE_LAMBDA {
      Vec* kept = room + f * tokens;
      if (begin)
        __builtin_memcpy(&tile, kept, sizeof tile);
      else
        tile = {};
      const float* here = w + f * depth + begin;
      tile.add(x + begin, here, which ? here : here + features * depth, stretch, depth);
      if (begin + stretch < depth)
        __builtin_memcpy(kept, &tile, sizeof tile);
      else
        tile.finish(y + f, y_stride);
      which = which ? which - 1 : strips - 1;
    };
    int64_t f = 0;
    for (; f + wide <= features; f += wide) do_tile(Tile<tokens, wide>(), f);
    for (; f < features; ++f) do_tile(Tile<tokens, 1>(), f);
  }
}

template <typename Out>
void block(const float* x, const float* w, Out* y, int64_t tokens, int64_t features, int64_t depth, int64_t y_stride) {
  int64_t t = 0;
  const int64_t strips = std::max<int64_t>(tokens / kTokens, 1);
  for (; t + kTokens <= tokens; t += kTokens)
    strip<kTokens>(x + t * depth, w, y + t * y_stride, features, depth, y_stride, t / kTokens, strips);
  if constexpr (kTokens > 4)
    for (; t + 4 <= tokens; t += 4)
      strip<4>(x + t * depth, w, y + t * y_stride, features, depth, y_stride, t ? 1 : 0, t ? 2 : 1);
  for (; t < tokens; ++t)
    strip<1>(x + t * depth, w, y + t * y_stride, features, depth, y_stride, t ? 1 : 0, t ? 2 : 1);
}

template <typename Out>
void multiply(ffi::ThreadPool& pool, const float* x, const Stored& weight, Out* y, int64_t tokens) {
  const int64_t features = weight.rows, depth = weight.columns;
  const int64_t rows = std::max<int64_t>(kBlockBytes / 4 / depth / kFeatures, 1) * kFeatures;
  parallel_for(pool, (features + rows - 1) / rows, [&](int64_t index) {
    const int64_t first = index * rows, count = std::min(rows, features - first);
    thread_local std::vector<float> scratch;
    const float* w = weight.as_float32(first, count, scratch);
    block(x, w, y + first, tokens, count, depth, features);
  });
}

ffi::Error matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::AnyBuffer scales,
                  ffi::Buffer<ffi::S32> num_tokens, ffi::Result<ffi::AnyBuffer> y) {
  const int64_t depth = x.dimensions()[1], tokens = real_rows(x, num_tokens, *y);
  if (!tokens) return ffi::Error::Success();
  Stored weight;
  if (!describe(w, scales, depth, weight)) return ffi::Error::InvalidArgument("weights of a type that is not known");
  if (x.element_type() == ffi::F32) {
    multiply(pool, x.typed_data<float>(), weight, y->typed_data<float>(), tokens);
  } else {
    const std::vector<float> wide = widened(x, tokens * depth);
    multiply(pool, wide.data(), weight, reinterpret_cast<BFloat16*>(y->untyped_data()), tokens);
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(pallas_kernels_matmul, matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>());
