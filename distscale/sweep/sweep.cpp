// The CPU library: a plain C interface, called by cpu.py through ctypes. No state outlives a call.
#include "host.h"
#include "kernels.h"

namespace distscale {
namespace {

constexpr i32 kAbi = 2;              // raised with every change of exported functions, of sweep.h or wire.h; see cpu.py
constexpr i64 kChunk = 64 * kBlock;  // values that a thread takes at a time

const Kernels& kernels() { return DISTSCALE_CHOOSE(kernels); }

struct Chunk {
  const Part* part;
  i64 begin;
  u32 amax = 0;
  double squares = 0.0;
  i64 counts[kNumCounts] = {};
};

i64 bytes_of(const Part* parts, i64 count) {
  i64 bytes = 0;
  for (i64 i = 0; i < count; ++i) bytes += parts[i].numel * size_of(parts[i].dtype);
  return bytes;
}

std::vector<Chunk> chunks_of(const Part* parts, i64 count) {
  std::vector<Chunk> chunks;
  chunks.reserve(static_cast<u64>(count));
  for (const Part* part = parts; part != parts + count; ++part) {
    for (i64 begin = 0; begin < part->numel; begin += kChunk) chunks.push_back({part, begin});
  }
  return chunks;
}

// Calls work(values, number of values, offset in the part) for every block of a chunk.
template <class Work>
void for_each_block(const Chunk& chunk, const Work& work) {
  const Part& part = *chunk.part;
  const i64 end = part.numel - chunk.begin < kChunk ? part.numel : chunk.begin + kChunk;
  for (i64 begin = chunk.begin; begin < end; begin += kBlock) {
    const char* values = static_cast<const char*>(part.values) + begin * size_of(part.dtype);
    work(values, end - begin < kBlock ? end - begin : kBlock, begin);
  }
}

void* out_at(const Part& part, i64 offset) { return static_cast<char*>(part.out) + offset * size_of(part.out_dtype); }

void sweep_chunk(Chunk& chunk, double inv_scale, const Limits* limits) {
  const Part& part = *chunk.part;
  const double factor = factor_of(part, inv_scale);
  Bounds bounds = {};
  if (limits) {
    bounds = {largest_up_to(limits->zero_up_to / factor, true), largest_up_to(limits->normal_from / factor, false)};
  }
  i64 counts[kNumCounts] = {};
  for_each_block(chunk, [&](const void* values, i64 count, i64 offset) {
    const Measured measured = kernels().measure[part.dtype](values, count);
    if (measured.amax > chunk.amax) chunk.amax = measured.amax;
    chunk.squares += measured.squares;
    if (limits || measured.amax >= kInfBits) kernels().count[part.dtype](values, count, bounds, counts);
    if (part.out) {
      kernels().multiply[part.dtype][part.out_dtype](values, count, static_cast<float>(factor), out_at(part, offset));
    }
  });
  const i32 num_counts = limits ? kNumCounts : kNonfinite + 1;
  for (i32 i = 0; i < num_counts; ++i) chunk.counts[i] = counts[i];
}

void sweep(const Part* parts, i64 count, double inv_scale, const Limits* limits, i64 threads, i32* slots, double* sums,
           i64* counts) {
  std::vector<Chunk> chunks = chunks_of(parts, count);
  in_parallel(static_cast<i64>(chunks.size()), bytes_of(parts, count), threads,
              [&](i64 i) { sweep_chunk(chunks[static_cast<u64>(i)], inv_scale, limits); });
  // In the order of the parts, whichever thread swept what.
  const DefaultFloats mode;
  const Chunk* chunk = chunks.data();
  const Chunk* const end = chunk + chunks.size();
  for (const Part* part = parts; part != parts + count; ++part) {
    const double factor = factor_of(*part, inv_scale);
    u32 amax = 0;
    double squares = 0.0;
    for (; chunk != end && chunk->part == part; ++chunk) {
      if (chunk->amax > amax) amax = chunk->amax;
      squares += chunk->squares;
      for (i32 i = 0; i < kNumCounts; ++i) counts[part->slot * kNumCounts + i] += chunk->counts[i];
    }
    const i32 bits = static_cast<i32>(unscaled_amax(amax, factor, largest_of(*part)));
    if (bits > slots[part->slot]) slots[part->slot] = bits;
    if (sums) sums[part->group] += squares * part->weight * factor * factor;
  }
}

void multiply(const Part* parts, i64 count, float factor, i64 threads) {
  const std::vector<Chunk> chunks = chunks_of(parts, count);
  in_parallel(static_cast<i64>(chunks.size()), bytes_of(parts, count), threads, [&](i64 i) {
    const Chunk& chunk = chunks[static_cast<u64>(i)];
    for_each_block(chunk, [&](const void* values, i64 size, i64 offset) {
      kernels().multiply[chunk.part->dtype][chunk.part->out_dtype](values, size, factor, out_at(*chunk.part, offset));
    });
  });
}

}  // namespace
}  // namespace distscale

using namespace distscale;

DISTSCALE_EXPORT i32 distscale_abi() { return kAbi; }

DISTSCALE_EXPORT const char* distscale_isa() { return kernels().isa; }

DISTSCALE_EXPORT const char* distscale_compiler() { return DISTSCALE_COMPILER; }

// slots, sums (null: not wanted) and counts are zero before.
DISTSCALE_EXPORT i32 distscale_sweep(const Part* parts, i64 count, const double* inv_scale, const Limits* limits,
                                     i32 threads, i32* slots, double* sums, i64* counts) {
  return guarded([&] { sweep(parts, count, *inv_scale, limits, threads, slots, sums, counts); });
}

// out = values * factor, unless found_inf (null: it is not) is set.
DISTSCALE_EXPORT i32 distscale_scale(const Part* parts, i64 count, const float* factor, const float* found_inf,
                                     i32 threads) {
  if (found_inf && *found_inf != 0.0f) return 0;
  return guarded([&] { multiply(parts, count, *factor, threads); });
}

// Reads the values of all parts and does nothing with them: the limit of what a sweep can reach.
DISTSCALE_EXPORT i32 distscale_read(const Part* parts, i64 count, i32 threads) {
  return guarded([&] {
    const std::vector<Chunk> chunks = chunks_of(parts, count);
    std::atomic<u32> seen{0};
    in_parallel(static_cast<i64>(chunks.size()), bytes_of(parts, count), threads, [&](i64 i) {
      u32 bits = 0;
      for_each_block(chunks[static_cast<u64>(i)], [&](const void* values, i64 size, i64) {
        bits |= kernels().read(values, size * size_of(chunks[static_cast<u64>(i)].part->dtype));
      });
      seen.fetch_or(bits, std::memory_order_relaxed);
    });
  });
}
