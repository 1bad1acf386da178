// Random words by counter.

#pragma once

#include "job.h"

namespace {

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

}  // namespace
