// The local steps of users whose weights are held as factors. `federated/low_rank.py` says what is computed, and is the
// reference. The two large products, of all users' examples with the first layer's weights, are not in here.
//
// All else of a user is a few dozen rows, so it is finished before the next one begins, in the core's nearest caches;
// for torch the same is a hundred operations on small arrays.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

typedef float V __attribute__((vector_size(64), aligned(4), may_alias));  // 16 numbers, from anywhere in memory
typedef float H __attribute__((vector_size(32)));                         // 8 numbers
typedef double W __attribute__((vector_size(64)));

constexpr long CHUNK = 112;  // numbers that float32 adds up before double precision takes over, as in low_rank.py
constexpr double EPS = 1.1920928955078125e-07;  // of float32

static const V& at(const float* p) { return *(const V*)p; }

static W wide(V v) {
  H half[2];
  std::memcpy(half, &v, sizeof v);
  return __builtin_convertvector(half[0], W) + __builtin_convertvector(half[1], W);
}

static double dot(const float* a, const float* b, long count) {
  W total = {};
  long i = 0;
  while (i + 16 <= count) {
    V part = {};
    for (long end = std::min(i + CHUNK, count - 15); i < end; i += 16) part += at(a + i) * at(b + i);
    total += wide(part);
  }
  double found = ((total[0] + total[1]) + (total[2] + total[3])) + ((total[4] + total[5]) + (total[6] + total[7]));
  for (; i < count; i++) found += (double)a[i] * b[i];
  return found;
}

static void add(float factor, const float* x, float* to, long count) {
  for (long i = 0; i < count; i++) to[i] += factor * x[i];
}

static float size_of(const float* p, long count) {
  V most = {};
  long i = 0;
  for (; i + 16 <= count; i += 16) {
    const V size = at(p + i) < 0 ? -at(p + i) : at(p + i);
    most = most < size ? size : most;
  }
  float found = 1.17549435e-38f;  // the least normal number
  for (int k = 0; k < 16; k++) found = std::max(found, most[k]);
  for (; i < count; i++) found = std::max(found, std::fabs(p[i]));
  return found;
}

struct Layer {
  long wide, out;
  bool relu;
  const float *weight, *bias;  // (out, wide); (out,) or nothing
  float *inputs, *gradients;   // A (rows, wide) and G (rows, out) of one user
  std::vector<double> gram;    // A A' (rows, rows)
  std::vector<float> errors;   // the gradient at the output, of a batch (most, out)

  void see(long row, long rows) {  // take in a row of A after those before it
    for (long t = 0; t <= row; t++)
      gram[row * rows + t] = gram[t * rows + row] = dot(inputs + row * wide, inputs + t * wide, wide);
  }
};

// Norms of weight and bias, never below those of what is added to a sum: `_norms` has the reasons.
static void norms_of(const Layer& layer, long rows, double* found) {
  const long out = layer.out;
  const float size = size_of(layer.gradients, rows * out);
  static thread_local std::vector<float> unit;
  static thread_local std::vector<double> length, reach;
  unit.resize(rows * out), length.resize(rows), reach.resize(rows);
  for (long i = 0; i < rows * out; i++) unit[i] = layer.gradients[i] / size;
  const double off = CHUNK * EPS;
  double squared = 0, lengths = 0, reaches = 0;
  for (long i = 0; i < rows; i++) {
    reach[i] = std::sqrt(layer.gram[i * rows + i]), length[i] = std::sqrt(dot(&unit[i * out], &unit[i * out], out));
    for (long t = 0; t <= i; t++) {
      const double p = dot(&unit[i * out], &unit[t * out], out), k = layer.gram[i * rows + t];
      const double r = reach[i] * reach[t], l = length[i] * length[t];
      squared += (t < i ? 2 : 1) * (p * k + off * (std::fabs(p) * r + std::fabs(k) * l + off * r * l));
    }
    lengths += length[i] * reach[i], reaches += length[i];
  }
  if (squared < 0) squared = 0;  // and not a maximum, which might lose a NaN
  found[0] = size * (std::sqrt(squared) + (rows + 4) * EPS * lengths);
  double of_bias = 0;
  for (long o = 0; o < out; o++) {
    double sum = 0;
    for (long i = 0; i < rows; i++) sum += layer.gradients[i * out + o];
    of_bias += sum * sum;
  }
  found[1] = std::sqrt(of_bias) + size * (rows + 4) * EPS * reaches;
}

