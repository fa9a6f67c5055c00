// Work shared out over XLA's threads.
#ifndef PALLAS_KERNELS_NATIVE_THREADS_H_
#define PALLAS_KERNELS_NATIVE_THREADS_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "xla/ffi/api/ffi.h"

// A thread that has helped waits awake so long for the next work before it goes back to XLA: a step has hundreds of
// pieces, a few microseconds to some tens of them apart, and to wake a sleeping thread takes longer.
constexpr std::chrono::microseconds kStaysAwake(60);
// But it goes back now and then, however much work there is: XLA has tasks of its own, of other programs perhaps.
constexpr std::chrono::microseconds kStaysAtMost(2000);

// Indices below a count, each of which is to be done once. Every thread walks a range of its own, so that what it does
// next is what it may prefetch, and then helps with the others' ranges.
class Work {
 public:
  using Body = void (*)(const void* context, int64_t index);

  Work(int64_t threads, int64_t count, Body body, const void* context)
      : ranges_(threads), count_(count), body_(body), context_(context) {
    for (int64_t i = 0; i < threads; ++i) {
      ranges_[i].next.store(count * i / threads, std::memory_order_relaxed);
      ranges_[i].end = count * (i + 1) / threads;
    }
  }

  // Does what is left. Who comes too late finds nothing, and touches nothing of the caller's.
  void help() {
    const size_t first = joined_.fetch_add(1, std::memory_order_relaxed);
    for (size_t i = 0; i < ranges_.size(); ++i) {
      Range& range = ranges_[(first + i) % ranges_.size()];
      for (int64_t index; (index = range.next.fetch_add(1, std::memory_order_relaxed)) < range.end;) {
        body_(context_, index);
        done_.fetch_add(1, std::memory_order_release);
      }
    }
  }

  // Returns when all is done. Nobody waits for a thread that has not begun.
  void wait() const {
    for (int spins = 0; done_.load(std::memory_order_acquire) < count_; ++spins)
      if (spins > 1000) std::this_thread::yield();
  }

 private:
  struct alignas(64) Range {
    std::atomic<int64_t> next;
    int64_t end;
  };
  std::vector<Range> ranges_;
  const int64_t count_;
  const Body body_;
  const void* const context_;
  std::atomic<size_t> joined_{0};
  std::atomic<int64_t> done_{0};
};

// Threads of the pool that have helped and wait awake for more.
class Team {
 public:
  static Team& of_process() {
    static Team& team = *new Team;  // never destroyed: threads may outlive what ends with the program
    return team;
  }

  // Promises `work` to as many of those who wait as it wants; how many those are.
  int64_t offer(const std::shared_ptr<Work>& work, int64_t wanted) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const int64_t found = std::min(num_idle_, wanted);
    num_idle_ -= found;
    promised_.insert(promised_.end(), found, work);
    num_promised_.fetch_add(found, std::memory_order_release);
    return found;
  }

  // Helps with `work`, then with what is promised while waiting.
  void stay(std::shared_ptr<Work> work) {
    const auto leave_at = Clock::now() + kStaysAtMost;
    while (work) {
      work->help();
      work = Clock::now() < leave_at ? wait_awake() : nullptr;
    }
  }

 private:
  using Clock = std::chrono::steady_clock;

  // The next work; null if there was none for long enough.
  std::shared_ptr<Work> wait_awake() {
    std::unique_lock<std::mutex> lock(mutex_);
    ++num_idle_;
    const auto until = Clock::now() + kStaysAwake;
    while (promised_.empty()) {
      if (Clock::now() >= until) {  // with nothing promised to anyone this thread is one of the idle
        --num_idle_;
        return nullptr;
      }
      lock.unlock();
      while (!num_promised_.load(std::memory_order_acquire) && Clock::now() < until) std::this_thread::yield();
      lock.lock();
    }
    std::shared_ptr<Work> work = std::move(promised_.back());
    promised_.pop_back();
    num_promised_.fetch_sub(1, std::memory_order_relaxed);
    return work;
  }

  std::mutex mutex_;
  int64_t num_idle_ = 0;  // of those who wait, all but as many as there are promises
  std::vector<std::shared_ptr<Work>> promised_;
  alignas(64) std::atomic<int64_t> num_promised_{0};
};

// Calls body(index) once for every index below count, on the calling thread and on those of the pool, and returns when
// all are done.
template <typename Body>
void parallel_for(xla::ffi::ThreadPool& pool, int64_t count, const Body& body) {
  const int64_t threads = std::min(pool.num_threads(), count);
  if (threads <= 1) {
    for (int64_t index = 0; index < count; ++index) body(index);
    return;
  }
  const auto call = [](const void* body, int64_t index) { (*static_cast<const Body*>(body))(index); };
  const auto work = std::make_shared<Work>(threads, count, call, &body);
  Team& team = Team::of_process();
  for (int64_t helpers = team.offer(work, threads - 1); helpers < threads - 1; ++helpers)
    pool.Schedule([work, &team] { team.stay(work); });
  work->help();
  work->wait();
}

#endif  // PALLAS_KERNELS_NATIVE_THREADS_H_
