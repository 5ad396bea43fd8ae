// The loops over values of messages. Compiled once for every instruction set, with DISTSCALE_ISA as its name, and
// without fused multiplication and addition: torch rounds in between.
#include "wire_kernels.h"

#include "lanes.h"

namespace distscale {
namespace wire {
namespace {

using I32 = Vector<i32>;

// Calls step(codes, index of the first) for every vector; the last one is padded with zeros.
template <class Code, class Step>
inline void for_each_vector(const void* values, i64 count, Step step) {
  const Code* codes = static_cast<const Code*>(values);
  i64 done = 0;
  for (; done + kLanes <= count; done += kLanes) step(codes + done, done);
  if (done < count) {
    Code tail[kLanes] = {};
    std::memcpy(tail, codes + done, static_cast<u64>(count - done) * sizeof(Code));
    step(tail, done);
  }
}

// Of a vector's codes, those that belong to the `count` values.
template <class Code>
inline void put(Code* out, i64 at, i64 count, const Code* codes) {
  if (count - at >= kLanes) {
    std::memcpy(out + at, codes, sizeof(Code) * kLanes);
  } else {
    std::memcpy(out + at, codes, sizeof(Code) * static_cast<u64>(count - at));
  }
}

inline U32 magnitudes_of(F32 values) { return as<U32>(values) & ~kSignMask; }

inline U32 indices() {
  U32 lanes = {};
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = static_cast<u32>(lane);
  return lanes;
}

// rounding.py: round_stochastically, of magnitudes up to the largest of the format; as codes.
template <class Format>
inline U32 narrow_randomly(U32 magnitudes, U32 random) {
  constexpr int kMantissa = 23 - Format::kShift;
  constexpr u32 kLowest = 128 - Format::kBias;  // exponent of the smallest normal number
  const U32 exponents = larger(magnitudes >> 23, all(kLowest));
  const F32 per_ulp = as<F32>((254 + kMantissa - exponents) << 23);
  const F32 uniform = __builtin_convertvector(as<I32>(random >> (32 - Format::kShift)), F32) *
                      float_of((127u - Format::kShift) << 23);
  const I32 ulps = __builtin_convertvector(as<F32>(magnitudes) * per_ulp + uniform, I32);
  return as<U32>(ulps) + ((exponents - kLowest) << kMantissa);
}

template <i32 kDtype, i32 kFp8, bool kRandomly>
Seen encode(const void* values, i64 count, Cast cast, u8* codes) {
  using Format = typename std::conditional<kFp8 == kE4M3, E4M3, E5M2>::type;
  constexpr u32 kNan = 0x7f;  // in either format; its sign means nothing
  const U32 largest = all(Format::widen(Format::kLargest));
  const U32 places = cast.place + indices();
  U32 amax = {}, num_beyond = {};
  for_each_vector<Code<kDtype>>(values, count, [&](const Code<kDtype>* at, i64 done) {
    const F32 value = widened<kDtype>(at);
    const U32 magnitudes = magnitudes_of(value);
    amax = larger(amax, magnitudes);
    const F32 scaled = value * cast.factor;
    const U32 to_be = magnitudes_of(scaled);
    const U32 is_nan = as<U32>(magnitudes >= kInfBits) | as<U32>(to_be > kInfBits);
    num_beyond -= as<U32>(to_be > largest) & ~is_nan;  // a comparison that holds is -1
    const U32 clamped = to_be > largest ? largest : to_be;
    U32 narrow;
    if constexpr (kRandomly) {
      narrow = narrow_randomly<Format>(clamped, mixed(mixed(places + static_cast<u32>(done)) ^ cast.key));
    } else {
      narrow = narrow_small<Format, true>(as<F32>(clamped));
    }
    narrow |= as<U32>(scaled) >> 24 & 0x80u;
    const U8 bytes = to_u8(is_nan ? all(kNan) : narrow);
    put(codes, done, count, reinterpret_cast<const u8*>(&bytes));
  });
  Seen seen = {fold<u32, kLanes>(amax, [](auto a, auto b) { return larger(a, b); }), 0};
  for (int lane = 0; lane < kLanes; ++lane) seen.num_beyond += num_beyond[lane];
  return seen;
}

template <i32 kDtype>
u32 amax(const void* values, i64 count) {
  U32 most = {};
  for_each_vector<Code<kDtype>>(values, count, [&](const Code<kDtype>* at, i64) {
    most = larger(most, magnitudes_of(widened<kDtype>(at)));
  });
  return fold<u32, kLanes>(most, [](auto a, auto b) { return larger(a, b); });
}

template <i32 kDtype>
void to_bfloat16(const void* values, i64 count, u8* codes) {
  for_each_vector<Code<kDtype>>(values, count, [&](const Code<kDtype>* at, i64 done) {
    const U16 narrow = narrow_bfloat16(widened<kDtype>(at));
    put(reinterpret_cast<u16*>(codes), done, count, reinterpret_cast<const u16*>(&narrow));
  });
}

template <i32 kDtype>
void add(const u8* codes, i64 count, float scale_inv, float* total) {
  for_each_vector<Code<kDtype>>(codes, count, [&](const Code<kDtype>* at, i64 done) {
    const F32 values = widened<kDtype>(at) * scale_inv;
    if (count - done >= kLanes) return store(total + done, load<F32>(total + done) + values);
    F32 tail = {};
    std::memcpy(&tail, total + done, static_cast<u64>(count - done) * sizeof(float));
    tail += values;
    std::memcpy(total + done, &tail, static_cast<u64>(count - done) * sizeof(float));
  });
}

void multiply(float* total, i64 count, float factor) {
  for (i64 i = 0; i < count; ++i) total[i] *= factor;
}

}  // namespace

#define DISTSCALE_BOTH(dtype, fp8) {encode<dtype, fp8, false>, encode<dtype, fp8, true>}
#define DISTSCALE_ENCODE(dtype) {DISTSCALE_BOTH(dtype, kE4M3), DISTSCALE_BOTH(dtype, kE5M2)}
#define DISTSCALE_TABLE(isa)                                                                                    \
  extern const Kernels kernels_##isa = {                                                                        \
      {DISTSCALE_ENCODE(kFloat32), DISTSCALE_ENCODE(kFloat16), DISTSCALE_ENCODE(kBFloat16)},                    \
      {amax<kFloat32>, amax<kFloat16>, amax<kBFloat16>},                                                        \
      {to_bfloat16<kFloat32>, to_bfloat16<kFloat16>, to_bfloat16<kBFloat16>},                                   \
      {nullptr, nullptr, add<kBFloat16>, add<kE4M3>, add<kE5M2>},                                               \
      multiply,                                                                                                 \
  };
#define DISTSCALE_TABLE_OF(isa) DISTSCALE_TABLE(isa)

DISTSCALE_TABLE_OF(DISTSCALE_ISA)

}  // namespace wire
}  // namespace distscale
