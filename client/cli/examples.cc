// SPDX-License-Identifier: Apache-2.0
#include "client/cli/examples.h"

#include <algorithm>

namespace kvstrata::cli {
namespace {

constexpr Examples kExamples[] = {
    {"status", "kvstrata status", "kvstrata status -o json --timeout 500ms"},
    {"health", "kvstrata health", "kvstrata health -q --live || systemctl restart kvstratad"},
    {"version", "kvstrata version", "kvstrata version -o json"},
    {"plan ls", "kvstrata plan ls", "kvstrata plan ls -o name"},
    {"plan show", "kvstrata plan show quest", "kvstrata plan show 'quest{budget = 1024}' -o yaml"},
    {"model ls", "kvstrata model ls", "kvstrata model ls -o wide"},
    {"model show", "kvstrata model show 1", "kvstrata model show llama -o json"},
    {"session ls", "kvstrata session ls", "kvstrata session ls -o csv > sessions.csv"},
    {"seq ls", "kvstrata seq ls", "kvstrata seq ls --session 3 -o wide"},
    {"seq show", "kvstrata seq show 17", "kvstrata seq show 17 --pages"},
    {"seq map", "kvstrata seq map 17", "kvstrata seq map 17 --columns 32 --ascii"},
    {"seq demote", "kvstrata seq demote 17",
     "kvstrata seq ls --session 3 -o name | xargs -n 1 kvstrata seq demote"},
    {"seq prefetch", "kvstrata seq prefetch 17", "kvstrata seq prefetch 17 -o json"},
    {"seq build", "kvstrata seq build 17", "kvstrata seq build 17 --plan quest --timeout 2m"},
    {"seq recompress", "kvstrata seq recompress 17", "kvstrata seq recompress 17 --cancel"},
    {"pool ls", "kvstrata pool ls", "kvstrata pool ls -o csv"},
    {"evict", "kvstrata evict --dry-run", "kvstrata evict --yes"},
    {"tier ls", "kvstrata tier ls", "kvstrata tier ls -o json"},
    {"tier show", "kvstrata tier show", "kvstrata tier show -o csv"},
    {"tier scrub", "kvstrata tier scrub", "kvstrata tier scrub --rate 200MiB --timeout 1h"},
    {"tier drain", "kvstrata tier drain --timeout 2m", "kvstrata tier drain --resume"},
    {"tier resize", "kvstrata tier resize 64GiB",
     "kvstrata tier resize 16GiB --tier device --device emulated"},
    {"tier probe", "kvstrata tier probe", "kvstrata tier probe llama prompt.ids --plan quest"},
    {"tier purge", "kvstrata tier purge llama prompt.ids --yes",
     "kvstrata tier purge llama prompt.ids --plan quest --tenant uid:1000 --yes"},
    {"value ls", "kvstrata value ls --tier disk --limit 20",
     "kvstrata value ls --model llama -o csv"},
    {"value get", "kvstrata value get pin/0000000000000001 --out pin.bin",
     "kvstrata value get pin/0000000000000001 --out pin.bin --force"},
    {"value verify", "kvstrata value verify pin/0000000000000001",
     "kvstrata value verify pin/0000000000000001 pin/0000000000000002 -o json"},
    {"lookup", "kvstrata lookup llama prompt.ids --cluster",
     "kvstrata lookup llama prompt.ids --plan sentencekv --pages"},
    {"pin ls", "kvstrata pin ls", "kvstrata pin ls -o json"},
    {"pin add", "kvstrata pin add llama system_prompt.ids --ttl 7d",
     "kvstrata pin add --seq 17 --ttl 12h"},
    {"pin rm", "kvstrata pin rm 1", "kvstrata pin ls -o name | xargs -n 1 kvstrata pin rm"},
    {"quota ls", "kvstrata quota ls", "kvstrata quota ls -o csv"},
    {"quota set", "kvstrata quota set uid:1000 sessions 5",
     "kvstrata quota set default host_bytes 8GiB"},
    {"quota reset", "kvstrata quota reset uid:1000 sessions",
     "kvstrata quota reset default host_bytes"},
    {"work ls", "kvstrata work ls", "kvstrata work ls -o wide"},
    {"audit", "kvstrata audit --recall 17 --every 4 --steps 16", "kvstrata audit --engine"},
    {"config show", "kvstrata config show", "kvstrata config show -o csv"},
    {"config reload", "kvstrata config reload --dry-run", "kvstrata config reload"},
    {"config check", "kvstrata config check kvstratad.toml",
     "kvstrata config check kvstratad.toml -o json"},
    {"replay", "kvstrata replay trace.safetensors --plan quest --plan chess",
     "kvstrata replay trace.safetensors --plan 'quest{budget = 1024}' --steps 100 -o json"},
    {"calibrate", "kvstrata calibrate prose.safetensors code.safetensors --out calibrated.toml",
     "kvstrata calibrate prose.safetensors --offline"},
    {"doctor", "kvstrata doctor",
     "kvstrata doctor --config kvstratad.toml --set pool.host_bytes=8GiB"},
    {"events", "kvstrata events", "kvstrata events -f -o json"},
    {"top", "kvstrata top -d 1s", "kvstrata top --once -o json"},
    {"explain", "kvstrata explain POOL_EXHAUSTED", "kvstrata explain value_lost"},
    {"log level", "kvstrata log level", "kvstrata log level debug"},
    {"debug dump", "kvstrata debug dump", "kvstrata debug dump /tmp/kvstrata-dump"},
    {"completion", "source <(kvstrata completion bash)",
     "kvstrata completion fish > ~/.config/fish/completions/kvstrata.fish"},
};

}  // namespace

std::span<const Examples> AllExamples() { return kExamples; }

const Examples* ExamplesOf(std::string_view verb) {
  const auto* const at = std::ranges::find(kExamples, verb, &Examples::verb);
  return at == std::end(kExamples) ? nullptr : at;
}

}  // namespace kvstrata::cli
