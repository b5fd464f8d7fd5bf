// One step of a linear CTC head on kept states, for many users. `speech/head_updates.py` says what is computed and
// `speech/ctc.py` why its sums can be relied on; both are the reference, and take whom this leaves.
//
// What bounds it is memory: a user's states come from far away, and are needed twice, for the logits and for the
// gradient. So a user is finished before the next one begins, with the states in the core's own cache the second time,
// and all else of the user nearer still.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

typedef float V __attribute__((vector_size(64), aligned(4), may_alias));   // 16 numbers, from anywhere in memory
typedef int I __attribute__((vector_size(64)));
typedef float H __attribute__((vector_size(32), aligned(4), may_alias));   // 8 numbers
typedef double W __attribute__((vector_size(64), aligned(8), may_alias));  // 8 numbers

static V& at(float* p) { return *(V*)p; }
static const V& at(const float* p) { return *(const V*)p; }
static W& at(double* p) { return *(W*)p; }
static W wide(const float* p) { return __builtin_convertvector(*(const H*)p, W); }

// By halves: one after the other, each addition would wait for the one before.
template <class T, class Of>
static auto reduce(T v, Of of) {
  constexpr int count = sizeof v / sizeof v[0];
  decltype(v[0] + v[0]) each[count];
  for (int i = 0; i < count; i++) each[i] = v[i];
  for (int half = count / 2; half; half /= 2)
    for (int i = 0; i < half; i++) each[i] = of(each[i], each[i + half]);
  return each[0];
}

template <class T>
static auto sum(T v) { return reduce(v, [](auto a, auto b) { return a + b; }); }

template <class T>
static auto largest(T v) { return reduce(v, [](auto a, auto b) { return a < b ? b : a; }); }

static float larger(float a, float b) { return a < b ? b : a; }  // of a and NaN: a

constexpr long LANES = 32;       // tokens at a time: two vectors
constexpr long ROWS = 12;        // frames at a time: with two vectors each, what a core's registers hold
constexpr float LOWEST = -80.0f;  // e^x below it is taken for e^LOWEST: shares of it are still normal numbers
constexpr double LEAST = 1e-300, SAFE = 1e-200;  // as in ctc.py
constexpr int RESCALED_EVERY = 8;

// e^x for x <= 0, to some 1e-7 (Cephes' polynomial); e^LOWEST for what is less. NaN stays NaN.
static V exponential(V x) {
  x = x < LOWEST ? V{} + LOWEST : x;
  V n = (x * 1.44269504088896341f + 12582912.0f) - 12582912.0f;  // to the nearest integer
  V r = x - n * 0.693359375f + n * 2.12194440e-4f;
  V p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + (r + 1.0f);
  return p * (V)((__builtin_convertvector(n, I) + 127) << 23);
}

// Logits of R frames for LANES tokens, whose weights lie as (width, LANES); the next frames are fetched meanwhile.
template <int R>
static void logits(const float* x, long width, const float* weights, float* out, long stride) {
  V a[R][2] = {};
  for (long k = 0; k < width; k += 16) {
    for (int r = 0; r < R; r++) __builtin_prefetch(x + (R + r) * width + k);
    for (long j = k; j < k + 16; j++) {
      const V w0 = at(weights + LANES * j), w1 = at(weights + LANES * j + 16);
      for (int r = 0; r < R; r++) {
        a[r][0] += w0 * x[r * width + j];
        a[r][1] += w1 * x[r * width + j];
      }
    }
  }
  for (int r = 0; r < R; r++) at(out + r * stride) = a[r][0], at(out + r * stride + 16) = a[r][1];
}

// Add d' x to M rows of a gradient, in N vectors of columns.
template <int M, int N>
static void outer(const float* d, long stride, const float* x, long frames, long width, float* into) {
  V a[M][N] = {};
  for (long t = 0; t < frames; t++)
    for (int n = 0; n < N; n++) {
      const V v = at(x + t * width + 16 * n);
      for (int m = 0; m < M; m++) a[m][n] += v * d[t * stride + m];
    }
  for (int m = 0; m < M; m++)
    for (int n = 0; n < N; n++) at(into + m * width + 16 * n) += a[m][n];
}

// The same for the last `rows` rows, fewer than 8.
template <int M>
static void rest(long rows, const float* d, long stride, const float* x, long frames, long width, float* into) {
  if (rows == M) outer<M, 3>(d, stride, x, frames, width, into);
  else if constexpr (M > 1) rest<M - 1>(rows, d, stride, x, frames, width, into);
}

