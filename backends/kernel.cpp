// Quantise-dequantise for CPUs: the bits of ablate/numerics/quantize.py, at memory speed.
//
// Plain C++ with fixed-width vectors of 16 lanes, which compilers lower to AVX-512, AVX2 or NEON. 32
// neighbours of a row are one pair of vectors, even columns in one, odd ones in the other: that is how two
// bf16 lie in a 32-bit word, so loading and storing take a shift each and the first Hadamard stage needs no
// shuffle. Blocks along the columns stay in registers; blocks along the rows and square tiles work on strips
// of 64 columns, so neither axis needs a transposed copy. Floating-point contraction must be off: a fused
// multiply-add changes bits. What is chosen once for a tensor (scale rule, rotation) is a branch for each
// strip; what touches every element (format, rounding) is a template.

#include <cstdint>
#include <cstring>
#include <thread>
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
constexpr int ROUNDS = 7;        // of Philox4x32
constexpr uint32_t SIGN = 0x80000000u, MAGNITUDE = 0x7FFFFFFFu, HIGH = 0xFFFF0000u, QUIET_NAN = 0x7FC00000u;
constexpr float FLOAT_MAX = 3.402823466e38f;

enum Rule : int { E8M0 = 0, QUEST = 1, TENSOR = 2, TWO_LEVEL = 3, FOUR_SIX = 4, EDEN = 5 };
enum Rounding : int { NEAREST = 0, STOCHASTIC = 1, STOCHASTIC_ROCM = 2 };

}  // namespace

// As cpu_kernel.py fills it; the order of the fields is the interface.
struct Job {
  const void* src;
  void* dst;            // bf16 [rows, cols], contiguous
  uint8_t* mask;        // null, or where to write |scaled| < 6
  const float* before;  // null, or the signs before the Hadamard, for 32 elements at least; along the
  const float* after;   // columns even ones before odd ones in each 32. The same for those after it.
  int64_t rows, cols, src_stride;
  int32_t src_bf16, axis, square, block, hadamard, rotated_bf16;
  int32_t rule, rounding, mantissa_bits, min_exponent;
  uint32_t scale_add, scale_emax;  // E8M0: exponent = ((amax bits + add) >> 23) - emax
  float element_max, prescale, undo, norm;
  float tensor_scale, block_multiplier, tensor_descale;  // TENSOR, EDEN's clip; TWO_LEVEL, FOUR_SIX, EDEN
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
    return {(vf)(both << 16), (vf)(both & HIGH)};
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

// Low 32 bits of each lane times a 32-bit constant, all 64 bits of the product.
inline vq mul_wide(vq a, uint32_t m) {
#ifdef __AVX512F__
  return (vq)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(m));
#else
  return (a & 0xFFFFFFFFull) * static_cast<uint64_t>(m);
#endif
}

inline vq xor3(vq a, vq b, uint64_t key) {
#ifdef __AVX512F__
  return (vq)_mm512_ternarylogic_epi64((__m512i)a, (__m512i)b, _mm512_set1_epi64(static_cast<int64_t>(key)), 0x96);
#else
  return a ^ b ^ key;
#endif
}

// The keys of all rounds, widened once for a tensor.
struct RoundKeys {
  explicit RoundKeys(const Job& job) {
    uint32_t k0 = job.key0, k1 = job.key1;
    for (int round = 0; round < ROUNDS; ++round) {
      first[round] = k0;
      second[round] = k1;
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
  }
  uint64_t first[ROUNDS], second[ROUNDS];
};

struct Words {
  vu even, odd;
};

// Sixteen Philox4x32 calls at once, for the two pairs of a strip: lane l of word 2p + odd belongs to column
// 32 p + 2 l + odd. Calls with an even lane sit in one register of 64-bit lanes, odd ones in another; high
// halves may hold garbage, since only low halves are multiplied.
inline void philox(const Job& job, const RoundKeys& keys, int64_t strip, int64_t row, Words word[2]) {
  vq c[2][4];
  for (int odd = 0; odd < 2; ++odd) {
    c[odd][0] = static_cast<uint64_t>(strip * 16 + odd) + vq{0, 2, 4, 6, 8, 10, 12, 14};
    c[odd][1] = static_cast<uint64_t>(row) + vq{};
    c[odd][2] = static_cast<uint64_t>(job.step) + vq{};
    c[odd][3] = static_cast<uint64_t>(job.call) + vq{};
  }
  for (int round = 0; round < ROUNDS; ++round) {
    for (int odd = 0; odd < 2; ++odd) {
      vq* n = c[odd];
      const vq p0 = mul_wide(n[0], 0xD2511F53u), p1 = mul_wide(n[2], 0xCD9E8D57u);
      n[0] = xor3(p1 >> 32, n[1], keys.first[round]);
      n[2] = xor3(p0 >> 32, n[3], keys.second[round]);
      n[1] = p1;
      n[3] = p0;
    }
  }
  vu out[4];
  for (int j = 0; j < 4; ++j) out[j] = (vu)((c[0][j] & 0xFFFFFFFFull) | (c[1][j] << 32));
  word[0] = {out[0], out[1]};
  word[1] = {out[2], out[3]};
}

// Elements: E2M1 with everything known to the compiler, and any other with up to four exponent bits.
struct E2M1 {
  explicit E2M1(const Job&) {}
  static constexpr int mantissa_bits = 1;
  static constexpr int min_exponent = 0;
  static constexpr float max = 6.0f;
  static constexpr bool exact_in_bf16 = true;

