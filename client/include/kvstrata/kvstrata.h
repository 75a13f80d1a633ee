// SPDX-License-Identifier: Apache-2.0
/* kvstrata: the C ABI of the client library.
 *
 * Two libraries implement this header: libkvstrata.so (linked transport: the daemon's memory is
 * mapped into this process and the ops run here, no crossing per step) and libkvstrata_remote.so
 * (every call goes to the daemon over gRPC; for tools and tests). Both give the same bits.
 *
 * Conventions
 *   - Functions return a kvs_code; 0 is success. kvs_error_message() and kvs_error_reason()
 * describe the calling thread's last failure: the field, its value, what to do. A failed call
 * changes nothing.
 *   - Structs whose first member is `size` are extensible: set it to sizeof the struct.
 *   - Strings are UTF-8 and NUL-terminated. Tensors are host memory, or, where the daemon's pages
 * are a GPU's, its memory (host memory works there too: copied, for tools and tests). Nothing of
 * the host's is kept after a call.
 *   - Threads: a session may be used from many threads; one sequence, and one step, from one thread
 *     at a time. A child of fork() is refused with KVS_FAILED_PRECONDITION (FORKED): attach anew.
 *   - Every wait has a deadline (kvs_attach_options.timeout_ms): DEADLINE_EXCEEDED (DEADLINE). The
 *     session stays good. A sequence of which the daemon may have done what it did not answer (a
 *     truncation, a fork; remote a step's begin or end) is good for a close alone from then on
 *     (SEQUENCE_UNANSWERED). When the daemon dies, calls that ask it return KVS_UNAVAILABLE; what
 * is answered in this process (linked transport: append, attend, status, tokens, plan) goes on, on
 *     memory that stays mapped until kvs_detach.
 */
#ifndef KVSTRATA_H_
#define KVSTRATA_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVS_API __attribute__((visibility("default")))
#define KVS_ABI_VERSION 2

typedef enum kvs_code { /* gRPC's numbers */
                        KVS_OK = 0,
                        KVS_INVALID_ARGUMENT = 3,
                        KVS_DEADLINE_EXCEEDED = 4,
                        KVS_NOT_FOUND = 5,
                        KVS_ALREADY_EXISTS = 6,
                        KVS_PERMISSION_DENIED = 7,
                        KVS_RESOURCE_EXHAUSTED = 8,
                        KVS_FAILED_PRECONDITION = 9,
                        KVS_ABORTED = 10,
                        KVS_OUT_OF_RANGE = 11,
                        KVS_UNIMPLEMENTED = 12,
                        KVS_INTERNAL = 13,
                        KVS_UNAVAILABLE = 14,
                        KVS_DATA_LOSS = 15,
                        KVS_UNAUTHENTICATED = 16
} kvs_code;

typedef enum kvs_dtype { KVS_F32 = 1, KVS_F16 = 2, KVS_BF16 = 3 } kvs_dtype;

typedef struct kvs_session kvs_session;
typedef struct kvs_step kvs_step;
typedef uint64_t kvs_model;    /* never 0 */
typedef uint64_t kvs_sequence; /* never 0; unique in the daemon's life */

/* ---- library ---- */
KVS_API int kvs_abi_version(void);
KVS_API const char* kvs_version(void);       /* "1.2.3" */
KVS_API const char* kvs_transport(void);     /* "linked" or "remote" */
KVS_API const char* kvs_code_name(int code); /* "INVALID_ARGUMENT" */
KVS_API const char* kvs_error_message(void); /* this thread's last failure; "" if none */
KVS_API const char* kvs_error_reason(void);  /* stable, for programs: "PLAN_UNKNOWN" */

/* ---- session ---- */
typedef struct kvs_attach_options {
  size_t size;
  const char*
      device_uuid; /* whose pool this session's pages come from, and for GPUs which of them its
                      steps run on: as `kvstrata pool ls` names it; NULL: the daemon's first */
  const char* client_name; /* shown by `kvstrata session ls`; NULL: the program's name */
  const char* backend;     /* "ref", "simd", "cuda"; NULL: KVSTRATA_BACKEND, else the daemon's */
  uint32_t threads;    /* in the process's pool for ops; 0: all cores. The first session decides */
  uint32_t timeout_ms; /* for every wait; 0: 5000 */
} kvs_attach_options;

