// The lanes of one instruction set: conversions between vectors of fp32 and the formats of gradients.
//
// Written in the vector types of GCC and Clang, which become the instructions that the compiler may use. Only what it
// would not find (fp16, and lanes of another width) is spelled out for x86-64 and for NEON. Everything is in an
// anonymous namespace, so that no instruction set gets the code of another from the linker.
#ifndef DISTSCALE_LANES_H
#define DISTSCALE_LANES_H

#include <cstring>
#include <type_traits>

#include "numerics.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "as all the hardware that this was written for");

namespace distscale {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

template <class T, int kCount>
struct VectorOf {
  typedef T type __attribute__((vector_size(sizeof(T) * kCount)));
};
template <class T, int kCount = kLanes>
using Vector = typename VectorOf<T, kCount>::type;
using F32 = Vector<float>;
using U32 = Vector<u32>;
using U16 = Vector<u16>;
using U8 = Vector<u8>;

// Of vectors as of numbers: the same bits as another type, from and to memory of any alignment.
template <class To, class From>
inline To as(From from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <class To>
inline To load(const void* at) {
  To to;
  std::memcpy(&to, at, sizeof to);
  return to;
}

template <class From>
inline void store(void* at, From from) {
  std::memcpy(at, &from, sizeof from);
}

inline U32 all(u32 value) { return value - U32{}; }

template <class T>
inline T larger(T a, T b) {
  return a > b ? a : b;
}

// All lanes as one number: the halves of the vector together, then the halves of that, and so on.
template <class T, int kCount, class Combine>
inline T fold(Vector<T, kCount> vector, Combine combine) {
  if constexpr (kCount == 2) {
    return combine(vector[0], vector[1]);
  } else {
    using Half = Vector<T, kCount / 2>;
    Half halves[2];
    std::memcpy(halves, &vector, sizeof vector);
    return fold<T, kCount / 2>(combine(halves[0], halves[1]), combine);
  }
}

// ---------------------------------------------------------------- fp16, and lanes of another width

#if defined(__AVX512F__)

inline F32 widen_float16(U16 codes) { return as<F32>(_mm512_cvtph_ps(as<__m256i>(codes))); }
inline U16 narrow_float16(F32 values) {
  return as<U16>(_mm512_cvtps_ph(as<__m512>(values), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline U16 to_u16(U8 codes) { return as<U16>(_mm256_cvtepu8_epi16(as<__m128i>(codes))); }
inline U16 to_u16(U32 codes) { return as<U16>(_mm512_cvtepi32_epi16(as<__m512i>(codes))); }
inline U32 to_u32(U16 codes) { return as<U32>(_mm512_cvtepu16_epi32(as<__m256i>(codes))); }
inline U8 to_u8(U32 codes) { return as<U8>(_mm512_cvtepi32_epi8(as<__m512i>(codes))); }

#elif defined(__AVX2__)

inline F32 widen_float16(U16 codes) { return as<F32>(_mm256_cvtph_ps(as<__m128i>(codes))); }
inline U16 narrow_float16(F32 values) {
  return as<U16>(_mm256_cvtps_ph(as<__m256>(values), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline U16 to_u16(U8 codes) { return as<U16>(_mm_cvtepu8_epi16(_mm_cvtsi64_si128(as<long long>(codes)))); }
inline U16 to_u16(U32 codes) {
  const __m256i wide = as<__m256i>(codes);
  return as<U16>(_mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1)));
}
inline U32 to_u32(U16 codes) { return as<U32>(_mm256_cvtepu16_epi32(as<__m128i>(codes))); }
inline U8 to_u8(U32 codes) {
  const __m128i half = as<__m128i>(to_u16(codes));
  return as<U8>(static_cast<long long>(_mm_cvtsi128_si64(_mm_packus_epi16(half, half))));
}

#elif defined(__aarch64__)

inline F32 widen_float16(U16 codes) { return as<F32>(vcvt_f32_f16(as<float16x4_t>(codes))); }
inline U16 narrow_float16(F32 values) { return as<U16>(vcvt_f16_f32(as<float32x4_t>(values))); }
inline U16 to_u16(U8 codes) { return as<U16>(vget_low_u16(vmovl_u8(vcreate_u8(as<u32>(codes))))); }
inline U16 to_u16(U32 codes) { return as<U16>(vmovn_u32(as<uint32x4_t>(codes))); }
inline U32 to_u32(U16 codes) { return as<U32>(vmovl_u16(as<uint16x4_t>(codes))); }
inline U8 to_u8(U32 codes) {
  const uint16x4_t half = vmovn_u32(as<uint32x4_t>(codes));
  return as<U8>(vget_lane_u32(vreinterpret_u32_u8(vmovn_u16(vcombine_u16(half, half))), 0));
}

#else

inline U16 to_u16(U8 codes) { return __builtin_convertvector(codes, U16); }
inline U16 to_u16(U32 codes) { return __builtin_convertvector(codes, U16); }
inline U32 to_u32(U16 codes) { return __builtin_convertvector(codes, U32); }
inline U8 to_u8(U32 codes) { return __builtin_convertvector(codes, U8); }

template <class Format, bool kSaturates>
U32 narrow_small(F32 values);
inline U16 narrow_float16(F32 values) { return to_u16(narrow_small<Float16, false>(values)); }
inline F32 widen_float16(U16 codes) {
  constexpr u32 kRebase = static_cast<u32>(127 - Float16::kBias) << 23;
  constexpr u32 kSmallestNormal = kRebase + (1u << 23);
  const U32 wide = to_u32(codes);
  const U32 magnitudes = wide & Float16::kMagnitude;
  const U32 shifted = magnitudes << Float16::kShift;
  // With the hidden bit of a normal number added and taken away again, a subnormal becomes a normal number of fp32.
  const U32 subnormal = as<U32>(as<F32>(shifted + kSmallestNormal) - float_of(kSmallestNormal));
  const U32 finite = shifted < (1u << 23) ? subnormal : shifted + kRebase;
  const U32 result = magnitudes > Float16::kLargest ? shifted | kInfBits : finite;
  return as<F32>(result | (wide << 16 & kSignMask));
}

#endif

// ---------------------------------------------------------------- narrow() of numerics.h, lane by lane

template <class Format, bool kSaturates>
inline U32 narrow_small(F32 values) {
  constexpr u32 kRebase = static_cast<u32>(127 - Format::kBias) << 23;
  constexpr u32 kSmallestNormal = kRebase + (1u << 23);
  constexpr u32 kHalf = (1u << (Format::kShift - 1)) - 1;
  // A power of two whose last bit is the step between subnormals: adding it rounds to that step.
  constexpr u32 kMagic = kSmallestNormal + (static_cast<u32>(Format::kShift) << 23);
  const U32 magnitudes = as<U32>(values) & ~kSignMask;
  const U32 rebased = magnitudes - kRebase;
  const U32 normal = (rebased + kHalf + (rebased >> Format::kShift & 1)) >> Format::kShift;
  const U32 subnormal = as<U32>(as<F32>(magnitudes) + float_of(kMagic)) - kMagic;
  const U32 finite = magnitudes < kSmallestNormal ? subnormal : normal;
  constexpr u32 kInf = Format::kLargest + 1;  // or NaN, in a format without
  const U32 most = all(kSaturates ? Format::kLargest : kInf);
  const U32 nonfinite = magnitudes > kInfBits ? all(Format::kNan) : all(kInf);
  const U32 codes = magnitudes >= kInfBits ? nonfinite : finite < most ? finite : most;
  return codes | (as<U32>(values) & kSignMask) >> (32 - Format::kWidth);
}

inline U16 narrow_bfloat16(F32 values) {
  const U32 wide = as<U32>(values);
  const U32 rounded = (wide + 0x7fffu + (wide >> 16 & 1)) >> 16;
  const U32 nan = wide >> 16 | 0x40u;
  return to_u16((wide & ~kSignMask) > kInfBits ? nan : rounded);
}

// ---------------------------------------------------------------- a vector of any format in memory

template <i32 kDtype>
using Code = typename std::conditional<kDtype == kFloat32, u32,
                                       typename std::conditional<kDtype <= kBFloat16, u16, u8>::type>::type;

template <i32 kDtype>
using Packed = Vector<Code<kDtype>, kLanes * sizeof(float) / sizeof(Code<kDtype>)>;
template <i32 kDtype>
constexpr Code<kDtype> kMagnitude = static_cast<Code<kDtype>>(~Code<kDtype>{0}) >> 1;

constexpr float kE4M3Unit = 256.0f;

// One vector of the values at `at`, some of them for every `index`, in an order and with signs that do not matter to
// their squares; e4m3fn in units of kE4M3Unit, with its NaN as 480, which its code would be without that exception.
template <i32 kDtype>
inline F32 to_square(const Code<kDtype>* at, int index) {
  if constexpr (kDtype == kFloat32) {
    return load<F32>(at + index * kLanes);
  } else if constexpr (kDtype == kFloat16) {
    return widen_float16(load<U16>(at + index * kLanes));
  } else if constexpr (kDtype == kBFloat16) {
    const U32 pairs = load<U32>(at + index / 2 * (2 * kLanes));
    return as<F32>(index % 2 ? pairs & 0xffff0000u : pairs << 16);
  } else {
    const U16 pairs = load<U16>(at + index / 2 * (2 * kLanes));
    if constexpr (kDtype == kE5M2) return widen_float16(index % 2 ? pairs & 0xff00 : pairs << 8);  // fp16's upper half
    // The bits of fp16 but for the first one of the exponent, and so for its bias.
    return widen_float16((index % 2 ? pairs >> 1 : pairs << 7) & 0x3f80);
  }
}

template <i32 kDtype>
inline F32 widened(const Code<kDtype>* at) {
  if constexpr (kDtype == kFloat32) {
    return load<F32>(at);
  } else if constexpr (kDtype == kFloat16) {
    return widen_float16(load<U16>(at));
  } else if constexpr (kDtype == kBFloat16) {
    return as<F32>(to_u32(load<U16>(at)) << 16);
  } else if constexpr (kDtype == kE5M2) {
    return widen_float16(to_u16(load<U8>(at)) << 8);
  } else {
    const U16 codes = to_u16(load<U8>(at));
    const F32 values = widen_float16((codes << 7 & 0x3f80) | (codes << 8 & 0x8000)) * kE4M3Unit;
    return as<F32>(as<U32>(values) | ((as<U32>(values) & ~kSignMask) > bits_of(448.0f) ? all(kInfBits) : U32{}));
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
    store(at, to_u8(narrow_small<typename std::conditional<kDtype == kE4M3, E4M3, E5M2>::type, true>(values)));
  }
}

}  // namespace
}  // namespace distscale

#endif
