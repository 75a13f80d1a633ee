// SPDX-License-Identifier: Apache-2.0
#include "client/cli/trace.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <numeric>
#include <string_view>
#include <utility>

namespace kvstrata::cli {
namespace {

constexpr int32_t kMaxTokens = 16 << 20;

Status BadMetadata(const std::string& key, const std::string& value, const std::string& allowed) {
  return InvalidArgument("TRACE_METADATA",
                         "__metadata__." + key +
                             (value.empty() ? " is missing" : " = '" + value + "'") +
                             "; allowed: " + allowed);
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  std::string out = "[";
  for (const int64_t n : shape) out += (out.size() > 1 ? ", " : "") + std::to_string(n);
  return out + "]";
}

bool ParseInt(std::string_view text, int32_t* out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *out);
  return error == std::errc() && end == text.data() + text.size();
}

bool ParseDouble(std::string_view text, double* out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *out);
  return error == std::errc() && end == text.data() + text.size();
}

// Exponent all ones: infinite or not a number.
bool AllFinite(const uint16_t* values, size_t n) {
  uint32_t bad = 0;
  for (size_t i = 0; i < n; ++i) bad |= static_cast<uint32_t>((values[i] & 0x7F80) == 0x7F80);
  return bad == 0;
}

}  // namespace

void TraceRotary::Rotate(int64_t position, std::span<double> row) const {
  const int32_t pairs = dim / 2;
  for (int32_t i = 0; i < pairs; ++i) {
    const double angle = static_cast<double>(position) * std::pow(theta, -2.0 * i / dim);
    const double cos = std::cos(angle), sin = std::sin(angle);
    double& x = row[static_cast<size_t>(interleaved ? 2 * i : i)];
    double& y = row[static_cast<size_t>(interleaved ? 2 * i + 1 : i + pairs)];
    const double before = x;
    x = before * cos - y * sin;
    y = y * cos + before * sin;
  }
}

std::string Trace::Metadata(const std::string& key) const {
  const auto found = file_->metadata().find(key);
  return found == file_->metadata().end() ? "" : found->second;
}

Result<int32_t> Trace::Number(const std::string& key, int32_t least, int32_t most) const {
  const std::string text = Metadata(key);
  int32_t value = 0;
  if (!ParseInt(text, &value) || value < least || value > most) {
    return BadMetadata(key, text, std::to_string(least) + " .. " + std::to_string(most));
  }
  return value;
}

Status Trace::ReadMetadata() {
  if (Metadata("format") != "kvstrata-trace") {
    return InvalidArgument("TRACE_FOREIGN", "__metadata__.format is '" + Metadata("format") +
                                                "', of a trace it is 'kvstrata-trace'");
  }
  if (Metadata("format_version") != "1") {
    return InvalidArgument("TRACE_VERSION", "__metadata__.format_version is '" +
                                                Metadata("format_version") +
                                                "', this program reads 1");
  }
  KVS_ASSIGN_OR_RETURN(shape_.layers, Number("layers", 1, 1024));
  KVS_ASSIGN_OR_RETURN(shape_.kv_heads, Number("kv_heads", 1, 1024));
  KVS_ASSIGN_OR_RETURN(shape_.query_heads, Number("query_heads", 1, 4096));
  KVS_ASSIGN_OR_RETURN(shape_.head_dim, Number("head_dim", 64, 256));
  KVS_ASSIGN_OR_RETURN(shape_.page_tokens, Number("page_tokens", 16, 64));
  KVS_ASSIGN_OR_RETURN(shape_.prompt, Number("N0", 1, kMaxTokens));
  KVS_ASSIGN_OR_RETURN(shape_.steps, Number("T", 0, kMaxTokens));
  KVS_ASSIGN_OR_RETURN(shape_.tail, Number("tail", 0, shape_.prompt));
  if (shape_.query_heads % shape_.kv_heads != 0) {
    return BadMetadata("query_heads", Metadata("query_heads"),
                       "multiples of kv_heads = " + Metadata("kv_heads"));
  }
  const auto one_of = [](int32_t value, int32_t a) {
    return value == a || value == 2 * a || value == 4 * a;
  };
  if (!one_of(shape_.head_dim, 64))
    return BadMetadata("head_dim", Metadata("head_dim"), "64, 128, 256");
  if (!one_of(shape_.page_tokens, 16)) {
    return BadMetadata("page_tokens", Metadata("page_tokens"), "16, 32, 64");
  }
  return ReadRotary();
}

