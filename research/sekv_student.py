# SPDX-License-Identifier: Apache-2.0
"""SeKV's attention in torch, with gradients for what it learns (docs/spec/sekv.md).

A row is a text: its prompt [N], which full attention has read and which is cut into spans, and T tokens behind it, which
are decoded all at once by the mixed-resolution attention, given the text's own tokens. So keys, values and spans of a
prompt are those that a daemon has, and do not depend on what is learned, except for the gates.

Layers that the plan does not serve, those of a sliding window, attend as they do in the model.

Shapes: L served layers, B rows, K KV heads, G query heads a KV head, H = K G, S spans (padded with length 0), d = head_dim, R =
r_max. Spans and factors are held to the numpy reference by research/tests/test_sekv_training.py. Not rounded here:
factors and rows, which a daemon stores in bf16.
"""

from __future__ import annotations

import concurrent.futures
import math
import os
import pathlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lora_llama import Attention, Llama, Rope

ALPHA, L_MIN, R_MAX, HIDDEN = 2.0, 4, 32, 64
GATE_FLOOR, MAX_LOSS, ANCHOR_SLACK = 0.05, 0.3, 1e-6
TEMPERATURE = 1.0  # the straight-through choice's, in nats of relevance

MATRICES = 512   # that are decomposed by one call
BATCHED = 32     # channels up to which a GPU decomposes a batch at once; larger ones one by one, slower than CPUs do
PASSED_OVER = 4  # spans, in training
OPEN_GATE = 20.0  # the sigmoid of it is 1 in fp32


class Parameters(torch.nn.Module):
    """Routers W = (1 + turn) diag(e^stretch) [L, H, d, d], tau [L, H] and the gates' network, all fp32. They begin as the
    untrained rule: W is 1, tau 0 and gates are 1. `gated`: whether gates are computed; else they are 1."""

    def __init__(self, layers: int, heads: int, head_dim: int, seed: int) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.turn = torch.nn.Parameter(torch.zeros(layers, heads, head_dim, head_dim))
        self.stretch = torch.nn.Parameter(torch.zeros(layers, heads, head_dim))
        self.register_buffer("tau", torch.zeros(layers, heads))
        self.gated = False
        self.g_phi = torch.nn.Sequential(torch.nn.Linear(R_MAX + head_dim, HIDDEN), torch.nn.GELU(),
                                         torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.GELU(), torch.nn.Linear(HIDDEN, R_MAX))
        with torch.no_grad():
            for layer in (self.g_phi[0], self.g_phi[2], self.g_phi[4]):
                layer.weight.copy_(torch.randn(layer.weight.shape, generator=random) / math.sqrt(layer.in_features))
                layer.bias.zero_()
            self.g_phi[4].weight *= 0.1
            self.g_phi[4].bias += 6.0

    @property
    def W(self) -> Tensor:
        one = torch.eye(self.turn.shape[-1], device=self.turn.device)
        return (one + self.turn) * self.stretch.exp()[..., None, :]

    def routers(self) -> list[torch.nn.Parameter]:
        return [self.turn, self.stretch]

    def gates(self, spectrum: Tensor, k_mean: Tensor) -> Tensor:
        """Gates for spectra [..., R] (padded with 0), with mean keys [..., d]."""
        first = spectrum[..., :1]
        scaled = torch.where(first > 0, spectrum / first.clamp(min=1e-30), spectrum)
        norm = k_mean.norm(dim=-1, keepdim=True)
        return self.g_phi(torch.cat((scaled, k_mean / norm.clamp(min=1e-30)), dim=-1)).sigmoid()

    def tensors(self) -> dict[str, Tensor]:
        """As the daemon reads them. `norm` takes the place of |W k_mean|: relevance is not divided by it."""
        gates = self.g_phi.state_dict()
        if not self.gated:
            gates["4.weight"], gates["4.bias"] = torch.zeros_like(gates["4.weight"]), torch.full_like(gates["4.bias"], OPEN_GATE)
        learned = {"W": self.W, "tau": self.tau, "norm": torch.ones_like(self.tau)} | {f"g_phi.{k}": v for k, v in gates.items()}
        return {name: value.detach().float().cpu().contiguous() for name, value in learned.items()}


