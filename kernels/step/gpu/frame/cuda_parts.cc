// SPDX-License-Identifier: Apache-2.0
#include "kernels/step/gpu/frame/cuda_parts.h"

#include <algorithm>
#include <ranges>
#include <span>

#include "kernels/select/selection_rule.h"
#include "kernels/step/gpu/frame/cuda_frame.h"
#include "kernels/step/gpu/frame/cuda_selector.h"

namespace kvstrata {
namespace {

// A prompt that is cut at multiples of `chunk` from the sequence's start (ADR 3).
void CutPrompt(const CudaFrame& frame, int member, int32_t chunk, std::vector<CudaPart>* parts) {
  const StepMember& m = frame.member(member);
  for (int32_t begin = 0, end; begin < m.new_tokens; begin = end) {
    const int64_t start = int64_t{m.view.tokens} + begin;
    end = static_cast<int32_t>(
        std::min<int64_t>((start / chunk + 1) * chunk - m.view.tokens, m.new_tokens));
    CudaPart& part = parts->emplace_back();
    part.first = member;
    part.new_tokens = end - begin;
    part.begin = begin;
    part.prompt = true;
    part.selects = !AttendsInFull(frame.plan(member), static_cast<int32_t>(start));
  }
}

// The first list of the next part of a selector.
int32_t NextList(std::span<const CudaPart> parts, const CudaSelector* selector) {
  for (const CudaPart& part : parts | std::views::reverse) {
    if (part.selects && part.selector == selector) return part.list + part.count;
  }
  return 0;
}

void CutMember(const CudaFrame& frame, const CudaWorkspace& workspace, int member,
               std::vector<CudaPart>* parts) {
  const Plan& plan = frame.plan(member);
  CudaSelector* const selector = workspace.SelectorOf(plan);
  CudaCodec* const codec = workspace.CodecOf(plan);
  const CudaSelectorTraits traits =
      selector == nullptr ? CudaSelectorTraits() : selector->traits(plan);
  const bool in_prompt = frame.state(member).prompt_tokens() < 0;
  const bool raw_gone = in_prompt && frame.state(member).stored() != nullptr;
  const size_t before = parts->size();
  if (in_prompt && traits.prompt_chunk > 0) {
    CutPrompt(frame, member, traits.prompt_chunk, parts);
  } else {
    CudaPart& part = parts->emplace_back();
    part.first = member;
    part.new_tokens = frame.member(member).new_tokens;
    part.selects = !in_prompt && (selector != nullptr || codec != nullptr);
    part.observes = in_prompt && traits.observer != nullptr;
  }
  for (size_t i = before; i < parts->size(); ++i) {
    CudaPart& part = (*parts)[i];
    if (!part.selects && !part.observes && !raw_gone) continue;
    if (part.selects) part.list = NextList(std::span(*parts).first(i), selector);
    part.plan = plan;
    part.selector = selector;
    part.codec = part.selects || raw_gone ? codec : nullptr;
    part.promotes = part.selects && !part.prompt && part.new_tokens == 1 &&
                    CudaHostPages::MayPromote(frame, member);
  }
}

// The last part becomes one with the part before it, if they attend alike.
void JoinLast(std::vector<CudaPart>* parts) {
  if (parts->size() < 2) return;
  const CudaPart& part = parts->back();
  CudaPart& before = (*parts)[parts->size() - 2];
  const bool alike = part.new_tokens == 1 && before.new_tokens == 1 && !part.prompt &&
                     !before.prompt && part.selects == before.selects &&
                     part.observes == before.observes && part.plan == before.plan;
  if (!alike) return;
  ++before.count;
  before.promotes |= part.promotes;
  parts->pop_back();
}

bool MayIdle(const CudaPart& part) {
  return part.selects && !part.prompt && part.selector != nullptr &&
         part.selector->traits(part.plan).idles_when_short;
}

// Whether all of the part's members are shorter than their min_tokens.
bool IsShort(const CudaFrame& frame, const CudaPart& part) {
  for (int i = part.first; i < part.first + part.count; ++i) {
    if (frame.member(i).view.tokens + 1 >= part.plan.min_tokens) return false;
  }
  return true;
}

}  // namespace

std::vector<CudaPart> CutParts(const CudaFrame& frame, const CudaWorkspace& workspace) {
  std::vector<CudaPart> parts;
  for (int i = 0; i < frame.members(); ++i) {
    CutMember(frame, workspace, i, &parts);
    JoinLast(&parts);
  }
  const bool idle = std::ranges::all_of(
      parts, [&frame](const CudaPart& part) { return !MayIdle(part) || IsShort(frame, part); });
  for (CudaPart& part : parts) part.idle = idle && MayIdle(part);
  return parts;
}

bool Decodes(const std::vector<CudaPart>& parts) {
  return std::ranges::all_of(parts, [](const CudaPart& part) {
    return part.new_tokens == 1 && !part.prompt && !part.observes;
  });
}

bool Serves(std::vector<CudaPart> captured, const std::vector<CudaPart>& parts) {
  for (size_t i = 0; i < captured.size() && i < parts.size(); ++i) {
    captured[i].promotes = captured[i].promotes && parts[i].promotes;
    captured[i].idle = captured[i].idle || parts[i].idle;
  }
  return captured == parts;
}

}  // namespace kvstrata