static void outers(long tokens, const float* d, long stride, const float* x, long frames, long width, float* into) {
  long c = 0;
  for (; c + 48 <= width; c += 48) {
    long k = 0;
    for (; k + 8 <= tokens; k += 8) outer<8, 3>(d + k, stride, x + c, frames, width, into + k * width + c);
    rest<7>(tokens - k, d + k, stride, x + c, frames, width, into + k * width + c);
  }
  for (; c < width; c += 16)
    for (long k = 0; k < tokens; k++) outer<1, 1>(d + k, stride, x + c, frames, width, into + k * width + c);
}

// CTC of one utterance: logits become the gradient of `share` times its loss. False where it cannot be relied on.
struct Ctc {
  std::vector<double> y, came, back, skip, skip_back, ahead, behind;

  bool operator()(long frames, const long* labels, long count, long stride, float share, float* l, double& loss) {
    const long states = 2 * count + 1, wide = (states + 7) / 8 * 8;
    y.assign(frames * wide, 0.0), came.resize(frames * wide), back.resize(frames * wide);
    skip.assign(wide, 0.0), skip_back.assign(wide, 0.0);
    ahead.assign(wide + 2, 0.0), behind.assign(wide + 2, 0.0);  // two states more: before the first, after the last
    for (long s = 3; s < states; s += 2) skip[s] = skip_back[s - 2] = labels[s / 2] != labels[s / 2 - 1];
    double logs = 0, mass = 1;
    float gap = 0;  // of a label below the likeliest token
    for (long t = 0; t < frames; t++) {
      float* p = l + t * stride;
      V most = at(p), total = {};
      for (long k = 16; k < stride; k += 16) most = most < at(p + k) ? at(p + k) : most;
      const float top = largest(most);
      for (long j = 0; j <= count; j++) gap = larger(gap, top - p[j ? labels[j - 1] : 0]);
      for (long k = 0; k < stride; k += 16) total += at(p + k) = exponential(at(p + k) - top);
      float seen = p[0];
      for (long j = 0; j < count; j++) seen = larger(seen, p[labels[j]]);
      const double scale = 1.0 / seen, all = sum(total);
      double* own = &y[t * wide];
      for (long j = 0; j < count; j++) own[2 * j] = p[0] * scale, own[2 * j + 1] = p[labels[j]] * scale;
      own[2 * count] = p[0] * scale;
      mass *= seen / all;
      if (mass < 1e-200 || t + 1 == frames) logs += std::log(mass), mass = 1;
      const V inverse = V{} + (float)(1.0 / all);
      for (long k = 0; k < stride; k += 16) at(p + k) *= inverse;
    }
    double *a = &ahead[2], *b = &behind[0];
    a[0] = b[states - 1] = 1.0;
    for (long t = 0; t < frames; t++) {
      const long r = frames - 1 - t;
      double *c = &came[t * wide], *d = &back[r * wide], *ya = &y[t * wide], *yb = &y[r * wide];
      for (long s = 0; s < wide; s += 8) {
        at(c + s) = at(a + s) + at(a + s - 1) + at(&skip[s]) * at(a + s - 2);
        at(d + s) = at(b + s) + at(b + s + 1) + at(&skip_back[s]) * at(b + s + 2);
      }
      for (long s = 0; s < wide; s += 8) at(a + s) = at(c + s) * at(ya + s), at(b + s) = at(d + s) * at(yb + s);
      if (t % RESCALED_EVERY == RESCALED_EVERY - 1 && t + 1 < frames) {
        W most_a = W{}, most_b = W{};
        for (long s = 0; s < wide; s += 8) {
          at(a + s) = at(a + s) < LEAST ? W{} + LEAST : at(a + s);
          at(b + s) = at(b + s) < LEAST ? W{} + LEAST : at(b + s);
          most_a = most_a < at(a + s) ? at(a + s) : most_a, most_b = most_b < at(b + s) ? at(b + s) : most_b;
        }
        const double size_a = largest(most_a), size_b = largest(most_b);
        logs += std::log(size_a);
        for (long s = 0; s < wide; s += 8) at(a + s) *= 1 / size_a, at(b + s) *= 1 / size_b;
      }
    }
    bool safe = gap < -LOWEST;
    double whole = 0;
    for (long t = 0; t < frames; t++) {
      double *c = &came[t * wide], *d = &back[t * wide], *own = &y[t * wide];
      W total = {};
      for (long s = 0; s < wide; s += 8) total += at(c + s) *= at(d + s) * at(own + s);
      whole = sum(total);
      safe &= whole > SAFE;
      float* p = l + t * stride;
      p[0] -= (float)((total[0] + total[2] + total[4] + total[6]) / whole);  // all blanks are one token
      for (long j = 0; j < count; j++) p[labels[j]] -= (float)(c[2 * j + 1] / whole);
      for (long k = 0; k < stride; k += 16) at(p + k) *= share;
    }
    loss = -(logs + std::log(whole));
    return safe && std::isfinite(loss);
  }
};