def segment(surprisal: np.ndarray, local: int) -> list[tuple[int, int]]:
    """Spans of a prompt by its surprisal [N], nats."""
    h = surprisal.astype(np.float64)
    h[0] = 0
    anchor = h > h.mean() + ALPHA * h.std() + ANCHOR_SLACK
    anchor[0] = True
    end = max(len(h) - local, 0)
    stops = [*np.flatnonzero(anchor[:end]).tolist(), end]
    return [(a + 1, b) for a, b in zip(stops, stops[1:]) if b - a - 1 >= L_MIN]


class Group(NamedTuple):
    """Spans of similar length: `places` [n, longest] of flattened [B N], padded with places of the same span; `real`
    says which are; `row` and `span` [n]."""
    places: Tensor
    real: Tensor
    row: Tensor
    span: Tensor


class Factors(NamedTuple):
    """A group's keys or values: left singular vectors [L, K, n, longest, r], singular values [L, K, n, R]
    (padded with 0), and the squared norm of the rows [L, K, n]."""
    left: Tensor
    spectrum: Tensor
    squared: Tensor


@dataclass
class Spans:
    """A batch's spans. length [B, S]; member [B, S, N], 1 where a token is a span's; groups by length."""
    length: Tensor
    member: Tensor
    log_length: Tensor
    groups: list[Group]

    @property
    def raw(self) -> Tensor:
        """[B]: prompt tokens that are in no span."""
        return self.member.shape[2] - self.length.sum(1)


def spans_of(found: Sequence[Sequence[tuple[int, int]]], tokens: int, device: torch.device, dtype: torch.dtype) -> Spans:
    most = max(1, max(map(len, found)))
    length = torch.zeros(len(found), most, dtype=torch.long)
    member = torch.zeros(len(found), most, tokens, dtype=dtype)
    by_size: dict[int, list[tuple[int, int, int, int]]] = {}
    for row, spans in enumerate(found):
        for i, (a, b) in enumerate(spans):
            length[row, i] = b - a
            member[row, i, a:b] = 1
            by_size.setdefault(1 << max(3, (b - a - 1).bit_length()), []).append((row, i, a, b))
    groups = []
    for size, members in sorted(by_size.items()):
        row, span, begin, end = (torch.tensor(column) for column in zip(*members))
        offset = torch.arange(size)
        real = offset < (end - begin)[:, None]
        places = row[:, None] * tokens + torch.minimum(begin[:, None] + offset, end[:, None] - 1)
        groups.append(Group(*(t.to(device) for t in (places, real, row, span))))
    return Spans(length.to(device), member.to(device), length.clamp(min=1).log().to(device), groups)


def rows_of(x: Tensor, group: Group) -> Tensor:
    """[L, K, n, longest, d] of x [L, B, K, N, d], fp32; rows that are no token's are 0."""
    flat = x.transpose(1, 2).flatten(2, 3)
    return flat[:, :, group.places].float() * group.real[..., None]


_SOLVERS = concurrent.futures.ThreadPoolExecutor(os.cpu_count(), initializer=lambda: torch.set_num_threads(1))


