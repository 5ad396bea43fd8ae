// The formats in words of four bytes, as the CUDA kernels handle them.
//
// What only some architectures have is in the small functions of the first section, each with a plain form beside it;
// the plain form runs on the host in tests/kernels.
#ifndef DISTSCALE_PACKED_CUH
#define DISTSCALE_PACKED_CUH

#include "numerics.h"

namespace distscale {
namespace {

// ---------------------------------------------------------------- what depends on the architecture

// A pointer that was read from memory could be of any kind, and a load through it would be slower.
template <class T>
__device__ __forceinline__ T* in_global_memory(T* pointer) {
#if defined(__CUDA_ARCH__)
  __builtin_assume(__isGlobal(pointer));
#endif
  return pointer;
}

__device__ __forceinline__ u32 larger(u32 a, u32 b) { return a > b ? a : b; }

constexpr u32 kWholeWarp = 0xffffffffu;

template <class T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
  for (int distance = 16; distance; distance /= 2) value += __shfl_xor_sync(kWholeWarp, value, distance);
  return value;
}

__device__ __forceinline__ u32 warp_max(u32 value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_max_sync(kWholeWarp, value);
#else
#pragma unroll
  for (int distance = 16; distance; distance /= 2)
    value = larger(value, __shfl_xor_sync(kWholeWarp, value, distance));
  return value;
#endif
}

__device__ __forceinline__ u32 larger_halves(u32 a, u32 b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  u32 both;
  asm("max.u16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
  return both;
#else
  return larger(a & 0xffff0000u, b & 0xffff0000u) | larger(a & 0xffffu, b & 0xffffu);
#endif
}

__device__ __forceinline__ void widen_halves(u32 pair, float* values) {
#if defined(__CUDA_ARCH__)
  asm("{.reg .b16 low, high;\n mov.b32 {low, high}, %2;\n cvt.f32.f16 %0, low;\n cvt.f32.f16 %1, high;}"
      : "=f"(values[0]), "=f"(values[1])
      : "r"(pair));
#else
  values[0] = float_of(Float16::widen(pair & 0xffffu));
  values[1] = float_of(Float16::widen(pair >> 16));
#endif
}

__device__ __forceinline__ void widen_e4m3(u32 four, float* values) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  u32 low, high;
  asm("{.reg .b16 a, b;\n mov.b32 {a, b}, %2;\n cvt.rn.f16x2.e4m3x2 %0, a;\n cvt.rn.f16x2.e4m3x2 %1, b;}"
      : "=r"(low), "=r"(high)
      : "r"(four));
  widen_halves(low, values);
  widen_halves(high, values + 2);
#else
  // Its bits at the place of fp32's mean 2^-120 of the value, subnormal numbers too.
  for (int i = 0; i < 4; ++i) {
    const u32 code = four >> 8 * i;
    const u32 magnitude = code & 0x7fu;
    const float value = magnitude == E4M3::kNan ? float_of(kInfBits | 1u << 22) : float_of(magnitude << 20) * 0x1p120f;
    values[i] = float_of(bits_of(value) | (code & 0x80u) << 24);
  }
#endif
}

// Two values in the format of 16 bits, the first in the lower half.
__device__ __forceinline__ u32 narrow_to_halves(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
#else
  return Float16::narrow(bits_of(first), false) | Float16::narrow(bits_of(second), false) << 16;
#endif
}

__device__ __forceinline__ u32 narrow_to_bfloat16s(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
#else
  return narrow_bfloat16(bits_of(first)) | narrow_bfloat16(bits_of(second)) << 16;
#endif
}

// As narrow(), but with fewer instructions: 16 of them stand side by side in the kernel.
template <class F>
__device__ __forceinline__ u32 narrow_to_byte(float value) {
  constexpr u32 kRebase = static_cast<u32>(127 - F::kBias) << 23;
  constexpr u32 kLargest = kRebase + (F::kLargest << F::kShift);
  const u32 magnitude = bits_of(value) & ~kSignMask;
  const u32 clamped = magnitude < kLargest ? magnitude : kLargest;
  u32 code = (clamped - kRebase + (1u << (F::kShift - 1)) - 1 + (clamped >> F::kShift & 1)) >> F::kShift;
  if (clamped < kRebase + (1u << 23)) {
    // A subnormal: added to this number, whose last bit is worth as much as the format's, it is rounded to that bit.
    const u32 same_step = kRebase + (static_cast<u32>(F::kShift + 1) << 23);
    code = bits_of(float_of(clamped) + float_of(same_step)) - same_step;
  }
  if (magnitude >= kInfBits) code = F::kInf <= F::kLargest || magnitude > kInfBits ? F::kNan : F::kInf;
  return code | (bits_of(value) & kSignMask) >> 24;
}

// Two values in an FP8 format, the first in the lower byte. The hardware saturates inf too, which must stay visible.
template <i32 D>
__device__ __forceinline__ u32 narrow_to_bytes(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  u16 pair;
  if constexpr (D == kE4M3) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  }
  constexpr u32 kCode = D == kE4M3 ? E4M3::kNan : E5M2::kInf;
  u32 codes = pair;
  if ((bits_of(first) & ~kSignMask) == kInfBits) codes = (codes & 0xff80u) | kCode;
  if ((bits_of(second) & ~kSignMask) == kInfBits) codes = (codes & 0x80ffu) | kCode << 8;
  return codes;
#else
  using F = Small<D == kE4M3 ? 4 : 5, D == kE4M3 ? 3 : 2, D == kE5M2>;
  return narrow_to_byte<F>(first) | narrow_to_byte<F>(second) << 8;
#endif
}

