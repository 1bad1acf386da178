// Random words by counter.

#pragma once

#include "job.h"

namespace {

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
    constexpr uint64_t lanes[] = {0, 2, 4, 6, 8, 10, 12, 14};
    c[odd][0] = vq::read(lanes) + static_cast<uint64_t>(strip * 16 + odd);
    c[odd][1] = static_cast<uint64_t>(row);
    c[odd][2] = static_cast<uint64_t>(job.step);
    c[odd][3] = static_cast<uint64_t>(job.call);
  }
  for (int round = 0; round < ROUNDS; ++round) {
    for (int odd = 0; odd < 2; ++odd) {
      vq* n = c[odd];
      const vq p0 = low_times(n[0], vq(0xD2511F53u)), p1 = low_times(n[2], vq(0xCD9E8D57u));
      n[0] = (p1 >> 32) ^ n[1] ^ keys.first[round];
      n[2] = (p0 >> 32) ^ n[3] ^ keys.second[round];
      n[1] = p1;
      n[3] = p0;
    }
  }
  vu out[4];
  for (int j = 0; j < 4; ++j) out[j] = (vu)((c[0][j] & uint64_t{0xFFFFFFFF}) | (c[1][j] << 32));
  word[0] = {out[0], out[1]};
  word[1] = {out[2], out[3]};
}

}  // namespace
