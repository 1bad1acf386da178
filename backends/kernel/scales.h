// Scale rules, and the quantiser that applies a scale, rounds and stores.

#pragma once

#include "elements.h"

namespace {

struct Scale {
  vf down;  // multiplies before rounding, or divides under UE5M3
  vf up;    // and after
};

INLINE Scale e8m0_scale(vi byte, const vu& amax) {
  const vi bad = amax >= 0x7F800000u;
  byte = choose(byte < 0, vi{}, byte);
  const vu up = choose(byte == 0, vu(1u << 22), (vu)byte << 23);
  const vu down = (vu)(254 - byte) << 23;
  return {(vf)choose(bad, vu(QUIET_NAN), down), (vf)choose(bad, vu(QUIET_NAN), up)};
}

INLINE vf round_e4m3(vf a) {  // a >= 0
  a = min_f(a, 448.0f);
  const vu even = (vu)a + ((1u << 19) - 1) + (((vu)a >> 20) & 1u);
  const vf magic = (vf)vu(141u << 23 | 1u << 22);
  const vf q = choose(a < 0.015625f, (a + magic) - magic, (vf)(even & ~((1u << 20) - 1)));
  return choose(a == a, q, a);
}

INLINE Scale nvfp4_scale(const Job& job, const vf& block_scale) {
  const vf up = round_e4m3(min_f(block_scale, FLOAT_MAX));
  const vf down = min_f(1.0f / (up * job.tensor_descale), FLOAT_MAX);
  return {down, up};
}

// At least 2^-17, the smallest, and NaN beside NaN or Inf.
INLINE Scale ue5m3_scale(const Job& job, const vu& amax) {
  const vf base = (vf)amax / job.tensor_descale / 6.0f;
  const vf held = min_f(choose(base > 0x1p-17f, base, vf(0x1p-17f)), 114688.0f);
  const vf up = choose(vf(FLOAT_MAX) >= base, Minifloat(3, -14, 114688.0f).nearest(held), (vf)vu(QUIET_NAN));
  return {up * job.tensor_descale, up};
}

// amax / the largest element, times the tensor's scale, rounded after each step.
INLINE vf divided_base(const Job& job, const vu& amax) { return (vf)amax / job.element_max * job.block_multiplier; }

// From the largest magnitude of each lane's block.
INLINE Scale scale_of(const Job& job, const vu& amax) {
  if (job.rule == E8M0)
    return e8m0_scale((vi)((amax + job.scale_add) >> 23) - static_cast<int32_t>(job.scale_emax), amax);
  if (job.rule == TENSOR) return {job.tensor_scale, 1.0f};
  if (job.rule == UE5M3) return ue5m3_scale(job, amax);
  const vf multiplied = job.folded ? (vf)amax * job.block_multiplier : divided_base(job, amax);
  return nvfp4_scale(job, multiplied);
}

// What a candidate errs by: the value that its element stands for, every factor applied, less x. EXACT: with
// each rounding of the definition; else by one multiplication, which is faster.
template <bool EXACT>
INLINE vf four_six_error(const Job& job, const vf& value, const vf& x) {
  if (EXACT) return value * job.tensor_scale / job.error_divisor - x;
  return value * (job.tensor_scale / job.error_divisor) - x;
}

INLINE vf counted(const Job& job, const vf& error) { return job.magnitudes ? magnitude(error) : error * error; }

// Whether sums of 16 inexact errors, in any order, tell in every block which of the exact ones is less. A value is at
// most 2 amax, so an inexact error is off by 4 roundings of 2^-24 of that, d. A sum S of squares is then off by at
// most 8 d sqrt(S) + 16 d^2, which is less than 2^-12 S + 2^-25 amax^2; a sum of magnitudes by 16 d and 2^-20 S.
INLINE bool surely_tell(const Job& job, const vf& six, const vf& four, const vu& amax) {
  const vf a = (vf)amax, least = 1e-15f, most = 1e15f;  // no square underflows or overflows
  const vf doubt = 0x1p-11f * (six + four) + (job.magnitudes ? 0x1p-15f * a : 0x1p-24f * a * a);
  const vi sure = (magnitude(six - four) > doubt) & (a > least) & (a < most) & (job.tensor_scale < most);
  return all(sure | (amax == 0));
}

// QuEST: 2^floor(log2(2.92247856 / 6 std + 1e-8)), from the sums of the values and of their squares.
INLINE Scale quest_scale(const vf& sum, const vf& squares, const vu& amax) {
  const vf mean = sum * 0.03125f;
  const vf variance = squares * 0.03125f - mean * mean;
  const vf std = square_root(choose(variance > 0.0f, variance, vf{}));
  const vf s = static_cast<float>(2.92247856 / 6.0) * std + 1e-8f;
  return e8m0_scale((vi)((vu)s >> 23), max_u(amax, (vu)magnitude(variance)));  // NaN where the squares overflow
}

template <class ELEMENT, int ROUNDING>
class Quantiser {
 public:
  // Which rules a policy can have beside its element and rounding: the others are not compiled.
  static constexpr bool FOUR_SIXES = ELEMENT::exact_in_bf16 && ROUNDING != STOCHASTIC_ROCM,
                        EDENS = FOUR_SIXES && (ROUNDING == NEAREST || ROUNDING >= NEAREST_AWAY);

