// What there is to do, and pairs of vectors to do it with: loading and storing.

#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "vectors.h"

namespace {

constexpr int PAIR = 32;         // columns in a pair of vectors
constexpr int STRIP = 2 * PAIR;  // columns that one set of Philox calls covers
constexpr int MOST_ROWS = 128;   // of a strip: the largest Hadamard group
constexpr int TILE = 128;        // rows or columns that share an fp32 scale, if not all do
constexpr int ROUNDS = 7;        // of Philox4x32
constexpr uint32_t SIGN = 0x80000000u, MAGNITUDE = 0x7FFFFFFFu, HIGH = 0xFFFF0000u, QUIET_NAN = 0x7FC00000u;
constexpr float FLOAT_MAX = 3.402823466e38f;

// cpu_kernel.py reads the names here: the families of ablate/recipes/scale_rules.py, and the roundings.
enum Rule : int { E8M0, QUEST, TENSOR, TWO_LEVEL, UE5M3, FOUR_SIX, MS_EDEN, GROUPS, SEARCHED };
enum Rounding : int { NEAREST, STOCHASTIC, STOCHASTIC_8BIT, STOCHASTIC_ROCM, NEAREST_AWAY, NEAREST_TOWARD_ZERO };

}  // namespace

// cpu_kernel.py reads its fields here.
struct Job {
  const void* src;
  void* dst;             // bf16 [rows, cols], contiguous
  uint8_t* mask;         // null, or where |scaled| < 6 is written, or read to undo a rotation
  const float* signs;    // null, or the signs before the Hadamard, for 32 elements at least; along the
                         // columns even ones before odd ones in each 32
  const int32_t* order;  // null, or which element of its group each one is before the signs; along the columns
                         // for 128 elements, by and for places with even ones before odd ones in each 32
  const float* scales;   // of GROUPS and SEARCHED, one for each tile: [rows / tile_rows, cols / tile_cols]
  int64_t rows, cols, src_stride, tile_rows, tile_cols;
  int32_t src_bf16, product_bf16, axis, square, block, hadamard, rotated_bf16;
  int32_t rule, rounding, mantissa_bits, min_exponent;
  int32_t folded;                  // TWO_LEVEL has 1 / the largest element in its block_multiplier
  int32_t magnitudes;              // FOUR_SIX adds magnitudes of errors, not squares
  int32_t unscaled;                // MS_EDEN measures its stretch in the tensor's units
  uint32_t scale_add, scale_emax;  // E8M0: exponent = ((amax bits + add) >> 23) - emax
  float factor;                    // multiplies a bf16 source; the product is rounded to bf16 if product_bf16
  float element_max, prescale, undo, norm;
  float tensor_scale;      // of TENSOR; MS_EDEN's clip; FOUR_SIX's amax of the tensor
  float block_multiplier;  // of TWO_LEVEL and FOUR_SIX
  float tensor_descale;    // of these, UE5M3 and MS_EDEN
  float error_divisor;     // of FOUR_SIX: element * block scale * amax over it is the dequantised value
  uint32_t key0, key1, step, call;
};

namespace {

INLINE vf min_f(const vf& a, const vf& b) { return choose(a > b, b, a); }  // NaN in a stays
INLINE vf magnitude(const vf& a) { return (vf)((vu)a & MAGNITUDE); }
INLINE vf with_sign_of(const vf& a, const vu& bits) { return (vf)(((vu)a & MAGNITUDE) | (bits & SIGN)); }

struct Pair {
  vf even, odd;
};

INLINE vf rounded_to_bf16(const vf& a) {
  const vu bits = (vu)a;
  const vu even = (bits + 0x7FFFu + ((bits >> 16) & 1u)) & HIGH;
  return choose(a == a, (vf)even, (vf)vu(QUIET_NAN));
}

// 32 numbers, or as many as are left.
template <bool FULL>
INLINE Pair deinterleaved(const float* from, int64_t left) {
  const bool inside = FULL || left >= PAIR;
  const vf first = inside ? vf::read(from) : read_some<vf>(from, left * 4);
  const vf second = inside ? vf::read(from + 16) : read_some<vf>(from + 16, (left - 16) * 4);
  return {evens(first, second), odds(first, second)};
}

// FULL: the caller knows that all 32 columns are inside; else those over the right edge read as zero.
template <bool FULL>
INLINE Pair load(const Job& job, int64_t row, int64_t col) {
  const int64_t at = row * job.src_stride + col;
  const int64_t left = job.cols - col;
  if (job.src_bf16) {
    const uint16_t* from = static_cast<const uint16_t*>(job.src) + at;
    const vu both = FULL || left >= PAIR ? vu::read(from) : read_some<vu>(from, left * 2);
    const Pair v = {(vf)(both << 16), (vf)(both & HIGH)};
    if (job.factor == 1.0f) return v;
    const Pair product = {v.even * job.factor, v.odd * job.factor};
    return job.product_bf16 ? Pair{rounded_to_bf16(product.even), rounded_to_bf16(product.odd)} : product;
  }
  const float* from = static_cast<const float*>(job.src) + at;
  return deinterleaved<FULL>(from, left);
}

template <bool FULL>
INLINE void store(const Job& job, int64_t row, int64_t col, const Pair& value) {
  uint16_t* at = static_cast<uint16_t*>(job.dst) + row * job.cols + col;
  const vu both = ((vu)value.even >> 16) | ((vu)value.odd & HIGH);
  if (FULL || col + PAIR <= job.cols)
    both.write(at);
  else
    write_some(both, at, (job.cols - col) * 2);
}

}  // namespace
