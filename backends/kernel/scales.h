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

// Four-or-six: amax / 6 times the tensor's scale, rounded after each step, as TransformerEngine does.
inline vf four_six_base(const Job& job, vu amax) { return (vf)amax / splat(6.0f) * splat(job.block_multiplier); }

// What a candidate errs by: the value that its element stands for, every factor applied, less x. EXACT: with
// each rounding of the definition; else by one multiplication, which is faster.
template <bool EXACT>
inline vf four_six_error(const Job& job, vf value, vf x) {
  if (EXACT) return value * splat(job.tensor_scale) / splat(job.error_divisor) - x;
  return value * splat(job.tensor_scale / job.error_divisor) - x;
}

// Whether sums of 16 squares of inexact errors, in any order, tell in every block which of the exact ones is less.
// A value is at most 2 amax, so an inexact error is off by 4 roundings of 2^-24 of that, d. The sum S is then off by
// at most 8 d sqrt(S) + 16 d^2, which is less than 2^-12 S + 2^-25 amax^2.
inline bool surely_tell(const Job& job, vf six, vf four, vu amax) {
  const vf a = (vf)amax, least = splat(1e-15f), most = splat(1e15f);  // no square underflows or overflows
  const vf doubt = splat(0x1p-11f) * (six + four) + splat(0x1p-24f) * a * a;
  const vi sure = (magnitude(six - four) > doubt) & (a > least) & (a < most) & (splat(job.tensor_scale) < most);
  return all(sure | (amax == splat_u(0)));
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
  return e8m0_scale((vi)((vu)s >> 23), max_u(amax, (vu)magnitude(variance)));  // NaN where the squares overflow
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
    if (ROUNDING == NEAREST || ROUNDING >= NEAREST_AWAY) return;
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
    uint16_t both[16];  // two bytes a lane
    for (int i = 0; i < 16; ++i) both[i] = static_cast<uint16_t>((even[i] & 1) | (odd[i] & 0x100));
    const int64_t left = job_.cols - col;
    std::memcpy(job_.mask + row * job_.cols + col, both, left < PAIR ? static_cast<size_t>(left) : sizeof both);
  }

  const Job& job_;
  const ELEMENT element_;
  const RoundKeys keys_;
};

}  // namespace
