// Attention of packed rows over a paged cache: causal, grouped heads, optionally in a window.
//
// Part of cpu_kernels.cpp. The softmax is kept up tile by tile of cached tokens (Milakov and Gimelshein,
// "Online normalizer calculation for softmax", 2018, section 3). Tiles begin at multiples of kCacheTile in
// the row's context and a query adds up its tokens in order, so its result is the same to the last bit
// whichever queries share the call: decoded alone, in a batch, or prefilled in chunks of any size. No slot is
// read but those that hold the row's tokens up to the tile's last query.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "cpu_linear.cpp"

namespace {

constexpr int64_t kCacheTile = 64;   // cached tokens looked at together
constexpr int64_t kQueryTile = 96;   // query heads that share a look at the cache, where a row has as many
constexpr float kNoKey[kLanes] = {};
constexpr float kNever = -std::numeric_limits<float>::infinity();

// One kv head's keys or values of some tokens, through their slots.
struct CachedRows {
  const float* first;
  int64_t stride;
  const int64_t* slots;
  const float* operator[](int64_t token) const { return first + slots[token] * stride; }
  void fetch(int64_t begin, int64_t end, int64_t width) const {
    for (int64_t token = begin; token < end; token++) {
      for (int64_t d = 0; d < width; d += 16) __builtin_prefetch((*this)[token] + d, 0, 2);
    }
  }
  CachedRows shifted(int64_t d) const { return {first + d, stride, slots}; }
};

// sums[m][lane] = sums[m][lane] * factors[m] (0 without factors) + sum over i in [begin, end) of weights[m][i] * rows[i][lane], for V
// vectors of lanes, of which a last one alone may have fewer than kLanes to be read. i is added in order.
template <int M, int V, typename RowsOfLanes>
inline void add_weighted(Rows weights, const float* factors, const RowsOfLanes& rows, int64_t begin, int64_t end,
                         int64_t last_lanes, float* sums, int64_t stride) {
  Vector parts[M * V];
  UNROLL for (int m = 0; m < M; m++) {
    UNROLL for (int v = 0; v < V; v++) {
      parts[m * V + v] = factors == nullptr ? Vector{} : load(sums + m * stride + v * kLanes) * factors[m];
    }
  }
  for (int64_t i = begin; i < end; i++) {
    const float* const row = rows[i];
    Vector lanes[V];
    UNROLL for (int v = 0; v < V; v++) {
      const bool is_whole = V > 1 || last_lanes == kLanes;
      lanes[v] = is_whole ? load(row + v * kLanes) : load_part(row + v * kLanes, last_lanes);
      keep_in_register(lanes[v]);
    }
    UNROLL for (int m = 0; m < M; m++) {
      Vector weight = spread(weights[m][i]);
      keep_in_register(weight);
      UNROLL for (int v = 0; v < V; v++) parts[m * V + v] += weight * lanes[v];
    }
  }
  UNROLL for (int m = 0; m < M; m++) {
    UNROLL for (int v = 0; v < V; v++) store(sums + m * stride + v * kLanes, parts[m * V + v]);
  }
}

// The same for `width` lanes and any number of sums.
template <typename RowsOfLanes>
inline void add_all_weighted(int64_t count, Rows weights, const float* factors, const RowsOfLanes& rows,
                             int64_t begin, int64_t end, int64_t width, float* sums, int64_t stride) {
  for (int64_t m = 0; m < count; m += kTileRows) {
    for (int64_t d = 0; d < width;) {
      const int64_t lanes = width - d, vectors = lanes >= 4 * kLanes ? 4 : lanes >= 2 * kLanes ? 2 : 1;
      const auto add = [&](auto tile_rows) {
        constexpr int M = decltype(tile_rows)::value;
        const auto call = vectors == 4   ? add_weighted<M, 4, RowsOfLanes>
                          : vectors == 2 ? add_weighted<M, 2, RowsOfLanes>
                                         : add_weighted<M, 1, RowsOfLanes>;
        call(weights.from(m), factors == nullptr ? nullptr : factors + m, rows.shifted(d), begin, end,
             std::min<int64_t>(kLanes, lanes), sums + m * stride + d, stride);
      };
      switch (std::min<int64_t>(count - m, kTileRows)) {
        case 1: add(std::integral_constant<int, 1>{}); break;
        case 2: add(std::integral_constant<int, 2>{}); break;
        case 3: add(std::integral_constant<int, 3>{}); break;
        default: add(std::integral_constant<int, kTileRows>{});
      }
      d += vectors * kLanes;
    }
  }
}

struct PagedAttention {
  const float* q;  // [tokens, heads, head_dim], any strides of tokens and heads
  int64_t q_token_stride, q_head_stride;
  const float* keys;    // [num_blocks, block_size, kv_heads, head_dim], contiguous
  const float* values;  // [num_blocks, block_size, kv_heads, value_dim], contiguous
  int64_t block_size, heads, kv_heads, head_dim, value_dim;
  const int32_t* block_tables;  // [rows, table_stride]
  int64_t table_stride;
  const int32_t* query_starts;     // [rows + 1]
  const int32_t* context_lengths;  // [rows]
  int64_t rows;
  float scale;
  int64_t window;  // tokens before its own that a query sees; negative: all
  float* out;      // [tokens, heads, value_dim], contiguous

