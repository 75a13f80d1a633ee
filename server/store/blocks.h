// Values as an operator sees them: what memory and the tier below hold under a key
// (docs/disk_format.md, "Values"). Plain values.
#ifndef KVSTRATA_SERVER_STORE_BLOCKS_H_
#define KVSTRATA_SERVER_STORE_BLOCKS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "kernels/tier.h"

namespace kvstrata {

// kUnknown: on disk only, and its key and sizes do not say it.
enum class BlockKind : uint8_t { kUnknown, kPage, kIndex, kRecord, kPart, kPin };
std::string_view NameOf(BlockKind kind);

struct BlockInfo {
  std::string key;  // 32 bytes; of a pin's record its name
  BlockKind kind = BlockKind::kUnknown;
  std::string model;    // "": not known
  uint32_t tokens = 0;  // 0: not known
  uint64_t bytes = 0;   // of its buffers
  std::vector<Tier> tiers;
  bool pinned = false;
  bool changed = false;  // a series grew since the tier below was given it
};

inline constexpr uint64_t kNoMoreBlocks = ~uint64_t{0};

// A copy of a value.
struct BlockBytes {
  Tier from = Tier::kDevice;
  BlockKind kind = BlockKind::kUnknown;
  std::vector<std::vector<std::byte>> buffers;
  bool changed = false;  // a series grew since the tier below was offered it
};

struct BlockFilter {
  std::string model;  // "": all
  std::string tier;   // "device", "host", "disk"; "": all
};
struct BlockList {
  std::vector<BlockInfo> blocks;
  uint64_t next = 0;  // where the next list begins; 0: that was all
};

enum class BlockState : uint8_t {
  kSound,
  kCorrupt,
  kGone,
  kUnchecked,  // in memory only, which has no checksums
};
std::string_view NameOf(BlockState state);

struct BlockVerdict {
  BlockState state = BlockState::kGone;
  std::vector<Tier> tiers;
  std::string detail;
};

}  // namespace kvstrata

#endif  // KVSTRATA_SERVER_STORE_BLOCKS_H_
