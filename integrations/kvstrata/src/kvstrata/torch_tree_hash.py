# SPDX-License-Identifier: Apache-2.0
"""tree_hash's sums of torch tensors, made where the tensors are.

    tensor_sums([weight, bias, ...])   # 16 bytes each, equal to tree_sum of the same bytes

On a GPU the full leaves are summed there by torch's integer operations, with the same bits as xxhash gives; what is left
behind the last full leaf is copied to the host in one piece. XXH3 works in 8 lanes of 64 bits: within a block of 1 KiB
their products are added, which a reduction does for all blocks at once, and blocks follow each other, which a loop over
the 256 blocks of a leaf does for all leaves at once.

Cost on a GPU: a byte is read or written 13 times in the first part (16 GB: 0.1 s at 2.5 TB/s), and 6 small launches a
block in the second, once for each 4 GiB. Takes at most 1 GiB of the GPU's memory while it runs. CPU: tree_hash's.
Threads: any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from .tree_hash import LEAF, SUM_BYTES, leaf_digests, root_of, tree_sums

_LANES, _STRIPES, _BLOCKS = 8, 16, LEAF // 1024
_WORDS = LEAF // 8
_CHUNK = 1024       # leaves that are widened at once: 256 MiB, twice
_GROUP = 16 * 1024  # leaves whose blocks are run through at once: 4 GiB, their block sums are 256 MiB

# XXH3's default secret and primes (its specification, "XXH3 Algorithm Overview").
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248e"
    "e03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d"
    "8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc"
    "8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e")
_PRIME32 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_PRIME64 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
_START = (_PRIME32[2], *_PRIME64[:4], _PRIME32[1], _PRIME64[4], _PRIME32[0])
_LOW = 0xFFFFFFFF


def tensor_sums(tensors: Iterable[torch.Tensor], threads: int | None = None, stop: Callable[[], bool] | None = None
                ) -> list[bytes]:
    """A sum for each, in order: of its elements' bytes in row-major order. Plain strided tensors with memory of their
    own; one that is not contiguous is copied. threads, stop: as tree_sums has them, for those on the host."""
    flat = [bytes_of(tensor) for tensor in tensors]
    sums: list[bytes] = [b""] * len(flat)
    by_device: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(flat):
        by_device.setdefault(tensor.device, []).append(i)
    for device, places in by_device.items():
        mine = [flat[i] for i in places]
        made = (tree_sums([tensor.numpy() for tensor in mine], threads, stop) if device.type == "cpu"
                else sums_on_device(mine))
        for i, value in zip(places, made):
            sums[i] = value
    return sums


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements' bytes [n] in row-major order, in its own memory where it is contiguous."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def sums_on_device(flat: Sequence[torch.Tensor]) -> list[bytes]:
    """Sums of tensors of bytes [n] on one device, by torch alone but for what is behind their last full leaf."""
    full = [len(tensor) // LEAF for tensor in flat]
    digests = _full_leaves([_words(t[:n * LEAF]) for t, n in zip(flat, full) if n])
    ends = _ends([t[n * LEAF:] for t, n in zip(flat, full)])
    sums, begin = [], 0
    for tensor, n, end in zip(flat, full, ends):
        leaves = digests[begin * SUM_BYTES:(begin + n) * SUM_BYTES]
        sums.append(root_of([leaves, leaf_digests(end)], len(tensor)))
        begin += n
    return sums


def _words(flat: torch.Tensor) -> torch.Tensor:
    """[leaves][words] of whole leaves. One that does not begin at a word is copied."""
    if flat.storage_offset() % 8 or flat.data_ptr() % 8:
        flat = flat.clone()
    return flat.view(torch.int64).view(-1, _WORDS)


def _ends(flat: Sequence[torch.Tensor]) -> list[memoryview]:
    """In host memory, by one copy."""
    host = memoryview(torch.cat(list(flat)).cpu().numpy())
    begins = np.cumsum([0, *map(len, flat)]).tolist()
    return [host[begin:end] for begin, end in zip(begins, begins[1:])]


def _full_leaves(tensors: Sequence[torch.Tensor]) -> bytes:
    """The digests of all leaves of tensors [leaves][words], in order."""
    if not tensors:
        return b""
    digests, group, size = [], [], 0
    for chunk in _chunks(tensors):
        if size + len(chunk) > _GROUP:
            digests.append(_digests(torch.cat(group)))
            group, size = [], 0
        group.append(_block_sums(chunk))
        size += len(chunk)
    return b"".join([*digests, _digests(torch.cat(group))])


def _chunks(tensors: Sequence[torch.Tensor]) -> Iterable[torch.Tensor]:
    """[at most _CHUNK leaves][words], in order: pieces of large tensors as they lie, small ones copied together."""
    small: list[torch.Tensor] = []
    size = 0
    for piece in (piece for tensor in tensors for piece in tensor.split(_CHUNK)):
        if size + len(piece) > _CHUNK:
            yield small[0] if len(small) == 1 else torch.cat(small)
            small, size = [], 0
        small.append(piece)
        size += len(piece)
    yield small[0] if len(small) == 1 else torch.cat(small)


def _block_sums(leaves: torch.Tensor) -> torch.Tensor:
    """What each block adds to the lanes, [leaves][blocks][lanes]."""
    data = leaves.view(-1, _BLOCKS, _STRIPES, _LANES)
    secrets = torch.stack([_secret(8 * stripe) for stripe in range(_STRIPES)]).to(leaves.device)
    sums = _lanes(data, secrets)
    # The last stripe of a leaf has a place of its own in the secret.
    secrets[-1] = _secret(len(_SECRET) - 64 - 7).to(leaves.device)
    sums[:, -1] = _lanes(data[:, -1], secrets)
    return sums


def _lanes(data: torch.Tensor, secrets: torch.Tensor) -> torch.Tensor:
    """Over the stripes of data [...][stripes][lanes]: the halves' products, and the data itself to the lane beside."""
    low = data ^ secrets
    high = (low >> 32).bitwise_and_(_LOW)
    products = low.bitwise_and_(_LOW).mul_(high).sum(-2)
    return products.add_(data.sum(-2).unflatten(-1, (_LANES // 2, 2)).flip(-1).flatten(-2))


def _digests(blocks: torch.Tensor) -> bytes:
    """The digests of leaves, by their block sums [leaves][blocks][lanes]."""
    lanes = torch.tensor([_signed(value) for value in _START], device=blocks.device).repeat(len(blocks), 1)
    secret = _secret(len(_SECRET) - 64).to(blocks.device)
    for block in range(_BLOCKS - 1):
        lanes += blocks[:, block]
        lanes ^= (lanes >> 47).bitwise_and_((1 << 17) - 1)
        lanes ^= secret
        lanes *= _PRIME32[0]
    lanes += blocks[:, -1]
    ends = lanes.cpu().numpy().view(np.uint64)
    low = _merged(ends, 11, LEAF * _PRIME64[0])
    high = _merged(ends, len(_SECRET) - 64 - 11, ~(LEAF * _PRIME64[1]))
    return np.stack([high, low], axis=1).astype(">u8").tobytes()


def _merged(lanes: npt.NDArray[np.uint64], secret: int, start: int) -> npt.NDArray[np.uint64]:
    """64 bits of each leaf's digest; lanes [leaves][8]."""
    keyed = lanes ^ np.frombuffer(_SECRET, "<u8", _LANES, secret)
    value = np.full(len(lanes), start % (1 << 64), np.uint64)
    for lane in range(0, _LANES, 2):
        value += _folded(keyed[:, lane], keyed[:, lane + 1])
    value = (value ^ (value >> np.uint64(37))) * np.uint64(0x165667919E3779F9)
    return value ^ (value >> np.uint64(32))


def _folded(a: npt.NDArray[np.uint64], b: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Both halves of the 128-bit products, one over the other."""
    low, half = np.uint64(_LOW), np.uint64(32)
    ah, al, bh, bl = a >> half, a & low, b >> half, b & low
    cross = (al * bl >> half) + (ah * bl & low) + al * bh
    return (a * b) ^ ((ah * bl >> half) + (cross >> half) + ah * bh)


def _secret(begin: int) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(_SECRET, "<i8", _LANES, begin).copy())


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
