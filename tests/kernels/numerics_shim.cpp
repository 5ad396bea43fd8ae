// numerics.h over arrays, for test_numerics.py.
#include "numerics.h"

using namespace distscale;

extern "C" {

void widen_all(i32 dtype, const u32* codes, u32* bits, i64 count) {
  for (i64 i = 0; i < count; ++i) bits[i] = widen(dtype, codes[i]);
}

void narrow_all(i32 dtype, const u32* bits, u32* codes, i64 count) {
  for (i64 i = 0; i < count; ++i) codes[i] = narrow(dtype, bits[i]);
}

void powers_for_squares(const u32* amax_bits, float* powers, i64 count) {
  for (i64 i = 0; i < count; ++i) powers[i] = power_for_squares(amax_bits[i]);
}

void undo_powers(const double* sums, const float* powers, double* undone, i64 count) {
  for (i64 i = 0; i < count; ++i) undone[i] = undo_power(sums[i], powers[i]);
}

void unscaled_amaxes(const u32* amax_bits, const double* factors, double largest, u32* unscaled, i64 count) {
  for (i64 i = 0; i < count; ++i) unscaled[i] = unscaled_amax(amax_bits[i], factors[i], largest);
}

void largest_up_to_all(const double* limits, i32 inclusive, u32* bits, i64 count) {
  for (i64 i = 0; i < count; ++i) bits[i] = largest_up_to(limits[i], inclusive != 0);
}

double largest(i32 dtype) { return largest_of(dtype); }

i32 size(i32 dtype) { return size_of(dtype); }
}
