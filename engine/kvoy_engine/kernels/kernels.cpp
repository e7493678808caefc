// What lies between two linear layers, for the CPU: RMS norm, gated SiLU, rotary embedding, paged
// attention, and the search of the most likely token.
//
// No torch headers: plain C functions over pointers, so that the file compiles in seconds with any C++17
// compiler. Vectors are the compiler's own; only conversions and reductions have special instructions.
//
// Shapes: T tokens, R rows (sequences), H query heads, KV key heads, G = H / KV, D head size.
// Sums and softmax are float32 whatever the stored types are.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int W = 16;           // floats in a vector
constexpr int TILE_ROWS = 6;    // register tile of the products: TILE_ROWS x TILE_VECTORS accumulators
constexpr int TILE_VECTORS = 4;
#elif defined(__AVX2__)
constexpr int W = 8;
constexpr int TILE_ROWS = 6;
constexpr int TILE_VECTORS = 2;
#else
constexpr int W = 4;
constexpr int TILE_ROWS = 4;
constexpr int TILE_VECTORS = 4;
#endif

typedef float Vec __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(W * 4), aligned(4), may_alias));

typedef _Float16 half;
struct bfloat16 {
  uint16_t bits;
};

// ---- loads and stores -------------------------------------------------------------------------------

inline float to_float(float x) { return x; }
inline float to_float(half x) { return static_cast<float>(x); }
inline float to_float(bfloat16 x) {
  uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}

template <typename T>
inline T from_float(float x) {
  return static_cast<T>(x);
}
template <>
inline bfloat16 from_float<bfloat16>(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return {0x7fc0};  // rounding must not turn a NaN into an infinity
  return {static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline Vec load(const half* p) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__) && defined(__F16C__)
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  Vec v;
  for (int i = 0; i < W; ++i) v[i] = to_float(p[i]);
  return v;
#endif
}

inline Vec load(const bfloat16* p) {
#if defined(__AVX512F__)
  __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return (Vec)_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
#elif defined(__AVX2__)
  __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return (Vec)_mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
#else
  Vec v;
  for (int i = 0; i < W; ++i) v[i] = to_float(p[i]);
  return v;
#endif
}

inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

template <typename T>
inline void store(T* p, Vec v) {
  for (int i = 0; i < W; ++i) p[i] = from_float<T>(v[i]);
}

#if defined(__AVX512F__)
template <>
inline void store<half>(half* p, Vec v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph((__m512)v, 0));
}
#elif defined(__AVX2__) && defined(__F16C__)
template <>
inline void store<half>(half* p, Vec v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)v, 0));
}
#endif
#if defined(__AVX512BF16__)
template <>
inline void store<bfloat16>(bfloat16* p, Vec v) {
  __m256bh bits = _mm512_cvtneps_pbh((__m512)v);
  std::memcpy(p, &bits, sizeof bits);
}
#endif

// The first n < W elements, zeros behind them.
template <typename T>
inline Vec load_part(const T* p, int64_t n) {
  Vec v = {};
  for (int64_t i = 0; i < n; ++i) v[i] = to_float(p[i]);
  return v;
}
template <typename T>
inline void store_part(T* p, Vec v, int64_t n) {
  for (int64_t i = 0; i < n; ++i) p[i] = from_float<T>(v[i]);
}

inline float sum(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#elif defined(__AVX2__)
  __m128 a = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  a = _mm_add_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
#else
  float s = 0;
  for (int i = 0; i < W; ++i) s += v[i];
  return s;
#endif
}

// The sums of W vectors, as the elements of one.
inline Vec sums(const Vec* v) {
#if defined(__AVX512F__)
  __m512 x[4];
  for (int i = 0; i < 4; ++i) {
    const __m512 a = (__m512)v[4 * i], b = (__m512)v[4 * i + 1];
    const __m512 c = (__m512)v[4 * i + 2], d = (__m512)v[4 * i + 3];
    const __m512d ab = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
    const __m512d cd = _mm512_castps_pd(_mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
    x[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)),
                         _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
  }
  const __m512 low = _mm512_add_ps(_mm512_shuffle_f32x4(x[0], x[1], 0x88), _mm512_shuffle_f32x4(x[0], x[1], 0xdd));
  const __m512 high = _mm512_add_ps(_mm512_shuffle_f32x4(x[2], x[3], 0x88), _mm512_shuffle_f32x4(x[2], x[3], 0xdd));
  return (Vec)_mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
#elif defined(__AVX2__)
  __m256 x[2];
  for (int i = 0; i < 2; ++i)
    x[i] = _mm256_hadd_ps(_mm256_hadd_ps((__m256)v[4 * i], (__m256)v[4 * i + 1]),
                          _mm256_hadd_ps((__m256)v[4 * i + 2], (__m256)v[4 * i + 3]));
  return (Vec)_mm256_add_ps(_mm256_permute2f128_ps(x[0], x[1], 0x20), _mm256_permute2f128_ps(x[0], x[1], 0x31));
#else
  Vec s;
  for (int i = 0; i < W; ++i) s[i] = sum(v[i]);
  return s;
#endif
}

