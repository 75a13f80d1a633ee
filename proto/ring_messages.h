// SPDX-License-Identifier: Apache-2.0
// What travels through a session's rings (docs/shm_layout.md).
//
// Requests go client to daemon; a request with an id gets exactly one reply with that id, an event
// (id 0) gets none. All structs are PODs; arrays follow their struct without padding. Strings are
// UTF-8, NUL-terminated inside their array.
#pragma once

#include <cstdint>

namespace kvstrata::shm {

enum MessageType : uint32_t {
  kPad = 0,
  // Requests with a reply.
  kPing = 1,
  kRegisterModel = 2,  // RegisterModel -> ModelReply
  kOpenSequence = 3,   // OpenSequence, plan text, token ids -> SequenceReply, canonical plan text
  kForkSequence = 4,   // SequenceRef -> SequenceReply
  kCloseSequence = 5,  // SequenceRef -> ErrorReply
  kGrow = 6,           // Grow -> ErrorReply; the new table is published before the reply
  kSettle = 7,         // SequenceRef -> ErrorReply, when what earlier events made due is done;
                       // replies to later requests may come first
  kLookup = 8,         // Lookup, plan text, token ids -> LookupReply, canonical plan text
  kDetach = 9,         // none -> ErrorReply; the client has unmapped the arenas
  kRegisterTensors = 10,  // RegisterTensors -> ErrorReply; its descriptors were sent before
  kSealBlocks = 11,       // SealBlocks, i32 block ids, i32 token ids -> ErrorReply; copied later
  kAcknowledged = 12,     // SequenceRef -> AcknowledgedReply
  kPlanText = 13,         // PlanText, plan text -> canonical plan text
  kBuild = 16,            // Build, plan text -> BuildReply, when it is done, as kSettle
  kRecompress = 17,       // SequenceRef -> ErrorReply, when nothing is due any more, as kSettle
  kCancelWork = 18,       // SequenceRef -> CancelWorkReply
  kTruncate = 19,         // Truncate, i32 token ids -> ErrorReply
  kCloseKey = 20,         // SequenceKey -> ErrorReply
  kCapacity = 23,         // Capacity, plan text -> CapacityReply
  kTruncateKey = 24,      // TruncateKey -> ErrorReply, when the owner will find it
  // Events.
  kCommit = 32,       // Commit, token ids
  kReport = 33,       // Report, f32 surprisal[n], f32 entropy[n], u8 boundary[n] as flags say
  kPrefillDone = 34,  // SequenceRef
  kRecall = 35,       // Recall, i32 layers[n], f32 recall[n][heads], f32 error[n][heads]
  kVerified = 36,     // Verified
  // Replies.
  kReply = 64,  // ErrorReply, then the payload if code is 0
};

struct RegisterModel {
  char name[64];
  char digest[80];   // names the weights; identity, compared byte by byte
  char layout[32];   // free text of the engine that is part of the page's identity
  char adapter[64];  // LoRA and the like; "" none
  int32_t layers, query_heads, kv_heads, head_dim, page_tokens;
  int32_t dtype;           // DType
  int32_t keys_pre_rope;   // 0 post_rope, 1 pre_rope; then the rotary parameters below
  int32_t rank, ranks;     // tensor parallel
  int32_t boundary_count;  // token ids that follow, int32
  int32_t rope_dim;        // channels that are rotated; 0: the whole head
  int32_t rope_interleaved;
  double rope_theta;
  double scale;  // for a query's products with keys; 0: 1 / sqrt(head_dim)
};
static_assert(sizeof(RegisterModel) == 240 + 64);

struct ModelReply {
  uint64_t model;
};

struct OpenSequence {
  uint64_t model;
  uint32_t plan_bytes;  // bytes of the plan text, padded with NULs to 4
  uint32_t tokens;      // token ids that follow it, int32; the known prompt, may be 0
  enum Flags : uint32_t {
    kOnlyReported = 1,  // no more of a prefix than the plan's series were stored with
    kPrivate = 2,       // finds nothing, and nothing of it is found
  };
  uint32_t max_held_tokens;  // tokens of a prefix; 0: no limit
  uint32_t flags;
  uint32_t reserve_tokens;  // to take pages for, the prompt among them; 0: for the prompt
  uint32_t reserved;
  char key[64];  // by which other sessions of the user may close it; "" none
};
static_assert(sizeof(OpenSequence) == 96);

struct PlanText {
  uint32_t plan_bytes;  // bytes of the plan text that follows, padded with NULs to 4
  uint32_t reserved;
};

struct SequenceRef {
  uint64_t sequence;
};

// A sequence of any session of the user.
struct SequenceKey {
  char key[64];
};

struct TruncateKey {
  uint32_t tokens;  // that are left
  uint32_t reserved;
  char key[64];
};
static_assert(sizeof(TruncateKey) == 72);

struct SequenceReply {
  uint64_t sequence;
  uint32_t slot;              // in TableHeader::slots
  uint32_t held_tokens;       // leading tokens already held, pages and index
  uint32_t indexed_tokens;    // up to here the index blocks are valid
  uint32_t plan_bytes;        // bytes of the canonical plan text that follows
  uint32_t surprisal_tokens;  // leading tokens whose surprisal was stored with held pages
  uint32_t boundary_bytes;    // a byte a leading token, 1: it ends a sentence; behind the plan
  uint32_t boundary_tokens;   // leading tokens of which it is known whether they end one
  uint32_t reserved;
};
static_assert(sizeof(SequenceReply) == 40);

struct Grow {
  uint64_t sequence;
  uint32_t tokens;    // the table must cover this many ...
  uint32_t writable;  // ... and pages and index blocks must be private from this position on
  uint32_t index_writable;
  uint32_t reserved;
};

struct Commit {
  uint64_t sequence;
  uint32_t first;           // position of the first new token
  uint32_t tokens;          // token ids that follow, int32
  uint32_t indexed_tokens;  // index rows valid up to here
  // From these tokens on, of which there may be none, the sequence is as if opened with kPrivate;
  // what was found of it before stays. Once said it holds for all that follows.
  enum Flags : uint32_t { kPrivate = 1 };
  uint32_t flags;
};

// The tokens from `tokens` on are taken back.
struct Truncate {
  uint64_t sequence;
  uint32_t tokens;  // that are left
  uint32_t tail;    // token ids that follow, int32: those behind the last whole page that is left
};
static_assert(sizeof(Truncate) == 16);

struct Report {
  enum Flags : uint32_t { kSurprisal = 1, kEntropy = 2, kBoundary = 4 };
  uint64_t sequence;
  uint32_t first;
  uint32_t n;
  uint32_t flags;
  uint32_t reserved;
};

// What one sampled decode step answers to a RecallRequest (shm_layout.h).
struct Recall {
  enum Flags : uint32_t {  // nothing was measured, because
    kRawGone = 1,          // raw pages were released
    kCaptured = 2,         // the layers were captured in, or replayed from, a graph of the engine's
  };
  uint64_t sequence;
  uint32_t audit;     // RecallRequest::audit
  uint32_t position;  // position of the decode token
  uint32_t layers;    // measured, ascending
  uint32_t heads;     // query heads; 0 with a flag
  uint32_t flags;
  uint32_t dropped;  // sampled steps of this audit so far whose event found no room
};
static_assert(sizeof(Recall) == 32);

// Positions of what was held that the engine computed anew and compared.
struct Verified {
  uint64_t sequence;
  uint32_t first;
  uint32_t n;
  uint32_t equal;  // 1: to what it was held for; 0: then the sequence is private from now on
  uint32_t reserved;
};
static_assert(sizeof(Verified) == 24);

// How much of a prompt is held: of an open of that plan, or of raw pages.
struct Lookup {
  uint64_t model;
  uint32_t plan_bytes;  // bytes of the plan text, padded with NULs to 4; 0: raw pages of any device
  uint32_t tokens;      // token ids that follow it, int32
  char device_uuid[64];  // with a plan: of the session that will open; "" this one's
  uint32_t lease_ms;     // with a plan: how long what is answered stays held; 0: not at all
  uint32_t reserved;
};
static_assert(sizeof(Lookup) == 88);

struct LookupReply {
  uint32_t held_tokens;
  uint32_t indexed_tokens;  // those with a complete index of the plan
  uint32_t device_tokens;   // the held ones by tier; they need not be consecutive
  uint32_t host_tokens;
  uint32_t disk_tokens;
  uint32_t plan_bytes;  // bytes of the canonical plan text that follows; 0: raw pages
};
static_assert(sizeof(LookupReply) == 24);

// How much of a model there is room for now.
struct Capacity {
  uint64_t model;
  uint32_t plan_bytes;  // bytes of the plan text that follows, padded with NULs to 4
  uint32_t reserved;
};
static_assert(sizeof(Capacity) == 16);

struct Room {
  uint64_t tokens, bytes;  // 2^64 - 1: there is no such limit
};

struct PoolCapacity {
  Room free;            // at once
  Room after_eviction;  // with what nobody uses dropped; `free` is a part of it
  Room limit;           // what the user's own limit leaves for more arenas
};

struct CapacityReply {
  PoolCapacity device, host;
  uint32_t open_tokens;  // the longest prompt that could be opened, nothing of it held
  uint32_t reserved;
};
static_assert(sizeof(CapacityReply) == 104);

// The keys or the values of one layer in memory that an engine lends: element (block, slot, head)
// begins at offset + block * block_stride + slot * slot_stride + head * head_stride.
struct BlockTensor {
  enum Kind : uint32_t { kMemfd = 1, kCudaFd = 2, kCudaIpc = 3 };
  uint32_t kind;         // kind of the memory
  uint32_t descriptor;   // kMemfd, kCudaFd: Descriptor::number
  uint8_t ipc[64];       // kCudaIpc: the driver's handle
  uint64_t bytes;        // size of the whole memory
  uint64_t offset;       // bytes
  int64_t block_stride;  // bytes, as the next two
  int64_t slot_stride;
  int64_t head_stride;
  int32_t dtype;  // DType
  int32_t blocks, block_tokens, heads, head_dim;
  int32_t reserved;
};
static_assert(sizeof(BlockTensor) == 136);

struct RegisterTensors {
  uint64_t model;
  int32_t layer;
  int32_t reserved;
  BlockTensor keys, values;
};
static_assert(sizeof(RegisterTensors) == 288);

// Blocks of an imported sequence that the engine writes no more, until they are acknowledged.
struct SealBlocks {
  uint64_t sequence;
  uint32_t first;   // position of the first token
  uint32_t blocks;  // ids that follow, int32
  uint32_t tokens;  // token ids that follow them, int32: blocks times the tensors' block_tokens
  uint32_t reserved;
};
static_assert(sizeof(SealBlocks) == 24);

struct AcknowledgedReply {
  uint32_t tokens;  // leading ones that are copied: their blocks are the engine's again
  uint32_t reserved;
};

struct Build {
  uint64_t sequence;
  uint32_t plan_bytes;  // bytes of plan text that follow, padded with NULs to 4; 0: its own plan
  uint32_t reserved;
};
static_assert(sizeof(Build) == 16);

struct BuildReply {
  uint32_t indexed_tokens;  // leading ones whose index blocks are complete
  uint32_t built_blocks;    // index blocks that were made
  uint32_t extents;         // those that the plan's codec has now
  uint32_t own;             // 1: of the sequence's own plan, whatever the request called it
};
static_assert(sizeof(BuildReply) == 16);

struct CancelWorkReply {
  uint32_t was_running;  // 1: else it was queued or due, or nothing was there
  uint32_t reserved;
};

struct ErrorReply {
  int32_t code;  // kvstrata::Code
  uint32_t payload_bytes;
  char reason[48];
  char message[456];
};
static_assert(sizeof(ErrorReply) == 512);

}  // namespace kvstrata::shm