  vf nearest(vf a) const {
    const vi under2 = a < splat(2.0f), under4 = a < splat(4.0f);
    const vf magic = under2 ? splat(6291456.0f) : (under4 ? splat(12582912.0f) : splat(25165824.0f));
    return (a + magic) - magic;
  }
};

struct Minifloat {
  explicit Minifloat(const Job& job) : Minifloat(job.mantissa_bits, job.min_exponent, job.element_max) {}
  Minifloat(int bits, int exponent, float largest) : mantissa_bits(bits), min_exponent(exponent), max(largest) {}
  int mantissa_bits, min_exponent;
  float max;
  static constexpr bool exact_in_bf16 = false;  // at the ends of the range

  vf nearest(vf a) const {
    const int drop = 23 - mantissa_bits;
    const vu even = (vu)a + ((1u << (drop - 1)) - 1) + (((vu)a >> drop) & 1u);
    const vf normal = (vf)(even & ~((1u << drop) - 1));
    const vf magic = (vf)splat_u(static_cast<uint32_t>(150 + min_exponent - mantissa_bits) << 23 | 1u << 22);
    const vf smallest = (vf)splat_u(static_cast<uint32_t>(127 + min_exponent) << 23);
    const vf q = a < smallest ? (a + magic) - magic : normal;
    return a == a ? q : a;
  }
};

// Round v to the element's grid; the sign, also of zero, is v's.
template <class ELEMENT, int ROUNDING>
inline vf round_element(const ELEMENT& element, vf v, vu word) {
  const vf a = min_f(magnitude(v), splat(element.max));
  if (ROUNDING == NEAREST) return with_sign_of(element.nearest(a), (vu)v);
  const uint32_t smallest = static_cast<uint32_t>(127 + element.min_exponent) << 23;
  const uint32_t below = static_cast<uint32_t>(element.mantissa_bits) << 23;
  const vu step = max_u((vu)a & 0x7F800000u, splat_u(smallest)) - below;
  const vf y = a * (vf)((254u << 23) - step);  // in steps: exact, for a step is a power of two
  const vf low = truncate(y);
  const vf p = y - low;
  vi up;
  if (ROUNDING == STOCHASTIC) {
    const vf u = __builtin_convertvector((vi)(word >> 8), vf) * splat(1.0f / 16777216.0f);
    up = p > u;
  } else {
    const vf below = truncate(p * splat(4194304.0f)) + __builtin_convertvector((vi)(word >> 10), vf);
    up = below >= splat(4194304.0f);
  }
  const vf q = (up ? low + splat(1.0f) : low) * (vf)step;
  return with_sign_of(a == a ? q : a, (vu)v);
}

struct Scale {
  vf down;  // multiplies before rounding
  vf up;    // and after
};

inline Scale e8m0_scale(vi byte, vu amax) {
  const vi bad = amax >= splat_u(0x7F800000u);
  byte = byte < 0 ? vi{} : byte;
  const vu up = byte == 0 ? splat_u(1u << 22) : ((vu)byte << 23);
  const vu down = (vu)(254 - byte) << 23;
  return {(vf)(bad ? splat_u(QUIET_NAN) : down), (vf)(bad ? splat_u(QUIET_NAN) : up)};
}

inline vf round_e4m3(vf a) {  // a >= 0
  a = min_f(a, splat(448.0f));
  const vu even = (vu)a + ((1u << 19) - 1) + (((vu)a >> 20) & 1u);
  const vf magic = (vf)splat_u(141u << 23 | 1u << 22);
  const vf q = a < splat(0.015625f) ? (a + magic) - magic : (vf)(even & ~((1u << 20) - 1));
  return a == a ? q : a;
}

inline Scale nvfp4_scale(const Job& job, vf block_scale) {
  const vf up = round_e4m3(min_f(block_scale, splat(FLOAT_MAX)));
  const vf down = min_f(splat(1.0f) / (up * splat(job.tensor_descale)), splat(FLOAT_MAX));
  return {down, up};
}

// From the largest magnitude of each lane's block.
inline Scale scale_of(const Job& job, vu amax) {
  if (job.rule == E8M0)
    return e8m0_scale((vi)((amax + job.scale_add) >> 23) - static_cast<int32_t>(job.scale_emax), amax);
  if (job.rule == TENSOR) return {splat(job.tensor_scale), splat(1.0f)};
  return nvfp4_scale(job, (vf)amax * splat(job.block_multiplier));
}

// QuEST: 2^floor(log2(2.92247856 / 6 std + 1e-8)), from the sums of the values and of their squares.
inline Scale quest_scale(vf sum, vf squares, vu amax) {
  const vf mean = sum * splat(0.03125f);
  const vf variance = squares * splat(0.03125f) - mean * mean;
  vf std = variance > splat(0.0f) ? variance : splat(0.0f);
#ifdef __AVX512F__
  std = (vf)_mm512_sqrt_ps((__m512)std);
#else
  for (int i = 0; i < 16; ++i) std[i] = __builtin_sqrtf(std[i]);
#endif
  const vf s = splat(static_cast<float>(2.92247856 / 6.0)) * std + splat(1e-8f);
  return e8m0_scale((vi)((vu)s >> 23), amax);
}

template <class ELEMENT, int ROUNDING>
class Quantiser {
 public:
  explicit Quantiser(const Job& job) : job_(job), element_(job), keys_(job) {}

