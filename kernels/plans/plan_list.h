// SPDX-License-Identifier: Apache-2.0
// The plans and the codecs of the product, a line each. Enumerators, names, members of Plan and the
// tables of CPUs and GPUs are made from these lines; all else about one stands in its folder, under
// names that are made from its line, too:
//
//     PLAN(quest, MinMax, minmax, ALWAYS)      preset `quest`, which is selector `minmax`
//         SelectorKind::kMinMax                  plan/plan_kinds.h
//         MinMaxOptions Plan::minmax             its options: plans/quest/minmax_options.h
//         const Preset kMinMaxPreset             what its texts say: plan/plan_axes.h
//         const SelectorRow kMinMaxSelector      the CPU's half: select/selector_rows.h
//         const CudaSelectorRow kCudaMinMax      the GPU's half:
//         step/gpu/frame/cuda_selector_rows.h
//     CODEC(Packed, packed, MOSAICKV)          codec `packed`, unless KVS_PLAN_MOSAICKV is OFF
//         CodecKind::kPacked, PackedOptions Plan::packed, const OptionTable kPackedTable,
//         const Codec kPackedCodec (codec/codec.h), const CudaCodecRow kCudaPacked
//
// A new line comes last: files hold the numbers of kinds. Selector `full` and codec `raw`, which
// every build has and which have no options, come before the first line.
#pragma once

#include "kernels/plan/built_plans.h"
#include "kernels/plans/bits/bits_options.h"
#include "kernels/plans/chess/cascade_options.h"
#include "kernels/plans/mosaickv/block_options.h"
#include "kernels/plans/mosaickv/packed_options.h"
#include "kernels/plans/quest/minmax_options.h"
#include "kernels/plans/sekv/lowrank_options.h"
#include "kernels/plans/sekv/zoom_options.h"
#include "kernels/plans/sentencekv/bucket_options.h"
#include "kernels/plans/strata/planes_options.h"
#include "kernels/plans/tokenselect/vote_options.h"
#include "kernels/plans/window/window_options.h"

#define KVS_PLANS(PLAN)                    \
  PLAN(window, Window, window, ALWAYS)     \
  PLAN(quest, MinMax, minmax, ALWAYS)      \
  PLAN(chess, Cascade, cascade, ALWAYS)    \
  PLAN(tokenselect, Vote, vote, ALWAYS)    \
  PLAN(sentencekv, Bucket, bucket, ALWAYS) \
  PLAN(sekv, Zoom, zoom, SEKV)             \
  PLAN(mosaickv, Block, block, MOSAICKV)   \
  PLAN(bits, Bits, bits, ALWAYS)           \
  PLAN(strata, Fine, fine, ALWAYS)

#define KVS_CODECS(CODEC)         \
  CODEC(LowRank, lowrank, SEKV)   \
  CODEC(Packed, packed, MOSAICKV) \
  CODEC(Planes, planes, ALWAYS)
