#include "server/rpc/block_messages.h"

namespace kvstrata {

Status CheckBlockKey(const std::string& key) {
  if (key.size() == 32 || (key.starts_with("pin/") && key.size() == 20)) return OkStatus();
  return InvalidArgument("BLOCK_KEY", "a key of " + std::to_string(key.size()) +
                                          " bytes; allowed: 32, or pin/ and 16 digits");
}

Status CheckFilter(const v1::ListBlocksRequest& request) {
  const std::string& tier = request.tier();
  if (!tier.empty() && tier != "device" && tier != "host" && tier != "disk") {
    return InvalidArgument("BLOCK_FILTER", "tier '" + tier + "'; allowed: device, host, disk");
  }
  if (request.limit() <= kMaxBlocks) return OkStatus();
  return InvalidArgument("BLOCK_FILTER", "limit " + std::to_string(request.limit()) +
                                             "; allowed: 1 .. " + std::to_string(kMaxBlocks));
}

void Write(const BlockInfo& block, v1::Block* out) {
  out->set_key(block.key);
  out->set_kind(std::string(NameOf(block.kind)));
  out->set_model(block.model);
  out->set_tokens(block.tokens);
  out->set_bytes(block.bytes);
  for (const Tier tier : block.tiers) out->add_tiers(std::string(NameOf(tier)));
  out->set_pinned(block.pinned);
}

void Write(const std::string& key, const BlockVerdict& verdict, v1::BlockVerdict* out) {
  out->set_key(key);
  out->set_verdict(std::string(NameOf(verdict.state)));
  for (const Tier tier : verdict.tiers) out->add_tiers(std::string(NameOf(tier)));
  out->set_detail(verdict.detail);
}

}  // namespace kvstrata
