// The sweep in CUDA, without torch's or CUDA's headers: NVRTC compiles it in the process. reference.py says what it
// computes.
//
// The shards are cut into chunks, which a persistent grid of blocks takes in turn. A block reads a chunk with several
// 16-byte loads in flight a thread, reduces it once, and leaves its maximum in the part's cell and its sum in the
// chunk's own cell. The block that ends last turns these into the answer: one launch, and no sum that depends on the
// order in which blocks ran.
#include "chunk.cuh"

namespace distscale {
namespace {

constexpr int kWarps = kThreads / 32;
constexpr i64 kFewGroups = 16;  // of sums, each of which is worth a round of the last block

// Mirrored in cuda.py.
struct Chunk {
  i32 part;
  i32 index;  // of the chunk within the part
};

struct Partial {
  double sum;
  i64 group;
};

struct Sweep {
  const Part* parts;
  i64 num_parts;
  const Chunk* chunks;
  i64 num_chunks;
  i64 chunk_bytes;
  const double* inv_scale;
  u32* amax;          // one a part, zeroed, and the ticket of the blocks that are done
  Partial* partials;  // one a chunk; null: no norm is wanted
  i32* slots;         // zeroed, as are the next two
  double* sums;
  i64 num_groups;
  i64* counts;
};

struct Shared {
  u32 amax[2][kWarps];
  double sums[2][kWarps];
  bool is_last;
};

__device__ __forceinline__ void add_count(const Sweep& sweep, i32 slot, Count column, u32 count) {
  if (!__any_sync(kWholeWarp, count != 0)) return;
  count = warp_sum(count);
  if (threadIdx.x % 32 == 0)
    atomicAdd(reinterpret_cast<u64*>(sweep.counts) + slot * kNumCounts + column, static_cast<u64>(count));
}

// The block's sum, in one order always; for thread 0 alone. Cells alternate between calls, of which one barrier each
// is then enough: the next one to use the same cells is behind the barrier of the call between.
__device__ __forceinline__ double block_sum(Shared& shared, int turn, double sum) {
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) shared.sums[turn & 1][threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return 0;
  sum = shared.sums[turn & 1][0];
  for (int warp = 1; warp < kWarps; ++warp) sum += shared.sums[turn & 1][warp];
  return sum;
}

template <i32 D, bool kNorm>
__device__ __forceinline__ void finish_chunk(
    const Sweep& sweep, Shared& shared, int turn, i64 chunk, const Part& part, const Tally<D, kNorm>& tally) {
  const u32 amax = warp_max(tally.amax_bits());
  if (threadIdx.x % 32 == 0) shared.amax[turn & 1][threadIdx.x / 32] = amax;
  add_count(sweep, part.slot, kNonfinite, tally.num_nonfinite);
  const double sum = block_sum(shared, turn, tally.sum);  // has the barrier for both
  if (threadIdx.x != 0) return;
  u32 largest = 0;
  for (int warp = 0; warp < kWarps; ++warp) largest = larger(largest, shared.amax[turn & 1][warp]);
  atomicMax(sweep.amax + sweep.chunks[chunk].part, largest);
  if (!kNorm || !sweep.partials) return;
  const double factor = factor_of(part, *sweep.inv_scale);
  sweep.partials[chunk] = Partial{sum * part.weight * factor * factor, part.group};
}

// For the last block: all others have done their part.
__device__ __forceinline__ void finish(const Sweep& sweep, Shared& shared) {
  for (i64 i = threadIdx.x; i < sweep.num_parts; i += kThreads) {
    const Part& part = sweep.parts[i];
    const u32 bits = unscaled_amax(sweep.amax[i], factor_of(part, *sweep.inv_scale), largest_of(part));
    if (bits) atomicMax(sweep.slots + part.slot, static_cast<i32>(bits));
  }
  if (!sweep.partials) return;
  if (sweep.num_groups > kFewGroups) {
    // A thread has groups of its own, and picks their chunks from all of them.
#pragma unroll 8
    for (i64 i = 0; i < sweep.num_chunks; ++i) {
      const Partial partial = sweep.partials[i];
      if (partial.group % kThreads == threadIdx.x) sweep.sums[partial.group] += partial.sum;
    }
    return;
  }
  for (i64 group = 0; group < sweep.num_groups; ++group) {
    double sum = 0;
#pragma unroll 8
    for (i64 i = threadIdx.x; i < sweep.num_chunks; i += kThreads) {
      const Partial partial = sweep.partials[i];
      if (partial.group == group) sum += partial.sum;
    }
    sum = block_sum(shared, static_cast<int>(group), sum);
    if (threadIdx.x == 0) sweep.sums[group] = sum;
  }
}

// Calls `one_chunk` for every chunk of this block, then ends the sweep in the block that is last.
template <class OneChunk>
__device__ __forceinline__ void run(const Sweep& sweep, Shared& shared, OneChunk one_chunk) {
  int turn = 0;
  for (i64 chunk = blockIdx.x; chunk < sweep.num_chunks; chunk += gridDim.x) one_chunk(chunk, turn++);
  __threadfence();  // what this thread left for the last block, before the ticket
  __syncthreads();
  if (threadIdx.x == 0) shared.is_last = atomicAdd(sweep.amax + sweep.num_parts, 1u) == gridDim.x - 1;
  __syncthreads();
  if (!shared.is_last) return;
  __threadfence();
  finish(sweep, shared);
}

// Read only: as lean as can be.
template <bool kNorm>
__device__ __forceinline__ void read(const Sweep& sweep, Shared& shared) {
  run(sweep, shared, [&](i64 chunk, int turn) {
    const Chunk place = sweep.chunks[chunk];
    const Part& part = sweep.parts[place.part];
    with_format(part.dtype, [&](auto format) {
      constexpr i32 D = decltype(format)::kDtype;
      Tally<D, kNorm> tally;
      visit<D, 4>(part, sweep.chunk_bytes, place.index, tally);
      finish_chunk(sweep, shared, turn, chunk, part, tally);
    });
  });
}

template <i32 D>
struct Everything {
  Tally<D, true> tally;
  Losses<D> losses;
  Writer<D> writer;
  bool counts_losses;