static double square(const float* p, long count) {
  W total = {};
  long i = 0;
  for (; i + 8 <= count; i += 8) total += wide(p + i) * wide(p + i);
  double found = sum(total);
  for (; i < count; i++) found += (double)p[i] * p[i];
  return found;
}

// The arrays of all users follow each other: what belongs to a user's utterances, and then the next user's.
extern "C" void head_part(
    long users, const long* counts,         // utterances of each user
    const float* const* states,             // of each utterance (frames, width)
    const long* frames, const long* const* labels, const long* sizes,
    const float* const* scales,             // of each user (frames, 2): what to take off a state, and its scale
    const float* weight,                    // (tokens, width), rows without their mean
    const float* bias, float bias_share,    // (tokens,), and what it counts
    long width, long tokens,
    float* gradients,                       // (users, tokens * width + tokens)
    double* norms, double* losses,          // (users, 2), (users,)
    unsigned char* safe) {                  // (users,) 0 where somebody else has to look
  const long stride = (tokens + LANES - 1) / LANES * LANES;
  std::vector<float> packed(stride * width + 16), l;
  float* weights = &packed[0] + (16 - (size_t)&packed[0] / 4 % 16) % 16;  // from the beginning of a cache line on
  for (long o = 0; o < tokens; o++)
    for (long k = 0; k < width; k++) weights[(o / LANES * width + k) * LANES + o % LANES] = weight[o * width + k];
  std::vector<float> added(stride, -1e30f), sums(stride);  // places that only fill a vector have no share in anything
  for (long o = 0; o < tokens; o++) added[o] = bias_share * bias[o];
  Ctc ctc;
  long utterance = 0;
  for (long u = 0; u < users; u++) {
    float* g = gradients + u * (tokens * width + tokens);
    std::memset(g, 0, sizeof(float) * tokens * width);
    std::fill(sums.begin(), sums.end(), 0.0f);
    const float* scale = scales[u];
    losses[u] = 0, safe[u] = 1;
    for (long end = utterance + counts[u]; utterance < end; utterance++) {
      const float* x = states[utterance];
      const long T = frames[utterance];
      for (long j = 0; j < sizes[utterance]; j++)
        safe[u] &= labels[utterance][j] >= 0 && labels[utterance][j] < tokens;
      for (long t = 0; t < T; t++) safe[u] &= scale[2 * t] == 0;
      if (!T || !safe[u]) continue;
      l.resize(T * stride);
      for (long o = 0; o < stride; o += LANES) {
        const float* w = weights + o * width;
        long t = 0;
        for (; t + ROWS <= T; t += ROWS) logits<ROWS>(x + t * width, width, w, &l[t * stride + o], stride);
        for (; t + 4 <= T; t += 4) logits<4>(x + t * width, width, w, &l[t * stride + o], stride);
        for (; t < T; t++) logits<1>(x + t * width, width, w, &l[t * stride + o], stride);
      }
      for (long t = 0; t < T; t++)
        for (long k = 0; k < stride; k += 16)
          at(&l[t * stride + k]) = at(&l[t * stride + k]) * scale[2 * t + 1] + at(&added[k]);
      double loss;
      safe[u] &= ctc(T, labels[utterance], sizes[utterance], stride, 1.0f / counts[u], &l[0], loss);
      losses[u] += loss / counts[u];
      for (long t = 0; t < T; t++)
        for (long k = 0; k < stride; k += 16) {
          at(&sums[k]) += at(&l[t * stride + k]);
          at(&l[t * stride + k]) *= scale[2 * t + 1];
        }
      outers(tokens, &l[0], stride, x, T, width, g);
      scale += 2 * T;
    }
    double squares = 0;
    for (long o = 0; o < tokens; o++) {
      float* row = g + o * width;
      V total = {};
      for (long k = 0; k < width; k += 16) total += at(row + k);
      const float mean = sum(total) / width;
      for (long k = 0; k < width; k += 16) at(row + k) -= mean;
      squares += square(row, width);
      g[tokens * width + o] = bias_share * sums[o];
    }
    norms[2 * u] = std::sqrt(squares), norms[2 * u + 1] = std::sqrt(square(g + tokens * width, tokens));
  }
}