  vf scaled(vf x, const Scale& s) const {
    const vf v = x * s.down;
    return job_.prescale == 1.0f ? v : v * splat(job_.prescale);
  }

  vf rounded(vf scaled, vu word) const { return round_element<ELEMENT, ROUNDING>(element_, scaled, word); }

  // Round, scale back and store 32 values.
  template <bool FULL>
  void put(int64_t row, int64_t col, const Pair& x, const Scale& even, const Scale& odd, const Words& word) const {
    const Pair v = {scaled(x.even, even), scaled(x.odd, odd)};
    if (job_.mask) put_mask(row, col, v);
    finish<FULL>(row, col, {rounded(v.even, word.even) * even.up, rounded(v.odd, word.odd) * odd.up});
  }

  template <bool FULL>
  void finish(int64_t row, int64_t col, Pair value) const {
    if (!ELEMENT::exact_in_bf16) value = {rounded_to_bf16(value.even), rounded_to_bf16(value.odd)};
    if (job_.undo != 1.0f) {
      const vf undo = splat(job_.undo);
      value = {rounded_to_bf16(value.even * undo), rounded_to_bf16(value.odd * undo)};
    }
    store<FULL>(job_, row, col, value);
  }

  // Every element's own word.
  void draw(int64_t strip, int64_t row, Words word[2]) const { philox(job_, keys_, strip, row, word); }

  // The words of a row of a strip, as the rounding uses them.
  void words(int64_t strip, int64_t row, Words word[2]) const {
    if (ROUNDING == NEAREST) return;
    if (ROUNDING == STOCHASTIC) return draw(strip, row, word);
    if (job_.axis == 0) {
      philox(job_, keys_, strip, row & ~int64_t{3}, word);
      const int shift = row & 2 ? 16 : 0;
      for (int p = 0; p < 2; ++p) word[p] = {word[p].even >> shift, word[p].odd >> shift};
      return;
    }
    philox(job_, keys_, strip, row, word);
    for (int p = 0; p < 2; ++p) {
      const vu shared = EVEN_TWICE(word[p].even) >> vu{0, 16, 0, 16, 0, 16, 0, 16, 0, 16, 0, 16, 0, 16, 0, 16};
      word[p] = {shared, shared};
    }
  }

 private:
  void put_mask(int64_t row, int64_t col, const Pair& v) const {
    const vi even = magnitude(v.even) < splat(6.0f), odd = magnitude(v.odd) < splat(6.0f);
    uint8_t* at = job_.mask + row * job_.cols + col;
    for (int64_t i = 0; i < PAIR && col + i < job_.cols; ++i) at[i] = (i % 2 ? odd : even)[i / 2] != 0;
  }

