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

  vf nearest(vf a) const {
    const vi under2 = a < splat(2.0f), under4 = a < splat(4.0f);
    const vf magic = under2 ? splat(6291456.0f) : (under4 ? splat(12582912.0f) : splat(25165824.0f));
    return (a + magic) - magic;
  }
};

struct Minifloat {
  explicit Minifloat(const Job& job) : Minifloat(job.mantissa_bits, job.min_exponent, job.element_max) {}
  Minifloat(int bits, int exponent, float largest) : mantissa_bits(bits), min_exponent(exponent), max(largest) {}
  int mantissa_bits, min_exponent;
  float max;
  static constexpr bool exact_in_bf16 = false;  // at the ends of the range

  vf nearest(vf a) const {
    const int drop = 23 - mantissa_bits;
    const vu even = (vu)a + ((1u << (drop - 1)) - 1) + (((vu)a >> drop) & 1u);
    const vf normal = (vf)(even & ~((1u << drop) - 1));
    const vf magic = (vf)splat_u(static_cast<uint32_t>(150 + min_exponent - mantissa_bits) << 23 | 1u << 22);
    const vf smallest = (vf)splat_u(static_cast<uint32_t>(127 + min_exponent) << 23);
    const vf q = a < smallest ? (a + magic) - magic : normal;
    return a == a ? q : a;
  }
};

// Round v to the element's grid; the sign, also of zero, is v's.
template <class ELEMENT, int ROUNDING>
inline vf round_element(const ELEMENT& element, vf v, vu word) {
  const vf a = min_f(magnitude(v), splat(element.max));
  if (ROUNDING == NEAREST) return with_sign_of(element.nearest(a), (vu)v);
  const uint32_t smallest = static_cast<uint32_t>(127 + element.min_exponent) << 23;
  const uint32_t below = static_cast<uint32_t>(element.mantissa_bits) << 23;
  const vu step = max_u((vu)a & 0x7F800000u, splat_u(smallest)) - below;
  const vf y = a * (vf)((254u << 23) - step);  // in steps: exact, for a step is a power of two
  const vf low = truncate(y);
  const vf p = y - low;
  vi up;
  if (ROUNDING == NEAREST_AWAY) {
    up = p >= splat(0.5f);
  } else if (ROUNDING == NEAREST_TOWARD_ZERO) {
    up = p > splat(0.5f);
  } else if (ROUNDING == STOCHASTIC) {
    const vf u = __builtin_convertvector((vi)(word >> 8), vf) * splat(1.0f / 16777216.0f);
    up = p > u;
  } else {
    const vf below = truncate(p * splat(4194304.0f)) + __builtin_convertvector((vi)(word >> 10), vf);
    up = below >= splat(4194304.0f);
  }
  const vf q = (up ? low + splat(1.0f) : low) * (vf)step;
  return with_sign_of(a == a ? q : a, (vu)v);
}

}  // namespace