// ---------------------------------------------------------------- a format, four bytes at a time

template <i32 D>
struct Format {
  static constexpr i32 kDtype = D;
  static constexpr int kSize = D == kFloat32 ? 4 : D <= kBFloat16 ? 2 : 1;
  static constexpr int kWidth = 8 * kSize;
  static constexpr int kPerWord = 4 / kSize;
  static constexpr int kPerVector = 16 / kSize;
  static constexpr u32 kSigns = kSize == 4 ? kSignMask : kSize == 2 ? 0x80008000u : 0x80808080u;
  static constexpr u32 kLargest = D == kFloat32    ? kInfBits - 1
                                  : D == kFloat16  ? Float16::kLargest
                                  : D == kBFloat16 ? (kInfBits >> 16) - 1
                                  : D == kE4M3     ? E4M3::kLargest
                                                   : E5M2::kLargest;
  // The squares of the others fit fp32 as they are.
  static constexpr bool kNeedsPower = D == kFloat32 || D == kBFloat16;

  // Joins the magnitudes of a word to a running maximum: one number, or one in each half; of FP8 in its upper byte.
  static __device__ __forceinline__ u32 join(u32 running, u32 word) {
    if constexpr (kSize == 4) return larger(running, word & ~kSigns);
    if constexpr (kSize == 2) return larger_halves(running, word & ~kSigns);
    return larger_halves(larger_halves(running, word & 0x7f007f00u), word << 8 & 0x7f007f00u);
  }

  // The largest magnitude of a running maximum, as a code of the format.
  static __device__ __forceinline__ u32 largest(u32 running) {
    if constexpr (kSize == 4) return running;
    return larger(running >> 16, running & 0xffffu) >> (kSize == 2 ? 0 : 8);
  }

  static __device__ __forceinline__ void widen_word(u32 word, float* values) {
    if constexpr (D == kFloat32) {
      values[0] = float_of(word);
    } else if constexpr (D == kBFloat16) {
      values[0] = float_of(word << 16);
      values[1] = float_of(word & 0xffff0000u);
    } else if constexpr (D == kFloat16) {
      widen_halves(word, values);
    } else if constexpr (D == kE4M3) {
      widen_e4m3(word, values);
    } else {  // the upper half of an fp16 each
      widen_halves((word << 8 & 0xff00u) | (word << 16 & 0xff000000u), values);
      widen_halves((word >> 8 & 0xff00u) | (word & 0xff000000u), values + 2);
    }
  }

  static __device__ __forceinline__ u32 narrow_word(const float* values) {
    if constexpr (D == kFloat32) return bits_of(values[0]);
    if constexpr (D == kFloat16) return narrow_to_halves(values[0], values[1]);
    if constexpr (D == kBFloat16) return narrow_to_bfloat16s(values[0], values[1]);
    if constexpr (kSize == 1)
      return narrow_to_bytes<D>(values[0], values[1]) | narrow_to_bytes<D>(values[2], values[3]) << 16;
  }

  static __device__ __forceinline__ u32 load(const void* from, i64 index) {
    if constexpr (kSize == 4) return static_cast<const u32*>(from)[index];
    if constexpr (kSize == 2) return static_cast<const u16*>(from)[index];
    return static_cast<const u8*>(from)[index];
  }

  static __device__ __forceinline__ void store(void* to, i64 index, u32 code) {
    if constexpr (kSize == 4) static_cast<u32*>(to)[index] = code;
    if constexpr (kSize == 2) static_cast<u16*>(to)[index] = static_cast<u16>(code);
    if constexpr (kSize == 1) static_cast<u8*>(to)[index] = static_cast<u8>(code);
  }
};

}  // namespace
}  // namespace distscale

#endif
