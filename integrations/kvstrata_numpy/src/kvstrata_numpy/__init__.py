# SPDX-License-Identifier: Apache-2.0
"""The smallest real engine on kvstrata: Llama-family GGUF models, forward pass in numpy.

    gguf_file   reads a GGUF file: metadata and dequantised fp32 weights
    tokenizer   text <-> token ids from the GGUF's metadata; chat turns
    llama       the forward pass, with attention left to a cache
    cache       OwnCache (numpy keeps keys and values), DaemonCache (they live in kvstratad's pages)
    engine      prefill in chunks, greedy decoding, surprisal and entropy
    trace       records and reads traces (.safetensors)
    download    fetches the demo's model, of one digest
    picture     draws which pages each step selected

docs/engine.md explains the whole.
"""

__version__ = "0.1.0"
