// Messages of gradients in CUDA, without torch's or CUDA's headers: NVRTC compiles it in the process.
// wire_reference.py says what it computes.
//
// Rows are cut into chunks, which a persistent grid of blocks takes in turn. A warp takes 128 values of a chunk at a
// time, which are a block with an exponent of its own, and a thread four of them: these become one word of FP8, and
// values of a message begin at a multiple of 16 bytes, so that all words of a message are aligned.
#include "quad.cuh"

namespace distscale {
namespace wire {
namespace {

// For one lane, whose value is that of its warp. A stale value in the cell costs an atomic operation that changes
// nothing; but most find a larger one there.
__device__ __forceinline__ void raise(u32* cell, u32 value) {
  if (value > *cell) atomicMax(cell, value);
}

// ---------------------------------------------------------------- to messages

template <i32 D, i32 Fp8>
__device__ __forceinline__ void quantize_run(const Message& message, const Run& run, const void* rows,
                                             const float* scale, i64 key, u8* messages, u32* amax,
                                             i64* num_saturated) {
  const Segment segment = *run.segment;
  u8* const to = messages + run.row * message.row_bytes;
  const bool is_blockwise = message.is_blockwise;
  const float agreed = scale[segment.entry];
  Cast cast{is_blockwise ? 1.0f : factor_of(agreed, amax[segment.entry], message), key};
  const i64 place = place_of(message, run);
  u32 largest = 0;
  for_each_quad<D>(message, run, rows, [&](const float (&values)[kQuad], i64 at, int count) {
    u32 seen = amax_of(values);
    if (is_blockwise) {
      seen = warp_max(seen);
      cast.factor = block_factor_of(seen, message);
      if (lane() == 0) to[segment.scaling + (run.begin + at) / kBlock] = exponent_of(seen, cast.factor);
    }
    largest = larger(largest, seen);
    store(to + segment.offset + run.begin + at, cast.template operator()<Fp8>(values, place + at), count);
  });
  largest = warp_max(largest);
  if (lane() == 0) raise(amax + segment.entry, largest);
  const bool counts = !is_blockwise && agreed > 0.0f;
  if (!__any_sync(kWholeWarp, counts && cast.num_beyond != 0)) return;
  const u32 num_beyond = warp_sum(cast.num_beyond);
  if (lane() == 0) atomicAdd(reinterpret_cast<u64*>(num_saturated) + segment.entry, static_cast<u64>(num_beyond));
}

template <i32 D>
__device__ __forceinline__ void copy_run(const Message& message, const Run& run, const void* rows, u8* messages) {
  u8* const to = messages + run.row * message.row_bytes + run.segment->offset + 2 * run.begin;
  for_each_quad<D>(message, run, rows, [&](const float (&values)[kQuad], i64 at, int count) {
    const u64 low = narrow_to_bfloat16s(values[0], values[1]), high = narrow_to_bfloat16s(values[2], values[3]);
    store(to + 2 * at, low | high << 32, count);
  });
}

__device__ __forceinline__ bool lacks_scale(const Segment& segment, const float* scale) {
  return is_fp8(segment) && !(scale[segment.entry] > 0.0f);
}

// ---------------------------------------------------------------- from messages

template <i32 D>
__device__ __forceinline__ void sum_run(
    const Message& message, const Run& run, const u8* messages, float factor, float* total) {
  const Segment segment = *run.segment;
  const i64 num_rows = message.num_rows, row_bytes = message.row_bytes;
  const bool is_blockwise = message.is_blockwise;
  for (i64 at = threadIdx.x * kQuad; at < run.count; at += kThreads * kQuad) {
    float sum[kQuad] = {};
    const u8* from = messages;
#pragma unroll 4
    for (i64 row = 0; row < num_rows; ++row, from += row_bytes) {
      float values[kQuad];
      decode<D>(from + segment.offset + (run.begin + at) * Format<D>::kSize, values);
      const float scale_inv = D == kBFloat16 ? 1.0f
                              : is_blockwise
                                  ? scale_inv_of_exponent(from[segment.scaling + (run.begin + at) / kBlock])
                                  : *reinterpret_cast<const float*>(from + segment.scaling);
#pragma unroll
      for (int i = 0; i < kQuad; ++i) sum[i] = __fadd_rn(sum[i], __fmul_rn(values[i], scale_inv));
    }
    float* const to = total + segment.start + run.begin + at;
    if (run.count - at >= kQuad && reinterpret_cast<u64>(to) % 16 == 0) {
      *reinterpret_cast<uint4*>(to) = uint4{bits_of(sum[0] * factor), bits_of(sum[1] * factor),
                                            bits_of(sum[2] * factor), bits_of(sum[3] * factor)};
    } else {
#pragma unroll
      for (int i = 0; i < kQuad; ++i)
        if (at + i < run.count) to[i] = sum[i] * factor;
    }
  }
}

}  // namespace
}  // namespace wire
}  // namespace distscale