  const Job& job_;
  const ELEMENT element_;
  const RoundKeys keys_;
};

inline vf signed_by(vf v, const float* signs) {
  vf s;
  std::memcpy(&s, signs, sizeof s);
  return v * s;
}

// One stage of a butterfly between lanes. Lower lanes: self + partner; upper lanes: partner - self.
#define STAGE(v, SWAP, ...) ((SWAP(v)) + flip(v, vu{__VA_ARGS__}))

inline vf butterfly_lanes(vf v, int group) {
  constexpr uint32_t S = SIGN;
  v = STAGE(v, XOR1, 0, S, 0, S, 0, S, 0, S, 0, S, 0, S, 0, S, 0, S);
  v = STAGE(v, XOR2, 0, 0, S, S, 0, 0, S, S, 0, 0, S, S, 0, 0, S, S);
  v = STAGE(v, XOR4, 0, 0, 0, 0, S, S, S, S, 0, 0, 0, 0, S, S, S, S);
  if (group > 16) v = STAGE(v, XOR8, 0, 0, 0, 0, 0, 0, 0, 0, S, S, S, S, S, S, S, S);
  return v;
}

// Rotate groups along the columns of N pairs that follow each other in a row.
template <int N>
inline void rotate_columns(const Job& job, Pair v[N]) {
  const int group = job.hadamard, pairs = group > PAIR ? group / PAIR : 1;
  for (int i = 0; i < N; ++i) {
    if (job.before) {
      const float* signs = job.before + i % pairs * PAIR;
      v[i] = {signed_by(v[i].even, signs), signed_by(v[i].odd, signs + 16)};
    }
    const Pair first = {v[i].even + v[i].odd, v[i].even - v[i].odd};
    v[i] = {butterfly_lanes(first.even, group), butterfly_lanes(first.odd, group)};
  }
  for (int half = 1; half < N; half *= 2) {
    if (half >= pairs) break;
    for (int i = 0; i < N; ++i) {
      if (i & half) continue;
      const Pair a = v[i], b = v[i + half];
      v[i] = {a.even + b.even, a.odd + b.odd};
      v[i + half] = {a.even - b.even, a.odd - b.odd};
    }
  }
  for (int i = 0; i < N; ++i) {
    v[i] = {v[i].even * splat(job.norm), v[i].odd * splat(job.norm)};
    if (job.after) {
      const float* signs = job.after + i % pairs * PAIR;
      v[i] = {signed_by(v[i].even, signs), signed_by(v[i].odd, signs + 16)};
    }
    if (job.rotated_bf16) v[i] = {rounded_to_bf16(v[i].even), rounded_to_bf16(v[i].odd)};
  }
}

typedef Pair Row[2];  // a row of a strip

// Rotate groups along the rows of a strip.
inline void rotate_rows(const Job& job, Row tile[], int rows) {
  const int group = job.hadamard;
  if (job.before)
    for (int i = 0; i < rows; ++i)
      for (Pair& v : tile[i]) v = {v.even * splat(job.before[i % group]), v.odd * splat(job.before[i % group])};
  for (int half = 1; half < group; half *= 2)
    for (int i = 0; i < rows; ++i) {
      if (i & half) continue;
      for (int p = 0; p < 2; ++p) {
        const Pair a = tile[i][p], b = tile[i + half][p];
        tile[i][p] = {a.even + b.even, a.odd + b.odd};
        tile[i + half][p] = {a.even - b.even, a.odd - b.odd};
      }
    }
  for (int i = 0; i < rows; ++i)
    for (Pair& v : tile[i]) {
      v = {v.even * splat(job.norm), v.odd * splat(job.norm)};
      if (job.after) v = {v.even * splat(job.after[i % group]), v.odd * splat(job.after[i % group])};
      if (job.rotated_bf16) v = {rounded_to_bf16(v.even), rounded_to_bf16(v.odd)};
    }
}

struct Max {
  static vu of(vu a, vu b) { return max_u(a, b); }
};
struct Sum {
  static vf of(vf a, vf b) { return a + b; }
};

// Reduce the lanes of two vectors in eights, by the pairwise tree of the reference (halves, quarters, …):
// lanes 4i…4i+3 of the result hold eight i of the sixteen lanes of a and then of b.
template <class OP, class V>
inline V reduce_eights(V a, V b) {
  V c = OP::of(SHUFFLE2(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),
               SHUFFLE2(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31));
  c = OP::of(c, XOR2(c));
  return OP::of(c, XOR1(c));
}

// The packed value of each 16 columns, spread over the lanes of the pair that holds them.
template <int P>
inline vf spread(vf v) {
  constexpr int L = 8 * P, H = 8 * P + 4;
  return SHUFFLE(v, L, L + 1, L + 2, L + 3, L, L + 1, L + 2, L + 3, H, H + 1, H + 2, H + 3, H, H + 1, H + 2, H + 3);
}

inline vu magnitudes(const Pair& v) { return max_u((vu)v.even & MAGNITUDE, (vu)v.odd & MAGNITUDE); }

// Four-or-six: quantise under one of both block scales, with the squares of the errors.
template <class Q>
inline Pair candidate(const Job& job, const Q& q, const Pair& x, const Scale& s, const Words& word, Pair& square) {
  const Pair value = {q.rounded(q.scaled(x.even, s), word.even) * s.up, q.rounded(q.scaled(x.odd, s), word.odd) * s.up};
  const vf even = value.even * splat(job.tensor_descale) - x.even;
  const vf odd = value.odd * splat(job.tensor_descale) - x.odd;
  square = {even * even, odd * odd};
  return value;
}

inline Pair choose(vi take, const Pair& a, const Pair& b) {
  return {take ? a.even : b.even, take ? a.odd : b.odd};
}

template <bool FULL, class Q>
inline void four_six_columns(const Job& job, const Q& q, const Pair v[2], const Words word[2], vu amax, int64_t row,
                             int64_t col) {
  const vf base = (vf)amax * splat(job.block_multiplier);
  Row value[2];
  vf error[2];
  for (int four = 0; four < 2; ++four) {
    const Scale s = nvfp4_scale(job, four ? base * splat(1.5f) : base);
    Row square;
    value[four][0] = candidate(job, q, v[0], {spread<0>(s.down), spread<0>(s.up)}, word[0], square[0]);
    value[four][1] = candidate(job, q, v[1], {spread<1>(s.down), spread<1>(s.up)}, word[1], square[1]);
    error[four] = reduce_eights<Sum>(square[0].even, square[1].even) + reduce_eights<Sum>(square[0].odd, square[1].odd);
  }
  const vf fewer = (vf)(error[1] < error[0]);
  q.template finish<FULL>(row, col, choose((vi)spread<0>(fewer), value[1][0], value[0][0]));
  if (FULL || col + PAIR < job.cols)
    q.template finish<FULL>(row, col + PAIR, choose((vi)spread<1>(fewer), value[1][1], value[0][1]));
}

// MS-EDEN: the block scale before its correction, and the corrected one, rounded stochastically.
inline vf eden_scale(const Job& job, vu amax) {
  const vf up = round_e4m3((vf)amax / splat(job.tensor_scale) / splat(job.tensor_descale));
  return up == splat(0.0f) ? splat(1.0f) : up;
}

inline vf eden_corrected(vf scale, vf energy, vf product, vu word) {
  const vf stretch = product == splat(0.0f) ? splat(1.0f) : energy / product;
  return round_element<Minifloat, STOCHASTIC>(Minifloat(3, -6, 448.0f), scale * stretch, word);
}

struct Eden {
  Pair value, energy, product;
};

template <class Q>
inline Eden eden_round(const Job& job, const Q& q, const Pair& x, vf even, vf odd) {
  const Pair scaled = {x.even / (even * splat(job.tensor_descale)), x.odd / (odd * splat(job.tensor_descale))};
  const Pair value = {q.rounded(scaled.even, vu{}), q.rounded(scaled.odd, vu{})};
  return {value,
          {scaled.even * scaled.even, scaled.odd * scaled.odd},
          {scaled.even * value.even, scaled.odd * value.odd}};
}

inline Pair add(const Pair& a, const Pair& b) { return {a.even + b.even, a.odd + b.odd}; }

// The sums over each Hadamard group along the columns, packed for each strip as reduce_eights does.
inline void eden_sums(int group, Pair s[4], vf packed[2]) {
  if (group == 128) {
    s[0] = s[1] = s[2] = s[3] = add(add(s[0], s[2]), add(s[1], s[3]));
  } else if (group == 64) {
    s[0] = s[1] = add(s[0], s[1]);
  }
  for (int k = 0; k < (group == 128 ? 2 : 1); ++k) {
    Pair a = s[2 * k], b = s[2 * k + 1];
    if (group > 16) {
      a = {a.even + XOR8(a.even), a.odd + XOR8(a.odd)};
      b = {b.even + XOR8(b.even), b.odd + XOR8(b.odd)};
    }
    packed[k] = reduce_eights<Sum>(a.even, b.even) + reduce_eights<Sum>(a.odd, b.odd);
  }
}

template <bool FULL, class Q>
void eden_columns(const Job& job, const Q& q, const Pair v[], const vu amax[], int64_t row, int64_t col, int strips) {
  const int together = job.hadamard == 128 ? 2 : 1;  // strips that one group takes
  for (int s = 0; s < strips; s += together) {
    vf up[2], energy[2], product[2];
    Pair value[4], energies[4], products[4];
    for (int k = 0; k < together; ++k) {
      up[k] = eden_scale(job, amax[s + k]);
      const vf spreads[2] = {spread<0>(up[k]), spread<1>(up[k])};
      for (int p = 0; p < 2; ++p) {
        const Eden done = eden_round(job, q, v[2 * (s + k) + p], spreads[p], spreads[p]);
        value[2 * k + p] = done.value;
        energies[2 * k + p] = done.energy;
        products[2 * k + p] = done.product;
      }
    }
    eden_sums(job.hadamard, energies, energy);
    eden_sums(job.hadamard, products, product);
    for (int k = 0; k < together; ++k) {
      const int64_t at = col + (s + k) * STRIP;
      if (!FULL && at >= job.cols) break;
      Words word[2];
      q.draw(at / STRIP, row, word);
      const vu first = SHUFFLE2(word[0].even, word[1].even, 0, 0, 0, 0, 8, 8, 8, 8, 16, 16, 16, 16, 24, 24, 24, 24);
      const vf chosen = eden_corrected(up[k], energy[k], product[k], first);
      const vf left = spread<0>(chosen), right = spread<1>(chosen);
      q.template finish<FULL>(row, at, {value[2 * k].even * left, value[2 * k].odd * left});
      if (FULL || at + PAIR < job.cols)
        q.template finish<FULL>(row, at + PAIR, {value[2 * k + 1].even * right, value[2 * k + 1].odd * right});
    }
  }
}

// The packed scales of one strip whose blocks lie along the columns.
inline Scale scale_of_strip(const Job& job, const Pair v[2], vu amax) {
  if (job.rule != QUEST) return scale_of(job, amax);
  Row sum, square;  // over 32 columns the tree starts with the two halves of a pair
  for (int p = 0; p < 2; ++p) {
    const vf even = v[p].even * v[p].even, odd = v[p].odd * v[p].odd;
    sum[p] = {v[p].even + XOR8(v[p].even), v[p].odd + XOR8(v[p].odd)};
    square[p] = {even + XOR8(even), odd + XOR8(odd)};
  }
  return quest_scale(
      reduce_eights<Sum>(sum[0].even, sum[1].even) + reduce_eights<Sum>(sum[0].odd, sum[1].odd),
      reduce_eights<Sum>(square[0].even, square[1].even) + reduce_eights<Sum>(square[0].odd, square[1].odd), amax);
}

constexpr int CHUNK = 8;

// Up to CHUNK strips of a row, in short loops over all of them: each strip by itself is a long chain of
// dependent steps, and a processor looks ahead over a few hundred instructions only.
template <bool FULL, int N, class Q>
inline void chunk_of_columns(const Job& job, const Q& q, int64_t row, int64_t col, int strips) {
  Pair v[2 * CHUNK];
  vu amax[CHUNK];
  Scale packed[CHUNK];
  for (int i = 0; i < 2 * strips; i += N) {
    for (int j = i; j < i + N; ++j) v[j] = load<FULL>(job, row, col + j * PAIR);
    if (job.hadamard) rotate_columns<N>(job, v + i);
  }
  for (int s = 0; s < strips; ++s) {
    const vu m = reduce_eights<Max>(magnitudes(v[2 * s]), magnitudes(v[2 * s + 1]));
    amax[s] = job.block == 32 ? max_u(m, XOR4(m)) : m;
  }
  if (job.rule == EDEN) return eden_columns<FULL>(job, q, v, amax, row, col, strips);
  if (job.rule != FOUR_SIX)
    for (int s = 0; s < strips; ++s) packed[s] = scale_of_strip(job, v + 2 * s, amax[s]);
  for (int s = 0; s < strips; ++s) {
    const int64_t at = col + s * STRIP;
    if (!FULL && at >= job.cols) break;
    Words word[2] = {};
    q.words(at / STRIP, row, word);
    if (job.rule == FOUR_SIX) {
      four_six_columns<FULL>(job, q, v + 2 * s, word, amax[s], row, at);
      continue;
    }
    const Scale first = {spread<0>(packed[s].down), spread<0>(packed[s].up)};
    q.template put<FULL>(row, at, v[2 * s], first, first, word[0]);
    const Scale second = {spread<1>(packed[s].down), spread<1>(packed[s].up)};
    if (FULL || at + PAIR < job.cols) q.template put<FULL>(row, at + PAIR, v[2 * s + 1], second, second, word[1]);
  }
}

// Blocks along the columns; N pairs are what a Hadamard group takes, or a strip.
template <class ELEMENT, int ROUNDING, int N>
void along_columns(const Job& job, int64_t begin, int64_t end) {
  const Quantiser<ELEMENT, ROUNDING> q(job);
  const int64_t whole = job.cols / (PAIR * N) * (PAIR * N);
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t col = 0; col < whole; col += CHUNK * STRIP) {
      const int64_t left = (whole - col) / STRIP;
      chunk_of_columns<true, N>(job, q, row, col, left < CHUNK ? static_cast<int>(left) : CHUNK);
    }
    if (whole < job.cols) chunk_of_columns<false, N>(job, q, row, whole, N / 2);
  }
}

