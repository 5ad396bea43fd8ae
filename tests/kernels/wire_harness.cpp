// wire.cu as it is, for the host; the loader is simt.py.
#include "simt.h"

#include "wire.cu"

using distscale::i64;
using distscale::u32;
using distscale::u8;
using distscale::wire::Message;

extern "C" {

int simt_find_amax(int num_blocks, unsigned seed, const Message* described, const void* rows, const float* scale,
                   u32* amax) {
  return simt::launch(num_blocks, DISTSCALE_THREADS, seed, [=] { find_amax(described, rows, scale, amax); });
}

int simt_quantize(int num_blocks, unsigned seed, const Message* described, const void* rows, const float* scale,
                  i64 key, u8* messages, u32* amax, i64* num_saturated) {
  return simt::launch(num_blocks, DISTSCALE_THREADS, seed,
                      [=] { quantize(described, rows, scale, key, messages, amax, num_saturated); });
}

int simt_sum_rows(int num_blocks, unsigned seed, const Message* described, const u8* messages, double factor,
                  float* total) {
  return simt::launch(num_blocks, DISTSCALE_THREADS, seed, [=] { sum_rows(described, messages, factor, total); });
}

}  // extern "C"