extern "C" void low_rank_part(
    long users, long steps, long most,          // `most` rows in each step; users' arrays follow each other
    long depth, const long* widths,             // of the layers; of the first one's input and of all outputs
    const unsigned char* relu, const float* const* weights, const float* const* biases,
    const float* first,                         // (rows, out) what the central model's first layer makes of the inputs
    const long* labels, const float* shares,    // (rows,); a share is 1 / rows of the batch, and 0 for a filled place
    float rate, float scale,                    // of a step; what the factors are multiplied by in the end
    float* const* inputs, float* const* gradients,  // A and G of each layer; the first A is given
    double* norms, double* losses) {            // (users, depth, 2), (users,)
  const long rows = steps * most, classes = widths[depth];
  std::vector<Layer> layers(depth);
  for (long l = 0; l < depth; l++) {
    layers[l] = {widths[l], widths[l + 1], relu[l] != 0, weights[l], biases[l], nullptr, nullptr, {}, {}};
    layers[l].gram.resize(rows * rows), layers[l].errors.resize(most * widths[l + 1]);
  }
  std::vector<float> logits(most * classes);
  for (long u = 0; u < users; u++) {
    for (long l = 0; l < depth; l++) {
      layers[l].inputs = inputs[l] + u * rows * layers[l].wide;
      layers[l].gradients = gradients[l] + u * rows * layers[l].out;
      std::memset(layers[l].gradients, 0, sizeof(float) * rows * layers[l].out);
    }
    for (long row = 0; row < rows; row++) layers[0].see(row, rows);
    losses[u] = 0;
    for (long begin = 0; begin < rows; begin += most) {
      for (long l = 0; l < depth; l++) {
        Layer& layer = layers[l];
        for (long row = begin; row < begin + most; row++) {
          if (l) layer.see(row, rows);
          float* to = l + 1 < depth ? layers[l + 1].inputs + row * layer.out : &logits[(row - begin) * classes];
          if (!l) std::memcpy(to, first + (u * rows + row) * layer.out, sizeof(float) * layer.out);
          else
            for (long o = 0; o < layer.out; o++)
              to[o] = (float)dot(layer.inputs + row * layer.wide, layer.weight + o * layer.wide, layer.wide) +
                      (layer.bias ? layer.bias[o] : 0.0f);
          for (long t = 0; t < begin; t++)
            add(-((float)layer.gram[row * rows + t] + (layer.bias ? 1.0f : 0.0f)), layer.gradients + t * layer.out, to,
                layer.out);
          if (layer.relu)
            for (long o = 0; o < layer.out; o++) to[o] = to[o] < 0 ? 0 : to[o];  // NaN stays NaN
        }
      }
      for (long i = 0; i < most; i++) {
        const long row = u * rows + begin + i;
        const float *z = &logits[i * classes], share = shares[row];
        float* error = &layers[depth - 1].errors[i * classes];
        float top = z[0], sum = 0;
        for (long o = 1; o < classes; o++) top = top < z[o] ? z[o] : top;
        for (long o = 0; o < classes; o++) sum += error[o] = std::exp(z[o] - top);
        if (!begin) losses[u] -= (z[labels[row]] - top - std::log(sum)) * share;
        for (long o = 0; o < classes; o++) error[o] = (error[o] / sum - (o == labels[row])) * share;
      }
      for (long l = depth - 1; l > 0; l--) {
        Layer& layer = layers[l];
        for (long i = 0; i < most; i++) {
          const float* error = &layer.errors[i * layer.out];
          float* back = &layers[l - 1].errors[i * layer.wide];
          std::fill(back, back + layer.wide, 0.0f);
          for (long o = 0; o < layer.out; o++) add(error[o], layer.weight + o * layer.wide, back, layer.wide);
          for (long t = 0; t < begin; t++)
            add(-(float)dot(error, layer.gradients + t * layer.out, layer.out), layer.inputs + t * layer.wide, back,
                layer.wide);
          const float* below = layer.inputs + (begin + i) * layer.wide;
          if (layers[l - 1].relu)
            for (long k = 0; k < layer.wide; k++) back[k] *= below[k] > 0 ? 1.0f : 0.0f;
        }
      }
      for (Layer& layer : layers) add(rate, &layer.errors[0], layer.gradients + begin * layer.out, most * layer.out);
    }
    for (long l = 0; l < depth; l++) {
      if (scale != 1)
        for (long i = 0; i < rows * layers[l].out; i++) layers[l].gradients[i] *= scale;
      norms_of(layers[l], rows, norms + 2 * (u * depth + l));
    }
  }
}
