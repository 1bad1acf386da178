// Vectors of 16 lanes, each in as many registers as it takes: one of AVX-512, two of AVX2, four of SSE or NEON.
//
// The compilers' own vectors may be wider than a register, but GCC then compares, chooses, shuffles and converts
// lane by lane, which takes fifteen times as long.

#pragma once

#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))

namespace {

#if defined(__AVX512F__)
constexpr int REGISTER = 64;  // bytes
#elif defined(__AVX2__)
constexpr int REGISTER = 32;
#else
constexpr int REGISTER = 16;
#endif
constexpr int REGISTERS = 64 / REGISTER, REGISTER_LANES = 16 / REGISTERS;

template <class T>
struct RegisterOf;
#define REGISTER_OF(T)                                     \
  template <>                                              \
  struct RegisterOf<T> {                                   \
    typedef T Type __attribute__((vector_size(REGISTER))); \
  };
REGISTER_OF(float)
REGISTER_OF(int32_t)
REGISTER_OF(uint32_t)
REGISTER_OF(uint64_t)
#undef REGISTER_OF

// Operators, as all sizes have them. Comparisons give -1 where they hold, else 0.
#define OPERATORS(ANY, SHIFT, COMPARE) \
  ANY(+) ANY(-) ANY(*) ANY(/) ANY(&) ANY(|) ANY(^) SHIFT(<<) SHIFT(>>) COMPARE(<) COMPARE(>) COMPARE(>=) COMPARE(==)

// A register. A cast to another kind keeps the bits.
template <class T>
struct One {
  typedef T Lane;
  typedef typename RegisterOf<T>::Type Register;
  typedef One<int32_t> Mask;
  Register v;

  // Copied as a register: GCC copies a plain struct in pieces, and waits for them when it reads the whole again.
  One() = default;
  INLINE One(const One& other) : v(other.v) {}
  INLINE One& operator=(const One& other) {
    v = other.v;
    return *this;
  }
  INLINE One(Register given) : v(given) {}
  INLINE One(Lane x) : v(x - Register{}) {}
  template <class U>
  INLINE explicit operator One<U>() const {
    return (typename One<U>::Register)v;
  }
  static INLINE One read(const void* from) {
    One out;
    std::memcpy(&out.v, from, REGISTER);
    return out;
  }
  INLINE void write(void* to) const { std::memcpy(to, &v, REGISTER); }

#define ANY(OP) \
  friend INLINE One operator OP(const One& a, const One& b) { return a.v OP b.v; }
#define SHIFT(OP) \
  friend INLINE One operator OP(const One& a, int bits) { return a.v OP bits; }
#define COMPARE(OP) \
  friend INLINE Mask operator OP(const One& a, const One& b) { return a.v OP b.v; }
  OPERATORS(ANY, SHIFT, COMPARE)
#undef ANY
#undef SHIFT
#undef COMPARE
};

// Twice as many lanes as HALF.
template <class HALF>
struct Two {
  typedef typename HALF::Lane Lane;
  typedef Two<typename HALF::Mask> Mask;
  HALF low, high;

