// SPDX-License-Identifier: Apache-2.0
// model ls|show: geometries that engines have registered.
#include <iostream>
#include <memory>

#include "client/cli/connection.h"
#include "client/cli/invocation.h"

namespace kvstrata::cli {
namespace {

constexpr Column kModelList[] = {
    {"MODEL", "/model", nullptr, true},
    {"NAME", "/name", nullptr, false, 6, 16},
    {"LAYERS", "/geometry/layers", nullptr, true, 3},
    {"HEADS", "/geometry/query_heads", nullptr, true, 2},
    {"KV-HEADS", "/geometry/kv_heads", nullptr, true, 2},
    {"DIM", "/geometry/head_dim", nullptr, true, 2},
    {"DTYPE", "/geometry/dtype", nullptr, false, 3},
    {"PAGE-TOKENS", "/geometry/page_tokens", nullptr, true},
    {"PAGE", "/page_bytes", Bytes, true, 1},
    {"SEQUENCES", "/sequences", nullptr, true, 5},
    {"CACHED-PAGES", "/cached_pages", nullptr, true, 5},
};
constexpr Column kModelRecord[] = {
    {"MODEL", "/model"},
    {"NAME", "/name"},
    {"DIGEST", "/digest"},
    {"ADAPTER", "/adapter"},
    {"LAYERS", "/geometry/layers"},
    {"QUERY-HEADS", "/geometry/query_heads"},
    {"KV-HEADS", "/geometry/kv_heads"},
    {"HEAD-DIM", "/geometry/head_dim"},
    {"DTYPE", "/geometry/dtype"},
    {"PAGE-TOKENS", "/geometry/page_tokens"},
    {"KEYS-PRE-ROPE", "/keys_pre_rope"},
    {"ROPE-THETA", "/rope/theta"},
    {"ROPE-DIM", "/rope/dim"},
    {"ROPE-INTERLEAVED", "/rope/interleaved"},
    {"PAGE-BYTES", "/page_bytes", Bytes},
    {"TOKEN-BYTES", "/token_bytes", Bytes},
    {"SEQUENCES", "/sequences"},
    {"CACHED-PAGES", "/cached_pages"},
    {"BOUNDARY-TOKENS", "/boundary_tokens"},
};

Result<int> ShowModel(const Options& options, const std::string& wanted) {
  KVS_ASSIGN_OR_RETURN(auto connection, Connection::Dial(options));
  KVS_ASSIGN_OR_RETURN(const v1::Model model, NamedModel(connection.get(), wanted));
  PrintRecord(options.style, ToJson(model), kModelRecord, std::cout);
  return kOk;
}

}  // namespace

void AddModel(CLI::App& app, Invocation& invocation) {
  CLI::App* noun = app.add_subcommand("model", "Models: geometries that engines registered");
  Shows(noun->add_subcommand("ls", "All registered models"), invocation,
        Lists(&v1::Control::Stub::ListModels, "models", kModelList));
  auto model = std::make_shared<std::string>();
  CLI::App* show = noun->add_subcommand("show", "One model's geometry and sizes");
  show->add_option("MODEL", *model, "Its number or name")->required();
  Runs(show, invocation, ShowModel, model);
}

}  // namespace kvstrata::cli
