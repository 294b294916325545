// Threads that share the chunks of one loop.
//
// Part of cpu_kernels.cpp. Chunks are claimed one by one, by the caller too, and the caller waits only for
// chunks that a worker has begun: where another process holds the second core, a step is as slow as one
// thread, while a barrier of OpenMP, which wants every thread to arrive, takes a scheduler's slice of
// milliseconds each time. Idle workers spin for a moment, giving way to whoever wants the core, then sleep.

#pragma once

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>

namespace {

constexpr auto kSpinTime = std::chrono::microseconds(200);  // longer than the Python between two kernels
constexpr uint64_t kClosed = 0xffffffffu;

inline void pause_briefly() {
  for (int i = 0; i < 16; i++) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
  }
}

class Team {
 public:
  using Body = void (*)(const void* loop, int64_t chunk);

  // Runs every chunk on at most `threads` threads. A second caller at the same time does its own alone.
  void run(int64_t threads, int64_t chunks, Body body, const void* loop) {
    if (threads <= 1 || chunks <= 1 || is_busy_.exchange(true)) {
      for (int64_t chunk = 0; chunk < chunks; chunk++) body(loop, chunk);
      return;
    }
    grow(threads - 1);
    const uint64_t generation = (claim_.load() >> 32) + 1;
    claim_.store(generation << 32 | kClosed);  // from here on no late worker can claim with the old numbers
    body_.store(body);
    loop_.store(loop);
    chunks_.store(chunks);
    wanted_workers_.store(threads - 1);
    finished_.store(0);
    claim_.store(generation << 32);
    if (sleepers_.load() > 0) {
      const std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_all();
    }
    work(generation & kClosed);
    for (int spins = 0; finished_.load() != chunks; spins++) {
      pause_briefly();
      if (spins > 64) std::this_thread::yield();
    }
    is_busy_.store(false);
  }

 private:
  void grow(int64_t workers) {
    try {
      for (; workers_ < workers; workers_++) std::thread(&Team::serve, this, workers_).detach();
    } catch (const std::system_error&) {
      return;  // no thread to be had: whoever is there does the work
    }
  }

  // Takes chunks of one generation until none is left. A claim succeeds only while its generation is open,
  // and then its numbers can't change before the chunk is finished.
  void work(uint64_t generation) {
    for (;;) {
      uint64_t claim = claim_.load();
      const uint64_t chunk = claim & kClosed;
      if (claim >> 32 != generation || chunk == kClosed) return;
      const Body body = body_.load();
      const void* loop = loop_.load();
      if (static_cast<int64_t>(chunk) >= chunks_.load()) return;
      if (!claim_.compare_exchange_strong(claim, claim + 1)) continue;
      body(loop, static_cast<int64_t>(chunk));
      finished_.fetch_add(1);
    }
  }

  void serve(int64_t index) {
    uint64_t seen = 0;
    for (;;) {
      seen = next_generation(seen);
      if (index < wanted_workers_.load()) work(seen);
    }
  }

  uint64_t next_generation(uint64_t seen) {
    const auto is_open = [this, seen] {
      const uint64_t claim = claim_.load();
      return claim >> 32 != seen && (claim & kClosed) != kClosed;
    };
    const auto deadline = std::chrono::steady_clock::now() + kSpinTime;
    while (!is_open()) {
      pause_briefly();
      if (std::chrono::steady_clock::now() < deadline) {
        std::this_thread::yield();
        continue;
      }
      std::unique_lock<std::mutex> lock(mutex_);
      sleepers_.fetch_add(1);
      wake_.wait(lock, is_open);
      sleepers_.fetch_sub(1);
    }
    return claim_.load() >> 32;
  }

  std::atomic<bool> is_busy_{false};
  std::atomic<uint64_t> claim_{0};  // generation in the upper half, the next chunk in the lower
  std::atomic<Body> body_{nullptr};
  std::atomic<const void*> loop_{nullptr};
  std::atomic<int64_t> chunks_{0};
  std::atomic<int64_t> wanted_workers_{0};
  std::atomic<int64_t> finished_{0};
  std::atomic<int64_t> sleepers_{0};
  int64_t workers_ = 0;  // written by the busy caller alone
  std::mutex mutex_;
  std::condition_variable wake_;
};

// Never destroyed: its workers live until the process ends. A forked child has none, so it gets a new team.
Team* present_team = nullptr;

Team& team() {
  static const int registered = [] {
    present_team = new Team;
    return pthread_atfork(nullptr, nullptr, [] { present_team = new Team; });
  }();
  (void)registered;
  return *present_team;
}

// Calls `loop(chunk)` for every chunk, on at most `threads` threads, in any order.
template <typename Loop>
void parallel_for(int64_t threads, int64_t chunks, const Loop& loop) {
  team().run(
      threads, chunks, [](const void* body, int64_t chunk) { (*static_cast<const Loop*>(body))(chunk); },
      &loop);
}

}  // namespace
