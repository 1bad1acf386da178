// Rounding to the grids of the element formats.

#pragma once

#include "philox.h"

namespace {

// Elements: E2M1 with everything known to the compiler, and any other with up to four exponent bits.
struct E2M1 {
  explicit E2M1(const Job&) {}
  static constexpr int mantissa_bits = 1;
  static constexpr int min_exponent = 0;
  static constexpr float max = 6.0f;
  static constexpr bool exact_in_bf16 = true;

  INLINE vf nearest(const vf& a) const {
    const vi under2 = a < 2.0f, under4 = a < 4.0f;
    const vf magic = choose(under2, vf(6291456.0f), choose(under4, vf(12582912.0f), vf(25165824.0f)));
    return (a + magic) - magic;
  }
};

struct Minifloat {
  explicit Minifloat(const Job& job) : Minifloat(job.mantissa_bits, job.min_exponent, job.element_max) {}
  Minifloat(int bits, int exponent, float largest) : mantissa_bits(bits), min_exponent(exponent), max(largest) {}
  int mantissa_bits, min_exponent;
  float max;
  static constexpr bool exact_in_bf16 = false;  // at the ends of the range

  INLINE vf nearest(const vf& a) const {
    const int drop = 23 - mantissa_bits;
    const vu even = (vu)a + ((1u << (drop - 1)) - 1) + (((vu)a >> drop) & 1u);
    const vf normal = (vf)(even & ~((1u << drop) - 1));
    const vf magic = (vf)vu(static_cast<uint32_t>(150 + min_exponent - mantissa_bits) << 23 | 1u << 22);
    const vf smallest = (vf)vu(static_cast<uint32_t>(127 + min_exponent) << 23);
    const vf q = choose(a < smallest, (a + magic) - magic, normal);
    return choose(a == a, q, a);
  }
};

// Round v to the element's grid; the sign, also of zero, is v's.
template <class ELEMENT, int ROUNDING>
INLINE vf round_element(const ELEMENT& element, const vf& v, const vu& word) {
  const vf a = min_f(magnitude(v), element.max);
  if (ROUNDING == NEAREST) return with_sign_of(element.nearest(a), (vu)v);
  const uint32_t smallest = static_cast<uint32_t>(127 + element.min_exponent) << 23;
  const uint32_t below = static_cast<uint32_t>(element.mantissa_bits) << 23;
  const vu step = max_u((vu)a & 0x7F800000u, smallest) - below;
  const vf y = a * (vf)((254u << 23) - step);  // in steps: exact, for a step is a power of two
  const vf low = truncated(y);
  const vf p = y - low;
  vi up;
  if (ROUNDING == NEAREST_AWAY) {
    up = p >= 0.5f;
  } else if (ROUNDING == NEAREST_TOWARD_ZERO) {
    up = p > 0.5f;
  } else if (ROUNDING == STOCHASTIC) {
    const vf u = to_float((vi)(word >> 8)) * (1.0f / 16777216.0f);
    up = p > u;
  } else {
    constexpr int bits = ROUNDING == STOCHASTIC_8BIT ? 8 : 22;
    constexpr float one = 1 << bits;
    up = truncated(p * one) + to_float((vi)(word >> (32 - bits))) >= one;
  }
  const vf q = choose(up, low + 1.0f, low) * (vf)step;
  return with_sign_of(choose(a == a, q, a), (vu)v);
}

}  // namespace
