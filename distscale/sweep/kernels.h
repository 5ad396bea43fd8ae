// What is compiled once for every instruction set.
#ifndef DISTSCALE_KERNELS_H
#define DISTSCALE_KERNELS_H

#include "sweep.h"

namespace distscale {

constexpr i64 kBlock = 1024;  // values that are swept at a time, and that stay in the first cache meanwhile
constexpr int kNumDtypes = 5;

struct Measured {
  u32 amax;  // bits of fp32
  double squares;
};

// Bits of fp32 that bound the magnitudes to count; see Limits.
struct Bounds {
  u32 lost;       // not zero, up to here
  u32 subnormal;  // above `lost`, up to here
};

// At most kBlock values a call, at any address.
struct Kernels {
  const char* isa;
  Measured (*measure[kNumDtypes])(const void* values, i64 count);
  // Adds to counts[kNumCounts].
  void (*count[kNumDtypes])(const void* values, i64 count, Bounds bounds, i64* counts);
  // out = values * factor; out may be values.
  void (*multiply[kNumDtypes][kNumDtypes])(const void* values, i64 count, float factor, void* out);
  // Reads so many bytes, and nothing else; the result is of no use.
  u32 (*read)(const void* bytes, i64 count);
};

// Those of this platform; see CMakeLists.txt.
extern const Kernels kernels_plain;
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
extern const Kernels kernels_neon;

}  // namespace distscale

#endif
