// Messages of gradients on the CPU, called by wire_cpu.py through ctypes; part of the library of distscale/sweep.
#include "host.h"
#include "wire_kernels.h"

namespace distscale {
namespace wire {
namespace {

constexpr i64 kRun = 4096;  // values whose sum stays in the first cache while messages are added to it

const Kernels& kernels() { return DISTSCALE_CHOOSE(kernels); }

u8* payload_of(u8* messages, const Message& message, const Run& run) {
  return messages + run.row * message.row_bytes + run.segment->offset + run.begin * (is_fp8(*run.segment) ? 1 : 2);
}

u8* exponents_of(u8* messages, const Message& message, const Run& run) {
  return messages + run.row * message.row_bytes + run.segment->scaling + run.begin / kBlock;
}

struct Quantizer {
  const Message& message;
  const u8* rows;
  const float* scale;  // as agreed
  u32* amax;           // bits of fp32, like scale
  i64 key;
  u8* messages;

  const void* values_of(const Run& run) const {
    return rows + place_of(message, run) * size_of(message.row_dtype);
  }

  bool lacks_scale(const Segment& segment) const {
    return is_fp8(segment) && !message.is_blockwise && !(scale[segment.entry] > 0.0f);
  }

  u32 amax_of(const Run& run) const { return kernels().amax[message.row_dtype](values_of(run), run.count); }

  Seen encode(const void* values, i64 count, float factor, i64 place, u8* codes) const {
    const auto& by_randomness = kernels().encode[message.row_dtype][message.dtype - kE4M3];
    return by_randomness[key != kToNearest](
        values, count, {factor, static_cast<u32>(place), static_cast<u32>(key)}, codes);
  }

  Seen quantize(const Run& run) const {
    const u8* values = static_cast<const u8*>(values_of(run));
    u8* const codes = payload_of(messages, message, run);
    const i64 place = place_of(message, run);
    if (!is_fp8(*run.segment)) {
      kernels().to_bfloat16[message.row_dtype](values, run.count, codes);
      return {};
    }
    const i64 entry = run.segment->entry;
    if (!message.is_blockwise) {
      return encode(values, run.count, factor_of(scale[entry], amax[entry], message), place, codes);
    }
    u8* exponents = exponents_of(messages, message, run);
    Seen seen = {};
    for (i64 at = 0; at < run.count; at += kBlock) {
      const i64 count = run.count - at < kBlock ? run.count - at : kBlock;
      const void* block = values + at * size_of(message.row_dtype);
      const u32 bits = kernels().amax[message.row_dtype](block, count);
      const float factor = block_factor_of(bits, message);
      *exponents++ = exponent_of(bits, factor);
      encode(block, count, factor, place + at, codes + at);
      if (bits > seen.amax) seen.amax = bits;
    }
    return seen;
  }
};

void quantize(const Quantizer& all, i64* num_saturated, i64 threads) {
  const Message& message = all.message;
  const i64 num_runs = message.num_rows * message.num_chunks;
  const i64 bytes = message.num_rows * message.row_numel * size_of(message.row_dtype);
  std::vector<Seen> seen(static_cast<u64>(num_runs));
  const auto join = [&] {
    for (i64 i = 0; i < num_runs; ++i) {
      const i64 entry = run_of(message, i).segment->entry;
      if (entry < 0) continue;
      const Seen& it = seen[static_cast<u64>(i)];
      if (it.amax > all.amax[entry]) all.amax[entry] = it.amax;
      if (all.scale[entry] > 0.0f) num_saturated[entry] += it.num_beyond;
    }
  };
  bool lacks_scales = false;
  for (i64 i = 0; i < message.num_segments; ++i) lacks_scales |= all.lacks_scale(message.segments[i]);
  if (lacks_scales) {
    in_parallel(num_runs, bytes, threads, [&](i64 i) {
      const Run run = run_of(message, i);
      if (all.lacks_scale(*run.segment)) seen[static_cast<u64>(i)].amax = all.amax_of(run);
    });
    join();
  }
  in_parallel(num_runs, bytes, threads, [&](i64 i) { seen[static_cast<u64>(i)] = all.quantize(run_of(message, i)); });
  join();
  const DefaultFloats mode;
  for (i64 row = 0; row < message.num_rows; ++row) {
    for (i64 i = 0; i <= message.num_segments; ++i) {
      write_frame(message, i, all.scale, all.amax, all.messages + row * message.row_bytes);
    }
  }
}

// Adds one message's values to some of a run's: `count`, from `begin` on within the run.
void add(const Message& message, u8* messages, const Run& run, i64 begin, i64 count, float* total) {
  const Run from = {run.segment, run.row, run.begin + begin, count};
  const u8* codes = payload_of(messages, message, from);
  if (!is_fp8(*run.segment)) return kernels().add[kBFloat16](codes, count, 1.0f, total);
  const auto add = kernels().add[message.dtype];
  if (!message.is_blockwise) {
    float scale_inv;
    std::memcpy(&scale_inv, messages + run.row * message.row_bytes + run.segment->scaling, sizeof scale_inv);
    return add(codes, count, scale_inv, total);
  }
  const u8* exponents = exponents_of(messages, message, from);
  for (i64 at = 0; at < count; at += kBlock) {
    const i64 block = count - at < kBlock ? count - at : kBlock;
    add(codes + at, block, scale_inv_of_exponent(*exponents++), total + at);
  }
}

void sum_rows(const Message& message, u8* messages, float factor, float* total, i64 threads) {
  for (i64 row = 0; row < message.num_rows; ++row) {
    i32 identity;
    std::memcpy(&identity, messages + row * message.row_bytes, sizeof identity);
    // It makes all of the sum NaN.
    if (identity != message.identity) factor = float_of(kInfBits | 1u << 22);
  }
  in_parallel(message.num_chunks, message.num_rows * message.row_bytes, threads, [&](i64 i) {
    Run run = run_of(message, i);
    for (i64 begin = 0; begin < run.count; begin += kRun) {
      const i64 count = run.count - begin < kRun ? run.count - begin : kRun;
      float* const to = total + run.segment->start + run.begin + begin;
      std::memset(to, 0, static_cast<u64>(count) * sizeof(float));
      for (run.row = 0; run.row < message.num_rows; ++run.row) add(message, messages, run, begin, count, to);
      kernels().multiply(to, count, factor);
    }
  });
}

}  // namespace
}  // namespace wire
}  // namespace distscale

using namespace distscale;

// amax (one a tensor in FP8, as are scale and num_saturated) and num_saturated are zero before; key: 32 bits or -1.
DISTSCALE_EXPORT i32 distscale_quantize(const wire::Message* message, const void* rows, const float* scale, i64 key,
                                        u8* messages, u32* amax, i64* num_saturated, i32 threads) {
  return guarded([&] {
    wire::quantize({*message, static_cast<const u8*>(rows), scale, amax, key, messages}, num_saturated, threads);
  });
}

DISTSCALE_EXPORT i32 distscale_sum_rows(const wire::Message* message, const u8* messages, double factor, float* total,
                                        i32 threads) {
  return guarded([&] {
    wire::sum_rows(*message, const_cast<u8*>(messages), static_cast<float>(factor), total, threads);
  });
}
