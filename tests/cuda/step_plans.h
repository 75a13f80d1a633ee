// SPDX-License-Identifier: Apache-2.0
// Plans of the tests of CudaStep, small enough that sequences of some hundred tokens select.
#pragma once

namespace kvstrata::cuda {

inline constexpr const char* kWindow = "window{n_sink = 4, n_recent = 60, min_tokens = 150}";
inline constexpr const char* kQuest = "quest{budget = 64, n_dense_layers = 1, min_tokens = 150}";
inline constexpr const char* kQuestSoftmax =
    "quest{page = 32, n_sink = 4, n_recent = 64, group = \"softmax\", budget = 96, min_tokens = 0}";
inline constexpr const char* kQuestDeviation =
    "quest{score = \"deviation\", page = 8, budget = 64, n_dense_layers = 1, min_tokens = 150}";
inline constexpr const char* kQuestDeviationSoftmax =
    "quest{score = \"deviation\", group = \"softmax\", n_sink = 4, n_recent = 40, budget = 64, "
    "min_tokens = 0}";
inline constexpr const char* kChess =
    "chess{page = 16, pages_per_chunk = 2, chunks_per_grid = 3, window = 2, rho = [0.7, 0.6, 0.6], "
    "trigger = \"every\", every = 1, min_tokens = 150, n_dense_layers = 1}";
inline constexpr const char* kChessAlways =
    "chess{page = 32, pages_per_chunk = 1, chunks_per_grid = 2, sinks = 0, window = 1, "
    "rho = [0.6, 0.6, 0.9], trigger = \"always\", min_tokens = 0}";
inline constexpr const char* kChessEntropy =
    "chess{page = 8, pages_per_chunk = 3, chunks_per_grid = 2, sinks = 2, window = 1, "
    "rho = [0.8, 0.8, 0.5], thresholds = [1.0, 0.35], combine = \"or\", min_tokens = 0}";
// Half of all pairs of random queries count as alike.
inline constexpr const char* kTokens =
    "tokenselect{k = 64, n_init = 4, n_local = 20, theta = 0, chunk = 48, min_tokens = 150}";
inline constexpr const char* kSentences =
    "sentencekv{tau = 48, r = 1.5, n_obs = 20, start = 5, recent = 12, max_length = 17, "
    "min_tokens = 150}";
// Dense layers; pools of nothing; sentences that end by their length.
inline constexpr const char* kLongSentences =
    "sentencekv{tau = 40, n_obs = 40, start = 0, recent = 1, pool = 1, max_length = 30, "
    "n_dense_layers = 1, min_tokens = 0}";
// All of the prompt is kept.
inline constexpr const char* kAllSentences =
    "sentencekv{tau = 64, r = 9, start = 33, recent = 20, max_length = 9, min_tokens = 0}";
inline constexpr const char* kSpans =
    "sekv{max_loss = 1, alpha = 1, l_min = 2, r_max = 8, d_route = 16, local = 30, rows_share = "
    "0.6, "
    "min_tokens = 0}";
inline constexpr const char* kLongSpans =
    "sekv{max_loss = 1, alpha = 2, r_max = 40, d_route = 64, local = 20, rows = 0, min_tokens = 0, "
    "n_dense_layers = 1}";
inline constexpr const char* kBits =
    "bits{unit = 32, sinks = 4, recent = 40, budget = 48, min_tokens = 150}";
// Groups that are no multiple of 64, the unit of op vote; dense layers; all of it in full at first.
inline constexpr const char* kThreeBits =
    "bits{bits = 3, unit = 96, sinks = 7, recent = 96, budget = 30, n_dense_layers = 1, "
    "min_tokens "
    "= "
    "0}";
inline constexpr const char* kFourBits =
    "bits{bits = 4, unit = 64, sinks = 0, recent = 65, budget = 40, min_tokens = 0}";
inline constexpr const char* kRuns =
    "bits{unit = 32, sinks = 4, recent = 40, budget = 48, run = 8, min_tokens = 150}";
// Lists as long as that takes.
inline constexpr const char* kMissed =
    "bits{unit = 32, sinks = 4, recent = 40, max_missed = 0.1, min_tokens = 150}";
inline constexpr const char* kMissedLimited =
    "bits{unit = 64, sinks = 0, recent = 65, max_missed = 0.01, budget = 70, min_tokens = 0}";
inline constexpr const char* kMissedRuns =
    "bits{unit = 32, sinks = 0, recent = 33, max_missed = 0.1, run = 4, min_tokens = 0}";
inline constexpr const char* kPlans[] = {"full",
                                         kWindow,
                                         kQuest,
                                         "quest{budget = 70, min_tokens = 0}",
                                         kQuestSoftmax,
                                         kChess,
                                         kChessAlways,
                                         kChessEntropy,
                                         kTokens,
                                         kSentences,
                                         kLongSentences,
                                         kAllSentences,
                                         kBits,
                                         kThreeBits,
                                         kFourBits,
                                         kMissed,
                                         kMissedLimited,
                                         kQuestDeviation,
                                         kQuestDeviationSoftmax,
                                         kRuns,
                                         kMissedRuns};
// Codec packed. Lengths are multiples of a block: where a short one is chosen, the CPU may choose
// one more.
inline constexpr const char* kMosaic =
    "mosaickv{max_loss = 1, segment = 128, buffer = 16, share = 0.3, close_loss = 60, min_tokens = "
    "150}";
inline constexpr const char* kMosaicDense =
    "mosaickv{max_loss = 1, segment = 64, buffer = 32, share = 0.2, block = 4, neighbours = 2, "
    "keep = 24, "
    "truncate = false, n_dense_layers = 1, min_tokens = 0}";
// Random rows lose more than max_loss by d/4: more elements are kept, of the prompt and of flushes.
inline constexpr const char* kMilder =
    "mosaickv{truncate = false, segment = 128, buffer = 16, share = 0.3, close_loss = 60, "
    "min_tokens = 150}";
inline constexpr const char* kFullPacked =
    "full{codec = \"packed\", max_loss = 1, segment = 128, buffer = 16, close_loss = 60, "
    "min_tokens = 150}";
// Codec planes. Weights are seldom near limits that are high: what is decided there shows.
inline constexpr const char* kPlanes =
    "strata{fine_above = 8, sample = 2, sinks = 5, recent = 20, min_tokens = 150}";
inline constexpr const char* kFourBitPlanes =
    "strata{keep = 4, fine_above = 8, skip_below = 0, sample = 1, sinks = 0, recent = 1, "
    "n_dense_layers = 1, min_tokens = 0}";
// Lower planes in the host's memory: with copies of as many rows as may be fine, of few, of none.
inline constexpr const char* kHostPlanes =
    "strata{lower = \"host\", hot = 32, fine_above = 8, sample = 2, sinks = 5, recent = 20, "
    "min_tokens = 150}";
inline constexpr const char* kFewHotPlanes =
    "strata{lower = \"host\", hot = 4, keep = 4, fine_above = 8, skip_below = 0, sample = 1, "
    "sinks = 0, recent = 1, n_dense_layers = 1, min_tokens = 0}";
inline constexpr const char* kColdPlanes =
    "strata{lower = \"host\", hot = 0, recent = 4096, min_tokens = 0}";
// Lower planes may come later.
inline constexpr const char* kUpperPlanes =
    "strata{fine_above = 8, sample = 2, sinks = 5, recent = 20, min_tokens = 150, keep_raw = "
    "\"no\", open_on = \"upper\"}";
inline constexpr const char* kUpperFourBitPlanes =
    "strata{keep = 4, fine_above = 8, skip_below = 0, sample = 1, n_dense_layers = 1, min_tokens = "
    "0, keep_raw = \"no\", open_on = \"upper\"}";
inline constexpr const char* kUpperHostPlanes =
    "strata{lower = \"host\", hot = 32, fine_above = 8, sample = 2, sinks = 5, recent = 20, "
    "min_tokens = 150, keep_raw = \"no\", open_on = \"upper\"}";
// By a share of the tokens. A near-tie's two tokens weigh the same, so either makes the output.
inline constexpr const char* kSharePlanes =
    "strata{share = 0.3, sinks = 5, recent = 20, min_tokens = 150}";
inline constexpr const char* kHostSharePlanes =
    "strata{lower = \"host\", hot = 32, keep = 4, share = 0.1, skip_below = 0, sinks = 0, recent = "
    "1, n_dense_layers = 1, min_tokens = 0}";
// Everything by all planes.
inline constexpr const char* kFinePlanes = "strata{recent = 4096, min_tokens = 0}";

}  // namespace kvstrata::cuda
