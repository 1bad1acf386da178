// The product of operands whose bf16 elements have fp32 scales, for CPUs that multiply bf16 themselves.
//
// Elements are multiplied and summed in fp32 over 128 neighbours of the contraction axis; each such sum is
// multiplied by the product of both scales and added in fp32, as DeepSeek-V3 does (2412.19437, section 3.3.2).

#pragma once

#include "job.h"

// cpu_kernel.py reads its fields here.
struct Product {
  const uint16_t *a, *b;             // bf16; [m, k] and [n, k], or transposed
  const float *a_scales, *b_scales;  // [1 or k / 128, m] and [the same, n]
  uint16_t* dst;                     // bf16 [m, n], contiguous
  int64_t m, n, k, a_stride, b_stride, scales;
  int32_t a_transposed, b_transposed;
};

namespace {

#ifdef __AVX512BF16__

constexpr bool MULTIPLIES = true;
constexpr int LANES = 16, HALF = 8, PANEL = 3;  // rows in a group and in a tile, groups of columns in a tile
constexpr int CHUNK_GROUPS = 4, CHUNK_ROWS = CHUNK_GROUPS * LANES, WIDTH = PANEL * LANES;
constexpr int64_t STEPS = TILE / 2;  // pairs of neighbours in a block

inline void transpose(vu v[16]) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#pragma GCC unroll 4
  for (int s = 8; s > 0; s /= 2) {
    const __mmask16 upper = _mm512_test_epi32_mask(lane, _mm512_set1_epi32(s));
    const __m512i low = _mm512_mask_add_epi32(lane, upper, lane, _mm512_set1_epi32(16 - s));
    const __m512i high =
        _mm512_mask_add_epi32(_mm512_add_epi32(lane, _mm512_set1_epi32(s)), upper, lane, _mm512_set1_epi32(16));
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      if (i & s) continue;
      const __m512i a = (__m512i)v[i].v, b = (__m512i)v[i + s].v;
      v[i].v = (vu::Register)_mm512_permutex2var_epi32(a, low, b);
      v[i + s].v = (vu::Register)_mm512_permutex2var_epi32(a, high, b);
    }
  }
}

// Sixteen rows [.., k] of an operand from `first` on, as [k / 2][row][2]; what is beyond an edge is zero.
void pack_rows(const uint16_t* from, int64_t stride, int64_t first, int64_t rows, int64_t k, uint32_t* to) {
  for (int64_t at = 0; at < k; at += 32, to += 16 * LANES) {
    vu v[LANES];
    for (int64_t i = 0; i < LANES; ++i)
      v[i] = first + i < rows ? read_some<vu>(from + (first + i) * stride + at, (k - at) * 2) : vu(0);
    transpose(v);
    for (int i = 0; i < LANES; ++i) v[i].write(to + i * LANES);
  }
}

// The same of a transposed operand [k, ..].
void pack_columns(const uint16_t* from, int64_t stride, int64_t first, int64_t columns, int64_t k, uint32_t* to) {
  const size_t bytes = static_cast<size_t>(columns - first < LANES ? columns - first : LANES) * 2;
  for (int64_t at = 0; at < (k + 31) / 32 * 32; at += 2, to += LANES) {
    uint16_t one[LANES] = {}, two[LANES] = {};
    if (at < k) std::memcpy(one, from + at * stride + first, bytes);
    if (at + 1 < k) std::memcpy(two, from + (at + 1) * stride + first, bytes);
    vu low, high;
    read_narrow(one, low);
    read_narrow(two, high);
    const vu both = low | (high << 16);
    both.write(to);
  }
}

inline void pack(const uint16_t* from, bool transposed, int64_t stride, int64_t first, int64_t count, int64_t k,
                 uint32_t* to) {
  (transposed ? pack_columns : pack_rows)(from, stride, first, count, k, to);
}