/* socket: the daemon's PATH; NULL: KVSTRATA_SOCKET, else the default path. The linked transport
 * dials PATH.attach beside it. options may be NULL. */
KVS_API int kvs_attach(const char* socket, const kvs_attach_options* options, kvs_session** out);
/* Closes all sequences, unmaps everything. Open steps end first. NULL is allowed. */
KVS_API void kvs_detach(kvs_session* session);
/* OK while the daemon lives and knows this session. */
KVS_API int kvs_ping(kvs_session* session);

/* ---- model ---- */
typedef struct kvs_model_desc {
  size_t size;
  const char* name;
  const char* digest;  /* names the weights; equal digests share prefixes. "session:..." is of one
                          session alone: its pages and the model go when that ends */
  const char* adapter; /* NULL: none */
  int32_t layers;      /* that kvstrata serves */
  int32_t query_heads, kv_heads;
  int32_t head_dim;               /* 64, 128 or 256 */
  int32_t page_tokens;            /* 16, 32 or 64 */
  int32_t dtype;                  /* kvs_dtype of the stored keys and values */
  int32_t keys_pre_rope;          /* 0: keys and queries come after rotary embedding; 1: before it,
                                     and attention rotates them (docs/plans.md) */
  int32_t rank, ranks;            /* tensor parallel; 0, 1 */
  const int32_t* boundary_tokens; /* token ids that end a sentence; may be NULL */
  size_t boundary_count;
  /* Rotary embedding of keys_pre_rope 1; else all 0 (MODEL_ROPE). Pair i of rope_dim / 2 is rotated
   * by position * rope_theta^(-2i / rope_dim). Part of the identity of pages: models that differ
   * here share none. Frequency scaling is not known: store scaled models' keys after it. */
  double rope_theta;        /* 1 to 1e12 */
  int32_t rope_dim;         /* channels that are rotated, the first of a head; 0: all */
  int32_t rope_interleaved; /* 0: pairs (i, i + rope_dim / 2); 1: pairs (2i, 2i + 1) */
  double scale; /* for a query's products with keys, before the softmax; 0: 1 / sqrt(head_dim) */
} kvs_model_desc;

/* Registering the same description again gives the same handle. */
KVS_API int kvs_model_register(kvs_session* session, const kvs_model_desc* desc, kvs_model* out);

/* ---- sequences ---- */
/* plan: "quest", "quest{budget = 1024}", "{selector = \"cascade\", ...}" (see docs), or a named
 * plan of the daemon's configuration. tokens [n]: the prompt, for prefix look-up and admission; may
 * be none. *held: leading tokens whose pages and index are there already, at most n - 1; the engine
 * continues from there. Errors: PLAN_*, MODEL_UNKNOWN, RESOURCE_EXHAUSTED (pool; nothing taken). */
KVS_API int kvs_sequence_open(kvs_session* session, kvs_model model, const char* plan,
                              const int32_t* tokens, size_t n, kvs_sequence* out, uint32_t* held);
typedef struct kvs_open_options {
  size_t size;
  uint32_t max_held; /* leading tokens to hold at most, rounded down to whole pages; 0: no limit */
  int32_t only_reported;   /* 1: hold no more than the series go that the plan needs (surprisal,
                              boundary); all of a prompt that its codec has packed already */
  uint32_t reserve_tokens; /* 0: none. Else pages and index blocks for so many tokens, prompt and
                              generated, are taken now or the open is refused (POOL_EXHAUSTED,
                              nothing taken): until it is truncated or closed the sequence grows to
                              them without POOL_EXHAUSTED. They count as its user's bytes, used or
                              not. Forks have none; a step on a page that is shared with one takes a
                              copy beyond it. At most 2^24 (SEQUENCE_TOO_LONG) */
  uint32_t private_pages;  /* 1: it finds nothing, and nothing of it is found: by opens, look-ups,
                              leases, pins, on disk, in a remote store; nor of its forks, reorders,
                              and what a truncation leaves. For keys and values that depend on what
                              the digest does not say. An older daemon refuses: VERSION_MISMATCH,
                              remote PRIVATE_PAGES */
  const char* key; /* for kvs_close_key and kvs_truncate_key; NULL or "": none. UTF-8, up to 63
                      bytes without control characters, unique among this user's live sequences
                      (KVS_ALREADY_EXISTS KEY_IN_USE names the session); a fork has none */
} kvs_open_options;
typedef struct kvs_opened {
  size_t size;
  kvs_sequence sequence;
  uint32_t held;             /* as of kvs_sequence_open */
  uint32_t indexed;          /* those with an index that is complete */
  uint32_t surprisal_tokens; /* leading tokens whose surprisal came with what is held; report it
                                from `held` on, or from held + 1: see kvs_report */
  uint32_t boundary_tokens;  /* the same of sentence ends */
} kvs_opened;
/* kvs_sequence_open with options (may be NULL), and more of what was found. */
KVS_API int kvs_sequence_open_with(kvs_session* session, kvs_model model, const char* plan,
                                   const int32_t* tokens, size_t n, const kvs_open_options* options,
                                   kvs_opened* out);
