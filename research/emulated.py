# SPDX-License-Identifier: Apache-2.0
"""Rules of attention that are judged before a daemon serves them, and what they are judged beside.

An Engine answers as decode.Engine does, without a daemon: `research --emulate`. Keys and values are rounded to bf16, the
prompt is computed under full attention, and all rules are rows of one batch that is given the reference answer. Greedy
answers are not decoded: what a plan says is the likeliest token behind each of the reference's.

| a plan's text | what it is |
| --- | --- |
| `full`, `fp8{}` | all rows in bf16; in e4m3 as they are, as vLLM has them by default. `fp8{by_channel = 1}`: by a scale a channel, of the prompt |
| `planes{}` | docs/spec/planes.md; beside its options `tail = 1`: outside of F a value is read by the upper bit of its plane 0 |
| `strata{budget}` | docs/spec/bits.md with two bits |
| `quest{budget}` | docs/spec/beyond.md, "Baselines": pages of 16 by their bounds |
"""

from __future__ import annotations

import math
import pathlib
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from decode import COUNTED_STEPS, Answer
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

BLOCK = 256        # tokens of the prompt that all rules share come in multiples of it, which every unit divides
STRIP, PAGE = 16, 16
LARGEST = 65504.0
E4M3 = 448.0
NAME = "kvstrata_emulated"

Tensor = torch.Tensor


# --- storage: functions of rows [.., n, d] ---------------------------------------------------------------------------

def _half_towards(x: Tensor, end: float) -> Tensor:
    """As fp32: the fp16 nearest to x, or the next one on the side of `end` where the nearest lies on the other."""
    near = x.half()
    beyond = near.float() > x if end < 0 else near.float() < x
    return torch.where(beyond, torch.nextafter(near, torch.full_like(near, end)), near).float()


def quantise(x: Tensor, last: int, axis: int) -> tuple[Tensor, Tensor, Tensor]:
    """Minimum, step and codes 0 .. last of numbers that share them along an axis (docs/spec/bits.md, rule 2)."""
    x = x.float().nan_to_num(nan=0.0, posinf=LARGEST, neginf=-LARGEST).clamp(-LARGEST, LARGEST)
    minimum = _half_towards(x.amin(axis, keepdim=True), -math.inf)
    step = _half_towards((x.amax(axis, keepdim=True) - minimum) / last, math.inf)
    inverse = torch.where(step > 0, 1 / step.clamp_min(1e-30), torch.zeros_like(step))
    return minimum, step, ((x - minimum) * inverse).round()


def _read(minimum: Tensor, step: Tensor, codes: Tensor, cell: int) -> Tensor:
    return minimum + step * ((codes / cell).floor() * cell + (cell - 1) / 2)


def _by_group(x: Tensor, unit: int) -> Tensor:
    return x.unflatten(-2, (-1, unit))


def keys_of(x: Tensor, unit: int, cell: int) -> Tensor:
    """Keys read by cells of so many of 256 codes; n is a multiple of unit."""
    return _read(*quantise(_by_group(x, unit), 255, -2), cell).flatten(-3, -2)


def index_of(x: Tensor, unit: int) -> Tensor:
    """Keys in two bits by themselves."""
    minimum, step, codes = quantise(_by_group(x, unit), 3, -2)
    return (minimum + step * codes).flatten(-3, -2)


def rotate(x: Tensor) -> Tensor:
    """x [.., d] by the orthonormal Hadamard matrix."""
    stride, d = 1, x.shape[-1]
    while stride < d:
        a, b = x.unflatten(-1, (-1, 2, stride)).unbind(-2)
        x = torch.stack([a + b, a - b], -2).flatten(-3)
        stride *= 2
    return x / math.sqrt(d)


def values_of(x: Tensor, cell: int) -> Tensor:
    """Values read by cells of so many of 256 codes, rotated back."""
    return rotate(_read(*quantise(rotate(x.float()), 255, -1), cell))


def fp8(x: Tensor, scale: Tensor | float) -> Tensor:
    return (x / scale).clamp(-E4M3, E4M3).to(torch.float8_e4m3fn).float() * scale


