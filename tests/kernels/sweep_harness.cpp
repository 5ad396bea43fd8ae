// sweep.cu as it is, for the host; the loader is simt.py.
#include "simt.h"

#include "sweep.cu"

using distscale::i64;

extern "C" {

int simt_sweep(int num_blocks, unsigned seed, DISTSCALE_SWEEP_PARAMETERS) {
  return simt::launch(num_blocks, DISTSCALE_THREADS, seed, [=] {
    sweep(parts, num_parts, chunks, num_chunks, chunk_bytes, inv_scale, amax, partials, slots, sums, num_groups,
          counts);
  });
}

int simt_sweep_and_write(
    int num_blocks, unsigned seed, DISTSCALE_SWEEP_PARAMETERS, double zero_up_to, double normal_from) {
  return simt::launch(num_blocks, DISTSCALE_THREADS, seed, [=] {
    sweep_and_write(parts, num_parts, chunks, num_chunks, chunk_bytes, inv_scale, amax, partials, slots, sums,
                    num_groups, counts, zero_up_to, normal_from);
  });
}

int simt_scale(int num_blocks, unsigned seed, const distscale::Part* parts, const distscale::Chunk* chunks,
               i64 num_chunks, i64 chunk_bytes, const float* factor, const float* found_inf) {
  return simt::launch(num_blocks, DISTSCALE_THREADS, seed,
                      [=] { scale(parts, chunks, num_chunks, chunk_bytes, factor, found_inf); });
}

}  // extern "C"
