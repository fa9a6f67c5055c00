// Causal attention of a ragged batch over a paged KV cache, with a softmax that goes along (Milakov and Gimelshein,
// 2018). What the arguments mean is said in pallas_kernels/ragged_paged_attention/__init__.py.
#include <algorithm>
#include <vector>

#include "formats.h"
#include "simd.h"
#include "threads.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

constexpr int kChunk = 64;         // keys attended at a time
constexpr int kTileQueries = 32;   // of one request
constexpr int kFewRows = 8;        // up to here keys are read as they lie; for more rows they are transposed first
constexpr int kRowsAtOnce = kRegisters == 32 ? 6 : 3;
constexpr int kVectorsAtOnce = kRegisters == 32 ? 4 : 3;
constexpr float kMasked = -1e30f;  // what a key scores that a query does not see
constexpr float kLowest = -1e29f;  // the highest score before any key: above kMasked, so that such a key weighs 0

struct Batch {
  ffi::AnyBuffer q, cache;
  ffi::Buffer<ffi::S32> block_tables, seq_lens, cu_seqlens_q;
  const float *sinks, *kv_scales;  // null: none
  void* out;
  Format q_format, cache_format;
  int64_t num_heads, head_dim, num_kv_heads, block_size, group;
  float scale, out_scale, soft_cap;  // a cap of 0: none
  int64_t sliding_window;            // 0: none

  // The rows of some keys of a request and KV head, each a key and beside it its value, in float32: where they lie in
  // the cache, or made in `scratch`. They are a chunk or less.
  void rows_of_keys(int64_t request, int64_t kv_head, int64_t first, int count, float* scratch,
                    const float** rows) const {
    const int64_t table_width = block_tables.dimensions()[1], num_blocks = cache.dimensions()[0], width = 2 * head_dim;
    const int32_t* table = block_tables.typed_data() + request * table_width;
    for (int s = 0; s < count;) {
      // Places outside the table or the cache are the nearest inside, as in XLA's gathers: wrong data, but no crash.
      const int64_t place = std::min((first + s) / block_size, table_width - 1), offset = (first + s) % block_size;
      const int64_t block = std::clamp<int64_t>(table[place], 0, num_blocks - 1);
      const int64_t slot = (block * num_kv_heads + kv_head) * block_size + offset;
      const int here = std::min<int64_t>(block_size - offset, count - s);
      for (int i = 0; i < here; ++i) {
        if (cache_format == Format::kFloat32 && !kv_scales) {
          rows[s + i] = reinterpret_cast<const float*>(cache.untyped_data()) + (slot + i) * width;
          continue;
        }
        float factors[2] = {1, 1};
        if (kv_scales)
          for (int half = 0; half < 2; ++half)
            factors[half] = kv_scales[((block * 2 + half) * num_kv_heads + kv_head) * block_size + offset + i];
        float* row = scratch + (s + i) * width;
        for (int half = 0; half < 2; ++half)
          widen(cache_format, cache.untyped_data(), (slot + i) * width + half * head_dim, head_dim, factors[half],
                row + half * head_dim);
        rows[s + i] = row;
      }
      s += here;
    }
  }
};

// Some queries of one request, in the order of their positions; with a KV head, all that a thread does at a time.
struct Tile {
  int32_t request, first, count;
};

struct Span {
  int64_t begin, end;
};

// Room for the arrays of a tile, each at a whole cache line.
class Arena {
 public:
  void reset() { used_ = 0; }
  float* take(int64_t count) {
    float* place = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(room_.data()) + 63) / 64 * 64) + used_;
    used_ += (count + 15) / 16 * 16;
    return place;
  }
  void reserve(int64_t count) {
    if (static_cast<int64_t>(room_.size()) < count) room_.resize(count);
  }

 private:
  std::vector<float> room_;
  int64_t used_ = 0;
};

