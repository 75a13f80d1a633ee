// SPDX-License-Identifier: Apache-2.0
// MooncakeValueTier::Probe and Forget, and what all its calls share. A probe asks which heads are
// there, and reads those; reading is what costs.
#include <algorithm>
#include <cstring>
#include <utility>

#include "server/tier/mooncake/mooncake_calls.h"

namespace kvstrata {

using mooncake::Kind;
using Entry = MooncakeAgent::Entry;

std::string HeadNameOf(const MooncakeTierParts& parts, std::string_view key,
                       std::string_view place) {
  std::string name = parts.format.NameOf(key, place);
  name.back() = 'h';  // in place of the stripe's number, which is 0
  return name;
}

Status StatusOfCode(int64_t code) {
  const std::string text = "the store answered with code " + std::to_string(code);
  switch (code) {
    case mooncake::kMiss:
    case mooncake::kNotWhole:
      return NotFound("MOONCAKE_MISS", "the store has not all of the value");
    case mooncake::kTooSmall:
      return {Code::kDataLoss, "REMOTE_CORRUPT", "more came than the value has"};
    case mooncake::kNoRoom:
      return ResourceExhausted("MOONCAKE_FULL", "no segment of the store has room");
    case mooncake::kLate:
      return {Code::kDeadlineExceeded, "MOONCAKE_SLOW", "the agent began it too late"};
    default:
      return Unavailable("MOONCAKE_REFUSED", text);
  }
}

Result<std::shared_ptr<AgentBlock>> RoomFor(MooncakeTierParts* parts, uint64_t bytes,
                                            const TierCall& call) {
  KVS_RETURN_IF_ERROR(WhyNotNow(call));
  std::shared_ptr<AgentBlock> block = parts->agent->memory().Take(bytes, call.deadline);
  if (block != nullptr) return block;
  return Status(Code::kDeadlineExceeded, "MOONCAKE_HELD",
                "calls that the store does not answer hold the agent's memory");
}

namespace {

// Which of the names are there.
Result<std::vector<size_t>> FindNames(MooncakeTierParts* parts, const std::vector<Entry>& names,
                                      const TierCall& call) {
  KVS_RETURN_IF_ERROR(WhyNotNow(call));
  KVS_ASSIGN_OR_RETURN(const std::vector<int64_t> there,
                       parts->agent->Call(Kind::kExist, names, nullptr, call));
  std::vector<size_t> found;
  for (size_t i = 0; i < names.size(); ++i) {
    if (there[i] == 1) found.push_back(i);
  }
  return found;
}

// At most a batch of them.
Status FindSome(MooncakeTierParts* parts, std::span<TierProbe> probes, std::span<ValueSizes> sizes,
                const TierCall& call) {
  std::vector<Entry> names;
  for (const TierProbe& probe : probes)
    names.push_back({HeadNameOf(*parts, probe.key, probe.place)});
  KVS_ASSIGN_OR_RETURN(const std::vector<size_t> there, FindNames(parts, names, call));
  if (there.empty()) return OkStatus();
  KVS_ASSIGN_OR_RETURN(const auto block, RoomFor(parts, there.size() * remote::kHeaderBytes, call));
  std::vector<Entry> heads;
  for (const size_t i : there) {
    const uint64_t offset = block->offset + heads.size() * remote::kHeaderBytes;
    heads.push_back({std::move(names[i].name), offset, remote::kHeaderBytes});
  }
  KVS_ASSIGN_OR_RETURN(const std::vector<int64_t> came,
                       parts->agent->Call(Kind::kGet, heads, block, call));
  for (size_t k = 0; k < there.size(); ++k) {
    if (came[k] != static_cast<int64_t>(remote::kHeaderBytes)) continue;
    remote::Header header;
    std::memcpy(header.data(), &block->bytes[k * remote::kHeaderBytes], header.size());
    const auto head =
        parts->format.HeadOf(probes[there[k]].key, header, std::chrono::system_clock::now());
    if (head) sizes[there[k]] = head->sizes;
  }
  return OkStatus();
}

}  // namespace

Result<std::vector<ValueSizes>> FindHeads(MooncakeTierParts* parts, std::span<TierProbe> probes,
                                          const TierCall& call) {
  std::vector<ValueSizes> sizes(probes.size());
  for (size_t at = 0; at < probes.size(); at += mooncake::kMostEntries) {
    const size_t n = std::min(mooncake::kMostEntries, probes.size() - at);
    KVS_RETURN_IF_ERROR(
        FindSome(parts, probes.subspan(at, n), std::span(sizes).subspan(at, n), call));
  }
  return sizes;
}

Status RemoveFromMooncake(MooncakeTierParts* parts, std::string_view key, std::string_view place,
                          uint32_t stripes, const TierCall& call) {
  std::vector<Entry> names = {
      {HeadNameOf(*parts, key, place)}};  // what says that it is there first
  for (uint32_t i = 0; i < stripes; ++i) names.push_back({parts->format.NameOf(key, place, i)});
  for (size_t at = 0; at < names.size(); at += mooncake::kMostEntries) {
    const auto some =
        std::span(names).subspan(at, std::min(mooncake::kMostEntries, names.size() - at));
    KVS_ASSIGN_OR_RETURN(const std::vector<int64_t> gone,
                         parts->agent->Call(Kind::kRemove, some, nullptr, call));
    for (const int64_t code : gone) {
      const bool absent = code == mooncake::kMiss || code == mooncake::kNotWhole;
      if (code < 0 && !absent) return StatusOfCode(code);
    }
  }
  return OkStatus();
}

MooncakePing PingMooncake(MooncakeTierParts* parts, Deadline deadline) {
  const std::vector<Entry> name = {{HeadNameOf(*parts, "ping", "")}};  // no value has this key
  const auto begin = std::chrono::steady_clock::now();
  const auto answer = parts->agent->Call(Kind::kExist, name, nullptr, {deadline, {}, {}});
  if (!answer.ok()) return {{}, answer.status()};
  if (answer->front() < 0) return {{}, StatusOfCode(answer->front())};
  return {std::chrono::ceil<std::chrono::microseconds>(std::chrono::steady_clock::now() - begin),
          OkStatus()};
}

void ProbeMooncake(MooncakeTierParts* parts, std::span<TierProbe> probes, const TierCall& call) {
  const Result<std::vector<ValueSizes>> sizes = FindHeads(parts, probes, call);
  for (size_t i = 0; i < probes.size(); ++i) {
    probes[i].sizes = sizes.ok() ? (*sizes)[i] : ValueSizes();
    if (!probes[i].sizes.empty()) parts->known.Saw(probes[i].key, probes[i].sizes);
  }
}

// The head tells how many stripes there are.
void ForgetInMooncake(MooncakeTierParts* parts, std::span<TierForget> keys, const TierCall& call) {
  std::vector<TierProbe> probes;
  for (const TierForget& forget : keys) probes.push_back({forget.key, {}, forget.place});
  const Result<std::vector<ValueSizes>> sizes = FindHeads(parts, probes, call);
  for (size_t i = 0; i < keys.size(); ++i) {
    keys[i].status = sizes.ok() ? WhyNotNow(call) : sizes.status();
    if (!keys[i].status.ok()) continue;
    parts->known.Lost(keys[i].key);
    const uint32_t stripes = remote::StripesOf(remote::BytesOf((*sizes)[i].all()));
    keys[i].status = RemoveFromMooncake(parts, keys[i].key, keys[i].place, stripes, call);
  }
}

}  // namespace kvstrata