inline vf sum_of_rows(vf s[], int rows) {  // the pairwise tree over 16, 32, … rows, in place
  for (int half = rows / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) s[i] = s[i] + s[i + half];
  return s[0];
}

struct PairScale {
  Scale even, odd;
};

// The scales of the rows from `top` on, for pair p of the strip.
inline PairScale scale_of_rows(const Job& job, const Row tile[], int top, int p) {
  vu even = {}, odd = {};
  for (int i = top; i < top + job.block; ++i) {
    even = max_u(even, (vu)tile[i][p].even & MAGNITUDE);
    odd = max_u(odd, (vu)tile[i][p].odd & MAGNITUDE);
  }
  if (job.square) {  // 32 columns are the whole pair, 16 are eight lanes of it
    vu m = max_u(even, odd);
    m = max_u(m, XOR1(m));
    m = max_u(m, XOR2(m));
    m = max_u(m, XOR4(m));
    if (job.block == 32) m = max_u(m, XOR8(m));
    const Scale s = scale_of(job, m);
    return {s, s};
  }
  if (job.rule != QUEST) return {scale_of(job, even), scale_of(job, odd)};
  vf sum[2][32], square[2][32];
  for (int i = 0; i < 32; ++i) {
    const Pair& v = tile[top + i][p];
    sum[0][i] = v.even;
    sum[1][i] = v.odd;
    square[0][i] = v.even * v.even;
    square[1][i] = v.odd * v.odd;
  }
  return {quest_scale(sum_of_rows(sum[0], 32), sum_of_rows(square[0], 32), even),
          quest_scale(sum_of_rows(sum[1], 32), sum_of_rows(square[1], 32), odd)};
}

