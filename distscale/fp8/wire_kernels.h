// What is compiled once for every instruction set.
#ifndef DISTSCALE_WIRE_KERNELS_H
#define DISTSCALE_WIRE_KERNELS_H

#include "wire.h"

namespace distscale {
namespace wire {

struct Cast {
  float factor;
  u32 place;  // of the first value in all rows
  u32 key;    // of the random numbers
};

struct Seen {
  u32 amax;        // bits of fp32
  i64 num_beyond;  // finite values that become larger than the largest number of the format
};

// Any number of values a call, at any address.
struct Kernels {
  // To FP8, by the dtype of the values, the format (kE4M3 first), and whether it is at random.
  Seen (*encode[3][2][2])(const void* values, i64 count, Cast cast, u8* codes);
  u32 (*amax[3])(const void* values, i64 count);
  void (*to_bfloat16[3])(const void* values, i64 count, u8* codes);
  // total += codes * scale_inv, by the dtype of the codes.
  void (*add[5])(const u8* codes, i64 count, float scale_inv, float* total);
  void (*multiply)(float* total, i64 count, float factor);
};

// Those of this platform; see CMakeLists.txt.
extern const Kernels kernels_plain;
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
extern const Kernels kernels_neon;

}  // namespace wire
}  // namespace distscale

#endif
