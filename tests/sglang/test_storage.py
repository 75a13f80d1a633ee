# SPDX-License-Identifier: Apache-2.0
"""HiCache's storage, by its contract, over SGLang's own host pools."""

from __future__ import annotations

import hashlib
import pathlib

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed; make test-sglang installs it")

from kvstrata.daemon import Daemon  # noqa: E402
from kvstrata_sglang.geometry import Unsupported  # noqa: E402
from kvstrata_sglang.storage import KvstrataStorage  # noqa: E402
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402

LAYERS, HEADS, DIM, PAGES = 3, 2, 64, 8


def host_pool(layout: str, page_size: int, dtype: torch.dtype = torch.float32, dim: int = DIM) -> MHATokenToKVPoolHost:
    """SGLang's, for a device pool of PAGES pages, full of random rows."""
    rows = [torch.zeros(page_size, HEADS, dim, dtype=dtype) for _ in range(2 * LAYERS)]
    pointers = torch.tensor([x.data_ptr() for x in rows], dtype=torch.uint64)
    buffers = KVBuffers(k=tuple(rows[:LAYERS]), v=tuple(rows[LAYERS:]), k_data_ptrs=pointers[:LAYERS],
                        v_data_ptrs=pointers[LAYERS:], layout=KVBufferLayout.NHD)
    info = MHABufferInfo(buffers=buffers, page_size=page_size, head_num=HEADS, head_dim=dim, v_head_dim=dim,
                         dtype=dtype, device=torch.device("cpu"), scales=None)
    pool = MHATokenToKVPoolHost(info, 1.0, 0, page_size, layout, pin_memory=False,
                                device_capacity_tokens=PAGES * page_size, start_layer=0, end_layer=LAYERS - 1)
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape, dtype=dtype))
    return pool


def storage(socket: str, pool: MHATokenToKVPoolHost, **config: object) -> KvstrataStorage:
    fields = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
              "is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True, "model_name": "m",
              "extra_config": {"interface_v1": 1, "socket": socket, "digest": "of the tests"}}
    made = KvstrataStorage(HiCacheStorageConfig(**{**fields, **config}))
    made.register_mem_pool_host(pool)
    return made


def keys_of(n: int, of: str = "") -> list[str]:
    return [hashlib.sha256(f"{of}{i}".encode()).hexdigest() for i in range(n)]


def indices(pages: list[int], page_size: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * page_size, (page + 1) * page_size) for page in pages])


def page(pool: MHATokenToKVPoolHost, number: int) -> torch.Tensor:
    return pool.get_data_page(number * pool.page_size)


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
@pytest.mark.parametrize(("page_size", "dtype"), [(16, torch.float32), (32, torch.bfloat16), (64, torch.float16),
                                                  (192, torch.float32)])
def test_pages_come_back(layout: str, page_size: int, dtype: torch.dtype):
    """From one pool into other pages of another's, bit by bit, and only those."""
    torch.manual_seed(20261124)
    mine, others, keys = host_pool(layout, page_size, dtype), host_pool(layout, page_size, dtype), keys_of(4)
    with Daemon() as daemon:
        writer, reader = storage(daemon.socket, mine), storage(daemon.socket, others)
        assert reader.batch_exists(keys) == 0
        assert writer.batch_set_v1(keys, indices([3, 0, 5, 1], page_size)) == [True] * 4
        assert reader.batch_exists([*keys, *keys_of(1, "absent")]) == 4
        before = [page(others, n).clone() for n in range(PAGES)]
        found = reader.batch_get_v1([keys[2], *keys_of(1, "absent"), keys[0]], indices([7, 6, 2], page_size))
        assert found == [True, False, True]
        want = {7: page(mine, 5), 2: page(mine, 3)}
        for number in range(PAGES):
            assert torch.equal(page(others, number), want.get(number, before[number])), number
        writer.close(), reader.close()


def test_a_page_is_written_once():
    """Under the same key other rows are not taken: a key tells what its rows are."""
    pool, keys = host_pool("page_first", 64), keys_of(1)
    with Daemon() as daemon:
        held = storage(daemon.socket, pool)
        assert held.batch_set_v1(keys, indices([0], 64)) == held.batch_set_v1(keys, indices([1], 64)) == [True]
        assert held.batch_get_v1(keys, indices([2], 64)) == [True]
        assert torch.equal(page(pool, 2), page(pool, 0))
        held.close()


def test_pages_are_there_after_a_restart(tmp_path: pathlib.Path):
    pool, keys = host_pool("page_first", 64), keys_of(3)
    disk = ("--set", f"disk.path={tmp_path}/tier", "--set", "disk.budget_bytes=1GiB", "--set", "disk.load_timeout=10s")
    with Daemon(*disk) as daemon:
        held = storage(daemon.socket, pool)
        assert held.batch_set_v1(keys, indices([0, 1, 2], 64)) == [True] * 3
        held.close()
    with Daemon(*disk) as daemon:
        held = storage(daemon.socket, pool)
        assert held.batch_exists(keys) == 3
        assert held.batch_get_v1(keys, indices([3, 4, 5], 64)) == [True] * 3
        for number in range(3):
            assert torch.equal(page(pool, number), page(pool, number + 3))
        held.close()


def test_a_daemon_that_dies_costs_no_call(tmp_path: pathlib.Path):
    pool, keys, socket = host_pool("page_first", 64), keys_of(2), str(tmp_path / "kvstratad.sock")
    with Daemon(socket=socket) as daemon:
        held = storage(socket, pool)
        assert held.batch_set_v1(keys, indices([0, 1], 64)) == [True, True]
        daemon.process.kill()
        daemon.process.wait()
        assert held.batch_exists(keys) == 0
        assert held.batch_get_v1(keys, indices([2, 3], 64)) == [False, False]
        assert held.batch_set_v1(keys, indices([0, 1], 64)) == [False, False]
    with Daemon(socket=socket):
        assert held.batch_set_v1(keys, indices([0, 1], 64)) == [True, True]
        assert held.batch_exists(keys) == 2
        held.close()


def test_kill_switch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KVSTRATA_DISABLE", "1")
    held = storage("/nowhere/kvstratad.sock", host_pool("page_first", 64))
    assert held.batch_set_v1(keys_of(1), indices([0], 64)) == [False]
    assert held.batch_exists(keys_of(1)) == 0


@pytest.mark.parametrize(("config", "pool", "said"), [
    ({"tp_size": 2}, {}, "tp_size is 2"), ({"is_mla_model": True}, {}, "MLA"),
    ({"extra_config": {}}, {}, "interface_v1"),
    ({}, {"layout": "page_head"}, "hicache_mem_layout is page_head"), ({}, {"page_size": 1}, "page_size is 1"),
    ({}, {"dtype": torch.float64}, "kv_cache_dtype is torch.float64"), ({}, {"dim": 80}, "head_dim is 80")])
def test_refusals(config: dict[str, object], pool: dict[str, object], said: str):
    with pytest.raises(Unsupported, match=said):
        storage("", host_pool(**{"layout": "page_first", "page_size": 64, **pool}), **config)