template <class Q>
void four_six_rows(const Job& job, const Q& q, const Row tile[], const Words word[][2], int top, int p, int64_t row,
                   int64_t col) {
  vf value[2][2][16], error[2][2][16];  // [odd][four][row]
  for (int odd = 0; odd < 2; ++odd) {
    vu m = {};
    for (int i = top; i < top + 16; ++i) m = max_u(m, (vu)(odd ? tile[i][p].odd : tile[i][p].even) & MAGNITUDE);
    const vf base = (vf)m * splat(job.block_multiplier);
    for (int four = 0; four < 2; ++four) {
      const Scale s = nvfp4_scale(job, four ? base * splat(1.5f) : base);
      for (int i = 0; i < 16; ++i) {
        const vf x = odd ? tile[top + i][p].odd : tile[top + i][p].even;
        const vf y = q.rounded(q.scaled(x, s), odd ? word[i][p].odd : word[i][p].even) * s.up;
        const vf e = y * splat(job.tensor_descale) - x;
        value[odd][four][i] = y;
        error[odd][four][i] = e * e;
      }
    }
  }
  vi fewer[2];
  for (int odd = 0; odd < 2; ++odd) fewer[odd] = sum_of_rows(error[odd][1], 16) < sum_of_rows(error[odd][0], 16);
  for (int i = 0; i < 16; ++i)
    q.template finish<false>(row + top + i, col,
                             {fewer[0] ? value[0][1][i] : value[0][0][i], fewer[1] ? value[1][1][i] : value[1][0][i]});
}

