// SPDX-License-Identifier: Apache-2.0
#include "proto/events.h"

#include <algorithm>

namespace kvstrata {
namespace {

constexpr EventKind kEventRows[] = {
    {"accept_failed", "error",
     "Accepting connections failed, as when no descriptor is left; it pauses for 100 ms at a time.",
     "errno why suppressed"},
    {"admin", "info, debug",
     "An operator's verb was done; request has numbers and short texts, of lists their lengths. "
     "Those that only look are debug. One that failed is refused.",
     "verb uid pid request took_us"},
    {"artefact_records", "info", "At the start: records of recompressed prompts that the disk has.",
     "records"},
    {"attach_refused", "warning", "A client could not attach; reason is the one that it got.",
     "reason pid uid why suppressed"},
    {"attached", "info", "A linked client has a session.", "session client pid uid device"},
    {"build_left", "debug", "Somebody closed the sequence whose index a worker was building.",
     "sequence run_us"},
    {"cancelled", "debug",
     "A client gave up a call, or its deadline passed, before the daemon had its request; counted "
     "nowhere.",
     "call uid pid"},
    {"cgroup_memory", "info", "At the start: what the cgroup allows, and is charged.",
     "file limit_bytes charged_bytes reclaimable_bytes"},
    {"chunk_changed", "error",
     "An engine wrote to a chunk after it had stored it; nobody is given it any more, and no tier "
     "gets it.",
     "id row_bytes uid why"},
    {"chunk_client_malformed", "warning",
     "An engine's packet broke the protocol of chunks; why says how. Its connection is ended.",
     "engine pid uid why suppressed"},
    {"chunk_engine_attached", "info",
     "A scheduler or worker of an engine maps the region of chunks.",
     "engine client pid uid role row_bytes"},
    {"chunk_engine_left", "info",
     "A connection of an engine has ended: eof, died, or what was wrong with it.",
     "engine pid uid why"},
    {"chunk_engine_refused", "warning",
     "An engine could not attach; reason is the one that it got.", "reason pid uid why suppressed"},
    {"chunk_region", "info", "Memory for chunks was taken, for the engines of this user.",
     "uid bytes slab_bytes"},
    {"chunks_full", "warning",
     "Engines get no credits: all room for chunks is leased, credited or being summed. They store "
     "less until some is free.",
     "leased_bytes credited_bytes suppressed"},
    {"client_malformed", "warning",
     "A frame broke the format; why says how. The client is disconnected.",
     "session pid uid why suppressed"},
    {"config_changed", "info, warning",
     "A reload found another value. effect is applied, or needs a restart, which is a warning.",
     "key before after where effect by"},
    {"configuration", "warning",
     "At the start: something in the configuration is probably not meant so.", "key why bytes"},
    {"connection_refused", "warning",
     "A connection to the gRPC socket was refused; reason is the one that the client got.",
     "reason uid pid why suppressed"},
    {"descriptor_close_late", "error",
     "Descriptors that clients of uid passed do not close, and keep a thread each.",
     "descriptors uid why"},
    {"descriptors_accepted", "warning",
     "At the start: before Linux 6.16 clients of the gRPC socket can pass descriptors along with "
     "calls.",
     "socket why"},
    {"descriptors_passed", "info", "A process without the library redeemed a token of session.",
     "session pid uid writable"},
    {"detached", "info",
     "A linked client ended its session. freed_bytes is what nothing else refers to: free, or "
     "cached until room is needed.",
     "session client pid uid sequences freed_bytes"},
    {"died", "info",
     "The process of a linked client has died; all of its memory is free. Behind hung_up there may "
     "be nothing left to free.",
     "session client pid uid sequences freed_bytes"},
    {"disk_checkpoint_failed", "warning", "At a clean stop; the next start takes longer.",
     "reason why"},
    {"disk_open", "info, warning",
     "The disk tier is open. A warning has degraded: something is less than asked for.",
     "path queue direct capacity_bytes entries scanned_segments cut_segments degraded"},
    {"event_refused", "debug",
     "A commit or report was refused; the client hears it at its next question.",
     "session sequence reason"},
    {"evicted", "info",
     "One for each burst: pages of memory, of which stored_pages are on disk too, disk_values, and "
     "chunks of engines. An admin event beside it says who; else pools, disk or chunks were full.",
     "pages stored_pages disk_values chunks fullest_pool_percent seconds"},
    {"gpu", "info", "At the start, one for each GPU.", "device free_bytes pool_bytes"},
    {"grpc", "warning, debug", "A line of the library gRPC.", "why suppressed"},
    {"hit_mismatch", "error",
     "An engine computed positions of what a sequence was held for anew, and they differ: two "
     "models, or two ways to compute, share a digest. The sequence is private since.",
     "session sequence first tokens suppressed"},
    {"host_numa", "info, warning",
     "At the start, with several NUMA nodes: those that the host pool's memory comes from; a "
     "warning: the kernel decides.",
     "nodes reason why"},
    {"http", "info", "At the start: http.listen is served.", "listen"},
    {"hung_up", "info",
     "A linked client closed its connection without detaching, or broke the format; its process "
     "lives, and died may follow.",
     "session client pid uid sequences freed_bytes why"},
    {"import_failed", "debug", "A copy of an engine's blocks failed; the engine hears it.",
     "session sequence reason why"},
    {"log_level_set", "info", "kvstrata log level.", "before after by"},
    {"max_loss", "warning",
     "More than max_loss would be lost: raw rows stay, or a milder strategy is taken.",
     "sequence plan why"},
    {"mooncake_agent_ended", "warning",
     "The process that calls Mooncake Store ended; another is started after a pause that grows.",
     "pid why"},
    {"mooncake_agent_ready", "info", "The process that calls Mooncake Store can do so.", "pid"},
    {"node_announced", "info",
     "The remote tier's servers have this node's announcement; other nodes ask it at address.",
     "address seat"},
    {"node_unannounced", "warning",
     "The servers do not take this node's announcement; other nodes do not know of it. Tried again "
     "each second.",
     "address reason why"},
    {"out_of_resources", "error", "A thread gave up a piece of work for want of memory or threads.",
     "thread why"},
    {"passing_ended", "info", "The connection of a process that redeemed a token ended.",
     "session pid why"},
    {"pin_restore", "warning",
     "At the start: a pin of the last daemon that the disk did not take again.", "pin reason why"},
    {"pins_restored", "info", "At the start: pins of the last daemon that go on.", "pins"},
    {"pool_failed", "error", "A pool's device is lost.", "tier device reason why"},
    {"protobuf", "warning, debug", "A line of the library protobuf.", "why suppressed"},
    {"quota_set", "info", "A limit was set or reset.", "user limit value by"},
    {"ready", "info", "The daemon serves.",
     "socket pid version backend device devices device_bytes host_bytes startup_us"},
    {"recompress_failed", "warning, debug",
     "Nothing was published, rows stay raw, it is tried again; as in kvstrata work ls. Debug when "
     "the sequence was closed.",
     "sequence plan reason why"},
    {"recompressed", "debug", "A worker published extents; sums are in kvstrata status.",
     "sequence plan extents written_bytes released_bytes waited_us run_us publish_us"},
    {"refused", "info, warning",
     "A request was answered with reason; a call of ring is a linked client's. A warning where the "
     "daemon lacks something. At most five lines in ten seconds of a reason; suppressed counts the "
     "rest.",
     "reason call uid pid session request why suppressed"},
    {"reload_failed", "error", "A reload found mistakes, one event each, and nothing changed.",
     "by reason why"},
    {"reloaded", "info",
     "A reload ended: how many keys were applied and how many need a restart. by is SIGHUP or an "
     "operator.",
     "by applied need_restart"},
    {"remote_back", "info", "A server of the remote tier answers again.", "server"},
    {"remote_forget_failed", "warning",
     "An older value could not be deleted from the remote tier; it stays, and the newer one is not "
     "written. At most one line a second.",
     "reason why suppressed"},
    {"remote_left_alone", "warning",
     "A server of the remote tier failed in a row; it is left alone for a pause that grows.",
     "server why"},
    {"remote_open", "info",
     "At the start: the remote tier that is configured; servers are those named, and none is "
     "connected to yet. Nodes of one secret and one seal have one secret_fingerprint.",
     "engine servers write seal tls secret_fingerprint"},
    {"remote_pages", "info",
     "At a clean stop, since the start: searches of opening sequences and what they found; values "
     "read, and found ones that did not come; searches and loads that were late or refused; values "
     "written, dropped, gone before they were written, failed.",
     "searches found read missed late refused written dropped gone failed"},
    {"remote_purged", "info", "Values of a prompt were deleted from the remote tier.",
     "tenant values held failed by"},
    {"remote_unlisted", "info",
     "A server of the remote tier that was left alone is none of its cluster's any more: another "
     "one has taken over, or it was forgotten.",
     "server"},
    {"remote_write_failed", "warning",
     "A value was not written to the remote tier, and why, with the server; at most one line a "
     "second, and none while its servers are left alone.",
     "reason why suppressed"},
    {"resized", "info", "kvstrata tier resize; bytes were asked for.",
     "tier device bytes capacity_bytes evicted by"},
    {"sequence_closed", "debug", "A sequence was closed.", "session sequence"},
    {"sequence_opened", "debug", "A sequence was opened; held_tokens were there already.",
     "session sequence plan held_tokens"},
    {"session_ended", "info",
     "A session of the remote transport ended; freed_bytes as of detached.",
     "session transport uid client sequences freed_bytes"},
    {"session_opened", "info", "A client of the remote transport has a session.",
     "session transport uid client"},
    {"signal_ignored", "warning", "A signal that does nothing came.", "signal why suppressed"},
    {"start_failed", "error", "The daemon does not start, and ends.", "reason why"},
    {"state_changed", "info, warning",
     "From one state to another, with why, as of kvstrata health and whether the disk drains; seen "
     "once a second. A warning: it is not well.",
     "from to"},
    {"stop_dropped", "warning",
     "A clean end: so many chunks and pages that engines have computed no tier below has, and why. "
     "Bytes are of those that waited.",
     "chunks pages bytes why"},
    {"stop_writes", "info",
     "A clean end goes on writing what waits for the tiers below, for so long at most.",
     "chunks pages bytes timeout_us"},
    {"stopped", "info", "A clean end; nothing is left behind.", "shutdown_us"},
    {"stopping", "info", "A signal, which ends the daemon.", "signal"},
    {"task_failed", "error",
     "A call that ran on a thread of gRPC's failed in a way that nobody foresaw: a bug.", "why"},
    {"tensor_release_late", "error",
     "Unmapping tensors of an engine that ended hangs in the driver.", "memories why"},
    {"tier_pages", "info",
     "At a clean stop, since the start: pages written, dropped for want of room in the queue, gone "
     "before they were written, failed, evicted for newer ones, read; loads that were late or "
     "refused.",
     "written dropped gone failed evicted checkpoints read late refused"},
    {"tier_read_failed", "warning",
     "Values of a batch could not be read from disk or from the remote tier, and ended a prefix; "
     "why is the first one's, deadline_us what the open had. At most one line a second of a tier.",
     "tier values deadline_us reason why suppressed"},
    {"tier_write_failed", "warning", "A page was not written to disk; at most one line a second.",
     "reason why suppressed"},
    {"trace_export", "info, warning",
     "A collector begins to refuse spans, which is a warning, or takes them again.",
     "endpoint taken why"},
    {"value_lost", "error",
     "A value on disk failed its check or could not be read, and left; at most two lines a second "
     "of a reason.",
     "key segment reason why suppressed"},
    {"work_cpus", "warning", "work.cpus could not be set; workers run on all cores.", "errno why"},
    {"writer_died", "info",
     "A process that redeemed a token and could write has died: arenas of its session may go to "
     "others.",
     "session pid"},
};  // by name
static_assert(std::ranges::is_sorted(kEventRows, {}, &EventKind::name));

}  // namespace

std::span<const EventKind> AllEvents() { return kEventRows; }

const EventKind* FindEvent(std::string_view name) {
  const auto* const at = std::ranges::lower_bound(kEventRows, name, {}, &EventKind::name);
  return at != std::end(kEventRows) && at->name == name ? at : nullptr;
}

}  // namespace kvstrata
