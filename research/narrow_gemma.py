#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 270M narrowed to the vocabulary of some texts, to be carried to a machine without a network.

    research/narrow_gemma.py pack --texts FILE.jsonl.xz --out FOLDER [--gguf FILE] [--part-bytes 28000000]
    research/narrow_gemma.py pack --prompts FILE.jsonl.xz --out FOLDER [--common 24000]
    research/narrow_gemma.py unpack --parts FOLDER --out FOLDER

Two thirds of the model are embeddings of 262,144 tokens, of which English manuals have a fifth. pack writes part.NNN: a GGUF
with the rows of those tokens alone, as they are there, and the texts as token ids. unpack makes a folder of them that
train_sekv.py takes (--model OUT --texts OUT/ids.jsonl.xz): config.json, model.safetensors, no tokenizer. The softmax is
then over those tokens; what the others had of it is missing. pack needs gguf and tokenizers, unpack gguf and torch.

--prompts: of `research --own`. The tokens are theirs and the most common ones of ASCII. In place of ids there is a tokenizer
of these tokens, which has the prompts' ids as they were.
"""

from __future__ import annotations

import argparse
import base64
import json
import lzma
import pathlib
import sys
import tarfile
import tempfile

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import gemma  # noqa: E402

EMBEDDING = "token_embd.weight"
MOST_TOKENS = 1 << 16  # that two bytes tell apart


def encoded(texts: pathlib.Path, tokenizer: pathlib.Path) -> list[tuple[str, np.ndarray]]:
    """(source, token ids) of each document."""
    from tokenizers import Tokenizer
    encode = Tokenizer.from_file(str(tokenizer)).encode
    with lzma.open(texts, "rt", encoding="utf-8") as file:
        return [(one["source"], np.array(encode(one["text"], add_special_tokens=False).ids, np.int32))
                for one in map(json.loads, file)]


def narrow(gguf_file: pathlib.Path, kept: np.ndarray, out: pathlib.Path) -> None:
    """The same tensors, in the same quantisation, with the rows `kept` of the embedding."""
    import gguf
    writer = gguf.GGUFWriter(out, "gemma3")
    for tensor in gguf.GGUFReader(gguf_file).tensors:
        data = tensor.data[kept] if tensor.name == EMBEDDING else tensor.data
        writer.add_tensor(tensor.name, np.ascontiguousarray(data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def parts_of(tokenizer: dict, ids: np.ndarray) -> np.ndarray:
    """ids with the tokens that they are merged of, so that a tokenizer of these alone merges as the whole one does."""
    vocabulary, merged_of = tokenizer["model"]["vocab"], {}
    for left, right in tokenizer["model"]["merges"]:
        merged_of.setdefault(left + right, []).extend((left, right))
    names = {i: name for name, i in vocabulary.items()}
    found, todo = set(), [names[i] for i in ids.tolist()]
    while todo:
        if (name := todo.pop()) not in found:
            found.add(name)
            todo += merged_of.get(name, [])
    return np.array(sorted(vocabulary[name] for name in found))


def narrow_tokenizer(tokenizer: dict, kept: np.ndarray) -> dict:
    """tokenizer.json of the tokens `kept`, which are numbered anew."""
    number = {old: new for new, old in enumerate(kept.tolist())}
    model = tokenizer["model"]
    vocabulary = {name: number[i] for name, i in model["vocab"].items() if i in number}
    merges = [pair for pair in model["merges"] if all(name in vocabulary for name in (*pair, "".join(pair)))]
    added = [one | {"id": number[one["id"]]} for one in tokenizer["added_tokens"] if one["id"] in number]
    around = json.loads(json.dumps(tokenizer["post_processor"]))
    for one in around["special_tokens"].values():
        one["ids"] = [number[i] for i in one["ids"]]
    return tokenizer | {"model": model | {"vocab": vocabulary, "merges": merges}, "added_tokens": added, "post_processor": around}


def common(tokenizer: dict, count: int) -> np.ndarray:
    """The first tokens of ASCII, which are the most common; bytes and what is special come before them."""
    return np.array(sorted(i for name, i in tokenizer["model"]["vocab"].items() if name.replace("\u2581", "").isascii())[:count])


def of_prompts(path: pathlib.Path, folder: pathlib.Path) -> list[tuple[str, np.ndarray]]:
    """(key, token ids) of each prompt with its answer."""
    import tasks
    from transformers import AutoTokenizer
    whole = AutoTokenizer.from_pretrained(folder)
    return [(prompt.key, np.array([i for ids in tasks.ids_of(prompt, whole) for i in ids], np.int32))
            for prompt in tasks.own_prompts(path, sys.maxsize)]


def pack(args: argparse.Namespace) -> None:
    """Errors: ValueError, more tokens than two bytes tell apart; gemma.check()'s; of prompts whose ids are others."""
    folder = gemma.cached() if args.gguf is None else None
    gguf_file = args.gguf or folder.with_suffix(".gguf")
    gemma.check(gguf_file)
    documents = of_prompts(args.prompts, folder) if args.prompts else encoded(args.texts, args.tokenizer or folder / "tokenizer.json")
    kept = np.unique(np.concatenate([[gemma.CONFIG[f"{name}_token_id"] for name in ("bos", "eos", "pad")],
                                     *(ids for _, ids in documents)]))
    if args.prompts:
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        kept = parts_of(tokenizer, np.union1d(kept, common(tokenizer, args.common)))
    if len(kept) > MOST_TOKENS:
        raise ValueError(f"{args.prompts or args.texts} has {len(kept)} different tokens; {MOST_TOKENS} at most; take fewer texts")
    args.out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        made = pathlib.Path(scratch)
        narrow(gguf_file, kept, made / "narrow.gguf")
        if args.prompts:
            write_tokenizer(narrow_tokenizer(tokenizer, kept), made)
            for (key, ids), (_, narrowed) in zip(documents, of_prompts(args.prompts, made)):
                if not np.array_equal(np.searchsorted(kept, ids), narrowed):
                    raise ValueError(f"{key}: the narrowed tokenizer has other ids than the whole one")
        else:
            write_ids(documents, kept, made / "ids.jsonl.xz")
        config = gemma.CONFIG | {"vocab_size": len(kept), "narrowed_from": gemma.CONFIG["vocab_size"]}
        config |= {f"{name}_token_id": int(np.searchsorted(kept, config[f"{name}_token_id"])) for name in ("bos", "eos", "pad")}
        (made / "config.json").write_text(json.dumps(config, indent=1))
        with tarfile.open(made / "all.tar", "w") as archive:
            for path in sorted(made.iterdir()):
                if path.name != "all.tar":
                    archive.add(path, path.name)
        whole = (made / "all.tar").read_bytes()
    for i, begin in enumerate(range(0, len(whole), args.part_bytes)):
        (args.out / f"part.{i:03}").write_bytes(whole[begin:begin + args.part_bytes])
    print(f"{args.out}: {sum(len(ids) for _, ids in documents)} tokens, {len(kept)} different ones, {len(whole) / 1e6:.1f} MB")


