// What the functions of the CPU library have in common: the instruction set, threads, and the mode of floating point.
#ifndef DISTSCALE_HOST_H
#define DISTSCALE_HOST_H

#include <atomic>
#include <cfenv>
#include <cstdlib>
#include <cstring>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "numerics.h"

#define DISTSCALE_EXPORT extern "C" __attribute__((visibility("default")))

namespace distscale {

// ---------------------------------------------------------------- the instruction set

enum class Isa { kPlain, kAvx2, kAvx512, kNeon };

// The best one that this CPU has; DISTSCALE_ISA may name another one of those (else: plain).
inline Isa choose_isa() {
#if defined(__x86_64__)
  const char* name = std::getenv("DISTSCALE_ISA");
  const auto may_be = [name](const char* isa) { return !name || !*name || !std::strcmp(name, isa); };
  unsigned int eax, ebx, ecx, edx;  // __builtin_cpu_supports does not know F16C in older compilers
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c;
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx512 && may_be("avx512")) return Isa::kAvx512;
  if (avx2 && may_be("avx2")) return Isa::kAvx2;
  return Isa::kPlain;
#elif defined(__aarch64__)
  return Isa::kNeon;
#else
  return Isa::kPlain;
#endif
}

inline Isa isa() {
  static const Isa chosen = choose_isa();
  return chosen;
}

// Of the tables `name`_plain and so on, as many as the platform has, the one of the instruction set.
#if defined(__x86_64__)
#define DISTSCALE_CHOOSE(name) \
  (isa() == Isa::kAvx512 ? name##_avx512 : isa() == Isa::kAvx2 ? name##_avx2 : name##_plain)
#elif defined(__aarch64__)
#define DISTSCALE_CHOOSE(name) name##_neon
#else
#define DISTSCALE_CHOOSE(name) name##_plain
#endif

// ---------------------------------------------------------------- floating point

// Rounding to nearest, and no flushing of subnormal numbers to zero, as long as it lives.
class DefaultFloats {
 public:
  DefaultFloats() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloats() { std::fesetenv(&saved_); }
  DefaultFloats(const DefaultFloats&) = delete;
  DefaultFloats& operator=(const DefaultFloats&) = delete;

 private:
  std::fenv_t saved_;
};

// ---------------------------------------------------------------- threads

constexpr i64 kBytesPerThread = 512 << 10;  // what makes up for starting one

// Calls work(i) once for every i below `count`, on at most `threads` threads; this one is the first of them.
template <class Work>
void in_parallel(i64 count, i64 bytes, i64 threads, const Work& work) {
  std::atomic<i64> next{0};
  const auto take = [&] {
    const DefaultFloats mode;
    for (i64 i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) work(i);
  };
  const i64 worthwhile = bytes / kBytesPerThread;
  if (threads > worthwhile) threads = worthwhile;
  std::vector<std::thread> others;
  try {
    for (i64 i = 1; i < threads; ++i) others.emplace_back(take);
  } catch (const std::system_error&) {
    // There may be no more threads; those that there are do all the work.
  }
  take();
  for (std::thread& other : others) other.join();
}

// An exception must not leave the library: 0, or 1 if there was no memory.
template <class Work>
i32 guarded(const Work& work) {
  try {
    work();
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

}  // namespace distscale

#endif
