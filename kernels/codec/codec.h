// SPDX-License-Identifier: Apache-2.0
// Codec: how are keys and values stored? (The third axis of docs/plans.md.) `raw` is the page
// itself. The others are written by workers of the daemon, away from decode: a Recompressor belongs
// to one sequence, looks at what was committed and reported, and says which extents its table
// should name from now on and which raw rows nobody needs any more. What is read of them is a
// StoredRows (kernels/rows/stored_rows.h). Codec is a row of the table in codec_rows.cc: all that
// others ask of a codec, which only its plan's folder knows by name.
//
// Recompressors: packed_recompressor.cc (MosaicKV), lowrank_recompressor.cc (SeKV),
// planes_recompressor.cc; one conformance suite for all (tests/kernels/codec_test.cc). What they
// need to go on lies in the extents of the view, so a clone, a restart and a prefix hit cost
// nothing; beyond that packed and planes remember whether they have said since the end of the
// prompt what may go, and packed that it has warned, and that it has stopped where nothing keeps
// max_loss (who does not remember finds it again).
// Threads: Due, ReleasableBytes and Clone from several threads at once. Run changes the object: the
// store runs a clone of its own, without any lock, for seconds, and keeps it if it succeeded.
// Deterministic: the state after a series of commits depends on them alone, if Run is called until
// Due is false after each (kvs_settle); when workers lag, rows stay raw for longer, nothing else.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "kernels/backend/backend.h"
#include "kernels/codec/extent.h"
#include "kernels/pages/inspect_array.h"
#include "kernels/pages/sequence_view.h"
#include "kernels/plan/plan.h"
#include "kernels/rows/select_context.h"
#include "kernels/rows/stored_rows.h"

namespace kvstrata {

namespace cuda {
struct CudaOps;
}
class ExtentFront;  // extent_bytes.h

// Trained parameters of a codec, which its folder declares; null: untrained.
struct CodecParameters {
  virtual ~CodecParameters() = default;
};
using ParametersPtr = std::shared_ptr<const CodecParameters>;

// What a codec has on a GPU to write extents with, where rows lie; its folder declares it.
class GpuPacker {
 public:
  virtual ~GpuPacker() = default;
};

// Those of one GPU, by CodecKind; null: the codec packs on the host alone.
struct GpuPackers {
  std::vector<std::unique_ptr<GpuPacker>> by_codec;

  // T: what the codec's folder declares.
  template <typename T>
  const T* Of(CodecKind codec) const {
    return static_cast<const T*>(by_codec[static_cast<size_t>(codec)].get());
  }
};

// What a sequence looks like to its Recompressor.
struct RecompressInput {
  SequenceView view;           // raw pages (nullptr where released), committed tokens, extents
  int32_t prompt_tokens = -1;  // -1 until prefill_done
  int32_t indexed_tokens = 0;  // raw rows from here on are still wanted by the plan's index
  std::span<const float> surprisal;   // by position, NaN where none
  std::span<const uint8_t> boundary;  // by position
  const Backend* backend = nullptr;
  Executor* executor = nullptr;
  const GpuPackers* gpu_packers = nullptr;       // the GPU's that the view lies on, if there is one
  const std::atomic<bool>* cancelled = nullptr;  // checked between heads; Run answers ABORTED
};

// What of its view a Run reads, beyond the extents' descriptions (extent.h). For who must copy it
// from memory that the host cannot read.
struct RecompressReads {
  Run rows;                      // raw rows of all layers
  std::vector<int32_t> extents;  // numbers of the view's
  bool in_place = false;         // none of that: input.gpu_packers read everything where it lies
};

// An extent in memory of a GPU, which is freed with the last copy of this. Its first bytes, as many
// as its description has, are the host's alone: whoever copies the extent puts them there.
struct DeviceBytes {
  std::shared_ptr<const std::byte> data;
  uint64_t size = 0;
};

struct ExtentDraft {
  int32_t kept = -1;  // >= 0: extent number `kept` of the view stays; else `bytes`
  // Header included; of one on the device its description alone (extent.h).
  std::vector<std::byte> bytes;
  Run tokens;
  Tier tier = Tier::kDevice;
  DeviceBytes on_device = {};  // null: `bytes` is all

  uint64_t size() const { return on_device.data == nullptr ? bytes.size() : on_device.size; }
};

struct RecompressOutput {
  std::vector<ExtentDraft> extents;  // the whole new list, in order
  // Positions whose raw rows this plan needs no more, ascending; whole pages of them may go.
  std::vector<Run> released;
  std::string warning = {};  // for the log: what was done otherwise than the plan asks; "" nothing
};

class Recompressor {
 public:
  virtual ~Recompressor() = default;

  // Whether Run has something to do. Cheap: called after every commit and report.
  virtual bool Due(const RecompressInput& input) const = 0;

  // One unit of work. ABORTED when cancelled: nothing has changed. Called again while Due. When not
  // Due it answers the extents there are and what may be released by now.
  virtual Result<RecompressOutput> Run(const RecompressInput& input) = 0;

  // What the next Run reads. Cheap: looks at descriptions alone. Unless `in_place`, that Run must
  // be given no gpu_packers.
  virtual RecompressReads Reads(const RecompressInput& input) const = 0;

