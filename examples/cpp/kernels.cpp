// Calls the library's operators on vectors: parts of a layer of a transformer, in miniature.
//
//     kernels [cpu|cuda]
//
// Without an argument it uses CUDA where possible. Every result is compared with a plain loop.

#include <algorithm>
#include <cmath>
#include <iomanip>
#include <iostream>
#include <string>
#include <vector>

#include <xserv.hpp>

using Floats = std::vector<float>;
using Doubles = std::vector<double>;

constexpr std::size_t tokens = 6, heads = 4, kv_heads = 2, head_dim = 64, hidden = heads * head_dim;

// Small numbers that look random but are the same in every run.
static Floats some(std::size_t count) {
  static std::uint32_t state = 1;
  Floats values(count);
  for (float &value : values) {
    state = state * 1664525u + 1013904223u;
    value = static_cast<float>(state >> 8) / static_cast<float>(1 << 23) - 1.0f;
  }
  return values;
}

static bool compare(const char *name, const Floats &got, const Doubles &want) {
  bool is_good = got.size() == want.size();
  double worst = 0;
  for (std::size_t i = 0; is_good && i < want.size(); i++) {
    const double error = std::fabs(static_cast<double>(got[i]) - want[i]) / (1 + std::fabs(want[i]));
    is_good = error <= 2e-5; // also false for NaN
    worst = std::max(worst, error);
  }
  std::cout << std::left << std::setw(12) << name << " largest error " << worst << (is_good ? "  ok\n" : "  WRONG\n");
  return is_good;
}

static bool run(const xserv::Context &context) {
  bool is_good = true;
  const Floats x = some(tokens * hidden), weight = some(hidden), matrix = some(2 * hidden * hidden);

  // The operators take memory of the context's device. On the CPU they would take the vectors themselves:
  // context.rms_norm({x, {tokens, hidden}}, weight, 1e-6f, {out, {tokens, hidden}}).
  const auto x_there = context.copy_of({x, {tokens, hidden}}), weight_there = context.copy_of(weight);
  const auto normed = context.tensor<float>({tokens, hidden});
  context.rms_norm(x_there, weight_there, 1e-6f, normed);
  Doubles want(tokens * hidden);
  for (std::size_t t = 0; t < tokens; t++) {
    const float *row = &x[t * hidden];
    double sum = 0;
    for (std::size_t i = 0; i < hidden; i++) sum += static_cast<double>(row[i]) * static_cast<double>(row[i]);
    const double scale = 1 / std::sqrt(sum / hidden + 1e-6);
    for (std::size_t i = 0; i < hidden; i++)
      want[t * hidden + i] = static_cast<double>(row[i]) * scale * static_cast<double>(weight[i]);
  }
  const Floats normed_here = context.to_vector<float>(normed);
  is_good &= compare("rms_norm", normed_here, want);

  // A weight as torch.nn.Linear has it, of gate and up together.
  const auto matrix_there = context.copy_of({matrix, {2 * hidden, hidden}});
  const auto fused = context.tensor<float>({tokens, 2 * hidden});
  context.gemm(normed, matrix_there, fused, xserv::GemmOptions().transpose_b());
  Doubles product(tokens * 2 * hidden);
  for (std::size_t t = 0; t < tokens; t++)
    for (std::size_t i = 0; i < 2 * hidden; i++)
      for (std::size_t j = 0; j < hidden; j++)
        product[t * 2 * hidden + i] +=
            static_cast<double>(normed_here[t * hidden + j]) * static_cast<double>(matrix[i * hidden + j]);
  is_good &= compare("gemm", context.to_vector<float>(fused), product);

  // Gate and up are slices, which are read where they are.
  const auto gated = context.tensor<float>({tokens, hidden});
  context.silu_mul(fused.view().slice(1, 0, hidden), fused.view().slice(1, hidden, 2 * hidden), gated);
  for (std::size_t t = 0; t < tokens; t++)
    for (std::size_t i = 0; i < hidden; i++) {
      const double gate = product[t * 2 * hidden + i], up = product[t * 2 * hidden + hidden + i];
      want[t * hidden + i] = gate / (1 + std::exp(-gate)) * up;
    }
  is_good &= compare("silu_mul", context.to_vector<float>(gated), want);

  // In place: the result may be the view that is read.
  context.add(gated, x_there, gated);
  for (std::size_t i = 0; i < want.size(); i++) want[i] += static_cast<double>(x[i]);
  is_good &= compare("add", context.to_vector<float>(gated), want);

  // Each head of keys and values serves two of the queries; a token sees itself and those before it.
  const Floats q = some(tokens * hidden), k = some(tokens * kv_heads * head_dim),
               v = some(tokens * kv_heads * head_dim);
  const xserv::Dims q_shape{1, tokens, heads, head_dim}, kv_shape{1, tokens, kv_heads, head_dim};
  const auto mixed = context.tensor<float>(q_shape);
  const auto q_there = context.copy_of({q, q_shape});
  const auto k_there = context.copy_of({k, kv_shape}), v_there = context.copy_of({v, kv_shape});
  context.attention(q_there, k_there, v_there, mixed, xserv::AttentionOptions().causal());
  for (std::size_t t = 0; t < tokens; t++)
    for (std::size_t h = 0; h < heads; h++) {
      Doubles sum(head_dim);
      double shares = 0;
      for (std::size_t j = 0; j <= t; j++) {
        const std::size_t at = (j * kv_heads + h / (heads / kv_heads)) * head_dim;
        double dot = 0;
        for (std::size_t d = 0; d < head_dim; d++)
          dot += static_cast<double>(q[(t * heads + h) * head_dim + d]) * static_cast<double>(k[at + d]);
        const double share = std::exp(dot / std::sqrt(head_dim));
        shares += share;
        for (std::size_t d = 0; d < head_dim; d++) sum[d] += share * static_cast<double>(v[at + d]);
      }
      for (std::size_t d = 0; d < head_dim; d++) want[(t * heads + h) * head_dim + d] = sum[d] / shares;
    }
  return compare("attention", context.to_vector<float>(mixed), want) && is_good;
}

int main(int argc, char **argv) {
  const std::string device = argc > 1 ? argv[1] : "auto";
  if (argc > 2 || (device != "auto" && device != "cpu" && device != "cuda")) {
    std::cerr << "usage: kernels [cpu|cuda]\n";
    return 2;
  }
  try {
    const xserv::Context context(device == "cpu"    ? XSERV_DEVICE_CPU
                                 : device == "cuda" ? XSERV_DEVICE_CUDA
                                                    : XSERV_DEVICE_AUTO);
    std::cout << "xserv " << xserv::version() << " on "
              << (context.device_kind() == XSERV_DEVICE_CUDA ? xserv::cuda_device_info().name : "the CPU") << '\n';
    const bool is_good = run(context);
    context.synchronize(); // throws what went wrong on a GPU
    return is_good ? 0 : 1;
  } catch (const xserv::Error &error) {
    std::cerr << "kernels: " << error.what() << " (" << error.status_name() << ")\n";
    return 1;
  }
}
