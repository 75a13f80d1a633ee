// SPDX-License-Identifier: Apache-2.0
#include "server/store/prompt_values.h"

#include <optional>

#include "server/store/books/sequence.h"
#include "server/store/prompts/held_prefix.h"
#include "server/store/store.h"

namespace kvstrata {

Result<PromptValues> ValuesOfPrompt(Store* store, std::string_view tenant, uint64_t model,
                                    std::span<const int32_t> tokens, std::string_view plan) {
  KVS_RETURN_IF_ERROR(CheckLength("tokens", tokens.size()));
  KVS_ASSIGN_OR_RETURN(const PageOwner owner, store->lookups().OwnerOf(tenant, model));
  PromptValues out{owner.tenant, owner.page_tokens, {}};
  const std::vector<PageKey> pages = owner.chain.Pages(PageKey{}, tokens);
  IndexLayout index;
  if (!plan.empty()) {
    KVS_ASSIGN_OR_RETURN(const Plan named, store->plans().ResolvePlan(plan));
    KVS_ASSIGN_OR_RETURN(const Plan resolved, store->plans().PlanFor(named, owner.geometry));
    KVS_ASSIGN_OR_RETURN(const std::optional<CodecState> codec,
                         store->plans().NewCodec(resolved, owner.geometry, Files::kRead));
    if (codec) {
      const PageKey artefact =
          KeysOf(owner.chain, owner.page_tokens, resolved, &codec->parameters_digest, tokens)
              .artefact;
      out.keys.push_back({artefact, artefact, false});
    }
    index = IndexOf(resolved, owner.geometry);
  }
  const PrefixShape shape(pages.size(), owner.page_tokens, index);
  for (size_t i = 0; i < pages.size(); ++i) {
    const PageKey& place = pages[GroupBegin(i)];
    out.keys.push_back({pages[i], place, true});
    if (shape.block_pages == 0 || (i + 1) % shape.block_pages != 0) continue;
    out.keys.push_back({IndexBlockKey(pages[i], index), place, false});
  }
  return out;
}

}  // namespace kvstrata