/* How much of a prompt is held, without opening it. */
typedef struct kvs_lookup_options {
  size_t size;
  const char* plan; /* as kvs_sequence_open takes it: the answer is what an open of it, without
                       options, would find now; NULL: raw pages, on whatever device */
  const char* device_uuid; /* with a plan: of the session that will open; NULL: this one's */
  uint32_t lease_ms; /* with a plan: how long what is answered stays held, up to 60000; 0: not */
  uint32_t reserved; /* 0 */
} kvs_lookup_options;
typedef struct kvs_lookup_result {
  size_t size;
  uint32_t held;          /* leading tokens, as of kvs_sequence_open; of raw pages at most n - 1 */
  uint32_t indexed;       /* those with an index of the plan that is complete */
  uint32_t device_tokens; /* the held ones by tier; they need not be consecutive */
  uint32_t host_tokens, disk_tokens;
  uint32_t reserved;
} kvs_lookup_result;
/* Without a lease it takes nothing, reads nothing from disk, promises nothing: pages may be evicted
 * before an open, and an open that finds no memory to copy what lies elsewhere holds less.
 *
 * With a lease the daemon opens the plan on what is held, for this session, and closes it when the
 * time is over (within 0.1 s) or the session ends: until then every session of this user that opens
 * the plan on these tokens holds at least that much. So what lies on disk, or on another device, is
 * read or copied first: the call takes as long as such an open, and `held` is what came of it. It
 * keeps the held memory from everyone else for its time, takes none beyond it but a table, counts
 * as one of the user's sequences until it is opened (then that sequence does, while it lives), and
 * `kvstrata seq ls` shows it. The same prompt and plan again
 * renew the lease (it ends at the later time) and hold what has come since. What is not held takes
 * no lease.
 *
 * options may be NULL. PLAN_*, DEVICE_UNKNOWN; of leases INVALID_ARGUMENT LEASE_TIME, LEASE_PLAN,
 * LEASE_DEVICE (not this session's: attach with it), RESOURCE_EXHAUSTED SEQUENCE_LIMIT. */
KVS_API int kvs_lookup(kvs_session* session, kvs_model model, const kvs_lookup_options* options,
                       const int32_t* tokens, size_t n, kvs_lookup_result* out);
/* What there is room for, for a scheduler that is about to open or grow. */
typedef struct kvs_room {
  uint64_t tokens; /* tokens of the model, with the plan's index beside them */
  uint64_t bytes;
} kvs_room;
typedef struct kvs_pool_capacity {
  kvs_room free;           /* at once */
  kvs_room after_eviction; /* with what nobody uses dropped, as an open does; free is part of it */
  kvs_room limit;          /* the user's own, which the others respect; UINT64_MAX: none */
} kvs_pool_capacity;
typedef struct kvs_capacity_result {
  size_t size;
  kvs_pool_capacity device, host; /* this session's device; a sequence may lie in both */
  uint32_t open_tokens; /* the longest prompt that an open would take, were nothing of it held: in
                           both pools, after eviction, less the pages that are kept ahead of it.
                           Of reserve_tokens all of after_eviction may be asked for */
  uint32_t reserved;
} kvs_capacity_result;
/* As things are: takes nothing, promises nothing, others may be faster. Rows in raw pages are
 * counted, whatever the plan's codec makes of them later. plan as kvs_sequence_open takes it.
 * PLAN_*, MODEL_UNKNOWN. Costs a message to the daemon. */
KVS_API int kvs_capacity(kvs_session* session, kvs_model model, const char* plan,
                         kvs_capacity_result* out);
