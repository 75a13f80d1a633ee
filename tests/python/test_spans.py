# SPDX-License-Identifier: Apache-2.0
"""Spans of traced requests, as a collector gets them: read with OpenTelemetry's own messages."""

from __future__ import annotations

import base64
import http.server
import json
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from toy import DIM, HEADS, KV_HEADS, LAYERS, Toy

from kvstrata.daemon import Daemon
from kvstrata.grpc import Client, admin_pb2, compute_pb2, control_pb2

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SECONDS = 30


def parse(body: bytes) -> ExportTraceServiceRequest:
    """OTLP's JSON has ids in hexadecimal, where protobuf's has base64; all else is protobuf's."""
    document = json.loads(body)
    for resource in document["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                for key, size in (("traceId", 16), ("spanId", 8), ("parentSpanId", 8)):
                    raw = bytes.fromhex(span[key])
                    assert len(raw) == size and any(raw), span
                    span[key] = base64.b64encode(raw).decode()
    return json_format.ParseDict(document, ExportTraceServiceRequest())


class Collector:
    """Answers `status` to whoever posts; keeps what came. None: it says nothing."""

    def __init__(self, status: int | None = 200) -> None:
        self.status, self.bodies, self.paths, self.came = status, [], [], threading.Condition()
        self.ends = threading.Event()
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.headers["Content-Type"] == "application/json"
                with collector.came:
                    collector.bodies.append(body)
                    collector.paths.append(self.path)
                    collector.came.notify_all()
                if collector.status is None:
                    collector.ends.wait(SECONDS)
                    return
                self.send_response(collector.status)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.endpoint = f"http://127.0.0.1:{self.server.server_address[1]}/v1/traces"

    def spans(self) -> list[Span]:
        with self.came:
            bodies = list(self.bodies)
        return [span for body in bodies for resource in parse(body).resource_spans
                for scope in resource.scope_spans for span in scope.spans]

    def await_spans(self, *names: str) -> dict[str, Span]:
        """The last span of each name, when all of them have come."""
        deadline = time.monotonic() + SECONDS
        while True:
            found = {span.name: span for span in self.spans()}
            if all(name in found for name in names):
                return found
            with self.came:
                assert self.came.wait(max(0, deadline - time.monotonic())), f"{names}: there are {list(found)}"

    def close(self) -> None:
        self.ends.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    started = Collector()
    yield started
    started.close()


def traceparent(flags: str = "01", trace: str = TRACE) -> tuple[tuple[str, str], ...]:
    return (("traceparent", f"00-{trace}-{CALLER}-{flags}"),)


class Caller:
    """A session over gRPC that can open prompts and run them."""

    def __init__(self, client: Client, toy: Toy) -> None:
        self.client, self.toy, self.session = client, toy, client.open_session("traced")
        self.model = client.call(client.control.RegisterModel, control_pb2.RegisterModelRequest(
            session=self.session.id, name="toy", digest=toy.digest,
            geometry=control_pb2.Geometry(layers=LAYERS, query_heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM,
                                          page_tokens=16, dtype=control_pb2.DTYPE_BF16))).model

    def open(self, metadata: tuple = (), model: int = 0) -> control_pb2.OpenSequenceResponse:
        request = control_pb2.OpenSequenceRequest(session=self.session.id, model=model or self.model,
                                                  plan="full", tokens=self.toy.ids)
        return self.client.control.OpenSequence(request, metadata=metadata, timeout=SECONDS)

    def close(self, sequence: int) -> None:
        self.client.call(self.client.control.CloseSequence, control_pb2.CloseSequenceRequest(
            session=self.session.id, sequence=sequence))

    def run(self, sequence: int, metadata: tuple) -> int:
        """All tokens in one step, committed; its number."""
        ids, session = self.toy.ids, self.session.id
        step = self.client.call(self.client.compute.StepBegin, compute_pb2.StepBeginRequest(
            session=session, members=[compute_pb2.StepMember(sequence=sequence, tokens=ids)])).step
        tensor = lambda x: compute_pb2.TensorRef(dtype=control_pb2.DTYPE_F32, tokens=len(ids), heads=x.shape[1],
                                                 head_dim=DIM, inline=x.tobytes())
        for layer in range(LAYERS):
            self.client.call(self.client.compute.Append, compute_pb2.AppendRequest(
                session=session, step=step, layer=layer, k=tensor(self.toy.k[layer]), v=tensor(self.toy.v[layer])))
        self.client.compute.StepEnd(compute_pb2.StepEndRequest(session=session, step=step),
                                    metadata=metadata, timeout=SECONDS)
        self.client.call(self.client.compute.PrefillDone, compute_pb2.PrefillDoneRequest(
            session=session, sequence=sequence))
        return step


def number(span: Span, key: str) -> int:
    return next(a.value.int_value for a in span.attributes if a.key == f"kvstrata.{key}")


def exported(client: Client, result: str) -> float:
    text = client.call(client.admin.GetMetrics, admin_pb2.GetMetricsRequest()).text
    line = next(line for line in text.splitlines() if line.startswith(f'kvstrata_spans_total{{result="{result}"}}'))
    return float(line.split()[-1])


def test_an_open_from_end_to_end(collector: Collector, random: np.random.Generator, tmp_path):
    toy = Toy(random, 96)
    disk = ["--set", f"disk.path={tmp_path}/tier", "--set", "disk.budget_bytes=16MiB",
            "--set", "disk.segment_bytes=1MiB", "--set", "disk.load_timeout=30s"]
    with Daemon("--set", f"trace.endpoint={collector.endpoint}", *disk) as daemon, Client(daemon.socket) as client:
        caller = Caller(client, toy)
        first = caller.open(traceparent())
        spans = collector.await_spans("open", "open.publish")
        assert number(spans["open.disk_load"], "disk_values") == 0
        step = caller.run(first.sequence, traceparent())
        spans = collector.await_spans("commit")
        assert number(spans["commit"], "step") == step
        caller.close(first.sequence)
        deadline = time.monotonic() + SECONDS
        while not client.call(client.admin.Drain, admin_pb2.DrainRequest()).drained:
            assert time.monotonic() < deadline
        client.call(client.admin.Evict, admin_pb2.EvictRequest())
        collector.bodies.clear()

        begun = time.time_ns()
        second = caller.open(traceparent())
        ended = time.time_ns()
        assert second.held_tokens == 80
        spans = collector.await_spans("open", "open.prepare", "open.disk_load", "open.lookup", "open.publish")
        root = spans["open"]
        assert root.trace_id.hex() == TRACE and root.parent_span_id.hex() == CALLER
        assert root.kind == Span.SPAN_KIND_SERVER and root.status.code == Status.STATUS_CODE_OK
        assert (number(root, "sequence"), number(root, "held_tokens")) == (second.sequence, 80)
        assert number(spans["open.disk_load"], "disk_values") >= 5
        at = root.start_time_unix_nano
        assert begun <= at <= ended
        for name in ("open.prepare", "open.disk_load", "open.lookup", "open.publish"):
            part = spans[name]
            assert part.trace_id == root.trace_id and part.parent_span_id == root.span_id, name
            assert at <= part.start_time_unix_nano <= part.end_time_unix_nano <= root.end_time_unix_nano, name
            at = part.end_time_unix_nano
        assert len({span.span_id for span in spans.values()}) == len(spans)

        deadline = time.monotonic() + SECONDS
        client.control.Lookup(control_pb2.LookupRequest(session=caller.session.id, model=caller.model,
                                                        tokens=toy.ids), metadata=traceparent(), timeout=SECONDS)
        collector.await_spans("lookup")
        assert set(collector.paths) == {"/v1/traces"}
        while exported(client, "exported") < 12:  # counted when the collector has answered
            assert time.monotonic() < deadline
        assert exported(client, "failed") == 0
    said = b"".join(collector.bodies)
    for secret in [*map(str, toy.ids), toy.digest]:
        assert secret.encode() not in said, secret


def test_a_failure_has_its_reason(collector: Collector, random: np.random.Generator):
    with Daemon("--set", f"trace.endpoint={collector.endpoint}") as daemon, Client(daemon.socket) as client:
        caller = Caller(client, Toy(random, 8))
        with pytest.raises(Exception, match="999"):
            caller.open(traceparent(), model=999)
        failed = collector.await_spans("open")["open"]
        assert failed.status.code == Status.STATUS_CODE_ERROR
        assert {a.key: a.value.string_value for a in failed.attributes}["error.type"] == "MODEL_UNKNOWN"


def test_only_sampled_traces_are_told(collector: Collector, random: np.random.Generator):
    with Daemon("--set", f"trace.endpoint={collector.endpoint}") as daemon, Client(daemon.socket) as client:
        caller = Caller(client, Toy(random, 8))
        for metadata in ((), traceparent("00"), traceparent(trace="0" * 32), traceparent(trace="G" * 32),
                         (("traceparent", "00-x"),), (("traceparent", f"ff-{TRACE}-{CALLER}-01"),),
                         (("traceparent", f"00-{TRACE}-{CALLER}-01-more"),)):
            caller.open(metadata)
        last = caller.open((("traceparent", f"01-{TRACE}-{CALLER}-03-more"),))  # a later version's
        collector.await_spans("open")
        assert [number(s, "sequence") for s in collector.spans() if s.name == "open"] == [last.sequence]


def test_without_an_endpoint_nothing_is_recorded(random: np.random.Generator):
    with Daemon() as daemon, Client(daemon.socket) as client:
        Caller(client, Toy(random, 8)).open(traceparent())
        assert [exported(client, r) for r in ("exported", "failed", "dropped")] == [0, 0, 0]


@pytest.mark.parametrize("status", [500, None])
def test_a_collector_that_fails_is_in_nobodys_way(status: int | None, random: np.random.Generator):
    collector = Collector(status)
    with Daemon("--set", f"trace.endpoint={collector.endpoint}") as daemon, Client(daemon.socket) as client:
        caller = Caller(client, Toy(random, 8))
        deadline = time.monotonic() + SECONDS
        wanted = "failed" if status else "dropped"
        while exported(client, wanted) == 0:
            assert time.monotonic() < deadline
            for _ in range(200):
                caller.close(caller.open(traceparent()).sequence)
        assert exported(client, "exported") == 0
        daemon.process.terminate()
        assert daemon.process.wait(SECONDS) == 0, "a clean end: it waits for no collector"
        if status:
            assert "event=trace_export" in daemon.said() and "it answered 500" in daemon.said()
    collector.close()
