// SPDX-License-Identifier: Apache-2.0
#include "client/cli/replay_session.h"

#include <unistd.h>

#include <random>

namespace kvstrata::cli {

Status FromAbi(int code) {
  if (code == KVS_OK) return OkStatus();
  return {static_cast<Code>(code), kvs_error_reason(), kvs_error_message()};
}

Result<ReplaySession> ReplaySession::Attach(const std::string& socket,
                                            std::chrono::milliseconds timeout, const Trace& trace,
                                            size_t layers, bool keep) {
  kvs_attach_options attach{};
  attach.size = sizeof(attach);
  attach.client_name = "kvstrata replay";
  attach.timeout_ms = static_cast<uint32_t>(timeout.count());
  kvs_session* session = nullptr;
  KVS_RETURN_IF_ERROR(FromAbi(kvs_attach(socket.c_str(), &attach, &session)));
  ReplaySession out(session);
  KVS_RETURN_IF_ERROR(out.Register(trace.shape(), layers, keep));
  return out;
}

// A digest of its own per session: pages of one replay are never taken for another's, or for a
// model's.
Status ReplaySession::Register(const TraceShape& shape, size_t layers, bool keep) {
  std::random_device random;
  const std::string digest = std::string(keep ? "" : "session:") +
                             "replay:" + std::to_string(getpid()) + ":" + std::to_string(random()) +
                             ":" + std::to_string(random());
  const std::string name = "replay";
  kvs_model_desc desc{};
  desc.size = sizeof(desc);
  desc.name = name.c_str();
  desc.digest = digest.c_str();
  desc.layers = static_cast<int32_t>(layers);
  desc.query_heads = shape.query_heads;
  desc.kv_heads = shape.kv_heads;
  desc.head_dim = shape.head_dim;
  desc.page_tokens = shape.page_tokens;
  desc.dtype = KVS_BF16;
  desc.keys_pre_rope = shape.rotary.dim > 0 ? 1 : 0;
  desc.rope_theta = shape.rotary.theta;
  desc.rope_dim = shape.rotary.dim;
  desc.rope_interleaved = shape.rotary.interleaved ? 1 : 0;
  desc.ranks = 1;
  return FromAbi(kvs_model_register(session_.get(), &desc, &model_));
}

}  // namespace kvstrata::cli