// MS-EDEN along the rows: the rows of a strip are one Hadamard group.
template <class Q>
void eden_rows(const Job& job, const Q& q, const Row tile[], int group, int64_t block, int64_t strip, int pairs) {
  for (int p = 0; p < pairs; ++p) {
    vf up[2][MOST_ROWS / 16], energy[2][MOST_ROWS], product[2][MOST_ROWS];
    Pair value[MOST_ROWS];
    for (int top = 0; top < group; top += 16) {
      vu even = {}, odd = {};
      for (int i = top; i < top + 16; ++i) {
        even = max_u(even, (vu)tile[i][p].even & MAGNITUDE);
        odd = max_u(odd, (vu)tile[i][p].odd & MAGNITUDE);
      }
      up[0][top / 16] = eden_scale(job, even);
      up[1][top / 16] = eden_scale(job, odd);
      for (int i = top; i < top + 16; ++i) {
        const Eden done = eden_round(job, q, tile[i][p], up[0][top / 16], up[1][top / 16]);
        value[i] = done.value;
        energy[0][i] = done.energy.even;
        energy[1][i] = done.energy.odd;
        product[0][i] = done.product.even;
        product[1][i] = done.product.odd;
      }
    }
    const vf energies[2] = {sum_of_rows(energy[0], group), sum_of_rows(energy[1], group)};
    const vf products[2] = {sum_of_rows(product[0], group), sum_of_rows(product[1], group)};
    for (int top = 0; top < group; top += 16) {
      Words word[2];
      q.draw(strip, block + top, word);
      const vf even = eden_corrected(up[0][top / 16], energies[0], products[0], word[p].even);
      const vf odd = eden_corrected(up[1][top / 16], energies[1], products[1], word[p].odd);
      for (int i = top; i < top + 16; ++i)
        q.template finish<false>(block + i, strip * STRIP + p * PAIR, {value[i].even * even, value[i].odd * odd});
    }
  }
}

// Ask for a row of the next strip, to read or to write, in the second cache: the rows of a strip may all lie a
// power of two apart and would evict each other from the first. It hides most of the way to memory, which
// the processor's own prefetching does not do for 32 rows at once.
inline void fetch(const void* base, int64_t byte, bool to_write) {
  const char* at = static_cast<const char*>(base) + byte;
  if (to_write) {
    __builtin_prefetch(at, 1, 2);
    __builtin_prefetch(at + 64, 1, 2);
  } else {
    __builtin_prefetch(at, 0, 2);
    __builtin_prefetch(at + 64, 0, 2);
  }
}

template <bool FULL, class Q>
void strip_of_rows(const Job& job, const Q& q, Row tile[], int group, int64_t block, int64_t strip) {
  const int64_t left = strip * STRIP;
  const bool rows_contract = job.axis == 0;
  const int64_t element = job.src_bf16 ? 2 : 4;
  for (int i = 0; i < group; ++i) {
    fetch(job.src, ((block + i) * job.src_stride + left + STRIP) * element, false);
    for (int p = 0; p < 2; ++p) tile[i][p] = load<FULL>(job, block + i, left + p * PAIR);
    if (job.hadamard && !rows_contract) rotate_columns<2>(job, tile[i]);
  }
  if (job.hadamard && rows_contract) rotate_rows(job, tile, group);
  const int pairs = FULL || job.cols - left > PAIR ? 2 : 1;
  if (job.rule == EDEN) return eden_rows(job, q, tile, group, block, strip, pairs);
  for (int top = 0; top < group; top += job.block) {
    if (job.rule == FOUR_SIX) {
      Words word[16][2] = {};
      for (int i = 0; i < 16; ++i) q.words(strip, block + top + i, word[i]);
      for (int p = 0; p < pairs; ++p) four_six_rows(job, q, tile, word, top, p, block, left + p * PAIR);
      continue;
    }
    PairScale scale[2];
    for (int p = 0; p < pairs; ++p) scale[p] = scale_of_rows(job, tile, top, p);
    for (int i = top; i < top + job.block; ++i) {
      Words word[2] = {};
      q.words(strip, block + i, word);
      fetch(job.dst, ((block + i) * job.cols + left + STRIP) * 2, true);
      for (int p = 0; p < pairs; ++p)
        q.template put<FULL>(block + i, left + p * PAIR, tile[i][p], scale[p].even, scale[p].odd, word[p]);
    }
  }
}

// Blocks along the rows, and square tiles along either axis: some rows by 64 columns at a time.
template <class ELEMENT, int ROUNDING>
void along_rows(const Job& job, int64_t begin_strip, int64_t end_strip) {
  const Quantiser<ELEMENT, ROUNDING> q(job);
  const int group = job.axis == 0 && job.hadamard > job.block ? job.hadamard : job.block;
  Row tile[MOST_ROWS];
  for (int64_t block = 0; block < job.rows; block += group)
    for (int64_t strip = begin_strip; strip < end_strip; ++strip) {
      if ((strip + 1) * STRIP <= job.cols)
        strip_of_rows<true>(job, q, tile, group, block, strip);
      else
        strip_of_rows<false>(job, q, tile, group, block, strip);
    }
}

// torch's own OpenMP threads, if ablate_use_threads_of was told of them. Threads of our own would compete with
// those, which spin for a while after each of torch's operations.
typedef void (*Parallel)(void (*body)(void*), void* data, unsigned threads, unsigned flags);
typedef int (*Count)();
Parallel parallel = nullptr;
Count this_thread = nullptr, all_threads = nullptr;