class Form(NamedTuple):
    """How keys, or values, are read. unit: of the groups that are sealed at once; 0: each row by itself."""
    name: str
    unit: int = 0
    cell: int = 1

    def keys(self, x: Tensor, scale: Tensor) -> Tensor:
        return {"raw": lambda: x, "fp8": lambda: fp8(x, 1.0), "by_channel": lambda: fp8(x, scale),
                "planes": lambda: keys_of(x, self.unit, self.cell), "index": lambda: index_of(x, self.unit)}[self.name]()

    def values(self, x: Tensor, scale: Tensor) -> Tensor:
        return {"raw": lambda: x, "fp8": lambda: fp8(x, 1.0), "by_channel": lambda: fp8(x, scale),
                "planes": lambda: values_of(x, self.cell)}[self.name]()


# --- rules: of logits, which rows are read, and by which form ---------------------------------------------------------

OPTIONS: dict[str, dict[str, float]] = {
    "full": {}, "fp8": {"by_channel": 0}, "strata": {"budget": 2048, "min_tokens": 0}, "quest": {"budget": 2048, "min_tokens": 0},
    "planes": {"keep": 8, "unit": 64, "tail": 2, "share": 0, "fine_above": 2, "skip_below": 1, "run": 1, "sample": 0,
               "sinks": 4, "recent": 64}}


class Read(NamedTuple):
    """What a rule reads of a layer, by KV head. fine: [H, n], positions that are read by the fine forms; coarse: by the
    coarse ones; attend_bytes, select_bytes: of all KV heads."""
    fine: Tensor
    coarse: Tensor
    attend_bytes: int
    select_bytes: int


