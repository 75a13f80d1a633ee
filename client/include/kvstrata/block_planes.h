// SPDX-License-Identifier: Apache-2.0
#ifndef KVSTRATA_BLOCK_PLANES_H_
#define KVSTRATA_BLOCK_PLANES_H_

#include <stddef.h>
#include <stdint.h>

#include "kvstrata.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Plan `strata` over an engine's own blocks: no daemon, no session. A part of libkvstrata's C ABI.
 *
 * The engine's blocks hold no rows: a block of a layer is the sealed groups of its tokens, for each
 * KV head (docs/spec/planes.md), half of what bf16 takes. Rows of tokens whose group is not full
 * yet lie in a slot of the request's, in the workspace. Order: kvs_block_planes_form, by which the
 * engine makes its blocks; open; bind, with lower = "host" bind_lower, too; then each step begin,
 * outside of graphs, and for each layer decode, captured or not, and behind it prompt for each row
 * that is of a prompt. What a captured decode does depends on `rows`, and on whether the last begin
 * had prompts: a graph of so many rows serves later steps of at most as many, a graph of a step
 * without prompts only such steps. Binding again makes graphs stale. Calls of one handle are of one
 * stream, or ordered by it, and one at a time; what is in a batch's arrays is read in that order.
 *
 * An engine may find a prefix whose blocks another row of the same step fills. What reads them is
 * called behind what fills them: prompts in ascending order of `before`. Where a prompt's only
 * token is among the rows that decode, decode is called once more behind the prompts: it may be
 * repeated.
 *
 * A request goes on in one slot: tokens behind the last full block are the slot's. No two rows of a
 * step have the same. What it takes over from others is whole blocks. Nobody has to be told when a
 * block or a slot is given to another request, and neither has to be zero.
 *
 * With lower = "host" decode writes to blocks that are sealed, too: copies of what it has fetched.
 * Who moves a block does so in the stream's order, all of its block_stride bytes and its lower
 * runs. Who fills one otherwise zeroes the 128 bytes in front of each KV head's copies. */
typedef struct kvs_block_planes kvs_block_planes;

/* A block lies at layer + id * block_stride: bytes, a multiple of 32, here and in bind. In it lie
 * the upper runs of all KV heads, then their lower runs or, with lower = "host", copies of some of
 * their lower rows. */
typedef struct kvs_planes_shape {
  size_t size;
  int32_t layers, query_heads, kv_heads;
  int32_t head_dim;     /* 64 or 128 */
  int32_t dtype;        /* KVS_BF16 or KVS_F16, of queries, keys, values and outputs */
  int32_t block_tokens; /* the plan's unit: 64 */
  double scale;         /* for a query's products with keys; 0: 1 / sqrt(head_dim) */
  int64_t block_stride;
  int32_t slots;      /* requests that may be under way */
  int32_t max_rows;   /* sequences of a step */
  int32_t max_tokens; /* tokens of a sequence */
  int32_t reserved;
} kvs_planes_shape;

typedef struct kvs_planes_form {
  size_t size;
  /* A block's, for each KV head and token. With head_dim 128: 268; with lower = "host" 102, of
   * which 26 are copies that the GPU keeps (hot = 8). */
  int64_t token_bytes;
  uint64_t slot_bytes;      /* the newest rows of a request, in the workspace */
  uint64_t workspace_bytes; /* GPU memory that bind takes, slots included */
  /* Bytes of host memory beside token_bytes: 192 with head_dim 128 and lower = "host", which has
   * to be followed by bind_lower; 0: there are none. */
  int64_t lower_token_bytes;
} kvs_planes_form;

/* A step's sequences: first those that decode, of one new token each, then those of which a prompt
 * is computed. Device memory. */
