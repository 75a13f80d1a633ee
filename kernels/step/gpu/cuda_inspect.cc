// SPDX-License-Identifier: Apache-2.0
#include "kernels/step/gpu/cuda_inspect.h"

#include <string>
#include <vector>

namespace kvstrata {
namespace {

// Arrays of a plan whose steps run on a GPU that are read all the same: from descriptions of
// extents (codec/extent.h), from index rows, from what Begin decides.
std::vector<std::string_view> ReadFromGpu(const Plan& plan) {
  const Codec& codec = CodecOf(plan);
  if (codec.stores()) return {codec.device_arrays.begin(), codec.device_arrays.end()};
  if (plan.selector == SelectorKind::kCascade) return {"selections", "page_vectors_bf16"};
  return {};
}

// The others stay on the GPU: what the host's selector says of them would be nothing.
Status CheckReadFromGpu(const Plan& plan, std::string_view name) {
  std::string names;
  for (const std::string_view known : ReadFromGpu(plan)) {
    if (name == known) return OkStatus();
    names.append(known).append(", ");
  }
  if (name == "entropy" || name == "surprisal" || name == "boundary") return OkStatus();
  return Unimplemented("CUDA_PLAN", "array '" + std::string(name) + "' of selector '" +
                                        std::string(NameOf(plan.selector)) + "' over codec '" +
                                        std::string(NameOf(plan.codec)) +
                                        "' is not read from a GPU; " + names +
                                        "entropy, surprisal and boundary are");
}

}  // namespace

Result<InspectArray> InspectFromGpu(const SequenceState& state, SequenceView view, size_t blocks,
                                    const DeviceRead& read, Executor& executor,
                                    std::string_view name) {
  KVS_RETURN_IF_ERROR(CheckReadFromGpu(state.plan(), name));
  const auto bytes = static_cast<uint64_t>(state.index().block_bytes);
  std::vector<std::byte> copy(blocks * bytes);
  std::vector<std::byte*> copies;
  for (size_t i = 0; i < blocks; ++i) {
    std::byte* const to = copy.data() + i * bytes;
    KVS_RETURN_IF_ERROR(read(to, view.index_blocks[i], bytes));
    copies.push_back(to);
  }
  view.index_blocks = copies.data();
  KVS_ASSIGN_OR_RETURN(const Backend* const host, FindBackend(""));
  return state.Inspect(view, *host, executor, name);
}

}  // namespace kvstrata
