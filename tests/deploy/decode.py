# SPDX-License-Identifier: Apache-2.0
"""Attaches by the installed package, decodes one step, and asks the daemon about it. Prints which library it was.

    decode.py SOCKET [--grpc] [--page HOST:PORT] [-- COMMAND...]

--page: what http.listen serves must tell of the open sequence: /metrics, the status page and its data. COMMAND runs while the
sequence is open, between two steps; what it prints must name the sequence's client, `decode.py`.
"""

import json
import subprocess
import sys
import time
import urllib.request

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


def looked_at(page, command):
    """What the page and the command show about the open sequence."""
    def got(path):
        with urllib.request.urlopen(f"http://{page}{path}", timeout=20) as answer:
            return answer.read().decode()
    if page:
        assert "<title>kvstrata" in got("/")
        assert "\nkvstrata_sequences " in got("/metrics"), got("/metrics")
        deadline = time.monotonic() + 20  # the daemon looks once a second, and from the first question on
        shown = []
        while "decode.py" not in shown:
            assert time.monotonic() < deadline, shown
            live = json.loads(got("/status.json"))["live"]
            shown = [sequence["client"] for sequence in live["sequences"]] if live else []
    if command:
        said = subprocess.run(command, check=True, timeout=60, stdout=subprocess.PIPE, text=True).stdout
        print(said, end="")
        assert "decode.py" in said, said


def stepped(sequence, session, ids):
    with session.step([(sequence, ids)]) as step:
        for layer in range(LAYERS):
            step.append(layer, rows(len(ids), layer), rows(len(ids), layer + 10))
            out = step.attend(layer, rows(len(ids), layer + 20))
    return out


def main(socket, *words):
    split = words.index("--") if "--" in words else len(words)
    options, command = words[:split], words[split + 1:]
    page = options[options.index("--page") + 1] if "--page" in options else ""
    with kvstrata.attach(socket, client_name="decode.py") as session:
        model = session.register_model("decode.py", "sha256:decode.py", layers=LAYERS, query_heads=HEADS, kv_heads=HEADS,
                                       head_dim=DIM)
        with session.open(model, "quest{budget = 64}", PROMPT) as sequence:
            stepped(sequence, session, PROMPT[sequence.held:])
            sequence.prefill_done()
            out = stepped(sequence, session, PROMPT[:1])
            assert out.shape == (1, HEADS, DIM) and np.isfinite(out).all() and np.abs(out).max() > 0, out
            assert sequence.tokens == len(PROMPT) + 1, sequence.tokens
            looked_at(page, command)
    said = kvstrata.library.load().path
    if "--grpc" in options:
        said += asked(socket)
    print(f"decoded a step with {said}")


if __name__ == "__main__":
    main(*sys.argv[1:])
