// The sweep in CUDA, without torch's or CUDA's headers: NVRTC compiles it in the process. reference.py says what it
// computes.
//
// The shards are cut into chunks, which a persistent grid of blocks takes in turn. A block reads a chunk with several
// 16-byte loads in flight a thread, reduces it once, and leaves its maximum in the part's cell and its sum in the
// chunk's own cell. The block that ends last turns these into the answer: one launch, and no sum that depends on the
// order in which blocks ran.
//
// What only some architectures have is in the small functions of the first section, each with a plain form beside it;
// the plain form runs on the host in tests/kernels.
#include "sweep.h"

#ifndef DISTSCALE_THREADS
#define DISTSCALE_THREADS 256  // of a block; cuda.py says the same
#endif

namespace distscale {
namespace {

constexpr int kThreads = DISTSCALE_THREADS;
constexpr int kWarps = kThreads / 32;
constexpr i64 kFewGroups = 16;  // of sums, each of which is worth a round of the last block
constexpr u32 kWholeWarp = 0xffffffffu;

// Mirrored in cuda.py.
struct Chunk {
  i32 part;
  i32 index;  // of the chunk within the part
};

struct Partial {
  double sum;
  i64 group;
};

// ---------------------------------------------------------------- what depends on the architecture

// A pointer that was read from memory could be of any kind, and a load through it would be slower.
template <class T>
__device__ __forceinline__ T* in_global_memory(T* pointer) {
#if defined(__CUDA_ARCH__)
  __builtin_assume(__isGlobal(pointer));
#endif
  return pointer;
}

__device__ __forceinline__ u32 larger(u32 a, u32 b) { return a > b ? a : b; }

__device__ __forceinline__ u32 larger_halves(u32 a, u32 b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  u32 both;
  asm("max.u16x2 %0, %1, %2;" : "=r"(both) : "r"(a), "r"(b));
  return both;
#else
  return larger(a & 0xffff0000u, b & 0xffff0000u) | larger(a & 0xffffu, b & 0xffffu);
#endif
}

__device__ __forceinline__ void widen_halves(u32 pair, float* values) {
#if defined(__CUDA_ARCH__)
  asm("{.reg .b16 low, high;\n mov.b32 {low, high}, %2;\n cvt.f32.f16 %0, low;\n cvt.f32.f16 %1, high;}"
      : "=f"(values[0]), "=f"(values[1])
      : "r"(pair));
#else
  values[0] = float_of(Float16::widen(pair & 0xffffu));
  values[1] = float_of(Float16::widen(pair >> 16));
#endif
}

__device__ __forceinline__ void widen_e4m3(u32 four, float* values) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  u32 low, high;
  asm("{.reg .b16 a, b;\n mov.b32 {a, b}, %2;\n cvt.rn.f16x2.e4m3x2 %0, a;\n cvt.rn.f16x2.e4m3x2 %1, b;}"
      : "=r"(low), "=r"(high)
      : "r"(four));
  widen_halves(low, values);
  widen_halves(high, values + 2);
#else
  // Its bits at the place of fp32's mean 2^-120 of the value, subnormal numbers too.
  for (int i = 0; i < 4; ++i) {
    const u32 code = four >> 8 * i;
    const u32 magnitude = code & 0x7fu;
    const float value = magnitude == E4M3::kNan ? float_of(kInfBits | 1u << 22) : float_of(magnitude << 20) * 0x1p120f;
    values[i] = float_of(bits_of(value) | (code & 0x80u) << 24);
  }
#endif
}

// Two values in the format of 16 bits, the first in the lower half.
__device__ __forceinline__ u32 narrow_to_halves(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
#else
  return Float16::narrow(bits_of(first), false) | Float16::narrow(bits_of(second), false) << 16;
#endif
}

__device__ __forceinline__ u32 narrow_to_bfloat16s(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
#else
  return narrow_bfloat16(bits_of(first)) | narrow_bfloat16(bits_of(second)) << 16;
#endif
}

// As narrow(), but with fewer instructions: 16 of them stand side by side in the kernel.
template <class F>
__device__ __forceinline__ u32 narrow_to_byte(float value) {
  constexpr u32 kRebase = static_cast<u32>(127 - F::kBias) << 23;
  constexpr u32 kLargest = kRebase + (F::kLargest << F::kShift);
  const u32 magnitude = bits_of(value) & ~kSignMask;
  const u32 clamped = magnitude < kLargest ? magnitude : kLargest;
  u32 code = (clamped - kRebase + (1u << (F::kShift - 1)) - 1 + (clamped >> F::kShift & 1)) >> F::kShift;
  if (clamped < kRebase + (1u << 23)) {
    // A subnormal: added to this number, whose last bit is worth as much as the format's, it is rounded to that bit.
    const u32 same_step = kRebase + (static_cast<u32>(F::kShift + 1) << 23);
    code = bits_of(float_of(clamped) + float_of(same_step)) - same_step;
  }
  if (magnitude >= kInfBits) code = F::kInf <= F::kLargest || magnitude > kInfBits ? F::kNan : F::kInf;
  return code | (bits_of(value) & kSignMask) >> 24;
}

// Two values in an FP8 format, the first in the lower byte. The hardware saturates inf too, which must stay visible.
template <i32 D>
__device__ __forceinline__ u32 narrow_to_bytes(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  u16 pair;
  if constexpr (D == kE4M3) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  }
  constexpr u32 kCode = D == kE4M3 ? E4M3::kNan : E5M2::kInf;
  u32 codes = pair;
  if ((bits_of(first) & ~kSignMask) == kInfBits) codes = (codes & 0xff80u) | kCode;
  if ((bits_of(second) & ~kSignMask) == kInfBits) codes = (codes & 0x80ffu) | kCode << 8;
  return codes;
#else
  using F = Small<D == kE4M3 ? 4 : 5, D == kE4M3 ? 3 : 2, D == kE5M2>;
  return narrow_to_byte<F>(first) | narrow_to_byte<F>(second) << 8;
#endif
}

