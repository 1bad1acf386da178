// MXFP4 and FP8 quantise-dequantise for CPUs: the bits of ablate/numerics/quantize.py, at memory speed.
//
// Plain C++ with fixed-width vectors of 16 lanes, which compilers lower to AVX-512, AVX2 or NEON. Blocks
// along the columns stay in registers; blocks along the rows work on 64-column strips, so neither axis
// needs a transposed copy. Floating-point contraction must be off: a fused multiply-add changes bits.

#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint64_t vq __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));

constexpr int LANES = 16;
constexpr int BLOCK = 32;
constexpr int STRIP = 64;
constexpr uint32_t QUIET_NAN = 0x7FC00000u;

struct Job {
  const void* src;
  void* dst;
  int64_t rows, cols, src_stride;
  int src_bf16;
  const float* signs;
  float prescale;
  uint32_t key0, key1, step, call;
};

inline vf splat(float x) { return x - vf{}; }
inline vu splat_u(uint32_t x) { return x - vu{}; }

inline vf load(const Job& job, int64_t row, int64_t col) {
  const int64_t at = row * job.src_stride + col;
  if (job.src_bf16) {
    vh half;
    std::memcpy(&half, static_cast<const uint16_t*>(job.src) + at, sizeof half);
    return (vf)(__builtin_convertvector(half, vu) << 16);
  }
  vf full;
  std::memcpy(&full, static_cast<const float*>(job.src) + at, sizeof full);
  return full;
}

inline void store(const Job& job, int64_t row, int64_t col, vf value) {
  // Every value fits bf16, so dropping the low half is exact.
  const vh half = __builtin_convertvector((vu)value >> 16, vh);
  std::memcpy(static_cast<uint16_t*>(job.dst) + row * job.cols + col, &half, sizeof half);
}

// Low 32 bits of each lane times a 32-bit constant, all 64 bits of the product.
inline vq mul_wide(vq a, uint32_t m) {
#ifdef __AVX512F__
  return (vq)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(m));
#else
  return (a & 0xFFFFFFFFull) * static_cast<uint64_t>(m);
#endif
}

