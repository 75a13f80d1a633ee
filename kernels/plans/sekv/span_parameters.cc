// SPDX-License-Identifier: Apache-2.0
#include "kernels/plans/sekv/span_parameters.h"

#include <cstring>

#include "base/safetensors.h"

namespace kvstrata {
namespace {

constexpr int64_t kHidden = 64;  // width of the gate's network

std::string ShapeText(const std::vector<int64_t>& shape) {
  std::string text;
  for (const int64_t n : shape) text += (text.empty() ? "[" : ", ") + std::to_string(n);
  return (text.empty() ? "[" : text) + "]";
}

Status Invalid(const std::string& path, const std::string& what) {
  return InvalidArgument("PARAMETERS_INVALID", "parameters '" + path + "': " + what);
}

Status ReadTensor(const Safetensors& file, const std::string& path, const std::string& name,
                  const std::vector<int64_t>& shape, std::vector<float>* out) {
  const auto found = file.tensors().find(name);
  const std::string wanted = "F32 " + ShapeText(shape) + " is needed for this model and plan";
  if (found == file.tensors().end()) {
    return Invalid(path, "tensor '" + name + "' is missing; " + wanted);
  }
  const TensorView& tensor = found->second;
  if (tensor.dtype != "F32" || tensor.shape != shape) {
    return Invalid(path, "tensor '" + name + "' is " + tensor.dtype + " " +
                             ShapeText(tensor.shape) + "; " + wanted);
  }
  out->resize(tensor.bytes.size() / sizeof(float));
  std::memcpy(out->data(), tensor.bytes.data(), tensor.bytes.size());
  return OkStatus();
}

// d' of the plan, or else of the file; 32, the paper's, where its W cannot be one.
int32_t RoutesOf(const Safetensors& file, const Geometry& geometry, const Plan& plan) {
  if (plan.lowrank.d_route > 0) return plan.lowrank.d_route;
  const auto w = file.tensors().find("W");
  if (w == file.tensors().end() || w->second.shape.size() != 4) return 32;
  const int64_t routes = w->second.shape[2];
  return routes >= 1 && routes <= geometry.head_dim ? static_cast<int32_t>(routes) : 32;
}

}  // namespace

Result<SpanParameters> ParseSpanParameters(std::span<const std::byte> bytes,
                                           const std::string& name, const Geometry& geometry,
                                           const Plan& plan) {
  const Result<Safetensors> file = Safetensors::Parse(bytes, "parameters");
  if (!file.ok()) return Invalid(name, file.status().message());
  SpanParameters p;
  p.layers = geometry.layers;
  p.query_heads = geometry.query_heads;
  p.head_dim = geometry.head_dim;
  p.d_route = RoutesOf(*file, geometry, plan);
  p.r_max = plan.lowrank.r_max;
  const std::vector<int64_t> heads = {geometry.layers, geometry.query_heads};
  const int64_t in = int64_t{plan.lowrank.r_max} + geometry.head_dim;
  KVS_RETURN_IF_ERROR(
      ReadTensor(*file, name, "W",
                 {geometry.layers, geometry.query_heads, p.d_route, geometry.head_dim}, &p.w));
  KVS_RETURN_IF_ERROR(ReadTensor(*file, name, "tau", heads, &p.tau));
  if (file->tensors().contains("norm")) {
    KVS_RETURN_IF_ERROR(ReadTensor(*file, name, "norm", heads, &p.norm));
  }
  const std::vector<int64_t> shapes[] = {
      {kHidden, in}, {kHidden, kHidden}, {plan.lowrank.r_max, kHidden}};
  for (size_t i = 0; i < 3; ++i) {
    const std::string layer = "g_phi." + std::to_string(2 * i);
    KVS_RETURN_IF_ERROR(ReadTensor(*file, name, layer + ".weight", shapes[i], &p.weight[i]));
    KVS_RETURN_IF_ERROR(ReadTensor(*file, name, layer + ".bias", {shapes[i][0]}, &p.bias[i]));
  }
  return p;
}

}  // namespace kvstrata