// ---------------------------------------------------------------- a format, four bytes at a time

template <i32 D>
struct Format {
  static constexpr i32 kDtype = D;
  static constexpr int kSize = D == kFloat32 ? 4 : D <= kBFloat16 ? 2 : 1;
  static constexpr int kWidth = 8 * kSize;
  static constexpr int kPerWord = 4 / kSize;
  static constexpr int kPerVector = 16 / kSize;
  static constexpr u32 kSigns = kSize == 4 ? kSignMask : kSize == 2 ? 0x80008000u : 0x80808080u;
  static constexpr u32 kLargest = D == kFloat32    ? kInfBits - 1
                                  : D == kFloat16  ? Float16::kLargest
                                  : D == kBFloat16 ? (kInfBits >> 16) - 1
                                  : D == kE4M3     ? E4M3::kLargest
                                                   : E5M2::kLargest;
  // The squares of the others fit fp32 as they are.
  static constexpr bool kNeedsPower = D == kFloat32 || D == kBFloat16;

  // Joins the magnitudes of a word to a running maximum: one number, or one in each half; of FP8 in its upper byte.
  static __device__ __forceinline__ u32 join(u32 running, u32 word) {
    if constexpr (kSize == 4) return larger(running, word & ~kSigns);
    if constexpr (kSize == 2) return larger_halves(running, word & ~kSigns);
    return larger_halves(larger_halves(running, word & 0x7f007f00u), word << 8 & 0x7f007f00u);
  }

  // The largest magnitude of a running maximum, as a code of the format.
  static __device__ __forceinline__ u32 largest(u32 running) {
    if constexpr (kSize == 4) return running;
    return larger(running >> 16, running & 0xffffu) >> (kSize == 2 ? 0 : 8);
  }

  static __device__ __forceinline__ void widen_word(u32 word, float* values) {
    if constexpr (D == kFloat32) {
      values[0] = float_of(word);
    } else if constexpr (D == kBFloat16) {
      values[0] = float_of(word << 16);
      values[1] = float_of(word & 0xffff0000u);
    } else if constexpr (D == kFloat16) {
      widen_halves(word, values);
    } else if constexpr (D == kE4M3) {
      widen_e4m3(word, values);
    } else {  // the upper half of an fp16 each
      widen_halves((word << 8 & 0xff00u) | (word << 16 & 0xff000000u), values);
      widen_halves((word >> 8 & 0xff00u) | (word & 0xff000000u), values + 2);
    }
  }

  static __device__ __forceinline__ u32 narrow_word(const float* values) {
    if constexpr (D == kFloat32) return bits_of(values[0]);
    if constexpr (D == kFloat16) return narrow_to_halves(values[0], values[1]);
    if constexpr (D == kBFloat16) return narrow_to_bfloat16s(values[0], values[1]);
    if constexpr (kSize == 1)
      return narrow_to_bytes<D>(values[0], values[1]) | narrow_to_bytes<D>(values[2], values[3]) << 16;
  }

  static __device__ __forceinline__ u32 load(const void* from, i64 index) {
    if constexpr (kSize == 4) return static_cast<const u32*>(from)[index];
    if constexpr (kSize == 2) return static_cast<const u16*>(from)[index];
    return static_cast<const u8*>(from)[index];
  }

  static __device__ __forceinline__ void store(void* to, i64 index, u32 code) {
    if constexpr (kSize == 4) static_cast<u32*>(to)[index] = code;
    if constexpr (kSize == 2) static_cast<u16*>(to)[index] = static_cast<u16>(code);
    if constexpr (kSize == 1) static_cast<u8*>(to)[index] = static_cast<u8>(code);
  }
};

// ---------------------------------------------------------------- one chunk

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

// ---------------------------------------------------------------- the sweep

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

template <class T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
  for (int distance = 16; distance; distance /= 2) value += __shfl_xor_sync(kWholeWarp, value, distance);
  return value;
}

__device__ __forceinline__ u32 warp_max(u32 value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_max_sync(kWholeWarp, value);
#else
#pragma unroll
  for (int distance = 16; distance; distance /= 2)
    value = larger(value, __shfl_xor_sync(kWholeWarp, value, distance));
  return value;
#endif
}

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