  // The first row that has no query, or fewer tokens in its context than queries; -1 if there is none.
  int64_t refused_row() const {
    for (int64_t row = 0; row < rows; row++) {
      const int32_t queries = query_starts[row + 1] - query_starts[row];
      if (queries < 1 || context_lengths[row] < queries) return row;
    }
    return -1;
  }

  void run(int64_t threads) const {
    struct Tile {
      int64_t row, first_query;
    };
    const int64_t group = heads / kv_heads, step = std::max<int64_t>(1, kQueryTile / group);
    std::vector<Tile> tiles;
    tiles.reserve(rows);
    for (int64_t row = 0; row < rows; row++) {
      const int64_t queries = query_starts[row + 1] - query_starts[row];
      // the last queries see most, so they go first: what is left at the end is small
      for (int64_t first = (queries - 1) / step * step; first >= 0; first -= step) tiles.push_back({row, first});
    }
    parallel_for(threads, static_cast<int64_t>(tiles.size()) * kv_heads, [&](int64_t chunk) {
      const Tile tile = tiles[chunk / kv_heads];
      const int64_t left = query_starts[tile.row + 1] - query_starts[tile.row] - tile.first_query;
      attend(tile.row, chunk % kv_heads, tile.first_query, std::min(step, left));
    });
  }

 private:
  // What one thread needs for a tile of queries, one entry or row for each query head.
  struct Scratch {
    std::vector<int64_t> slots;
    std::vector<float> floats;
    float *queries, *keys, *scores, *sums, *largest, *totals, *factors;
    int64_t sums_stride;

    void shape(int64_t count, int64_t head_dim, int64_t value_dim) {
      sums_stride = (value_dim + kLanes - 1) / kLanes * kLanes;
      const int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
      const int64_t key_rows = (head_dim + kLanes - 1) / kLanes * kLanes;
      const int64_t needed =
          (count + key_rows) * kCacheTile + count * sums_stride + padded * 3 + count * head_dim + kLanes;
      if (static_cast<int64_t>(floats.size()) < needed) floats.resize(needed);
      const auto address = reinterpret_cast<uintptr_t>(floats.data());
      keys = floats.data() + (-address % VECTOR_BYTES) / sizeof(float);
      scores = keys + key_rows * kCacheTile;
      sums = scores + count * kCacheTile;
      largest = sums + count * sums_stride;
      totals = largest + padded;
      factors = totals + padded;
      queries = factors + padded;
      std::fill(sums, largest, 0.0f);
      std::fill(largest, totals, kNever);
      std::fill(totals, factors, 0.0f);
    }
  };

  // The slots of a row's tokens [begin, end), in places counted from the start of the tile that begin is in.
  void find_slots(Scratch& scratch, int64_t row, int64_t begin, int64_t end) const {
    const int64_t first_tile = begin / kCacheTile * kCacheTile;
    if (static_cast<int64_t>(scratch.slots.size()) < end - first_tile) scratch.slots.resize(end - first_tile);
    const int32_t* const table = block_tables + row * table_stride;
    for (int64_t position = begin; position < end;) {
      const int64_t offset = position % block_size, first = table[position / block_size] * block_size + offset;
      const int64_t count = std::min(block_size - offset, end - position);
      for (int64_t i = 0; i < count; i++) scratch.slots[position - first_tile + i] = first + i;
      position += count;
    }
  }

