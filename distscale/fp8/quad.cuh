// The four values that a thread of wire.cu takes at a time: out of rows, to FP8, into a message, and out of it again.
#ifndef DISTSCALE_QUAD_CUH
#define DISTSCALE_QUAD_CUH

#include "packed.cuh"
#include "wire.h"

#ifndef DISTSCALE_THREADS
#define DISTSCALE_THREADS 256  // of a block; cuda.py says the same
#endif

namespace distscale {
namespace wire {
namespace {

constexpr int kThreads = DISTSCALE_THREADS;
constexpr int kWarps = kThreads / 32;
constexpr int kQuad = 4;      // values of a thread
constexpr int kInFlight = 4;  // quads that a thread loads at once
constexpr u32 kNan = 0x7f;  // in either format; its sign means nothing
static_assert(32 * kQuad == kBlock, "a warp takes a block");

__device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x % 32); }

// ---------------------------------------------------------------- values in rows

// Up to four values, of which those that are not there are 0.
template <i32 D>
__device__ __forceinline__ void load(const void* rows, i64 index, i64 count, float (&values)[kQuad]) {
  using F = Format<D>;
  const u8* const from = static_cast<const u8*>(rows) + index * F::kSize;
  if (count >= kQuad && reinterpret_cast<u64>(from) % (kQuad * F::kSize) == 0) {
    if constexpr (F::kSize == 4) {
      const uint4 words = *reinterpret_cast<const uint4*>(from);
      values[0] = float_of(words.x);
      values[1] = float_of(words.y);
      values[2] = float_of(words.z);
      values[3] = float_of(words.w);
    } else {
      const u64 words = *reinterpret_cast<const u64*>(from);
      F::widen_word(static_cast<u32>(words), values);
      F::widen_word(static_cast<u32>(words >> 32), values + 2);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kQuad; ++i) values[i] = i < count ? float_of(widen(D, F::load(from, i))) : 0.0f;
}

__device__ __forceinline__ u32 magnitude_of(float value) { return bits_of(value) & ~kSignMask; }

__device__ __forceinline__ u32 amax_of(const float (&values)[kQuad]) {
  return larger(larger(magnitude_of(values[0]), magnitude_of(values[1])),
                larger(magnitude_of(values[2]), magnitude_of(values[3])));
}

// Calls use(values, index of the first within the run, number of values, at most 4) for all of a run. Every lane of a
// warp makes as many calls, some of them with no value.
template <i32 D, class Use>
__device__ __forceinline__ void for_each_quad(const Message& message, const Run& run, const void* rows, Use use) {
  const i64 place = place_of(message, run);
  const i64 first = static_cast<i64>(threadIdx.x / 32) * kBlock;
  for (i64 begin = first; begin < run.count; begin += kWarps * kBlock * kInFlight) {
    float values[kInFlight][kQuad];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const i64 at = begin + k * kWarps * kBlock + lane() * kQuad;
      load<D>(rows, place + at, run.count - at, values[k]);
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const i64 block = begin + k * kWarps * kBlock;
      if (block >= run.count) break;  // for the whole warp
      const i64 left = run.count - block - lane() * kQuad;
      use(values[k], block + lane() * kQuad, left < kQuad ? static_cast<int>(left < 0 ? 0 : left) : kQuad);
    }
  }
}

// Calls use(format) with that of the rows.
template <class Use>
__device__ __forceinline__ void with_format_of_rows(i32 dtype, Use use) {
  switch (dtype) {
    case kFloat32: return use(Format<kFloat32>{});
    case kFloat16: return use(Format<kFloat16>{});
    default: return use(Format<kBFloat16>{});
  }
}

// ---------------------------------------------------------------- to FP8

// rounding.py: round_stochastically, of a magnitude up to the largest of the format; as a code.
template <class Small>
__device__ __forceinline__ u32 narrow_randomly(u32 magnitude, u32 random) {
  constexpr int kMantissa = 23 - Small::kShift;
  constexpr u32 kLowest = 128 - Small::kBias;  // exponent of the smallest normal number
  const u32 exponent = larger(magnitude >> 23, kLowest);
  const float per_ulp = float_of((254 + kMantissa - exponent) << 23);
  const float uniform = static_cast<float>(random >> (32 - Small::kShift)) * float_of((127u - Small::kShift) << 23);
  const u32 ulps = static_cast<u32>(__fadd_rn(__fmul_rn(float_of(magnitude), per_ulp), uniform));
  return ulps + ((exponent - kLowest) << kMantissa);
}

struct Cast {
  float factor;
  i64 key;
  u32 num_beyond = 0;

  // Four codes; `place` is that of the first value in all rows.
  template <i32 D>
  __device__ __forceinline__ u32 operator()(const float (&values)[kQuad], i64 place) {
    using Small = distscale::Small<D == kE4M3 ? 4 : 5, D == kE4M3 ? 3 : 2, D == kE5M2>;
    constexpr u32 kLargest = ((127u - Small::kBias) << 23) + (Small::kLargest << Small::kShift);
    float clamped[kQuad];
    u32 nan = 0;  // the bytes that are
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      const float scaled = __fmul_rn(values[i], factor);
      const u32 magnitude = magnitude_of(scaled);
      const bool is_nan = magnitude_of(values[i]) >= kInfBits || magnitude > kInfBits;
      if (is_nan) nan |= 0xffu << 8 * i;
      num_beyond += !is_nan && magnitude > kLargest;
      clamped[i] = float_of((magnitude < kLargest ? magnitude : kLargest) | (bits_of(scaled) & kSignMask));
    }
    u32 codes = 0;
    if (key == kToNearest) {
      codes = Format<D>::narrow_word(clamped);
    } else {
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
        const u32 random = mixed(mixed(static_cast<u32>(place + i)) ^ static_cast<u32>(key));
        const u32 code = narrow_randomly<Small>(magnitude_of(clamped[i]), random);
        codes |= (code | (bits_of(clamped[i]) & kSignMask) >> 24) << 8 * i;
      }
    }
    return (codes & ~nan) | (kNan * 0x01010101u & nan);
  }
};

// ---------------------------------------------------------------- messages

// Stores codes of which the first `count` are values, at an address that is a multiple of their size.
template <class Codes>
__device__ __forceinline__ void store(u8* to, Codes codes, int count) {
  constexpr int kSize = sizeof(Codes) / kQuad;
  if (count == kQuad) {
    *reinterpret_cast<Codes*>(to) = codes;
    return;
  }
  for (int i = 0; i < count * kSize; ++i) to[i] = static_cast<u8>(codes >> 8 * i);
}

// Four values of a message. Its last ones are followed by zeros up to a multiple of 16 bytes.
template <i32 D>
__device__ __forceinline__ void decode(const u8* from, float (&values)[kQuad]) {
  if constexpr (D == kBFloat16) {
    const u64 words = *reinterpret_cast<const u64*>(from);
    Format<D>::widen_word(static_cast<u32>(words), values);
    Format<D>::widen_word(static_cast<u32>(words >> 32), values + 2);
  } else {
    Format<D>::widen_word(*reinterpret_cast<const u32*>(from), values);
  }
}

}  // namespace
}  // namespace wire
}  // namespace distscale

#endif
