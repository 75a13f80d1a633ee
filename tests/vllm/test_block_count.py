# SPDX-License-Identifier: Apache-2.0
"""In owned mode vLLM counts with as many tokens as the daemon has room for."""

from __future__ import annotations

import kvstrata
from kvstrata.daemon import Daemon

from conftest import assert_same

BLOCK = 128  # vLLM's on a CPU
SMALL = ("--set", "pool.device_bytes=32MiB", "--set", "pool.host_bytes=16MiB", "--set", "pool.arena_bytes=4MiB")


def room(socket: str) -> int:
    """Tokens of SmolLM2 in fp32 that a new session could have."""
    with kvstrata.attach(socket) as session:
        model = session.register_model("room", "room", layers=30, query_heads=9, kv_heads=3, head_dim=64,
                                       dtype=kvstrata.DType.F32)
        return session.capacity(model).open_tokens


def test_requests_queue_for_the_daemons_room(engine, text_ids):
    """All at once they have more tokens than there is room for; none ends with an error."""
    prompts = [text_ids[begin:begin + 300] for begin in range(0, 1800, 300)]
    alone = [{"prompts": [prompt], "tokens": 12} for prompt in prompts]
    with Daemon(*SMALL) as daemon:
        tokens = room(daemon.socket)
        result = engine("full", [{"prompts": prompts, "tokens": 12}, *alone], {"socket": daemon.socket},
                        max_model_len=512)
    print(f"room for {tokens} tokens, {result['blocks']} blocks")
    assert 512 < tokens < sum(map(len, prompts))
    assert result["blocks"] - 1 == tokens // BLOCK  # vLLM keeps one for itself
    together, *each = result["batches"]
    assert_same(together, [row for rows in each for row in rows])


def test_the_flag_goes_first(engine, text_ids):
    result = engine("full", [{"prompts": [text_ids[:40]], "tokens": 2}], num_gpu_blocks_override=100)
    assert result["blocks"] == 100
