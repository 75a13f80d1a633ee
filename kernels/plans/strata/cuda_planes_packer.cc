// SPDX-License-Identifier: Apache-2.0
#include "kernels/plans/strata/cuda_planes_packer.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "kernels/codec/head_loop.h"

namespace kvstrata {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kAfterShortage{10};
constexpr uint64_t kSpareBytes = uint64_t{64} << 20;

uint64_t AddressOf(const std::byte* at) { return reinterpret_cast<uint64_t>(at); }

// Header and info; nobody has hashed what follows.
std::vector<std::byte> FrontOf(ExtentKind kind, const Geometry& geometry, Run tokens,
                               const PlanesInfo& info, int64_t bytes) {
  ExtentHeader h = HeaderOf(kind, geometry, tokens, kExtentUnhashed, bytes);
  std::random_device random;
  h.checksum = uint64_t{random()} << 32 | random();
  std::vector<std::byte> front(kPlanesFrontBytes);
  std::memcpy(front.data(), &h, sizeof(h));
  std::memcpy(front.data() + kPlanesInfoAt, &info, sizeof(info));
  return front;
}

}  // namespace

Result<std::unique_ptr<GpuPacker>> CudaPlanesPacker::Make(const cuda::CudaOps& ops, int device) {
  KVS_RETURN_IF_ERROR(CudaStatus(ops, ops.use_device(device), "making the GPU current"));
  cuda::Stream stream = nullptr;
  KVS_RETURN_IF_ERROR(CudaStatus(ops, ops.create_stream(&stream), "making a stream"));
  return std::unique_ptr<GpuPacker>(new CudaPlanesPacker(ops, device, stream));
}

CudaPlanesPacker::CudaPlanesPacker(const cuda::CudaOps& ops, int device, cuda::Stream stream)
    : ops_(ops),
      device_(device),
      stream_(stream),
      extents_(std::make_shared<DeviceExtents>(ops, kSpareBytes)) {}

CudaPlanesPacker::~CudaPlanesPacker() {
  (void)ops_.use_device(device_);
  (void)ops_.destroy_stream(stream_);
}

bool CudaPlanesPacker::Packs(const RecompressInput& input, const Geometry& g,
                             const PlanesFormat& format, Run tokens) const {
  // Groups begin with pages.
  const bool shape = (g.dtype == DType::kBF16 || g.dtype == DType::kF16) && format.IsValid() &&
                     format.tokens % g.page_tokens == 0 && g.layers <= 65535;
  if (!shape) return false;
  {
    MutexLock lock(mu_);
    if (Clock::now() < short_until_) return false;
  }
  return LieOnDevice(ops_, PagesOf(input.view.pages, g.page_tokens, tokens));
}

Result<std::vector<ExtentDraft>> CudaPlanesPacker::Seal(
    const RecompressInput& input, const Geometry& geometry, const PlanesFormat& format,
    std::span<const PlanesPart> parts, Run tokens, std::span<const PlanesExtent> sources) const {
  MutexLock lock(mu_);
  Result<std::vector<ExtentDraft>> sealed =
      SealLocked(input, geometry, format, parts, tokens, sources);
  if (!sealed.ok() && sealed.status().code() == Code::kResourceExhausted) {
    short_until_ = Clock::now() + kAfterShortage;
  }
  return sealed;
}

Result<std::vector<ExtentDraft>> CudaPlanesPacker::SealLocked(
    const RecompressInput& input, const Geometry& g, const PlanesFormat& format,
    std::span<const PlanesPart> parts, Run tokens, std::span<const PlanesExtent> sources) const {
  if (input.cancelled != nullptr && input.cancelled->load(std::memory_order_relaxed)) {
    return Status(Code::kAborted, "CANCELLED", "recompression was cancelled; nothing has changed");
  }
  KVS_RETURN_IF_ERROR(Check(ops_.use_device(device_), "making the GPU current"));
  Target to;
  to.groups = {tokens, format, (tokens.end - tokens.begin) / format.tokens};
  for (const PlanesPart& part : parts) KVS_RETURN_IF_ERROR(Take(g, part, &to));
  const auto heads = static_cast<int32_t>(HeadCount(g));
  int64_t done = 0;  // groups
  for (const PlanesExtent& from : sources) {
    const auto copy = [&](const std::byte* runs, std::byte* at, int64_t run) {
      return Copy(runs, from.groups * run, at + done * run, to.groups.groups * run, heads);
    };
    KVS_RETURN_IF_ERROR(copy(from.upper, to.upper, format.upper_bytes()));
    KVS_RETURN_IF_ERROR(copy(from.lower, to.lower, format.lower_bytes()));
    done += from.groups;
  }
  KVS_RETURN_IF_ERROR(
      Pack(input, g, tokens.begin + static_cast<int32_t>(done) * format.tokens, to.groups));
  KVS_RETURN_IF_ERROR(Check(ops_.synchronize(stream_), "sealing groups"));
  return std::move(to.drafts);
}