template <typename Work>
struct Share {
  int64_t items;
  Work* work;
  static void run(void* data) {
    const Share* share = static_cast<const Share*>(data);
    const int64_t t = this_thread(), n = all_threads();
    const int64_t begin = share->items * t / n, end = share->items * (t + 1) / n;
    if (begin < end) (*share->work)(begin, end);
  }
};

template <typename Work>
void split(int64_t items, int threads, Work work) {
  if (threads <= 1 || items < 2) return work(0, items);
  if (parallel) {
    Share<Work> share{items, &work};
    return parallel(Share<Work>::run, &share, static_cast<unsigned>(threads), 0);
  }
  std::vector<std::thread> pool;
  for (int t = 1; t < threads; ++t) pool.emplace_back(work, items * t / threads, items * (t + 1) / threads);
  work(0, items / threads);
  for (auto& thread : pool) thread.join();
}

inline int64_t strips(const Job& job) { return (job.cols + STRIP - 1) / STRIP; }

template <class ELEMENT, int ROUNDING>
void run(const Job& job, int threads) {
  if ((job.axis == 0 && job.block > 1) || job.square)
    split(strips(job), threads, [&](int64_t a, int64_t b) { along_rows<ELEMENT, ROUNDING>(job, a, b); });
  else if (job.hadamard > STRIP)
    split(job.rows, threads, [&](int64_t a, int64_t b) { along_columns<ELEMENT, ROUNDING, 4>(job, a, b); });
  else
    split(job.rows, threads, [&](int64_t a, int64_t b) { along_columns<ELEMENT, ROUNDING, 2>(job, a, b); });
}

uint32_t largest(vu m) {
  uint32_t best = 0;
  for (int i = 0; i < 16; ++i) best = m[i] > best ? m[i] : best;
  return best;
}

uint32_t amax_columns(const Job& job, int64_t begin, int64_t end) {
  constexpr int N = MOST_ROWS / PAIR;
  vu m = {};
  for (int64_t row = begin; row < end; ++row)
    for (int64_t col = 0; col < job.cols; col += PAIR * N) {
      Pair v[N];
      for (int i = 0; i < N; ++i) v[i] = load<false>(job, row, col + i * PAIR);
      if (job.hadamard) rotate_columns<N>(job, v);
      for (int i = 0; i < N; ++i) m = max_u(m, magnitudes(v[i]));
    }
  return largest(m);
}

uint32_t amax_rows(const Job& job, int64_t begin_strip, int64_t end_strip) {
  vu m = {};
  Row tile[MOST_ROWS];
  for (int64_t block = 0; block < job.rows; block += job.hadamard)
    for (int64_t strip = begin_strip; strip < end_strip; ++strip) {
      for (int i = 0; i < job.hadamard; ++i)
        for (int p = 0; p < 2; ++p) tile[i][p] = load<false>(job, block + i, strip * STRIP + p * PAIR);
      rotate_rows(job, tile, job.hadamard);
      for (int i = 0; i < job.hadamard; ++i) m = max_u(m, max_u(magnitudes(tile[i][0]), magnitudes(tile[i][1])));
    }
  return largest(m);
}

}  // namespace

// The largest bit pattern without sign of the rotated values, so that NaN and Inf win over every number.
extern "C" uint32_t ablate_amax_bits(const Job* given, int threads) {
  const Job& job = *given;
  const bool rows = job.hadamard && job.axis == 0;
  const int64_t items = rows ? strips(job) : job.rows;
  const int parts = threads > 1 && items > 1 ? threads : 1;
  std::vector<uint32_t> found(parts, 0u);
  split(parts, parts, [&](int64_t first, int64_t last) {
    for (int64_t part = first; part < last; ++part) {
      const int64_t begin = items * part / parts, end = items * (part + 1) / parts;
      found[part] = rows ? amax_rows(job, begin, end) : amax_columns(job, begin, end);
    }
  });
  uint32_t best = 0;
  for (const uint32_t m : found) best = m > best ? m : best;
  return best;
}

// Shapes and dtypes are checked by the caller.
extern "C" void ablate_quantise(const Job* given, int threads) {
  const Job& job = *given;
  const bool e2m1 = job.element_max == 6.0f;
  if (e2m1 && job.rounding == NEAREST) return run<E2M1, NEAREST>(job, threads);
  if (e2m1 && job.rounding == STOCHASTIC) return run<E2M1, STOCHASTIC>(job, threads);
  if (e2m1) return run<E2M1, STOCHASTIC_ROCM>(job, threads);
  if (job.rounding == NEAREST) return run<Minifloat, NEAREST>(job, threads);
  return run<Minifloat, STOCHASTIC>(job, threads);
}

// GOMP_parallel, omp_get_thread_num and omp_get_num_threads of the OpenMP runtime that torch runs on.
extern "C" void ablate_use_threads_of(void* run, void* number, void* count) {
  parallel = reinterpret_cast<Parallel>(run);
  this_thread = reinterpret_cast<Count>(number);
  all_threads = reinterpret_cast<Count>(count);
}

extern "C" int64_t ablate_job_size() { return sizeof(Job); }
