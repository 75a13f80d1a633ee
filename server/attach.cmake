# SPDX-License-Identifier: Apache-2.0
# The attach server and the rings of its sessions.
kvs_library(kvs_attach
  attach/peers/attach_tokens.cc
  attach/peers/descriptor_passing.cc
  attach/peers/peer.cc
  attach/ring/answer_box.cc
  attach/ring/reply_ring.cc
  attach/ring/ring_handlers.cc
  attach/ring/ring_lookup.cc
  attach/ring/ring_quantum.cc
  attach/ring/ring_sequences.cc
  attach/ring/ring_session.cc
  attach/ring/ring_work.cc
  attach/attach_server.cc
  attach/connection_ends.cc
  attach/fair_queue.cc
  attach/handshake.cc
  LIBS kvs_telemetry kvs_sockets kvs_store kvs_kernels kvs_shm kvs_base Threads::Threads)
