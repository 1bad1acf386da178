// Scales in fp32, one for each row, column or tile of 128: largest magnitudes first, then the elements. The
// scales between the two are few, and plain torch computes them by the reference's own rule.

#pragma once

#include "scales.h"

namespace {

struct Columns {
  std::vector<vu> even, odd;  // of each pair, largest so far
};

template <bool FULL>
inline void more(const Job& job, int64_t row, int64_t col, vu& even, vu& odd) {
  const Pair v = load<FULL>(job, row, col);
  even = max_u(even, (vu)v.even & MAGNITUDE);
  odd = max_u(odd, (vu)v.odd & MAGNITUDE);
}

// The largest magnitudes of tiles of one row.
void amax_of_rows(const Job& job, int64_t begin, int64_t end) {
  const int64_t tiles = job.cols / job.tile_cols, whole = job.tile_cols / PAIR * PAIR;
  uint32_t* out = static_cast<uint32_t*>(job.dst);
  for (int64_t row = begin; row < end; ++row)
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t left = tile * job.tile_cols;
      vu even = {}, odd = {};
      for (int64_t col = 0; col < whole; col += PAIR) more<true>(job, row, left + col, even, odd);
      if (whole < job.tile_cols) more<false>(job, row, left + whole, even, odd);
      out[row * tiles + tile] = largest(max_u(even, odd));
    }
}

// Those of tiles of several rows, for the columns from `left` to `right`, which cut no tile.
void amax_of_tiles(const Job& job, int64_t left, int64_t right) {
  const int64_t tiles = job.cols / job.tile_cols, pairs = (right - left + PAIR - 1) / PAIR;
  uint32_t* out = static_cast<uint32_t*>(job.dst);
  Columns most;
  for (int64_t top = 0; top < job.rows; top += job.tile_rows, out += tiles) {
    most.even.assign(pairs, vu{});
    most.odd.assign(pairs, vu{});
    for (int64_t row = top; row < top + job.tile_rows; ++row) {
      const int64_t whole = (right - left) / PAIR;
      for (int64_t i = 0; i < whole; ++i) more<true>(job, row, left + i * PAIR, most.even[i], most.odd[i]);
      if (whole < pairs) more<false>(job, row, left + whole * PAIR, most.even[whole], most.odd[whole]);
    }
    if (job.tile_cols > 1) {
      for (int64_t col = left; col < right; col += job.tile_cols) {
        vu m = {};
        for (int64_t i = (col - left) / PAIR; i < (col - left + job.tile_cols) / PAIR; ++i)
          m = max_u(m, max_u(most.even[i], most.odd[i]));
        out[col / job.tile_cols] = largest(m);
      }
    } else {
      for (int64_t i = 0; i < pairs; ++i) {
        uint32_t even[16], odd[16];
        most.even[i].write(even);
        most.odd[i].write(odd);
        for (int64_t col = 0; col < PAIR && left + i * PAIR + col < right; ++col)
          out[left + i * PAIR + col] = col % 2 ? odd[col / 2] : even[col / 2];
      }
    }
  }
}

// The scales of the columns of a pair in one row of tiles.
template <bool FULL>
INLINE Pair scales_of_pair(const Job& job, const float* scales, int64_t col) {
  if (job.tile_cols > 1) {
    const vf all = scales[col / job.tile_cols];
    return {all, all};
  }
  return deinterleaved<FULL>(scales + col, job.cols - col);
}

template <bool FULL, class Q>
inline void tile_of_pair(const Job& job, const Q& q, const float* scales, int64_t row, int64_t col, const Words& word) {
  const Pair x = load<FULL>(job, row, col), s = scales_of_pair<FULL>(job, scales, col);
  const bool divided = job.rule == SEARCHED;
  const vf even = divided ? x.even / s.even : x.even * s.even, odd = divided ? x.odd / s.odd : x.odd * s.odd;
  q.template finish<FULL>(row, col, {q.rounded(even, word.even), q.rounded(odd, word.odd)});
}

// Elements by the scales that the job has.
template <class ELEMENT, int ROUNDING>
void elements_of_tiles(const Job& job, int64_t begin, int64_t end) {
  const Quantiser<ELEMENT, ROUNDING> q(job);
  for (int64_t row = begin; row < end; ++row) {
    const float* scales = job.scales + row / job.tile_rows * (job.cols / job.tile_cols);
    for (int64_t col = 0; col < job.cols; col += STRIP) {
      Words word[2] = {};
      q.words(col / STRIP, row, word);
      for (int64_t p = 0, at = col; p < 2 && at < job.cols; ++p, at += PAIR) {
        if (at + PAIR <= job.cols)
          tile_of_pair<true>(job, q, scales, row, at, word[p]);
        else
          tile_of_pair<false>(job, q, scales, row, at, word[p]);
      }
    }
  }
}

}  // namespace