def write_tokenizer(tokenizer: dict, folder: pathlib.Path) -> None:
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    special = {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "pad", "unk")}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **special}))


def write_ids(documents: list[tuple[str, np.ndarray]], kept: np.ndarray, path: pathlib.Path) -> None:
    with lzma.open(path, "wt", preset=9) as file:
        for source, ids in documents:
            said = base64.b64encode(np.searchsorted(kept, ids).astype("<u2").tobytes()).decode()
            file.write(json.dumps({"source": source, "ids": said}) + "\n")


def unpack(args: argparse.Namespace) -> None:
    from safetensors.torch import save_file
    args.out.mkdir(parents=True)
    with tempfile.NamedTemporaryFile(dir=args.out) as whole:
        for part in sorted(args.parts.glob("part.*")):
            whole.write(part.read_bytes())
        whole.seek(0)
        with tarfile.open(fileobj=whole, mode="r:") as archive:
            archive.extractall(args.out, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    save_file(gemma.weights(args.out / "narrow.gguf"), args.out / "model.safetensors", metadata={"format": "pt"})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    verbs = parser.add_subparsers(required=True)
    packing = verbs.add_parser("pack")
    what = packing.add_mutually_exclusive_group(required=True)
    what.add_argument("--texts", type=pathlib.Path)
    what.add_argument("--prompts", type=pathlib.Path)
    packing.add_argument("--common", type=int, default=24000, help="tokens that --prompts adds")
    packing.add_argument("--out", type=pathlib.Path, required=True)
    packing.add_argument("--gguf", type=pathlib.Path, help="with --tokenizer; without them, those of the cache")
    packing.add_argument("--tokenizer", type=pathlib.Path, help="tokenizer.json of the whole model")
    packing.add_argument("--part-bytes", type=int, default=28_000_000)
    packing.set_defaults(run=pack)
    unpacking = verbs.add_parser("unpack")
    unpacking.add_argument("--parts", type=pathlib.Path, required=True)
    unpacking.add_argument("--out", type=pathlib.Path, required=True)
    unpacking.set_defaults(run=unpack)
    args = parser.parse_args()
    args.run(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