class Rule:
    """A plan's text. Errors: SystemExit, it is not emulated."""

    def __init__(self, text: str) -> None:
        name, _, inner = text.partition("{")
        given = dict(re.findall(r"(\w+) = ([\d.]+)", inner))
        if name not in OPTIONS or given.keys() - OPTIONS[name].keys():
            raise SystemExit(f"accuracy: --plan {text}: emulated are {OPTIONS}; leave out --emulate for a daemon's plans")
        self.text, self.name = text, name
        self.options = OPTIONS[name] | {key: float(value) for key, value in given.items()}
        if name == "planes":
            self.options["sample"] = self.options["sample"] or (1 if self.options["share"] else 16)
        self.keys, self.coarse_keys, self.values, self.coarse_values = self._forms()

    def __getattr__(self, option: str) -> Any:
        try:
            value = self.options[option]
        except KeyError:
            raise AttributeError(option) from None
        return int(value) if value == int(value) else value

    def _forms(self) -> tuple[Form, Form, Form, Form]:
        raw = Form("raw")
        if self.name == "fp8":
            form = Form("by_channel" if self.by_channel else "fp8")
            return form, form, form, form
        if self.name == "strata":
            return raw, Form("index", 64), raw, raw
        if self.name == "planes":
            last = {8: 1, 4: 16}[self.keep]
            return (Form("planes", self.unit, last), Form("planes", self.unit, 64), Form("planes", self.unit, last),
                    Form("planes", self.unit, {2: 64, 1: 128}[self.tail]))
        return raw, raw, raw, raw

    def read(self, layer: Layer, row: int, q: Tensor, coarse: Tensor, fine: Tensor) -> Read:
        """coarse, fine: logits [H, G, n] by both forms of keys; q [H, G, d]."""
        heads, _, n = coarse.shape
        d, everything = q.shape[-1], torch.ones(heads, n, dtype=torch.bool)
        nothing = torch.zeros_like(everything)
        if self.name in ("full", "fp8"):
            return Read(everything, nothing, heads * n * 2 * d * (2 if self.name == "full" else 1), 0)
        if self.name == "strata":
            chosen = self._tokens(coarse, 4, n - 64, self.budget)
            sealed = (n - 1) // 64 * 64
            return Read(chosen, nothing, int(chosen.sum()) * 4 * d, heads * (sealed * d // 4 + sealed // 64 * 4 * d))
        if self.name == "quest":
            return self._pages(layer.boxes(row), q, n)
        return self._planes(coarse, fine, d)

    def _tokens(self, coarse: Tensor, start: int, stop: int, room: int) -> Tensor:
        """[H, n]: what is outside of [start, stop), and the `room` best inside."""
        chosen = torch.ones(coarse.shape[0], coarse.shape[2], dtype=torch.bool)
        chosen[:, start:stop] = _largest(coarse[..., start:stop].softmax(-1).sum(1), room)
        return chosen

    def _pages(self, boxes: tuple[Tensor, Tensor], q: Tensor, n: int) -> Read:
        low, high = (box[:, None, :(n - 1) // PAGE] for box in boxes)
        scores = torch.maximum(q[:, :, None] * low, q[:, :, None] * high).sum(-1).amax(1)
        chosen = torch.ones(len(q), n, dtype=torch.bool)
        chosen[:, :scores.shape[1] * PAGE] = _largest(scores, self.budget // PAGE).repeat_interleave(PAGE, -1)
        d = q.shape[-1]
        return Read(chosen, torch.zeros_like(chosen), int(chosen.sum()) * 4 * d, scores.numel() * 4 * d)

    # docs/spec/planes.md, "A step"

    def _planes(self, coarse: Tensor, fine: Tensor, d: int) -> Read:
        heads, _, n = coarse.shape
        sealed = (n - 1) // self.unit * self.unit
        start = -(-self.sinks // self.run) * self.run
        stop = max(start, min(sealed, (n - self.recent) // self.run * self.run))
        weights = (coarse - self.log_normaliser(coarse, fine, start, stop)[..., None]).exp().amax(1)
        if not self.share:
            chosen = torch.ones(heads, n, dtype=torch.bool)
            chosen[:, start:stop] = weights[:, start:stop] >= self.fine_above / n
        else:
            room = max(self.run, math.ceil(self.share * n - 1e-9) - (n - stop + start))
            chosen = self._runs(coarse, start, stop, room)
        in_fine = chosen[:, :sealed].unflatten(1, (-1, STRIP)).any(-1)
        strips = in_fine | (weights[:, :sealed] >= self.skip_below / n).unflatten(1, (-1, STRIP)).any(-1)
        coarsely = torch.zeros_like(chosen)
        coarsely[:, :sealed] = strips.repeat_interleave(STRIP, -1) & ~chosen[:, :sealed]
        upper = heads * (sealed // self.unit * 4 * d + sealed * d // 4)
        lower = int(chosen[:, :sealed].sum()) * {8: 3 * d // 2, 4: d // 2}[self.keep]
        values = int(strips.sum()) * (64 + 2 * self.tail * d)
        return Read(chosen, coarsely, upper + lower + values + heads * (n - sealed) * 4 * d, 0)

    def _runs(self, coarse: Tensor, start: int, stop: int, room: int) -> Tensor:
        scores = coarse[..., start:stop].softmax(-1).sum(1).unflatten(1, (-1, self.run)).sum(-1)
        chosen = torch.ones(coarse.shape[0], coarse.shape[2], dtype=torch.bool)
        chosen[:, start:stop] = _largest(scores, room // self.run).repeat_interleave(self.run, -1)
        return chosen

    def log_normaliser(self, coarse: Tensor, fine: Tensor, start: int, stop: int) -> Tensor:
        """L_h [H, G]."""
        positions = torch.arange(start, stop)
        sampled = positions[positions // self.unit % self.sample == (self.sample - 1) // 2]
        logits = coarse[..., sampled if len(sampled) else positions]
        largest = logits.amax(-1, keepdim=True)
        rest = ((logits - largest).exp().sum(-1, keepdim=True) - 1).clamp_min(0)
        counted = largest + torch.log1p(rest * ((stop - start) / logits.shape[-1]))
        return torch.cat([fine[..., :start], fine[..., stop:], counted], -1).logsumexp(-1)


def _largest(scores: Tensor, count: int) -> Tensor:
    """Whether each of scores [H, n] is one of its row's `count` largest; of equal ones the first are."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :max(count, 0)]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True)


# --- one layer's rows under every rule -------------------------------------------------------------------------------

class Side:
    """Keys, or values, of a layer in the forms that rules read: of all but the prompt's last tokens once, of the others
    by rule. Groups that fill while decoding are sealed as they fill."""

    def __init__(self, rows: Tensor, forms: Iterable[Form], rules: int, room: int, read: Callable[..., Tensor]) -> None:
        """rows [H, n, d]: the prompt's. room: tokens that may follow. read: Form.keys or Form.values."""
        heads, n, d = rows.shape
        self.shared = n // BLOCK * BLOCK
        self._scale, self._read = rows.abs().amax(1, keepdim=True).clamp_min(1e-7) / E4M3, read
        self.forms = {form: read(form, rows[:, :self.shared], self._scale) for form in {Form("raw"), *forms}}
        self.ends = {form: torch.zeros(rules, heads, n - self.shared + room, d) for form in self.forms}
        self.append(rows[None, :, self.shared:].expand(rules, -1, -1, -1), 0)

    def append(self, rows: Tensor, at: int) -> None:
        """rows [rules, H, count, d], the first of them number `at` behind those that are shared."""
        for form, end in self.ends.items():
            count = rows.shape[2]
            end[:, :, at:at + count] = rows if form.unit else self._read(form, rows, self._scale)

    def seal(self, tokens: int) -> None:
        """The groups that are complete before the token behind so many."""
        for form, end in self.ends.items():
            first = tokens - self.shared - form.unit if form.unit else -1
            if first >= 0 and tokens % form.unit == 0:
                raw = self.ends[Form("raw")][:, :, first:first + form.unit]
                end[:, :, first:first + form.unit] = self._read(form, raw, self._scale)

    def dots(self, form: Form, rows: list[int], x: Tensor, tokens: int) -> Tensor:
        """x [rows, H, G, d] by each of `tokens` tokens: [rows, H, G, tokens]."""
        by_head = x.transpose(0, 1).flatten(1, 2) @ self.forms[form].transpose(1, 2)
        shared = by_head.unflatten(1, (len(rows), -1)).transpose(0, 1)
        end = self.ends[form][rows, :, :tokens - self.shared]
        return torch.cat([shared, x @ end.transpose(2, 3)], -1)

    def sums(self, form: Form, rows: list[int], weights: Tensor) -> Tensor:
        """Weights [rows, H, G, tokens] over tokens: [rows, H, G, d]."""
        by_head = weights[..., :self.shared].transpose(0, 1).flatten(1, 2) @ self.forms[form]
        shared = by_head.unflatten(1, (len(rows), -1)).transpose(0, 1)
        return shared + weights[..., self.shared:] @ self.ends[form][rows, :, :weights.shape[-1] - self.shared]


class Layer:
    """Keys and values of one layer behind a prompt, a row a rule."""

    def __init__(self, keys: Tensor, values: Tensor, rules: list[Rule], room: int, scale: float) -> None:
        """keys, values [H, n, d]; room: tokens that may follow."""
        self.rules, self.scale, self.tokens = rules, scale, keys.shape[1]
        self.keys = Side(keys, {form for r in rules for form in (r.keys, r.coarse_keys)}, len(rules), room, Form.keys)
        self.values = Side(values, {form for r in rules for form in (r.values, r.coarse_values)}, len(rules), room,
                           Form.values)
        for tokens in range(self.keys.shared, self.tokens + 1):
            self._seal(tokens)
        self._bounds = [bound(_by_group(self.keys.forms[Form("raw")], PAGE), -2) for bound in (torch.amin, torch.amax)]

    def _seal(self, tokens: int) -> None:
        for side in (self.keys, self.values):
            side.seal(tokens)

    def append(self, keys: Tensor, values: Tensor) -> None:
        """One token's, [rules, H, 1, d]. Groups that lie before it are sealed by now."""
        self._seal(self.tokens)
        for side, rows in ((self.keys, keys), (self.values, values)):
            side.append(rows, self.tokens - side.shared)
        self.tokens += 1

    def boxes(self, row: int) -> tuple[Tensor, Tensor]:
        """Smallest and largest of each complete page's keys, [H, pages, d]."""
        end = self.keys.ends[Form("raw")][row][:, :(self.tokens - self.keys.shared) // PAGE * PAGE]
        low, high = (torch.cat([known, bound(_by_group(end, PAGE), -2)], 1) if end.shape[1] else known
                     for known, bound in zip(self._bounds, (torch.amin, torch.amax)))
        return low, high

    def attend(self, q: Tensor) -> tuple[Tensor, list[Read]]:
        """q [rules, H, G, d]. Outputs [rules, H, G, d], and what each rule read."""
        coarse, fine = self._logits(q, lambda r: r.coarse_keys), self._logits(q, lambda r: r.keys)
        reads, weights, coarse_weights = [], [], []
        for row, rule in enumerate(self.rules):
            read = rule.read(self, row, q[row], coarse[row], fine[row])
            logits = torch.where(read.fine[:, None], fine[row], coarse[row])
            p = logits.masked_fill(~(read.fine | read.coarse)[:, None], -math.inf).softmax(-1)
            reads.append(read)
            weights.append(p.masked_fill(~read.fine[:, None], 0))
            coarse_weights.append(p.masked_fill(~read.coarse[:, None], 0) if rule.name == "planes" else None)
        out = torch.zeros_like(q)
        for form, rows in _rows_by(lambda r: r.values, self.rules).items():
            out[rows] += self.values.sums(form, rows, torch.stack([weights[i] for i in rows]))
        for form, rows in _rows_by(lambda r: r.coarse_values, self.rules).items():
            if rows := [i for i in rows if coarse_weights[i] is not None]:
                out[rows] += self.values.sums(form, rows, torch.stack([coarse_weights[i] for i in rows]))
        return out, reads

    def _logits(self, q: Tensor, form_of: Callable[[Rule], Form]) -> list[Tensor]:
        """[H, G, tokens] of each rule, by that form of its keys."""
        found: dict[int, Tensor] = {}
        for form, rows in _rows_by(form_of, self.rules).items():
            found |= zip(rows, self.keys.dots(form, rows, q[rows] * self.scale, self.tokens))
        return [found[i] for i in range(len(self.rules))]


def _rows_by(form_of: Callable[[Rule], Form], rules: list[Rule]) -> dict[Form, list[int]]:
    rows: dict[Form, list[int]] = {}
    for i, rule in enumerate(rules):
        rows.setdefault(form_of(rule), []).append(i)
    return rows


# --- a model whose layers attend by them -----------------------------------------------------------------------------

class Engine:
    """decode.Engine's place, without greedy answers. Threads: one at a time."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.context = self.model.config.max_position_embeddings
        self._layers: list[Layer] = []
        self._reads: list[list[Read]] = []  # by layer, in the last step
        ALL_ATTENTION_FUNCTIONS.register(NAME, self._attention)

    def answers(self, ids: list[int], reference: list[int], plans: list[str], new_tokens: int) -> list[Answer]:
        """As decode.Engine's; new_tokens is not looked at."""
        del new_tokens
        rules = [Rule(plan) for plan in plans]
        with torch.no_grad():
            self._prefill(ids[:-1], rules, len(reference))
            return self._decode(ids, reference, rules)

    def _prefill(self, ids: list[int], rules: list[Rule], room: int) -> None:
        self.model.set_attn_implementation("sdpa")
        cache = DynamicCache()
        self.model(input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        scale = self.model.config.head_dim ** -0.5
        self._layers = []
        for layer in cache.layers:
            self._layers.append(Layer(_as_bf16(layer.keys[0]), _as_bf16(layer.values[0]), rules, room, scale))
            layer.keys = layer.values = None
        self.model.set_attn_implementation(NAME)

    def _decode(self, ids: list[int], reference: list[int], rules: list[Rule]) -> list[Answer]:
        answers = [Answer(rule.text, status="emulated") for rule in rules]
        fed = ids[-1]
        for step, token in enumerate(reference):
            self._reads = []
            logits = self.model(input_ids=torch.full((len(rules), 1), fed), use_cache=False,
                                position_ids=torch.full((len(rules), 1), len(ids) - 1 + step)).logits[:, -1]
            if step < COUNTED_STEPS:
                self._count(answers, min(COUNTED_STEPS, len(reference)))
            log_p = torch.log_softmax(logits.double(), -1)
            kl = (log_p[0].exp() * (log_p[0] - log_p)).sum(-1)
            for row, answer in enumerate(answers):
                answer.nats.append(float(-log_p[row, token]))
                answer.kl.append(float(kl[row]))
                answer.said.append(int(log_p[row].argmax()))
                answer.right &= answer.said[-1] == token
            fed = token
        return answers

    def _attention(self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any
                   ) -> tuple[Tensor, None]:
        """query [rules, Hq, 1, d]; key, value [rules, H, 1, d]."""
        layer = self._layers[module.layer_idx]
        layer.append(_as_bf16(key), _as_bf16(value))
        out, reads = layer.attend(query[:, :, 0].unflatten(1, (key.shape[1], -1)))
        self._reads.append(reads)
        return out.flatten(1, 2)[:, None], None

    def _count(self, answers: list[Answer], steps: int) -> None:
        for reads in self._reads:
            for answer, read in zip(answers, reads):
                answer.rows += float(read.fine.sum()) / len(read.fine) / len(self._reads) / steps
                answer.attend_bytes += read.attend_bytes / steps
                answer.select_bytes += read.select_bytes / steps


def _as_bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()