  __device__ __forceinline__ void single(i64 index, u32 code) {
    tally.single(index, code);
    if (counts_losses) losses.single(index, code);
    if (writer.out) writer.single(index, code);
  }

  template <int V>
  __device__ __forceinline__ void group(const Group<V>& group, i64 begin, int first, int num_vectors) {
    tally.group(group, begin, first, num_vectors);
    if (counts_losses) losses.group(group, begin, first, num_vectors);
    if (writer.out) writer.group(group, begin, first, num_vectors);
  }
};

// With parts that are written, or with limits to count losses for.
__device__ __forceinline__ void read_and_more(const Sweep& sweep, Shared& shared, const Limits& limits) {
  run(sweep, shared, [&](i64 chunk, int turn) {
    const Chunk place = sweep.chunks[chunk];
    const Part& part = sweep.parts[place.part];
    const double factor = factor_of(part, *sweep.inv_scale);
    const bool counts_losses = limits.normal_from > 0;
    const u32 lost_up_to = counts_losses ? largest_up_to(limits.zero_up_to / factor, true) : 0;
    const u32 subnormal_up_to = counts_losses ? largest_up_to(limits.normal_from / factor, false) : 0;
    with_format(part.dtype, [&](auto format) {
      constexpr i32 D = decltype(format)::kDtype;
      const Writer<D> writer{in_global_memory(part.out), part.out_dtype, static_cast<float>(factor)};
      Everything<D> body{{}, {lost_up_to, subnormal_up_to}, writer, counts_losses};
      visit<D, 2>(part, sweep.chunk_bytes, place.index, body);
      finish_chunk(sweep, shared, turn, chunk, part, body.tally);
      if (!counts_losses) return;
      add_count(sweep, part.slot, kZero, body.losses.num_zero);
      add_count(sweep, part.slot, kLost, body.losses.num_lost);
      add_count(sweep, part.slot, kSubnormal, body.losses.num_subnormal);
    });
  });
}

}  // namespace
}  // namespace distscale

// Every argument is 8 bytes wide, so that a launch needs to know no types.
#define DISTSCALE_SWEEP_PARAMETERS                                                                                  \
  const distscale::Part *parts, distscale::i64 num_parts, const distscale::Chunk *chunks, distscale::i64 num_chunks, \
      distscale::i64 chunk_bytes, const double *inv_scale, distscale::u32 *amax, distscale::Partial *partials,       \
      distscale::i32 *slots, double *sums, distscale::i64 num_groups, distscale::i64 *counts
#define DISTSCALE_SWEEP_ARGUMENTS \
  {parts, num_parts, chunks, num_chunks, chunk_bytes, inv_scale, amax, partials, slots, sums, num_groups, counts}

// Blocks that a multiprocessor is to hold. Without the hardware's conversions of FP8 they need more registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define DISTSCALE_BLOCKS_THAT_READ 5
#define DISTSCALE_BLOCKS_THAT_WRITE 3
#else
#define DISTSCALE_BLOCKS_THAT_READ 1
#define DISTSCALE_BLOCKS_THAT_WRITE 1
#endif

extern "C" __global__ void __launch_bounds__(DISTSCALE_THREADS, DISTSCALE_BLOCKS_THAT_READ)
    sweep(DISTSCALE_SWEEP_PARAMETERS) {
  __shared__ distscale::Shared shared;
  const distscale::Sweep all DISTSCALE_SWEEP_ARGUMENTS;
  if (partials) {
    distscale::read<true>(all, shared);
  } else {
    distscale::read<false>(all, shared);
  }
}

extern "C" __global__ void __launch_bounds__(DISTSCALE_THREADS, DISTSCALE_BLOCKS_THAT_WRITE)
    sweep_and_write(DISTSCALE_SWEEP_PARAMETERS, double zero_up_to, double normal_from) {
  __shared__ distscale::Shared shared;
  const distscale::Sweep all DISTSCALE_SWEEP_ARGUMENTS;
  distscale::read_and_more(all, shared, {zero_up_to, normal_from});
}

// Multiplies in place, or touches nothing.
extern "C" __global__ void __launch_bounds__(DISTSCALE_THREADS)
    scale(const distscale::Part* parts, const distscale::Chunk* chunks, distscale::i64 num_chunks,
          distscale::i64 chunk_bytes, const float* factor, const float* found_inf) {
  if (found_inf && *found_inf != 0.0f) return;
  if (*factor == 1.0f) return;
  for (distscale::i64 chunk = blockIdx.x; chunk < num_chunks; chunk += gridDim.x) {
    const distscale::Chunk place = chunks[chunk];
    const distscale::Part& part = parts[place.part];
    distscale::with_format(part.dtype, [&](auto format) {
      constexpr distscale::i32 D = decltype(format)::kDtype;
      distscale::Writer<D> writer{distscale::in_global_memory(const_cast<void*>(part.values)), D, *factor};
      distscale::visit<D, 4>(part, chunk_bytes, place.index, writer);
    });
  }
}
