// Quantise-dequantise for CPUs: the bits of ablate/numerics/quantiser.py, at memory speed.
//
// Vectors have 16 lanes (vectors.h) whatever the registers of the machine. 32
// neighbours of a row are one pair of vectors, even columns in one, odd ones in the other: that is how two
// bf16 lie in a 32-bit word, so loading and storing take a shift each and the first Hadamard stage needs no
// shuffle. Blocks along the columns stay in registers; blocks along the rows and square tiles work on strips
// of 64 columns, so neither axis needs a transposed copy. Floating-point contraction must be off: a fused
// multiply-add changes bits. What is chosen once for a tensor (scale rule, rotation) is a branch for each
// strip; what touches every element (format, rounding) is a template.

#include <thread>
#include <vector>

#include "back.h"
#include "product.h"
#include "rows.h"
#include "tiles.h"

namespace {

// torch's own OpenMP threads, if ablate_use_threads_of was told of them. Threads of our own would compete with
// those, which spin for a while after each of torch's operations.
typedef void (*Parallel)(void (*body)(void*), void* data, unsigned threads, unsigned flags);
typedef int (*Count)();
Parallel parallel = nullptr;
Count this_thread = nullptr, all_threads = nullptr;

template <typename Work>
struct Share {
  int64_t items;
  Work* work;
  static void run(void* data) {
    const Share* share = static_cast<const Share*>(data);
    const int64_t t = this_thread(), n = all_threads();
    const int64_t begin = share->items * t / n, end = share->items * (t + 1) / n;
    if (begin < end) (*share->work)(begin, end);
  }
};

template <typename Work>
void split(int64_t items, int threads, Work work) {
  if (threads <= 1 || items < 2) return work(0, items);
  if (parallel) {
    Share<Work> share{items, &work};
    return parallel(Share<Work>::run, &share, static_cast<unsigned>(threads), 0);
  }
  std::vector<std::thread> pool;
  for (int t = 1; t < threads; ++t) pool.emplace_back(work, items * t / threads, items * (t + 1) / threads);
  work(0, items / threads);
  for (auto& thread : pool) thread.join();
}

inline int64_t strips(const Job& job) { return (job.cols + STRIP - 1) / STRIP; }

template <class ELEMENT, int ROUNDING>
void run(const Job& job, int threads) {
  if (job.rule == GROUPS || job.rule == SEARCHED)
    split(job.rows, threads, [&](int64_t a, int64_t b) { elements_of_tiles<ELEMENT, ROUNDING>(job, a, b); });
  else if ((job.axis == 0 && job.block > 1) || job.square)
    split(strips(job), threads, [&](int64_t a, int64_t b) { along_rows<ELEMENT, ROUNDING>(job, a, b); });
  else if (job.hadamard > STRIP)
    split(job.rows, threads, [&](int64_t a, int64_t b) { along_columns<ELEMENT, ROUNDING, 4>(job, a, b); });
  else
    split(job.rows, threads, [&](int64_t a, int64_t b) { along_columns<ELEMENT, ROUNDING, 2>(job, a, b); });
}

uint32_t amax_columns(const Job& job, int64_t begin, int64_t end) {
  constexpr int N = MOST_ROWS / PAIR;
  vu m = {};
  for (int64_t row = begin; row < end; ++row)
    for (int64_t col = 0; col < job.cols; col += PAIR * N) {
      Pair v[N];
      for (int i = 0; i < N; ++i) v[i] = load<false>(job, row, col + i * PAIR);
      if (job.hadamard) rotate_columns<N>(job, v);
      for (int i = 0; i < N; ++i) m = max_u(m, magnitudes(v[i]));
    }
  return largest(m);
}

uint32_t amax_rows(const Job& job, int64_t begin_strip, int64_t end_strip) {
  vu m = {};
  Row tile[MOST_ROWS];
  for (int64_t block = 0; block < job.rows; block += job.hadamard)
    for (int64_t strip = begin_strip; strip < end_strip; ++strip) {
      for (int i = 0; i < job.hadamard; ++i)
        for (int p = 0; p < 2; ++p)
          tile[i][p] = load<false>(job, block + ordered_row(job, i), strip * STRIP + p * PAIR);
      rotate_rows(job, tile, job.hadamard);
      for (int i = 0; i < job.hadamard; ++i) m = max_u(m, max_u(magnitudes(tile[i][0]), magnitudes(tile[i][1])));
    }
  return largest(m);
}

}  // namespace

