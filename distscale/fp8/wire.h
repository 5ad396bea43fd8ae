// Gradients as messages in FP8: what the CPU library and the CUDA kernels share, mirrored in wire_plan.py. wire.py says
// what lies where in a message; wire_reference.py, what is computed.
#ifndef DISTSCALE_WIRE_H
#define DISTSCALE_WIRE_H

#include "numerics.h"

namespace distscale {
namespace wire {

constexpr int kBlock = 128;  // values that share an exponent
constexpr int kAlignment = 16;
constexpr i64 kToNearest = -1;  // in the place of a key

// As in wire.py.
struct Segment {
  i64 start;
  i64 numel;
  i64 offset;
  i64 scaling;
  i64 entry;  // of `scale`; -1: bf16
};

// A run of a segment's values, in every row, that a thread (a block on a GPU) takes at a time.
struct Chunk {
  i32 segment;
  i32 index;  // within the segment
};

struct Message {
  const Segment* segments;
  const Chunk* chunks;
  i64 num_segments;
  i64 num_chunks;   // of one row
  i64 chunk_numel;  // a multiple of kBlock
  i64 num_rows;
  i64 row_numel;
  i64 row_bytes;
  i64 header_bytes;  // up to the last scale_inv or exponent
  double room;       // what amax is scaled to
  i32 row_dtype;     // Dtype: kFloat32, kFloat16 or kBFloat16
  i32 dtype;         // Dtype: kE4M3 or kE5M2
  i32 is_blockwise;
  i32 power_of_two;
  i32 identity;
  i32 unused;
};
static_assert(sizeof(Message) == 104 && sizeof(Segment) == 40 && sizeof(Chunk) == 8, "mirrored in wire_plan.py");

DISTSCALE_FN bool is_fp8(const Segment& segment) { return segment.entry >= 0; }

// A chunk of a row.
struct Run {
  const Segment* segment;
  i64 row;
  i64 begin;  // of its values within the segment
  i64 count;
};

DISTSCALE_FN Run run_of(const Message& message, i64 index) {
  const Chunk chunk = message.chunks[index % message.num_chunks];
  const Segment* segment = message.segments + chunk.segment;
  const i64 begin = chunk.index * message.chunk_numel;
  const i64 left = segment->numel - begin;
  return {segment, index / message.num_chunks, begin, left < message.chunk_numel ? left : message.chunk_numel};
}

// The place of a run's first value in all rows.
DISTSCALE_FN i64 place_of(const Message& message, const Run& run) {
  return run.row * message.row_numel + run.segment->start + run.begin;
}

// ---------------------------------------------------------------- scales

DISTSCALE_FN float scale_of_amax(u32 amax_bits, double room, bool power_of_two) {
  if (amax_bits == 0 || amax_bits >= kInfBits) return 1.0f;
  double scale = room / static_cast<double>(float_of(amax_bits));
  if (power_of_two) scale = double_of(bits_of(scale) & 0x7ffull << 52);
  return static_cast<float>(scale < 0x1p-126 ? 0x1p-126 : scale > 0x1p126 ? 0x1p126 : scale);
}

// What the values of a tensor are multiplied with.
DISTSCALE_FN float factor_of(float agreed, u32 amax_bits, const Message& message) {
  return agreed > 0.0f ? agreed : scale_of_amax(amax_bits, message.room, message.power_of_two);
}

DISTSCALE_FN float scale_inv_of(float factor) { return static_cast<float>(1.0 / static_cast<double>(factor)); }

DISTSCALE_FN float block_factor_of(u32 amax_bits, const Message& message) {
  return scale_of_amax(amax_bits, message.room, true);
}

DISTSCALE_FN u8 exponent_of(u32 amax_bits, float factor) {
  return amax_bits < kInfBits ? static_cast<u8>(254 - (bits_of(factor) >> 23)) : static_cast<u8>(255);
}

DISTSCALE_FN float scale_inv_of_exponent(u8 exponent) {
  return float_of(exponent == 255 ? kInfBits | 1u << 22 : static_cast<u32>(exponent) << 23);
}

// ---------------------------------------------------------------- stochastic rounding

// rounding.py: random_bits; of a word, or of a vector of words.
template <class Word>
DISTSCALE_FN Word mixed(Word word) {
  word ^= word >> 16;
  word *= 0x7feb352du;
  word ^= word >> 15;
  word *= 0x846ca68bu;
  return word ^ word >> 16;
}

// ---------------------------------------------------------------- a message but for its values

// The zeros after the values of a segment, up to the next one.
DISTSCALE_FN void fill_up(u8* message, i64 used) {
  for (; used % kAlignment; ++used) message[used] = 0;
}

// All of a message's header but the exponents, if `segment` is num_segments; else what belongs to that segment.
DISTSCALE_FN void write_frame(const Message& message, i64 segment, const float* scale, const u32* amax_bits, u8* to) {
  if (segment == message.num_segments) {
    *reinterpret_cast<i32*>(to) = message.identity;
    return fill_up(to, message.header_bytes);
  }
  const Segment& it = message.segments[segment];
  fill_up(to, it.offset + it.numel * (is_fp8(it) ? 1 : 2));
  if (!is_fp8(it) || message.is_blockwise) return;
  const float factor = factor_of(scale[it.entry], amax_bits[it.entry], message);
  *reinterpret_cast<float*>(to + it.scaling) = scale_inv_of(factor);
}

}  // namespace wire
}  // namespace distscale

#endif
