# SPDX-License-Identifier: Apache-2.0
"""vLLM's own cache with kvstratad below it: what one engine stored another finds, and whatever happens to the daemon,
no request is lost and no token is another's. Small random models."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm installs it")

from kvstrata.daemon import Daemon  # noqa: E402

from conftest import PATIENCE, SEED, assert_same, command_of  # noqa: E402
from families import made, prompt  # noqa: E402
from restarts import disk_of  # noqa: E402

CHUNK, NEW = 256, 12


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return made("llama", tmp_path_factory.mktemp("llama"))


def whole(ids: list[int]) -> int:
    return (len(ids) - 1) // CHUNK * CHUNK


def held(rows: list[dict[str, Any]]) -> list[int]:
    return [row["held"] for row in rows]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment())


def tell(process: subprocess.Popen[str], batch: dict[str, Any]) -> None:
    assert process.stdin is not None
    print(json.dumps(batch), file=process.stdin, flush=True)


def answer(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"the process ended with {process.wait()}"
    return json.loads(line)


PROMPTS = [prompt(tokens, number) for number, tokens in enumerate((300, 600, 900, 40))]
BATCH: dict[str, Any] = {"prompts": PROMPTS, "tokens": NEW}
AGAIN = {**BATCH, "reset": True}


def test_an_engine_beside_another_and_one_behind_both(engine, llama, tmp_path: pathlib.Path):
    """What the first computed is there for all who come, and what the second adds is there for the first."""
    more = {"prompts": [prompt(700, 9)], "tokens": NEW}
    with Daemon() as daemon:
        with start(command_of(tmp_path, "chunks", None, {"socket": daemon.socket}, **llama)) as beside:
            assert answer(beside) == "ready"
            tell(beside, BATCH)
            computed = answer(beside)
            again, added = engine("chunks", [BATCH, more], {"socket": daemon.socket}, **llama)["batches"]
            tell(beside, more)
            found = answer(beside)
            beside.stdin.close()
        behind, = engine("chunks", [BATCH], {"socket": daemon.socket}, **llama)["batches"]
    assert held(computed) == [0] * 4 and held(again) == held(behind) == [*map(whole, PROMPTS)]
    assert held(added) == [0] and held(found) == [512]
    for want, rows in ((computed, again), (computed, behind), (added, found)):
        assert_same(want, rows)


def test_other_weights_find_nothing(engine, llama, tmp_path: pathlib.Path):
    others = made("llama", tmp_path, seed=SEED + 1)
    with Daemon() as daemon:
        first, second = (engine("chunks", [BATCH], {"socket": daemon.socket}, **model)["batches"][0]
                         for model in (llama, others))
    assert held(first) == held(second) == [0] * 4
    assert first[1]["tokens"] != second[1]["tokens"]


def test_a_daemon_that_is_stopped(engine, llama):
    """Before the batch, amid stores, amid loads: all requests end as they would, and no step waits."""
    many = {"prompts": [prompt(300 + 40 * number, number) for number in range(8)], "tokens": NEW}
    stops = [{**many, "reset": True, "stop_at": at} for at in (0, 1, 2, 3)]
    # Twice behind them: requests that come in the first moments may be computed, before the link is known to be well.
    ran = engine("chunks", [many, *stops, *[{**many, "reset": True}] * 2], **llama)
    plain = engine(None, [many, {**many, "reset": True}], **llama)
    for rows in ran["batches"]:
        assert_same(plain["batches"][0], rows)
    assert held(ran["batches"][-1]) == [*map(whole, many["prompts"])]
    print(f"longest step: plain {max(plain['longest']) * 1e3:.0f} ms, with the daemon stopped "
          f"{max(ran['longest'][1:5]) * 1e3:.0f} ms")


def test_a_daemon_that_is_killed(engine, llama, amount):
    """Before the n-th copy of a batch. What was held before it died is loaded; the engine then goes on without."""
    random = np.random.default_rng(SEED)
    moments = [int(random.integers(0, 2 * len(PROMPTS))) for _ in range(amount(10))]
    print(f"seed {SEED}, killed at copies {moments}")
    for at in moments:
        ran = engine("chunks", [BATCH, {**AGAIN, "kill_at": at}, AGAIN], **llama)
        for rows in ran["batches"]:
            assert_same(ran["batches"][0], rows)
        assert "takes the daemon that runs at its next start" in ran["log"] or at >= 3
        assert held(ran["batches"][2]) in ([0] * 4, [*map(whole, PROMPTS)])


def test_a_load_that_fails_is_computed(engine, llama):
    ran = engine("chunks", [BATCH, AGAIN], {"fail_loads": True}, **llama)
    assert_same(*ran["batches"])
    assert held(ran["batches"][1]) == [0] * 4


def test_preempted_requests_go_on(engine, llama):
    """On blocks for little more than the longest: vLLM takes them back while they are stored."""
    ran = engine("chunks", [BATCH, AGAIN], num_gpu_blocks_override=13, **{**llama, "max_model_len": 1280})
    for rows in ran["batches"]:
        assert_same(ran["batches"][0], rows)


def test_what_is_generated_is_kept_when_asked_for(engine, llama):
    batch = {"prompts": [PROMPTS[0]], "tokens": CHUNK}
    extra = {"extra": {"offload_prompt_only": False}}
    with Daemon() as daemon:
        first, = engine("chunks", [batch], {"socket": daemon.socket, **extra}, **llama)["batches"]
        longer = PROMPTS[0] + first[0]["tokens"] + [7]
        second, = engine("chunks", [{"prompts": [longer], "tokens": 1}], {"socket": daemon.socket, **extra}, **llama
                         )["batches"]
    assert held(second) == [2 * CHUNK]


def test_a_daemon_that_is_started_again_finds_its_disk(engine, llama, tmp_path: pathlib.Path):
    held_then = []
    for _ in range(2):
        with Daemon(*disk_of(tmp_path)) as daemon:
            rows, = engine("chunks", [BATCH], {"socket": daemon.socket}, **llama)["batches"]
            held_then.append(held(rows))
            daemon.process.send_signal(signal.SIGTERM)
            daemon.process.wait()
    assert held_then == [[0] * 4, [*map(whole, PROMPTS)]]


def test_an_engine_that_is_killed(llama, amount, engine, tmp_path: pathlib.Path):
    """By SIGKILL before its n-th copy, in a room for little more than what it has credited: the next one has all of it."""
    random = np.random.default_rng(SEED)
    with Daemon("--set", "chunks.bytes=8MiB") as daemon:
        for number in range(amount(10)):
            at = int(random.integers(0, len(PROMPTS)))
            print(f"seed {SEED}, killed before copy {at}")
            command = command_of(tmp_path, "chunks", [{**BATCH, "die_at": at}], {"socket": daemon.socket}, **llama)
            killed = subprocess.run(command, capture_output=True, timeout=PATIENCE, env=environment())
            assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
        ran = engine("chunks", [BATCH, AGAIN], {"socket": daemon.socket}, **llama)["batches"]
    assert_same(*ran)
    assert held(ran[1]) == [*map(whole, PROMPTS)]


def test_kill_switch(engine, llama):
    """The flags stay, and are vLLM's own affair."""
    ran = engine("disabled", [BATCH, AGAIN], **llama)
    assert_same(engine(None, [BATCH], **llama)["batches"][0], ran["batches"][0])
    assert held(ran["batches"][1]) == [0] * 4 and "vLLM runs without kvstrata" in ran["log"]


@pytest.mark.parametrize(("flags", "extra", "said"), [
    ({"attention_backend": "CUSTOM"}, {}, "--attention-backend CUSTOM serves GPUs only"),
    ({}, {"cpu_bytes_to_use": 1 << 30}, "kvstratad --set chunks.bytes=SIZE"),
    ({}, {"plan": "quest"}, "plans are of --attention-backend CUSTOM"),
    ({}, {"some": 1}, "known are block_size, blocks_per_chunk"),
    ({}, {"socket": "/nowhere/kvstratad.sock"}, "no kvstratad speaks of chunks at /nowhere/kvstratad.sock.chunks"),
])
def test_refusals_before_weights_are_read(engine, llama, flags, extra, said):
    with pytest.raises(AssertionError) as error:
        engine("chunks", [], {"extra": extra}, **llama, **flags)
    assert said in str(error.value)
    assert "Loading weights took" not in str(error.value)