// out[rows][vectors] += weights[rows][depth] times the first columns of the matrix whose row d begins at row(d); what
// comes first is not added to anything.
template <bool is_first, int rows, int vectors, typename Row>
INLINE void add_tile(const float* weights, int64_t stride, int64_t depth, Row row, float* out, int64_t out_stride) {
  Vec acc[rows][vectors];
  UNROLL for (int r = 0; r < rows; ++r)
    UNROLL for (int v = 0; v < vectors; ++v)
      acc[r][v] = is_first ? Vec{} : load(out + r * out_stride + v * kLanes);
  for (int64_t d = 0; d < depth; ++d) {
    const float* from = row(d);
    Vec values[vectors];
    UNROLL for (int v = 0; v < vectors; ++v) values[v] = load(from + v * kLanes);
    UNROLL for (int r = 0; r < rows; ++r) {
      const Vec weight = broadcast(weights[r * stride + d]);
      UNROLL for (int v = 0; v < vectors; ++v) acc[r][v] += weight * values[v];
    }
  }
  UNROLL for (int r = 0; r < rows; ++r)
    UNROLL for (int v = 0; v < vectors; ++v) store(out + r * out_stride + v * kLanes, acc[r][v]);
}

template <bool is_first, int vectors, typename Row>
void add_columns(const float* weights, int64_t stride, int64_t rows, int64_t depth, Row row, float* out,
                 int64_t out_stride) {
  int64_t r = 0;
  for (; r + kRowsAtOnce <= rows; r += kRowsAtOnce)
    add_tile<is_first, kRowsAtOnce, vectors>(weights + r * stride, stride, depth, row, out + r * out_stride, out_stride);
  for (; r + 3 <= rows; r += 3)
    add_tile<is_first, 3, vectors>(weights + r * stride, stride, depth, row, out + r * out_stride, out_stride);
  for (; r < rows; ++r)
    add_tile<is_first, 1, vectors>(weights + r * stride, stride, depth, row, out + r * out_stride, out_stride);
}

// out[rows][columns] += weights[rows][depth] times the matrix whose row d begins at row(d); columns are whole vectors.
template <bool is_first, typename Row>
void add_product(const float* weights, int64_t stride, int64_t rows, int64_t depth, Row row, float* out,
                 int64_t columns) {
  int64_t c = 0;
  const auto from = [&](int64_t d) { return row(d) + c; };
  for (; c + kVectorsAtOnce * kLanes <= columns; c += kVectorsAtOnce * kLanes)
    add_columns<is_first, kVectorsAtOnce>(weights, stride, rows, depth, from, out + c, columns);
  for (; c < columns; c += kLanes) add_columns<is_first, 1>(weights, stride, rows, depth, from, out + c, columns);
}

// scores[rows][kChunk] of few rows: each meets kLanes keys at a time, along the keys as they lie. Meanwhile asks for the
// keys and values of the next chunk.
void score_few(const float* q, int64_t rows, int64_t head_dim, const float* const* keys, int count,
               const float* const* ahead, int count_ahead, float* scores) {
  constexpr int kLine = 16;
  for (int first = 0; first < kChunk; first += kLanes) {
    for (int s = first; s < std::min(first + kLanes, count_ahead); ++s)
      for (int64_t h = 0; h < 2 * head_dim; h += kLine) __builtin_prefetch(ahead[s] + h);
    if (first >= count) continue;
    const float* here[kLanes];
    for (int s = 0; s < kLanes; ++s) here[s] = keys[std::min(first + s, count - 1)];
    for (int64_t r = 0; r < rows; ++r) {
      Vec acc[kLanes] = {};
      for (int64_t h = 0; h < head_dim; h += kLanes) {
        const Vec query = load(q + r * head_dim + h);
        UNROLL for (int s = 0; s < kLanes; ++s) acc[s] += query * load(here[s] + h);
      }
      store(scores + r * kChunk + first, sums(acc));
    }
  }
}

// The same of many rows: the keys are transposed once, and then every row meets vectors of keys.
void score_many(const float* q, int64_t rows, int64_t head_dim, const float* const* keys, int count, float* scores,
                float* transposed) {
  for (int first = 0; first < kChunk; first += kLanes) {
    for (int64_t h = 0; h < head_dim; h += kLanes) {
      Vec square[kLanes];
      UNROLL for (int s = 0; s < kLanes; ++s) square[s] = load(keys[std::min(first + s, count - 1)] + h);
      transpose(square);
      UNROLL for (int i = 0; i < kLanes; ++i) store(transposed + (h + i) * kChunk + first, square[i]);
    }
  }
  add_product<true>(q, head_dim, rows, head_dim, [=](int64_t h) { return transposed + h * kChunk; }, scores, kChunk);
}

