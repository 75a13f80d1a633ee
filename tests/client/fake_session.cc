// SPDX-License-Identifier: Apache-2.0
// A Session that knows no daemon: remembers calls, answers what a transport would. For abi_test.cc.
#include "tests/client/fake_session.h"

#include <algorithm>

#include "client/session.h"

namespace kvstrata::client {

struct SessionStep::State {
  int32_t tokens = 0;
  int members = 0;
};
struct Session::State {
  AttachOptions options;
};

namespace testing {
FakeLog& Log() {
  static FakeLog log;
  return log;
}
}  // namespace testing

namespace {
constexpr Geometry kGeometry = testing::kFakeGeometry;

Status UnlessOpen(uint64_t sequence) {
  if (sequence == testing::kFakeSequence) return OkStatus();
  return NotFound("SEQUENCE_UNKNOWN", "sequence " + std::to_string(sequence));
}
}  // namespace

std::string_view Transport() { return "fake"; }

Session::Session(std::unique_ptr<State> state) : state_(std::move(state)) {}
Session::~Session() { ++testing::Log().detached; }
Result<std::unique_ptr<Session>> Session::Attach(const AttachOptions& options) {
  testing::Log().options = options;
  auto state = std::make_unique<State>();
  state->options = options;
  return std::make_unique<Session>(std::move(state));
}
void Session::AbandonAfterFork() { (void)state_.release(); }
Status Session::Ping() { return OkStatus(); }
Result<uint64_t> Session::RegisterModel(const ModelSpec& spec) {
  testing::Log().model = spec;
  return testing::kFakeModel;
}
Result<Opened> Session::Open(uint64_t, std::string_view plan, std::span<const int32_t> tokens,
                             const OpenOptions& options) {
  testing::Log().plan = plan;
  testing::Log().prompt.assign(tokens.begin(), tokens.end());
  testing::Log().open = options;
  testing::Log().opened_key = options.key;
  return Opened{testing::kFakeSequence, 16, 8, 12, 4};
}
Result<LookedUp> Session::Lookup(uint64_t, const LookupQuery& query,
                                 std::span<const int32_t> tokens) {
  testing::Log().plan = query.plan;
  testing::Log().lookup_device = query.device_uuid;
  testing::Log().lease_ms = query.lease_ms;
  testing::Log().prompt.assign(tokens.begin(), tokens.end());
  return LookedUp{48, 32, 16, 24, 8};
}
Result<Capacity> Session::CountCapacity(uint64_t, std::string_view plan) {
  testing::Log().plan = plan;
  return Capacity{{{16, 1}, {32, 2}, {48, 3}}, {{64, 4}, {80, 5}, {96, 6}}, 112};
}
Result<Opened> Session::Fork(uint64_t sequence) {
  KVS_RETURN_IF_ERROR(UnlessOpen(sequence));
  return Opened{testing::kFakeSequence + 1, 0};
}
Status Session::Truncate(uint64_t sequence, uint32_t) { return UnlessOpen(sequence); }
Status Session::Close(uint64_t sequence) { return UnlessOpen(sequence); }
Status Session::CloseKey(std::string_view key) {
  testing::Log().closed_key = key;
  return OkStatus();
}
Status Session::TruncateKey(std::string_view key, uint32_t tokens) {
  testing::Log().truncated_key = key;
  testing::Log().truncated_to = tokens;
  return OkStatus();
}
Result<uint32_t> Session::Tokens(uint64_t sequence) {
  KVS_RETURN_IF_ERROR(UnlessOpen(sequence));
  return uint32_t{40};
}
Result<std::string> Session::StatusText(uint64_t) { return std::string("a status of some length"); }
Result<std::string> Session::PlanText(uint64_t) { return std::string("full{}"); }
Result<std::string> Session::CanonicalPlan(std::string_view plan) {
  return plan == "named" ? "chess" : std::string(plan);
}
Status Session::PrefillDone(uint64_t sequence) { return UnlessOpen(sequence); }
Status Session::Report(uint64_t sequence, uint32_t, uint32_t, const float*, const float*,
                       const uint8_t*) {
  return UnlessOpen(sequence);
}
Status Session::ReportVerified(uint64_t sequence, uint32_t, uint32_t, bool) {
  return UnlessOpen(sequence);
}
Status Session::Settle(uint64_t sequence) { return UnlessOpen(sequence); }
Result<Built> Session::Build(uint64_t sequence, std::string_view plan) {
  KVS_RETURN_IF_ERROR(UnlessOpen(sequence));
  testing::Log().plan = plan;
  return Built{40, 3, 2};
}
Status Session::Recompress(uint64_t sequence) { return UnlessOpen(sequence); }
Status Session::CancelWork(uint64_t sequence) { return UnlessOpen(sequence); }

Status Session::RegisterTensors(uint64_t, int32_t, const LentTensor& keys, const LentTensor&,
                                bool same_memory) {
  testing::Log().keys = keys;
  testing::Log().same_memory = same_memory;
  return OkStatus();
}
Status Session::SealBlocks(uint64_t sequence, uint32_t, std::span<const int32_t>,
                           std::span<const int32_t>) {
  return UnlessOpen(sequence);
}
Result<uint32_t> Session::Acknowledged(uint64_t sequence) {
  KVS_RETURN_IF_ERROR(UnlessOpen(sequence));
  return uint32_t{32};
}
Status Session::LoadBlocks(uint64_t sequence, uint32_t, std::span<const int32_t>, void* stream) {
  KVS_RETURN_IF_ERROR(NoStream(stream));
  return UnlessOpen(sequence);
}

Result<std::unique_ptr<SessionStep>> Session::StepBegin(std::span<const BatchMember> members,
                                                        void* stream, int32_t* codes) {
  KVS_RETURN_IF_ERROR(NoStream(stream));
  auto state = std::make_unique<SessionStep::State>();
  Status failed;
  for (size_t i = 0; i < members.size(); ++i) {
    const Status status = UnlessOpen(members[i].sequence);
    codes[i] = static_cast<int32_t>(status.code());
    if (!status.ok() && failed.ok()) failed = status;
    state->tokens += static_cast<int32_t>(members[i].n());
    ++state->members;
  }
  if (!failed.ok()) return failed;
  testing::Log().members.assign(members.begin(), members.end());
  ++testing::Log().begun;
  return std::make_unique<SessionStep>(std::move(state));
}
Status Session::LateTokens(std::span<const LateIds> members, bool on_gpu) {
  testing::Log().late.assign(members.begin(), members.end());
  testing::Log().late_on_gpu = on_gpu;
  return OkStatus();
}
Result<PageTable> Session::GetPageTable(uint64_t) {
  return PageTable{3, {{&kGeometry, 0, 1}, {&kGeometry, 1, 2}}};
}
Result<InspectArray> Session::Inspect(uint64_t, std::string_view name) {
  if (name == "deep") return InspectArray{InspectArray::Type::kU8, {1, 1, 1, 1, 1}, {std::byte{1}}};
  if (name == "empty") return InspectArray{InspectArray::Type::kI32, {0}, {}};
  if (name != "two") return NotFound("INSPECT_UNKNOWN", "names: two, empty, deep");
  return InspectArray{InspectArray::Type::kU8, {2}, {std::byte{4}, std::byte{5}}};
}

SessionStep::SessionStep(std::unique_ptr<State> state) : state_(std::move(state)) {}
SessionStep::~SessionStep() { ++testing::Log().dropped; }
void SessionStep::AbandonAfterFork() { (void)state_.release(); }
const Geometry& SessionStep::geometry() const { return kGeometry; }
int32_t SessionStep::tokens() const { return state_->tokens; }
int SessionStep::members() const { return state_->members; }
Status SessionStep::Append(int, const Rows& k, const Rows&) {
  testing::Log().k = k;
  return OkStatus();
}
Status SessionStep::Select(int, const Rows&) { return OkStatus(); }
Status SessionStep::Attend(int, const Rows&, const MutableRows& out, float*) {
  testing::Log().out = out;
  return OkStatus();
}
Status SessionStep::Replay() { return OkStatus(); }
Status SessionStep::End(void*) {
  ++testing::Log().committed;
  return OkStatus();
}
bool SessionStep::on_gpu() const { return false; }
Result<uint32_t> SessionStep::SelectionGroups(int) const { return uint32_t{2}; }
Result<StepCost> SessionStep::Cost(int) const { return StepCost{1, 2, 3, 4}; }

Result<size_t> SessionStep::CopySelection(int, uint32_t group, SelectionKind kind,
                                          std::span<int32_t> out) const {
  const std::vector<int32_t> all = kind == SelectionKind::kTokens
                                       ? std::vector<int32_t>{0, 1, 5 + static_cast<int32_t>(group)}
                                       : std::vector<int32_t>{};
  std::copy_n(all.begin(), std::min(all.size(), out.size()), out.begin());
  return all.size();
}

}  // namespace kvstrata::client