Status CudaPlanesPacker::Take(const Geometry& g, const PlanesPart& part, Target* to) const {
  const PlanesExtent& groups = to->groups;
  ExtentWriter places;
  const PlanesInfo info = ReservePlanes(g, groups.format, groups.groups, part, &places);
  const auto bytes = static_cast<uint64_t>(places.bytes());
  KVS_ASSIGN_OR_RETURN(std::shared_ptr<std::byte> extent, extents_->Take(bytes, stream_));
  if (part.upper) to->groups.upper = to->upper = extent.get() + info.upper;
  if (part.lower) to->groups.lower = to->lower = extent.get() + info.lower;
  ExtentDraft& draft = to->drafts.emplace_back(
      ExtentDraft{-1, FrontOf(part.kind, g, groups.tokens, info, places.bytes()), groups.tokens});
  draft.on_device = {std::move(extent), bytes};
  return OkStatus();
}

Status CudaPlanesPacker::Copy(const std::byte* from, int64_t from_stride, std::byte* to,
                              int64_t to_stride, int32_t heads) const {
  cuda::CopyRowsBatch copy;
  copy.from_dtype = copy.to_dtype = DType::kF32;  // bits of any kind
  copy.from = from;
  copy.from_row_stride = from_stride;
  copy.to = to;
  copy.to_row_stride = to_stride;
  copy.rows = heads;
  copy.heads = 1;
  copy.dim = static_cast<int32_t>(from_stride / int64_t{sizeof(float)});
  return Check(ops_.copy_rows(copy, stream_), "op copy_rows");
}

Status CudaPlanesPacker::Pack(const RecompressInput& input, const Geometry& g, int32_t begin,
                              const PlanesExtent& to) const {
  const Run tokens = {begin, to.tokens.end};
  if (tokens.begin >= tokens.end) return OkStatus();
  KVS_RETURN_IF_ERROR(CheckRawRows(input, g, tokens));
  const int32_t groups = (tokens.end - tokens.begin) / to.format.tokens;
  // Pages, the one block that groups go to, and the range: positions count from `begin`.
  const auto pages = PagesOf(input.view.pages, g.page_tokens, tokens);
  std::vector<uint64_t> words;
  for (const std::byte* const page : pages) words.push_back(AddressOf(page));
  words.push_back(AddressOf(to.Upper(0, to.groups - groups)));
  words.push_back(AddressOf(to.Lower(0, to.groups - groups)));
  words.push_back(0);
  words.push_back(static_cast<uint64_t>(tokens.end - tokens.begin));
  const uint64_t bytes = words.size() * sizeof(uint64_t);
  KVS_RETURN_IF_ERROR(tables_.Reserve(ops_, bytes));
  KVS_RETURN_IF_ERROR(staging_.Reserve(ops_, bytes));
  std::ranges::copy(words, staging_.At<uint64_t>(0));
  KVS_RETURN_IF_ERROR(
      Check(ops_.copy_async(tables_.as<void>(), staging_.At<void>(0), bytes, stream_),
            "copying to the GPU"));

  const auto* const table = tables_.as<uint64_t>();
  const auto page_count = static_cast<int32_t>(pages.size());
  const PageLayout layout = PageLayout::Of(g);
  cuda::PackPlanesBatch w;
  w.keys = {table,
            page_count,
            g.page_tokens,
            g.kv_heads,
            g.head_dim,
            g.dtype,
            layout.KeyOffset(0, 0, 0),
            layout.head_stride,
            layout.slot_stride};
  w.values = w.keys;
  w.values.offset = layout.ValueOffset(0, 0, 0);
  w.planes.format = to.format;
  w.planes.upper = {table + page_count, 0, to.groups * to.format.upper_bytes()};
  w.planes.lower = {table + page_count + 1, 0, to.groups * to.format.lower_bytes()};
  w.planes.block_stride = 1;
  w.planes.block_groups = static_cast<int32_t>(std::bit_ceil(static_cast<uint32_t>(groups)));
  w.planes.kv_heads = g.kv_heads;
  w.from = reinterpret_cast<const int32_t*>(table + page_count + 2);  // low halves of words
  w.to = reinterpret_cast<const int32_t*>(table + page_count + 3);
  w.batch = 1;
  w.groups_max = groups;
  w.layers = g.layers;
  w.row_layer_stride = layout.layer_stride;
  w.upper_layer_stride = g.kv_heads * w.planes.upper.head_stride;
  w.lower_layer_stride = g.kv_heads * w.planes.lower.head_stride;
  return Check(ops_.pack_planes(w, stream_), "op pack_planes");
}

}  // namespace kvstrata