  // How urgent it is that this runs: raw bytes that Run would release. For the queue's order.
  virtual int64_t ReleasableBytes(const RecompressInput& input) const = 0;

  // A copy for a forked sequence, which keeps the extents there are.
  virtual std::unique_ptr<Recompressor> Clone() const = 0;
};

// What a status asks of a codec.
struct CodecProgress {
  const Plan& plan;
  const Geometry& geometry;
  int32_t prompt_tokens = 0, tokens = 0;
  const StoredRows* stored = nullptr;  // null: nothing is stored (yet)
};

// What rows cost over raw ones (break_even.h): decoding or expanding them is most of what a layer
// takes beside reading, whatever chooses them.
struct CodecCost {
  double share = 1;                 // bytes of a row
  double gpu_us = 0, cpu_rows = 0;  // as SelectionRule's, in its place
};

// One choice of the axis: a row of the table in codec_rows.cc. `raw` stores nothing.
struct Codec {
  // A sum of Needs (kernels/plan/plan_needs.h) of the engine.
  uint32_t needs = 0;
  // Whether its units are read whole, so that what ends beyond a sequence's tokens does not serve
  // it; else rows are read up to any position.
  bool whole_units = false;
  // Whether its last extents may go, where raw rows of their tokens are there: a Run goes on from
  // those that are left.
  bool drops_last = false;
  // Whether steps of a GPU compute the end of a prompt from its extents, too, where raw rows are
  // gone; else a prompt is opened there on raw pages alone.
  bool serves_prompts_on_gpu = false;
  // `parameters` may be null (untrained fallback; codecs that take none).
  std::unique_ptr<Recompressor> (*recompressor)(const Plan& plan, const Geometry& geometry,
                                                ParametersPtr parameters) = nullptr;
  // As ParseParameters; null: it takes none.
  Result<ParametersPtr> (*parameters)(std::span<const std::byte> file, const std::string& name,
                                      const Geometry& geometry, const Plan& plan) = nullptr;
  // Whether a sequence of the plan opens on the first of every two extents of its prompt, which are
  // about the same tokens, while a tier brings the second (ExtentView::rest_due); null: never.
  bool (*rest_waits)(const Plan& plan) = nullptr;
  // Null: it packs on the host alone. As NewGpuPackers.
  Result<std::unique_ptr<GpuPacker>> (*gpu_packer)(const cuda::CudaOps& ops, int device) = nullptr;
  // What the extents of a view hold. DATA_LOSS EXTENT_INVALID.
  Result<std::unique_ptr<StoredRows>> (*parse)(const SequenceView& view,
                                               const Geometry& geometry) = nullptr;
  // Where in an extent of its kinds the last array ends that `parse` reads; 0 for other kinds.
  int64_t (*arrays_end)(const ExtentFront& front) = nullptr;
  // Why nothing of a complete prompt is stored, for a sequence that therefore attends in full; ""
  // nothing to say.
  std::string (*why_raw)(const Plan& plan, const SelectContext& context) = nullptr;
  // What it did otherwise than the plan asks; "" nothing.
  std::string (*status)(const CodecProgress& progress) = nullptr;
  // Names of tests/golden/README.md without "PLAN."; those of `device_arrays` are read of extents
  // that lie on a GPU, too. REQUIRES of inspect: `name` is one of `arrays`.
  std::span<const std::string_view> arrays = {}, device_arrays = {};
  Result<InspectArray> (*inspect)(const SelectContext& context, std::string_view name) = nullptr;
  CodecCost (*cost)(const Plan& plan, const Geometry& geometry) = nullptr;

  bool stores() const { return parse != nullptr; }
};
const Codec& CodecOf(const Plan& plan);

// Codec::parse by a class's own Parse.
template <typename Stored>
Result<std::unique_ptr<StoredRows>> ParseAs(const SequenceView& view, const Geometry& geometry) {
  KVS_ASSIGN_OR_RETURN(std::unique_ptr<StoredRows> stored, Stored::Parse(view, geometry));
  return stored;
}

// Each in its plan's folder.
#define KVS_CODEC(Kind, name, built) extern const Codec k##Kind##Codec;
KVS_CODECS(KVS_CODEC)

// Null for codec raw.
std::unique_ptr<Recompressor> NewRecompressor(const Plan& plan, const Geometry& geometry,
                                              ParametersPtr parameters);

// Trained parameters from the bytes of a file called `name`, for the plan's codec.
// INVALID_ARGUMENT PARAMETERS_INVALID names the tensor, its shape and the expected one.
Result<ParametersPtr> ParseParameters(std::span<const std::byte> file, const std::string& name,
                                      const Geometry& geometry, const Plan& plan);

// For Runs whose rows lie on GPU number `device` of this process. `ops` outlives them. GPU_MEMORY,
// CUDA_ERROR.
Result<GpuPackers> NewGpuPackers(const cuda::CudaOps& ops, int device);

// What the codec asks of the engine: a sum of Needs (kernels/plan/plan_needs.h).
uint32_t CodecNeeds(const Plan& plan);

}  // namespace kvstrata
