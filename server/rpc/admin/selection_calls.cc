// SPDX-License-Identifier: Apache-2.0
// What plans select and lose: Admin.SampleSelections and Admin.ListEngineRecalls.
#include <bit>
#include <string>

#include "server/rpc/admin/admin_service.h"
#include "server/rpc/calls/copy_fields.h"
#include "server/store/reports/selection_totals.h"

namespace kvstrata {
namespace {

SelectionTotals TotalsOf(const v1::SelectionCursor& cursor) {
  return {cursor.tokens(),
          cursor.bucket_tokens(),
          cursor.steps(),
          {cursor.counts().begin(), cursor.counts().end()}};
}

Status CheckSample(const v1::SampleSelectionsRequest& request) {
  if (request.buckets() > kMostSelectionBuckets) {
    return InvalidArgument("SAMPLE_OPTION",
                           "buckets is " + std::to_string(request.buckets()) + "; allowed: 1 .. " +
                               std::to_string(kMostSelectionBuckets) + ", 0 for all of these");
  }
  const v1::SelectionCursor& since = request.since();
  const bool unset = since.counts_size() == 0 && since.bucket_tokens() == 0;  // since it opened
  if (since.counts_size() > static_cast<int>(kMostSelectionBuckets) ||
      (!unset && !std::has_single_bit(since.bucket_tokens()))) {
    return InvalidArgument("SAMPLE_OPTION",
                           "since has " + std::to_string(since.counts_size()) + " counts and " +
                               std::to_string(since.bucket_tokens()) +
                               " bucket_tokens; pass the cursor of an answer on as it is");
  }
  return OkStatus();
}

void Write(const SelectionTotals& before, const SelectionSample& sample,
           v1::SampleSelectionsResponse* out) {
  const SelectionTotals& now = sample.totals;
  out->set_tokens(now.tokens);
  out->set_tokens_since(now.tokens > before.tokens ? now.tokens - before.tokens : 0);
  out->set_steps_since(now.steps > before.steps ? now.steps - before.steps : 0);
  out->set_bucket_tokens(now.bucket_tokens);
  for (const uint32_t count : SelectedSince(before, now)) out->add_selected(count);
  out->set_page_tokens(sample.page_tokens);
  out->set_layers(sample.layers);
  out->set_uncounted(std::string(sample.uncounted));
  v1::SelectionCursor* cursor = out->mutable_cursor();
  cursor->set_bucket_tokens(now.bucket_tokens);
  cursor->mutable_counts()->Add(now.counts.begin(), now.counts.end());
  cursor->set_tokens(now.tokens);
  cursor->set_steps(now.steps);
}

void Write(const LayerRecall& row, v1::LayerRecall* out) {
  out->set_layer(static_cast<int32_t>(row.layer));
  KVS_COPY_FIELDS(out, row, samples, recall, least, error);
}

void Write(const EngineRecall& engine, v1::EngineRecall* out) {
  out->set_engine(engine.engine);
  out->set_plan(engine.plan);
  out->set_model_name(engine.model);
  Write(engine.all(), out->mutable_all());
  out->mutable_all()->set_layer(-1);
  Write(engine.worst(), out->mutable_worst());
  for (const LayerRecall& row : engine.layers) Write(row, out->add_layers());
}

}  // namespace

UnaryReactor* AdminService::SampleSelections(CallContext* call,
                                             const v1::SampleSelectionsRequest* request,
                                             v1::SampleSelectionsResponse* response) {
  Status status = context_->CheckAdmin();
  if (status.ok()) status = CheckSample(*request);
  if (!status.ok()) return ServiceContext::Answer(call, status);
  const SelectionTotals before = TotalsOf(request->since());
  const uint32_t buckets = request->buckets() == 0 ? kMostSelectionBuckets : request->buckets();
  const Result<SelectionSample> sample =
      context_->store().inspection().Selections(request->sequence(), buckets, before.bucket_tokens);
  if (!sample.ok()) return ServiceContext::Answer(call, sample.status());
  response->set_sequence(request->sequence());
  Write(before, *sample, response);
  return ServiceContext::Answer(call, grpc::Status::OK);
}

UnaryReactor* AdminService::ListEngineRecalls(CallContext* call,
                                              const v1::ListEngineRecallsRequest* request,
                                              v1::ListEngineRecallsResponse* response) {
  return context_->AsAdmin(call, [&]() -> Status {
    const auto& told = context_->options().engine_recalls;
    for (const EngineRecall& engine : told ? told() : std::vector<EngineRecall>()) {
      if (request->engine().empty() || request->engine() == engine.engine) {
        Write(engine, response->add_engines());
      }
    }
    if (!request->engine().empty() && response->engines().empty()) {
      return NotFound("ENGINE_UNKNOWN",
                      "no engine '" + request->engine() + "' has told what its plan loses");
    }
    return OkStatus();
  });
}

}  // namespace kvstrata
