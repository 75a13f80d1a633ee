// SPDX-License-Identifier: Apache-2.0
#include "kernels/plans/mosaickv/cuda_packer.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <random>
#include <utility>

#include "base/check.h"
#include "base/sync.h"
#include "kernels/codec/device_extents.h"
#include "kernels/codec/head_loop.h"
#include "kernels/cuda/device_buffer.h"
#include "kernels/plans/mosaickv/ops/packed_cuda_ops.h"
#include "kernels/plans/mosaickv/packed_places.h"

namespace kvstrata {
namespace {

using Clock = std::chrono::steady_clock;
using cuda::CovarianceItem;
using cuda::EigenItem;
using cuda::HeadRows;
using cuda::PackLoss;
using cuda::RotatePackItem;

// Keys or values of this many (layer, KV head)s have their eigenvectors found at a time: about a
// CTA on each SM, and 84 MB of scratch with 64K tokens of head dim 128.
constexpr int64_t kGroup = 128;
constexpr std::chrono::seconds kAfterShortage{10};
constexpr uint64_t kSpareBytes = uint64_t{32} << 20;  // that extents leave for the next ones

uint64_t AddressOf(const void* at) { return reinterpret_cast<uint64_t>(at); }

// Arrays one after the other, in memory that comes when all are known.
class Arrays {
 public:
  template <typename T>
  uint64_t Add(int64_t count) {
    constexpr uint64_t kAlign = 256;
    const uint64_t at = bytes_;
    bytes_ += (static_cast<uint64_t>(count) * sizeof(T) + kAlign - 1) / kAlign * kAlign;
    return at;
  }
  uint64_t bytes() const { return bytes_; }

 private:
  uint64_t bytes_ = 0;
};

// The covered pages of a run, and the run as positions among them.
struct PagesOfRun {
  std::span<std::byte* const> pages;
  Run run;

  static PagesOfRun Of(const RecompressInput& input, const Geometry& g, Run tokens) {
    const int32_t before = tokens.begin / g.page_tokens * g.page_tokens;
    return {PagesOf(input.view.pages, g.page_tokens, tokens),
            {tokens.begin - before, tokens.end - before}};
  }
  HeadRows Rows(uint64_t table, int64_t offset) const {
    return {table, offset, run.begin, run.end};
  }
};

class CudaPacker final : public SegmentPacker {
 public:
  CudaPacker(const cuda::CudaOps& ops, int device, cuda::Stream stream)
      : ops_(ops),
        device_(device),
        stream_(stream),
        extents_(std::make_shared<DeviceExtents>(ops, kSpareBytes)) {}
  ~CudaPacker() override {
    (void)ops_.use_device(device_);
    (void)ops_.destroy_stream(stream_);
  }

  bool Packs(const RecompressInput& input, const Geometry& g, const Plan& plan,
             Run tokens) const override KVS_EXCLUDES(mu_);
  Result<SegmentPlans> FindPlans(const RecompressInput& input, const Geometry& g, const Plan& plan,
                                 Run tokens) const override KVS_EXCLUDES(mu_);
  Result<PackedBytes> PackRange(const RecompressInput& input, const Geometry& g, const Plan& plan,
                                const SegmentPlans& plans, const PackedRange& range,
                                std::span<const double> recent) const override KVS_EXCLUDES(mu_);
  Result<PackedBytes> Join(const Geometry& g, std::span<const PackedExtent> extents) const override
      KVS_EXCLUDES(mu_);

 private:
  // A head's plan in a segment's memory, in floats.
  struct PlanMemory {
    int64_t square, per_head;
    float* base;
    float* R(int64_t item) const {  // each head's: for keys, then for values
      return base + item / 2 * per_head + item % 2 * square;
    }
    float* Eigenvalues(int64_t head) const { return base + head * per_head + 2 * square; }
  };

  Status Begin(const RecompressInput& input) const;
  Status Check(int code, const char* what) const { return CudaStatus(ops_, code, what); }
  const cuda::PackedOps& packed_ops() const { return OpsOf<cuda::PackedOps>(ops_.packed); }
  // Remembers where memory was short.
  template <typename T>
  Result<T> Noting(Result<T> result) const KVS_REQUIRES(mu_);
  Result<std::shared_ptr<std::byte>> Allocate(uint64_t bytes) const;
  template <typename T>
  Status Upload(uint64_t to, std::span<const T> values) const {
    return Check(
        ops_.copy_async(reinterpret_cast<void*>(to), values.data(), values.size_bytes(), stream_),
        "copying to the GPU");
  }
  static cuda::HeadRowShape ShapeOf(const Geometry& g) {
    return {g.head_dim, g.page_tokens, PageLayout::Of(g).slot_stride, g.dtype};
  }
  // Number `item` is keys, then values, of each (layer, KV head).
  static int64_t OffsetOf(const Geometry& g, int64_t item) {
    const PageLayout layout = PageLayout::Of(g);
    const auto layer = static_cast<int>(item / 2 / g.kv_heads);
    const auto head = static_cast<int>(item / 2 % g.kv_heads);
    return item % 2 == 0 ? layout.KeyOffset(layer, head, 0) : layout.ValueOffset(layer, head, 0);
  }