/* A second sequence with the same content and plan; pages are shared, copied when written. In an
 * open step: with what was committed before. On a GPU this waits for the steps before and what the
 * open one's begin enqueued; SEQUENCE_BUSY in an open step of a prompt of selector bucket. */
KVS_API int kvs_sequence_fork(kvs_session* session, kvs_sequence sequence, kvs_sequence* out);
/* Takes back the tokens from position `tokens` on, which is at most those committed: drafts that a
 * verifier rejected, or what an engine resumes below. Reports of them are forgotten, and what the
 * plan had chosen by them it chooses anew; what was reserved ahead of them (kvs_open_options) goes
 * back. Not in an open step. TRUNCATE_TOKENS; FAILED_PRECONDITION TRUNCATE_PROMPT inside a prompt
 * that is complete (open a sequence with the tokens to keep: it is held for them), TRUNCATE_PACKED
 * where the plan's codec alone holds the rows. On a GPU this waits for the steps before. Costs a
 * message to the daemon; of the page that is cut a copy, if others may have it. */
KVS_API int kvs_sequence_truncate(kvs_session* session, kvs_sequence sequence, uint32_t tokens);
/* Beams: out[i] [n_parents] continues sequences[parents[i]]. The first that names a parent is the
 * parent itself, later ones are forks of it, and sequences that are nobody's parent are closed.
 * None may be in an open step. REORDER_PARENT, REORDER_REPEATED; errors of kvs_sequence_fork, and
 * then nothing has changed. */
KVS_API int kvs_sequences_reorder(kvs_session* session, const kvs_sequence* sequences, size_t n,
                                  const uint32_t* parents, size_t n_parents, kvs_sequence* out);
KVS_API int kvs_sequence_close(kvs_session* session, kvs_sequence sequence);
/* Closes the live sequence that was opened with this key, by whichever session of this user: a
 * scheduler's process ends what a worker's opened. At once, also in an open step: that goes on, on
 * memory that is kept until it ends, and then commits nothing of this sequence (of its others all).
 * From then on the owner's calls with the sequence answer KVS_NOT_FOUND (SEQUENCE_CLOSED,
 * SEQUENCE_UNKNOWN; of a batch, that member's code), but for those that this process answers
 * itself: the linked transport's tokens and plan. The owner's kvs_sequence_close answers it too,
 * and forgets the sequence here. The key is free when this returns. KVS_NOT_FOUND KEY_UNKNOWN. */
KVS_API int kvs_close_key(kvs_session* session, const char* key);
/* Has the live sequence that was opened with this key cut to `tokens`, by whichever session of this
 * user it was opened: as if its owner called kvs_sequence_truncate just before the next of these
 * calls with it: kvs_step_begin, fork, truncate, tokens, status, prefill_done, settle, page table,
 * inspect, build, recompress. This does not wait for that call; what goes is held until then. An
 * open step of the owner ends and is committed first, and is taken back with the rest. While ids of
 * the sequence are late (kvs_late_tokens) it waits for a call outside of a step that finds none
 * missing. Of several that wait the least counts; the owner's own truncate to as few is as good.
 * Refused as kvs_sequence_truncate, by what the daemon knows now. A linked owner's last commits may
 * be on their way to it, so that up to what the owner has pages for is not TRUNCATE_TOKENS; if it
 * has fewer tokens then, nothing is taken back. What cannot be done only later, because the owner
 * completed its prompt meanwhile, is the owner's error: its next call answers it, once, and the
 * wish is over.
 * KVS_NOT_FOUND KEY_UNKNOWN; TRUNCATE_*; SEQUENCE_IMPORTED. */
KVS_API int kvs_truncate_key(kvs_session* session, const char* key, uint32_t tokens);
/* Tokens committed. */
KVS_API int kvs_sequence_tokens(kvs_session* session, kvs_sequence sequence, uint32_t* tokens);
/* "ok", or what keeps the plan from doing what it is there for, and what it does instead: the texts
 * of docs/plans.md, "Status", joined by "; ". Copies at most `capacity` bytes, NUL-terminated. */
KVS_API int kvs_sequence_status(kvs_session* session, kvs_sequence sequence, char* text,
                                size_t capacity);
/* The plan with every option, in text form. */
KVS_API int kvs_sequence_plan(kvs_session* session, kvs_sequence sequence, char* text,
                              size_t capacity);
