# SPDX-License-Identifier: Apache-2.0
"""Two ranks on one CPU. Tensor parallel ones have a part of a chunk each, and in canonical rows other numbers of ranks
read what they wrote; data parallel ones are two engines of one model."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from kvstrata.daemon import Daemon

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm installs it")

from conftest import PATIENCE, ROOT, assert_same  # noqa: E402
from families import made, prompt  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

BATCH: dict[str, Any] = {"prompts": [prompt(600)], "tokens": 8}
RANKS = {1: {}, 2: {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "disable_custom_all_reduce": True}}


@pytest.fixture
def heads(tmp_path: pathlib.Path) -> dict[str, Any]:
    """A model that can be divided."""
    if (os.cpu_count() or 1) < 2:
        pytest.skip("vLLM wants a core for each rank")
    return made("divisible", tmp_path)


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """One a rank; vLLM divides by NUMA nodes otherwise."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")


def held(batches: list[list[dict[str, Any]]]) -> list[int]:
    return [rows[0]["held"] for rows in batches]


def test_two_ranks(engine, heads: dict[str, Any]):
    ran = engine("chunks", [BATCH, {**BATCH, "reset": True}], **heads, **RANKS[2])["batches"]
    assert held(ran) == [0, 512]
    assert_same(*ran)


@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 2)])
def test_what_so_many_ranks_wrote_others_read(engine, heads: dict[str, Any], monkeypatch: pytest.MonkeyPatch, first: int,
                                              second: int):
    """Where rows are canonical, and the user names the model: parts of it have sums of their own."""
    with Daemon() as daemon:
        spec = {"socket": daemon.socket, "extra": {"canonical_layout": True, "digest": "of whole heads"}}
        ran = []
        for ranks in (first, second):
            monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1" if ranks == 2 else "nobind")
            ran += engine("chunks", [BATCH], spec, **heads, **RANKS[ranks])["batches"]
    assert held(ran) == [0, 512]
    assert_same(*ran)


def replicas(at: pathlib.Path, socket: str, **llm: Any) -> subprocess.CompletedProcess[str]:
    """bench/vllm_gpu/replicas.py with the model, two ranks of it; what it records lies in the folder `at`."""
    transfer = {"kv_connector": "KvstrataConnector", "kv_role": "kv_both",
                "kv_connector_extra_config": {"socket": socket}}
    arguments = {"data_parallel_size": 2, "enforce_eager": True, "max_num_batched_tokens": 512, "max_num_seqs": 8,
                 "gpu_memory_utilization": 0.25, "dtype": "float32", "kv_transfer_config": transfer,
                 "worker_extension_cls": "recorder.Recorder", **llm}
    (at / "records").mkdir(exist_ok=True)
    (at / "specs.json").write_text(json.dumps([["two", arguments, {}]]))
    return subprocess.run([sys.executable, ROOT / "bench" / "vllm_gpu" / "replicas.py", at / "specs.json"],
                          capture_output=True, text=True, timeout=PATIENCE,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "VLLM_CPU_KVCACHE_SPACE": "1",
                               "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
                               "HF_HUB_OFFLINE": "1", "VLLM_CPU_CI_ENV": "1", "KVSTRATA_RECORDS": str(at / "records")})


def test_data_parallel_ranks_load_what_the_other_stored(heads: dict[str, Any], tmp_path: pathlib.Path):
    """Both at once, behind one daemon: bytes are those stored, and tokens those behind a rank's own prefix hit."""
    with Daemon() as daemon:
        ran = replicas(tmp_path, daemon.socket, **heads)
    assert ran.returncode == 0, ran.stderr[-9000:]
    found = json.loads(ran.stdout)
    assert found["held"] == [[0, 0], [1280, 1280], [1280, 1280]]
    assert found["equal_to_hit"] == [True, True]
    assert found["wrong"] == found["unknown"] == 0 < found["pages"]


def test_experts_of_all_data_parallel_ranks_name_the_model(heads: dict[str, Any], tmp_path: pathlib.Path):
    """vLLM divides experts among them. Names are told at the start; its CPU build has no forward of such a model."""
    model = made("gpt_oss", tmp_path)
    weights = pathlib.Path(model["model"]) / "model.safetensors"
    named = []
    with Daemon() as daemon:
        for _ in range(2):
            ran = replicas(tmp_path, daemon.socket, **model)
            named.append(re.findall("kvstrata is below vLLM's cache: .*, model ([0-9a-f]{8})", ran.stderr + ran.stdout))
            assert len(named[-1]) == 2, ran.stderr[-9000:]
            tensors = load_file(weights)
            tensors["model.layers.0.mlp.experts.down_proj"][:, -1] += 1  # the second rank has it alone
            save_file(tensors, weights, metadata={"format": "pt"})
    assert [len({*names}) for names in named] == [1, 1]
    assert named[0] != named[1]


def test_experts_that_move_are_refused():
    from kvstrata_vllm.flags import refuse_chunks
    from kvstrata_vllm.unsupported import Unsupported
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}),
        parallel_config=SimpleNamespace(nnodes_within_dp=1, enable_elastic_ep=True),
        attention_config=SimpleNamespace(hisparse_config=None), device_config=SimpleNamespace(device_type="cuda"))
    with pytest.raises(Unsupported, match="take --enable-elastic-ep or"):
        refuse_chunks(config)