// Sixteen Philox4x32-10 calls at once; word[j][lane] is word j of the call of that lane. Calls with an
// even lane sit in one register of 64-bit lanes, odd ones in another; high halves may hold garbage, since
// only low halves are multiplied.
inline void philox(const Job& job, int64_t strip, int64_t row, vu word[4]) {
  vq c[2][4];
  for (int odd = 0; odd < 2; ++odd) {
    c[odd][0] = static_cast<uint64_t>(strip * LANES + odd) + vq{0, 2, 4, 6, 8, 10, 12, 14};
    c[odd][1] = static_cast<uint64_t>(row) + vq{};
    c[odd][2] = static_cast<uint64_t>(job.step) + vq{};
    c[odd][3] = static_cast<uint64_t>(job.call) + vq{};
  }
  uint32_t k0 = job.key0, k1 = job.key1;
  for (int round = 0; round < 10; ++round) {
    for (int odd = 0; odd < 2; ++odd) {
      vq* n = c[odd];
      const vq p0 = mul_wide(n[0], 0xD2511F53u), p1 = mul_wide(n[2], 0xCD9E8D57u);
      n[0] = (p1 >> 32) ^ n[1] ^ static_cast<uint64_t>(k0);
      n[2] = (p0 >> 32) ^ n[3] ^ static_cast<uint64_t>(k1);
      n[1] = p1;
      n[3] = p0;
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  for (int j = 0; j < 4; ++j) word[j] = (vu)((c[0][j] & 0xFFFFFFFFull) | (c[1][j] << 32));
}

struct Scale {
  vf down;  // 2^-e
  vf up;    // 2^e
};

// The OCP floor rule from the bit pattern of the block's maximum, lane by lane.
inline Scale floor_scale(vu amax) {
  const vi field = (vi)(amax >> 23);
  vi byte = field - 2;
  byte = byte < 0 ? vi{} : byte;
  const vi bad = field == 255;
  const vu up = byte == 0 ? splat_u(1u << 22) : ((vu)byte << 23);
  const vu down = (vu)(254 - byte) << 23;
  return {(vf)(bad ? splat_u(QUIET_NAN) : down), (vf)(bad ? splat_u(QUIET_NAN) : up)};
}

template <bool STOCHASTIC>
inline vf round_e2m1(vf x, const Scale& scale, float prescale, vu word) {
  const vf v = (x * scale.down) * splat(prescale);
  const vu bits = (vu)v;
  vf a = (vf)(bits & 0x7FFFFFFFu);
  a = a > splat(6.0f) ? splat(6.0f) : a;
  const vi under2 = a < splat(2.0f), under4 = a < splat(4.0f);
  vf q;
  if (STOCHASTIC) {
    const vf step = under2 ? splat(0.5f) : (under4 ? splat(1.0f) : splat(2.0f));
    const vf inverse = under2 ? splat(2.0f) : (under4 ? splat(1.0f) : splat(0.5f));
    const vf low = __builtin_convertvector(__builtin_convertvector(a * inverse, vi), vf) * step;
    const vf p = (a - low) * inverse;
    const vf u = __builtin_convertvector((vi)(word >> 8), vf) * splat(1.0f / 16777216.0f);
    q = p > u ? low + step : low;
    q = a == a ? q : a;  // NaN survives the conversion to int
  } else {
    const vf magic = under2 ? splat(6291456.0f) : (under4 ? splat(12582912.0f) : splat(25165824.0f));
    q = (a + magic) - magic;
  }
  return (vf)(((vu)q & 0x7FFFFFFFu) | (bits & 0x80000000u)) * scale.up;
}

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define SHUFFLE(v, ...) __builtin_shufflevector(v, v, __VA_ARGS__)
#endif
#endif
#ifndef SHUFFLE
#define SHUFFLE(v, ...) __builtin_shuffle(v, (vi){__VA_ARGS__})
#endif
#define XOR1(v) SHUFFLE(v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14)
#define XOR2(v) SHUFFLE(v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13)
#define XOR4(v) SHUFFLE(v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)
#define XOR8(v) SHUFFLE(v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)

inline vu max_u(vu a, vu b) { return a > b ? a : b; }

inline vf flip(vf v, vu sign) { return (vf)((vu)v ^ sign); }

// Lower lanes: self + partner; upper lanes: partner - self. Flipping a sign bit is exact.
inline vf butterfly16(vf v) {
  const uint32_t S = 0x80000000u;
  v = XOR1(v) + flip(v, vu{0, S, 0, S, 0, S, 0, S, 0, S, 0, S, 0, S, 0, S});
  v = XOR2(v) + flip(v, vu{0, 0, S, S, 0, 0, S, S, 0, 0, S, S, 0, 0, S, S});
  v = XOR4(v) + flip(v, vu{0, 0, 0, 0, S, S, S, S, 0, 0, 0, 0, S, S, S, S});
  v = XOR8(v) + flip(v, vu{0, 0, 0, 0, 0, 0, 0, 0, S, S, S, S, S, S, S, S});
  return v;
}

inline float norm(int group) { return group == 16 ? 0.25f : 0.17677669529663687f; }

// Blocks along the columns: everything of a block of 32 is in two registers.
template <bool STOCHASTIC, int HADAMARD>
void along_columns(const Job& job, int64_t begin, int64_t end) {
  vf signs[2] = {splat(1.0f), splat(1.0f)};
  if (HADAMARD && job.signs) {
    std::memcpy(&signs[0], job.signs, sizeof(vf));
    std::memcpy(&signs[1], job.signs + (HADAMARD == 32 ? LANES : 0), sizeof(vf));
  }
  const bool random = HADAMARD && job.signs;
  for (int64_t row = begin; row < end; ++row) {
    vu word[4] = {};
    for (int64_t col = 0; col < job.cols; col += BLOCK) {
      vf a = load(job, row, col), b = load(job, row, col + LANES);
      if (random) {
        a = a * signs[0];
        b = b * signs[1];
      }
      if (HADAMARD) {
        a = butterfly16(a);
        b = butterfly16(b);
        if (HADAMARD == 32) {
          const vf sum = a + b, difference = a - b;
          a = sum;
          b = difference;
        }
        a = a * splat(norm(HADAMARD));
        b = b * splat(norm(HADAMARD));
      }
      vu m = max_u((vu)a & 0x7FFFFFFFu, (vu)b & 0x7FFFFFFFu);
      m = max_u(m, XOR8(m));
      m = max_u(m, XOR4(m));
      m = max_u(m, XOR2(m));
      m = max_u(m, XOR1(m));
      const Scale scale = floor_scale(m);
      if (STOCHASTIC && col % STRIP == 0) philox(job, col / STRIP, row, word);
      const int w = (col % STRIP) / LANES;
      store(job, row, col, round_e2m1<STOCHASTIC>(a, scale, job.prescale, word[w]));
      store(job, row, col + LANES, round_e2m1<STOCHASTIC>(b, scale, job.prescale, word[w + 1]));
    }
  }
}

// A strip of up to 64 columns that may hang over the right edge: load and store lane by lane there.
inline vf load_edge(const Job& job, int64_t row, int64_t col) {
  if (col + LANES <= job.cols) return load(job, row, col);
  float lane[LANES] = {};
  for (int64_t i = 0; i < LANES && col + i < job.cols; ++i) {
    const int64_t at = row * job.src_stride + col + i;
    if (job.src_bf16) {
      const uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t*>(job.src)[at]) << 16;
      std::memcpy(&lane[i], &bits, sizeof bits);
    } else {
      lane[i] = static_cast<const float*>(job.src)[at];
    }
  }
  vf v;
  std::memcpy(&v, lane, sizeof v);
  return v;
}

inline void store_edge(const Job& job, int64_t row, int64_t col, vf value) {
  if (col + LANES <= job.cols) return store(job, row, col, value);
  const vu bits = (vu)value;
  for (int64_t i = 0; i < LANES && col + i < job.cols; ++i)
    static_cast<uint16_t*>(job.dst)[row * job.cols + col + i] = static_cast<uint16_t>(bits[i] >> 16);
}

// Blocks along the rows: 32 rows by 64 columns at a time; a lane is a column.
template <bool STOCHASTIC, int HADAMARD>
void along_rows(const Job& job, int64_t begin_strip, int64_t end_strip) {
  constexpr int WIDE = STRIP / LANES;
  for (int64_t block = 0; block < job.rows; block += BLOCK) {
    for (int64_t strip = begin_strip; strip < end_strip; ++strip) {
      const int64_t left = strip * STRIP;
      vf tile[BLOCK][WIDE];
      for (int i = 0; i < BLOCK; ++i)
        for (int w = 0; w < WIDE; ++w) {
          tile[i][w] = load_edge(job, block + i, left + w * LANES);
          if (HADAMARD && job.signs) tile[i][w] = tile[i][w] * splat(job.signs[i % HADAMARD]);
        }
      for (int half = 1; half < HADAMARD; half *= 2)
        for (int i = 0; i < BLOCK; ++i) {
          if (i & half) continue;
          for (int w = 0; w < WIDE; ++w) {
            const vf a = tile[i][w], b = tile[i + half][w];
            tile[i][w] = a + b;
            tile[i + half][w] = a - b;
          }
        }
      Scale scale[WIDE];
      for (int w = 0; w < WIDE; ++w) {
        vu m = {};
        for (int i = 0; i < BLOCK; ++i) {
          if (HADAMARD) tile[i][w] = tile[i][w] * splat(norm(HADAMARD));
          m = max_u(m, (vu)tile[i][w] & 0x7FFFFFFFu);
        }
        scale[w] = floor_scale(m);
      }
      for (int i = 0; i < BLOCK; ++i) {
        vu word[4] = {};
        if (STOCHASTIC) philox(job, strip, block + i, word);
        for (int w = 0; w < WIDE; ++w)
          store_edge(job, block + i, left + w * LANES,
                     round_e2m1<STOCHASTIC>(tile[i][w], scale[w], job.prescale, word[w]));
      }
    }
  }
}

template <typename Work>
void split(int64_t items, int threads, Work work) {
  if (threads <= 1 || items < 2) return work(0, items);
  std::vector<std::thread> pool;
  for (int t = 0; t < threads; ++t) pool.emplace_back(work, items * t / threads, items * (t + 1) / threads);
  for (auto& thread : pool) thread.join();
}

template <bool STOCHASTIC, int HADAMARD>
void run(const Job& job, int axis, int threads) {
  if (axis == 1)
    split(job.rows, threads, [&](int64_t a, int64_t b) { along_columns<STOCHASTIC, HADAMARD>(job, a, b); });
  else
    split((job.cols + STRIP - 1) / STRIP, threads,
          [&](int64_t a, int64_t b) { along_rows<STOCHASTIC, HADAMARD>(job, a, b); });
}

// Tensor-wise FP8: round x * scale to a grid of MANTISSA bits whose smallest normal is 2^MIN_EXPONENT.
template <int MANTISSA, int MIN_EXPONENT>
inline vf round_fp8(vf x, float scale, float limit) {
  constexpr int DROP = 23 - MANTISSA;
  const vu bits = (vu)(x * splat(scale));
  vf a = (vf)(bits & 0x7FFFFFFFu);
  a = a > splat(limit) ? splat(limit) : a;
  const vu even = (vu)a + ((1u << (DROP - 1)) - 1) + (((vu)a >> DROP) & 1u);
  const vf normal = (vf)(even & ~((1u << DROP) - 1));
  const uint32_t magic_bits = static_cast<uint32_t>(127 + 23 + MIN_EXPONENT - MANTISSA) << 23 | 1u << 22;
  const vf magic = (vf)splat_u(magic_bits);
  const uint32_t smallest_bits = static_cast<uint32_t>(127 + MIN_EXPONENT) << 23;
  vf q = a < (vf)splat_u(smallest_bits) ? (a + magic) - magic : normal;
  q = a == a ? q : a;
  return (vf)(((vu)q & 0x7FFFFFFFu) | (bits & 0x80000000u));
}

template <int MANTISSA, int MIN_EXPONENT>
void fp8_rows(const Job& job, float scale, float limit, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row)
    for (int64_t col = 0; col < job.cols; col += LANES)
      store_edge(job, row, col, round_fp8<MANTISSA, MIN_EXPONENT>(load_edge(job, row, col), scale, limit));
}

}  // namespace

