// Blocks along the rows, and square tiles.

#pragma once

#include "columns.h"

namespace {

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
    m = max_u(m, swap_ones(m));
    m = max_u(m, swap_twos(m));
    m = max_u(m, swap_fours(m));
    if (job.block == 32) m = max_u(m, swap_eights(m));
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

// The errors of blocks of 16 rows, one in each lane.
template <bool EXACT>
inline vf block_errors(const Job& job, const vf value[16], const vf x[16]) {
  vf sum = {};
  for (int i = 0; i < 16; ++i) sum = sum + counted(job, four_six_error<EXACT>(job, value[i], x[i]));
  return sum;
}

template <class Q>
void four_six_rows(const Job& job, const Q& q, const Row tile[], const Words word[][2], int top, int p, int64_t row,
                   int64_t col) {
  vf value[2][2][16];  // [odd][four][row]
  vi fewer[2];
  for (int odd = 0; odd < 2; ++odd) {
    vf x[16], error[2];
    vu m = {};
    for (int i = 0; i < 16; ++i) {
      x[i] = odd ? tile[top + i][p].odd : tile[top + i][p].even;
      m = max_u(m, (vu)x[i] & MAGNITUDE);
    }
    const vf base = divided_base(job, m);
    for (int four = 0; four < 2; ++four) {
      const Scale s = nvfp4_scale(job, four ? base * 1.5f : base);
      for (int i = 0; i < 16; ++i)
        value[odd][four][i] = q.rounded(q.scaled(x[i], s), odd ? word[i][p].odd : word[i][p].even) * s.up;
      error[four] = block_errors<false>(job, value[odd][four], x);
    }
    if (!surely_tell(job, error[0], error[1], m))
      for (int four = 0; four < 2; ++four) error[four] = block_errors<true>(job, value[odd][four], x);
    fewer[odd] = error[1] < error[0];
  }
  for (int i = 0; i < 16; ++i)
    q.template finish<false>(
        row + top + i, col,
        {choose(fewer[0], value[0][1][i], value[0][0][i]), choose(fewer[1], value[1][1][i], value[1][0][i])});
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
    const int64_t row = block + (rows_contract ? ordered_row(job, i) : i);
    fetch(job.src, (row * job.src_stride + left + STRIP) * element, false);
    for (int p = 0; p < 2; ++p) tile[i][p] = load<FULL>(job, row, left + p * PAIR);
    if (job.hadamard && !rows_contract) rotate_columns<2>(job, tile[i]);
  }
  if (job.hadamard && rows_contract) rotate_rows(job, tile, group);
  const int pairs = FULL || job.cols - left > PAIR ? 2 : 1;
  if constexpr (Q::EDENS)
    if (job.rule == MS_EDEN) return eden_rows(job, q, tile, group, block, strip, pairs);
  for (int top = 0; top < group; top += job.block) {
    if constexpr (Q::FOUR_SIXES)
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

}  // namespace