// Every argument is 8 bytes wide, so that a launch needs to know no types. What `described` points at is on the GPU.

// The amax of tensors without a scale.
extern "C" __global__ void __launch_bounds__(DISTSCALE_THREADS, 4)
    find_amax(const distscale::wire::Message* described, const void* rows, const float* scale, distscale::u32* amax) {
  using namespace distscale;
  using namespace distscale::wire;
  const Message& message = *described;
  bool is_wanted = false;
  for (i64 i = lane(); i < message.num_segments; i += 32) is_wanted |= lacks_scale(message.segments[i], scale);
  if (!__any_sync(kWholeWarp, is_wanted)) return;
  for (i64 i = blockIdx.x; i < message.num_rows * message.num_chunks; i += gridDim.x) {
    const Run run = run_of(message, i);
    if (!lacks_scale(*run.segment, scale)) continue;
    u32 largest = 0;
    with_format_of_rows(message.row_dtype, [&](auto format) {
      for_each_quad<decltype(format)::kDtype>(
          message, run, rows,
          [&](const float(&values)[kQuad], i64, int) { largest = larger(largest, amax_of(values)); });
    });
    largest = warp_max(largest);
    if (lane() == 0) raise(amax + run.segment->entry, largest);
  }
}

// After find_amax, unless it is blockwise.
extern "C" __global__ void __launch_bounds__(DISTSCALE_THREADS, 2)
    quantize(const distscale::wire::Message* described, const void* rows, const float* scale, distscale::i64 key,
             distscale::u8* messages, distscale::u32* amax, distscale::i64* num_saturated) {
  using namespace distscale;
  using namespace distscale::wire;
  const Message& message = *described;
  for (i64 i = blockIdx.x; i < message.num_rows * message.num_chunks; i += gridDim.x) {
    const Run run = run_of(message, i);
    with_format_of_rows(message.row_dtype, [&](auto format) {
      constexpr i32 D = decltype(format)::kDtype;
      if (!is_fp8(*run.segment)) {
        copy_run<D>(message, run, rows, messages);
      } else if (message.dtype == kE4M3) {
        quantize_run<D, kE4M3>(message, run, rows, scale, key, messages, amax, num_saturated);
      } else {
        quantize_run<D, kE5M2>(message, run, rows, scale, key, messages, amax, num_saturated);
      }
    });
  }
  const i64 num_frames = message.num_segments + 1;
  const i64 first = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
  for (i64 i = first; i < message.num_rows * num_frames; i += static_cast<i64>(gridDim.x) * kThreads)
    write_frame(message, i % num_frames, scale, amax, messages + i / num_frames * message.row_bytes);
}

extern "C" __global__ void __launch_bounds__(DISTSCALE_THREADS, 4)
    sum_rows(const distscale::wire::Message* described, const distscale::u8* messages, double factor, float* total) {
  using namespace distscale;
  using namespace distscale::wire;
  const Message& message = *described;
  bool is_wrong = false;
  for (i64 row = lane(); row < message.num_rows; row += 32)
    is_wrong |= *reinterpret_cast<const i32*>(messages + row * message.row_bytes) != message.identity;
  // It makes all of the sum NaN.
  const float times =
      __any_sync(kWholeWarp, is_wrong) ? float_of(kInfBits | 1u << 22) : static_cast<float>(factor);
  for (i64 i = blockIdx.x; i < message.num_chunks; i += gridDim.x) {
    const Run run = run_of(message, i);
    if (!is_fp8(*run.segment)) {
      sum_run<kBFloat16>(message, run, messages, times, total);
    } else if (message.dtype == kE4M3) {
      sum_run<kE4M3>(message, run, messages, times, total);
    } else {
      sum_run<kE5M2>(message, run, messages, times, total);
    }
  }
}