inline void prefetch(const void* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(p) + i, 0, 2);
}

inline float maximum(Vec v) {
  float m = v[0];
  for (int i = 1; i < W; ++i) m = v[i] > m ? v[i] : m;
  return m;
}

inline Vec splat(float x) { return Vec{} + x; }

// e^x to about 2 ulp; 0 below the range of normal numbers, NaN for NaN.
inline Vec exponential(Vec x) {
  constexpr float LOWEST = -87.33f, HIGHEST = 88.37f;
  Vec lowest = splat(LOWEST), highest = splat(HIGHEST);
  Vec y = x < lowest ? lowest : x;
  y = y > highest ? highest : y;
  const float ROUND = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  Vec n = (y * 1.44269504088896341f + ROUND) - ROUND;
  Vec f = y - n * 0.693359375f;
  f = f - n * -2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  p = p * f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  p = p * f * f + f + 1.0f;
  IntVec power = (__builtin_convertvector(n, IntVec) + 127) << 23;
  Vec scale;
  std::memcpy(&scale, &power, sizeof scale);
  return x < lowest ? Vec{} : p * scale;
}

// ---- norm and activation ----------------------------------------------------------------------------

// residual += delta; out = residual / rms(residual) * weight
template <typename A>
void add_rms_norm_row(float* residual, const A* delta, const float* weight, A* out, int64_t n, float eps) {
  const int64_t whole = n / W * W, rest = n - whole;
  Vec squares = {};
  for (int64_t i = 0; i < whole; i += W) {
    Vec x = load(residual + i);
    if (delta) {
      x += load(delta + i);
      store(residual + i, x);
    }
    squares += x * x;
  }
  Vec tail = load_part(residual + whole, rest);
  if (rest && delta) {
    tail += load_part(delta + whole, rest);
    store_part(residual + whole, tail, rest);
  }
  squares += tail * tail;
  const float scale = 1.0f / std::sqrt(sum(squares) / static_cast<float>(n) + eps);
  for (int64_t i = 0; i < whole; i += W) store(out + i, load(residual + i) * scale * load(weight + i));
  store_part(out + whole, tail * scale * load_part(weight + whole, rest), rest);
}

inline Vec silu_times(Vec gate, Vec up) { return gate / (1.0f + exponential(-gate)) * up; }

template <typename A>
void silu_mul_row(const A* gate, const A* up, A* out, int64_t n) {
  const int64_t whole = n / W * W, rest = n - whole;
  for (int64_t i = 0; i < whole; i += W) store(out + i, silu_times(load(gate + i), load(up + i)));
  if (rest) {
    Vec y = silu_times(load_part(gate + whole, rest), load_part(up + whole, rest));
    store_part(out + whole, y, rest);
  }
}

// ---- products of small matrices ---------------------------------------------------------------------

// C[M x N] (+)= A[M x K] * B[K x N] for one register tile. A is read element by element with any strides;
// rows of B and C are vectors.
template <int M, int V, bool ACCUMULATE, typename B>
inline void tile(const float* a, int64_t a_row, int64_t a_col, const B* b, int64_t b_row, float* c,
                 int64_t c_row, int64_t k) {
  Vec acc[M][V];
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < V; ++v) acc[m][v] = ACCUMULATE ? load(c + m * c_row + v * W) : Vec{};
  for (int64_t i = 0; i < k; ++i) {
    Vec bv[V];
    for (int v = 0; v < V; ++v) bv[v] = load(b + i * b_row + v * W);
    for (int m = 0; m < M; ++m) {
      const float x = a[m * a_row + i * a_col];
      for (int v = 0; v < V; ++v) acc[m][v] += x * bv[v];
    }
  }
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < V; ++v) store(c + m * c_row + v * W, acc[m][v]);
}

