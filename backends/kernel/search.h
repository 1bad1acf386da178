// The clipping value of a row with the smallest squared error, among shares of its largest magnitude (LLM-FP4).
//
// The error of a candidate needs only the number and the sum of the magnitudes between two midpoints of its
// grid, and all candidates' midpoints are whole multiples of one length. So one pass over a row puts its
// magnitudes into bins, and every error follows from these, but for roundings that have a bound. Candidates
// within that bound of the least are then compared by the definition itself, so the choice is the reference's.

#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "elements.h"
#include "rotate.h"

// As fp32_scales.py fills it; the order of the fields is the interface.
struct Candidates {
  const float* shares;       // share i of the largest magnitude, about (i + 1) / count * shares[count - 1]
  const float* levels;       // the element's magnitudes, ascending, from 0 on
  const int32_t* midpoints;  // between neighbours, in units of the first
  int32_t count, gaps;       // gaps: how many midpoints
  float units;               // the largest level in units of the first midpoint
};

namespace {

class Search {
 public:
  Search(const Job& job, const Candidates& all) : job_(job), all_(all), element_(job) {
    length_ = static_cast<double>(all.count) * all.units / all.shares[all.count - 1];
    std::vector<int> marks(static_cast<size_t>(length_) + 2, 0);
    const auto limit = static_cast<int64_t>(marks.size()) - 1;
    for (int i = 1; i <= all.count; ++i)
      for (int gap = 0; gap < all.gaps; ++gap) marks[std::min<int64_t>(i * all.midpoints[gap], limit)] = 1;
    int bin = 0;
    for (int mark : marks) bin_.push_back(static_cast<uint16_t>(bin += mark));
    cells_ = bin + 1;
    for (int gap = 0; gap < all.gaps; ++gap)
      for (int i = 1; i <= all.count; ++i) place_.push_back(2 * bin_[std::min<int64_t>(i * all.midpoints[gap], limit)]);
    above_.resize(2 * cells_);
    errors_.resize(all.count);
    slack_.resize(all.count);
    int64_t size = 1;
    while (size < job.cols) size *= 2;
    tree_.resize(size);
    x_.resize((job.cols + PAIR - 1) / PAIR * PAIR);
  }

  float best(int64_t row) {
    vu most = {};
    for (int64_t col = 0; col < job_.cols; col += PAIR) {
      const Pair v = load<false>(job_, row, col);
      v.even.write(&x_[col]);
      v.odd.write(&x_[col + 16]);
      most = max_u(most, magnitudes(v));
    }
    const uint32_t bits = largest(most);
    float amax;
    std::memcpy(&amax, &bits, sizeof amax);
    if (bits == 0 || bits >= 0x7F800000u) return amax == 0.0f ? 0.0f : std::numeric_limits<float>::quiet_NaN();
    // Beyond these the definition's own roundings underflow or overflow: then all candidates are compared by it.
    const bool usual = amax > 1e-30f && amax < 1e30f;
    const double bound = usual ? estimate(amax) : 0.0;
    int close = 0, last = 0;
    for (int i = 0; i < all_.count; ++i)
      if (!usual || errors_[i] - slack_[i] <= bound) ++close, last = i;
    if (close == 1) return amax * all_.shares[last];
    double least = std::numeric_limits<double>::infinity();
    float clip = amax;
    for (int i = 0; i < all_.count; ++i) {
      if (usual && errors_[i] - slack_[i] > bound) continue;
      const float candidate = amax * all_.shares[i];
      const double error = defined_error(candidate);
      if (error < least) least = error, clip = candidate;
    }
    return clip;
  }

