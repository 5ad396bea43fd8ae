// What a block of the CUDA kernels does with one chunk of a part: how its threads share it out, and what they do with
// the values: Tally, Writer and Losses.
#ifndef DISTSCALE_CHUNK_CUH
#define DISTSCALE_CHUNK_CUH

#include "packed.cuh"
#include "sweep.h"

#ifndef DISTSCALE_THREADS
#define DISTSCALE_THREADS 256  // of a block; cuda.py says the same
#endif

namespace distscale {
namespace {

constexpr int kThreads = DISTSCALE_THREADS;

// What a thread loads at once: `V` vectors of 16 bytes, all in flight together.
template <int V>
struct Group {
  u32 words[V][4];
};

// Hands this thread's share of a chunk to `body`: groups of vectors, and single values before and after them. Chunks
// are cut at 16-byte addresses, so that only the first has values before, and only the last has values after.
template <i32 D, int V, class Body>
__device__ __forceinline__ void visit(const Part& part, i64 chunk_bytes, i32 index, Body& body) {
  using F = Format<D>;
  const void* values = in_global_memory(part.values);
  const u64 address = reinterpret_cast<u64>(values);
  const i64 before = static_cast<i64>(((0 - address) & 15) / F::kSize);  // values ahead of the first 16-byte address
  const i64 length = chunk_bytes / F::kSize;
  const bool is_last = (index + 1) * length >= part.numel;
  i64 begin = index == 0 ? 0 : index * length - F::kPerVector + before;
  i64 end = is_last ? part.numel : (index + 1) * length - F::kPerVector + before;
  const int lane = static_cast<int>(threadIdx.x);
  if (index == 0) {
    const i64 stop = before < end ? before : end;
    if (lane < stop) body.single(lane, F::load(values, lane));
    begin = stop;
  }
  const int num_vectors = static_cast<int>((end - begin) / F::kPerVector);
  const i64 rest = begin + static_cast<i64>(num_vectors) * F::kPerVector;
  if (rest + lane < end) body.single(rest + lane, F::load(values, rest + lane));

  const uint4* vectors = reinterpret_cast<const uint4*>(static_cast<const u8*>(values) + begin * F::kSize);
  for (int first = lane; first < num_vectors; first += V * kThreads) {
    Group<V> group;
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const int at = first + k * kThreads;
      const uint4 vector = at < num_vectors ? vectors[at] : uint4{0, 0, 0, 0};
      group.words[k][0] = vector.x;
      group.words[k][1] = vector.y;
      group.words[k][2] = vector.z;
      group.words[k][3] = vector.w;
    }
    body.group(group, begin, first, num_vectors);
  }
}

// What a thread sees in a chunk. Zeros that fill up a group change none of it.
template <i32 D, bool kNorm>
struct Tally {
  using F = Format<D>;
  u32 running = 0;
  u32 num_nonfinite = 0;
  double sum = 0;  // of squares

  __device__ __forceinline__ u32 amax_bits() const { return widen(D, F::largest(running)); }

  __device__ __forceinline__ void single(i64, u32 code) {
    running = F::join(running, code);
    const u32 bits = widen(D, code);
    if ((bits & ~kSignMask) >= kInfBits) ++num_nonfinite;
    const double value = static_cast<double>(float_of(bits));
    if constexpr (kNorm) sum += value * value;
  }

  template <int V>
  __device__ __forceinline__ void group(const Group<V>& group, i64, int, int) {
#pragma unroll
    for (int k = 0; k < V; ++k)
#pragma unroll
      for (int w = 0; w < 4; ++w) running = F::join(running, group.words[k][w]);
    if constexpr (kNorm) {
      // With the power of the largest value so far, what vanishes is nothing beside the square of that value.
      const float power = F::kNeedsPower ? power_for_squares(amax_bits()) : 1.0f;
      float sums[4] = {};
#pragma unroll
      for (int k = 0; k < V; ++k)
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          float values[F::kPerWord];
          F::widen_word(group.words[k][w], values);
#pragma unroll
          for (int i = 0; i < F::kPerWord; ++i) {
            const float value = F::kNeedsPower ? values[i] * power : values[i];
            sums[w] += value * value;
          }
        }
      // One addition in double for all of a group: most GPUs have few units for it.
      const double squares = static_cast<double>((sums[0] + sums[1]) + (sums[2] + sums[3]));
      sum += F::kNeedsPower ? undo_power(squares, power) : squares;
    }
    if (F::largest(running) > F::kLargest) count_nonfinite(group);
  }