  Result<SegmentPlans> FindPlansLocked(const RecompressInput& input, const Geometry& g,
                                       const Plan& plan, Run tokens) const KVS_REQUIRES(mu_);
  // Finds the rotations of items [first, first + count).
  Status FindRotations(const Geometry& g, const PagesOfRun& rows, int64_t first, int64_t count,
                       const PlanMemory& plans) const KVS_REQUIRES(mu_);
  Result<PackedBytes> PackRangeLocked(const RecompressInput& input, const Geometry& g,
                                      const Plan& plan, const SegmentPlans& plans,
                                      const PackedRange& range,
                                      std::span<const double> recent) const KVS_REQUIRES(mu_);
  Result<PackedBytes> JoinLocked(const Geometry& g, std::span<const PackedExtent> extents) const
      KVS_REQUIRES(mu_);
  static PackedBytes Described(const PackedPlaces& places, std::shared_ptr<std::byte> extent);
  Status CopyRotations(const SegmentPlans& plans, const PackedPlaces& places, uint64_t dim,
                       std::byte* extent) const;
  // What the rows have lost, mean over heads, keys and values. Waits for all that was enqueued: of
  // a flush for the first time, since a GPU that is shared with an engine's process is changed over
  // to this one, and back, for each wait.
  Result<double> PackRows(const Geometry& g, const Plan& plan, const SegmentPlans& plans,
                          const PagesOfRun& rows, const PackedPlaces& places,
                          std::byte* extent) const KVS_REQUIRES(mu_);

