// Work shared out over XLA's threads.
#ifndef PALLAS_KERNELS_NATIVE_THREADS_H_
#define PALLAS_KERNELS_NATIVE_THREADS_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "xla/ffi/api/ffi.h"

// Calls body(index) once for every index below count, on the calling thread and on those of the pool, and returns when
// all are done. Every thread walks a range of its own, so that what it does next is what it may prefetch, and then
// helps with the others' ranges. Who is scheduled but comes too late finds nothing left and touches nothing of the
// caller's: nobody waits for a thread that has not begun.
template <typename Body>
void parallel_for(xla::ffi::ThreadPool& pool, int64_t count, const Body& body) {
  struct alignas(64) Range {
    std::atomic<int64_t> next;
    int64_t end;
  };
  struct Shared {
    std::vector<Range> ranges;
    std::atomic<int64_t> done{0};
    const Body* const body;
    Shared(int64_t threads, int64_t count, const Body* body) : ranges(threads), body(body) {
      for (int64_t i = 0; i < threads; ++i) {
        ranges[i].next.store(count * i / threads, std::memory_order_relaxed);
        ranges[i].end = count * (i + 1) / threads;
      }
    }
    void work(int64_t thread) {
      for (size_t i = 0; i < ranges.size(); ++i) {
        Range& range = ranges[(thread + i) % ranges.size()];
        for (int64_t index; (index = range.next.fetch_add(1, std::memory_order_relaxed)) < range.end;) {
          (*body)(index);
          done.fetch_add(1, std::memory_order_release);
        }
      }
    }
  };
  const int64_t threads = std::min(pool.num_threads(), count);
  if (threads <= 1) {
    for (int64_t index = 0; index < count; ++index) body(index);
    return;
  }
  const auto shared = std::make_shared<Shared>(threads, count, &body);
  for (int64_t thread = 1; thread < threads; ++thread) pool.Schedule([shared, thread] { shared->work(thread); });
  shared->work(0);
  for (int spins = 0; shared->done.load(std::memory_order_acquire) < count; ++spins)
    if (spins > 1000) std::this_thread::yield();
}

#endif  // PALLAS_KERNELS_NATIVE_THREADS_H_
