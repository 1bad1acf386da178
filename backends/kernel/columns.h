// Blocks along the columns.

#pragma once

#include "rotate.h"
#include "scales.h"

namespace {

// Four-or-six: the values under one of both block scales, and what their errors count.
template <class Q>
INLINE Pair candidate(const Q& q, const Pair& x, const Scale& s, const Words& word) {
  return {q.rounded(q.scaled(x.even, s), word.even) * s.up, q.rounded(q.scaled(x.odd, s), word.odd) * s.up};
}

template <bool EXACT>
INLINE Pair counted_error(const Job& job, const Pair& value, const Pair& x) {
  return {counted(job, four_six_error<EXACT>(job, value.even, x.even)),
          counted(job, four_six_error<EXACT>(job, value.odd, x.odd))};
}

// Element I of each eight lanes of a and then of b, packed as reduce_eights does.
template <int I>
INLINE vf pick(const vf& a, const vf& b) {
  constexpr int J = 8 + I, K = 16 + I, L = 24 + I;
  return shuffle<I, I, I, I, J, J, J, J, K, K, K, K, L, L, L, L>(a, b);
}

template <int I = 0>
INLINE vf sum_in_order(const Pair& left, const Pair& right, vf total = vf{}) {
  total = total + pick<I>(left.even, right.even) + pick<I>(left.odd, right.odd);
  if constexpr (I < 7) return sum_in_order<I + 1>(left, right, total);
  return total;
}

// The error of each of a strip's blocks, packed as reduce_eights does.
template <bool EXACT>
inline vf block_errors(const Job& job, const Pair value[2], const Pair v[2]) {
  const Pair left = counted_error<EXACT>(job, value[0], v[0]), right = counted_error<EXACT>(job, value[1], v[1]);
  if (EXACT) return sum_in_order(left, right);
  return reduce_eights<Sum>(left.even + left.odd, right.even + right.odd);
}

INLINE Pair choose(const vi& take, const Pair& a, const Pair& b) {
  return {choose(take, a.even, b.even), choose(take, a.odd, b.odd)};
}

template <class Q>
void four_six_columns(const Job& job, const Q& q, const Pair v[2], const Words word[2], const vu& amax, int64_t row,
                      int64_t col) {
  const vf base = divided_base(job, amax);
  Row value[2];
  vf error[2];
  for (int four = 0; four < 2; ++four) {
    const Scale s = nvfp4_scale(job, four ? base * 1.5f : base);
    value[four][0] = candidate(q, v[0], {spread<0>(s.down), spread<0>(s.up)}, word[0]);
    value[four][1] = candidate(q, v[1], {spread<1>(s.down), spread<1>(s.up)}, word[1]);
    error[four] = block_errors<false>(job, value[four], v);
  }
  if (!surely_tell(job, error[0], error[1], amax))
    for (int four = 0; four < 2; ++four) error[four] = block_errors<true>(job, value[four], v);
  const vf fewer = (vf)(error[1] < error[0]);
  q.template finish<false>(row, col, choose((vi)spread<0>(fewer), value[1][0], value[0][0]));
  if (col + PAIR < job.cols)
    q.template finish<false>(row, col + PAIR, choose((vi)spread<1>(fewer), value[1][1], value[0][1]));
}

// MS-EDEN: the block scale before its correction, and the corrected one, rounded stochastically.
INLINE vf eden_scale(const Job& job, const vu& amax) {
  const vf up = round_e4m3((vf)amax / job.tensor_scale / job.tensor_descale);
  return choose(up == 0.0f, vf(1.0f), up);
}

INLINE vf eden_corrected(const vf& scale, const vf& energy, const vf& product, const vu& word) {
  const vf stretch = choose(product == 0.0f, vf(1.0f), energy / product);
  return round_element<Minifloat, STOCHASTIC>(Minifloat(3, -6, 448.0f), scale * stretch, word);
}

struct Eden {
  Pair value, energy, product;
};

template <class Q>
INLINE Eden eden_round(const Job& job, const Q& q, const Pair& x, const vf& even, const vf& odd) {
  const Pair scaled = {x.even / (even * job.tensor_descale), x.odd / (odd * job.tensor_descale)};
  const Pair value = {q.rounded(scaled.even, vu{}), q.rounded(scaled.odd, vu{})};
  Pair a = scaled, b = value;
  if (job.unscaled) a = {a.even * even, a.odd * odd}, b = {b.even * even, b.odd * odd};
  return {value, {a.even * a.even, a.odd * a.odd}, {a.even * b.even, a.odd * b.odd}};
}

INLINE Pair add(const Pair& a, const Pair& b) { return {a.even + b.even, a.odd + b.odd}; }

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
      a = {a.even + swap_eights(a.even), a.odd + swap_eights(a.odd)};
      b = {b.even + swap_eights(b.even), b.odd + swap_eights(b.odd)};
    }
    packed[k] = reduce_eights<Sum>(a.even, b.even) + reduce_eights<Sum>(a.odd, b.odd);
  }
}

template <class Q>
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
      if (at >= job.cols) break;
      Words word[2];
      q.draw(at / STRIP, row, word);
      const vu first = shuffle<0, 0, 0, 0, 8, 8, 8, 8, 16, 16, 16, 16, 24, 24, 24, 24>(word[0].even, word[1].even);
      const vf chosen = eden_corrected(up[k], energy[k], product[k], first);
      const vf left = spread<0>(chosen), right = spread<1>(chosen);
      q.template finish<false>(row, at, {value[2 * k].even * left, value[2 * k].odd * left});
      if (at + PAIR < job.cols)
        q.template finish<false>(row, at + PAIR, {value[2 * k + 1].even * right, value[2 * k + 1].odd * right});
    }
  }
}

// The packed scales of one strip whose blocks lie along the columns.
inline Scale scale_of_strip(const Job& job, const Pair v[2], const vu& amax) {
  if (job.rule != QUEST) return scale_of(job, amax);
  Row sum, square;  // over 32 columns the tree starts with the two halves of a pair
  for (int p = 0; p < 2; ++p) {
    const vf even = v[p].even * v[p].even, odd = v[p].odd * v[p].odd;
    sum[p] = {v[p].even + swap_eights(v[p].even), v[p].odd + swap_eights(v[p].odd)};
    square[p] = {even + swap_eights(even), odd + swap_eights(odd)};
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
    amax[s] = job.block == 32 ? max_u(m, swap_fours(m)) : m;
  }
  if constexpr (Q::EDENS)
    if (job.rule == MS_EDEN) return eden_columns(job, q, v, amax, row, col, strips);
  if (job.rule != FOUR_SIX)
    for (int s = 0; s < strips; ++s) packed[s] = scale_of_strip(job, v + 2 * s, amax[s]);
  for (int s = 0; s < strips; ++s) {
    const int64_t at = col + s * STRIP;
    if (!FULL && at >= job.cols) break;
    Words word[2] = {};
    q.words(at / STRIP, row, word);
    if constexpr (Q::FOUR_SIXES)
      if (job.rule == FOUR_SIX) {
        four_six_columns(job, q, v + 2 * s, word, amax[s], row, at);
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

}  // namespace