  const cuda::CudaOps& ops_;
  const int device_;
  const cuda::Stream stream_;
  const std::shared_ptr<DeviceExtents> extents_;  // for flushes
  mutable Mutex mu_;
  mutable DeviceBuffer scratch_ KVS_GUARDED_BY(mu_);
  mutable PageLockedBuffer staging_ KVS_GUARDED_BY(mu_);  // for PackRows, laid out as its scratch
  mutable Clock::time_point short_until_ KVS_GUARDED_BY(mu_){};
};

bool CudaPacker::Packs(const RecompressInput& input, const Geometry& g, const Plan& plan,
                       Run tokens) const {
  const bool shape = (g.dtype == DType::kBF16 || g.dtype == DType::kF16) &&
                     (g.head_dim == 64 || g.head_dim == 128 || g.head_dim == 256) &&
                     int64_t{2} * g.layers * g.kv_heads <= 65535;
  const bool block = plan.packed.block == 4 || plan.packed.block == 8 || plan.packed.block == 16;
  // Its kernel sums losses over kPackChunkRows rows, too many to hold max_loss against.
  if (plan.packed.search || plan.stored.max_loss < 1 || !shape || !block) return false;
  {
    MutexLock lock(mu_);
    if (Clock::now() < short_until_) return false;
  }
  return LieOnDevice(ops_, PagesOf(input.view.pages, g.page_tokens, tokens));
}

Status CudaPacker::Begin(const RecompressInput& input) const {
  if (input.cancelled != nullptr && input.cancelled->load(std::memory_order_relaxed)) {
    return {Code::kAborted, "CANCELLED", "recompression was cancelled; nothing has changed"};
  }
  return Check(ops_.use_device(device_), "making the GPU current");
}

template <typename T>
Result<T> CudaPacker::Noting(Result<T> result) const {
  if (!result.ok() && result.status().code() == Code::kResourceExhausted) {
    short_until_ = Clock::now() + kAfterShortage;
  }
  return result;
}

Result<std::shared_ptr<std::byte>> CudaPacker::Allocate(uint64_t bytes) const {
  auto buffer = std::make_shared<DeviceBuffer>();
  KVS_RETURN_IF_ERROR(buffer->Reserve(ops_, bytes));
  return std::shared_ptr<std::byte>(buffer, buffer->as<std::byte>());
}

Result<SegmentPlans> CudaPacker::FindPlans(const RecompressInput& input, const Geometry& g,
                                           const Plan& plan, Run tokens) const {
  KVS_RETURN_IF_ERROR(CheckRawRows(input, g, tokens));
  MutexLock lock(mu_);
  return Noting(FindPlansLocked(input, g, plan, tokens));
}

Result<SegmentPlans> CudaPacker::FindPlansLocked(const RecompressInput& input, const Geometry& g,
                                                 const Plan& plan, Run tokens) const {
  KVS_RETURN_IF_ERROR(Begin(input));
  const PagesOfRun rows = PagesOfRun::Of(input, g, tokens);
  const int64_t heads = HeadCount(g), square = int64_t{g.head_dim} * g.head_dim;
  const int64_t per_head = 2 * square + g.head_dim;
  KVS_ASSIGN_OR_RETURN(const std::shared_ptr<std::byte> memory,
                       Allocate(static_cast<uint64_t>(heads * per_head) * sizeof(float)));
  const PlanMemory at = {square, per_head, reinterpret_cast<float*>(memory.get())};
  for (int64_t first = 0; first < 2 * heads; first += kGroup) {
    KVS_RETURN_IF_ERROR(Begin(input));
    KVS_RETURN_IF_ERROR(FindRotations(g, rows, first, std::min(kGroup, 2 * heads - first), at));
  }
  SegmentPlans plans;
  plans.device_storage = memory;
  for (int64_t h = 0; h < heads; ++h) {
    plans.heads.push_back(
        {at.R(2 * h), at.R(2 * h + 1), at.Eigenvalues(h), FixedStrategy(plan.packed, g.head_dim)});
  }
  return plans;
}

Status CudaPacker::FindRotations(const Geometry& g, const PagesOfRun& rows, int64_t first,
                                 int64_t count, const PlanMemory& plans) const {
  cuda::CovarianceBatch sums;
  sums.shape = ShapeOf(g);
  sums.count = static_cast<int32_t>(count);
  sums.rows_max = rows.run.end - rows.run.begin;
  cuda::EigenBatch eigen;
  eigen.dim = g.head_dim;
  eigen.count = sums.count;
  Arrays arrays;
  const uint64_t pages = arrays.Add<uint64_t>(static_cast<int64_t>(rows.pages.size()));
  const uint64_t sum_items = arrays.Add<CovarianceItem>(count);
  const uint64_t eigen_items = arrays.Add<EigenItem>(count);
  const uint64_t counters = arrays.Add<uint32_t>(count);
  const uint64_t matrices = arrays.Add<double>(count * plans.square);
  const uint64_t values = arrays.Add<float>(count * g.head_dim);
  const uint64_t partial = arrays.Add<std::byte>(packed_ops().covariance_workspace_bytes(sums));
  const uint64_t rotating = arrays.Add<std::byte>(ops_.eigen_workspace_bytes(eigen));
  KVS_RETURN_IF_ERROR(scratch_.Reserve(ops_, arrays.bytes()));
  const uint64_t base = AddressOf(scratch_.as<std::byte>());

  std::vector<CovarianceItem> of_rows;
  std::vector<EigenItem> of_matrices;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t item = first + i;
    const uint64_t matrix =
        base + matrices + static_cast<uint64_t>(i * plans.square) * sizeof(double);
    const uint64_t own = base + values + static_cast<uint64_t>(i * g.head_dim) * sizeof(float);
    of_rows.push_back({rows.Rows(base + pages, OffsetOf(g, item)), matrix});
    of_matrices.push_back({matrix, item % 2 == 0 ? AddressOf(plans.Eigenvalues(item / 2)) : own,
                           AddressOf(plans.R(item))});
  }
  const std::vector<uint32_t> zeros(static_cast<size_t>(count));
  KVS_RETURN_IF_ERROR(Upload(base + pages, rows.pages));
  KVS_RETURN_IF_ERROR(Upload(base + sum_items, std::span<const CovarianceItem>(of_rows)));
  KVS_RETURN_IF_ERROR(Upload(base + eigen_items, std::span<const EigenItem>(of_matrices)));
  KVS_RETURN_IF_ERROR(Upload(base + counters, std::span<const uint32_t>(zeros)));
  sums.items = reinterpret_cast<const CovarianceItem*>(base + sum_items);
  sums.counters = reinterpret_cast<uint32_t*>(base + counters);
  sums.workspace = reinterpret_cast<float*>(base + partial);
  KVS_RETURN_IF_ERROR(Check(packed_ops().covariance(sums, stream_), "op covariance"));
  eigen.items = reinterpret_cast<const EigenItem*>(base + eigen_items);
  eigen.workspace = reinterpret_cast<float*>(base + rotating);
  return Check(ops_.eigen(eigen, stream_), "op eigen");
}

Result<PackedBytes> CudaPacker::PackRange(const RecompressInput& input, const Geometry& g,
                                          const Plan& plan, const SegmentPlans& plans,
                                          const PackedRange& range,
                                          std::span<const double> recent) const {
  KVS_RETURN_IF_ERROR(CheckRawRows(input, g, range.tokens));
  MutexLock lock(mu_);
  return Noting(PackRangeLocked(input, g, plan, plans, range, recent));
}

Result<PackedBytes> CudaPacker::PackRangeLocked(const RecompressInput& input, const Geometry& g,
                                                const Plan& plan, const SegmentPlans& plans,
                                                const PackedRange& range,
                                                std::span<const double> recent) const {
  KVS_RETURN_IF_ERROR(Begin(input));
  const bool rotations = range.final && range.info.plan_begin == range.tokens.begin;
  PackedPlaces places(g, range.tokens, range.final, plan.packed.truncate, range.info);
  for (const HeadPlan& h : plans.heads) places.AddHead(h.strategy, rotations);
  KVS_ASSIGN_OR_RETURN(const std::shared_ptr<std::byte> extent,
                       extents_->Take(static_cast<uint64_t>(places.bytes()), stream_));
  if (rotations) {
    KVS_RETURN_IF_ERROR(
        CopyRotations(plans, places, static_cast<uint64_t>(g.head_dim), extent.get()));
  }
  const PagesOfRun rows = PagesOfRun::Of(input, g, range.tokens);
  KVS_ASSIGN_OR_RETURN(const double loss, PackRows(g, plan, plans, rows, places, extent.get()));
  places.NoteLoss(loss, recent);
  return Described(places, extent);
}

PackedBytes CudaPacker::Described(const PackedPlaces& places, std::shared_ptr<std::byte> extent) {
  std::random_device random;
  const auto bytes = static_cast<uint64_t>(places.bytes());
  return {
      places.Front(uint64_t{random()} << 32 | random()), {std::move(extent), bytes}, places.info()};
}

Status CudaPacker::CopyRotations(const SegmentPlans& plans, const PackedPlaces& places,
                                 uint64_t dim, std::byte* extent) const {
  const auto copy = [&](uint64_t to, const float* from, uint64_t count) {
    return Check(ops_.copy_async(extent + to, from, count * sizeof(float), stream_),
                 "copying rotations");
  };
  for (size_t h = 0; h < plans.heads.size(); ++h) {
    const PackedEntry& e = places.entry(h);
    KVS_RETURN_IF_ERROR(copy(e.r_k, plans.heads[h].r_k, dim * dim));
    KVS_RETURN_IF_ERROR(copy(e.r_v, plans.heads[h].r_v, dim * dim));
    KVS_RETURN_IF_ERROR(copy(e.eigenvalues, plans.heads[h].eigenvalues, dim));
  }
  return OkStatus();
}

Result<double> CudaPacker::PackRows(const Geometry& g, const Plan& plan, const SegmentPlans& plans,
                                    const PagesOfRun& rows, const PackedPlaces& places,
                                    std::byte* extent) const {
  const int64_t items = 2 * HeadCount(g);
  cuda::RotatePackBatch pack;
  pack.shape = ShapeOf(g);
  pack.count = static_cast<int32_t>(items);
  pack.rows_max = rows.run.end - rows.run.begin;
  pack.truncated = plan.packed.truncate;
  const int64_t chunks = (pack.rows_max + cuda::kPackChunkRows - 1) / cuda::kPackChunkRows;
  Arrays arrays;
  const uint64_t pages = arrays.Add<uint64_t>(static_cast<int64_t>(rows.pages.size()));
  const uint64_t pack_items = arrays.Add<RotatePackItem>(items);
  const uint64_t losses = arrays.Add<PackLoss>(items * chunks);  // come back; the others go there
  KVS_RETURN_IF_ERROR(scratch_.Reserve(ops_, arrays.bytes()));
  KVS_RETURN_IF_ERROR(staging_.Reserve(ops_, arrays.bytes()));
  const uint64_t base = AddressOf(scratch_.as<std::byte>());
  const uint64_t to = AddressOf(extent);

  std::ranges::copy(rows.pages, staging_.At<std::byte*>(pages));
  for (int64_t i = 0; i < items; ++i) {
    const HeadPlan& head = plans.heads[static_cast<size_t>(i / 2)];
    const PackedEntry& e = places.entry(static_cast<size_t>(i / 2));
    const bool keys = i % 2 == 0;
    staging_.At<RotatePackItem>(pack_items)[i] = {
        rows.Rows(base + pages, OffsetOf(g, i)),
        AddressOf(keys ? head.r_k : head.r_v),
        to + (keys ? e.keys : e.values),
        keys ? to + e.blocks : 0,
        base + losses + static_cast<uint64_t>(i * chunks) * sizeof(PackLoss),
        e.keep,
        e.neighbours,
        e.block,
        0};
  }
  const std::span lost(staging_.At<PackLoss>(losses), static_cast<size_t>(items * chunks));
  KVS_RETURN_IF_ERROR(Upload(base, std::span<const std::byte>(staging_.At<std::byte>(0), losses)));
  pack.items = reinterpret_cast<const RotatePackItem*>(base + pack_items);
  KVS_RETURN_IF_ERROR(Check(packed_ops().rotate_pack(pack, stream_), "op rotate_pack"));
  KVS_RETURN_IF_ERROR(Check(ops_.copy_async(lost.data(), reinterpret_cast<void*>(base + losses),
                                            lost.size_bytes(), stream_),
                            "copying losses"));
  KVS_RETURN_IF_ERROR(Check(ops_.synchronize(stream_), "packing rows"));
  const double sum =
      std::accumulate(lost.begin(), lost.end(), 0.0,
                      [](double s, const PackLoss& l) { return s + l.relative_error; });
  return sum / static_cast<double>(items);
}

Result<PackedBytes> CudaPacker::Join(const Geometry& g,
                                     std::span<const PackedExtent> extents) const {
  MutexLock lock(mu_);
  return Noting(JoinLocked(g, extents));
}

// All heads have one strategy, so that their arrays lie at equal distances.
Result<PackedBytes> CudaPacker::JoinLocked(const Geometry& g,
                                           std::span<const PackedExtent> extents) const {
  KVS_RETURN_IF_ERROR(Check(ops_.use_device(device_), "making the GPU current"));
  const PackedPlaces places = PackedPlaces::OfJoined(g, extents);
  KVS_ASSIGN_OR_RETURN(const std::shared_ptr<std::byte> extent,
                       extents_->Take(static_cast<uint64_t>(places.bytes()), stream_));
  const auto heads = static_cast<int32_t>(HeadCount(g));
  const auto distance = [&](const auto& offset_of) {
    return heads == 1 ? 0 : static_cast<int64_t>(offset_of(1) - offset_of(0));
  };
  cuda::CopyRowsBatch copy;
  copy.from_dtype = copy.to_dtype = DType::kF32;  // bits of any kind
  copy.rows = heads;
  copy.heads = 1;
  const auto append = [&](PackedRows PackedHead::*rows, uint64_t PackedEntry::*to, int64_t before,
                          const PackedExtent& each, int64_t count) {
    const auto from = [&](size_t h) { return AddressOf((each.heads[h].*rows).data); };
    const auto target = [&](size_t h) { return places.entry(h).*to; };
    const int64_t stride = (each.heads[0].*rows).stride;
    copy.from = (each.heads[0].*rows).data;
    copy.from_row_stride = distance(from);
    copy.to = extent.get() + target(0) + before * stride;
    copy.to_row_stride = distance(target);
    copy.dim = static_cast<int32_t>(count * stride / 4);
    return Check(ops_.copy_rows(copy, stream_), "op copy_rows");
  };
  int64_t done = 0;
  for (const PackedExtent& each : extents) {
    const int32_t block = each.heads[0].block;
    using Head = PackedHead;
    using Entry = PackedEntry;
    KVS_RETURN_IF_ERROR(append(&Head::keys, &Entry::keys, done, each, each.rows()));
    KVS_RETURN_IF_ERROR(append(&Head::values, &Entry::values, done, each, each.rows()));
    KVS_RETURN_IF_ERROR(
        append(&Head::blocks, &Entry::blocks, done / block, each, each.rows() / block));
    done += each.rows();
  }
  KVS_RETURN_IF_ERROR(Check(ops_.synchronize(stream_), "joining extents"));
  return Described(places, extent);
}

}  // namespace

Result<std::unique_ptr<SegmentPacker>> NewCudaPacker(const cuda::CudaOps& ops, int device) {
  KVS_RETURN_IF_ERROR(CudaStatus(ops, ops.use_device(device), "making the GPU current"));
  cuda::Stream stream = nullptr;
  KVS_RETURN_IF_ERROR(CudaStatus(ops, ops.create_stream(&stream), "making a stream"));
  return std::unique_ptr<SegmentPacker>(std::make_unique<CudaPacker>(ops, device, stream));
}

}  // namespace kvstrata