 private:
  // Estimate all candidates' errors from the bins, in fp64; return what the least is at most.
  double estimate(float amax) {
    const double energy = fill_bins(amax);
    for (int i = 0; i < all_.count; ++i) errors_[i] = energy;
    for (int gap = 0; gap < all_.gaps; ++gap) {
      const double low = all_.levels[gap], high = all_.levels[gap + 1];
      const double unit = static_cast<double>(amax) / all_.levels[all_.gaps];
      const int32_t* place = &place_[gap * all_.count];
      for (int i = 0; i < all_.count; ++i) {
        const double s = unit * all_.shares[i], sum = above_[place[i]], number = above_[place[i] + 1];
        errors_[i] += (high - low) * s * ((high + low) * s * number - 2.0 * sum);
      }
    }
    // By how much an estimate may differ from the definition. In units of fp32's rounding: 2 for dequantised
    // values, 4 for their scale, 34 for magnitudes so close to a midpoint that they fall on its other side; and
    // fp64's of the sums.
    const double unit = std::ldexp(1.0, -24), whole = std::sqrt(energy);
    double bound = std::numeric_limits<double>::infinity();
    for (int i = 0; i < all_.count; ++i) {
      errors_[i] = errors_[i] > 0.0 ? errors_[i] : 0.0;
      const double root = std::sqrt(errors_[i]);
      slack_[i] = 64.0 * unit * (whole + root) * root + (64.0 * unit * unit + 1e-11) * energy;
    }
    for (int i = 0; i < all_.count; ++i) bound = std::min(bound, errors_[i] + slack_[i]);
    return bound;
  }

  // Sum and number of the magnitudes in each bin and all above it; return the sum of the squares.
  double fill_bins(float amax) {
    std::fill(above_.begin(), above_.end(), 0.0);
    const vf scale = static_cast<float>(length_ / amax), top = static_cast<float>(bin_.size() - 1);
    double energy[16] = {};
    for (size_t at = 0; at < x_.size(); at += 16) {
      float size[16];
      int32_t place[16];
      const vf v = magnitude(vf::read(&x_[at]));
      const vi index = to_int(min_f(v * scale, top));
      v.write(size);
      index.write(place);
      for (int i = 0; i < 16; ++i) energy[i] += static_cast<double>(size[i]) * size[i];
      for (int i = 0; i < 16; ++i) {
        double* cell = &above_[2 * bin_[place[i]]];
        cell[0] += size[i];
        cell[1] += 1.0;
      }
    }
    double sum = 0.0, number = 0.0, all = 0.0;
    for (int bin = cells_ - 1; bin >= 0; --bin) {
      above_[2 * bin] = sum += above_[2 * bin];
      above_[2 * bin + 1] = number += above_[2 * bin + 1];
    }
    for (const double part : energy) all += part;
    return all;
  }

  // The squared error in fp64, summed by the pairwise tree (halves, quarters, ...).
  double defined_error(float clip) {
    const float given = clip / all_.levels[all_.gaps];
    const vf scale = given, divisor = given == 0.0f ? 1.0f : given;
    std::fill(tree_.begin(), tree_.end(), 0.0);
    for (size_t at = 0; at < x_.size(); at += 16) {
      float value[16];
      (round_element<Minifloat, NEAREST>(element_, vf::read(&x_[at]) / divisor, 0u) * scale).write(value);
      const int64_t first = static_cast<int64_t>(at) / PAIR * PAIR + static_cast<int64_t>(at) % PAIR / 16;
      for (int64_t i = 0; i < 16 && first + 2 * i < job_.cols; ++i) {
        const double off = static_cast<double>(value[i]) - static_cast<double>(x_[at + i]);
        tree_[first + 2 * i] = off * off;
      }
    }
    for (size_t half = tree_.size() / 2; half > 0; half /= 2)
      for (size_t i = 0; i < half; ++i) tree_[i] += tree_[i + half];
    return tree_[0];
  }

  const Job& job_;
  const Candidates& all_;
  const Minifloat element_;
  double length_;  // of the largest magnitude, in units of the first candidate's first midpoint
  int cells_;
  std::vector<uint16_t> bin_;           // of each unit of length
  std::vector<int32_t> place_;          // of the bin above each candidate's midpoints in above_, by midpoint
  std::vector<double> above_;           // sum and number of the magnitudes in a bin and all bins above it
  std::vector<double> errors_, slack_;  // of each candidate: estimate, and by how much it may be off
  std::vector<double> tree_;
  std::vector<float> x_;  // the row, even columns before odd ones in each 32
};

void search_rows(const Job& job, const Candidates& all, int64_t begin, int64_t end) {
  Search search(job, all);
  float* clip = static_cast<float*>(job.dst);
  for (int64_t row = begin; row < end; ++row) clip[row] = search.best(row);
}

}  // namespace
