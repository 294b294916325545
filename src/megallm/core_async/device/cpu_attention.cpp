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

constexpr int64_t kCacheTile = 64;  // cached tokens looked at together
constexpr int64_t kQueryTile = 96;  // query heads that share a look at the cache, where a row has as many
constexpr float kNever = -std::numeric_limits<float>::infinity();

// Keys or values of some tokens, through their slots.
struct CachedRows {
  const float* first;
  int64_t stride;
  const int64_t* slots;
  const float* operator[](int64_t token) const { return first + slots[token] * stride; }
  CachedRows shifted(int64_t d) const { return {first + d, stride, slots}; }
};

// Cached rows that are wanted soon, fetched a few lines at a time between other work: of many requests at
// once most are dropped.
struct Wanted {
  CachedRows rows;
  int64_t count, width;
  int64_t row = 0, d = 0;

  void fetch() {
    if (row >= count) return;
    const float* const from = rows[row] + d;
    UNROLL for (int line = 0; line < 4; line++) __builtin_prefetch(from + line * 16, 0, 2);
    d += 64;
    if (d >= width) {
      d = 0;
      row++;
    }
  }
};

// sums[m][lane] = sums[m][lane] * factors[m] (0 without factors) + sum over i in [begin, end), in order, of
// weights[m][i] * rows[i][lane]. For V vectors of lanes; where V is 1, only `last_lanes` of it are read.
template <int M, int V, typename RowsOfLanes>
inline void add_weighted(Rows weights, const float* factors, const RowsOfLanes& rows, int64_t begin,
                         int64_t end, int64_t last_lanes, float* sums, int64_t stride, Wanted& wanted) {
  Vector parts[M * V];
  UNROLL for (int m = 0; m < M; m++) {
    UNROLL for (int v = 0; v < V; v++) {
      parts[m * V + v] = factors == nullptr ? Vector{} : load(sums + m * stride + v * kLanes) * factors[m];
    }
  }
  for (int64_t i = begin; i < end; i++) {
    const float* const row = rows[i];
    wanted.fetch();
    Vector lanes[V];
    UNROLL for (int v = 0; v < V; v++) {
      const bool is_whole = V > 1 || last_lanes == kLanes;
      lanes[v] = is_whole ? load(row + v * kLanes) : load_part(row + v * kLanes, last_lanes);
    }
    UNROLL for (int m = 0; m < M; m++) {
      const Vector weight = spread(weights[m][i]);
      UNROLL for (int v = 0; v < V; v++) parts[m * V + v] = multiply_add(weight, lanes[v], parts[m * V + v]);
    }
  }
  UNROLL for (int m = 0; m < M; m++) {
    UNROLL for (int v = 0; v < V; v++) store(sums + m * stride + v * kLanes, parts[m * V + v]);
  }
}

