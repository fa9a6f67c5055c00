// y[T, F] = x[T, D] w[F, D]^T with w in blocks of 8-bit numbers, as pallas_kernels/matmul/blocks.py has them: panels of
// 16 rows that lie side by side, so that a vector holds a column of rows and is never added up across its lanes.
#include <vector>

#include "rows.h"
#include "simd.h"
#include "threads.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

constexpr int kPanel = 16;  // rows
constexpr int kVectors = kPanel / kLanes;
// The sums of a tile fill the registers but for those of the operands.
constexpr int kTokens = kRegisters == 16 ? 12 / kVectors / 2 * 2 : kVectors == 1 ? 8 : 6;
constexpr int kPanels = kVectors == 1 ? 3 : 1;
constexpr int64_t kStretch = 128;  // columns of a few panels that are made real at a time, for the innermost cache

struct Blocks {
  const int8_t* values;  // [panels, depth, kPanel]
  const float* scales;   // [panels, depth / group, kPanel]
  const float* offsets;  // likewise; null: none
  int64_t panels, depth, group;

  // Columns of a panel in float32: stored number times scale plus offset.
  void make_real(int64_t panel, int64_t begin, int64_t end, float* to) const {
    const int8_t* from = values + (panel * depth + begin) * kPanel;
    // What this thread needs next lies behind what it is at.
    const int64_t ahead = kPanels * depth * kPanel;
    for (int64_t d = begin; d < end; d += group) {
      const int64_t block = (panel * (depth / group) + d / group) * kPanel;
      __builtin_prefetch(scales + block + ahead / group, 0, 2);
      if (offsets) __builtin_prefetch(offsets + block + ahead / group, 0, 2);
      Vec scale[kVectors], offset[kVectors];
      UNROLL for (int v = 0; v < kVectors; ++v) {
        scale[v] = load(scales + block + v * kLanes);
        offset[v] = offsets ? load(offsets + block + v * kLanes) : Vec{};
      }
      for (int64_t i = 0; i < group; ++i, from += kPanel, to += kPanel) {
        if (i % (64 / kPanel) == 0) __builtin_prefetch(from + ahead, 0, 2);
        UNROLL for (int v = 0; v < kVectors; ++v)
          store(to + v * kLanes, load(from + v * kLanes) * scale[v] + offset[v]);
      }
    }
  }
};

// Adds to y the products of a few tokens and panels along a stretch of the depth, each sum in a lane of its own: in the
// same order whatever the tile, so that a token's result depends on that token alone.
template <int tokens, int panels>
INLINE void tile(const float* x, const float* w, float* y, int64_t stretch, int64_t depth, int64_t y_stride,
                 bool is_first) {
  constexpr int vectors = panels * kVectors;
  Vec sums[vectors][tokens] = {};
  for (int64_t d = 0; d < stretch; ++d) {
    Vec weights[vectors];
    UNROLL for (int p = 0; p < panels; ++p)
      UNROLL for (int v = 0; v < kVectors; ++v)
        weights[p * kVectors + v] = load(w + (p * kStretch + d) * kPanel + v * kLanes);
    UNROLL for (int t = 0; t < tokens; ++t) {
      const Vec token = in_register(broadcast(x[t * depth + d]));
      UNROLL for (int v = 0; v < vectors; ++v) sums[v][t] += weights[v] * token;
    }
  }
  UNROLL for (int t = 0; t < tokens; ++t)
    UNROLL for (int v = 0; v < vectors; ++v) {
      float* to = y + t * y_stride + v * kLanes;
      store(to, is_first ? sums[v][t] : load(to) + sums[v][t]);
    }
}

template <int panels>
void multiply_panels(const float* x, const Blocks& w, int64_t panel, float* y, int64_t tokens) {
  alignas(64) float real[panels * kStretch * kPanel];
  const int64_t features = w.panels * kPanel;
  y += panel * kPanel;
  for (int64_t begin = 0; begin < w.depth; begin += kStretch) {
    const int64_t end = std::min(begin + kStretch, w.depth);
    for (int p = 0; p < panels; ++p) w.make_real(panel + p, begin, end, real + p * kStretch * kPanel);
    const auto do_tile = [&](auto count, int64_t t) INLINE_LAMBDA {
      tile<decltype(count)::value, panels>(x + t * w.depth + begin, real, y + t * features, end - begin, w.depth,
                                           features, begin == 0);
    };
    int64_t t = 0;
    for (; t + kTokens <= tokens; t += kTokens) do_tile(std::integral_constant<int, kTokens>(), t);
    for (; t + 2 <= tokens; t += 2) do_tile(std::integral_constant<int, 2>(), t);
    for (; t < tokens; ++t) do_tile(std::integral_constant<int, 1>(), t);
  }
}

void multiply(ffi::ThreadPool& pool, const float* x, const Blocks& w, float* y, int64_t tokens) {
  parallel_for(pool, (w.panels + kPanels - 1) / kPanels, [&](int64_t index) {
    int64_t panel = index * kPanels;
    const int64_t end = std::min(panel + kPanels, w.panels);
    if (panel + kPanels == end) return multiply_panels<kPanels>(x, w, panel, y, tokens);
    for (; panel < end; ++panel) multiply_panels<1>(x, w, panel, y, tokens);
  });
}

ffi::Error block_matmul(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::S8> values,
                        ffi::Buffer<ffi::F32> scales, ffi::Buffer<ffi::F32> offsets, ffi::Buffer<ffi::S32> num_tokens,
                        ffi::Result<ffi::AnyBuffer> y) {
  const int64_t tokens = real_rows(x, num_tokens, *y);
  if (!tokens) return ffi::Error::Success();
  Blocks w = {values.typed_data(), scales.typed_data(), offsets.element_count() ? offsets.typed_data() : nullptr};
  w.panels = values.dimensions()[0], w.depth = values.dimensions()[1], w.group = w.depth / scales.dimensions()[1];
  if (kStretch % w.group) return ffi::Error::InvalidArgument("blocks of a size that is not known");
  if (x.element_type() == ffi::F32) {
    multiply(pool, x.typed_data<float>(), w, y->typed_data<float>(), tokens);
    return ffi::Error::Success();
  }
  const std::vector<float> wide = widened(x, tokens * w.depth);
  std::vector<float> result(tokens * w.panels * kPanel);
  multiply(pool, wide.data(), w, result.data(), tokens);
  auto* rounded = reinterpret_cast<BFloat16*>(y->untyped_data());
  for (size_t i = 0; i < result.size(); ++i) rounded[i] = BFloat16(result[i]);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(pallas_kernels_block_matmul, block_matmul,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S8>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>());