template <int V, bool ACCUMULATE, typename B>
inline void tile_column(const float* a, int64_t a_row, int64_t a_col, const B* b, int64_t b_row, float* c,
                        int64_t c_row, int64_t m, int64_t k) {
  int64_t i = 0;
  for (; i + TILE_ROWS <= m; i += TILE_ROWS)
    tile<TILE_ROWS, V, ACCUMULATE>(a + i * a_row, a_row, a_col, b, b_row, c + i * c_row, c_row, k);
  if (i + 4 <= m) {
    tile<4, V, ACCUMULATE>(a + i * a_row, a_row, a_col, b, b_row, c + i * c_row, c_row, k);
    i += 4;
  }
  if (i + 2 <= m) {
    tile<2, V, ACCUMULATE>(a + i * a_row, a_row, a_col, b, b_row, c + i * c_row, c_row, k);
    i += 2;
  }
  for (; i < m; ++i)
    tile<1, V, ACCUMULATE>(a + i * a_row, a_row, a_col, b, b_row, c + i * c_row, c_row, k);
}

// n is a multiple of W.
template <bool ACCUMULATE, typename B>
void multiply(const float* a, int64_t a_row, int64_t a_col, const B* b, int64_t b_row, float* c,
              int64_t c_row, int64_t m, int64_t n, int64_t k) {
  int64_t j = 0;
  for (; j + TILE_VECTORS * W <= n; j += TILE_VECTORS * W)
    tile_column<TILE_VECTORS, ACCUMULATE>(a, a_row, a_col, b + j, b_row, c + j, c_row, m, k);
  for (; j < n; j += W) tile_column<1, ACCUMULATE>(a, a_row, a_col, b + j, b_row, c + j, c_row, m, k);
}

// ---- linear layers ----------------------------------------------------------------------------------

// Weights are float16 in panels of PANEL outputs: (panels, K, PANEL), so that one panel is one stream and
// outputs lie in the lanes of a vector. Every row's sums run over K in the same order whatever the number
// of rows: a row's result does not depend on what else is in the batch.
constexpr int64_t PANEL = 64;
constexpr int64_t ROW_BLOCK = 96;    // rows of one piece of work
constexpr int64_t DEPTH_BLOCK = 512; // K of a panel that is widened to float32 at once
constexpr int64_t MIN_WIDENED_ROWS = 13;  // fewer rows do not earn back a pass that only widens

void linear_piece(const float* x, const half* panel, const float* bias, float* out, int64_t rows, int64_t k,
                  int64_t n, int64_t width, std::vector<float>& scratch) {
  scratch.resize(DEPTH_BLOCK * PANEL + ROW_BLOCK * PANEL);
  float* widened = scratch.data();
  float* c = widened + DEPTH_BLOCK * PANEL;
  std::memset(c, 0, rows * PANEL * sizeof(float));
  if (rows < MIN_WIDENED_ROWS) {
    multiply<true>(x, k, 1, panel, PANEL, c, PANEL, rows, PANEL, k);
  } else {
    for (int64_t begin = 0; begin < k; begin += DEPTH_BLOCK) {
      const int64_t depth = std::min(DEPTH_BLOCK, k - begin);
      for (int64_t i = 0; i < depth * PANEL; i += W) store(widened + i, load(panel + begin * PANEL + i));
      multiply<true>(x + begin, k, 1, widened, PANEL, c, PANEL, rows, PANEL, depth);
    }
  }
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < width; ++i) out[r * n + i] = c[r * PANEL + i] + (bias ? bias[i] : 0.0f);
}

}  // namespace

// ---- attention --------------------------------------------------------------------------------------

extern "C" {

// What all layers of a model share. Field order and types are mirrored by `native_ops.py`.
struct KvoyModel {
  int64_t num_heads, num_kv_heads, head_dim, block_size;
  int64_t block_stride;      // elements from a block to the next
  int64_t activation_type;   // 0 float32, 2 bfloat16
  int64_t kv_type;           // 0 float32, 1 float16, 2 bfloat16
  void* kv;
  const float* cos;          // (positions, D / 2)
  const float* sin;
  float scale, eps;
};

struct KvoyLayer {
  int64_t key_offset, value_offset;  // elements from a block's begin
  int64_t window;                    // 0: none
  const float* q_norm;               // (D,) or null
  const float* k_norm;
};

struct KvoyStep {
  int64_t num_tokens, num_rows, num_threads;
  const int32_t* positions;      // (T,)
  const int32_t* starts;         // (R,)
  const int32_t* query_offsets;  // (R + 1,)
  const int32_t* table;
  const int32_t* table_offsets;  // (R + 1,)
};

}  // extern "C"

