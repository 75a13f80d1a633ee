// SPDX-License-Identifier: Apache-2.0
// Op pick_buckets on the GPU (contract: pick_buckets.h), with no host round trip.
//
// REQUIRES: all that it reads but q is written by a copy, or before the kernel that is enqueued
// before this one, or by op buckets: it is read while that kernel runs.
//
// One kernel: several CTAs a list score, and the last one to finish picks. The same input gives the
// same output. Sums in fp32: near-ties may fall otherwise than on the CPU, which sums in double.
// Cost: reads each bucket's mean once (2 * head_dim bytes a bucket and KV head), and in one CTA a
// list up to five times over the scores, which it keeps in shared memory up to 2560 buckets.
#pragma once

#include "kernels/plans/sentencekv/ops/pick_buckets/pick_buckets.h"

namespace kvstrata::cuda {

// cudaErrorInvalidValue for a shape that it does not take.
int PickBucketsCuda(const PickBucketsBatch& work, Stream stream);

}  // namespace kvstrata::cuda
