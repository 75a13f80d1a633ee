// SPDX-License-Identifier: Apache-2.0
// Blocks of KVS_MEMORY_PROCESS on their way to the daemon (staged_blocks.h). Those of a sequence
// are released as the daemon acknowledges them: at its next seal, acknowledged or close, or when
// another sequence of the session finds none free.
#include <algorithm>
#include <chrono>
#include <string>
#include <thread>

#include "client/linked/linked_session.h"

namespace kvstrata::client {
namespace {

using Clock = std::chrono::steady_clock;

Status QueueFull(int32_t blocks) {
  return ResourceExhausted("IMPORT_QUEUE",
                           "all " + std::to_string(blocks) +
                               " staged blocks wait for the daemon to copy them; seal again later, "
                               "or raise timeout_ms");
}

// TENSORS_MISSING, BLOCKS_TOKENS, BLOCK_UNKNOWN: what would be copied is all there.
Status CheckBlocks(const ImportedModel& model, const SealedBlocks& all) {
  int32_t blocks = INT32_MAX;
  for (size_t layer = 0; layer < model.layers.size(); ++layer) {
    const auto& [keys, values] = model.layers[layer];
    if (keys.address == nullptr) {
      return FailedPrecondition("TENSORS_MISSING", "layer " + std::to_string(layer) +
                                                       " has no tensors yet; register all layers "
                                                       "before blocks are sealed");
    }
    blocks = std::min({blocks, keys.blocks, values.blocks});
  }
  const auto block_tokens = static_cast<size_t>(model.layers.front().keys.block_tokens);
  if (all.tokens.size() != all.blocks.size() * block_tokens) {
    return InvalidArgument("BLOCKS_TOKENS", std::to_string(all.blocks.size()) + " blocks of " +
                                                std::to_string(block_tokens) + " and " +
                                                std::to_string(all.tokens.size()) +
                                                " tokens; pass a block's tokens for each");
  }
  for (size_t i = 0; i < all.blocks.size(); ++i) {
    if (all.blocks[i] >= 0 && all.blocks[i] < blocks) continue;
    return InvalidArgument("BLOCK_UNKNOWN", "blocks[" + std::to_string(i) + "] is " +
                                                std::to_string(all.blocks[i]) + "; allowed: 0 to " +
                                                std::to_string(blocks - 1));
  }
  return OkStatus();
}

void CopyBlocks(const ImportedModel& model, std::span<const int32_t> from,
                std::span<const int32_t> to) {
  for (size_t layer = 0; layer < model.layers.size(); ++layer) {
    const auto number = static_cast<int32_t>(layer);
    for (size_t i = 0; i < to.size(); ++i) {
      model.staged->Copy(model.layers[layer].keys, number, 0, from[i], to[i]);
      model.staged->Copy(model.layers[layer].values, number, 1, from[i], to[i]);
    }
  }
}

}  // namespace

void ReleaseStaged(Sequence* s, uint32_t acknowledged) {
  while (!s->staged.empty() && s->staged.front().end <= acknowledged) {
    s->staged.front().home->GiveBack(s->staged.front().blocks);
    s->staged.pop_front();
  }
}

// A failed copy takes all that was on its way with it, and its own engine is to hear why.
void Lending::ReleaseStagedOf(Sequence* s) {
  if (s->staged.empty()) return;
  const Result<uint32_t> tokens = Acknowledged(s->id);
  if (!tokens.ok() && s->import_failed.ok()) s->import_failed = tokens.status();
  ReleaseStaged(s, tokens.ok() ? *tokens : UINT32_MAX);
}

void Lending::ReleaseStagedOfOthers(const Sequence* s) {
  std::vector<std::shared_ptr<Sequence>> others;
  {
    std::lock_guard<std::mutex> lock(session_.mu);
    for (const auto& [id, other] : session_.sequences) {
      if (other.get() != s && other->imported) others.push_back(other);
    }
  }
  for (const auto& other : others) {
    std::unique_lock<std::mutex> lock(other->mu, std::try_to_lock);
    if (lock.owns_lock()) ReleaseStagedOf(other.get());
  }
}

Result<std::vector<int32_t>> Lending::TakeStaged(Sequence* s, StagedBlocks* staged, size_t most) {
  const auto deadline = session_.Deadline();
  while (true) {
    std::vector<int32_t> taken = staged->Take(most);
    if (!taken.empty()) return taken;
    ReleaseStagedOf(s);
    ReleaseStagedOfOthers(s);
    KVS_RETURN_IF_ERROR(std::exchange(s->import_failed, OkStatus()));
    if (Clock::now() >= deadline) return QueueFull(staged->blocks());
    std::this_thread::sleep_for(
        std::chrono::microseconds(100));  // nothing wakes who waits for copies
  }
}

Status Lending::SealStaged(Sequence* s, const ImportedModel& model, const SealedBlocks& all) {
  KVS_RETURN_IF_ERROR(std::exchange(s->import_failed, OkStatus()));
  KVS_RETURN_IF_ERROR(CheckBlocks(model, all));
  const auto block_tokens = static_cast<size_t>(model.layers.front().keys.block_tokens);
  for (size_t done = 0; done < all.blocks.size();) {
    KVS_ASSIGN_OR_RETURN(const std::vector<int32_t> to,
                         TakeStaged(s, model.staged.get(), all.blocks.size() - done));
    CopyBlocks(model, all.blocks.subspan(done, to.size()), to);
    const size_t at = done * block_tokens, n = to.size() * block_tokens;
    const Status sealed =
        Seal(s->id, {all.first + static_cast<uint32_t>(at), to, all.tokens.subspan(at, n)});
    if (!sealed.ok()) {
      model.staged->GiveBack(to);
      return sealed;
    }
    s->staged.push_back({all.first + static_cast<uint32_t>(at + n), to, model.staged});
    done += to.size();
  }
  return OkStatus();
}

void Lending::AwaitStaged(Sequence* s) {
  const auto deadline = session_.Deadline();
  while (!s->staged.empty() && Clock::now() < deadline) {
    ReleaseStagedOf(s);
    if (!s->staged.empty()) std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

}  // namespace kvstrata::client