// The largest bit pattern without sign, so that NaN and Inf win over every number.
extern "C" uint32_t ablate_amax_bits(const void* src, int64_t rows, int64_t cols, int64_t src_stride,
                                     int src_bf16) {
  const Job job{src, nullptr, rows, cols, src_stride, src_bf16, nullptr, 1.0f, 0, 0, 0, 0};
  vu m = {};
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t col = 0; col < cols; col += LANES) m = max_u(m, (vu)load_edge(job, row, col) & 0x7FFFFFFFu);
  uint32_t best = 0;
  for (int i = 0; i < LANES; ++i) best = m[i] > best ? m[i] : best;
  return best;
}

extern "C" void ablate_fp8(const void* src, void* dst, int64_t rows, int64_t cols, int64_t src_stride,
                           int src_bf16, int e5m2, float scale, int threads) {
  const Job job{src, dst, rows, cols, src_stride, src_bf16, nullptr, 1.0f, 0, 0, 0, 0};
  split(rows, threads, [&](int64_t a, int64_t b) {
    if (e5m2)
      fp8_rows<2, -14>(job, scale, 57344.0f, a, b);
    else
      fp8_rows<3, -6>(job, scale, 448.0f, a, b);
  });
}

// Shapes and dtypes are checked by the caller. Returns 0, or 1 for a Hadamard group this file has not.
extern "C" int ablate_mxfp4(const void* src, void* dst, int64_t rows, int64_t cols, int64_t src_stride,
                            int src_bf16, int axis, int hadamard, const float* signs, int stochastic,
                            float prescale, uint32_t key0, uint32_t key1, uint32_t step, uint32_t call,
                            int threads) {
  const Job job{src, dst, rows, cols, src_stride, src_bf16, signs, prescale, key0, key1, step, call};
  switch (hadamard + (stochastic ? 1 : 0)) {
    case 0: run<false, 0>(job, axis, threads); return 0;
    case 1: run<true, 0>(job, axis, threads); return 0;
    case 16: run<false, 16>(job, axis, threads); return 0;
    case 17: run<true, 16>(job, axis, threads); return 0;
    case 32: run<false, 32>(job, axis, threads); return 0;
    case 33: run<true, 32>(job, axis, threads); return 0;
    default: return 1;
  }
}
