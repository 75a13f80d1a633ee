# SPDX-License-Identifier: Apache-2.0
"""A daemon of an older release: what it does not know is named with both versions, on the CLI and remotely."""

from __future__ import annotations

import concurrent.futures
import json
import os
import pathlib
import subprocess
from collections.abc import Iterator

import grpc
import pytest

import kvstrata
from kvstrata.v1 import admin_pb2, control_pb2

OLD = "0.0.9"


class OlderDaemon(grpc.GenericRpcHandler):
    """Serves a status, sessions and opens that reserve and hide nothing; everything else is unknown to it."""

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        if call.method.endswith("/GetStatus"):
            status = admin_pb2.GetStatusResponse(version=OLD, commit="f00", health="serving")
            return grpc.unary_unary_rpc_method_handler(lambda _, __: status.SerializeToString())
        if call.method.endswith("/OpenSession"):
            return grpc.unary_stream_rpc_method_handler(self.open)
        OlderDaemon.asked.append(call.method.rsplit("/", 1)[1])
        known = OlderDaemon.answers.get(OlderDaemon.asked[-1])
        if known is None:
            return None
        return grpc.unary_unary_rpc_method_handler(lambda _, __: known.SerializeToString())

    answers = {"RegisterModel": control_pb2.RegisterModelResponse(model=3),
               "OpenSequence": control_pb2.OpenSequenceResponse(sequence=5, plan="full"),
               "CloseSequence": control_pb2.CloseSequenceResponse()}

    @staticmethod
    def open(_: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        yield control_pb2.OpenSessionResponse(session=7, backend="ref", version=OLD).SerializeToString()
        while context.is_active() and not OlderDaemon.stopping.done():
            concurrent.futures.wait([OlderDaemon.stopping], timeout=0.05)

    stopping: concurrent.futures.Future[None]
    asked: list[str]


@pytest.fixture
def older(tmp_path: pathlib.Path) -> Iterator[str]:
    socket = str(tmp_path / "old.sock")
    OlderDaemon.stopping, OlderDaemon.asked = concurrent.futures.Future(), []
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(4), handlers=[OlderDaemon()])
    server.add_insecure_port("unix:" + socket)
    server.start()
    yield socket
    OlderDaemon.stopping.set_result(None)
    server.stop(0).wait()


def run(socket: str, *words: str) -> subprocess.CompletedProcess[str]:
    program = pathlib.Path(os.environ["KVSTRATAD"]).with_name("kvstrata")
    return subprocess.run([program, "--socket", socket, *words], capture_output=True, text=True, timeout=60,
                          check=False)


def test_a_call_that_it_does_not_know_names_both_versions(older: str) -> None:
    done = run(older, "pin", "ls")
    assert done.returncode != 0
    assert "RPC_UNIMPLEMENTED" in done.stderr
    assert f"kvstrata {kvstrata.__version__} asked kvstratad {OLD} (f00), which has no 'pin ls'" in done.stderr
    assert "upgrade the daemon" in done.stderr
    assert "next: restart the daemon" in done.stderr


def test_top_does_without_what_it_does_not_know(older: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OlderDaemon.answers, "ListSequences", admin_pb2.ListSequencesResponse())
    monkeypatch.setitem(OlderDaemon.answers, "ListSessions", admin_pb2.ListSessionsResponse())
    done = run(older, "top", "--once", "-d", "10ms", "-o", "json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["engines"] == [] and "ListEngineRecalls" in OlderDaemon.asked


@pytest.mark.parametrize("words", [["seq", "map", "1"], ["events"], ["tier", "scrub"], ["plan", "ls", "-o", "json"]])
def test_the_verb_is_named_whatever_kind_of_call_it_makes(older: str, words: list[str]) -> None:
    done = run(older, *words)
    assert done.returncode == 1
    verb = " ".join(words[:1] if words[0] == "events" else words[:2])
    assert f"which has no '{verb}'" in done.stderr


def test_its_status_comes_with_a_warning_once(older: str) -> None:
    done = run(older, "status", "-o", "json")
    assert done.returncode == 0
    assert done.stderr.count("warning") == 1
    assert OLD in done.stderr


def test_the_remote_transport_names_both_versions(older: str) -> None:
    with kvstrata.attach(older, transport="remote", timeout_ms=5000) as session:
        model = session.register_model("toy", "digest", layers=2, query_heads=4, kv_heads=2, head_dim=64,
                                       page_tokens=16)
        with pytest.raises(kvstrata.KvstrataError) as refused:
            session.capacity(model)
    assert refused.value.reason == "RPC_UNIMPLEMENTED"
    assert f"the daemon is {OLD}" in str(refused.value)
    assert "restart the daemon" in str(refused.value)


def test_a_reservation_that_it_does_not_know_is_refused(older: str) -> None:
    with kvstrata.attach(older, transport="remote") as session:
        model = session.register_model("m", "d", layers=1, query_heads=1, kv_heads=1, head_dim=64)
        session.open(model).close()
        with pytest.raises(kvstrata.Unimplemented, match="reserve_tokens is 100"):
            session.open(model, reserve_tokens=100)


def test_a_private_sequence_that_it_does_not_know_is_refused(older: str) -> None:
    with kvstrata.attach(older, transport="remote") as session:
        model = session.register_model("m", "d", layers=1, query_heads=1, kv_heads=1, head_dim=64)
        with pytest.raises(kvstrata.Unimplemented, match="private_pages is 1.*update the daemon") as refused:
            session.open(model, private=True)
        assert refused.value.reason == "PRIVATE_PAGES"
        assert OlderDaemon.asked[-2:] == ["OpenSequence", "CloseSequence"], "what it would share is closed at once"
