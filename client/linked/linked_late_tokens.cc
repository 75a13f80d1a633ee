// SPDX-License-Identifier: Apache-2.0
// Token ids that come after their step (kvs_late_tokens): what the daemon is to be told of such
// tokens waits for them, in order with all else.
#include <algorithm>
#include <cstring>
#include <string>
#include <unordered_set>
#include <vector>

#include "client/linked/linked_session.h"
#include "kernels/plan/plan_needs.h"

namespace kvstrata::client {
namespace {

std::string NameOf(const Sequence& s) { return "sequence " + std::to_string(s.id); }

std::string CountOf(const Sequence& s) {
  return std::to_string(s.late_tokens) + " tokens whose ids have not come";
}

// Writes ids into the messages that lack them, the oldest first.
void FillMessages(Sequence* s, std::span<const int32_t> ids) {
  for (Sequence::Deferred& event : s->deferred) {
    const size_t n = std::min<size_t>(event.missing, ids.size());
    if (n == 0) continue;
    std::byte* const first =
        event.message.data() + event.message.size() - size_t{event.missing} * sizeof(int32_t);
    std::memcpy(first, ids.data(), n * sizeof(int32_t));
    event.missing -= static_cast<uint32_t>(n);
    ids = ids.subspan(n);
  }
}

void NoteIds(Sequence* s, std::span<const int32_t> ids) {
  const int32_t first = s->state->tokens() - static_cast<int32_t>(s->late_tokens);
  s->state->reported().NoteTokens(first, ids, *s->boundary_tokens);
  FillMessages(s, ids);
  s->late_tokens -= static_cast<uint32_t>(ids.size());
}

Status CopyFromGpu(const Gpu& gpu, std::span<const LateIds> members,
                   std::vector<std::vector<int32_t>>* ids) {
  std::vector<cuda::PageCopy> copies;
  for (size_t i = 0; i < members.size(); ++i) {
    const uint64_t bytes = (*ids)[i].size() * sizeof(int32_t);
    copies.push_back({(*ids)[i].data(), members[i].tokens, {bytes, bytes, 1}});
  }
  return CudaStatus(*gpu.ops, gpu.ops->copy_pages(gpu.device, copies.data(), copies.size()),
                    "reading token ids");
}

}  // namespace

Status IdsMissing(const Sequence& s) {
  return FailedPrecondition(std::string(kIdsMissing),
                            NameOf(s) + " has " + CountOf(s) + "; give them by kvs_late_tokens");
}

Status CheckIds(const Sequence& s, const BatchMember& member) {
  if (member.padding) return OkStatus();
  if (member.late == 0) return s.late_tokens == 0 ? OkStatus() : IdsMissing(s);
  const bool ends = !s.boundary_tokens->empty() && (NeedsOf(s.state->plan()) & kNeedBoundary) != 0;
  if (!ends) return OkStatus();
  return FailedPrecondition(
      "LATE_BOUNDARY", NameOf(s) + " takes sentence ends from token ids, and " +
                           std::to_string(member.late) +
                           " of this step are to come later; give them at its begin, or register "
                           "the model without boundary_tokens and report the ends");
}

Status Session::LateTokens(std::span<const LateIds> members, bool on_gpu) {
  if (on_gpu && state_->gpu_session == nullptr) {
    return InvalidArgument("LATE_TOKENS",
                           "on_gpu is 1, but this session's pages are not a GPU's; "
                           "pass ids in host memory");
  }
  std::vector<SequenceUse> uses;
  std::vector<std::vector<int32_t>> ids;
  std::unordered_set<uint64_t> seen;
  for (const LateIds& member : members) {
    if (!seen.insert(member.sequence).second) {
      return FailedPrecondition("SEQUENCE_BUSY", "sequence " + std::to_string(member.sequence) +
                                                     " is given ids twice in one call");
    }
    KVS_ASSIGN_OR_RETURN(SequenceUse s, SequenceUse::Of(state_.get(), member.sequence, true));
    if (member.n > s->late_tokens) {
      return InvalidArgument(std::string(kIdsMissing), "n is " + std::to_string(member.n) +
                                                           ", and " + NameOf(*s.get()) + " has " +
                                                           CountOf(*s.get()));
    }
    if (on_gpu) {
      ids.emplace_back(member.n);
    } else {
      ids.emplace_back(member.tokens, member.tokens + member.n);
    }
    uses.push_back(std::move(s));
  }
  if (on_gpu) KVS_RETURN_IF_ERROR(CopyFromGpu(state_->gpu, members, &ids));
  for (size_t i = 0; i < members.size(); ++i) {
    NoteIds(uses[i].get(), ids[i]);
    KVS_RETURN_IF_ERROR(state_->TellDone(uses[i].get()));
  }
  return OkStatus();
}

}  // namespace kvstrata::client
