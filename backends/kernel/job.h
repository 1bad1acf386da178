// What there is to do, and vectors to do it with: loading, storing, shuffling.

#pragma once

#include <cstdint>
#include <cstring>
#include <vector>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint64_t vq __attribute__((vector_size(64)));

constexpr int PAIR = 32;         // columns in a pair of vectors
constexpr int STRIP = 2 * PAIR;  // columns that one set of Philox calls covers
constexpr int MOST_ROWS = 128;   // of a strip: the largest Hadamard group
constexpr int TILE = 128;        // rows or columns that share an fp32 scale, if not all do
constexpr int ROUNDS = 7;        // of Philox4x32
constexpr uint32_t SIGN = 0x80000000u, MAGNITUDE = 0x7FFFFFFFu, HIGH = 0xFFFF0000u, QUIET_NAN = 0x7FC00000u;
constexpr float FLOAT_MAX = 3.402823466e38f;

enum Rule : int {
  E8M0 = 0, QUEST = 1, TENSOR = 2, TWO_LEVEL = 3, FOUR_SIX = 4, EDEN = 5, EDEN_UNSCALED = 6, GIVEN = 7, DIVIDED = 8
};
enum Rounding : int { NEAREST = 0, STOCHASTIC = 1, STOCHASTIC_ROCM = 2, NEAREST_AWAY = 3, NEAREST_TOWARD_ZERO = 4 };

}  // namespace

// As cpu_kernel.py fills it; the order of the fields is the interface.
struct Job {
  const void* src;
  void* dst;            // bf16 [rows, cols], contiguous
  uint8_t* mask;        // null, or where |scaled| < 6 is written, or read to undo a rotation
  const float* signs;   // null, or the signs before the Hadamard, for 32 elements at least; along the
                        // columns even ones before odd ones in each 32
  const int32_t* order;  // null, or which element of its group each one is before the signs; along the columns
                         // for 128 elements, by and for places with even ones before odd ones in each 32
  const float* scales;   // of GIVEN and DIVIDED, one for each tile: [rows / tile_rows, cols / tile_cols]
  int64_t rows, cols, src_stride, tile_rows, tile_cols;
  int32_t src_bf16, product_bf16, axis, square, block, hadamard, rotated_bf16;
  int32_t rule, rounding, mantissa_bits, min_exponent;
  uint32_t scale_add, scale_emax;  // E8M0: exponent = ((amax bits + add) >> 23) - emax
  float factor;  // multiplies a bf16 source; the product is rounded to bf16 if product_bf16
  float element_max, prescale, undo, norm;
  float tensor_scale;      // of TENSOR; EDEN's clip; FOUR_SIX's amax of the tensor
  float block_multiplier;  // of TWO_LEVEL and FOUR_SIX
  float tensor_descale;    // of TWO_LEVEL, FOUR_SIX and EDEN
  float error_divisor;     // of FOUR_SIX: element * block scale * amax over it is the dequantised value
  uint32_t key0, key1, step, call;
};

namespace {

inline vf splat(float x) { return x - vf{}; }
inline vu splat_u(uint32_t x) { return x - vu{}; }
inline vu max_u(vu a, vu b) { return a > b ? a : b; }
inline vf min_f(vf a, vf b) { return a > b ? b : a; }  // NaN in a stays
inline vf magnitude(vf a) { return (vf)((vu)a & MAGNITUDE); }
inline vf with_sign_of(vf a, vu bits) { return (vf)(((vu)a & MAGNITUDE) | (bits & SIGN)); }
inline vf flip(vf v, vu sign) { return (vf)((vu)v ^ sign); }

inline bool all(vi mask) {
#ifdef __AVX512F__
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) == 0xFFFF;
#else
  int32_t every = -1;
  for (int i = 0; i < 16; ++i) every &= mask[i];
  return every != 0;
#endif
}

#if defined(__clang__)
#define SHUFFLE(v, ...) __builtin_shufflevector(v, v, __VA_ARGS__)
#define SHUFFLE2(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(v, ...) __builtin_shuffle(v, (vi){__VA_ARGS__})
#define SHUFFLE2(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif
#define XOR1(v) SHUFFLE(v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14)
#define XOR2(v) SHUFFLE(v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13)
#define XOR4(v) SHUFFLE(v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)
#define XOR8(v) SHUFFLE(v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)
#define EVEN_TWICE(v) SHUFFLE(v, 0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12, 12, 14, 14)
#define EVENS(a, b) SHUFFLE2(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
#define ODDS(a, b) SHUFFLE2(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)

struct Pair {
  vf even, odd;
};

inline vf truncate(vf a) {
#ifdef __AVX512F__
  return (vf)_mm512_roundscale_ps((__m512)a, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
#else
  const vf whole = __builtin_convertvector(__builtin_convertvector(a, vi), vf);
  return a < splat(8388608.0f) ? whole : a;  // also NaN, which would not survive as an int
#endif
}

inline vf rounded_to_bf16(vf a) {
  const vu bits = (vu)a;
  const vu even = (bits + 0x7FFFu + ((bits >> 16) & 1u)) & HIGH;
  return a == a ? (vf)even : (vf)splat_u(QUIET_NAN);
}

// FULL: the caller knows that all 32 columns are inside; else those over the right edge read as zero.
template <bool FULL>
inline Pair load(const Job& job, int64_t row, int64_t col) {
  const int64_t at = row * job.src_stride + col;
  const bool inside = FULL || col + PAIR <= job.cols;
  if (job.src_bf16) {
    const uint16_t* from = static_cast<const uint16_t*>(job.src) + at;
    vu both = {};
    if (inside)
      std::memcpy(&both, from, sizeof both);
    else if (col < job.cols)
      std::memcpy(&both, from, static_cast<size_t>(job.cols - col) * 2);
    const Pair v = {(vf)(both << 16), (vf)(both & HIGH)};
    if (job.factor == 1.0f) return v;
    const Pair product = {v.even * splat(job.factor), v.odd * splat(job.factor)};
    return job.product_bf16 ? Pair{rounded_to_bf16(product.even), rounded_to_bf16(product.odd)} : product;
  }
  const float* from = static_cast<const float*>(job.src) + at;
  vf half[2] = {};
  if (inside)
    std::memcpy(half, from, sizeof half);
  else if (col < job.cols)
    std::memcpy(half, from, static_cast<size_t>(job.cols - col) * 4);
  return {EVENS(half[0], half[1]), ODDS(half[0], half[1])};
}

template <bool FULL>
inline void store(const Job& job, int64_t row, int64_t col, const Pair& value) {
  uint16_t* at = static_cast<uint16_t*>(job.dst) + row * job.cols + col;
  const vu both = ((vu)value.even >> 16) | ((vu)value.odd & HIGH);
  if (FULL || col + PAIR <= job.cols)
    std::memcpy(at, &both, sizeof both);
  else
    std::memcpy(at, &both, static_cast<size_t>(job.cols - col) * 2);
}

}  // namespace