Status Trace::ReadRotary() {
  const std::string keys = Metadata("keys");
  if (keys == "post_rope") return OkStatus();  // rope_* are for people then
  if (keys != "pre_rope") return BadMetadata("keys", keys, "post_rope, pre_rope");
  const std::string theta = Metadata("rope_theta"), scaling = Metadata("rope_scaling");
  TraceRotary& r = shape_.rotary;
  if (!ParseDouble(theta, &r.theta) || !(r.theta >= 1 && r.theta <= 1e12)) {
    return BadMetadata("rope_theta", theta, "1 .. 1e12 (keys = pre_rope)");
  }
  KVS_ASSIGN_OR_RETURN(r.dim, Number("rope_dim", 2, shape_.head_dim));
  if (r.dim % 2 != 0) return BadMetadata("rope_dim", Metadata("rope_dim"), "even numbers");
  if (!scaling.empty() && scaling != "none") {
    return BadMetadata("rope_scaling", scaling, "none; record scaled models with keys = post_rope");
  }
  if (Metadata("rope_interleaved").empty()) return OkStatus();
  KVS_ASSIGN_OR_RETURN(const int32_t interleaved, Number("rope_interleaved", 0, 1));
  r.interleaved = interleaved == 1;
  return OkStatus();
}

Result<std::vector<int32_t>> Trace::LayerNumbers() const {
  const std::string text = Metadata("trace_layers");
  std::vector<int32_t> layers(static_cast<size_t>(shape_.layers));
  std::iota(layers.begin(), layers.end(), 0);
  if (text.empty()) return layers;
  layers.clear();
  std::string_view rest = text;
  while (!rest.empty()) {
    const size_t comma = std::min(rest.find(','), rest.size());
    int32_t layer = -1;
    if (!ParseInt(rest.substr(0, comma), &layer) || layer < 0 || layer >= shape_.layers ||
        (!layers.empty() && layer <= layers.back())) {
      return BadMetadata("trace_layers", text,
                         "ascending numbers below layers = " + std::to_string(shape_.layers));
    }
    layers.push_back(layer);
    rest.remove_prefix(std::min(comma + 1, rest.size()));
  }
  return layers;
}

Result<const TensorView*> Trace::Tensor(const std::string& name, const std::string& dtype,
                                        const std::vector<int64_t>& shape) const {
  const auto found = file_->tensors().find(name);
  const std::string wanted = dtype + " " + ShapeText(shape);
  if (found == file_->tensors().end()) {
    return InvalidArgument("TRACE_TENSOR", "tensor '" + name + "' is missing; it is " + wanted);
  }
  const TensorView& view = found->second;
  if (view.dtype != dtype || view.shape != shape) {
    return InvalidArgument("TRACE_TENSOR", "tensor '" + name + "' is " + view.dtype + " " +
                                               ShapeText(view.shape) + "; it must be " + wanted);
  }
  return &view;
}

Result<const uint16_t*> Trace::Rows(const std::string& name,
                                    const std::vector<int64_t>& shape) const {
  KVS_ASSIGN_OR_RETURN(const TensorView* view, Tensor(name, "BF16", shape));
  const auto* values = reinterpret_cast<const uint16_t*>(view->bytes.data());
  if (!AllFinite(values, view->bytes.size() / 2)) {
    return InvalidArgument("TRACE_VALUE", "tensor '" + name + "' holds a value that is not finite");
  }
  return values;
}

