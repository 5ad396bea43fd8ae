// As much of CUDA as sweep.cu and wire.cu use, on the host: a block's threads are coroutines that change at barriers and shuffles.
//
// Blocks run one after another. Blocks, warps and the lanes of a warp run in an order drawn from a seed, and shared
// memory is filled with garbage before each block, so that a missing barrier shows as a wrong result under some seed.
// A barrier or a shuffle that not all of its threads reach ends the launch with an error, and so does an access that is
// not aligned, which a GPU would not survive (compile with -fsanitize=alignment, whose handler is here).
#pragma once
#include <setjmp.h>
#include <ucontext.h>
#include <xmmintrin.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
// All shared memory is in one section, of which the linker knows the ends.
#define __shared__ __attribute__((section("simt_shared"))) static

struct uint3 {
  unsigned x, y, z;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

// Both are null where a program has none.
extern "C" __attribute__((weak)) char __start_simt_shared[], __stop_simt_shared[];

namespace simt {

enum class State { kReady, kAtBarrier, kAtShuffle, kDone };

struct Thread {
  ucontext_t start;
  jmp_buf resume;
  bool has_started = false;
  State state = State::kReady;
  unsigned char sent[8], received[8];
  int from;
  std::unique_ptr<char[]> stack = std::make_unique<char[]>(kStack);
  static constexpr int kStack = 64 << 10;
};

inline uint3 block_index, grid_size, thread_index;
inline std::vector<Thread> threads;
inline int current;
inline jmp_buf scheduler;
inline std::function<void()> kernel;
inline bool was_misaligned;

// Back to the scheduler, until it lets this thread go on.
inline void wait(State state) {
  threads[current].state = state;
  if (!_setjmp(threads[current].resume)) _longjmp(scheduler, 1);
}

inline void body() {
  kernel();
  threads[current].state = State::kDone;
  _longjmp(scheduler, 1);
}

inline void step(int thread) {
  Thread& it = threads[thread];
  current = thread;
  thread_index = {static_cast<unsigned>(thread), 0, 0};
  if (_setjmp(scheduler)) return;
  if (it.has_started) _longjmp(it.resume, 1);
  it.has_started = true;
  getcontext(&it.start);
  it.start.uc_stack.ss_sp = it.stack.get();
  it.start.uc_stack.ss_size = Thread::kStack;
  it.start.uc_link = nullptr;
  makecontext(&it.start, body, 0);
  setcontext(&it.start);
}

inline bool all(int first, int count, State state) {
  return std::all_of(threads.begin() + first, threads.begin() + first + count,
                     [&](const Thread& thread) { return thread.state == state; });
}

// Lets a warp run until each of its lanes is at the block's barrier, or done.
inline void run_warp(int warp, std::mt19937& random) {
  std::vector<int> lanes(32);
  std::iota(lanes.begin(), lanes.end(), warp * 32);
  for (;;) {
    std::shuffle(lanes.begin(), lanes.end(), random);
    for (const int lane : lanes)
      if (threads[lane].state == State::kReady) step(lane);
    if (!all(warp * 32, 32, State::kAtShuffle)) return;
    for (const int lane : lanes)
      std::memcpy(threads[lane].received, threads[warp * 32 + threads[lane].from].sent, 8);
    for (const int lane : lanes) threads[lane].state = State::kReady;
  }
}

inline void run_block(int num_threads, std::mt19937& random) {
  std::memset(__start_simt_shared, 0xa5, __stop_simt_shared - __start_simt_shared);
  for (Thread& thread : threads) thread.has_started = false, thread.state = State::kReady;
  std::vector<int> warps(num_threads / 32);
  std::iota(warps.begin(), warps.end(), 0);
  while (!all(0, num_threads, State::kDone)) {
    std::shuffle(warps.begin(), warps.end(), random);
    for (const int warp : warps) run_warp(warp, random);
    if (all(0, num_threads, State::kDone)) return;
    if (!all(0, num_threads, State::kAtBarrier))
      throw std::string("threads of a block wait at different barriers or shuffles, or have ended");
    for (Thread& thread : threads) thread.state = State::kReady;
  }
}

// Returns 0, or 1 with the reason on stderr. Arithmetic is as on a GPU: subnormal numbers stay what they are.
inline int launch(int num_blocks, int num_threads, unsigned seed, std::function<void()> with_arguments) {
  const unsigned mode = _mm_getcsr();
  _mm_setcsr(0x1f80);
  std::mt19937 random(seed);
  kernel = std::move(with_arguments);
  grid_size = {static_cast<unsigned>(num_blocks), 1, 1};
  threads.resize(num_threads);
  std::vector<int> blocks(num_blocks);
  std::iota(blocks.begin(), blocks.end(), 0);
  std::shuffle(blocks.begin(), blocks.end(), random);
  was_misaligned = false;
  int status = 0;
  try {
    for (const int block : blocks) {
      block_index = {static_cast<unsigned>(block), 0, 0};
      run_block(num_threads, random);
    }
  } catch (const std::string& reason) {
    std::fprintf(stderr, "simt: %s\n", reason.c_str());
    status = 1;
  }
  if (was_misaligned) {
    std::fprintf(stderr, "simt: an access was not aligned\n");
    status = 1;
  }
  _mm_setcsr(mode);
  return status;
}

// The lane's own value to the others, and that of lane `from` to it.
template <class T>
T exchange(T value, int from) {
  Thread& it = threads[current];
  std::memcpy(it.sent, &value, sizeof value);
  it.from = from;
  wait(State::kAtShuffle);
  std::memcpy(&value, threads[current].received, sizeof value);
  return value;
}

}  // namespace simt

// Not inline, for a call that the compiler adds does not count as a use.
extern "C" void __ubsan_handle_type_mismatch_v1(void*, void*) { simt::was_misaligned = true; }

#define threadIdx simt::thread_index
#define blockIdx simt::block_index
#define gridDim simt::grid_size

inline void __syncthreads() { simt::wait(simt::State::kAtBarrier); }
inline void __threadfence() {}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int distance) {
  if (mask != 0xffffffffu) std::abort();  // only whole warps are known here
  return simt::exchange(value, simt::thread_index.x % 32 ^ distance);
}

inline int __any_sync(unsigned mask, int predicate) {
  for (int distance = 16; distance; distance /= 2) predicate |= __shfl_xor_sync(mask, predicate, distance);
  return predicate;
}

// One operating-system thread runs them all.
template <class T>
T atomicAdd(T* cell, T value) {
  const T before = *cell;
  *cell += value;
  return before;
}
template <class T>
T atomicMax(T* cell, T value) {
  const T before = *cell;
  *cell = std::max(*cell, value);
  return before;
}