// Add a block's scaled products of 8 rows and some groups of 16 columns to their totals.
template <int GROUPS>
inline void add_block(const uint32_t* a, const uint32_t* b, int64_t group, int64_t steps, const float* a_scales,
                      const float* b_scales, float* total) {
  __m512 sum[HALF][GROUPS];
  for (int i = 0; i < HALF; ++i)
    for (int g = 0; g < GROUPS; ++g) sum[i][g] = _mm512_setzero_ps();
  for (int64_t step = 0; step < steps; ++step, a += LANES, b += LANES) {
    __m512bh right[GROUPS];
    for (int g = 0; g < GROUPS; ++g) right[g] = (__m512bh)_mm512_loadu_si512(b + g * group);
#pragma GCC unroll 8
    for (int i = 0; i < HALF; ++i) {
      const __m512bh left = (__m512bh)_mm512_set1_epi32(static_cast<int>(a[i]));
#pragma GCC unroll 3
      for (int g = 0; g < GROUPS; ++g) sum[i][g] = _mm512_dpbf16_ps(sum[i][g], left, right[g]);
    }
  }
  for (int i = 0; i < HALF; ++i)
    for (int g = 0; g < GROUPS; ++g) {
      float* at = total + i * WIDTH + g * LANES;
      const __m512 scale = _mm512_mul_ps(_mm512_set1_ps(a_scales[i]), _mm512_loadu_ps(b_scales + g * LANES));
      _mm512_storeu_ps(at, _mm512_fmadd_ps(sum[i][g], scale, _mm512_loadu_ps(at)));
    }
}

inline void copy_scales(const float* from, int64_t count, int64_t most, float* to) {
  std::memset(to, 0, static_cast<size_t>(most) * 4);
  std::memcpy(to, from, static_cast<size_t>(count < most ? count : most) * 4);
}

class Multiplier {
 public:
  explicit Multiplier(const Product& job)
      : job_(job), group_((job.k + 31) / 32 * 16 * LANES), b_(((job.n + LANES - 1) / LANES) * group_) {}

  int64_t groups_of_b() const { return (job_.n + LANES - 1) / LANES; }

  void pack_b(int64_t begin, int64_t end) {
    for (int64_t g = begin; g < end; ++g)
      pack(job_.b, job_.b_transposed, job_.b_stride, g * LANES, job_.n, job_.k, b_.data() + g * group_);
  }

  // Some chunks of 64 rows of the result.
  void rows(int64_t begin, int64_t end) const {
    std::vector<uint32_t> a(CHUNK_GROUPS * group_);
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const int64_t first = chunk * CHUNK_ROWS, left = job_.m - first;
      const int groups = static_cast<int>(left < CHUNK_ROWS ? (left + LANES - 1) / LANES : CHUNK_GROUPS);
      for (int g = 0; g < groups; ++g)
        pack(job_.a, job_.a_transposed, job_.a_stride, first + g * LANES, job_.m, job_.k, a.data() + g * group_);
      for (int64_t panel = 0; panel < groups_of_b(); panel += PANEL) {
        const int64_t rest = groups_of_b() - panel;
        if (rest >= PANEL)
          panel_of<PANEL>(a.data(), groups, first, panel);
        else if (rest == 2)
          panel_of<2>(a.data(), groups, first, panel);
        else
          panel_of<1>(a.data(), groups, first, panel);
      }
    }
  }

 private:
  template <int GROUPS>
  void panel_of(const uint32_t* a, int groups, int64_t first, int64_t panel) const {
    float total[CHUNK_ROWS * WIDTH] = {}, left[CHUNK_ROWS], right[WIDTH];
    const int64_t all = group_ / LANES, column = panel * LANES;
    for (int64_t step = 0; step < all; step += STEPS) {
      const int64_t steps = all - step < STEPS ? all - step : STEPS, block = job_.scales > 1 ? step / STEPS : 0;
      copy_scales(job_.a_scales + block * job_.m + first, job_.m - first, CHUNK_ROWS, left);
      copy_scales(job_.b_scales + block * job_.n + column, job_.n - column, WIDTH, right);
      for (int row = 0; row < groups * LANES; row += HALF)
        add_block<GROUPS>(a + row / LANES * group_ + step * LANES + row % LANES,
                          b_.data() + panel * group_ + step * LANES, group_, steps, left + row, right,
                          total + row * WIDTH);
    }
    for (int64_t i = 0; i < groups * LANES && first + i < job_.m; ++i)
      for (int g = 0; g < GROUPS; ++g) put(first + i, column + g * LANES, total + i * WIDTH + g * LANES);
  }

  void put(int64_t row, int64_t col, const float* total) const {
    uint16_t rounded[LANES];
    write_narrow((vu)rounded_to_bf16(vf::read(total)) >> 16, rounded);
    const int64_t left = job_.n - col;
    std::memcpy(job_.dst + row * job_.n + col, rounded, static_cast<size_t>(left < LANES ? left : LANES) * 2);
  }

  const Product& job_;
  const int64_t group_;  // words of a packed group of 16
  std::vector<uint32_t> b_;
};

#else
constexpr bool MULTIPLIES = false;
#endif

}  // namespace
