// The loops over a block of values. Compiled once for every instruction set, with DISTSCALE_ISA as its name.
#include "kernels.h"

#include "lanes.h"

namespace distscale {
namespace {

// As many sums side by side that each adds up at most 32 squares of a block: then fp32 is exact to 1e-6.
constexpr int kVectors = kLanes == 4 ? 8 : 4;
constexpr i64 kStep = kVectors * kLanes;
static_assert(kBlock / kStep <= 32 && kBlock % kStep == 0, "");

// Calls step(codes) for every kStep codes; the last ones are padded with zeros.
template <class Code, class Step>
inline void for_each_step(const void* values, i64 count, Step step) {
  constexpr u64 kLine = 64, kAhead = 4096;  // what hid the latency of memory best
  const Code* codes = static_cast<const Code*>(values);
  i64 done = 0;
  for (; done + kStep <= count; done += kStep) {
    for (u64 line = 0; line < kStep * sizeof(Code); line += kLine) {
      __builtin_prefetch(reinterpret_cast<const char*>(codes + done) + kAhead + line, 0, 2);
    }
    step(codes + done);
  }
  if (done < count) {
    Code tail[kStep] = {};
    std::memcpy(tail, codes + done, static_cast<u64>(count - done) * sizeof(Code));
    step(tail);
  }
}

// All lanes of all vectors as one number.
template <int kCount, class T, class Combine>
inline auto combined(T (&vectors)[kCount], Combine combine) {
  for (int width = kCount / 2; width; width /= 2) {
    for (int i = 0; i < width; ++i) vectors[i] = combine(vectors[i], vectors[i + width]);
  }
  return vectors[0];
}

struct Raw {
  u32 amax;        // the code of the largest magnitude
  double squares;  // of the values times a power
};

template <i32 kDtype, bool kHasPower>
inline Raw measure_raw(const void* values, i64 count, float power) {
  constexpr int kPacked = kVectors * sizeof(Code<kDtype>) / sizeof(float);  // so many vectors hold a step
  Packed<kDtype> amax[kPacked] = {};
  F32 squares[kVectors] = {};
  for_each_step<Code<kDtype>>(values, count, [&](const Code<kDtype>* at) {
#pragma GCC unroll 8
    for (int i = 0; i < kPacked; ++i) {
      amax[i] = larger(amax[i], load<Packed<kDtype>>(at + i * kStep / kPacked) & kMagnitude<kDtype>);
    }
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      const F32 value = kHasPower ? to_square<kDtype>(at, i) * power : to_square<kDtype>(at, i);
      squares[i] += value * value;
    }
  });
  const auto larger_of = [](auto a, auto b) { return larger(a, b); };
  const auto sum_of = [](auto a, auto b) { return a + b; };
  constexpr int kCodes = sizeof(Packed<kDtype>) / sizeof(Code<kDtype>);
  return {fold<Code<kDtype>, kCodes>(combined(amax, larger_of), larger_of),
          fold<double, kLanes>(__builtin_convertvector(combined(squares, sum_of), Vector<double>), sum_of)};
}

template <i32 kDtype>
Measured measure(const void* values, i64 count) {
  const Raw raw = measure_raw<kDtype, false>(values, count, 1.0f);
  Measured total = {widen(kDtype, raw.amax), raw.squares};
  if constexpr (kDtype == kFloat32 || kDtype == kBFloat16) {
    // In these formats squares may overflow fp32, or vanish in it. Up to here and from here on a block is safe.
    constexpr u32 kSmallest = (127u - 55) << 23, kLargest = (127u + 57) << 23;
    if (total.amax && total.amax < kInfBits && (total.amax < kSmallest || total.amax >= kLargest)) {
      const float power = power_for_squares(total.amax);
      total.squares = undo_power(measure_raw<kDtype, true>(values, count, power).squares, power);
    }
  } else if constexpr (kDtype == kE4M3) {
    total.squares = total.amax > kInfBits ? double_of(0x7ff8ull << 48) : total.squares * kE4M3Unit * kE4M3Unit;
  }
  return total;
}

template <i32 kDtype>
void count(const void* values, i64 count, Bounds bounds, i64* counts) {
  U32 nonfinite = {}, zero = {}, lost = {}, subnormal = {};
  for_each_step<Code<kDtype>>(values, count, [&](const Code<kDtype>* at) {
    for (int i = 0; i < kVectors; ++i) {
      const U32 magnitudes = as<U32>(widened<kDtype>(at + i * kLanes)) & ~kSignMask;
      // A comparison that holds is -1.
      nonfinite -= as<U32>(magnitudes >= kInfBits);
      zero -= as<U32>(magnitudes == 0);
      lost -= as<U32>(magnitudes <= bounds.lost);
      subnormal -= as<U32>(magnitudes <= bounds.subnormal);
    }
  });
  i64 sums[kNumCounts] = {};
  for (int lane = 0; lane < kLanes; ++lane) {
    sums[kNonfinite] += nonfinite[lane];
    sums[kZero] += zero[lane];
    sums[kLost] += lost[lane];
    sums[kSubnormal] += subnormal[lane];
  }
  const i64 padding = (kStep - count % kStep) % kStep;
  counts[kNonfinite] += sums[kNonfinite];
  counts[kZero] += sums[kZero] - padding;
  counts[kLost] += sums[kLost] - sums[kZero];
  counts[kSubnormal] += sums[kSubnormal] - sums[kLost];
}

template <i32 kDtype, i32 kOut>
void multiply(const void* values, i64 count, float factor, void* out) {
  Code<kOut>* target = static_cast<Code<kOut>*>(out);
  i64 done = 0;
  for_each_step<Code<kDtype>>(values, count, [&](const Code<kDtype>* at) {
    Code<kOut> tail[kStep];
    const i64 left = count - done;
    Code<kOut>* to = left < kStep ? tail : target + done;
    for (int i = 0; i < kVectors; ++i) narrowed<kOut>(widened<kDtype>(at + i * kLanes) * factor, to + i * kLanes);
    if (left < kStep) std::memcpy(target + done, tail, static_cast<u64>(left) * sizeof(Code<kOut>));
    done += kStep;
  });
}

u32 read(const void* bytes, i64 count) {
  U32 seen[kVectors] = {};
  for_each_step<u32>(bytes, count / 4, [&](const u32* at) {
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) seen[i] |= load<U32>(at + i * kLanes);
  });
  const auto either = [](auto a, auto b) { return a | b; };
  return fold<u32, kLanes>(combined(seen, either), either);
}

#define DISTSCALE_ROW(dtype) \
  { multiply<dtype, 0>, multiply<dtype, 1>, multiply<dtype, 2>, multiply<dtype, 3>, multiply<dtype, 4> }
#define DISTSCALE_NAME(isa) #isa
#define DISTSCALE_TABLE(isa)                                                                        \
  extern const Kernels kernels_##isa = {                                                            \
      DISTSCALE_NAME(isa),                                                                          \
      {measure<0>, measure<1>, measure<2>, measure<3>, measure<4>},                                 \
      {count<0>, count<1>, count<2>, count<3>, count<4>},                                           \
      {DISTSCALE_ROW(0), DISTSCALE_ROW(1), DISTSCALE_ROW(2), DISTSCALE_ROW(3), DISTSCALE_ROW(4)},   \
      read,                                                                                         \
  };
#define DISTSCALE_TABLE_OF(isa) DISTSCALE_TABLE(isa)

}  // namespace

DISTSCALE_TABLE_OF(DISTSCALE_ISA)

}  // namespace distscale
