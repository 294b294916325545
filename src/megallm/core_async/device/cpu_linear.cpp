// Products of rows: y[m, n] = sum over k of x[m, k] * w[n, k], both operands read as they lie in memory.
//
// Part of cpu_kernels.cpp. An output adds up k in blocks of kBlock; in a block, lane j of one vector adds up
// k = j, j + lanes, .. and then the lanes are added. So it is the same to the last bit however many rows are
// computed together, in which tile and on how many threads. Nothing is packed: weights are streamed once,
// and the next rows are fetched ahead, since the hardware's own prefetching reaches half of the memory's
// speed here.

#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu_team.cpp"
#include "cpu_vectors.cpp"

namespace {

constexpr int64_t kBlock = 768;  // four rows of each operand stay in a first-level cache of 32 KiB
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTileRows = 4;  // 16 sums and 8 operands in 32 registers
#else
constexpr int kTileRows = 2;  // 8 sums and 6 operands in 16 registers
#endif
constexpr int kTileColumns = 4;

// Rows that lie `stride` floats apart.
struct Rows {
  const float* first;
  int64_t stride;
  const float* operator[](int64_t row) const { return first + row * stride; }
  Rows from(int64_t row) const { return {(*this)[row], stride}; }
  Rows shifted(int64_t d) const { return {first + d, stride}; }
};

// Where the sums of a tile go: replacing what is there, or added to it.
struct Output {
  float* first;
  int64_t stride;
  bool adds;
  Output from(int64_t row) const { return {first + row * stride, stride, adds}; }
};

template <int M, int N, int First = 0>
inline void store_sums(const Vector* sums, Output y) {
  constexpr int left = M * N - First;
  constexpr int count = left >= kLanes ? kLanes : left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
  float lanes[kLanes];
  store(lanes, lane_sums<count>(sums + First));
  UNROLL for (int i = 0; i < count; i++) {
    float& out = y.first[(First + i) / N * y.stride + (First + i) % N];
    out = (y.adds ? out : 0.0f) + lanes[i * (kLanes / count)];
  }
  if constexpr (left > count) store_sums<M, N, First + count>(sums, y);
}

// One tile of outputs. On its way along k it also fetches `Fetch` rows from `next` on, and as many N rows
// further on, so that each is asked for twice: one request alone is often dropped.
template <int M, int N, int Fetch>
inline void product_tile(Rows x, Rows w, int64_t k_size, Rows next, Output y) {
  Vector sums[M * N];
  UNROLL for (int i = 0; i < M * N; i++) sums[i] = Vector{};
  const float* w_rows[N];
  UNROLL for (int n = 0; n < N; n++) w_rows[n] = w[n];
  const auto add = [&](const auto& load_at) {
    Vector w_part[N];
    UNROLL for (int n = 0; n < N; n++) w_part[n] = load_at(w_rows[n]);
    UNROLL for (int m = 0; m < M; m++) {
      const Vector x_part = load_at(x[m]);
      UNROLL for (int n = 0; n < N; n++) sums[m * N + n] = multiply_add(x_part, w_part[n], sums[m * N + n]);
    }
  };
  int64_t k = 0;
  for (; k + kLanes <= k_size; k += kLanes) {
    UNROLL for (int row = 0; row < Fetch; row++) {
      __builtin_prefetch(next[row] + k, 0, 2);
      __builtin_prefetch(next[row + N] + k, 0, 2);
    }
    add([k](const float* row) { return load(row + k); });
  }
  if (k < k_size) add([k, k_size](const float* row) { return load_part(row + k, k_size - k); });
  store_sums<M, N>(sums, y);
}

// `N` columns of outputs for any number of rows. The tiles share in fetching the N rows from `next` on, Fetch
// each: fetched all by the first tile, they would keep it waiting.
template <int N, int Fetch>
inline void product_columns(Rows x, int64_t m_size, Rows w, int64_t k_size, Rows next, Output y) {
  int64_t m = 0;
  for (int fetched = 0; m + kTileRows <= m_size && fetched < N; m += kTileRows, fetched += Fetch) {
    product_tile<kTileRows, N, Fetch>(x.from(m), w, k_size, next.from(fetched), y.from(m));
  }
  for (; m + kTileRows <= m_size; m += kTileRows) {
    product_tile<kTileRows, N, 0>(x.from(m), w, k_size, next, y.from(m));
  }
  constexpr int fetch = Fetch == N ? N : 0;
  switch (m_size - m) {
    case 1: return product_tile<1, N, fetch>(x.from(m), w, k_size, next, y.from(m));
    case 2: return product_tile<2, N, fetch>(x.from(m), w, k_size, next, y.from(m));
    case 3: return product_tile<3, N, fetch>(x.from(m), w, k_size, next, y.from(m));
  }
}

struct Linear {
  Rows x;
  const float* weight;  // [n_size, k_size], contiguous
  const float* bias;    // [n_size] or null
  float* y;             // [m_size, n_size], contiguous
  int64_t m_size, n_size, k_size;

  void run(int64_t threads) const {
    const int64_t m_step = 64;
    const int64_t n_step = std::clamp<int64_t>(n_size / (threads * 8) / 16 * 16, 16, 64);
    const int64_t m_chunks = (m_size + m_step - 1) / m_step, n_chunks = (n_size + n_step - 1) / n_step;
    parallel_for(threads, m_chunks * n_chunks, [&](int64_t chunk) {
      const int64_t m = chunk % m_chunks * m_step, n = chunk / m_chunks * n_step;
      part(m, std::min(m + m_step, m_size), n, std::min(n + n_step, n_size));
    });
  }

 private:
  // Outputs of rows [m, m_end) and columns [n, n_end).
  void part(int64_t m, int64_t m_end, int64_t n, int64_t n_end) const {
    for (int64_t row = m; row < m_end && bias != nullptr; row++) {
      std::copy(bias + n, bias + n_end, y + row * n_size + n);
    }
    for (int64_t k = 0; k < k_size; k += kBlock) {
      const bool adds = k > 0 || bias != nullptr;
      int64_t column = n;
      // few rows need more columns under way
      if (m_end - m <= 2) column = columns<8>(m, m_end, column, n_end, k, adds);
      column = columns<kTileColumns>(m, m_end, column, n_end, k, adds);
      columns<1>(m, m_end, column, n_end, k, adds);
    }
  }

  template <int N>
  int64_t columns(int64_t m, int64_t m_end, int64_t n, int64_t n_end, int64_t k, bool adds) const {
    const Rows rows{x[m] + k, x.stride};
    const int64_t m_step = m_end - m, k_step = std::min(kBlock, k_size - k);
    for (; n + N <= n_end; n += N) {
      const Rows w{weight + n * k_size + k, k_size}, next = w.from(N);
      const Output out{y + m * n_size + n, n_size, adds};
      if (m_step < 2 * kTileRows) {
        product_columns<N, N>(rows, m_step, w, k_step, next, out);
      } else if (m_step < 4 * kTileRows) {
        product_columns<N, (N + 1) / 2>(rows, m_step, w, k_step, next, out);
      } else {
        product_columns<N, 1>(rows, m_step, w, k_step, next, out);
      }
    }
    return n;
  }
};

}  // namespace
