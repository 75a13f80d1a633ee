# SPDX-License-Identifier: Apache-2.0
"""Attaches by the installed package, decodes one step, and asks the daemon about it. Prints which library it was.

    decode.py SOCKET [--grpc]
"""

import sys

import kvstrata
import kvstrata.library
import numpy as np

LAYERS, HEADS, DIM = 2, 4, 64
PROMPT = np.arange(100, dtype=np.int32)


def rows(count, seed):
    return np.random.default_rng(seed).standard_normal((count, HEADS, DIM), dtype=np.float32)


def asked(socket):
    """By gRPC, which an engine does not need."""
    import google.protobuf
    from kvstrata.grpc import Client
    with Client(socket) as client:
        return f", daemon {client.status().version}, protobuf {google.protobuf.__version__}"


def main(socket, *options):
    with kvstrata.attach(socket, client_name="decode.py") as session:
        model = session.register_model("decode.py", "sha256:decode.py", layers=LAYERS, query_heads=HEADS, kv_heads=HEADS,
                                       head_dim=DIM)
        with session.open(model, "quest{budget = 64}", PROMPT) as sequence:
            for ids in (PROMPT[sequence.held:], PROMPT[:1]):
                with session.step([(sequence, ids)]) as step:
                    for layer in range(LAYERS):
                        step.append(layer, rows(len(ids), layer), rows(len(ids), layer + 10))
                        out = step.attend(layer, rows(len(ids), layer + 20))
                if len(ids) > 1:
                    sequence.prefill_done()
            assert out.shape == (1, HEADS, DIM) and np.isfinite(out).all() and np.abs(out).max() > 0, out
            assert sequence.tokens == len(PROMPT) + 1, sequence.tokens
    said = kvstrata.library.load().path
    if "--grpc" in options:
        said += asked(socket)
    print(f"decoded a step with {said}")


if __name__ == "__main__":
    main(*sys.argv[1:])