// The same for `width` lanes and any number of sums.
template <typename RowsOfLanes>
inline void add_all_weighted(int64_t count, Rows weights, const float* factors, const RowsOfLanes& rows,
                             int64_t begin, int64_t end, int64_t width, float* sums, int64_t stride,
                             Wanted& wanted) {
  for (int64_t m = 0; m < count; m += kTileRows) {
    for (int64_t d = 0; d < width;) {
      const int64_t lanes = width - d, vectors = lanes >= 4 * kLanes ? 4 : lanes >= 2 * kLanes ? 2 : 1;
      const auto add = [&](auto tile_rows) {
        constexpr int M = decltype(tile_rows)::value;
        const auto call = vectors == 4   ? add_weighted<M, 4, RowsOfLanes>
                          : vectors == 2 ? add_weighted<M, 2, RowsOfLanes>
                                         : add_weighted<M, 1, RowsOfLanes>;
        call(weights.from(m), factors == nullptr ? nullptr : factors + m, rows.shifted(d), begin, end,
             std::min<int64_t>(kLanes, lanes), sums + m * stride + d, stride, wanted);
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
      if (num_queries(row) < 1 || context_lengths[row] < num_queries(row)) return row;
    }
    return -1;
  }

  void run(int64_t threads) const {
    const int64_t step = std::max<int64_t>(1, kQueryTile / (heads / kv_heads));
    std::vector<Tile> tiles;
    tiles.reserve(rows);
    for (int64_t row = 0; row < rows; row++) {
      // the last queries see most, so they go first: what is left at the end is small
      for (int64_t first = (num_queries(row) - 1) / step * step; first >= 0; first -= step) {
        tiles.push_back(tile_of(row, first, std::min(step, num_queries(row) - first)));
      }
    }
    const int64_t count = static_cast<int64_t>(tiles.size());
    // all kv heads of a tile together where there are tiles enough: a token's heads are neighbours in memory
    const int64_t together = count >= 4 * threads ? kv_heads : 1, parts = kv_heads / together;
    parallel_for(threads, count * parts, [&](int64_t chunk) {
      const int64_t tile = chunk / parts, head = chunk % parts * together;
      attend(tiles[tile], head, head + together, tiles[std::min(tile + 1, count - 1)]);
    });
  }

 private:
  // Some queries of a row, and the tokens that any of them sees: [begin, end).
  struct Tile {
    int64_t row, first_token, num_queries, first_position, begin, end;
    int64_t first_cache_tile() const { return begin / kCacheTile * kCacheTile; }
  };

  // What one thread needs: an entry or row for each query head, and keys by dimension.
  struct Scratch {
    std::vector<int64_t> slots, next_slots;
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

  int64_t num_queries(int64_t row) const { return query_starts[row + 1] - query_starts[row]; }

  Tile tile_of(int64_t row, int64_t first_query, int64_t count) const {
    const int64_t position = context_lengths[row] - num_queries(row) + first_query;
    return {row,      query_starts[row] + first_query,
            count,    position,
            window < 0 ? 0 : std::max<int64_t>(0, position - window),
            position + count};
  }

  // The slots of the tile's tokens up to `end`, in places counted from the start of its first cache tile.
  void find_slots(std::vector<int64_t>& slots, const Tile& tile, int64_t end) const {
    const int64_t origin = tile.first_cache_tile();
    if (static_cast<int64_t>(slots.size()) < end - origin) slots.resize(end - origin);
    const int32_t* const table = block_tables + tile.row * table_stride;
    for (int64_t position = tile.begin; position < end;) {
      const int64_t offset = position % block_size;
      const int64_t first = table[position / block_size] * block_size + offset;
      const int64_t count = std::min(block_size - offset, end - position);
      for (int64_t i = 0; i < count; i++) slots[position - origin + i] = first + i;
      position += count;
    }
  }

  CachedRows rows_of(const float* cache, int64_t width, int64_t kv_head, const int64_t* slots) const {
    return {cache + kv_head * width, kv_heads * width, slots};
  }

  // All queries of a tile, for the query heads of kv heads [head, head_end). `next` is what follows.
  void attend(const Tile& tile, int64_t head, int64_t head_end, const Tile& next) const {
    thread_local Scratch scratch;
    const int64_t group = heads / kv_heads, count = tile.num_queries * group, num_heads = head_end - head;
    scratch.shape(count * num_heads, head_dim, value_dim);
    find_slots(scratch.slots, tile, tile.end);
    find_slots(scratch.next_slots, next, std::min(next.end, next.first_cache_tile() + kCacheTile));
    for_each(tile, head, head_end, [&](int64_t i, int64_t token, int64_t query_head) {
      const float* const query = q + token * q_token_stride + query_head * q_head_stride;
      for (int64_t d = 0; d < head_dim; d++) scratch.queries[i * head_dim + d] = query[d] * scale;
    });
    for (int64_t at = tile.first_cache_tile(); at < tile.end; at += kCacheTile) {
      const int64_t then = at + kCacheTile;
      const bool is_last = then >= tile.end;
      const int64_t* const wanted_slots =
          is_last ? scratch.next_slots.data() : scratch.slots.data() + (then - tile.first_cache_tile());
      const int64_t wanted =
          std::min(kCacheTile, is_last ? next.end - next.first_cache_tile() : tile.end - then);
      Wanted next_keys{rows_of(keys, head_dim, head, wanted_slots), wanted, num_heads * head_dim};
      Wanted next_values{rows_of(values, value_dim, head, wanted_slots), wanted, num_heads * value_dim};
      for (int64_t h = head; h < head_end; h++) {
        attend(scratch, tile, at, h, (h - head) * count, next_keys, next_values);
      }
    }
    for_each(tile, head, head_end, [&](int64_t i, int64_t token, int64_t query_head) {
      float* const result = out + (token * heads + query_head) * value_dim;
      const float* const sums = scratch.sums + i * scratch.sums_stride;
      for (int64_t d = 0; d < value_dim; d++) result[d] = sums[d] / scratch.totals[i];
    });
  }

  // Calls `visit(place in the scratch, token, query head)` for a tile's queries, by kv head, then token.
  template <typename Visit>
  void for_each(const Tile& tile, int64_t head, int64_t head_end, const Visit& visit) const {
    const int64_t group = heads / kv_heads;
    int64_t i = 0;
    for (int64_t h = head; h < head_end; h++) {
      for (int64_t token = 0; token < tile.num_queries; token++) {
        for (int64_t g = 0; g < group; g++) visit(i++, tile.first_token + token, h * group + g);
      }
    }
  }

  // One kv head's share of one tile of the cache, for its queries, which have places from `first` on.
  void attend(const Scratch& scratch, const Tile& tile, int64_t at, int64_t head, int64_t first,
              Wanted& next_keys, Wanted& next_values) const {
    const int64_t group = heads / kv_heads, count = tile.num_queries * group;
    const int64_t begin = std::max<int64_t>(0, tile.begin - at), end = std::min(kCacheTile, tile.end - at);
    const int64_t width = (end + kLanes - 1) / kLanes * kLanes;
    const int64_t* const slots = scratch.slots.data() + (at - tile.first_cache_tile());
    float* const scores = scratch.scores + first * kCacheTile;
    turn_keys(scratch, rows_of(keys, head_dim, head, slots), begin, end);
    add_all_weighted(count, {scratch.queries + first * head_dim, head_dim}, nullptr,
                     Rows{scratch.keys, kCacheTile}, 0, head_dim, width, scores, kCacheTile, next_keys);
    for (int64_t i = 0; i < count; i++) weigh(scratch, first + i, at, width, tile.first_position + i / group);
    add_all_weighted(count, {scores, kCacheTile}, scratch.factors + first,
                     rows_of(values, value_dim, head, slots), begin, end, value_dim,
                     scratch.sums + first * scratch.sums_stride, scratch.sums_stride, next_values);
  }

  // Lays the keys of tokens [begin, end) out by dimension: keys[d][token]. The vectors they are in are filled
  // up with others of these tokens.
  void turn_keys(const Scratch& scratch, const CachedRows& tile_keys, int64_t begin, int64_t end) const {
    for (int64_t token = begin / kLanes * kLanes; token < end; token += kLanes) {
      const float* from[kLanes];
      UNROLL for (int i = 0; i < kLanes; i++) from[i] = tile_keys[std::clamp(token + i, begin, end - 1)];
      const auto turn = [&](int64_t d, const auto& load_at) {
        Vector square[kLanes];
        UNROLL for (int i = 0; i < kLanes; i++) square[i] = load_at(from[i] + d);
        transpose(square);
        UNROLL for (int i = 0; i < kLanes; i++) store(scratch.keys + (d + i) * kCacheTile + token, square[i]);
      };
      int64_t d = 0;
      for (; d + kLanes <= head_dim; d += kLanes) turn(d, [](const float* key) { return load(key); });
      const int64_t left = head_dim - d;
      if (left > 0) turn(d, [left](const float* key) { return load_part(key, left); });
    }
  }

  // Turns a query's scores into weights relative to the largest score so far, 0 for tokens it must not see.
  void weigh(const Scratch& scratch, int64_t i, int64_t at, int64_t width, int64_t position) const {
    float* const scores = scratch.scores + i * kCacheTile;
    const int64_t first = window < 0 ? 0 : std::clamp<int64_t>(position - window - at, 0, width);
    const int64_t last = std::clamp<int64_t>(position + 1 - at, first, width);
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
