# SPDX-License-Identifier: Apache-2.0
"""The gRPC client: what an operator sees, a session of its own, errors with reasons."""

import numpy as np
import pytest
from toy import HEADS, KV_HEADS, LAYERS, DIM, Toy

import kvstrata
from kvstrata.daemon import Daemon
from kvstrata.grpc import Client, compute_pb2, control_pb2


@pytest.fixture
def client(daemon: Daemon):
    with Client(daemon.socket) as opened:
        yield opened


def test_admin_sees_a_linked_engine(daemon: Daemon, client: Client, random: np.random.Generator):
    toy = Toy(random, 64)
    with kvstrata.attach(daemon.socket, client_name="watched") as session:
        with session.open(toy.register(session), "quest{budget = 32}") as sequence:
            toy.feed(session, sequence, 0, 64)
            sequence.settle()
            assert [s.client_name for s in client.sessions() if s.transport == "linked"] == ["watched"]
            mine = [s for s in client.sequences() if s.sequence == sequence.handle]
            assert [(s.tokens, s.plan, s.model_name) for s in mine] == [(64, "quest", "toy")]
            assert mine[0].device_bytes + mine[0].host_bytes > 0
            assert len(client.show_sequence(sequence.handle).pages) >= 4
            assert {pool.tier for pool in client.pools()} == {"device", "host"}
            assert client.audit().clean
    assert client.status().sequences == 0


def test_plans(client: Client):
    assert {"full", "window", "quest", "chess"} <= {plan.name for plan in client.plans()}
    assert client.show_plan("quest").selector == "minmax"
    with pytest.raises(kvstrata.InvalidArgument) as error:
        client.show_plan("qest")
    assert error.value.reason == "PLAN_UNKNOWN"


def test_a_sequence_without_the_library(client: Client, random: np.random.Generator):
    toy = Toy(random, 8)
    with client.open_session("by hand") as session:
        model = client.call(client.control.RegisterModel, control_pb2.RegisterModelRequest(
            session=session.id, name="toy", digest=toy.digest,
            geometry=control_pb2.Geometry(layers=LAYERS, query_heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM,
                                          page_tokens=16, dtype=control_pb2.DTYPE_BF16))).model
        opened = client.call(client.control.OpenSequence, control_pb2.OpenSequenceRequest(
            session=session.id, model=model, plan="full", tokens=toy.ids))
        step = client.call(client.compute.StepBegin, compute_pb2.StepBeginRequest(
            session=session.id, members=[compute_pb2.StepMember(sequence=opened.sequence, tokens=toy.ids)])).step
        tensor = lambda x: compute_pb2.TensorRef(dtype=control_pb2.DTYPE_F32, tokens=8, heads=x.shape[1],
                                                 head_dim=DIM, inline=x.tobytes())
        for layer in range(LAYERS):
            client.call(client.compute.Append, compute_pb2.AppendRequest(
                session=session.id, step=step, layer=layer, k=tensor(toy.k[layer]), v=tensor(toy.v[layer])))
            answer = client.call(client.compute.Attend, compute_pb2.AttendRequest(
                session=session.id, step=step, layer=layer, q=tensor(toy.q[layer])))
            out = np.frombuffer(answer.out.inline, np.float32).reshape(8, HEADS, DIM)
            np.testing.assert_allclose(out[7], toy.expected(layer, 7)[0], rtol=1e-4, atol=1e-5)
        client.call(client.compute.StepEnd, compute_pb2.StepEndRequest(session=session.id, step=step))
        assert session.lookup(model, toy.ids) == 0  # 8 tokens are no whole page


def test_unimplemented_and_unavailable(client: Client, tmp_path):
    with client.open_session() as session, pytest.raises(kvstrata.Unimplemented):
        client.call(client.control.RegisterModel, control_pb2.RegisterModelRequest(
            session=session.id, name="m", digest="d", ranks=2, geometry=control_pb2.Geometry(
                layers=1, query_heads=1, kv_heads=1, head_dim=64, page_tokens=16, dtype=control_pb2.DTYPE_BF16)))
    with Client(tmp_path / "none.sock", timeout=2) as nobody, pytest.raises(kvstrata.Unavailable):
        nobody.status()
