// Three callers share pools of several sizes: every index is done once, whenever helpers wait, leave or come late.
// Prints how many calls there were; ends with 1 at the first index that was not done exactly once.
#include "threads.h"

#include <cstdio>
#include <cstdlib>
#include <random>

int main() {
  std::atomic<int> calls{0};
  for (const int num_threads : {1, 2, 3, 8}) {
    xla::ffi::ThreadPool pool(num_threads);
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 3; ++caller)
      callers.emplace_back([&, caller] {
        std::mt19937 random(caller);
        for (int call = 0; call < 2000; ++call) {
          std::vector<int> times(random() % 20);
          parallel_for(pool, times.size(), [&](int64_t index) {
            ++times[index];
            for (volatile int spins = index * 37 % 200; spins > 0;) spins = spins - 1;
          });
          for (const int count : times)
            if (count != 1) std::exit(1);
          ++calls;
          // As between the pieces of a step, and now and then longer than helpers wait.
          if (random() % 10 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 150));
        }
      });
    for (std::thread& caller : callers) caller.join();
  }
  std::printf("%d\n", calls.load());
}