namespace {

constexpr int64_t KEY_TILE = 64;
constexpr int64_t QUERY_TILE = 96;  // rows (token x head of one group) that share a pass over the keys
constexpr float UNSEEN = -1e30f;    // a maximum before any key; finite, so that differences are not NaN

// Optional norm, rotation, and the wanted factor; x is (D,), out is (D,) float32.
template <typename A>
void rotate(const KvoyModel& model, const A* x, int64_t position, const float* norm, float factor, float* out) {
  const int64_t d = model.head_dim, half_d = d / 2;
  for (int64_t i = 0; i < d; ++i) out[i] = to_float(x[i]);
  if (norm) {
    float squares = 0;
    for (int64_t i = 0; i < d; ++i) squares += out[i] * out[i];
    const float scale = 1.0f / std::sqrt(squares / static_cast<float>(d) + model.eps);
    for (int64_t i = 0; i < d; ++i) out[i] *= scale * norm[i];
  }
  const float* cos = model.cos + position * half_d;
  const float* sin = model.sin + position * half_d;
  for (int64_t i = 0; i < half_d; ++i) {
    const float a = out[i], b = out[i + half_d];
    out[i] = (a * cos[i] - b * sin[i]) * factor;
    out[i + half_d] = (b * cos[i] + a * sin[i]) * factor;
  }
}

template <typename A, typename C>
struct Attention {
  const KvoyModel& model;
  const KvoyLayer& layer;
  const KvoyStep& step;
  const A* qkv;
  A* out;

  int64_t group() const { return model.num_heads / model.num_kv_heads; }
  int64_t padded() const { return (model.head_dim + W - 1) / W * W; }
  int64_t token_stride() const { return (model.num_heads + 2 * model.num_kv_heads) * model.head_dim; }

  C* block(int64_t id, int64_t offset, int64_t head) const {
    return static_cast<C*>(model.kv) + id * model.block_stride + offset +
           head * model.block_size * model.head_dim;
  }

  // Writes one token's key and value of one head.
  void write(int64_t row, int64_t token, int64_t head, float* scratch) const {
    const int64_t d = model.head_dim, position = step.positions[token];
    const int64_t id = step.table[step.table_offsets[row] + position / model.block_size];
    const int64_t slot = position % model.block_size * d;
    const A* k = qkv + token * token_stride() + (model.num_heads + head) * d;
    const A* v = k + model.num_kv_heads * d;
    rotate(model, k, position, layer.k_norm, 1.0f, scratch);
    C* keys = block(id, layer.key_offset, head) + slot;
    C* values = block(id, layer.value_offset, head) + slot;
    for (int64_t i = 0; i < d; ++i) keys[i] = from_float<C>(scratch[i]);
    for (int64_t i = 0; i < d; ++i) values[i] = from_float<C>(to_float(v[i]));
  }

  int64_t first_visible(int64_t position) const {
    return layer.window ? std::max<int64_t>(0, position + 1 - layer.window) : 0;
  }

  // Dot products of N queries (rows of q, stride `padded`) with n keys; out rows have stride `stride`.
  // Writes whole vectors: up to W - 1 scores behind the n-th are overwritten.
  template <int N>
  void score(const float* q, const C* keys, int64_t n, float* scores, int64_t stride) const {
    const int64_t d = model.head_dim, whole = d / W * W, rest = d - whole;
    for (int64_t first = 0; first < n; first += W) {
      const int64_t count = std::min<int64_t>(W, n - first);
      Vec products[N][W] = {};
      for (int64_t j = 0; j < count; ++j, keys += d) {
        Vec acc[N] = {};
        for (int64_t i = 0; i < whole; i += W) {
          const Vec k = load(keys + i);
          for (int g = 0; g < N; ++g) acc[g] += k * load(q + g * padded() + i);
        }
        if (rest) {
          const Vec k = load_part(keys + whole, rest);
          for (int g = 0; g < N; ++g) acc[g] += k * load(q + g * padded() + whole);
        }
        for (int g = 0; g < N; ++g) products[g][j] = acc[g];
      }
      for (int g = 0; g < N; ++g) store(scores + g * stride + first, sums(products[g]));
    }
  }