Result<std::vector<float>> Trace::Series(const std::string& name, int64_t n) const {
  std::vector<float> values;
  if (!file_->tensors().contains(name)) return values;
  KVS_ASSIGN_OR_RETURN(const TensorView* view, Tensor(name, "F32", {n}));
  values.resize(static_cast<size_t>(n));
  if (n > 0) std::memcpy(values.data(), view->bytes.data(), view->bytes.size());
  for (size_t i = 0; i < values.size(); ++i) {
    if (std::isfinite(values[i]) && values[i] >= 0) continue;
    return InvalidArgument("TRACE_VALUE", "tensor '" + name + "'[" + std::to_string(i) +
                                              "] = " + std::to_string(values[i]) +
                                              "; nats are finite and not negative");
  }
  return values;
}

// Reads those of the prompt, or of the steps' tokens as well.
Status Trace::ReadSurprisal() {
  const auto found = file_->tensors().find("surprisal");
  const bool of_all = found != file_->tensors().end() &&
                      found->second.shape == std::vector<int64_t>{shape_.tokens()};
  KVS_ASSIGN_OR_RETURN(surprisal_, Series("surprisal", of_all ? shape_.tokens() : shape_.prompt));
  if (!of_all) return OkStatus();
  step_surprisal_.assign(surprisal_.begin() + shape_.prompt, surprisal_.end());
  surprisal_.resize(static_cast<size_t>(shape_.prompt));
  return OkStatus();
}

Status Trace::ReadTensors() {
  const int64_t n = shape_.tokens();
  KVS_ASSIGN_OR_RETURN(const TensorView* tokens, Tensor("tokens", "I32", {n}));
  tokens_.resize(static_cast<size_t>(n));
  std::memcpy(tokens_.data(), tokens->bytes.data(), tokens->bytes.size());
  KVS_RETURN_IF_ERROR(ReadSurprisal());
  KVS_ASSIGN_OR_RETURN(entropy_, Series("entropy", shape_.steps));
  if (file_->tensors().contains("boundary")) {
    KVS_ASSIGN_OR_RETURN(const TensorView* boundary, Tensor("boundary", "U8", {n}));
    boundary_.resize(static_cast<size_t>(n));
    std::memcpy(boundary_.data(), boundary->bytes.data(), boundary->bytes.size());
  }
  KVS_ASSIGN_OR_RETURN(const std::vector<int32_t> numbers, LayerNumbers());
  for (const int32_t layer : numbers) {
    const std::string suffix = "." + std::to_string(layer);
    TraceLayer rows{.layer = layer};
    KVS_ASSIGN_OR_RETURN(rows.k, Rows("k" + suffix, {n, shape_.kv_heads, shape_.head_dim}));
    KVS_ASSIGN_OR_RETURN(rows.v, Rows("v" + suffix, {n, shape_.kv_heads, shape_.head_dim}));
    KVS_ASSIGN_OR_RETURN(rows.q, Rows("q" + suffix, {shape_.tail + shape_.steps, shape_.query_heads,
                                                     shape_.head_dim}));
    layers_.push_back(rows);
  }
  return OkStatus();
}

Result<Trace> Trace::FromFile(Safetensors file) {
  Trace trace(std::move(file));
  KVS_RETURN_IF_ERROR(trace.ReadMetadata());
  KVS_RETURN_IF_ERROR(trace.ReadTensors());
  return trace;
}

Trace Trace::Prefix(int32_t prompt) const {
  KVS_CHECK(1 <= prompt && prompt <= shape_.prompt);
  Trace out = *this;
  for (TraceLayer& layer : out.layers_) layer.q += shape_.tail * shape_.q_row();
  out.shape_.prompt = prompt;
  out.shape_.tail = 0;
  out.tokens_.resize(static_cast<size_t>(out.shape_.tokens()));
  if (!surprisal_.empty()) out.surprisal_.resize(static_cast<size_t>(prompt));
  out.step_surprisal_.clear();  // other tokens have them
  if (!boundary_.empty()) out.boundary_.resize(static_cast<size_t>(out.shape_.tokens()));
  return out;
}

Result<Trace> Trace::Open(const std::string& path) {
  KVS_ASSIGN_OR_RETURN(Safetensors file, Safetensors::Open(path, "trace"));
  Result<Trace> trace = FromFile(std::move(file));
  if (trace.ok()) return trace;
  const Status status = trace.status();
  return Status(status.code(), status.reason(), "trace '" + path + "': " + status.message());
}

}  // namespace kvstrata::cli