  // `num_queries` queries of a row, all heads of a group.
  void attend(int64_t row, int64_t kv_head, int64_t first_query, int64_t num_queries) const {
    thread_local Scratch scratch;
    const int64_t group = heads / kv_heads, count = num_queries * group;
    const int64_t first_token = query_starts[row] + first_query;
    const int64_t first_position =
        context_lengths[row] - (query_starts[row + 1] - query_starts[row]) + first_query;
    scratch.shape(count, head_dim, value_dim);
    for (int64_t i = 0; i < count; i++) {
      const float* const query =
          q + (first_token + i / group) * q_token_stride + (kv_head * group + i % group) * q_head_stride;
      for (int64_t d = 0; d < head_dim; d++) scratch.queries[i * head_dim + d] = query[d] * scale;
    }
    const int64_t end = first_position + num_queries;
    const int64_t begin = window < 0 ? 0 : std::max<int64_t>(0, first_position - window);
    const int64_t first_tile = begin / kCacheTile * kCacheTile;
    find_slots(scratch, row, begin, end);
    for (int64_t tile = first_tile; tile < end; tile += kCacheTile) {
      const int64_t skipped = std::max<int64_t>(0, begin - tile), tokens = std::min(kCacheTile, end - tile);
      const int64_t* const slots = scratch.slots.data() + (tile - first_tile);
      const int64_t width = (tokens + kLanes - 1) / kLanes * kLanes;
      const CachedRows tile_keys{keys + kv_head * head_dim, kv_heads * head_dim, slots};
      const CachedRows tile_values{values + kv_head * value_dim, kv_heads * value_dim, slots};
      tile_values.fetch(skipped, tokens, value_dim);
      tile_keys.fetch(kCacheTile, std::min(2 * kCacheTile, end - tile), head_dim);
      turn_keys(scratch, tile_keys, skipped, tokens);
      add_all_weighted(count, {scratch.queries, head_dim}, nullptr, Rows{scratch.keys, kCacheTile}, 0, head_dim,
                       width, scratch.scores, kCacheTile);
      for (int64_t i = 0; i < count; i++) weigh(scratch, i, tile, width, first_position + i / group);
      add_all_weighted(count, {scratch.scores, kCacheTile}, scratch.factors, tile_values, skipped, tokens,
                       value_dim, scratch.sums, scratch.sums_stride);
    }
    for (int64_t i = 0; i < count; i++) {
      float* const result =
          out + ((first_token + i / group) * heads + kv_head * group + i % group) * value_dim;
      const float* const sums = scratch.sums + i * scratch.sums_stride;
      for (int64_t d = 0; d < value_dim; d++) result[d] = sums[d] / scratch.totals[i];
    }
  }

  // Lays the keys of tokens [begin, end) out by dimension: keys[d][token]. Those of other tokens in the same
  // vectors are 0.
  void turn_keys(const Scratch& scratch, const CachedRows& tile_keys, int64_t begin, int64_t end) const {
    for (int64_t token = begin / kLanes * kLanes; token < end; token += kLanes) {
      const float* rows[kLanes];
      UNROLL for (int i = 0; i < kLanes; i++) {
        rows[i] = begin <= token + i && token + i < end ? tile_keys[token + i] : kNoKey;
      }
      for (int64_t d = 0; d < head_dim; d += kLanes) {
        Vector square[kLanes];
        UNROLL for (int i = 0; i < kLanes; i++) {
          const float* const key = rows[i] == kNoKey ? kNoKey : rows[i] + d;
          square[i] = d + kLanes <= head_dim ? load(key) : load_part(key, head_dim - d);
        }
        transpose(square);
        UNROLL for (int i = 0; i < kLanes; i++) store(scratch.keys + (d + i) * kCacheTile + token, square[i]);
      }
    }
  }

  // Turns a query's scores into weights relative to the largest score so far, 0 for tokens it must not see.
  void weigh(const Scratch& scratch, int64_t i, int64_t tile, int64_t width, int64_t position) const {
    float* const scores = scratch.scores + i * kCacheTile;
    const int64_t first = window < 0 ? 0 : std::clamp<int64_t>(position - window - tile, 0, width);
    const int64_t last = std::clamp<int64_t>(position + 1 - tile, first, width);
    std::fill(scores, scores + first, kNever);
    std::fill(scores + last, scores + width, kNever);
    Vector most = load(scores);
    for (int64_t t = kLanes; t < width; t += kLanes) most = larger(most, load(scores + t));
    const float before = scratch.largest[i], now = std::max(before, largest_lane(most));
    // until a query has seen a token its weights are e^(-inf - 0) = 0
    const Vector base = spread(now == kNever ? 0.0f : now);
    Vector total{};
    for (int64_t t = 0; t < width; t += kLanes) {
      const Vector weights = exponential(load(scores + t) - base);
      store(scores + t, weights);
      total += weights;
    }
    scratch.factors[i] = before == now ? 1.0f : exponential(spread(before) - base)[0];
    scratch.totals[i] = scratch.totals[i] * scratch.factors[i] + lane_sum(total);
    scratch.largest[i] = now;
  }
};

}  // namespace