  // acc[g] += weights[g] . values for N queries.
  template <int N>
  void accumulate(const float* weights, int64_t stride, const C* values, int64_t n, float* acc) const {
    const int64_t d = model.head_dim, whole = d / W * W, rest = d - whole;
    constexpr int V = W == 8 ? 2 : 4;
    int64_t i = 0;
    for (; i + V * W <= whole; i += V * W) accumulate_part<N, V>(weights, stride, values + i, n, acc + i);
    for (; i < whole; i += W) accumulate_part<N, 1>(weights, stride, values + i, n, acc + i);
    if (rest)
      for (int64_t j = 0; j < n; ++j) {
        const Vec v = load_part(values + j * d + whole, rest);
        for (int g = 0; g < N; ++g) {
          float* a = acc + g * padded() + whole;
          store(a, load(a) + weights[g * stride + j] * v);
        }
      }
  }

  template <int N, int V>
  void accumulate_part(const float* weights, int64_t stride, const C* values, int64_t n, float* acc) const {
    Vec sums[N][V];
    for (int g = 0; g < N; ++g)
      for (int v = 0; v < V; ++v) sums[g][v] = load(acc + g * padded() + v * W);
    for (int64_t j = 0; j < n; ++j) {
      Vec x[V];
      for (int v = 0; v < V; ++v) x[v] = load(values + j * model.head_dim + v * W);
      for (int g = 0; g < N; ++g)
        for (int v = 0; v < V; ++v) sums[g][v] += weights[g * stride + j] * x[v];
    }
    for (int g = 0; g < N; ++g)
      for (int v = 0; v < V; ++v) store(acc + g * padded() + v * W, sums[g][v]);
  }

  // Calls f.template operator()<N>(g) for pieces of the group that fit registers.
  template <typename F>
  void for_pieces(F f) const {
    int64_t g = 0;
    for (; g + 4 <= group(); g += 4) f(std::integral_constant<int, 4>{}, g);
    switch (group() - g) {
      case 3: f(std::integral_constant<int, 3>{}, g); break;
      case 2: f(std::integral_constant<int, 2>{}, g); break;
      case 1: f(std::integral_constant<int, 1>{}, g); break;
      default: break;
    }
  }

  // One token of one row, all query heads of one key head.
  void decode(int64_t row, int64_t head, std::vector<float>& scratch) const {
    const int64_t d = model.head_dim, token = step.query_offsets[row], position = step.starts[row];
    const int64_t first = first_visible(position), stride = (position + 1 - first + W - 1) / W * W + W;
    scratch.assign(group() * (2 * padded() + stride), 0.0f);
    float* q = scratch.data();
    float* acc = q + group() * padded();
    float* scores = acc + group() * padded();
    for (int64_t g = 0; g < group(); ++g)
      rotate(model, qkv + token * token_stride() + (head * group() + g) * d, position, layer.q_norm,
             model.scale, q + g * padded());

    const int64_t head_bytes = model.block_size * d * static_cast<int64_t>(sizeof(C));
    for_blocks(row, first, position + 1, [&](int64_t id, int64_t slot, int64_t n, int64_t j, int64_t next) {
      const C* keys = block(id, layer.key_offset, head) + slot * d;
      prefetch(block(next, layer.key_offset, head), head_bytes);
      for_pieces([&](auto size, int64_t g) {
        score<decltype(size)::value>(q + g * padded(), keys, n, scores + g * stride + j, stride);
      });
    });

    const int64_t count = position + 1 - first;
    for (int64_t g = 0; g < group(); ++g) softmax(scores + g * stride, count, stride);

    for_blocks(row, first, position + 1, [&](int64_t id, int64_t slot, int64_t n, int64_t j, int64_t next) {
      const C* values = block(id, layer.value_offset, head) + slot * d;
      prefetch(block(next, layer.value_offset, head), head_bytes);
      for_pieces([&](auto size, int64_t g) {
        accumulate<decltype(size)::value>(scores + g * stride + j, stride, values, n, acc + g * padded());
      });
    });
    A* y = out + (token * model.num_heads + head * group()) * d;
    for (int64_t g = 0; g < group(); ++g)
      for (int64_t i = 0; i < d; ++i) y[g * d + i] = from_float<A>(acc[g * padded() + i]);
  }

