#include "kernels/codec/packed_writer.h"

#include <numeric>

#include "kernels/codec/head_loop.h"

namespace kvstrata {
namespace {

int64_t BlocksOf(int32_t rows, int32_t block) { return (int64_t{rows} + block - 1) / block; }

// An extent with its places reserved and its entries written.
class Layout {
 public:
  Layout(const Geometry& geometry, Run tokens, bool final, bool truncated, const PackedInfo& info)
      : geometry_(geometry),
        tokens_(tokens),
        flags_((final ? kPackedFinal : 0) | (truncated ? kPackedTruncated : 0)),
        info_(info) {
    info_at_ = writer_.Reserve(sizeof(PackedInfo));
    entries_at_ = writer_.Reserve(HeadCount(geometry) * static_cast<int64_t>(sizeof(PackedEntry)));
  }

  void AddHead(const Strategy& s, bool rotations) {
    const PackedRows format =
        PackedFormat(geometry_.head_dim, s.keep, s.neighbours, (flags_ & kPackedTruncated) != 0);
    const int64_t square = int64_t{geometry_.head_dim} * geometry_.head_dim * 4;
    const int32_t rows = tokens_.end - tokens_.begin;
    PackedEntry e = {};
    e.r_k = rotations ? writer_.Reserve(square) : 0;
    e.r_v = rotations ? writer_.Reserve(square) : 0;
    e.eigenvalues = rotations ? writer_.Reserve(int64_t{geometry_.head_dim} * 4) : 0;
    e.keys = writer_.Reserve(rows * format.stride);
    e.values = writer_.Reserve(rows * format.stride);
    e.blocks = writer_.Reserve(BlocksOf(rows, s.block) * format.stride);
    e.keep = s.keep;
    e.neighbours = s.neighbours;
    e.block = s.block;
    entries_.push_back(e);
    formats_.push_back(format);
  }

  void Allocate() {
    if (info_.buffer > 0) {
      const int64_t flushes = (tokens_.end - tokens_.begin) / info_.buffer;
      info_.flushes = writer_.Reserve(flushes * static_cast<int64_t>(sizeof(double)));
    }
    writer_.Allocate();
    std::memcpy(writer_.At<std::byte>(entries_at_), entries_.data(),
                entries_.size() * sizeof(PackedEntry));
  }

  const PackedEntry& entry(size_t head) const { return entries_[head]; }
  const PackedRows& format(size_t head) const { return formats_[head]; }
  template <typename T>
  T* At(uint64_t offset) {
    return writer_.At<T>(offset);
  }
  PackedInfo& info() { return info_; }

  std::vector<std::byte> Finish() {
    std::memcpy(writer_.At<std::byte>(info_at_), &info_, sizeof(info_));
    return writer_.Finish(ExtentKind::kPackedSegment, geometry_, tokens_, flags_);
  }

