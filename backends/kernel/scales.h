// Scale rules, and the quantiser that applies a scale, rounds and stores.

#pragma once

#include "elements.h"

namespace {

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

}  // namespace
