// Values of memory and disk as messages, and the way back. Pure functions.
#ifndef KVSTRATA_SERVER_RPC_BLOCK_MESSAGES_H_
#define KVSTRATA_SERVER_RPC_BLOCK_MESSAGES_H_

#include <string>

#include "base/status.h"
#include "kvstrata/v1/admin.pb.h"
#include "server/store/blocks.h"

namespace kvstrata {

inline constexpr uint32_t kMaxBlocks = 4096;  // of one list
inline constexpr int kMaxVerified = 64;       // keys of one call

// INVALID_ARGUMENT BLOCK_KEY: neither 32 bytes nor the name of a pin's record.
Status CheckBlockKey(const std::string& key);
// INVALID_ARGUMENT BLOCK_FILTER.
Status CheckFilter(const v1::ListBlocksRequest& request);

void Write(const BlockInfo& block, v1::Block* out);
void Write(const std::string& key, const BlockVerdict& verdict, v1::BlockVerdict* out);

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_RPC_BLOCK_MESSAGES_H_