/* The prompt is complete: the plan selects, segments, compresses as it does after prefill. */
KVS_API int kvs_prefill_done(kvs_session* session, kvs_sequence sequence);
/* Series of positions [first, first + n), in order, in one call or several; any array may be NULL.
 * Nats. After a prefix hit they go on at `held`. Nothing that this engine computed predicts the
 * token at `held`: surprisal may begin at held + 1, and that token then counts 0 nats.
 * REPORT_ORDER names the position to go on at. */
KVS_API int kvs_report(kvs_session* session, kvs_sequence sequence, uint32_t first, uint32_t n,
                       const float* surprisal, const float* entropy, const uint8_t* boundary);
/* The engine computed positions [first, first + n) of what was held anew and compared: equal 1, or
 * 0: two models or ways to compute share a digest. Then it is an event (hit_mismatch), counted, and
 * the sequence is private from here on (kvs_open_options). Linked, nothing is waited for. */
KVS_API int kvs_report_verified(kvs_session* session, kvs_sequence sequence, uint32_t first,
                                uint32_t n, int32_t equal);
/* Waits until everything committed and reported so far is in force and published. */
KVS_API int kvs_settle(kvs_session* session, kvs_sequence sequence);

typedef struct kvs_build_result {
  size_t size;
  uint32_t indexed_tokens; /* leading tokens with a complete index of the plan */
  uint32_t built_blocks;   /* index blocks that the daemon made */
  uint32_t extents;        /* those that the plan's codec has now */
  uint32_t reserved;
} kvs_build_result;
/* Makes now what the first step would: what a plan keeps beside the committed tokens (index blocks,
 * buckets, extents). plan NULL: the sequence's own; another one's is kept beside the sequence, for
 * who opens that plan on these tokens. Of its own plan it also maps the index into this process,
 * even where nothing was left to be made. Waits for the daemon's workers. FAILED_PRECONDITION
 * BUILD_INPUT names what the plan needs and the sequence has not, BUILD_RUNNING: it is being built
 * for another plan; RESOURCE_EXHAUSTED WORK_QUEUE, POOL_EXHAUSTED; ABORTED WORK_CANCELLED. After
 * DEADLINE_EXCEEDED the work goes on: call again. out may be NULL. */
KVS_API int kvs_sequence_build(kvs_session* session, kvs_sequence sequence, const char* plan,
                               kvs_build_result* out);
/* Has workers recompress now what the plan's codec may, also after failures and a cancel, and waits
 * as kvs_settle does. FAILED_PRECONDITION RECOMPRESS_RAW of codec raw. */
KVS_API int kvs_sequence_recompress(kvs_session* session, kvs_sequence sequence);
/* Ends what workers have of the sequence. What they had not published leaves nothing behind, and
 * whoever waits for it is told ABORTED WORK_CANCELLED; it is due again with the next
 * kvs_sequence_recompress, commit or report. Also while another thread waits there. */
KVS_API int kvs_work_cancel(kvs_session* session, kvs_sequence sequence);
/* What a plan needs of the engine beside keys, values and queries. */
enum {
  KVS_NEEDS_TOKEN_IDS = 1,      /* true ids, at open and in every step: every plan */
  KVS_NEEDS_PREFILL_DONE = 2,   /* kvs_prefill_done */
  KVS_NEEDS_SURPRISAL = 4,      /* kvs_report, of the prompt */
  KVS_NEEDS_ENTROPY = 8,        /* kvs_report, of generated tokens */
  KVS_NEEDS_BOUNDARY = 16,      /* kvs_report, or the model's boundary_tokens */
  KVS_NEEDS_PROMPT_QUERIES = 32 /* kvs_attend of the prompt's last tokens */
};
/* plan: a text as kvs_sequence_open takes it. *needs: a sum of the above. text (may be NULL):
 * a line each, what becomes of the plan without it; copied as by kvs_sequence_status. PLAN_*. */
KVS_API int kvs_plan_needs(kvs_session* session, const char* plan, uint32_t* needs, char* text,
                           size_t capacity);

