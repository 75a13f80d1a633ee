// SPDX-License-Identifier: Apache-2.0
#ifndef KVSTRATA_BLOCK_ATTENTION_H_
#define KVSTRATA_BLOCK_ATTENTION_H_

#include <stddef.h>
#include <stdint.h>

#include "kvstrata.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Attention over an engine's own blocks: no daemon, no session. A part of libkvstrata's C ABI.
 *
 * Decode steps of an engine that keeps its keys and values in blocks on a GPU attend by a plan, in
 * its own graphs. Order: kvs_block_attention_index_bytes, which an engine adds to its blocks; open;
 * bind; then each step begin, outside of graphs, and attend for each layer, captured or not. What a
 * captured attend does depends on `rows` alone: a graph of so many serves later steps of at most as
 * many. Calls of one handle are of one stream, or ordered by it, and one at a time. Plans that
 * need a state by sequence are refused (BLOCK_PLAN). */
typedef struct kvs_block_attention kvs_block_attention;

/* Token t of KV head h of a block lies at layer + block * block_stride + h * head_stride +
 * t * slot_stride, its value value_offset further, the block's index index_offset behind its
 * beginning: bytes, multiples of 16. */
typedef struct kvs_block_shape {
  size_t size;
  int32_t layers, query_heads, kv_heads;
  int32_t head_dim;     /* 64, 128 or 256 */
  int32_t dtype;        /* KVS_BF16 or KVS_F16, of queries and outputs, too */
  int32_t block_tokens; /* 16, 32, 64 or 128 */
  double scale;         /* for a query's products with keys; 0: 1 / sqrt(head_dim) */
  int64_t block_stride, head_stride, slot_stride, value_offset, index_offset;
  int32_t max_rows;    /* sequences of a step */
  int32_t max_decodes; /* those that attend by the plan: the first ones */
  int32_t max_tokens;  /* tokens of a sequence */
  int32_t reserved;
} kvs_block_shape;

typedef struct kvs_block_needs {
  size_t size;
  uint64_t workspace_bytes; /* GPU memory that bind takes */
  int32_t unit_tokens;      /* that the index keeps together; 0: the plan has none */
  int32_t min_tokens;       /* shorter sequences attend everything */
} kvs_block_needs;

/* A step's sequences: those that decode and those of which a prompt is computed. Device memory. */
typedef struct kvs_block_batch {
  size_t size;
  const int32_t* blocks;       /* [rows][blocks_of_row], ids in order of position */
  int64_t blocks_of_row;       /* from a row's first id to the next row's */
  const int32_t* tokens;       /* [rows], with the step's own */
  const int32_t* query_starts; /* [rows + 1]: where each row's own begin among the step's */
  const uint8_t* in_full;      /* [rows], or NULL: rows that attend all, as a prompt's last token */
  int32_t rows;
  int32_t new_tokens; /* most new tokens of a row; 0: none of them completes a unit of the index */
  int32_t sampled;    /* for audit: 1 + a row that decodes; 0: none */
  int32_t reserved;
} kvs_block_batch;

/* Bytes that a plan adds to each block of a layer, 0 without an index. The strides and the limits
 * of the shape are not looked at. Needs no GPU. */
KVS_API int kvs_block_attention_index_bytes(const char* plan, const kvs_block_shape* shape,
                                            int64_t* bytes);
/* On the current device. UNAVAILABLE CUDA_LIBRARY, CUDA_NO_DEVICE; INVALID_ARGUMENT BLOCK_SHAPE. */
KVS_API int kvs_block_attention_open(const char* plan, const kvs_block_shape* shape,
                                     kvs_block_attention** out, kvs_block_needs* needs);
/* layers: where each layer's first key lies. workspace: all zero, the engine's until close. */
KVS_API int kvs_block_attention_bind(kvs_block_attention* attention, const uint64_t* layers,
                                     size_t n, void* workspace);
KVS_API int kvs_block_attention_begin(kvs_block_attention* attention, const kvs_block_batch* batch,
                                      void* stream);
/* The first `rows` rows of the step, at most max_decodes: q, out [rows][query_heads][head_dim], out
 * contiguous. q_stride: bytes from a row's queries to the next's; it and q are multiples of 16.
 * INVALID_ARGUMENT BLOCK_QUERIES. */
KVS_API int kvs_block_attention_attend(kvs_block_attention* attention, int32_t layer, const void* q,
                                       int64_t q_stride, void* out, int32_t rows, void* stream);
/* What the plan loses in a layer of the row that begin sampled; after the step's attends, before
 * the next begin. outputs [2][query_heads][head_dim], lse [2][query_heads]: the plan's, then full
 * attention's; device memory or page-locked memory of the host, outputs a multiple of 16. The plan
 * attended exp(lse[0] - lse[1]) of a head's mass. It reads all keys and values of the row.
 * FAILED_PRECONDITION BLOCK_SAMPLE. */
KVS_API int kvs_block_attention_audit(kvs_block_attention* attention, int32_t layer, float* outputs,
                                      float* lse, void* stream);
/* Full blocks whose rows came otherwise than by steps: device [n] ids. Between steps. */
KVS_API int kvs_block_attention_index(kvs_block_attention* attention, const int32_t* blocks,
                                      size_t n, void* stream);
/* NULL is allowed. What it enqueued may still run: its memory is the engine's. */
KVS_API void kvs_block_attention_close(kvs_block_attention* attention);

#ifdef __cplusplus
}
#endif

#endif /* KVSTRATA_BLOCK_ATTENTION_H_ */