def eigenvectors(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Values and vectors of matrices [n, c, c], ascending. In parts: a solver's workspace for all of a batch is more
    than 2^31 elements. Larger ones by all CPUs, one part each."""
    if gram.shape[-1] <= BATCHED:
        parts = [torch.linalg.eigh(part) for part in gram.split(16 * MATRICES)]
    else:
        parts = list(_SOLVERS.map(torch.linalg.eigh, gram.cpu().split(MATRICES)))
    values, vectors = (torch.cat(column).to(gram.device) for column in zip(*parts))
    return values, vectors


def factors_of(rows: Tensor) -> Factors:
    """By the eigenvectors of the smaller Gram matrix: singular values below 3e-4 of the first are noise, which no gate
    can tell from 0."""
    tall = rows.shape[-2] > rows.shape[-1]
    gram = rows.transpose(-1, -2) @ rows if tall else rows @ rows.transpose(-1, -2)
    values, vectors = eigenvectors(gram.flatten(0, 2))
    rank = min(R_MAX, gram.shape[-1])
    s = values.flip(-1)[:, :rank].clamp(min=0).sqrt().unflatten(0, gram.shape[:3])
    v = vectors.flip(-1)[..., :rank].unflatten(0, gram.shape[:3])
    left = rows @ (v / s.clamp(min=1e-6)[..., None, :]) if tall else v
    return Factors(left, F.pad(s, (0, R_MAX - rank)), rows.square().sum((-1, -2)))


def may_be_factored(longest: int, dim: int) -> bool:
    """Whether a span of so many tokens is smaller as factors if all gates are open."""
    rank = min(R_MAX, dim, longest)
    return rank * (longest + dim) < longest * dim


def stored(x: Tensor, group: Group, factors: Factors, gates: Tensor) -> Tensor:
    """x [L, B, K, N, d] with the rows of those spans replaced that are stored as factors; gates [L, K, n, R]."""
    n, dim = group.real.sum(-1), x.shape[-1]
    within = torch.arange(R_MAX, device=x.device) < n.clamp(max=min(R_MAX, dim))[:, None]
    kept = within & ((gates >= GATE_FLOOR) | (torch.arange(R_MAX, device=x.device) == 0))
    smaller = kept.sum(-1) * (n + dim) < n * dim
    held = (kept * factors.spectrum.square() * (1 - (1 - gates).square())).sum(-1)
    lost = ((factors.squared - held).clamp(min=0) / factors.squared.clamp(min=1e-30)).sqrt()
    factored = smaller & (lost <= MAX_LOSS)
    if not bool(factored.any()):
        return x
    rows, rank = rows_of(x, group), factors.left.shape[-1]
    scaled = factors.left * (gates * kept)[..., None, :rank]
    remade = torch.where(factored[..., None, None], scaled @ (factors.left.transpose(-1, -2) @ rows), rows).to(x.dtype)
    flat = x.transpose(1, 2).flatten(2, 3).clone()
    flat[:, :, group.places[group.real]] = remade[:, :, group.real]
    return flat.unflatten(2, (x.shape[1], x.shape[3])).transpose(1, 2)


def relevance(q: Tensor, k_mean: Tensor, log_length: Tensor, w: Tensor) -> Tensor:
    """Logits [B, K, G, T, S] of q [B, K, G, T, d], k_mean [B, K, S, d]; w [H, d', d] of one layer. Not divided by
    |W k_mean|: with w = 1 it is the coarse row's own logit."""
    w = w.unflatten(0, q.shape[1:3])
    asked = torch.einsum("kgrd,bkgtd->bkgtr", w, q)
    known = torch.einsum("kgrd,bksd->bkgsr", w, k_mean)
    return asked @ known.transpose(-1, -2) / math.sqrt(w.shape[2]) + log_length[:, None, None, None]


@torch.no_grad()
def expanded(logits: Tensor, length: Tensor, tau: Tensor, room: Tensor, passed_over: int | None = None) -> Tensor:
    """Which spans a query expands, [B, K, G, T, S]: above tau [K, G], in descending relevance, what fits in room [B, T].
    What does not fit is passed over, as a daemon does: all of it, or only the first `passed_over` spans, for what a GPU
    starts few kernels; what follows the next one then stays coarse."""
    threshold = torch.logit(tau.clamp(0, 1))[None, :, :, None, None]
    may = (logits > threshold) & (length > 0)[:, None, None, None]
    order = logits.masked_fill(~may, -math.inf).argsort(dim=-1, descending=True)
    more = (length - 1)[:, None, None, None].expand_as(order).gather(-1, order)
    going, left = may.gather(-1, order), room[:, None, None, :, None]
    for _ in range(passed_over or 0):
        over = going & ((more * going).cumsum(-1) > left)
        going = going & ~(over & (over.cumsum(-1) == 1))
    if passed_over is not None:
        taken = going & ((more * going).cumsum(-1) <= left)
    else:
        taken, left = torch.zeros_like(going), left.expand_as(order)[..., 0]
        for i, cost in enumerate(more.unbind(-1)):
            taken[..., i] = going[..., i] & (cost <= left)
            left = left - cost * taken[..., i]
    return torch.zeros_like(may).scatter(-1, order, taken)


def chosen_softly(scores: Tensor, hard: Tensor, length: Tensor) -> Tensor:
    """`hard`, with the gradient of a sigmoid around what the budget cuts off: the middle between the least relevant
    span that is expanded and the most relevant one that is not."""
    known, real = scores.detach(), (length > 0)[:, None, None, None]
    least = known.masked_fill(~hard, math.inf).amin(-1, keepdim=True)
    most = known.masked_fill(hard | ~real, -math.inf).amax(-1, keepdim=True)
    cut = torch.where(least.isinf(), most, torch.where(most.isinf(), least, (least + most) / 2))
    soft = ((scores - cut.nan_to_num(0, 0, 0)) / TEMPERATURE).sigmoid()
    return hard + soft - soft.detach()


class Mixed(NamedTuple):
    """Logits of one layer's rows, each [B, K, G, T, .]: prompt tokens, spans' means, tokens behind the prompt."""
    tokens: Tensor
    coarse: Tensor
    behind: Tensor


def attend(logits: Mixed, zoom: Tensor, member: Tensor, values: Tensor, v_mean: Tensor, v_behind: Tensor) -> Tensor:
    """[B, K, G, T, d]: one softmax over raw rows, means where zoom [.., S] is 0 and tokens where it is 1. Linear in zoom
    before it is normalised, so that gradients reach the spans that were not expanded too."""
    sizes = [part.shape[-1] for part in logits]
    joined = torch.cat(logits, dim=-1)
    weights = (joined - joined.amax(-1, keepdim=True).detach()).exp()
    open_ = torch.einsum("bkgts,bsn->bkgtn", zoom.to(member.dtype), member) + (1 - member.sum(1))[:, None, None, None]
    real = (member.sum(-1) > 0)[:, None, None, None]
    weights = weights * torch.cat((open_, (1 - zoom) * real, torch.ones_like(logits.behind)), dim=-1)
    tokens, coarse, behind = weights.split(sizes, dim=-1)
    top = (torch.einsum("bkgtn,bknd->bkgtd", tokens, values) + torch.einsum("bkgts,bksd->bkgtd", coarse, v_mean)
           + torch.einsum("bkgtn,bknd->bkgtd", behind, v_behind))
    return top / weights.sum(-1, keepdim=True)


@dataclass
class Batch:
    """What full attention says of rows, and what does not depend on parameters. keys, values [L, B, K, N, d]; k_mean,
    v_mean [L, B, K, S, d], rounded to bf16; known, keys and values as expanded spans have them while all gates are open;
    hidden [B, T, width], what the head reads; factors of each group, None where only open gates were asked for and no such
    span is factored; near, by layer that is not served, keys and values of the prompt's end, which its window reaches."""
    ids: Tensor
    tokens: int
    spans: Spans
    keys: Tensor
    values: Tensor
    k_mean: Tensor
    v_mean: Tensor
    known: tuple[Tensor, Tensor]
    factors: list[tuple[Factors, Factors] | None]
    hidden: Tensor
    near: dict[int, tuple[Tensor, Tensor]]


class Found(NamedTuple):
    """What a forward pass gives: logits [B, T, vocabulary], and by layer: rows that expansions add a query head; and
    where it was asked for, against full attention of the same queries, the zoom loss and attention's relative L2."""
    logits: Tensor
    rows: Tensor
    zoom: Tensor
    error: Tensor


def zoom_loss(scores: Tensor, mass: Tensor, length: Tensor, power: float = 0.0) -> Tensor:
    """One layer's: KL of relevance, as a distribution over spans, from full attention's mass on them [B, K, G, T, S],
    each divided by the rows that its expansion adds, to that power: 1 asks for the most mass a row. A mean over queries,
    weighted with their mass on spans."""
    real, on_spans = (length > 0)[:, None, None, None], mass.sum(-1)
    wanted = mass / (length - 1).clamp(min=1)[:, None, None, None] ** power
    wanted = wanted / wanted.sum(-1, keepdim=True).clamp(min=1e-9)
    said = scores.masked_fill(~real, -1e4).log_softmax(-1)
    apart = (wanted * (wanted.clamp(min=1e-9).log() - said)).sum(-1)
    return (apart * on_spans).sum() / on_spans.sum().clamp(min=1e-9)


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q [B, H, n, d], k and v [B, K, n, d] to [B, H, n, d]


class Read(NamedTuple):
    """What full attention read: keys and values [L, B, K, n, d] of served layers; the others', by layer, [B, K, n, d];
    and what the head reads [B, n, width]."""
    keys: Tensor
    values: Tensor
    windowed: dict[int, tuple[Tensor, Tensor]]
    hidden: Tensor


class Student(Llama):
    """The frozen model, read by full attention or decoded by SeKV's. `served`: the layers under the plan; `window`: tokens
    that the others attend to."""

    window = 0

    def __init__(self, folder: pathlib.Path, device: torch.device, dtype: torch.dtype, context: int) -> None:
        super().__init__(folder, device, dtype)
        self.weights: Attention = self.attention(None)
        self.turn = self.rope(self.shape.rope_theta, context)
        self.served = list(range(self.shape.layers))

    def turned(self, layer: int, begin: int, end: int) -> Rope:
        """The rotation at positions, as _projected takes it."""
        return Rope(self.turn.cos[begin:end, None], self.turn.sin[begin:end, None])

    def embedded(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.embedding)

    def layer(self, i: int, x: Tensor, turn: Rope, attend: Attend) -> Tensor:
        before, after = self.norms[i]
        out = attend(*self._projected(self._normed(x, before), self.weights.qkv[i], turn))
        x = x + F.linear(out.transpose(1, 2).flatten(2), self.weights.out[i])
        return x + self._mlp(self._normed(x, after), i)

    def normed(self, x: Tensor) -> Tensor:
        """What the head reads of the last layer's output."""
        return self._normed(x, self.norm)

    def _windowed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of the last positions of k and v, each to the window that ends with it."""
        of, before = q.shape[2], k.shape[2] - q.shape[2]
        apart = (before + torch.arange(of, device=q.device))[:, None] - torch.arange(before + of, device=q.device)
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=(apart >= 0) & (apart < self.window))

    @torch.no_grad()
    def read(self, ids: Tensor) -> Read:
        kept: dict[int, tuple[Tensor, Tensor]] = {}
        x = self.embedded(ids)
        for i in range(self.shape.layers):
            def attend(q: Tensor, k: Tensor, v: Tensor, i: int = i) -> Tensor:
                kept[i] = k, v
                if i not in self.served:
                    return self._windowed(q, k, v)
                k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = self.layer(i, x, self.turned(i, 0, ids.shape[1]), attend)
        keys, values = (torch.stack(part) for part in zip(*(kept.pop(i) for i in self.served)))
        return Read(keys, values, kept, self.normed(x))

    @torch.no_grad()
    def surprisal(self, ids: Tensor, hidden: Tensor) -> np.ndarray:
        """[B, n], nats; 0 of the first token."""
        found = torch.zeros(ids.shape, device=ids.device)
        for row in range(len(ids)):
            for a in range(0, ids.shape[1] - 1, 1024):
                b = min(a + 1024, ids.shape[1] - 1)
                found[row, a + 1:b + 1] = F.cross_entropy(self.logits(hidden[row, a:b]), ids[row, a + 1:b + 1], reduction="none")
        return found.cpu().numpy()

    @torch.no_grad()
    def batch(self, ids: Tensor, behind: int, local: int, gated: bool = False) -> Batch:
        """ids [B, N + behind]; the last `behind` tokens are those that are decoded. gated: for gates that are not all
        open, which takes factors of all spans."""
        n = ids.shape[1] - behind
        keys, values, windowed, hidden = self.read(ids)
        surprisal = self.surprisal(ids[:, :n], hidden[:, :n])
        spans = spans_of([segment(row, local) for row in surprisal], n, self.device, torch.float32)
        h = torch.from_numpy(surprisal).to(self.device)
        weight = spans.member * h[:, None]
        total = weight.sum(-1, keepdim=True)
        uniform = spans.member / spans.length.clamp(min=1)[..., None]
        weight = torch.where(total > 0, weight / total.clamp(min=1e-30), uniform)
        k_mean, v_mean = (torch.einsum("bsn,lbknd->lbksd", weight, x[..., :n, :].float()).bfloat16().float()
                          for x in (keys, values))
        prompt = [x[..., :n, :].contiguous() for x in (keys, values)]
        factors = [(factors_of(rows_of(prompt[0], g)), factors_of(rows_of(prompt[1], g)))
                   if gated or may_be_factored(g.real.shape[1], self.shape.head_dim) else None for g in spans.groups]
        first = max(0, n + 1 - self.window)
        near = {i: (k[:, :, first:n].clone(), v[:, :, first:n].clone()) for i, (k, v) in windowed.items()}
        made = Batch(ids, n, spans, *prompt, k_mean, v_mean, (prompt[0], prompt[1]), factors, hidden[:, n:].clone(), near)
        made.known = self._rows(made, None)
        if not gated:
            made.factors = []
        return made

    def teacher(self, batch: Batch) -> Tensor:
        """Log-probabilities [B, T, vocabulary]."""
        return self.logits(batch.hidden).log_softmax(-1)

    def _seen(self, behind: int) -> Tensor:
        return torch.ones(behind, behind, dtype=torch.bool, device=self.device).tril()

    def decode(self, batch: Batch, parameters: Parameters | None, share: float, errors: bool = False, through: bool = False,
               power: float = 0.0) -> Found:
        """The tokens behind the prompt, each under a budget of `share` of the tokens before and with it. None: without
        trained parameters. Gradients of routers are the zoom loss's; through: also those of logits and errors, straight
        through the choice, which takes tenfold memory."""
        n, behind = batch.tokens, batch.ids.shape[1] - batch.tokens
        known = self._rows(batch, parameters) if parameters is not None and parameters.gated else batch.known
        routers = None if parameters is None else parameters.W
        at = torch.arange(n + 1, n + behind + 1, device=self.device)
        persistent = (batch.spans.raw + (batch.spans.length > 0).sum(1))[:, None] + at - n
        room = ((share * at).ceil().long() - persistent).clamp(min=0)
        x, by_layer = self.embedded(batch.ids[:, n:]), []
        for i in range(self.shape.layers):
            def attend(q: Tensor, k: Tensor, v: Tensor, i: int = i) -> Tensor:
                if i not in self.served:
                    return self._windowed(q, *(torch.cat(pair, dim=2) for pair in zip(batch.near[i], (k, v))))
                place = self.served.index(i)
                router = None if parameters is None else (routers[place], parameters.tau[place])  # type: ignore[index]
                out, told = self._attended(place, q.unflatten(1, (k.shape[1], -1)), k, v, batch, known, router, room,
                                           (errors, through, power))
                by_layer.append(told)
                return out.flatten(1, 2).to(self.dtype)
            x = self.layer(i, x, self.turned(i, n, n + behind), attend)
        logits = self.logits(self.normed(x))
        return Found(logits, *(torch.stack(column) for column in zip(*by_layer)))

    @torch.no_grad()
    def _rows(self, batch: Batch, parameters: Parameters | None) -> tuple[Tensor, Tensor]:
        """Keys and values as expanded spans have them. None: all gates are open."""
        keys, values = batch.keys, batch.values
        for group, factors in zip(batch.spans.groups, batch.factors, strict=True):
            if factors is None:
                continue
            mean = batch.k_mean[:, group.row, :, group.span].permute(1, 2, 0, 3)
            gates = [torch.ones_like(f.spectrum) if parameters is None else parameters.gates(f.spectrum, mean) for f in factors]
            keys, values = stored(keys, group, factors[0], gates[0]), stored(values, group, factors[1], gates[1])
        return keys, values

    def _attended(self, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: Batch, known: tuple[Tensor, Tensor],
                  router: tuple[Tensor, Tensor] | None, room: Tensor, asked: tuple[bool, bool, float]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Attention of a layer's queries [B, K, G, T, d]; k, v [B, K, T, d] of the same tokens."""
        spans, scale = batch.spans, 1 / math.sqrt(q.shape[-1])
        q, k, v = q.float(), k.float(), v.float()
        keys, values, k_mean, v_mean = known[0][layer].float(), known[1][layer].float(), batch.k_mean[layer], batch.v_mean[layer]
        log_length = spans.log_length[:, None, None, None]
        logits = Mixed(torch.einsum("bkgtd,bknd->bkgtn", q, keys) * scale,
                       torch.einsum("bkgtd,bksd->bkgts", q, k_mean) * scale + log_length,
                       (torch.einsum("bkgtd,bknd->bkgtn", q, k) * scale).masked_fill(~self._seen(q.shape[3]), -math.inf))
        if router is None:
            scores, tau = logits.coarse, torch.zeros(q.shape[1:3], device=q.device)
        else:  # queries are constants here: what a router learns is to change its choice, not the layers before it
            scores, tau = relevance(q.detach(), k_mean, spans.log_length, router[0]), router[1].unflatten(0, q.shape[1:3])
        errors, through, power = asked
        hard = expanded(scores, spans.length, tau, room, PASSED_OVER if torch.is_grad_enabled() else None)
        out = attend(logits, chosen_softly(scores, hard, spans.length) if through else hard.float(), spans.member, values, v_mean, v)
        rows = (hard * (spans.length - 1)[:, None, None, None]).sum(-1).float().mean()
        if not errors:
            return out, (rows, out.new_zeros(()), out.new_zeros(()))
        mass, full = self._full(q, k, v, layer, batch)
        return out, (rows, zoom_loss(scores, mass, spans.length, power), ((out - full).norm(dim=-1) / full.norm(dim=-1)).mean())

    @torch.no_grad()
    def _full(self, q: Tensor, k: Tensor, v: Tensor, layer: int, batch: Batch) -> tuple[Tensor, Tensor]:
        """Full attention of the same queries: its mass on spans [B, K, G, T, S], and its output."""
        keys = torch.cat((batch.keys[layer].float(), k), dim=2)
        values = torch.cat((batch.values[layer].float(), v), dim=2)
        logits = torch.einsum("bkgtd,bknd->bkgtn", q, keys) / math.sqrt(q.shape[-1])
        logits[..., batch.tokens:].masked_fill_(~self._seen(q.shape[3]), -math.inf)
        weights = logits.softmax(-1)
        mass = torch.einsum("bkgtn,bsn->bkgts", weights[..., :batch.tokens], batch.spans.member)
        return mass, torch.einsum("bkgtn,bknd->bkgtd", weights, values)