/* ---- a step ---- */
/* A strided tensor [tokens][heads][head_dim]; the last dimension is contiguous. */
typedef struct kvs_tensor {
  const void* data;
  int32_t dtype;        /* kvs_dtype */
  int32_t heads;        /* checked against the model */
  int32_t head_dim;     /* checked against the model */
  int32_t tokens;       /* checked against the step */
  int64_t token_stride; /* bytes; 0: contiguous */
  int64_t head_stride;  /* bytes; 0: contiguous */
} kvs_tensor;

typedef struct kvs_step_member {
  kvs_sequence sequence;
  const int32_t* tokens; /* ids of the new tokens; NULL: they come by kvs_late_tokens */
  uint32_t n;            /* >= 1 */
} kvs_step_member;

typedef struct kvs_step_options {
  size_t size;
  void* stream;      /* as in kvs_step_begin */
  uint32_t padding;  /* the last so many members fill a shape that a graph was captured with, and
                        nothing of them is kept. Each is a sequence of its own, opened for this, of
                        its neighbours' plan, its prompt complete if theirs is; `tokens`: NULL */
  uint32_t reserved; /* 0 */
} kvs_step_options;

/* One forward pass over a batch; prefill chunks and decode are the same call. Tables are fixed
 * until kvs_step_end. `stream`: the engine's CUDA stream (NULL: its default stream), on which all
 * of the step is enqueued and which is not being captured; on the CPU it must be NULL. One step of
 * a model is open on a stream at a time. All members must be of one model. codes (may be NULL) [n]:
 * per member, why it cannot run; if any cannot, the call fails with the first such code. */
KVS_API int kvs_step_begin(kvs_session* session, const kvs_step_member* members, size_t n,
                           void* stream, kvs_step** out, int32_t* codes);
/* The same; options NULL: none. Padding, late tokens: linked only (remote: UNIMPLEMENTED). */
KVS_API int kvs_step_begin_with(kvs_session* session, const kvs_step_member* members, size_t n,
                                const kvs_step_options* options, kvs_step** out, int32_t* codes);
/* Ids of tokens that a step had none of, for engines that begin a step before the ids of the last
 * one have come back from the GPU: members[i].tokens are those of its oldest n tokens without one.
 * After the kvs_step_end of their step, also while a later step is open. The daemon is told of a
 * step's tokens, and of those behind them, when all its ids are there: pages seal and are found
 * then. Until then kvs_settle, fork, truncate and work on the sequence answer
 * KVS_FAILED_PRECONDITION LATE_TOKENS, as does a step with ids of its own; what has no ids when the
 * sequence closes is not kept. A plan that takes sentence ends from token ids needs them at begin
 * (LATE_BOUNDARY). on_gpu: 1: `tokens` are the GPU's memory, written by now; costs a copy that is
 * waited for. All or nothing: KVS_INVALID_ARGUMENT LATE_TOKENS where a member lacks fewer. */
KVS_API int kvs_late_tokens(kvs_session* session, const kvs_step_member* members, size_t n,
                            int32_t on_gpu);
/* k, v [sum of new tokens][kv_heads][head_dim], packed in the order of the members. What is not
 * finite in the model's dtype is refused (TENSOR_NOT_FINITE): the layer has no rows then. Linked to
 * a GPU the sequence becomes private instead (kvs_open_options), before anybody finds its tokens.
 * Under capture k and v must hold what they hold until the layer's kvs_attend, it may read them. */
KVS_API int kvs_append(kvs_step* step, int32_t layer, const kvs_tensor* k, const kvs_tensor* v);
/* Fixes the layer's selection, which else kvs_attend does. REQUIRES the layer's append. */
KVS_API int kvs_select(kvs_step* step, int32_t layer, const kvs_tensor* q);
/* q as the model's keys are: with keys_pre_rope 1 before rotary embedding, here and in kvs_select.
 * out like q, any dtype; written. lse (may be NULL) [sum of new tokens][query_heads]: natural log
 * of the sum of exp of the scaled scores over what was attended. REQUIRES the layer's append. */
KVS_API int kvs_attend(kvs_step* step, int32_t layer, const kvs_tensor* q, const kvs_tensor* out,
                       float* lse);
/* On a GPU the calls above may be captured, all layers between a begin and its end, into a CUDA
 * graph of the caller's. Later steps of the same shape (as many members with the same plans,
 * prompts complete or not, as many new tokens each; tensors at the same addresses) call this
 * instead and launch the graph on the stream before kvs_step_end: lengths, page tables and
 * selections are read on the GPU. GRAPH_STALE (FAILED_PRECONDITION): nothing of this shape was
 * captured, memory had to grow since, or a member that selects has pages in the host's memory now
 * and had none; make the calls, or capture anew. */