typedef struct kvs_planes_batch {
  size_t size;
  const int32_t* blocks;       /* [rows][blocks_of_row], ids in order of position */
  int64_t blocks_of_row;       /* from a row's first id to the next row's */
  const int32_t* tokens;       /* [rows], with the step's own */
  const int32_t* query_starts; /* [rows + 1]: where each row's own begin among the step's */
  const int32_t* slots;        /* [rows]: whose newest rows lie where; below 0: a row that pads */
  const uint8_t* in_full;      /* [rows], or NULL: decoding rows that attend all of it finely */
  int32_t rows;
  int32_t decodes; /* rows in front, that decode is called for */
} kvs_planes_batch;

/* Rows of tokens: element c of head h of row i at data + i * stride + h * head_dim + c elements.
 * Device memory; data and stride (in bytes) multiples of 16. */
typedef struct kvs_planes_rows {
  void* data;
  int64_t stride;
} kvs_planes_rows;

/* By shape's geometry alone, but that workspace_bytes needs slots, max_rows and max_tokens; strides
 * are not looked at. With all three 0 no GPU is looked for, and workspace_bytes is 0, as without a
 * GPU. UNIMPLEMENTED BLOCK_PLAN: not strata, or options that the ops do not take. */
KVS_API int kvs_block_planes_form(const char* plan, const kvs_planes_shape* shape,
                                  kvs_planes_form* form);
/* On the current device. UNAVAILABLE CUDA_LIBRARY, CUDA_NO_DEVICE; INVALID_ARGUMENT BLOCK_SHAPE. */
KVS_API int kvs_block_planes_open(const char* plan, const kvs_planes_shape* shape,
                                  kvs_block_planes** out);
/* layers: where each layer's first block lies. workspace: GPU memory, all zero, aligned to 256, the
 * engine's until close. */
KVS_API int kvs_block_planes_bind(kvs_block_planes* planes, const uint64_t* layers, size_t n,
                                  void* workspace);
/* With lower = "host", before begin. layers: where the lower runs of each layer's first block lie,
 * a multiple of 32; those of block `id` are 64 * kv_heads * lower_token_bytes * id behind. Memory
 * that the GPU reads and writes at this address until the stream is behind the last call: the
 * host's, registered with CUDA (cudaHostRegister), or the GPU's own. Without: FAILED_PRECONDITION
 * BLOCK_UNBOUND of what follows. INVALID_ARGUMENT BLOCK_LAYERS, also where the plan has lower runs
 * in blocks. */
KVS_API int kvs_block_planes_bind_lower(kvs_block_planes* planes, const uint64_t* layers, size_t n);
KVS_API int kvs_block_planes_begin(kvs_block_planes* planes, const kvs_planes_batch* batch,
                                   void* stream);
/* The first `rows` rows: their new keys and values [rows][kv_heads] join their slots, q
 * [rows][query_heads] attends, out [rows][query_heads][head_dim] is contiguous. Behind it groups
 * that are full now are sealed into their blocks, those of all layers with the last layer at the
 * latest. INVALID_ARGUMENT BLOCK_QUERIES, BLOCK_ROWS. */
KVS_API int kvs_block_planes_decode(kvs_block_planes* planes, int32_t layer, kvs_planes_rows q,
                                    kvs_planes_rows k, kvs_planes_rows v, void* out, int32_t rows,
                                    void* stream);
/* Row `row` of the step, a prompt's: `before` tokens of it were there, k and v [count][kv_heads]
 * are the next ones. Writes all rows of the sequence, [before + count][kv_heads][head_dim], to
 * all_k and all_v (contiguous; what is sealed is widened), for the engine's own attention, and
 * seals what is full. `before` and `count` are as begin's device arrays have them. Errors as
 * decode. */
KVS_API int kvs_block_planes_prompt(kvs_block_planes* planes, int32_t layer, int32_t row,
                                    int32_t before, int32_t count, kvs_planes_rows k,
                                    kvs_planes_rows v, void* all_k, void* all_v, void* stream);
/* NULL is allowed. What it enqueued may still run: its memory is the engine's. */
KVS_API void kvs_block_planes_close(kvs_block_planes* planes);

#ifdef __cplusplus
}
#endif

#endif /* KVSTRATA_BLOCK_PLANES_H_ */
