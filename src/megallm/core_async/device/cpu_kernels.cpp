// The kernels that a decoding step on a CPU is made of, behind a plain C interface.
//
// Compiled by cpu_build.py on the machine it runs on, called by cpu_kernels.py, which says what each function
// does and checks what it is given. float32 only; sizes and strides count floats; no function allocates
// its output or keeps a pointer. Includes no header of torch, so that it builds in three seconds.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cpu_attention.cpp"
#include "cpu_linear.cpp"
#include "cpu_team.cpp"
#include "cpu_vectors.cpp"

namespace {

constexpr int64_t kSmall = 1 << 15;  // floats that one thread is done with before another has begun

// Calls `loop(row)` for each row of `width` floats.
template <typename Loop>
void for_rows(int64_t threads, int64_t rows, int64_t width, const Loop& loop) {
  const int64_t step = std::max<int64_t>(1, kSmall / 4 / std::max<int64_t>(1, width));
  parallel_for(rows * width < kSmall ? 1 : threads, (rows + step - 1) / step, [&](int64_t chunk) {
    for (int64_t row = chunk * step; row < std::min(rows, (chunk + 1) * step); row++) loop(row);
  });
}

// Turns the pairs (d, d + rotary_dim / 2) of each head by the token's angles.
void turn(float* heads, int64_t count, int64_t stride, const float* cosines, const float* sines,
          int64_t half) {
  for (int64_t head = 0; head < count; head++) {
    float* const first = heads + head * stride;
    float* const second = first + half;
    int64_t d = 0;
    for (; d + kLanes <= half; d += kLanes) {
      const Vector a = load(first + d), b = load(second + d), c = load(cosines + d), s = load(sines + d);
      store(first + d, a * c - b * s);
      store(second + d, b * c + a * s);
    }
    for (; d < half; d++) {
      const float a = first[d], b = second[d];
      first[d] = a * cosines[d] - b * sines[d];
      second[d] = b * cosines[d] + a * sines[d];
    }
  }
}

// y = x / sqrt(mean of x^2 + epsilon) * weight, x first becoming x + added where that is given.
void norm_row(float* x, const float* added, const float* weight, float* y, int64_t width, float epsilon) {
  Vector squares{};
  int64_t d = 0;
  for (; d + kLanes <= width; d += kLanes) {
    Vector part = load(x + d);
    if (added != nullptr) store(x + d, part += load(added + d));
    squares = multiply_add(part, part, squares);
  }
  float total = lane_sum(squares);
  for (int64_t rest = d; rest < width; rest++) {
    if (added != nullptr) x[rest] += added[rest];
    total += x[rest] * x[rest];
  }
  const float factor = 1.0f / std::sqrt(total / static_cast<float>(width) + epsilon);
  for (d = 0; d + kLanes <= width; d += kLanes) store(y + d, load(x + d) * factor * load(weight + d));
  for (; d < width; d++) y[d] = x[d] * factor * weight[d];
}

inline Vector gated(Vector gate, Vector up) { return gate / (exponential(-gate) + 1.0f) * up; }

// y = silu(gate) * up, of rows that hold `width` gates, then as many ups.
void gate_rows(const float* gate_up, float* y, int64_t rows, int64_t width, int64_t threads) {
  for_rows(threads, rows, 2 * width, [&](int64_t row) {
    const float *const gate = gate_up + row * 2 * width, *const up = gate + width;
    float* const out = y + row * width;
    int64_t d = 0;
    for (; d + kLanes <= width; d += kLanes) store(out + d, gated(load(gate + d), load(up + d)));
    if (d < width) {
      store_part(out + d, gated(load_part(gate + d, width - d), load_part(up + d, width - d)), width - d);
    }
  });
}

}  // namespace

extern "C" {

void megallm_linear(const float* x, const float* weight, const float* bias, float* y, int64_t m_size,
                    int64_t n_size, int64_t k_size, int64_t threads) {
  Linear{{x, k_size}, weight, bias, y, m_size, n_size, k_size}.run(threads);
}

// Gives -1, or the first row that has no query or too short a context; then nothing is written.
int64_t megallm_paged_attention(const float* q, int64_t q_token_stride, int64_t q_head_stride,
                                const float* keys, const float* values, int64_t block_size, int64_t heads,
                                int64_t kv_heads, int64_t head_dim, int64_t value_dim,
                                const int32_t* block_tables, int64_t table_stride,
                                const int32_t* query_starts, const int32_t* context_lengths, int64_t rows,
                                float scale, int64_t window, float* out, int64_t threads) {
  const PagedAttention attention{
      q,        q_token_stride, q_head_stride, keys,         values,       block_size,   heads,
      kv_heads, head_dim,       value_dim,     block_tables, table_stride, query_starts, context_lengths,
      rows,     scale,          window,        out};
  const int64_t refused = attention.refused_row();
  if (refused < 0) attention.run(threads);
  return refused;
}

void megallm_rope_and_cache_write(float* q, int64_t q_token_stride, int64_t q_head_stride, int64_t heads,
                                  float* k, int64_t k_token_stride, int64_t k_head_stride, const float* v,
                                  int64_t v_token_stride, int64_t v_head_stride, int64_t kv_heads,
                                  int64_t head_dim, int64_t value_dim, const float* cosines,
                                  const float* sines, int64_t angle_stride, int64_t rotary_dim,
                                  const int64_t* slots, int64_t tokens, float* keys, float* values,
                                  int64_t threads) {
  const int64_t width = heads * head_dim + kv_heads * (head_dim + value_dim);
  for_rows(threads, tokens, width, [&](int64_t token) {
    float* const new_key = k + token * k_token_stride;
    if (rotary_dim > 0) {
      const float *const c = cosines + token * angle_stride, *const s = sines + token * angle_stride;
      turn(q + token * q_token_stride, heads, q_head_stride, c, s, rotary_dim / 2);
      turn(new_key, kv_heads, k_head_stride, c, s, rotary_dim / 2);
    }
    for (int64_t head = 0; head < kv_heads; head++) {
      const int64_t place = slots[token] * kv_heads + head;
      std::copy_n(new_key + head * k_head_stride, head_dim, keys + place * head_dim);
      std::copy_n(v + token * v_token_stride + head * v_head_stride, value_dim, values + place * value_dim);
    }
  });
}

void megallm_rms_norm(float* x, const float* added, const float* weight, float* y, int64_t rows,
                      int64_t width, float epsilon, int64_t threads) {
  for_rows(threads, rows, width, [&](int64_t row) {
    const int64_t first = row * width;
    norm_row(x + first, added == nullptr ? nullptr : added + first, weight, y + first, width, epsilon);
  });
}

void megallm_silu_mul(const float* gate_up, float* y, int64_t rows, int64_t width, int64_t threads) {
  gate_rows(gate_up, y, rows, width, threads);
}

// y = silu(gate) * up, of gate and up = x times `weight`; `chunk` rows at a time, so that what lies between
// stays in the cache: `between` has room for chunk * 2 * width floats.
void megallm_gated_linear(const float* x, const float* weight, const float* bias, float* between, float* y,
                          int64_t rows, int64_t width, int64_t k_size, int64_t chunk, int64_t threads) {
  for (int64_t row = 0; row < rows; row += chunk) {
    const int64_t count = std::min(chunk, rows - row);
    Linear{{x + row * k_size, k_size}, weight, bias, between, count, 2 * width, k_size}.run(threads);
    gate_rows(between, y + row * width, count, width, threads);
  }
}

}  // extern "C"