KVS_API int kvs_step_replay(kvs_step* step);
/* Commits the new tokens; frees the step, also on error. Every layer must have been appended. On a
 * GPU it returns while `stream`, which must come behind all of the step, still works: the daemon
 * learns of the tokens afterwards, at the sequence's next call. */
KVS_API int kvs_step_end(kvs_step* step, void* stream);
/* Ends a step without committing. NULL is allowed. */
KVS_API void kvs_step_abort(kvs_step* step);

/* ---- imported mode: an engine that keeps its keys and values in paged tensors of its own ----
 * The daemon copies blocks that are full ("sealed") into its pages, where they are found by other
 * sequences' opens, indexed, recompressed and stored as all are; it only reads the engine's
 * tensors. Order: kvs_tensors_register for every layer, kvs_sequence_open, kvs_blocks_load of what
 * is held, kvs_blocks_seal as blocks fill. A sequence of such a model runs no steps:
 * kvs_step_begin, kvs_sequence_fork and kvs_attend are for sessions that own their pages
 * (SEQUENCE_IMPORTED). kvs_report takes positions that are acknowledged; kvs_prefill_done comes
 * after what was sealed before it; kvs_settle waits for all copies. Remote: UNIMPLEMENTED. */
typedef enum kvs_memory_kind {
  KVS_MEMORY_MEMFD = 1,    /* sealed with F_SEAL_SHRINK */
  KVS_MEMORY_CUDA_FD = 2,  /* POSIX descriptor of cuMemCreate's memory; bytes: its exact size */
  KVS_MEMORY_CUDA_IPC = 3, /* cudaIpcMemHandle_t of cudaMalloc's memory, of the daemon's own user */
  KVS_MEMORY_PROCESS = 4   /* this process's own memory, which the daemon cannot read: the library
                              copies blocks when they are sealed, and they are the engine's again at
                              once; of a tensor `address` and strides count alone. Not with a GPU */
} kvs_memory_kind;

typedef struct kvs_memory_handle {
  size_t size;
  int32_t kind;    /* kvs_memory_kind */
  int32_t fd;      /* MEMFD, CUDA_FD; stays the caller's, and may be closed after the call */
  uint8_t ipc[64]; /* CUDA_IPC */
  uint64_t bytes;  /* size of the whole memory */
} kvs_memory_handle;

/* The keys or the values of one layer, [block][slot][head][dim] by strides, all in bytes. One
 * tensor with both ([2][block]..., [block][2]...) is described twice: one handle, two offsets. */
typedef struct kvs_block_tensor {
  size_t size;
  const kvs_memory_handle* memory;
  uint64_t offset;      /* where (block 0, slot 0, head 0) is in the memory */
  void* address;        /* the same element in this process, for kvs_blocks_load; NULL: never */
  int32_t dtype;        /* kvs_dtype; the model's */
  int32_t blocks;       /* ids are 0 .. blocks - 1 */
  int32_t block_tokens; /* a multiple or a divisor of the model's page_tokens */
  int32_t heads;        /* the model's kv_heads */
  int32_t head_dim;     /* the model's */
  int64_t block_stride, slot_stride, head_stride;
  int64_t dim_stride; /* for PROCESS; 0, and all that others may have: contiguous */
} kvs_block_tensor;

/* Once a layer; all layers with the same block_tokens. A memory that several tensors lie in is
 * opened once; it is let go when the session ends. TENSOR_* name the field that cannot be. */
KVS_API int kvs_tensors_register(kvs_session* session, kvs_model model, int32_t layer,
                                 const kvs_block_tensor* keys, const kvs_block_tensor* values);
/* Positions [first, first + n_tokens) lie in these blocks, in order; first is a multiple of
 * block_tokens and n_tokens is n_blocks * block_tokens. They hold all layers now (on a GPU: what
 * wrote them is done) and the engine writes them no more until they are acknowledged. Returns at
 * once, the copy is made later. What was sealed or held before may be sealed again, and is left
 * out: BLOCKS_TOKENS if its tokens are others; a gap is BLOCKS_OUT_OF_ORDER. IMPORT_QUEUE
 * (RESOURCE_EXHAUSTED): too many wait. Of KVS_MEMORY_PROCESS it takes a copy first, and waits for
 * the daemon where 64 MiB of them are on their way. When an earlier copy failed, or found a block
 * that is not finite (TENSOR_NOT_FINITE), this says why, once; what is not acknowledged then is not
 * sealed any more. */
