// Products of rows: y[m, n] = sum over k of x[m, k] * w[n, k], both operands read as they lie in memory.
//
// Part of cpu_kernels.cpp. Each output keeps one vector of partial sums (lane j adds up k = j, j + lanes, ..)
// and adds its lanes up at the end, so it is the same to the last bit however many rows are computed
// together, in which tile and on how many threads. Nothing is packed: weights are streamed once, and the
// next rows are fetched ahead, since the hardware's own prefetching reaches half of the memory's speed here.

#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu_team.cpp"
#include "cpu_vectors.cpp"

namespace {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTileRows = 4;  // 16 sums and 8 operands in 32 registers
#else
constexpr int kTileRows = 2;  // 8 sums and 6 operands in 16 registers
#endif
constexpr int kTileColumns = 4;

// `count` rows, `stride` floats apart.
struct Rows {
  const float* first;
  int64_t stride;
  const float* operator[](int64_t row) const { return first + row * stride; }
  Rows from(int64_t row) const { return {(*this)[row], stride}; }
};

template <int M, int N, int First = 0>
inline void store_sums(const Vector* sums, float* y, int64_t y_stride) {
  constexpr int left = M * N - First;
  constexpr int count = left >= kLanes ? kLanes : left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
  float lanes[kLanes];
  store(lanes, lane_sums<count>(sums + First));
  UNROLL for (int i = 0; i < count; i++) {
    y[(First + i) / N * y_stride + (First + i) % N] = lanes[i * (kLanes / count)];
  }
  if constexpr (left > count) store_sums<M, N, First + count>(sums, y, y_stride);
}

// One tile of outputs; `w[n]` is the n-th row of the other operand. Each step along k also fetches `Fetch`
// cache lines of what is wanted next, from `next` on.
template <int M, int N, int Fetch, typename RowsOfW>
inline void product_tile(Rows x, const RowsOfW& w, int64_t k_size, const float* next, float* y,
                         int64_t y_stride) {
  Vector sums[M * N];
  UNROLL for (int i = 0; i < M * N; i++) sums[i] = Vector{};
  const float* w_rows[N];
  UNROLL for (int n = 0; n < N; n++) w_rows[n] = w[n];
  const auto add = [&](const auto& load_at) {
    Vector w_part[N];
    UNROLL for (int n = 0; n < N; n++) {
      w_part[n] = load_at(w_rows[n]);
      keep_in_register(w_part[n]);
    }
    UNROLL for (int m = 0; m < M; m++) {
      Vector x_part = load_at(x[m]);
      keep_in_register(x_part);
      UNROLL for (int n = 0; n < N; n++) sums[m * N + n] += x_part * w_part[n];
    }
  };
  int64_t k = 0;
  for (; k + kLanes <= k_size; k += kLanes) {
    UNROLL for (int line = 0; line < Fetch; line++) __builtin_prefetch(next + k * Fetch + line * kLanes, 0, 2);
    add([k](const float* row) { return load(row + k); });
  }
  if (k < k_size) add([k, k_size](const float* row) { return load_part(row + k, k_size - k); });
  store_sums<M, N>(sums, y, y_stride);
}

// `N` columns of outputs for any number of rows. The tiles share in fetching the `next` N rows of `w`, if
// these are wanted: fetched all by the first tile, they would keep it waiting.
template <int N, int Fetch = 0, typename RowsOfW>
inline void product_columns(Rows x, int64_t m_size, const RowsOfW& w, int64_t k_size, const float* next, float* y,
                            int64_t y_stride) {
  int64_t m = 0;
  for (int fetched = 0; m + kTileRows <= m_size && fetched < N; m += kTileRows, fetched += Fetch) {
    product_tile<kTileRows, N, Fetch>(x.from(m), w, k_size, next + fetched * k_size, y + m * y_stride, y_stride);
  }
  for (; m + kTileRows <= m_size; m += kTileRows) {
    product_tile<kTileRows, N, 0>(x.from(m), w, k_size, next, y + m * y_stride, y_stride);
  }
  const Rows left = x.from(m);
  y += m * y_stride;
  constexpr int fetch = Fetch == N ? N : 0;
  switch (m_size - m) {
    case 1: return product_tile<1, N, fetch>(left, w, k_size, next, y, y_stride);
    case 2: return product_tile<2, N, fetch>(left, w, k_size, next, y, y_stride);
    case 3: return product_tile<3, N, fetch>(left, w, k_size, next, y, y_stride);
  }
}

struct Linear {
  Rows x;
  const float* weight;  // [n_size, k_size], contiguous
  const float* bias;    // [n_size] or null
  float* y;             // [m_size, n_size], contiguous
  int64_t m_size, n_size, k_size;

  void run(int64_t threads) const {
    const int64_t m_step = std::clamp<int64_t>(kBlockBytes / (k_size * 4), kTileRows, 256);
    const int64_t n_step = std::clamp<int64_t>(n_size / (threads * 8) / 16 * 16, 16, 64);
    const int64_t m_chunks = (m_size + m_step - 1) / m_step, n_chunks = (n_size + n_step - 1) / n_step;
    parallel_for(threads, m_chunks * n_chunks, [&](int64_t chunk) {
      const int64_t m = chunk / n_chunks * m_step, n = chunk % n_chunks * n_step;
      part(m, std::min(m + m_step, m_size), n, std::min(n + n_step, n_size));
    });
  }

 private:
  static constexpr int64_t kBlockBytes = 1 << 18;  // rows of x that stay in the second-level cache

  // Outputs of rows [m, m_end) and columns [n, n_end).
  void part(int64_t m, int64_t m_end, int64_t n, int64_t n_end) const {
    if (m_end - m <= 2) n = columns<8>(m, m_end, n, n_end);  // few rows need more columns under way
    n = columns<kTileColumns>(m, m_end, n, n_end);
    columns<1>(m, m_end, n, n_end);
  }

  template <int N>
  int64_t columns(int64_t m, int64_t m_end, int64_t n, int64_t n_end) const {
    const int64_t rows = m_end - m;
    for (; n + N <= n_end; n += N) {
      const Rows w{weight + n * k_size, k_size};
      const float* const next = w[N];
      float* const out = y + m * n_size + n;
      if (n + 2 * N > n_end) {
        product_columns<N, 0>(x.from(m), rows, w, k_size, next, out, n_size);
      } else if (rows < 2 * kTileRows) {
        product_columns<N, N>(x.from(m), rows, w, k_size, next, out, n_size);
      } else if (rows < 4 * kTileRows) {
        product_columns<N, (N + 1) / 2>(x.from(m), rows, w, k_size, next, out, n_size);
      } else {
        product_columns<N, 1>(x.from(m), rows, w, k_size, next, out, n_size);
      }
      if (bias == nullptr) continue;
      for (int64_t row = 0; row < rows; row++) {
        for (int column = 0; column < N; column++) out[row * n_size + column] += bias[n + column];
      }
    }
    return n;
  }
};

}  // namespace