  Two() = default;
  INLINE Two(const HALF& a, const HALF& b) : low(a), high(b) {}
  INLINE Two(Lane x) : low(x), high(x) {}
  template <class U>
  INLINE explicit operator Two<U>() const {
    return {(U)low, (U)high};
  }
  static INLINE Two read(const void* from) {
    return {HALF::read(from), HALF::read(static_cast<const char*>(from) + sizeof(HALF))};
  }
  INLINE void write(void* to) const {
    low.write(to);
    high.write(static_cast<char*>(to) + sizeof(HALF));
  }

#define ANY(OP) \
  friend INLINE Two operator OP(const Two& a, const Two& b) { return {a.low OP b.low, a.high OP b.high}; }
#define SHIFT(OP) \
  friend INLINE Two operator OP(const Two& a, int bits) { return {a.low OP bits, a.high OP bits}; }
#define COMPARE(OP) \
  friend INLINE Mask operator OP(const Two& a, const Two& b) { return {a.low OP b.low, a.high OP b.high}; }
  OPERATORS(ANY, SHIFT, COMPARE)
#undef ANY
#undef SHIFT
#undef COMPARE
#undef OPERATORS
};

template <class T, int COUNT>
struct Several {
  typedef Two<typename Several<T, COUNT / 2>::Vector> Vector;
};
template <class T>
struct Several<T, 1> {
  typedef One<T> Vector;
};

typedef Several<float, REGISTERS>::Vector vf;
typedef Several<int32_t, REGISTERS>::Vector vi;
typedef Several<uint32_t, REGISTERS>::Vector vu;
typedef Several<uint64_t, REGISTERS>::Vector vq;  // of 8 lanes

// Call a function of registers for each register, for a vector of Ts.
template <class T, class F, class... U>
INLINE One<T> each(F function, const One<U>&... v) {
  return function(v.v...);
}
template <class T, class F, class HALF, class... HALVES>
INLINE auto each(F function, const Two<HALF>& first, const Two<HALVES>&... more) {
  typedef typename Several<T, sizeof first / REGISTER>::Vector Result;
  return Result{each<T>(function, first.low, more.low...), each<T>(function, first.high, more.high...)};
}

template <int INDEX, class T>
INLINE typename One<T>::Register register_of(const One<T>& v) {
  return v.v;
}
template <int INDEX, class HALF>
INLINE auto register_of(const Two<HALF>& v) {
  constexpr int half = sizeof(HALF) / REGISTER;
  if constexpr (INDEX < half)
    return register_of<INDEX>(v.low);
  else
    return register_of<INDEX - half>(v.high);
}

constexpr auto CHOOSE = [](auto where, auto a, auto b) { return where ? a : b; };
INLINE vf choose(const vi& where, const vf& a, const vf& b) { return each<float>(CHOOSE, where, a, b); }
INLINE vi choose(const vi& where, const vi& a, const vi& b) { return each<int32_t>(CHOOSE, where, a, b); }
INLINE vu choose(const vi& where, const vu& a, const vu& b) { return each<uint32_t>(CHOOSE, where, a, b); }
INLINE vu max_u(const vu& a, const vu& b) {
  return each<uint32_t>([](auto x, auto y) { return x > y ? x : y; }, a, b);
}

INLINE vf to_float(const vi& a) {
  return each<float>([](auto v) { return __builtin_convertvector(v, One<float>::Register); }, a);
}

// What the compilers' vectors cannot say, or say slowly.
#if defined(__AVX512F__)
INLINE One<float> truncated(const One<float>& a) {
  return (One<float>::Register)_mm512_roundscale_ps((__m512)a.v, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
}
INLINE One<float> square_root(const One<float>& a) { return (One<float>::Register)_mm512_sqrt_ps((__m512)a.v); }
INLINE One<uint64_t> low_times(const One<uint64_t>& a, const One<uint64_t>& b) {
  return (One<uint64_t>::Register)_mm512_mul_epu32((__m512i)a.v, (__m512i)b.v);
}
INLINE bool all(const One<int32_t>& where) {
  return _mm512_test_epi32_mask((__m512i)where.v, (__m512i)where.v) == 0xFFFF;
}
#elif defined(__AVX2__)
INLINE One<float> truncated(const One<float>& a) {
  return (One<float>::Register)_mm256_round_ps((__m256)a.v, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
}
INLINE One<float> square_root(const One<float>& a) { return (One<float>::Register)_mm256_sqrt_ps((__m256)a.v); }
INLINE One<uint64_t> low_times(const One<uint64_t>& a, const One<uint64_t>& b) {
  return (One<uint64_t>::Register)_mm256_mul_epu32((__m256i)a.v, (__m256i)b.v);
}
INLINE bool all(const One<int32_t>& where) { return _mm256_movemask_ps((__m256)where.v) == 0xFF; }
#else
INLINE One<float> truncated(const One<float>& a) {
  const auto whole =
      __builtin_convertvector(__builtin_convertvector(a.v, One<int32_t>::Register), One<float>::Register);
  return a.v < 8388608.0f ? whole : a.v;  // also NaN, which would not survive as an int
}
INLINE One<float> square_root(One<float> a) {
  for (int lane = 0; lane < REGISTER_LANES; ++lane) a.v[lane] = __builtin_sqrtf(a.v[lane]);
  return a;
}
// The product of the low halves of the lanes, all 64 bits of it.
INLINE One<uint64_t> low_times(const One<uint64_t>& a, const One<uint64_t>& b) {
#if defined(__x86_64__)
  return (One<uint64_t>::Register)_mm_mul_epu32((__m128i)a.v, (__m128i)b.v);
#else
  return (a.v & 0xFFFFFFFFull) * (b.v & 0xFFFFFFFFull);
#endif
}
INLINE bool all(const One<int32_t>& where) { return where.v[0] & where.v[1] & where.v[2] & where.v[3]; }
#endif
template <class HALF>
INLINE Two<HALF> truncated(const Two<HALF>& a) {
  return {truncated(a.low), truncated(a.high)};
}
template <class HALF>
INLINE Two<HALF> square_root(const Two<HALF>& a) {
  return {square_root(a.low), square_root(a.high)};
}
template <class HALF>
INLINE Two<HALF> low_times(const Two<HALF>& a, const Two<HALF>& b) {
  return {low_times(a.low, b.low), low_times(a.high, b.high)};
}
template <class HALF>
INLINE bool all(const Two<HALF>& where) {
  return all(where.low & where.high);
}

// As many bytes as there are, up to a whole vector; none if less than none. What is not read is zero.
template <class V>
inline V read_some(const void* from, int64_t bytes) {
  char whole[sizeof(V)] = {};
  if (bytes > 0) std::memcpy(whole, from, bytes < 64 ? static_cast<size_t>(bytes) : sizeof whole);
  return V::read(whole);
}
template <class V>
inline void write_some(const V& v, void* to, int64_t bytes) {
  char whole[sizeof(V)];
  v.write(whole);
  if (bytes > 0) std::memcpy(to, whole, bytes < 64 ? static_cast<size_t>(bytes) : sizeof whole);
}

// To and from 16 numbers of two bytes in memory.
typedef uint16_t Narrow __attribute__((vector_size(REGISTER / 2)));

INLINE void read_narrow(const uint16_t* from, One<uint32_t>& to) {
  Narrow half;
  std::memcpy(&half, from, sizeof half);
  to = __builtin_convertvector(half, One<uint32_t>::Register);
}
INLINE void write_narrow(const One<uint32_t>& from, uint16_t* to) {
  const Narrow half = __builtin_convertvector(from.v, Narrow);
  std::memcpy(to, &half, sizeof half);
}
template <class HALF>
INLINE void read_narrow(const uint16_t* from, Two<HALF>& to) {
  read_narrow(from, to.low);
  read_narrow(from + sizeof to.low / 4, to.high);
}
template <class HALF>
INLINE void write_narrow(const Two<HALF>& from, uint16_t* to) {
  write_narrow(from.low, to);
  write_narrow(from.high, to + sizeof from.low / 4);
}

INLINE uint32_t largest(const vu& a) {
  uint32_t lanes[16], best = 0;
  a.write(lanes);
  for (const uint32_t lane : lanes) best = lane > best ? lane : best;
  return best;
}

// The lanes that a shuffle takes, of the 16 of one vector and then the 16 of another.
template <int... LANE>
struct Lanes {
  static constexpr int lane[16] = {LANE...};

  // Which registers a register of the result takes from: its first lane's, and another or the same again.
  static constexpr int source(int index, bool second) {
    const int first = lane[index * REGISTER_LANES] / REGISTER_LANES;
    for (int l = 0; second && l < REGISTER_LANES; ++l)
      if (const int other = lane[index * REGISTER_LANES + l] / REGISTER_LANES; other != first) return other;
    return first;
  }
};

template <class LANES, int INDEX, class V, int... L>
INLINE auto shuffled_register(const V& a, const V& b, std::integer_sequence<int, L...>) {
  constexpr int first = LANES::source(INDEX, false), second = LANES::source(INDEX, true);
  constexpr const int* lane = LANES::lane + INDEX * REGISTER_LANES;
  static_assert(((lane[L] / REGISTER_LANES == first || lane[L] / REGISTER_LANES == second) && ...));
  const Two<V> both = {a, b};
  const auto x = register_of<first>(both), y = register_of<second>(both);
#define FROM lane[L] % REGISTER_LANES + (lane[L] / REGISTER_LANES == first ? 0 : REGISTER_LANES)
#if defined(__clang__)
  return __builtin_shufflevector(x, y, (FROM)...);
#else
  return __builtin_shuffle(x, y, One<int32_t>::Register{(FROM)...});
#endif
#undef FROM
}

template <class OUT, class LANES, int INDEX, class V>
INLINE OUT shuffled(const V& a, const V& b) {
  if constexpr (sizeof(OUT) == REGISTER) {
    return shuffled_register<LANES, INDEX>(a, b, std::make_integer_sequence<int, REGISTER_LANES>());
  } else {
    typedef decltype(OUT::low) Half;
    constexpr int half = sizeof(Half) / REGISTER;
    return {shuffled<Half, LANES, INDEX>(a, b), shuffled<Half, LANES, INDEX + half>(a, b)};
  }
}

template <int... LANE, class V>
INLINE V shuffle(const V& a, const V& b) {
  return shuffled<V, Lanes<LANE...>, 0>(a, b);
}

#define SHUFFLE(NAME, ...)             \
  template <class V>                   \
  INLINE V NAME(const V& v) {          \
    return shuffle<__VA_ARGS__>(v, v); \
  }
SHUFFLE(swap_ones, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14)
SHUFFLE(swap_twos, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13)
SHUFFLE(swap_fours, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)
SHUFFLE(swap_eights, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)
SHUFFLE(evens_twice, 0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12, 12, 14, 14)
#undef SHUFFLE

INLINE vf evens(const vf& a, const vf& b) {
  return shuffle<0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30>(a, b);
}
INLINE vf odds(const vf& a, const vf& b) {
  return shuffle<1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31>(a, b);
}

// -1 in every second span of COUNT lanes, else 0.
template <int COUNT, int... LANE>
INLINE vi upper_lanes(std::integer_sequence<int, LANE...>) {
  static constexpr int32_t lanes[] = {(LANE & COUNT ? -1 : 0)...};
  return vi::read(lanes);
}
template <int COUNT>
INLINE vi upper_lanes() {
  return upper_lanes<COUNT>(std::make_integer_sequence<int, 16>());
}

}  // namespace
