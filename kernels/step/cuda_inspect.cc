#include "kernels/step/cuda_inspect.h"

#include <string>
#include <vector>

namespace kvstrata {
namespace {

// Arrays of a codec's storage that are read from descriptions (codec/extent.h).
std::vector<std::string_view> DescribedArrays(CodecKind codec) {
  if (codec == CodecKind::kPacked) return {"segments", "strategies"};
  return {"anchors", "raw", "spans", "k_rank", "v_rank"};
}

Status CheckDescribed(CodecKind codec, std::string_view name) {
  std::string names;
  for (const std::string_view known : DescribedArrays(codec)) {
    if (name == known) return OkStatus();
    names.append(known).append(", ");
  }
  if (name == "entropy" || name == "surprisal" || name == "boundary") return OkStatus();
  return Unimplemented("CUDA_PLAN", "array '" + std::string(name) + "' of codec '" +
                                        std::string(NameOf(codec)) + "' is not read from a GPU; " +
                                        names + "entropy, surprisal and boundary are");
}

// Hits and votes are kept by the GPU.
Status CheckServed(const Plan& plan, std::string_view name) {
  if (plan.selector == SelectorKind::kVote && (name == "hits" || name.starts_with("votes_"))) {
    return Unimplemented("CUDA_PLAN", "array '" + std::string(name) +
                                          "' of selector 'vote' is not read from a GPU; entropy, "
                                          "surprisal and boundary are");
  }
  return plan.codec == CodecKind::kRaw ? OkStatus() : CheckDescribed(plan.codec, name);
}

}  // namespace

Result<InspectArray> InspectFromGpu(const SequenceState& state, SequenceView view, size_t blocks,
                                    const FarRead& read, Executor& executor,
                                    std::string_view name) {
  KVS_RETURN_IF_ERROR(CheckServed(state.plan(), name));
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
