// Hadamard rotations, and reductions over lanes.

#pragma once

#include "job.h"

namespace {

INLINE vf signed_by(const vf& v, const float* signs) { return v * vf::read(signs); }

// One stage of a butterfly between lanes. Lower lanes: self + partner; upper lanes, of sign SIGN: partner - self.
INLINE vf stage(const vf& v, const vf& partner, const vi& upper) { return partner + (vf)((vu)v ^ ((vu)upper & SIGN)); }

INLINE vf butterfly_lanes(vf v, int group) {
  v = stage(v, swap_ones(v), upper_lanes<1>());
  v = stage(v, swap_twos(v), upper_lanes<2>());
  v = stage(v, swap_fours(v), upper_lanes<4>());
  return group > 16 ? stage(v, swap_eights(v), upper_lanes<8>()) : v;
}

// Put the elements of each group of N pairs in the job's order.
template <int N>
inline void reorder_columns(const Job& job, Pair v[N]) {
  const int pairs = job.hadamard > PAIR ? job.hadamard / PAIR : 1;
#ifdef __AVX512F__
  if (pairs == 1) {
    const __m512i even = _mm512_loadu_si512(job.order), odd = _mm512_loadu_si512(job.order + 16);
    for (int i = 0; i < N; ++i) {
      const __m512 first = (__m512)v[i].even.v, second = (__m512)v[i].odd.v;
      v[i].even.v = (vf::Register)_mm512_permutex2var_ps(first, even, second);
      v[i].odd.v = (vf::Register)_mm512_permutex2var_ps(first, odd, second);
    }
    return;
  }
#endif
  float before[N * PAIR], after[N * PAIR];
  for (int i = 0; i < N; ++i) v[i].even.write(before + i * PAIR), v[i].odd.write(before + i * PAIR + 16);
  for (int i = 0; i < N * PAIR; ++i) {
    const int start = i / (pairs * PAIR) * (pairs * PAIR);
    after[i] = before[start + job.order[i - start]];
  }
  for (int i = 0; i < N; ++i) v[i] = {vf::read(after + i * PAIR), vf::read(after + i * PAIR + 16)};
}

// Rotate groups along the columns of N pairs that follow each other in a row.
template <int N>
inline void rotate_columns(const Job& job, Pair v[N]) {
  const int group = job.hadamard, pairs = group > PAIR ? group / PAIR : 1;
  if (job.order) reorder_columns<N>(job, v);
  for (int i = 0; i < N; ++i) {
    if (job.signs) {
      const float* signs = job.signs + i % pairs * PAIR;
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
    v[i] = {v[i].even * job.norm, v[i].odd * job.norm};
    if (job.rotated_bf16) v[i] = {rounded_to_bf16(v[i].even), rounded_to_bf16(v[i].odd)};
  }
}

typedef Pair Row[2];  // a row of a strip

// The row of the matrix that row i of a tile is, before the signs.
INLINE int64_t ordered_row(const Job& job, int64_t i) {
  return job.order ? i / job.hadamard * job.hadamard + job.order[i % job.hadamard] : i;
}

// Rotate groups along the rows of a strip.
inline void rotate_rows(const Job& job, Row tile[], int rows) {
  const int group = job.hadamard;
  if (job.signs)
    for (int i = 0; i < rows; ++i)
      for (Pair& v : tile[i]) v = {v.even * job.signs[i % group], v.odd * job.signs[i % group]};
  for (int half = 1; half < group / 2; half *= 2)
    for (int i = 0; i < rows; ++i) {
      if (i & half) continue;
      for (int p = 0; p < 2; ++p) {
        const Pair a = tile[i][p], b = tile[i + half][p];
        tile[i][p] = {a.even + b.even, a.odd + b.odd};
        tile[i + half][p] = {a.even - b.even, a.odd - b.odd};
      }
    }
  const int half = group / 2;  // the last step goes with the norm: a pass over the tile less
  const vf norm = job.norm;
  for (int i = 0; i < rows; ++i) {
    if (i & half) continue;
    for (int p = 0; p < 2; ++p) {
      const Pair a = tile[i][p], b = tile[i + half][p];
      tile[i][p] = {(a.even + b.even) * norm, (a.odd + b.odd) * norm};
      tile[i + half][p] = {(a.even - b.even) * norm, (a.odd - b.odd) * norm};
    }
  }
  if (job.rotated_bf16)
    for (int i = 0; i < rows; ++i)
      for (Pair& v : tile[i]) v = {rounded_to_bf16(v.even), rounded_to_bf16(v.odd)};
}

struct Max {
  static vu of(const vu& a, const vu& b) { return max_u(a, b); }
};
struct Sum {
  static vf of(const vf& a, const vf& b) { return a + b; }
};

// Reduce the lanes of two vectors in eights, by the pairwise tree of the reference (halves, quarters, …):
// lanes 4i…4i+3 of the result hold eight i of the sixteen lanes of a and then of b.
template <class OP, class V>
INLINE V reduce_eights(V a, V b) {
  V c = OP::of(shuffle<0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27>(a, b),
               shuffle<4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31>(a, b));
  c = OP::of(c, swap_twos(c));
  return OP::of(c, swap_ones(c));
}

// The packed value of each 16 columns, spread over the lanes of the pair that holds them.
template <int P>
INLINE vf spread(const vf& v) {
  constexpr int L = 8 * P, H = 8 * P + 4;
  return shuffle<L, L + 1, L + 2, L + 3, L, L + 1, L + 2, L + 3, H, H + 1, H + 2, H + 3, H, H + 1, H + 2, H + 3>(v, v);
}

INLINE vu magnitudes(const Pair& v) { return max_u((vu)v.even & MAGNITUDE, (vu)v.odd & MAGNITUDE); }

}  // namespace
