// Of XLA's header, what pallas_kernels/native/threads.h uses: a pool of threads.
#ifndef TESTS_KERNELS_THREADS_FFI_H_
#define TESTS_KERNELS_THREADS_FFI_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace xla::ffi {

class ThreadPool {
 public:
  explicit ThreadPool(int count) {
    for (int i = 0; i < count; ++i) threads_.emplace_back([this] { run(); });
  }

  ~ThreadPool() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      is_ending_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void Schedule(std::function<void()> task) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    changed_.notify_one();
  }

  int64_t num_threads() const { return threads_.size(); }

 private:
  void run() {
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return is_ending_ || !tasks_.empty(); });
        if (tasks_.empty()) return;
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      task();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool is_ending_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace xla::ffi

#endif  // TESTS_KERNELS_THREADS_FFI_H_