// Softmaxes over part of the keys, one a row: the highest score so far, the sum of weights, the weighted sum of values.
// Arrays of one number a row have room for whole vectors of rows.
struct Softmaxes {
  int64_t rows, head_dim;
  float *best, *total, *out;

  // Takes in scores[rows][kChunk] of `count` keys and makes weights of them. A row sees keys as seen(row) says.
  template <typename Seen>
  void add(float* scores, int count, float soft_cap, Seen seen) {
    const int padded = (count + kLanes - 1) / kLanes * kLanes;
    for (int64_t first = 0; first < rows; first += kLanes, scores += kLanes * kChunk) {
      const int here = std::min<int64_t>(kLanes, rows - first);
      Vec highest[kLanes], weights[kLanes];
      for (int i = 0; i < kLanes; ++i) highest[i] = broadcast(kLowest);
      for (int i = 0; i < here; ++i) {
        float* row = scores + i * kChunk;
        if (soft_cap > 0)
          for (int s = 0; s < padded; s += kLanes) store(row + s, tanh(load(row + s) / soft_cap) * soft_cap);
        const Span span = seen(first + i);
        for (int64_t s = 0; s < std::min<int64_t>(span.begin, padded); ++s) row[s] = kMasked;
        for (int64_t s = std::clamp<int64_t>(span.end, 0, count); s < padded; ++s) row[s] = kMasked;
        for (int s = 0; s < padded; s += kLanes) highest[i] = max(highest[i], load(row + s));
      }
      const Vec before = load(best + first), now = max(before, maxima(highest)), decay = exp(before - now);
      store(best + first, now);
      for (int i = 0; i < kLanes; ++i) weights[i] = Vec{};
      for (int i = 0; i < here; ++i) {
        float* row = scores + i * kChunk;
        for (int s = 0; s < padded; s += kLanes) {
          const Vec weight = exp(load(row + s) - best[first + i]);
          store(row + s, weight);
          weights[i] += weight;
        }
      }
      store(total + first, load(total + first) * decay + sums(weights));
      float factors[kLanes];
      store(factors, decay);
      for (int i = 0; i < here; ++i) {
        float* row = out + (first + i) * head_dim;
        if (factors[i] != 1)
          for (int64_t h = 0; h < head_dim; h += kLanes) store(row + h, load(row + h) * factors[i]);
      }
    }
  }
};

template <typename T>
void attend(const Batch& batch, const Tile& tile, int64_t kv_head, Arena& arena) {
  const int64_t group = batch.group, head_dim = batch.head_dim;
  const int64_t rows = tile.count * group;  // row r is query r / group, head r % group of those of the KV head
  arena.reset();
  arena.reserve((rows + kChunk) * 3 * (head_dim + kChunk) + 256);
  float* q = arena.take(rows * head_dim);
  float* out = arena.take(rows * head_dim);
  float* scores = arena.take(rows * kChunk);
  float* transposed = arena.take(head_dim * kChunk);
  float* made = arena.take(kChunk * 2 * head_dim);
  Softmaxes softmaxes = {rows, head_dim, arena.take(rows + kLanes), arena.take(rows + kLanes), out};

  const auto place = [&](int64_t r) {
    return ((tile.first + r / group) * batch.num_heads + kv_head * group + r % group) * head_dim;
  };
  std::fill(out, out + rows * head_dim, 0.0f);
  for (int64_t r = 0; r < rows; ++r) {
    widen(batch.q_format, batch.q.untyped_data(), place(r), head_dim, batch.scale, q + r * head_dim);
    // A sink is a key whose value is zero.
    const float sink = batch.sinks ? batch.sinks[kv_head * group + r % group] : kMasked;
    softmaxes.best[r] = std::max(sink, kLowest);
    softmaxes.total[r] = std::exp(sink - softmaxes.best[r]);
  }

  const int64_t window = batch.sliding_window;
  const int64_t position =  // of the first query
      batch.seq_lens.typed_data()[tile.request] - batch.cu_seqlens_q.typed_data()[tile.request + 1] + tile.first;
  const int64_t end = position + tile.count, begin = window ? std::max<int64_t>(position - window + 1, 0) : 0;
  const bool is_ahead = rows <= kFewRows && batch.cache_format == Format::kFloat32 && !batch.kv_scales;
  const float *pointers[2][kChunk], **keys = pointers[0], **ahead = pointers[1];
  const auto count_at = [&](int64_t first) { return std::min((first / kChunk + 1) * kChunk, end) - first; };
  batch.rows_of_keys(tile.request, kv_head, begin, count_at(begin), made, keys);
  for (int64_t first = begin, next; first < end; first = next, std::swap(keys, ahead)) {
    const int64_t count = count_at(first);
    next = first + count;
    const int64_t count_ahead = next < end && is_ahead ? count_at(next) : 0;
    if (count_ahead) batch.rows_of_keys(tile.request, kv_head, next, count_ahead, made, ahead);
    if (first > begin && !is_ahead) batch.rows_of_keys(tile.request, kv_head, first, count, made, keys);
    if (rows <= kFewRows)
      score_few(q, rows, head_dim, keys, count, ahead, count_ahead, scores);
    else
      score_many(q, rows, head_dim, keys, count, scores, transposed);
    softmaxes.add(scores, count, batch.soft_cap, [&](int64_t r) {
      const int64_t own_end = position + r / group + 1 - first;
      return Span{window ? own_end - window : 0, own_end};
    });
    add_product<false>(scores, kChunk, rows, count, [&](int64_t s) { return keys[s] + head_dim; }, out, head_dim);
  }

  T* to = static_cast<T*>(batch.out);
  for (int64_t r = 0; r < rows; ++r) {
    const float factor = softmaxes.total[r] > 0 ? batch.out_scale / softmaxes.total[r] : 0;
    for (int64_t h = 0; h < head_dim; ++h) to[place(r) + h] = T(out[r * head_dim + h] * factor);
  }
}

