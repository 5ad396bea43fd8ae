// The formats of gradients, fp32 with fp16, bf16, e4m3fn and e5m2, in integer arithmetic alone, so that neither a
// flush-to-zero mode nor the hardware's idea of NaN matters; and the arithmetic that ends a sweep.
//
// Compiled for the host, once for every instruction set, and for CUDA. All functions are static: with external linkage
// the linker could keep the copy that was compiled for AVX-512 and run it everywhere.
#ifndef DISTSCALE_NUMERICS_H
#define DISTSCALE_NUMERICS_H

#if defined(__CUDACC__)
#define DISTSCALE_FN static __device__ __forceinline__
#else
#define DISTSCALE_FN static inline
#endif

namespace distscale {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i32 = int;
using i64 = long long;

// Equal to the codes in plan.py.
enum Dtype : i32 { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kE4M3 = 3, kE5M2 = 4 };

constexpr u32 kSignMask = 0x80000000u;
constexpr u32 kInfBits = 0x7f800000u;  // NaN lies above, every finite value below
constexpr double kFloat32Max = 3.4028234663852886e38;

#if defined(__CUDACC__)
DISTSCALE_FN u32 bits_of(float value) { return __float_as_uint(value); }
DISTSCALE_FN float float_of(u32 bits) { return __uint_as_float(bits); }
DISTSCALE_FN u64 bits_of(double value) { return static_cast<u64>(__double_as_longlong(value)); }
DISTSCALE_FN double double_of(u64 bits) { return __longlong_as_double(static_cast<i64>(bits)); }
#else
DISTSCALE_FN u32 bits_of(float value) { return __builtin_bit_cast(u32, value); }
DISTSCALE_FN float float_of(u32 bits) { return __builtin_bit_cast(float, bits); }
DISTSCALE_FN u64 bits_of(double value) { return __builtin_bit_cast(u64, value); }
DISTSCALE_FN double double_of(u64 bits) { return __builtin_bit_cast(double, bits); }
#endif

// ---------------------------------------------------------------- small formats as the bits of fp32

// A format of 1 + Exponent + Mantissa bits. One with HasInf is IEEE's; one without (e4m3fn) has NaN at the code of
// all ones alone, and finite values up to there.
template <int Exponent, int Mantissa, bool HasInf>
struct Small {
  static constexpr int kWidth = 1 + Exponent + Mantissa;
  static constexpr int kBias = (1 << (Exponent - 1)) - 1;
  static constexpr int kShift = 23 - Mantissa;
  static constexpr u32 kMagnitude = (1u << (kWidth - 1)) - 1;  // of a code: all but the sign
  static constexpr u32 kInf = ((1u << Exponent) - 1) << Mantissa;
  static constexpr u32 kLargest = HasInf ? kInf - 1 : kMagnitude - 1;
  static constexpr u32 kNan = HasInf ? kInf | 1u << (Mantissa - 1) : kMagnitude;

  // Exact.
  DISTSCALE_FN u32 widen(u32 code) {
    const u32 sign = (code << (32 - kWidth)) & kSignMask;
    const u32 magnitude = code & kMagnitude;
    if (magnitude > kLargest) return sign | (HasInf && magnitude == kInf ? kInfBits : kInfBits | magnitude << kShift);
    if (magnitude >> Mantissa) return sign | ((magnitude << kShift) + (static_cast<u32>(127 - kBias) << 23));
    if (magnitude == 0) return sign;
    // A subnormal: its highest bit becomes the hidden one.
    int high = Mantissa - 1;
    while (!(magnitude >> high)) --high;
    return sign | static_cast<u32>(127 - kBias + 1 - Mantissa + high) << 23 | ((magnitude << (23 - high)) & 0x7fffffu);
  }

