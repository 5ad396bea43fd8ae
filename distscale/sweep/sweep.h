// What a sweep is told and what it counts: shared by the CPU library and the CUDA kernel, mirrored in plan.py.
#ifndef DISTSCALE_SWEEP_H
#define DISTSCALE_SWEEP_H

#include "numerics.h"

namespace distscale {

// One shard. 64 bytes; pointers are of the device that sweeps.
struct Part {
  const void* values;
  void* out;               // receives the unscaled values, may be `values`; null: read only
  const float* scale_inv;  // what FP8 values are multiplied with; null: 1
  i64 numel;
  double weight;  // of its sum of squares
  i32 dtype;      // Dtype
  i32 out_dtype;  // Dtype
  i32 slot;       // of its amax and its counts; several parts may share one
  i32 group;      // of its sum of squares
  i32 is_scaled;  // whether the values still carry the loss scale
  i32 unused;
};
static_assert(sizeof(Part) == 64, "mirrored in plan.py");

// Values that a small format would lose, by their unscaled magnitude; all zero: do not count them.
struct Limits {
  double zero_up_to;   // becomes zero up to here
  double normal_from;  // keeps all its bits from here on
};

// Columns of the counts, one row a slot.
enum Count : i32 { kNonfinite = 0, kZero = 1, kLost = 2, kSubnormal = 3, kNumCounts = 4 };

// What a part's values are multiplied with to unscale them.
DISTSCALE_FN double factor_of(const Part& part, double inv_scale) {
  const double scale_inv = part.scale_inv ? static_cast<double>(*part.scale_inv) : 1.0;
  return part.is_scaled ? inv_scale * scale_inv : scale_inv;
}

// The largest magnitude that an unscaled value may have without counting as inf.
DISTSCALE_FN double largest_of(const Part& part) {
  if (part.out) return largest_of(part.out_dtype);
  return part.scale_inv ? kFloat32Max : largest_of(part.dtype);
}

}  // namespace distscale

#endif