// The largest bit pattern without sign of the rotated values, so that NaN and Inf win over every number.
extern "C" uint32_t ablate_amax_bits(const Job* given, int threads) {
  const Job& job = *given;
  const bool rows = job.hadamard && job.axis == 0;
  const int64_t items = rows ? strips(job) : job.rows;
  const int parts = threads > 1 && items > 1 ? threads : 1;
  std::vector<uint32_t> found(parts, 0u);
  split(parts, parts, [&](int64_t first, int64_t last) {
    for (int64_t part = first; part < last; ++part) {
      const int64_t begin = items * part / parts, end = items * (part + 1) / parts;
      found[part] = rows ? amax_rows(job, begin, end) : amax_columns(job, begin, end);
    }
  });
  uint32_t best = 0;
  for (const uint32_t m : found) best = m > best ? m : best;
  return best;
}

// The same of each of the job's tiles, as a matrix of uint32 at dst.
extern "C" void ablate_tile_amax_bits(const Job* given, int threads) {
  const Job& job = *given;
  if (job.tile_rows == 1) return split(job.rows, threads, [&](int64_t a, int64_t b) { amax_of_rows(job, a, b); });
  split((job.cols + TILE - 1) / TILE, threads,
        [&](int64_t a, int64_t b) { amax_of_tiles(job, a * TILE, b * TILE < job.cols ? b * TILE : job.cols); });
}

extern "C" void ablate_way_back(const Job* given, int threads) {
  split(given->rows, threads, [&](int64_t a, int64_t b) { way_back(*given, a, b); });
}

extern "C" int ablate_multiplies() { return MULTIPLIES; }

extern "C" void ablate_multiply(const Product* given, int threads) {
#ifdef __AVX512BF16__
  Multiplier work(*given);
  split(work.groups_of_b(), threads, [&](int64_t a, int64_t b) { work.pack_b(a, b); });
  split((given->m + CHUNK_ROWS - 1) / CHUNK_ROWS, threads, [&](int64_t a, int64_t b) { work.rows(a, b); });
#else
  (void)given, (void)threads;
#endif
}

// Shapes and dtypes are checked by the caller.
extern "C" void ablate_quantise(const Job* given, int threads) {
  const Job& job = *given;
  const bool e2m1 = job.element_max == 6.0f;
  if (e2m1 && job.rounding == NEAREST) return run<E2M1, NEAREST>(job, threads);
  if (e2m1 && job.rounding == STOCHASTIC) return run<E2M1, STOCHASTIC>(job, threads);
  if (e2m1 && job.rounding == STOCHASTIC_8BIT) return run<E2M1, STOCHASTIC_8BIT>(job, threads);
  if (e2m1 && job.rounding == NEAREST_AWAY) return run<E2M1, NEAREST_AWAY>(job, threads);
  if (e2m1 && job.rounding == NEAREST_TOWARD_ZERO) return run<E2M1, NEAREST_TOWARD_ZERO>(job, threads);
  if (e2m1) return run<E2M1, STOCHASTIC_ROCM>(job, threads);
  if (job.rounding == NEAREST) return run<Minifloat, NEAREST>(job, threads);
  if (job.rounding == STOCHASTIC) return run<Minifloat, STOCHASTIC>(job, threads);
  return run<Minifloat, STOCHASTIC_8BIT>(job, threads);
}

// GOMP_parallel, omp_get_thread_num and omp_get_num_threads of the OpenMP runtime that torch runs on.
extern "C" void ablate_use_threads_of(void* run, void* number, void* count) {
  parallel = reinterpret_cast<Parallel>(run);
  this_thread = reinterpret_cast<Count>(number);
  all_threads = reinterpret_cast<Count>(count);
}
