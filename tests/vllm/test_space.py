# SPDX-License-Identifier: Apache-2.0
"""Which engines share chunks, adapters by their files, and what is refused. Without an engine."""

from __future__ import annotations

import pathlib
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm installs it")

from kvstrata.chunks import Welcome  # noqa: E402
from kvstrata.torch_identity import Identity  # noqa: E402
from kvstrata_vllm.adapters import Adapters  # noqa: E402
from kvstrata_vllm.chunk_metadata import Loaded  # noqa: E402
from kvstrata_vllm.flags import KNOWN, name_spec, refuse_chunks, refuse_workers, warn_of_hashes  # noqa: E402
from kvstrata_vllm.space import combined, space_of  # noqa: E402
from kvstrata_vllm.unsupported import Unsupported  # noqa: E402


def test_a_space_goes_by_all_that_is_said():
    names = [space_of(epoch, layout) for epoch in ("a", "b") for layout in ({"row": 1}, {"row": 2}, {"rows": 1})]
    assert len({*names}) == 6 and {len(name) for name in names} == {32}
    assert space_of("a", {"x": 1, "y": 2}) == space_of("a", {"y": 2, "x": 1})


def test_identities_of_ranks():
    first, second = Identity("a" * 64, None), Identity("b" * 64, None)
    assert combined({0: first}) == first and combined({0: first, 1: first}) == first  # one that a user names
    assert combined({0: first, 1: second}) == combined({1: second, 0: first})
    assert combined({0: first, 1: second}) != combined({0: second, 1: first})
    assert combined({0: first, 1: Identity("b" * 64, "a hook")}).private == "a hook"


def lora(path: pathlib.Path) -> SimpleNamespace:
    return SimpleNamespace(lora_name="n", lora_path=str(path))


def write(path: pathlib.Path, weights: bytes) -> None:
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text("{}")
    (path / "adapter_model.safetensors").write_bytes(weights)
    (path / "README.md").write_text("not its own")


def test_an_adapter_is_its_files(tmp_path: pathlib.Path):
    salts = []
    for name, weights in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        write(tmp_path / name, weights)
        salt = Adapters().salt_of(lora(tmp_path / name))
        assert salt is not None
        salts.append(salt.result(60))
    assert salts[0] == salts[1] != salts[2] and len(salts[0]) == 32


def test_an_adapter_whose_files_change_is_nobodys(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture):
    adapters = Adapters()
    write(tmp_path / "a", b"1")
    assert adapters.salt_of(lora(tmp_path / "a")) is adapters.salt_of(lora(tmp_path / "a")) is not None
    write(tmp_path / "a", b"22")
    assert adapters.salt_of(lora(tmp_path / "a")) is None and adapters.salt_of(lora(tmp_path / "a")) is None
    assert caplog.text.count("have changed since it was first used") == 1
    assert adapters.salt_of(lora(tmp_path / "nowhere")) is None
    assert "is not in a local folder" in caplog.text


@pytest.mark.parametrize(("algorithm", "seed", "warns"), [("xxhash", None, True), ("xxhash", "0", False),
                                                          ("sha256", None, False)])
def test_names_that_no_other_process_has(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
                                         algorithm: str, seed: str | None, warns: bool):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    warn_of_hashes(SimpleNamespace(cache_config=SimpleNamespace(prefix_caching_hash_algo=algorithm)))
    assert ("Set PYTHONHASHSEED to one number" in caplog.text) == warns


def config(extra: dict[str, Any] | None = None, nodes: int = 1, hisparse: object = None, device: str = "cpu"
           ) -> SimpleNamespace:
    return SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra or {}),
                           attention_config=SimpleNamespace(hisparse_config=hisparse),
                           parallel_config=SimpleNamespace(nnodes_within_dp=nodes),
                           device_config=SimpleNamespace(device_type=device))


@pytest.mark.parametrize(("what", "said"), [
    ({"extra": {"cpu_bytes_to_use": 1}}, "cpu_bytes_to_use = 1: the region is the daemon's: kvstratad --set chunks.bytes=SIZE"),
    ({"extra": {"sync_load_budget_bytes": 1}}, "sync_load_budget_bytes = 1: known are block_size, blocks_per_chunk"),
    ({"extra": {"spec_name": "CPUOffloadingSpec"}}, "spec_name"),
    ({"nodes": 2}, "one scheduler over 2 nodes.*KVSTRATA_DISABLE=1"), ({"hisparse": object()}, "HiSparse"),
    ({"device": "xpu"}, "the device is xpu")])
def test_what_is_refused(what: dict[str, Any], said: str):
    with pytest.raises(Unsupported, match=said):
        refuse_chunks(config(**what))


def test_what_is_not():
    refuse_chunks(config({key: "" for key in KNOWN}, device="cuda"))
    made = config({"socket": "s"})
    name_spec(made)
    refuse_chunks(made)  # as the second connector of a process sees it


@pytest.mark.parametrize(("welcome", "said"), [(Welcome(2, 1, 1), "different lives of kvstratad"),
                                               (Welcome(1, 1, 2), "chunks of worker 1 have 2 bytes")])
def test_workers_that_do_not_fit(welcome: Welcome, said: str):
    same = Loaded(0, Identity("a", None), [], Welcome(1, 1, 1))
    refuse_workers(same.welcome, [same])
    with pytest.raises(Unsupported, match=said):
        refuse_workers(same.welcome, [same, Loaded(1, Identity("a", None), [], welcome)])