  explicit Quantiser(const Job& job) : job_(job), element_(job), keys_(job) {}

  INLINE vf scaled(const vf& x, const Scale& s) const {
    const vf v = job_.rule == UE5M3 ? x / s.down : x * s.down;
    return job_.prescale == 1.0f ? v : v * job_.prescale;
  }

  INLINE vf rounded(const vf& scaled, const vu& word) const {
    return round_element<ELEMENT, ROUNDING>(element_, scaled, word);
  }

  // Round, scale back and store 32 values.
  template <bool FULL>
  INLINE void put(int64_t row, int64_t col, const Pair& x, const Scale& even, const Scale& odd,
                  const Words& word) const {
    const Pair v = {scaled(x.even, even), scaled(x.odd, odd)};
    if (job_.mask) put_mask(row, col, v);
    finish<FULL>(row, col, {rounded(v.even, word.even) * even.up, rounded(v.odd, word.odd) * odd.up});
  }

  template <bool FULL>
  INLINE void finish(int64_t row, int64_t col, Pair value) const {
    if (!ELEMENT::exact_in_bf16) value = {rounded_to_bf16(value.even), rounded_to_bf16(value.odd)};
    if (job_.undo != 1.0f) {
      const vf undo = job_.undo;
      value = {rounded_to_bf16(value.even * undo), rounded_to_bf16(value.odd * undo)};
    }
    store<FULL>(job_, row, col, value);
  }

  // Every element's own word.
  INLINE void draw(int64_t strip, int64_t row, Words word[2]) const { philox(job_, keys_, strip, row, word); }

  // The words of a row of a strip, as the rounding uses them.
  INLINE void words(int64_t strip, int64_t row, Words word[2]) const {
    if (ROUNDING == NEAREST || ROUNDING >= NEAREST_AWAY) return;
    if (ROUNDING <= STOCHASTIC_8BIT) return draw(strip, row, word);
    if (job_.axis == 0) {
      philox(job_, keys_, strip, row & ~int64_t{3}, word);
      const int shift = row & 2 ? 16 : 0;
      for (int p = 0; p < 2; ++p) word[p] = {word[p].even >> shift, word[p].odd >> shift};
      return;
    }
    philox(job_, keys_, strip, row, word);
    for (int p = 0; p < 2; ++p) {
      const vu both = evens_twice(word[p].even), shared = choose(upper_lanes<1>(), both >> 16, both);
      word[p] = {shared, shared};
    }
  }

 private:
  void put_mask(int64_t row, int64_t col, const Pair& v) const {
    const vi even = magnitude(v.even) < 6.0f, odd = magnitude(v.odd) < 6.0f;
    uint16_t both[16];  // two bytes a lane
    write_narrow(((vu)even & 1u) | ((vu)odd & 0x100u), both);
    const int64_t left = job_.cols - col;
    std::memcpy(job_.mask + row * job_.cols + col, both, left < PAIR ? static_cast<size_t>(left) : sizeof both);
  }

  const Job& job_;
  const ELEMENT element_;
  const RoundKeys keys_;
};

}  // namespace
