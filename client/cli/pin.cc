// SPDX-License-Identifier: Apache-2.0
// pin ls|add|rm: prefixes that eviction spares.
#include <iostream>
#include <memory>

#include "client/cli/arguments.h"
#include "client/cli/connection.h"
#include "client/cli/invocation.h"

namespace kvstrata::cli {
namespace {

constexpr std::chrono::hours kLongest(24 * 366);

constexpr Column kPinList[] = {
    {"PIN", "/pin", nullptr, true},
    {"TENANT", "/tenant", nullptr, false, 3},
    {"MODEL", "/model_name", nullptr, false, 6, 12},
    {"TOKENS", "/tokens", nullptr, true, 5},
    {"BYTES", "/bytes", Bytes, true, 4},
    {"PAGES", "/pages", nullptr, true, 2},
    {"DEVICE", "/device_pages", nullptr, true, 1},
    {"HOST", "/host_pages", nullptr, true, 1},
    {"DISK", "/disk_pages", nullptr, true, 1},
    {"TTL-LEFT", "/ttl_left_us", Microseconds, true, 7},
};
constexpr Column kPinRecord[] = {
    {"PIN", "/pin"},
    {"TENANT", "/tenant"},
    {"MODEL", "/model_name"},
    {"TOKENS", "/tokens"},
    {"PAGES", "/pages"},
    {"INDEX-BLOCKS", "/index_blocks"},
    {"BYTES", "/bytes", Bytes},
    {"ON-DEVICE", "/device_pages"},
    {"ON-HOST", "/host_pages"},
    {"ON-DISK", "/disk_pages"},
    {"TTL-LEFT", "/ttl_left_us", Microseconds},
};

struct WantedPin {
  std::string model, file, tenant;
  uint64_t sequence = 0;
  std::chrono::milliseconds ttl{std::chrono::hours(1)};
};

Result<int> Add(const Options& options, const WantedPin& wanted) {
  if ((wanted.sequence == 0) == (wanted.model.empty() || wanted.file.empty())) {
    return InvalidArgument("PIN_WHAT", "name a MODEL and a FILE of token ids, or --seq SEQ");
  }
  v1::PinRequest request;
  request.set_sequence(wanted.sequence);
  request.set_tenant(wanted.tenant);
  request.set_ttl_us(static_cast<uint64_t>(wanted.ttl.count()) * 1000);
  std::vector<int32_t> tokens;
  if (wanted.sequence == 0) {
    KVS_ASSIGN_OR_RETURN(tokens, ReadTokens(wanted.file));
    request.mutable_tokens()->Add(tokens.begin(), tokens.end());
  }
  KVS_ASSIGN_OR_RETURN(auto connection, Connection::Dial(options));
  if (wanted.sequence == 0) {
    KVS_ASSIGN_OR_RETURN(const v1::Model model, NamedModel(connection.get(), wanted.model));
    request.set_model(model.model());
  }
  KVS_ASSIGN_OR_RETURN(const auto answer, connection->Call(&v1::Admin::Stub::Pin, request));
  PrintRecord(options.style, ToJson(answer.pin()), kPinRecord, std::cout);
  return kOk;
}

Result<int> Remove(const Options& options, uint64_t pin) {
  v1::UnpinRequest request;
  request.set_pin(pin);
  KVS_ASSIGN_OR_RETURN(const auto answer, Ask(options, &v1::Admin::Stub::Unpin, request));
  (void)answer;
  const Json document = {{"pin", pin}};
  constexpr Column kRemoved[] = {{"PIN", "/pin"}};
  PrintRecord(options.style, document, kRemoved, std::cout);
  return kOk;
}

}  // namespace

void AddPin(CLI::App& app, Invocation& invocation) {
  CLI::App* noun = app.add_subcommand("pin", "Pins: prefixes that eviction spares");
  Shows(noun->add_subcommand("ls", "All pins, where their pages are, and their time"), invocation,
        Lists(&v1::Admin::Stub::ListPins, "pins", kPinList));

  CLI::App* add = noun->add_subcommand("add", "Pin what is held of a prompt, or a sequence");
  auto wanted = std::make_shared<WantedPin>();
  add->add_option("MODEL", wanted->model, "Its number or name");
  add->add_option("FILE", wanted->file, "Token ids: text, a trace, or - for stdin");
  add->add_option("--seq", wanted->sequence, "Instead: a sequence, with its plan's index");
  add->add_option("--tenant", wanted->tenant,
                  "Whose pages: uid:1000, or cluster:search (default: yours)");
  AddDuration(add, "--ttl", &wanted->ttl, "How long: 90s, 12h, 7d (default: 1h)", kLongest);
  Runs(add, invocation, Add, wanted);

  CLI::App* remove = noun->add_subcommand("rm", "End a pin before its time");
  auto pin = std::make_shared<uint64_t>(0);
  remove->add_option("PIN", *pin, "Its number")->required();
  Runs(remove, invocation, Remove, pin);
}

}  // namespace kvstrata::cli
