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
  const Code* codes = static_cast<const Code*>(values);
  i64 done = 0;
  for (; done + kStep <= count; done += kStep) step(codes + done);
  if (done < count) {
    Code tail[kStep] = {};
    std::memcpy(tail, codes + done, static_cast<u64>(count - done) * sizeof(Code));
    step(tail);
  }
}

// The amax of the values times `power`, and the sum of the squares of these.
template <i32 kDtype>
inline Measured measure_times(const void* values, i64 count, float power) {
  U32 amax[kVectors] = {};
  F32 squares[kVectors] = {};
  for_each_step<Code<kDtype>>(values, count, [&](const Code<kDtype>* at) {
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) {
      const F32 value = widened<kDtype>(at + i * kLanes);
      amax[i] = larger(amax[i], bits(value) & ~kSignMask);
      const F32 scaled = kDtype == kFloat32 || kDtype == kBFloat16 ? value * power : value;
      squares[i] += scaled * scaled;
    }
  });
  Measured total = {0, 0.0};
  for (int i = 0; i < kVectors; ++i) {
    for (int lane = 0; lane < kLanes; ++lane) {
      total.amax = amax[i][lane] > total.amax ? amax[i][lane] : total.amax;
      total.squares += static_cast<double>(squares[i][lane]);
    }
  }
  return total;
}

template <i32 kDtype>
Measured measure(const void* values, i64 count) {
  Measured total = measure_times<kDtype>(values, count, 1.0f);
  if constexpr (kDtype == kFloat32 || kDtype == kBFloat16) {
    // Only in these formats squares may overflow fp32, or vanish.
    constexpr u32 kSmallest = (127u - 55) << 23, kLargest = (127u + 57) << 23;
    if (total.amax && total.amax < kInfBits && (total.amax < kSmallest || total.amax >= kLargest)) {
      const float power = power_for_squares(total.amax);
      total.squares = undo_power(measure_times<kDtype>(values, count, power).squares, power);
    }
  }
  return total;
}

template <i32 kDtype>
void count(const void* values, i64 count, Bounds bounds, i64* counts) {
  U32 nonfinite = {}, zero = {}, lost = {}, subnormal = {};
  for_each_step<Code<kDtype>>(values, count, [&](const Code<kDtype>* at) {
    for (int i = 0; i < kVectors; ++i) {
      const U32 magnitudes = bits(widened<kDtype>(at + i * kLanes)) & ~kSignMask;
      // A comparison that holds is -1.
      nonfinite -= reinterpret_cast<U32>(magnitudes >= kInfBits);
      zero -= reinterpret_cast<U32>(magnitudes == 0);
      lost -= reinterpret_cast<U32>(magnitudes <= bounds.lost);
      subnormal -= reinterpret_cast<U32>(magnitudes <= bounds.subnormal);
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
  U32 all[kVectors] = {};
  for_each_step<u32>(bytes, count / 4, [&](const u32* at) {
#pragma GCC unroll 8
    for (int i = 0; i < kVectors; ++i) all[i] |= load<U32>(at + i * kLanes);
  });
  u32 result = 0;
  for (int i = 0; i < kVectors; ++i) {
    for (int lane = 0; lane < kLanes; ++lane) result |= all[i][lane];
  }
  return result;
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
