// SPDX-License-Identifier: Apache-2.0
// pool ls, evict: the daemon's memory.
#include <unistd.h>

#include <iostream>
#include <memory>

#include "client/cli/connection.h"
#include "client/cli/invocation.h"
#include "client/cli/quota_table.h"

namespace kvstrata::cli {
namespace {

constexpr Column kPoolList[] = {
    {"TIER", "/tier"},
    {"DEVICE", "/device", nullptr, false, 9},
    {"CAPACITY", "/capacity_bytes", Bytes, true, 7},
    {"TAKEN", "/taken_bytes", Bytes, true, 6},
    {"USED", "/used_bytes", Bytes, true, 7},
    {"CACHED", "/cached_bytes", Bytes, true, 5},
    {"PINNED", "/pinned_bytes", Bytes, true, 4},
    {"AWAITING-READERS", "/retired_bytes", Bytes, true},
    {"ARENAS", "/arenas", nullptr, true, 1},
    {"ARENA-SIZE", "/arena_bytes", Bytes, true},
    {"FAILURE", "/failure", nullptr, false, 8, 12},
};

// A pool is called what `tier resize --device` takes, that of the host by its tier.
std::string PoolName(const Json& pool) {
  const std::string device = pool.value("device", "");
  return Printable(device.empty() ? pool.value("tier", "") : device);
}
constexpr Column kNames[] = {{"POOL", "", PoolName}};

Result<int> ListPools(const Options& options) {
  KVS_ASSIGN_OR_RETURN(const auto answer,
                       Ask(options, &v1::Admin::Stub::ListPools, v1::ListPoolsRequest()));
  const Json document = ToJson(answer);
  const bool names = options.style.format == Format::kName;
  PrintList(options.style, document, "pools", names ? std::span<const Column>(kNames) : kPoolList,
            std::cout);
  PrintCgroups(options.style, document, std::cout);
  return kOk;
}

constexpr Column kEvicted[] = {
    {"TIER", "/tier"},
    {"PAGES", "/pages", nullptr, true},
    {"BYTES", "/bytes", Bytes, true},
    {"ALSO-ON-DISK", "/stored_pages", nullptr, true},
    {"RECOMPRESSED", "/artefact_pages", nullptr, true},
    {"KEPT-BY-PINS", "/pinned_bytes", Bytes, true},
};

// Dropping the cache costs the next requests their prefix: somebody must have said so.
Result<bool> Confirmed(bool yes) {
  if (yes) return true;
  if (isatty(STDIN_FILENO) != 1) {
    return InvalidArgument(
        "CONFIRMATION_MISSING",
        "evict drops cached prefixes; without a terminal to ask on it needs --yes "
        "(or --dry-run to see what it would drop)");
  }
  std::cerr << "Drop every cached page that no sequence uses and no pin keeps? [y/N] "
            << std::flush;
  std::string answer;
  std::getline(std::cin, answer);
  return answer == "y" || answer == "Y" || answer == "yes";
}

Result<int> Evict(const Options& options, bool dry_run, bool yes) {
  if (!dry_run) {
    KVS_ASSIGN_OR_RETURN(const bool go, Confirmed(yes));
    if (!go) return kFailed;
  }
  v1::EvictRequest request;
  request.set_dry_run(dry_run);
  KVS_ASSIGN_OR_RETURN(const auto answer, Ask(options, &v1::Admin::Stub::Evict, request));
  Json document = ToJson(answer);
  document["dry_run"] = dry_run;
  PrintList(options.style, document, "tiers", kEvicted, std::cout);
  return kOk;
}

}  // namespace

void AddPool(CLI::App& app, Invocation& invocation) {
  CLI::App* noun = app.add_subcommand("pool", "Pools: the memory of each tier");
  Shows(noun->add_subcommand("ls",
                             "Capacity, use and cache of every pool; PINNED: what only pins keep"),
        invocation, ListPools);

  CLI::App* evict = app.add_subcommand("evict", "Drop cached pages that no sequence uses");
  auto dry_run = std::make_shared<bool>(false), yes = std::make_shared<bool>(false);
  evict->add_flag("--dry-run", *dry_run, "Only list what it would drop, by tier");
  evict->add_flag("-y,--yes", *yes, "Do not ask");
  Runs(evict, invocation, Evict, dry_run, yes);
}

}  // namespace kvstrata::cli