  template <int V>
  __device__ __forceinline__ void count_nonfinite(const Group<V>& group) {
    // What lies above the largest magnitude is lifted into the sign's place.
    constexpr u32 kLift = (F::kSigns >> (F::kWidth - 1)) * ((1u << (F::kWidth - 1)) - 1 - F::kLargest);
#pragma unroll
    for (int k = 0; k < V; ++k)
#pragma unroll
      for (int w = 0; w < 4; ++w) num_nonfinite += __popc(((group.words[k][w] & ~F::kSigns) + kLift) & F::kSigns);
  }
};

// Writes what is read, times a factor.
template <i32 D>
struct Writer {
  using F = Format<D>;
  void* out;
  i32 out_dtype;
  float factor;

  __device__ __forceinline__ void single(i64 index, u32 code) const {
    const u32 narrowed = narrow(out_dtype, bits_of(float_of(widen(D, code)) * factor));
    switch (size_of(out_dtype)) {
      case 4: return Format<kFloat32>::store(out, index, narrowed);
      case 2: return Format<kFloat16>::store(out, index, narrowed);
      default: return Format<kE4M3>::store(out, index, narrowed);
    }
  }

  template <int V>
  __device__ __forceinline__ void group(const Group<V>& group, i64 begin, int first, int num_vectors) const {
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const int at = first + k * kThreads;
      if (at < num_vectors) vector(group.words[k], begin + static_cast<i64>(at) * F::kPerVector);
    }
  }

  __device__ __forceinline__ void vector(const u32 (&words)[4], i64 index) const {
    float values[F::kPerVector];
#pragma unroll
    for (int w = 0; w < 4; ++w) F::widen_word(words[w], values + w * F::kPerWord);
#pragma unroll
    for (int i = 0; i < F::kPerVector; ++i) values[i] *= factor;
    if (out_dtype == D) return put<D>(index, values);
    switch (out_dtype) {
      case kFloat32: return put<kFloat32>(index, values);
      case kFloat16: return put<kFloat16>(index, values);
      case kBFloat16: return put<kBFloat16>(index, values);
      case kE4M3: return put<kE4M3>(index, values);
      default: return put<kE5M2>(index, values);
    }
  }

  template <i32 Out>
  __device__ __forceinline__ void put(i64 index, const float (&values)[F::kPerVector]) const {
    using G = Format<Out>;
    constexpr int kWords = F::kPerVector / G::kPerWord;
    u32 words[kWords];
#pragma unroll
    for (int w = 0; w < kWords; ++w) words[w] = G::narrow_word(values + w * G::kPerWord);
    u8* const to = static_cast<u8*>(out) + index * G::kSize;
    const u64 address = reinterpret_cast<u64>(to);
    if (kWords >= 4 && address % 16 == 0) {
#pragma unroll
      for (int w = 0; w + 3 < kWords; w += 4)
        reinterpret_cast<uint4*>(to)[w / 4] = uint4{words[w], words[w + 1], words[w + 2], words[w + 3]};
    } else if (kWords < 4 && address % 4 == 0) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) reinterpret_cast<u32*>(to)[w] = words[w];
    } else {
#pragma unroll
      for (int i = 0; i < F::kPerVector; ++i)
        G::store(out, index + i, words[i / G::kPerWord] >> i % G::kPerWord * G::kWidth);
    }
  }
};

// What a thread counts on a profiling step.
template <i32 D>
struct Losses {
  using F = Format<D>;
  u32 lost_up_to;       // fp32 bits of a magnitude
  u32 subnormal_up_to;  // likewise
  u32 num_zero = 0;
  u32 num_lost = 0;
  u32 num_subnormal = 0;

  __device__ __forceinline__ void single(i64, u32 code) { count(widen(D, code)); }

  template <int V>
  __device__ __forceinline__ void group(const Group<V>& group, i64, int first, int num_vectors) {
#pragma unroll
    for (int k = 0; k < V; ++k) {
      if (first + k * kThreads >= num_vectors) return;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        float values[F::kPerWord];
        F::widen_word(group.words[k][w], values);
#pragma unroll
        for (int i = 0; i < F::kPerWord; ++i) count(bits_of(values[i]));
      }
    }
  }

  __device__ __forceinline__ void count(u32 bits) {
    const u32 magnitude = bits & ~kSignMask;
    num_zero += magnitude == 0;
    num_lost += magnitude != 0 && magnitude <= lost_up_to;
    num_subnormal += magnitude > lost_up_to && magnitude <= subnormal_up_to;
  }
};

// Calls `use` with the format of a dtype.
template <class Use>
__device__ __forceinline__ void with_format(i32 dtype, Use use) {
  switch (dtype) {
    case kFloat32: return use(Format<kFloat32>{});
    case kFloat16: return use(Format<kFloat16>{});
    case kBFloat16: return use(Format<kBFloat16>{});
    case kE4M3: return use(Format<kE4M3>{});
    default: return use(Format<kE5M2>{});
  }
}

}  // namespace
}  // namespace distscale

#endif