  // In place over `count` scores; what is behind them, up to the stride, becomes zero.
  static void softmax(float* x, int64_t count, int64_t stride) {
    for (int64_t i = count; i < stride; ++i) x[i] = -INFINITY;
    Vec highest = splat(UNSEEN);
    for (int64_t i = 0; i < stride; i += W) {
      const Vec v = load(x + i);
      highest = v > highest ? v : highest;
    }
    const float m = maximum(highest);
    Vec total = {};
    for (int64_t i = 0; i < stride; i += W) {
      const Vec v = exponential(load(x + i) - m);
      store(x + i, v);
      total += v;
    }
    const float scale = 1.0f / sum(total);
    for (int64_t i = 0; i < stride; i += W) store(x + i, load(x + i) * scale);
  }

  // f(block id, first slot, number of slots, index from `first`, next block id) over [first, last).
  template <typename F>
  void for_blocks(int64_t row, int64_t first, int64_t last, F f) const {
    const int32_t* table = step.table + step.table_offsets[row];
    for (int64_t p = first; p < last;) {
      const int64_t slot = p % model.block_size, n = std::min(model.block_size - slot, last - p);
      const int64_t id = table[p / model.block_size];
      const int64_t next = p + n < last ? table[(p + n) / model.block_size] : id;
      f(id, slot, n, p - first, next);
      p += n;
    }
  }

  // Tokens [begin, end) of one row's chunk, all query heads of one key head: an online softmax over tiles of
  // keys. Scores are kept transposed, (keys, queries), so that every step is a vector operation over queries
  // and no key is ever transposed.
  void prefill(int64_t row, int64_t head, int64_t begin, int64_t end, std::vector<float>& scratch) const {
    const int64_t d = model.head_dim, dp = padded(), g = group();
    const int64_t count = (end - begin) * g, rows = (count + W - 1) / W * W;
    scratch.assign(rows * d + rows * dp + KEY_TILE * (2 * dp + rows) + 4 * rows + dp, 0.0f);
    float* q = scratch.data();             // (D, rows)
    float* acc = q + rows * d;             // (rows, dp)
    float* keys = acc + rows * dp;         // (KEY_TILE, dp)
    float* values = keys + KEY_TILE * dp;  // (KEY_TILE, dp)
    float* s = values + KEY_TILE * dp;     // (KEY_TILE, rows)
    float* highest = s + KEY_TILE * rows;  // (rows,), and so the next three
    float* total = highest + rows;
    float* shrink = total + rows;
    float* position = shrink + rows;
    float* x = position + rows;  // (dp,)

    const int64_t token0 = step.query_offsets[row];
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t token = token0 + begin + std::min(r, count - 1) / g;
      position[r] = static_cast<float>(step.positions[token]);
      highest[r] = UNSEEN;
      if (r >= count) continue;
      rotate(model, qkv + token * token_stride() + (head * g + r % g) * d, step.positions[token],
             layer.q_norm, model.scale, x);
      for (int64_t i = 0; i < d; ++i) q[i * rows + r] = x[i];
    }

    const int64_t lowest_query = step.starts[row] + begin, last = step.starts[row] + end;
    for (int64_t key = first_visible(lowest_query); key < last; key += KEY_TILE) {
      const int64_t n = std::min(KEY_TILE, last - key);
      for_blocks(row, key, key + n, [&](int64_t id, int64_t slot, int64_t m, int64_t j, int64_t) {
        gather(block(id, layer.key_offset, head) + slot * d, m, keys + j * dp);
        gather(block(id, layer.value_offset, head) + slot * d, m, values + j * dp);
      });
      multiply<false>(keys, dp, 1, q, rows, s, rows, n, rows, d);
      const bool is_partly_hidden =
          key + n - 1 > lowest_query || (layer.window && key <= last - 1 - layer.window);
      if (is_partly_hidden) hide(s, position, key, n, rows);
      update_softmax(s, highest, total, shrink, n, rows);
      for (int64_t r = 0; r < count; ++r)
        if (shrink[r] != 1.0f)
          for (int64_t i = 0; i < dp; i += W) store(acc + r * dp + i, load(acc + r * dp + i) * shrink[r]);
      multiply<true>(s, 1, rows, values, dp, acc, dp, count, dp, n);
    }
    for (int64_t r = 0; r < count; ++r) {
      A* y = out + ((token0 + begin + r / g) * model.num_heads + head * g + r % g) * d;
      const float scale = 1.0f / total[r];
      for (int64_t i = 0; i < d; ++i) y[i] = from_float<A>(acc[r * dp + i] * scale);
    }
  }

