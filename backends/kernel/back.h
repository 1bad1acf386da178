// The way back of a gradient through a quantiser: its mask, then the inverse of its rotation.

#pragma once

#include "rotate.h"

namespace {

// Zero where the mask is; NaN stays NaN.
INLINE Pair masked(const Job& job, int64_t row, int64_t col, const Pair& v) {
  const int64_t left = job.cols - col;
  uint16_t both[16] = {};  // two bytes a lane
  std::memcpy(both, job.mask + row * job.cols + col, left < PAIR ? static_cast<size_t>(left) : sizeof both);
  vu lanes;
  read_narrow(both, lanes);
  return {v.even * to_float((vi)(lanes & 1u)), v.odd * to_float((vi)(lanes >> 8))};
}

// `signs` and the job's order come after the Hadamard here, its norm before them.
void way_back(const Job& job, int64_t begin, int64_t end) {
  constexpr int N = MOST_ROWS / PAIR;
  Job rotation = job;
  rotation.signs = nullptr;
  rotation.order = nullptr;
  const int pairs = job.hadamard > PAIR ? job.hadamard / PAIR : 1;
  for (int64_t row = begin; row < end; ++row)
    for (int64_t col = 0; col < job.cols; col += PAIR * N) {
      Pair v[N];
      for (int i = 0; i < N; ++i) {
        const int64_t at = col + i * PAIR;
        v[i] = load<false>(job, row, at);
        if (job.mask && at < job.cols) v[i] = masked(job, row, at, v[i]);
      }
      if (job.hadamard) rotate_columns<N>(rotation, v);
      if (job.signs)
        for (int i = 0; i < N; ++i) {
          const float* signs = job.signs + i % pairs * PAIR;
          v[i] = {signed_by(v[i].even, signs), signed_by(v[i].odd, signs + 16)};
        }
      if (job.order) reorder_columns<N>(job, v);
      for (int i = 0; i < N && col + i * PAIR < job.cols; ++i)
        store<false>(job, row, col + i * PAIR, {rounded_to_bf16(v[i].even), rounded_to_bf16(v[i].odd)});
    }
}

}  // namespace