KVS_API int kvs_blocks_seal(kvs_session* session, kvs_sequence sequence, uint32_t first,
                            const int32_t* blocks, size_t n_blocks, const int32_t* tokens,
                            size_t n_tokens);
/* *tokens: leading tokens that are copied, held ones included; their blocks are the engine's again.
 * Returns at once; kvs_settle waits. An earlier copy's failure as in kvs_blocks_seal. */
KVS_API int kvs_blocks_acknowledged(kvs_session* session, kvs_sequence sequence, uint32_t* tokens);
/* Fills the engine's blocks with positions [first, first + n_blocks * block_tokens), which are
 * acknowledged or held; first is a multiple of block_tokens. Tokens beyond those are not written.
 * On a GPU the copies are enqueued on `stream`, and the pages kept until it has passed them; else
 * stream is NULL. TENSOR_ADDRESS: a layer has none; PAGE_GONE: a codec alone holds the rows. */
KVS_API int kvs_blocks_load(kvs_session* session, kvs_sequence sequence, uint32_t first,
                            const int32_t* blocks, size_t n_blocks, void* stream);

/* ---- what was selected (after kvs_select or kvs_attend of a layer, until the next) ---- */
enum { KVS_TOKENS = 0, KVS_UNITS = 1 };
/* Groups of heads that share a list: 1, kv_heads or query_heads. */
KVS_API int kvs_selection_groups(kvs_step* step, uint32_t member, uint32_t* groups);
/* Ascending positions (KVS_TOKENS, always-on included) or ids of chosen units (KVS_UNITS).
 * *n: how many there are; at most `capacity` are written. */
KVS_API int kvs_selection(kvs_step* step, uint32_t member, uint32_t group, int what, int32_t* out,
                          size_t capacity, size_t* n);

/* What the last kvs_attend of a layer read for one member, all heads: rows at full resolution and
 * bytes of them in whatever form they are stored, coarse rows, and what selecting read (summaries,
 * keys). A row that several queries of a KV head attend counts once. */
typedef struct kvs_cost {
  size_t size;
  uint64_t rows;         /* (position, KV head) pairs attended one by one */
  uint64_t coarse_rows;  /* (unit, KV head) pairs attended as one row, or rows by some bits */
  uint64_t attend_bytes; /* bytes of both */
  uint64_t select_bytes; /* bytes of this step's selection; 0 when an earlier one was reused */
} kvs_cost;
KVS_API int kvs_attend_cost(kvs_step* step, uint32_t member, kvs_cost* out);

/* ---- page tables and intermediate arrays ---- */
/* Where a sequence's pages are: for tools and engines that attend themselves. Linked transport only
 * (remote: UNIMPLEMENTED). The address is valid until the sequence is closed or its table changes.
 */
typedef struct kvs_page {
  const void* address; /* NULL: its rows were released, the plan's codec holds them */
  uint32_t tier;       /* 0 device, 1 host */
  uint32_t flags;      /* 1 shared, 2 sealed, 4 absent */
} kvs_page;
KVS_API int kvs_page_table(kvs_session* session, kvs_sequence sequence, kvs_page* out,
                           size_t capacity, size_t* n, uint64_t* version);

enum { KVS_ARRAY_F32 = 1, KVS_ARRAY_U16 = 2, KVS_ARRAY_I32 = 3, KVS_ARRAY_U8 = 4 };
typedef struct kvs_array {
  int32_t type;
  int32_t dims;
  int64_t shape[4];
  void* data; /* free with kvs_array_free */
  size_t bytes;
} kvs_array;
/* Intermediate arrays by the names of tests/golden/README.md without the plan's prefix, such as
 * "page_vectors_bf16" or "selections". NOT_FOUND lists the names there are. */
KVS_API int kvs_inspect(kvs_session* session, kvs_sequence sequence, const char* name,
                        kvs_array* out);
KVS_API void kvs_array_free(kvs_array* array);

#ifdef __cplusplus
}
#endif

#endif /* KVSTRATA_H_ */