  void gather(const C* from, int64_t n, float* to) const {
    const int64_t d = model.head_dim, dp = padded(), whole = d / W * W;
    for (int64_t j = 0; j < n; ++j, from += d, to += dp) {
      for (int64_t i = 0; i < whole; i += W) store(to + i, load(from + i));
      for (int64_t i = whole; i < d; ++i) to[i] = to_float(from[i]);
    }
  }

  // What a query must not see gets no weight: later keys, and keys before its window.
  void hide(float* s, const float* position, int64_t key, int64_t n, int64_t rows) const {
    const Vec hidden = splat(-INFINITY);
    for (int64_t j = 0; j < n; ++j) {
      const Vec at = splat(static_cast<float>(key + j));
      for (int64_t r = 0; r < rows; r += W) {
        const Vec p = load(position + r);
        Vec v = load(s + j * rows + r);
        v = at > p ? hidden : v;
        if (layer.window) v = at <= p - static_cast<float>(layer.window) ? hidden : v;
        store(s + j * rows + r, v);
      }
    }
  }

  static void update_softmax(float* s, float* highest, float* total, float* shrink, int64_t n, int64_t rows) {
    for (int64_t r = 0; r < rows; r += W) {
      const Vec before = load(highest + r);
      Vec m = before;
      for (int64_t j = 0; j < n; ++j) {
        const Vec v = load(s + j * rows + r);
        m = v > m ? v : m;
      }
      Vec added = {};
      for (int64_t j = 0; j < n; ++j) {
        const Vec v = exponential(load(s + j * rows + r) - m);
        store(s + j * rows + r, v);
        added += v;
      }
      const Vec factor = exponential(before - m);
      store(highest + r, m);
      store(shrink + r, factor);
      store(total + r, load(total + r) * factor + added);
    }
  }

  struct Item {
    int32_t row, head, begin, end;
  };

  // Work of about equal size, the longest first, so that threads end together.
  std::vector<Item> items() const {
    std::vector<Item> all;
    const int32_t tokens = static_cast<int32_t>(std::max<int64_t>(1, QUERY_TILE / group()));
    for (int32_t row = 0; row < step.num_rows; ++row) {
      const int32_t n = step.query_offsets[row + 1] - step.query_offsets[row];
      for (int32_t end = n; end > 0; end -= tokens)
        for (int32_t head = 0; head < model.num_kv_heads; ++head)
          all.push_back({row, head, std::max(0, end - tokens), end});
    }
    return all;
  }

  void run() const {
    const std::vector<Item> work = items();
    const int64_t num_items = static_cast<int64_t>(work.size());
    // Two threads cost more than they save on a few thousand multiplications.
    const int64_t keys = step.num_rows == 1 && step.num_tokens == 1 ? step.starts[0] : 1 << 20;
    const int threads = keys < 48 ? 1 : static_cast<int>(step.num_threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
      std::vector<float> scratch(padded());
#pragma omp for schedule(static)
      for (int64_t row = 0; row < step.num_rows; ++row)
        if (step.query_offsets[row + 1] - step.query_offsets[row] == 1)
          for (int64_t head = 0; head < model.num_kv_heads; ++head)
            write(row, step.query_offsets[row], head, scratch.data());
      for (int64_t row = 0; row < step.num_rows; ++row) {
        const int64_t begin = step.query_offsets[row], end = step.query_offsets[row + 1];
        if (end - begin == 1) continue;
#pragma omp for schedule(static) nowait
        for (int64_t token = begin; token < end; ++token)
          for (int64_t head = 0; head < model.num_kv_heads; ++head) write(row, token, head, scratch.data());
      }
#pragma omp barrier
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < num_items; ++i) {
        const Item& item = work[i];
        if (step.query_offsets[item.row + 1] - step.query_offsets[item.row] == 1)
          decode(item.row, item.head, scratch);
        else
          prefill(item.row, item.head, item.begin, item.end, scratch);
      }
    }
  }
};

template <typename A>
void attend(const KvoyModel& model, const KvoyLayer& layer, const KvoyStep& step, const void* qkv, void* out) {
  const A* x = static_cast<const A*>(qkv);
  A* y = static_cast<A*>(out);
  if (model.kv_type == 0)
    Attention<A, float>{model, layer, step, x, y}.run();
  else if (model.kv_type == 1)
    Attention<A, half>{model, layer, step, x, y}.run();
  else
    Attention<A, bfloat16>{model, layer, step, x, y}.run();
}