template <typename T>
void attend_all(ffi::ThreadPool& pool, const Batch& batch) {
  const int32_t* starts = batch.cu_seqlens_q.typed_data();
  const int64_t num_requests = batch.seq_lens.element_count();
  std::vector<Tile> tiles;
  for (int32_t request = 0; request < num_requests; ++request)
    for (int32_t first = starts[request]; first < starts[request + 1]; first += kTileQueries)
      tiles.push_back({request, first, std::min(kTileQueries, starts[request + 1] - first)});
  T* out = static_cast<T*>(batch.out);
  const int64_t width = batch.num_heads * batch.head_dim;
  std::fill(out + starts[num_requests] * width, out + batch.q.element_count(), T(0.0f));
  parallel_for(pool, static_cast<int64_t>(tiles.size()) * batch.num_kv_heads, [&](int64_t index) {
    thread_local Arena arena;
    attend<T>(batch, tiles[index / batch.num_kv_heads], index % batch.num_kv_heads, arena);
  });
}

ffi::Error attention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer cache, ffi::Buffer<ffi::S32> block_tables,
                     ffi::Buffer<ffi::S32> seq_lens, ffi::Buffer<ffi::S32> cu_seqlens_q, ffi::Buffer<ffi::F32> sinks,
                     ffi::Buffer<ffi::F32> kv_scales, ffi::Result<ffi::AnyBuffer> out, float scale, float out_scale,
                     float soft_cap, int64_t sliding_window) {
  const auto sizes = q.dimensions(), cache_sizes = cache.dimensions();
  const Batch batch = {
      q,
      cache,
      block_tables,
      seq_lens,
      cu_seqlens_q,
      sinks.element_count() ? sinks.typed_data() : nullptr,
      kv_scales.element_count() ? kv_scales.typed_data() : nullptr,
      out->untyped_data(),
      format_of(q.element_type()),
      format_of(cache.element_type()),
      sizes[1],
      sizes[2],
      cache_sizes[1],
      cache_sizes[2],
      sizes[1] / cache_sizes[1],
      scale,
      out_scale,
      soft_cap,
      sliding_window,
  };
  if (!cache.element_count()) return ffi::Error::InvalidArgument("kv_cache has no blocks");
  const int32_t* starts = cu_seqlens_q.typed_data();
  if (starts[0] != 0 || !std::is_sorted(starts, starts + cu_seqlens_q.element_count()) ||
      starts[seq_lens.element_count()] > sizes[0])
    return ffi::Error::InvalidArgument("cu_seqlens_q must go from 0 up and end within the queries");
  if (batch.q_format == Format::kFloat32)
    attend_all<float>(pool, batch);
  else
    attend_all<BFloat16>(pool, batch);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(pallas_kernels_attention, attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<float>("scale")
                                  .Attr<float>("out_scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<int64_t>("sliding_window"));