 private:
  const Geometry& geometry_;
  Run tokens_;
  uint32_t flags_;
  PackedInfo info_;
  ExtentWriter writer_;
  uint64_t info_at_ = 0, entries_at_ = 0;
  std::vector<PackedEntry> entries_;
  std::vector<PackedRows> formats_;
};

void CopyRotations(const HeadPlan& plan, const PackedEntry& e, size_t dim, Layout* out) {
  std::memcpy(out->At<float>(e.r_k), plan.r_k, dim * dim * sizeof(float));
  std::memcpy(out->At<float>(e.r_v), plan.r_v, dim * dim * sizeof(float));
  std::memcpy(out->At<float>(e.eigenvalues), plan.eigenvalues, dim * sizeof(float));
}

// Keys, values and block keys of one head; the sum of the relative errors of its rows.
double PackHead(const RecompressInput& input, const Geometry& geometry, const HeadIndex& h,
                const HeadPlan& plan, Run tokens, Layout* out) {
  const PageLayout layout = PageLayout::Of(geometry);
  const PackedEntry& e = out->entry(h.flat);
  double error_k = 0, error_v = 0;
  RotatePackWork works[3];
  RotatePackWork& keys = works[0];
  keys.rows = KeysOf(input.view.pages, layout, h.layer, h.kv_head);
  keys.run = tokens;
  keys.r = plan.r_k;
  keys.format = out->format(h.flat);
  works[1] = works[2] = keys;
  keys.out = out->At<std::byte>(e.keys);
  keys.relative_error = &error_k;
  works[1].rows = ValuesOf(input.view.pages, layout, h.layer, h.kv_head);
  works[1].r = plan.r_v;
  works[1].out = out->At<std::byte>(e.values);
  works[1].relative_error = &error_v;
  works[2].block = e.block;
  works[2].out = out->At<std::byte>(e.blocks);
  input.backend->rotate_pack(works, 3, InlineExecutor());
  return error_k + error_v;
}

// Mean relative error of the last kRecentTokens of a segment, from the losses of its flushes.
double RecentLoss(std::span<const double> flushes, int32_t buffer) {
  const auto wanted = static_cast<size_t>((kRecentTokens + buffer - 1) / buffer);
  const auto last = flushes.last(std::min(wanted, flushes.size()));
  const double sum = std::accumulate(last.begin(), last.end(), 0.0);
  return sum / (static_cast<double>(last.size()) * buffer);
}

// Appends `rows` rows from one place of an extent to another.
void Append(const PackedRows& from, int64_t rows, std::byte** to) {
  std::memcpy(*to, from.data, static_cast<size_t>(rows * from.stride));
  *to += rows * from.stride;
}

}  // namespace

Result<PackedBytes> PackRange(const RecompressInput& input, const Geometry& geometry,
                              const Plan& plan, const SegmentPlans& plans, const PackedRange& range,
                              std::span<const double> recent) {
  KVS_RETURN_IF_ERROR(CheckRawRows(input, geometry, range.tokens));
  const bool rotations = range.final && range.info.plan_begin == range.tokens.begin;
  Layout out(geometry, range.tokens, range.final, plan.truncate, range.info);
  for (const HeadPlan& h : plans.heads) out.AddHead(h.strategy, rotations);
  out.Allocate();
  std::vector<double> losses(plans.heads.size());
  KVS_RETURN_IF_ERROR(ForEachHead(input, geometry, [&](const HeadIndex& h) {
    const HeadPlan& head = plans.heads[h.flat];
    if (rotations) {
      CopyRotations(head, out.entry(h.flat), static_cast<size_t>(geometry.head_dim), &out);
    }
    losses[h.flat] = PackHead(input, geometry, h, head, range.tokens, &out);
  }));
  const double loss = std::accumulate(losses.begin(), losses.end(), 0.0) /
                      (2.0 * static_cast<double>(losses.size()));
  out.info().loss += loss;
  if (!range.final) {
    std::vector<double> flushes(recent.begin(), recent.end());
    flushes.push_back(loss);
    out.info().recent = RecentLoss(flushes, range.info.buffer);
    *out.At<double>(out.info().flushes) = loss;
  }
  const PackedInfo info = out.info();
  return PackedBytes{out.Finish(), info};
}

std::vector<std::byte> JoinPieces(const Geometry& geometry, std::span<const PackedExtent> pieces) {
  const PackedExtent& last = pieces.back();
  Layout out(geometry, {pieces.front().tokens.begin, last.tokens.end}, false, last.truncated,
             last.info);
  for (const PackedHead& h : last.heads) {
    out.AddHead({h.keys.keep, h.keys.neighbours, h.block}, false);
  }
  out.Allocate();
  for (size_t h = 0; h < last.heads.size(); ++h) {
    std::byte* keys = out.At<std::byte>(out.entry(h).keys);
    std::byte* values = out.At<std::byte>(out.entry(h).values);
    std::byte* blocks = out.At<std::byte>(out.entry(h).blocks);
    for (const PackedExtent& piece : pieces) {
      Append(piece.heads[h].keys, piece.rows(), &keys);
      Append(piece.heads[h].values, piece.rows(), &values);
      Append(piece.heads[h].blocks, piece.rows() / piece.heads[h].block, &blocks);
    }
  }
  double* flushes = out.At<double>(out.info().flushes);
  for (const PackedExtent& piece : pieces) {
    flushes = std::copy_n(piece.flushes, piece.rows() / piece.info.buffer, flushes);
  }
  return out.Finish();
}

int64_t PackedBytesPerToken(const Geometry& geometry, const Plan& plan, const SegmentPlans& plans) {
  int64_t bytes = 0;
  for (const HeadPlan& h : plans.heads) {
    const int64_t stride =
        PackedFormat(geometry.head_dim, h.strategy.keep, h.strategy.neighbours, plan.truncate)
            .stride;
    bytes += 2 * stride + (stride + h.strategy.block - 1) / h.strategy.block;
  }
  return bytes;
}

}  // namespace kvstrata
