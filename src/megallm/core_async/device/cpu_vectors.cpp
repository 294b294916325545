// Vectors of float as wide as the machine's registers, and the sums and exponentials built on them.
//
// Part of cpu_kernels.cpp. Plain GCC vector extensions: the same source is AVX-512, AVX2 and NEON.
// Every sum over lanes here is the same tree, whatever the tile it is part of, so that a result never
// depends on how work was cut. For the same reason the compiler may not fuse products and sums as it sees fit
// (-ffp-contract=off): `multiply_add` says where they are one step.

#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

#define UNROLL _Pragma("GCC unroll 32")

namespace {

constexpr int kLanes = VECTOR_BYTES / 4;

typedef float Vector __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t Lanes __attribute__((vector_size(VECTOR_BYTES)));
typedef float UnalignedVector __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));

inline Vector load(const float* from) { return *reinterpret_cast<const UnalignedVector*>(from); }
inline void store(float* to, Vector value) { *reinterpret_cast<UnalignedVector*>(to) = value; }
inline Vector spread(float value) { return value - Vector{}; }

// The first `count` floats, then zeros; nothing behind them is read.
inline Vector load_part(const float* from, int64_t count) {
  float lanes[kLanes] = {};
  std::memcpy(lanes, from, static_cast<size_t>(count) * sizeof(float));
  return load(lanes);
}

inline void store_part(float* to, Vector value, int64_t count) {
  float lanes[kLanes];
  store(lanes, value);
  std::memcpy(to, lanes, static_cast<size_t>(count) * sizeof(float));
}

// a * b + sum, rounded once. Written out, since GCC takes two steps for it in some loops and not in others
// on AMD (its avoid-fma-max-bits), and with both factors in registers: left alone it folds the load of a
// factor into every product that uses it, and a core loads one register a cycle.
inline Vector multiply_add(Vector a, Vector b, Vector sum) {
#if defined(__AVX512F__)
  __asm__("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
#elif defined(__FMA__)
  __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
#elif defined(__aarch64__)
  __asm__("fmla %0.4s, %1.4s, %2.4s" : "+w"(sum) : "w"(a), "w"(b));
#else
  sum += a * b;
#endif
  return sum;
}

// ---- lanes of several vectors --------------------------------------------------------------------

#if defined(__clang__) || __GNUC__ >= 12
#define PICK(first, second, ...) __builtin_shufflevector(first, second, __VA_ARGS__)
#else
#define PICK(first, second, ...) __builtin_shuffle(first, second, Lanes{__VA_ARGS__})
#endif

template <int Distance, int Odd, int... Lane>
inline Vector interleave(Vector first, Vector second, std::integer_sequence<int, Lane...>) {
  return PICK(first, second,
              (Lane / Distance % 2 * kLanes + Lane / (2 * Distance) * 2 * Distance + Lane % Distance +
               Odd * Distance)...);
}

// Of lanes in blocks of `Distance`, the even (Odd = 0) or odd blocks of both, taken in turn.
template <int Distance, int Odd>
inline Vector interleave(Vector first, Vector second) {
  return interleave<Distance, Odd>(first, second, std::make_integer_sequence<int, kLanes>{});
}

// Rows become columns: lane j of vector i goes to lane i of vector j.
template <int Distance = kLanes / 2>
inline void transpose(Vector* square) {
  if constexpr (Distance > 0) {
    UNROLL for (int i = 0; i < kLanes; i++) {
      if ((i & Distance) != 0) continue;
      const Vector first = square[i], second = square[i + Distance];
      square[i] = interleave<Distance, 0>(first, second);
      square[i + Distance] = interleave<Distance, 1>(first, second);
    }
    transpose<Distance / 2>(square);
  }
}

template <int Distance>
inline Vector fold(Vector first, Vector second) {
  return interleave<Distance, 0>(first, second) + interleave<Distance, 1>(first, second);
}

template <int Count, int Stride>
inline Vector fold_together(const Vector* sums) {
  if constexpr (Count == 1) {
    return sums[0];
  } else {
    return fold<kLanes / Count>(fold_together<Count / 2, Stride * 2>(sums),
                                fold_together<Count / 2, Stride * 2>(sums + Stride));
  }
}

template <int Distance>
inline Vector fold_rest(Vector sums) {
  if constexpr (Distance == 0) {
    return sums;
  } else {
    return fold_rest<Distance / 2>(fold<Distance>(sums, sums));
  }
}

// The sums over lanes of `Count` vectors, a power of two up to kLanes: sum i in lane i * (kLanes / Count).
template <int Count>
inline Vector lane_sums(const Vector* vectors) {
  return fold_rest<kLanes / Count / 2>(fold_together<Count, 1>(vectors));
}

inline float lane_sum(Vector vector) { return lane_sums<1>(&vector)[0]; }

inline Vector larger(Vector a, Vector b) { return a > b ? a : b; }

template <int Distance = kLanes / 2>
inline float largest_lane(Vector vector) {
  if constexpr (Distance == 0) {
    return vector[0];
  } else {
    return largest_lane<Distance / 2>(
        larger(interleave<Distance, 0>(vector, vector), interleave<Distance, 1>(vector, vector)));
  }
}

// ---- the exponential -----------------------------------------------------------------------------

// e^x to about one unit in the last place; exactly 0 below -87, infinite above 88. Method and coefficients:
// S. Moshier, Cephes, expf: x = n ln 2 + r, a polynomial in r, and n added to the exponent.
inline Vector exponential(Vector x) {
  const Vector clipped = x > 88.0f ? spread(88.0f) : (x < -87.0f ? spread(-87.0f) : x);
  const float round_to_integer = 12582912.0f;  // 1.5 * 2^23: adding it leaves the integer in the low bits
  const Vector shifted = multiply_add(clipped, spread(1.44269504088896341f), spread(round_to_integer));
  const Vector n = shifted - round_to_integer;
  const Vector r = multiply_add(n, spread(2.12194440e-4f), multiply_add(n, spread(-0.693359375f), clipped));
  Vector p = spread(1.9875691500e-4f);
  for (const float coefficient : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                                  5.0000001201e-1f}) {
    p = multiply_add(p, r, spread(coefficient));
  }
  p = multiply_add(p, r * r, r) + 1.0f;
  const Lanes exponent = (reinterpret_cast<Lanes>(shifted) + 127) << 23;
  const Vector result = p * reinterpret_cast<Vector>(exponent);
  return x < -87.0f ? Vector{} : x > 88.0f ? spread(std::numeric_limits<float>::infinity()) : result;
}

}  // namespace