// Fewer elements than this are done by one thread: starting others takes longer.
constexpr int64_t MIN_PARALLEL = 1 << 15;

}  // namespace

extern "C" {

void kvoy_add_rms_norm(float* residual, const void* delta, const float* weight, void* out, int64_t rows,
                       int64_t width, float eps, int64_t activation_type, int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (rows * width >= MIN_PARALLEL)
  for (int64_t row = 0; row < rows; ++row) {
    float* r = residual + row * width;
    if (activation_type == 0) {
      const float* d = static_cast<const float*>(delta);
      add_rms_norm_row(r, d ? d + row * width : d, weight, static_cast<float*>(out) + row * width, width, eps);
    } else {
      const bfloat16* d = static_cast<const bfloat16*>(delta);
      add_rms_norm_row(r, d ? d + row * width : d, weight, static_cast<bfloat16*>(out) + row * width, width,
                       eps);
    }
  }
}

// gate_up is (rows, 2 * width), out is (rows, width).
void kvoy_silu_mul(const void* gate_up, void* out, int64_t rows, int64_t width, int64_t activation_type,
                   int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (rows * width >= MIN_PARALLEL)
  for (int64_t row = 0; row < rows; ++row) {
    if (activation_type == 0) {
      const float* x = static_cast<const float*>(gate_up) + row * 2 * width;
      silu_mul_row(x, x + width, static_cast<float*>(out) + row * width, width);
    } else {
      const bfloat16* x = static_cast<const bfloat16*>(gate_up) + row * 2 * width;
      silu_mul_row(x, x + width, static_cast<bfloat16*>(out) + row * width, width);
    }
  }
}

// qkv is (T, (H + 2 KV) D), out is (T, H D).
void kvoy_attention(const KvoyModel* model, const KvoyLayer* layer, const KvoyStep* step, const void* qkv,
                    void* out) {
  if (model->activation_type == 0)
    attend<float>(*model, *layer, *step, qkv, out);
  else
    attend<bfloat16>(*model, *layer, *step, qkv, out);
}

// The first of the highest of each row's logits, and whether all of the row is finite.
void kvoy_greedy(const float* logits, int64_t rows, int64_t width, int64_t* ids, uint8_t* is_finite,
                 int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (rows * width >= 8 * MIN_PARALLEL)
  for (int64_t row = 0; row < rows; ++row) {
    const float* x = logits + row * width;
    const int64_t whole = width / W * W;
    Vec highest = splat(-INFINITY), zero = {};
    for (int64_t i = 0; i < whole; i += W) {
      const Vec v = load(x + i);
      highest = v > highest ? v : highest;
      zero += v * 0.0f;  // stays zero unless something is not finite
    }
    float best = maximum(highest), rest = 0;
    for (int64_t i = whole; i < width; ++i) {
      best = x[i] > best ? x[i] : best;
      rest += x[i] * 0.0f;
    }
    is_finite[row] = sum(zero) + rest == 0.0f;
    ids[row] = 0;
    for (int64_t i = 0; i < width; ++i)
      if (x[i] == best) {
        ids[row] = i;
        break;
      }
  }
}

// out (rows, n) = x (rows, k) * weights + bias; weights as `linear_piece` wants them, bias may be null.
void kvoy_linear_fp16(const float* x, const void* weights, const float* bias, float* out, int64_t rows,
                      int64_t k, int64_t n, int64_t num_threads) {
  const half* panels = static_cast<const half*>(weights);
  const int64_t num_panels = (n + PANEL - 1) / PANEL, num_blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
  // Blocks of about equal size: a last one of few rows would cost nearly as much as a full one.
  const int64_t block = (rows + num_blocks - 1) / num_blocks;
#pragma omp parallel num_threads(num_threads) if (rows * k * n >= 8 * MIN_PARALLEL)
  {
    std::vector<float> scratch;
#pragma omp for schedule(static)
    for (int64_t piece = 0; piece < num_panels * num_blocks; ++piece) {
      const int64_t panel = piece / num_blocks, row = piece % num_blocks * block, column = panel * PANEL;
      if (row >= rows) continue;
      linear_piece(x + row * k, panels + panel * k * PANEL, bias ? bias + column : nullptr,
                   out + row * n + column, std::min(block, rows - row), k, n, std::min(PANEL, n - column),
                   scratch);
    }
  }
}

}  // extern "C"
