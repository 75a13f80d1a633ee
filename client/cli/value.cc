// SPDX-License-Identifier: Apache-2.0
// value ls|get|verify: values of memory and disk, one by one.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <memory>
#include <vector>

#include "base/unique_fd.h"
#include "client/cli/arguments.h"
#include "client/cli/connection.h"
#include "client/cli/invocation.h"

namespace kvstrata::cli {
namespace {

constexpr uint32_t kOneAnswer = 4096;  // values

// Keys that begin so, as texts.
Result<std::vector<std::string>> KeysFrom(Connection* connection, const std::string& begin) {
  std::vector<std::string> keys;
  v1::ListValuesRequest request;
  request.set_limit(kOneAnswer);
  do {
    KVS_ASSIGN_OR_RETURN(const auto answer,
                         connection->Call(&v1::Admin::Stub::ListValues, request));
    for (const v1::Value& value : answer.values()) {
      const std::string text = ValueKeyText(value.key());
      const bool known = std::ranges::find(keys, text) != keys.end();  // what moves may come twice
      if (text.starts_with(begin) && !known) keys.push_back(text);
    }
    request.set_after(answer.next());
  } while (request.after() != 0);
  return keys;
}

Status Ambiguous(const std::string& text, const std::vector<std::string>& keys) {
  constexpr size_t kNamed = 8;
  std::string named;
  for (size_t i = 0; i < std::min(keys.size(), kNamed); ++i) named += "\n  " + keys[i];
  if (keys.size() > kNamed) named += "\n  and more";
  return InvalidArgument("KEY_AMBIGUOUS",
                         std::to_string(keys.size()) + " keys begin with '" + text + "':" + named);
}

// The key as bytes; of a beginning the one that there is. Errors: KEY_TEXT, KEY_AMBIGUOUS,
// VALUE_UNKNOWN.
Result<std::string> KeyOf(Connection* connection, const std::string& text) {
  KVS_ASSIGN_OR_RETURN(const WrittenKey written, ParseValueKey(text));
  if (written.whole) return ValueKeyBytes(written.text);
  KVS_ASSIGN_OR_RETURN(const std::vector<std::string> keys, KeysFrom(connection, written.text));
  if (keys.empty()) return NotFound("VALUE_UNKNOWN", "no value's key begins with '" + text + "'");
  return keys.size() == 1 ? Result<std::string>(ValueKeyBytes(keys[0])) : Ambiguous(text, keys);
}

std::string Words(const Json& list) {
  std::string text;
  for (const Json& word : list) text += (text.empty() ? "" : ",") + word.get<std::string>();
  return text.empty() ? "-" : text;
}
std::string Number(const Json& value) {
  return value.get<uint64_t>() == 0 ? "-" : value.dump();  // 0: not known
}

// A key's beginning is an argument, too; a pin's, which differ at their end, are whole.
constexpr uint8_t kShortestKey = 20;

constexpr Column kValueList[] = {
    {"KEY", "/key", nullptr, false, 0, kShortestKey},
    {"KIND", "/kind", OrDash, false, 4},
    {"MODEL", "/model", OrDash, false, 2, 12},
    {"TOKENS", "/tokens", Number, true, 1},
    {"BYTES", "/bytes", nullptr, true, 3},
    {"TIERS", "/tiers", Words, false, 3},
    {"PINNED", "/pinned", YesNo},
};

struct Listing {
  std::string model, tier;
  uint64_t after = 0;
  uint64_t limit = 1000;  // 0: all
};

Result<int> ListValues(const Options& options, const Listing& wanted) {
  KVS_ASSIGN_OR_RETURN(auto connection, Connection::Dial(options));
  v1::ListValuesRequest request;
  request.set_tier(wanted.tier);
  request.set_after(wanted.after);
  if (!wanted.model.empty()) {
    KVS_ASSIGN_OR_RETURN(const v1::Model model, NamedModel(connection.get(), wanted.model));
    request.set_model_name(model.name());
  }
  Json document = {{"values", Json::array()}};
  Json& values = document["values"];
  do {
    const uint64_t left = wanted.limit == 0 ? kOneAnswer : wanted.limit - values.size();
    request.set_limit(static_cast<uint32_t>(std::min<uint64_t>(left, kOneAnswer)));
    KVS_ASSIGN_OR_RETURN(const auto answer,
                         connection->Call(&v1::Admin::Stub::ListValues, request));
    for (const v1::Value& value : answer.values()) {
      Json row = {{"key", ValueKeyText(value.key())},
                  {"kind", value.kind()},
                  {"model", value.model()},
                  {"tokens", value.tokens()},
                  {"bytes", value.bytes()}};
      row["tiers"] = std::vector<std::string>(value.tiers().begin(), value.tiers().end());
      row["pinned"] = value.pinned();
      values.push_back(std::move(row));
    }
    request.set_after(answer.next());
  } while (request.after() != 0 && (wanted.limit == 0 || values.size() < wanted.limit));
  document["next"] = std::to_string(request.after());  // uses all 64 bits
  PrintList(options.style, document, "values", kValueList, std::cout);
  if (request.after() != 0 && options.style.IsTable()) {
    std::cerr << "there may be more: --after " << request.after() << "\n";
  }
  return kOk;
}

constexpr Column kFetched[] = {
    {"KEY", "/key"}, {"FILE", "/file"}, {"BYTES", "/bytes"}, {"TIER", "/tier"}};

struct ValueFile {
  std::string key, file;
  bool force = false;
};

Status FileError(const ValueFile& fetch, const std::string& why) {
  return {Code::kFailedPrecondition, "VALUE_FILE", "file '" + fetch.file + "': " + why};
}

// Values are users' text in other words: mode 0600, and never to a terminal.
Result<UniqueFd> Create(const ValueFile& fetch) {
  const int exclusive = fetch.force ? O_TRUNC : O_EXCL;
  UniqueFd fd(
      open(fetch.file.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NOCTTY | exclusive, 0600));
  if (!fd && errno == EEXIST) return FileError(fetch, "it exists; --force overwrites it");
  if (!fd) return FileError(fetch, std::strerror(errno));
  if (isatty(fd.get()) == 1) return FileError(fetch, "a terminal; name a file");
  return fd;
}

bool WriteAll(int fd, std::string_view data) {
  while (!data.empty()) {
    const ssize_t n = write(fd, data.data(), data.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    data.remove_prefix(static_cast<size_t>(n));
  }
  return true;
}

Result<int> Get(const Options& options, const ValueFile& fetch) {
  v1::GetValueRequest request;
  KVS_ASSIGN_OR_RETURN(auto connection, Connection::Dial(options));
  KVS_ASSIGN_OR_RETURN(*request.mutable_key(), KeyOf(connection.get(), fetch.key));
  UniqueFd file;
  Status local;
  Json document = {{"key", ValueKeyText(request.key())},
                   {"file", fetch.file},
                   {"tier", ""},
                   {"bytes", uint64_t{0}}};
  std::error_code unknown;  // then the path is told as it was given
  const auto whole = std::filesystem::absolute(fetch.file, unknown).lexically_normal();
  if (!unknown) document["file"] = whole.string();
  document["buffers"] = Json::array();
  const auto take = [&](const v1::GetValueResponse& piece) -> Status {
    if (!file) {  // not before there is something to write
      KVS_ASSIGN_OR_RETURN(file, Create(fetch));
      document["tier"] = piece.tier();
      for (const uint64_t bytes : piece.buffers()) document["buffers"].push_back(bytes);
    }
    if (!WriteAll(file.get(), piece.data())) return FileError(fetch, std::strerror(errno));
    document["bytes"] = document["bytes"].get<uint64_t>() + piece.data().size();
    return OkStatus();
  };
  const Status ended =
      connection->Stream(&v1::Admin::Stub::GetValue, request, [&](const auto& piece) {
        if (local.ok()) local = take(piece);
      });
  KVS_RETURN_IF_ERROR(local);
  KVS_RETURN_IF_ERROR(ended);
  PrintRecord(options.style, document, kFetched, std::cout);
  return kOk;
}

constexpr Column kVerdicts[] = {{"KEY", "/key", nullptr, false, 0, kShortestKey},
                                {"VERDICT", "/verdict", nullptr, false, 3},
                                {"TIERS", "/tiers", Words, false, 1},
                                {"DETAIL", "/detail", OrDash, false, 2, 20}};

Result<int> Verify(const Options& options, const std::vector<std::string>& keys) {
  KVS_ASSIGN_OR_RETURN(auto connection, Connection::Dial(options));
  Json document = {{"values", Json::array()}};
  bool finding = false;
  for (const std::string& text : keys) {  // a call each: the timeout is one value's
    v1::VerifyRequest request;
    KVS_ASSIGN_OR_RETURN(*request.add_keys(), KeyOf(connection.get(), text));
    KVS_ASSIGN_OR_RETURN(const auto answer, connection->Call(&v1::Admin::Stub::Verify, request));
    for (const v1::ValueVerdict& value : answer.values()) {
      finding |= value.verdict() == "corrupt" || value.verdict() == "gone";
      Json row = {{"key", ValueKeyText(value.key())}, {"verdict", value.verdict()}};
      row["tiers"] = std::vector<std::string>(value.tiers().begin(), value.tiers().end());
      row["detail"] = value.detail();
      document["values"].push_back(std::move(row));
    }
  }
  PrintList(options.style, document, "values", kVerdicts, std::cout);
  return finding ? kFailed : kOk;
}

}  // namespace

void AddValue(CLI::App& app, Invocation& invocation) {
  CLI::App* noun = app.add_subcommand("value", "Values of memory and disk, one by one");

  CLI::App* list = noun->add_subcommand("ls", "What memory and disk hold, and under which key");
  auto listing = std::make_shared<Listing>();
  list->add_option("--model", listing->model, "Only what is known to be of it: number or name");
  list->add_option("--tier", listing->tier, "Only what is there")
      ->check(CLI::IsMember({"device", "host", "disk"}));
  list->add_option("--limit", listing->limit, "At most so many; 0: all (default: 1000)");
  list->add_option("--after", listing->after, "Go on where a list ended: its `next`");
  Shows(list, invocation, ListValues, listing);

  CLI::App* get = noun->add_subcommand("get", "Write the raw bytes of a value to a file");
  auto fetch = std::make_shared<ValueFile>();
  get->add_option("KEY", fetch->key, kValueKeyForm)->required();
  get->add_option("--out", fetch->file, "The file; it must not exist")->required();
  get->add_flag("--force", fetch->force, "Overwrite the file");
  Runs(get, invocation, Get, fetch);

  CLI::App* verify =
      noun->add_subcommand("verify", "Read values again and check them; exit 1 on a finding");
  auto keys = std::make_shared<std::vector<std::string>>();
  verify->add_option("KEY", *keys, std::string(kValueKeyForm) + "; several")->required();
  Runs(verify, invocation, Verify, keys);
}

}  // namespace kvstrata::cli