  // Rounds to nearest, ties to even. A finite value that is too large becomes inf, or the largest finite one if
  // `saturates`; inf and NaN never become finite: without a code for inf, it becomes NaN.
  DISTSCALE_FN u32 narrow(u32 bits, bool saturates) {
    const u32 sign = (bits & kSignMask) >> (32 - kWidth);
    const u32 magnitude = bits & ~kSignMask;
    if (magnitude >= kInfBits) return sign | (HasInf && magnitude == kInfBits ? kInf : kNan);
    const int exponent = static_cast<int>(magnitude >> 23) - 127 + kBias;
    u32 code;
    if (exponent > 0) {
      const u32 rebased = magnitude - (static_cast<u32>(127 - kBias) << 23);
      code = (rebased + (1u << (kShift - 1)) - 1 + (rebased >> kShift & 1)) >> kShift;
    } else {
      const int shift = kShift + 1 - exponent;
      if (shift > 24) return sign;  // below half of the smallest subnormal
      const u32 mantissa = (magnitude & 0x7fffffu) | 0x800000u;  // fp32 subnormals were returned as zero above
      code = (mantissa + (1u << (shift - 1)) - 1 + (mantissa >> shift & 1)) >> shift;
    }
    if (code > kLargest) code = saturates ? kLargest : HasInf ? kInf : kNan;
    return sign | code;
  }
};

using Float16 = Small<5, 10, true>;
using E4M3 = Small<4, 3, false>;
using E5M2 = Small<5, 2, true>;

// bf16 has the exponent of fp32, so that a subnormal of the one is a subnormal of the other.
DISTSCALE_FN u32 widen_bfloat16(u32 code) { return code << 16; }
DISTSCALE_FN u32 narrow_bfloat16(u32 bits) {
  if ((bits & ~kSignMask) > kInfBits) return bits >> 16 | 0x40u;
  return (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}

DISTSCALE_FN u32 widen(i32 dtype, u32 code) {
  switch (dtype) {
    case kFloat16: return Float16::widen(code);
    case kBFloat16: return widen_bfloat16(code);
    case kE4M3: return E4M3::widen(code);
    case kE5M2: return E5M2::widen(code);
    default: return code;
  }
}

// FP8 saturates; fp16 and bf16 become inf, so that an overflow stays visible where the format can show it.
DISTSCALE_FN u32 narrow(i32 dtype, u32 bits) {
  switch (dtype) {
    case kFloat16: return Float16::narrow(bits, false);
    case kBFloat16: return narrow_bfloat16(bits);
    case kE4M3: return E4M3::narrow(bits, true);
    case kE5M2: return E5M2::narrow(bits, true);
    default: return bits;
  }
}

DISTSCALE_FN int size_of(i32 dtype) { return dtype == kFloat32 ? 4 : dtype <= kBFloat16 ? 2 : 1; }

// ---------------------------------------------------------------- squares that neither overflow nor vanish

// A power of two that brings values of at most `amax_bits` into [0, 4], and the largest of them to 1 or more, so that
// the squares of a few thousand add up in fp32. The sum is divided by its square afterwards, in double.
DISTSCALE_FN float power_for_squares(u32 amax_bits) {
  const i32 bits = static_cast<i32>(254u << 23) - static_cast<i32>(amax_bits & kInfBits);
  return float_of(static_cast<u32>(bits < (1 << 23) ? 1 << 23 : bits));
}

DISTSCALE_FN double undo_power(double sum_of_squares, float power) {
  const i64 exponent = static_cast<i64>(bits_of(power) >> 23) - 127;
  return sum_of_squares * double_of(static_cast<u64>(1023 - 2 * exponent) << 52);
}

// ---------------------------------------------------------------- the end of a sweep

DISTSCALE_FN double largest_of(i32 dtype) {
  switch (dtype) {
    case kFloat16: return 65504.0;
    case kBFloat16: return 3.3895313892515355e38;
    case kE4M3: return 448.0;
    case kE5M2: return 57344.0;
    default: return kFloat32Max;
  }
}

// Bits of amax * factor, rounded to nearest; of inf if that is more than `largest`.
DISTSCALE_FN u32 unscaled_amax(u32 amax_bits, double factor, double largest) {
  if (amax_bits >= kInfBits) return amax_bits;
  const double unscaled = static_cast<double>(float_of(amax_bits)) * factor;
  return unscaled <= largest ? bits_of(static_cast<float>(unscaled)) : kInfBits;
}

// Bits of the largest finite fp32 value that is at most `limit` (or less than it); 0 if that is not above 0.
DISTSCALE_FN u32 largest_up_to(double limit, bool inclusive) {
  if (!(limit > 0.0)) return 0;  // NaN too
  if (limit > kFloat32Max) return kInfBits - 1;
  const float nearest = static_cast<float>(limit);
  const double back = static_cast<double>(nearest);
  return bits_of(nearest) - ((back > limit || (!inclusive && back == limit)) ? 1u : 0u);
}

}  // namespace distscale

#endif
