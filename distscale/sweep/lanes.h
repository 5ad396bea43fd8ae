// The lanes of one instruction set: conversions between vectors of fp32 and the formats of gradients.
//
// Written in the vector types of GCC and Clang, which the compiler turns into the instructions that it may use; only
// fp16 needs to be told which. Everything is in an anonymous namespace, so that no instruction set gets the code of
// another from the linker.
#ifndef DISTSCALE_LANES_H
#define DISTSCALE_LANES_H

#include <cstring>
#include <type_traits>

#include "numerics.h"

#if defined(__F16C__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "a tail in a buffer and the upper half of a code assume it");

namespace distscale {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float F32 __attribute__((vector_size(4 * kLanes)));
typedef u32 U32 __attribute__((vector_size(4 * kLanes)));
typedef u16 U16 __attribute__((vector_size(2 * kLanes)));
typedef u8 U8 __attribute__((vector_size(kLanes)));

template <class Vector>
inline Vector load(const void* at) {
  Vector vector;
  std::memcpy(&vector, at, sizeof vector);
  return vector;
}

template <class Vector>
inline void store(void* at, Vector vector) {
  std::memcpy(at, &vector, sizeof vector);
}

inline U32 bits(F32 values) { return reinterpret_cast<U32>(values); }
inline F32 floats(U32 bits) { return reinterpret_cast<F32>(bits); }
inline F32 all(float value) { return value - F32{}; }  // {} is 0: a broadcast
inline U32 all(u32 value) { return value - U32{}; }

// Of magnitudes, which have no sign.
inline U32 larger(U32 a, U32 b) { return a > b ? a : b; }
inline U32 smaller(U32 a, U32 b) { return a < b ? a : b; }

// ---------------------------------------------------------------- the formats of numerics.h, lane by lane

template <class Format>
inline F32 widen_lanes(U32 codes) {
  constexpr u32 kRebase = static_cast<u32>(127 - Format::kBias) << 23;
  constexpr u32 kStep = kRebase + (1u << 23);  // the smallest normal number
  const U32 magnitudes = codes & Format::kMagnitude;
  const U32 shifted = magnitudes << Format::kShift;
  // With a hidden bit added and taken away again, a subnormal becomes a normal number of fp32.
  const U32 subnormal = bits(floats(shifted + kStep) - floats(all(kStep)));
  const U32 finite = shifted < (1u << 23) ? subnormal : shifted + kRebase;
  const U32 result = magnitudes > Format::kLargest ? shifted | kInfBits : finite;
  return floats(result | (codes << (32 - Format::kWidth) & kSignMask));
}

template <class Format, bool kSaturates>
inline U32 narrow_lanes(F32 values) {
  constexpr u32 kRebase = static_cast<u32>(127 - Format::kBias) << 23;
  constexpr u32 kSmallestNormal = kRebase + (1u << 23);
  // A power of two whose last bit is the step between subnormals: the addition rounds to it.
  constexpr u32 kMagic = kSmallestNormal + (static_cast<u32>(Format::kShift) << 23);
  constexpr u32 kHalf = (1u << (Format::kShift - 1)) - 1;
  const U32 magnitudes = bits(values) & ~kSignMask;
  const U32 rebased = magnitudes - kRebase;
  const U32 normal = (rebased + kHalf + (rebased >> Format::kShift & 1)) >> Format::kShift;
  const U32 subnormal = bits(floats(magnitudes) + floats(all(kMagic))) - kMagic;
  U32 codes = magnitudes < kSmallestNormal ? subnormal : normal;
  if (kSaturates) {
    codes = smaller(codes, all(Format::kLargest));
  } else {
    codes = smaller(codes, all(Format::kInf));
  }
  const U32 nonfinite = magnitudes > kInfBits ? all(Format::kNan) : all(Format::kLargest + 1);  // inf, or NaN
  codes = magnitudes >= kInfBits ? nonfinite : codes;
  return codes | (bits(values) & kSignMask) >> (32 - Format::kWidth);
}

inline F32 widen_float16(U16 codes) {
#if defined(__AVX512F__)
  // The masks are of no effect; without them, GCC 12 warns of its own header.
  return reinterpret_cast<F32>(_mm512_maskz_cvtph_ps(0xffff, reinterpret_cast<__m256i>(codes)));
#elif defined(__F16C__)
  return reinterpret_cast<F32>(_mm256_cvtph_ps(reinterpret_cast<__m128i>(codes)));
#elif defined(__aarch64__)
  return reinterpret_cast<F32>(vcvt_f32_f16(reinterpret_cast<float16x4_t>(codes)));
#else
  return widen_lanes<Float16>(__builtin_convertvector(codes, U32));
#endif
}

inline U16 narrow_float16(F32 values) {
#if defined(__AVX512F__)
  return reinterpret_cast<U16>(
      _mm512_maskz_cvtps_ph(0xffff, reinterpret_cast<__m512>(values), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  return reinterpret_cast<U16>(_mm256_cvtps_ph(reinterpret_cast<__m256>(values), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
  return reinterpret_cast<U16>(vcvt_f16_f32(reinterpret_cast<float32x4_t>(values)));
#else
  return __builtin_convertvector((narrow_lanes<Float16, false>(values)), U16);
#endif
}

inline U16 narrow_bfloat16(F32 values) {
  const U32 wide = bits(values);
  const U32 nan = wide >> 16 | 0x40u;
  const U32 rounded = (wide + 0x7fffu + (wide >> 16 & 1)) >> 16;
  return __builtin_convertvector((wide & ~kSignMask) > kInfBits ? nan : rounded, U16);
}

// ---------------------------------------------------------------- a vector of any format in memory

template <i32 kDtype> struct CodeOf { using type = u8; };
template <> struct CodeOf<kFloat32> { using type = u32; };
template <> struct CodeOf<kFloat16> { using type = u16; };
template <> struct CodeOf<kBFloat16> { using type = u16; };
template <i32 kDtype> using Code = typename CodeOf<kDtype>::type;

// The values at `at`.
template <i32 kDtype>
inline F32 widened(const Code<kDtype>* at) {
  if constexpr (kDtype == kFloat32) {
    return load<F32>(at);
  } else if constexpr (kDtype == kFloat16) {
    return widen_float16(load<U16>(at));
  } else if constexpr (kDtype == kBFloat16) {
    return floats(__builtin_convertvector(load<U16>(at), U32) << 16);
  } else if constexpr (kDtype == kE5M2) {
    return widen_float16(__builtin_convertvector(load<U8>(at), U16) << 8);
  } else {
    return widen_lanes<E4M3>(__builtin_convertvector(load<U8>(at), U32));
  }
}

template <i32 kDtype>
inline void narrowed(F32 values, Code<kDtype>* at) {
  if constexpr (kDtype == kFloat32) {
    store(at, values);
  } else if constexpr (kDtype == kFloat16) {
    store(at, narrow_float16(values));
  } else if constexpr (kDtype == kBFloat16) {
    store(at, narrow_bfloat16(values));
  } else {
    using Format = typename std::conditional<kDtype == kE4M3, E4M3, E5M2>::type;
    store(at, __builtin_convertvector((narrow_lanes<Format, true>(values)), U8));
  }
}

}  // namespace
}  // namespace distscale

#endif
