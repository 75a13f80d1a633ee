# SPDX-License-Identifier: Apache-2.0
"""Rules of attention that are judged before a daemon serves them, and what they are judged beside.

An Engine answers as decode.Engine does, without a daemon: `research --emulate`. Keys and values are rounded to bf16, the
prompt is computed under full attention, and all rules are rows of one batch that is given the reference answer. Greedy
answers are not decoded: what a plan says is the likeliest token behind each of the reference's. So all its steps are
known, and a layer computes them at once.

| a plan's text | what it is |
| --- | --- |
| `full`, `fp8{}` | all rows in bf16; in e4m3 as they are, as vLLM has them by default. `by_tensor = 1`, `by_channel = 1`: by a scale of all the prompt's keys, or values, or by one a channel |
| `turboquant{keys = 8}` | values in 4 bits, a minimum and a step a token; keys in e4m3, or `keys = 4`: rotated, a norm a token and Lloyd-Max codes of a Gaussian |
| `strata{}` | docs/spec/planes.md. Beside its options: `tail = 1`: outside of F a value is read by the upper bit of its plane 0 |
| | `variance = v`: a score has v / 2 of the variance that rounding adds to a logit; the page's is 1 |
| | `sinks_in = 1`: L_h has the sinks, too; `candidates = 1`: it has nothing but the candidates |
| `bits{budget}` | docs/spec/bits.md with two bits |
| `quest{budget}` | docs/spec/beyond.md, "Baselines": pages of 16 by their bounds |
"""

from __future__ import annotations

import functools
import math
import pathlib
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from answer import COUNTED_STEPS, Answer
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

BLOCK = 256        # tokens of the prompt that all rules share come in multiples of it, which every unit divides
STRIP, PAGE = 16, 16
PREFILL = 4096     # tokens of the prompt that are computed at once
LARGEST = 65504.0
E4M3 = 448.0
NAME = "kvstrata_emulated"

Tensor = torch.Tensor


# --- storage: functions of rows [.., n, d] ---------------------------------------------------------------------------

def _half_towards(x: Tensor, end: float) -> Tensor:
    """As fp32: the fp16 nearest to x, or the next one on the side of `end` where the nearest lies on the other."""
    near = x.half()
    beyond = near.float() > x if end < 0 else near.float() < x
    bits = near.view(torch.int16).int()
    order = torch.where(bits < 0, -32768 - bits, bits) + beyond * int(math.copysign(1, end))
    return torch.where(order < 0, -32768 - order, order).to(torch.int16).view(torch.float16).float()


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


@functools.cache
def lloyd_max(levels: int) -> list[float]:
    """The values that the least mean square error reads codes of N(0, 1) by."""
    x = torch.linspace(-6, 6, 120_001, dtype=torch.float64)
    weight, found = (-x * x / 2).exp(), torch.linspace(-3, 3, levels, dtype=torch.float64)
    for _ in range(500):
        code = torch.bucketize(x, (found[1:] + found[:-1]) / 2)
        sums = torch.zeros(2, levels, dtype=torch.float64).index_add_(1, code, torch.stack([x * weight, weight]))
        found = sums[0] / sums[1]
    return found.tolist()


def turboquant_keys_of(x: Tensor) -> Tensor:
    """Keys in 4 bits a rotated channel and a norm: vLLM's `turboquant_4bit_nc`."""
    d = x.shape[-1]
    levels = torch.tensor(lloyd_max(16), device=x.device) / math.sqrt(d)
    norm = x.norm(dim=-1, keepdim=True)
    codes = torch.bucketize(rotate(x / (norm + 1e-8)), (levels[1:] + levels[:-1]) / 2)
    read = levels[codes]
    return rotate(read / read.norm(dim=-1, keepdim=True)) * norm.half().float()


def turboquant_values_of(x: Tensor) -> Tensor:
    """Values in 4 bits, a minimum and a step a token."""
    minimum = x.amin(-1, keepdim=True)
    step = ((x.amax(-1, keepdim=True) - minimum) / 15).clamp_min(1e-8)
    codes = ((x - minimum) / step).round().clamp(0, 15)
    return codes * step.half().float() + minimum.half().float()


class Form(NamedTuple):
    """How keys, or values, are read. unit: of the groups that are sealed at once; 0: each row by itself."""
    name: str
    unit: int = 0
    cell: int = 1

    def keys(self, x: Tensor, largest: Tensor) -> Tensor:
        """x [.., H, n, d]; largest [H, 1, d]: of the prompt's keys in size, by channel."""
        if self.name == "turboquant":
            return turboquant_keys_of(x)
        if self.name == "index":
            return index_of(x, self.unit)
        return keys_of(x, self.unit, self.cell) if self.name == "planes" else self._rows(x, largest)

    def values(self, x: Tensor, largest: Tensor) -> Tensor:
        if self.name == "turboquant":
            return turboquant_values_of(x)
        return values_of(x, self.cell) if self.name == "planes" else self._rows(x, largest)

    def _rows(self, x: Tensor, largest: Tensor) -> Tensor:
        scale = {"fp8": 1.0, "by_tensor": largest.amax() / E4M3, "by_channel": largest / E4M3}
        return x if self.name == "raw" else fp8(x, scale[self.name])


RAW = Form("raw")


# --- steps: their lengths, and of logits, which rows are read by which form -------------------------------------------

OPTIONS: dict[str, dict[str, float]] = {
    "full": {}, "fp8": {"by_tensor": 0, "by_channel": 0}, "turboquant": {"keys": 8},
    "bits": {"budget": 2048, "min_tokens": 0}, "quest": {"budget": 2048, "min_tokens": 0},
    "strata": {"keep": 8, "unit": 64, "tail": 2, "share": 0, "fine_above": 8, "skip_below": 2, "run": 1, "sample": 0,
               "sinks": 4, "recent": 64, "variance": 1, "sinks_in": 0, "candidates": 0}}


class Steps:
    """T steps, each with one token more: lengths [T, 1], that token included; at [N]: positions, of which those from a
    step's length on are nothing to it. Masks are [T, N]."""

    def __init__(self, prompt: int, steps: int, device: torch.device) -> None:
        self.prompt = prompt
        self.lengths = torch.arange(prompt + 1, prompt + steps + 1, device=device)[:, None]
        self.at = torch.arange(-(-(prompt + steps) // BLOCK) * BLOCK, device=device)
        self.present = self.at < self.lengths

    def sealed(self, unit: int) -> Tensor:
        """[T, 1]: tokens of groups that are complete before the step."""
        return (self.lengths - 1) // unit * unit


class Read(NamedTuple):
    """What a rule reads of a layer, by KV head. fine: [H, T, N], positions that are read by the fine forms; coarse: by the
    coarse ones; attend_bytes, select_bytes: [T], of all KV heads."""
    fine: Tensor
    coarse: Tensor
    attend_bytes: Tensor
    select_bytes: Tensor


class Rule:
    """A plan's text. Errors: SystemExit, it is not emulated."""

    def __init__(self, text: str) -> None:
        name, _, inner = text.partition("{")
        given = dict(re.findall(r"(\w+) = ([\d.]+)", inner))
        if name not in OPTIONS or given.keys() - OPTIONS[name].keys():
            raise SystemExit(f"accuracy: --plan {text}: emulated are {OPTIONS}; leave out --emulate for a daemon's plans")
        self.text, self.name = text, name
        self.options = OPTIONS[name] | {key: float(value) for key, value in given.items()}
        if name == "strata":
            self.options["sample"] = self.options["sample"] or (1 if self.options["share"] else 16)
        self.fine_keys, self.coarse_keys, self.fine_values, self.coarse_values = self._forms()

    def __getattr__(self, option: str) -> Any:
        try:
            value = self.options[option]
        except KeyError:
            raise AttributeError(option) from None
        return int(value) if value == int(value) else value

    def _forms(self) -> tuple[Form, Form, Form, Form]:
        if self.name == "fp8":
            form = Form("by_channel" if self.by_channel else "by_tensor" if self.by_tensor else "fp8")
            return form, form, form, form
        if self.name == "turboquant":
            keys, values = Form({8: "fp8", 4: "turboquant"}[self.keys]), Form("turboquant")
            return keys, keys, values, values
        if self.name == "bits":
            return RAW, Form("index", 64), RAW, RAW
        if self.name == "strata":
            last = {8: 1, 4: 16}[self.keep]
            return (Form("planes", self.unit, last), Form("planes", self.unit, 64), Form("planes", self.unit, last),
                    Form("planes", self.unit, {2: 64, 1: 128}[self.tail]))
        return RAW, RAW, RAW, RAW

    def read(self, steps: Steps, q: Tensor, keys: Rows, coarse: Tensor, fine: Tensor) -> Read:
        """coarse, fine: logits [H, T, G, N] by both forms of keys, -inf from a step's length on; q [H, T, G, d], scaled."""
        if self.name == "bits":
            return self._bits(steps, coarse, q.shape[-1])
        if self.name == "quest":
            return self._quest(steps, q, keys)
        if self.name == "strata":
            return self._planes(steps, q, keys, coarse, fine)
        heads, d = len(q), q.shape[-1]
        row = {"full": 4 * d, "fp8": 2 * d, "turboquant": d // 2 + 4 + (d if self.options.get("keys") == 8 else d // 2 + 2)}
        everything = steps.present.expand(heads, -1, -1)
        count = steps.lengths[:, 0]
        return Read(everything, torch.zeros_like(everything), heads * count * row[self.name], 0 * count)

    def _bits(self, steps: Steps, coarse: Tensor, d: int) -> Read:
        among = (steps.at >= 4) & (steps.at < steps.lengths - 64)
        best = _largest(_scores(coarse, among), torch.full_like(steps.lengths, self.budget)) & among
        chosen = best | steps.present & ~among
        sealed = steps.sealed(64)[:, 0]
        return Read(chosen, torch.zeros_like(chosen), _count(chosen) * 4 * d,
                    len(coarse) * (sealed * d // 4 + sealed // 64 * 4 * d))

    def _quest(self, steps: Steps, q: Tensor, keys: Rows) -> Read:
        low, high = keys.boxes()
        scores = (_by_tokens(q.clamp_min(0), high) + _by_tokens(q.clamp_max(0), low)).amax(2)
        pages = (steps.lengths - 1) // PAGE
        scores = scores.masked_fill(torch.arange(scores.shape[-1], device=q.device) >= pages, -math.inf)
        best = _largest(scores, torch.full_like(pages, self.budget // PAGE)).repeat_interleave(PAGE, -1)
        chosen = steps.present & (best | (steps.at >= pages * PAGE))
        d = q.shape[-1]
        return Read(chosen, torch.zeros_like(chosen), _count(chosen) * 4 * d, len(q) * pages[:, 0] * 4 * d)

    # docs/spec/planes.md, "A step"

    def _planes(self, steps: Steps, q: Tensor, keys: Rows, coarse: Tensor, fine: Tensor) -> Read:
        at, n, sealed, d = steps.at, steps.lengths, steps.sealed(self.unit), q.shape[-1]
        start = -(-self.sinks // self.run) * self.run
        stop = torch.minimum(sealed, (n - self.recent) // self.run * self.run).clamp_min(start)
        among = (at >= start) & (at < stop)
        variance = _by_tokens(q ** 2, keys.squared_steps(self.unit)) * ((64 ** 2 - self.fine_keys.cell ** 2) / 12)
        scores = coarse + self.variance / 2 * variance.repeat_interleave(self.unit, -1)
        weights = (scores - self.log_normaliser(steps, coarse, fine, among)[..., None]).exp().amax(2)
        if self.share:
            best = self._runs(scores, among, (torch.ceil(self.share * n.double() - 1e-9).long() - (n - stop + start)).clamp_min(self.run))
        else:
            best = weights >= self.fine_above / n
        chosen = best & among | steps.present & ~among
        packed = at < sealed
        read = packed & (chosen | (weights >= self.skip_below / n))
        strips = read.unflatten(-1, (-1, STRIP)).any(-1)
        coarsely = strips.repeat_interleave(STRIP, -1) & packed & ~chosen
        upper = len(coarse) * (sealed // self.unit * 4 * d + sealed * d // 4 + (n - sealed) * 4 * d)[:, 0]
        lower = _count(chosen & packed) * {8: 3 * d // 2, 4: d // 2}[self.keep]
        return Read(chosen, coarsely, upper + lower + _count(strips) * (64 + 2 * self.tail * d), torch.zeros_like(upper))

    def _runs(self, scores: Tensor, among: Tensor, room: Tensor) -> Tensor:
        masses = _scores(scores, among).unflatten(-1, (-1, self.run)).sum(-1)
        return _largest(masses, room // self.run).repeat_interleave(self.run, -1)

    def log_normaliser(self, steps: Steps, coarse: Tensor, fine: Tensor, among: Tensor) -> Tensor:
        """L_h [H, T, G]. among [T, N]: the candidates."""
        sampled = among & (steps.at // self.unit % self.sample == (self.sample - 1) // 2)
        sampled = torch.where(sampled.any(-1, keepdim=True), sampled, among)
        logits = coarse.masked_fill(~sampled[:, None], -math.inf)
        largest = logits.amax(-1)
        rest = (logits.logsumexp(-1) - largest).exp() - 1
        share = among.sum(-1) / sampled.sum(-1)
        counted = largest + torch.log1p(rest.clamp_min(0) * share[:, None])
        sinks = steps.at < (self.sinks_in == 0) * (-(-self.sinks // self.run) * self.run)
        always = fine.masked_fill((among | sinks)[:, None], -math.inf).logsumexp(-1)
        both = counted if self.candidates else torch.logaddexp(always, counted)
        return torch.where(among.any(-1)[:, None], both, always)


def _count(chosen: Tensor) -> Tensor:
    """[T], of [H, T, ..]."""
    return chosen.sum((0, 2))


def _scores(logits: Tensor, among: Tensor) -> Tensor:
    """[H, T, N]: the heads' softmaxes over candidates, summed; -inf where none is."""
    scores = logits.masked_fill(~among[:, None], -math.inf).softmax(-1).sum(2)
    return scores.masked_fill(~among, -math.inf)


def _largest(scores: Tensor, counts: Tensor) -> Tensor:
    """Whether each of scores [H, T, n] is one of its row's counts [T, 1] largest; of equal ones the first are."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    first = torch.arange(scores.shape[-1], device=scores.device) < counts
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, first.expand(len(scores), -1, -1))


# --- one layer's rows, as a rule's steps see them --------------------------------------------------------------------

class Side:
    """Keys, or values, of a layer's prompt in the forms that rules read."""

    def __init__(self, rows: Tensor, forms: Iterable[Form], read: Callable[..., Tensor]) -> None:
        """rows [H, n, d]. read: Form.keys or Form.values."""
        self.shared = rows.shape[1] // BLOCK * BLOCK
        self.rest = rows[:, self.shared:]
        largest = rows.abs().amax(1, keepdim=True).clamp_min(1e-7)
        self.read = lambda form, x: read(form, x, largest)
        self.forms = {form: self.read(form, rows[:, :self.shared]) for form in {RAW, *forms}}
        self._boxes: tuple[Tensor, Tensor] | None = None

    def boxes(self) -> tuple[Tensor, Tensor]:
        if self._boxes is None:
            self._boxes = boxes_of(self.forms[RAW])
        return self._boxes


def boxes_of(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest of each page's keys, [H, pages, d]."""
    pages = _by_group(keys, PAGE)
    return pages.amin(-2), pages.amax(-2)


class Rows:
    """A side with a rule's own rows behind it. A step reads a form of groups that are sealed, raw rows of others."""

    def __init__(self, side: Side, own: Tensor, steps: Steps) -> None:
        """own [H, T, d]."""
        self._side, self._steps = side, steps
        own = torch.cat([side.rest, own], 1)
        self._end = torch.nn.functional.pad(own, (0, 0, 0, len(steps.at) - side.shared - own.shape[1]))

    def boxes(self) -> tuple[Tensor, Tensor]:
        return tuple(torch.cat(pair, 1) for pair in zip(self._side.boxes(), boxes_of(self._end)))

    def squared_steps(self, unit: int) -> Tensor:
        """By group and channel of the keys' codes: [H, groups, d]."""
        return torch.cat([quantise(_by_group(rows, unit), 255, -2)[1][..., 0, :] ** 2
                          for rows in (self._side.forms[RAW], self._end)], 1)

    def dots(self, form: Form, x: Tensor) -> Tensor:
        """x [H, T, G, d] by each row: [H, T, G, N], -inf from a step's length on."""
        end = _by_tokens(x, self._side.read(form, self._end))
        if form.unit:
            end = torch.where(self._sealed(form)[:, None], end, _by_tokens(x, self._end))
        found = torch.cat([_by_tokens(x, self._side.forms[form]), end], -1)
        return found.masked_fill_(~self._steps.present[:, None], -math.inf)

    def sums(self, form: Form, weights: Tensor) -> Tensor:
        """Weights [H, T, G, N] over rows: [H, T, G, d]."""
        shared, end = weights.split([self._side.shared, weights.shape[-1] - self._side.shared], -1)
        found = _over_tokens(shared, self._side.forms[form])
        if not form.unit:
            return found + _over_tokens(end, self._side.read(form, self._end))
        sealed = self._sealed(form)[:, None]
        return (found + _over_tokens(end.masked_fill(~sealed, 0), self._side.read(form, self._end))
                + _over_tokens(end.masked_fill(sealed, 0), self._end))

    def _sealed(self, form: Form) -> Tensor:
        return self._steps.at[self._side.shared:] < self._steps.sealed(form.unit)


def _by_tokens(x: Tensor, rows: Tensor) -> Tensor:
    """x [H, T, G, d] by rows [H, n, d]: [H, T, G, n]."""
    return (x.flatten(1, 2) @ rows.transpose(1, 2)).unflatten(1, x.shape[1:3])


def _over_tokens(weights: Tensor, rows: Tensor) -> Tensor:
    return (weights.flatten(1, 2) @ rows).unflatten(1, weights.shape[1:3])


class Layer:
    """Keys and values [H, n, d] of a layer's prompt, and steps behind it under each rule."""

    def __init__(self, keys: Tensor, values: Tensor, rules: list[Rule], steps: Steps, scale: float) -> None:
        self._steps, self._scale = steps, scale
        self._keys = Side(keys, {form for r in rules for form in (r.fine_keys, r.coarse_keys)}, Form.keys)
        self._values = Side(values, {form for r in rules for form in (r.fine_values, r.coarse_values)}, Form.values)

    def attend(self, rule: Rule, q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Read]:
        """All steps of a rule: q [H, T, G, d]; keys, values [H, T, d], of the steps' own tokens. Outputs [H, T, G, d]."""
        of_keys, of_values = Rows(self._keys, keys, self._steps), Rows(self._values, values, self._steps)
        coarse = of_keys.dots(rule.coarse_keys, q * self._scale)
        fine = coarse if rule.fine_keys == rule.coarse_keys else of_keys.dots(rule.fine_keys, q * self._scale)
        read = rule.read(self._steps, q * self._scale, of_keys, coarse, fine)
        is_fine, is_coarse = read.fine[:, :, None], read.coarse[:, :, None]
        p = torch.where(is_fine, fine, coarse).masked_fill_(~(is_fine | is_coarse), -math.inf).softmax(-1)
        out = of_values.sums(rule.fine_values, p.masked_fill(~is_fine, 0))
        if rule.coarse_values != rule.fine_values:
            out += of_values.sums(rule.coarse_values, p.masked_fill(~is_coarse, 0))
        return out, read


def attend_window(query: Tensor, keys: Tensor, values: Tensor, window: int, scale: float) -> Tensor:
    """query [rules, H, G, T, d]; keys, values [rules, H, n + T, d]: n rows of the prompt, then the steps' own. Each step
    attends to `window` tokens, its own included."""
    steps, rows = query.shape[3], keys.shape[2]
    at = torch.arange(rows, device=keys.device)
    own = torch.arange(rows - steps, rows, device=keys.device)[:, None]
    logits = scale * query @ keys[:, :, None].transpose(3, 4)
    return logits.masked_fill((at > own) | (at <= own - window), -math.inf).softmax(-1) @ values[:, :, None]


# --- a model whose layers attend by them -----------------------------------------------------------------------------

class Engine:
    """decode.Engine's place, without greedy answers. Layers of a sliding window are under no rule. Threads: one at a time."""

    def __init__(self, folder: pathlib.Path, device: str = "cpu") -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().to(device)
        self.context = self.model.config.max_position_embeddings
        self._rules: list[Rule] = []
        self._cache = DynamicCache()
        self._reads: list[list[Read]] = []  # by layer that is under rules
        ALL_ATTENTION_FUNCTIONS.register(NAME, self._attention)

    def answers(self, ids: list[int], reference: list[int], plans: list[str], new_tokens: int) -> list[Answer]:
        """As decode.Engine's; new_tokens is not looked at."""
        del new_tokens
        self._rules = [Rule(plan) for plan in plans]
        with torch.no_grad():
            self._prefill(ids[:-1])
            return self._decode(ids, reference)

    def _prefill(self, ids: list[int]) -> None:
        self.model.set_attn_implementation("sdpa")
        self._cache = DynamicCache(config=self.model.config)
        for part in torch.tensor([ids], device=self.model.device).split(PREFILL, 1):
            self.model(input_ids=part, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self.model.set_attn_implementation(NAME)

    def _decode(self, ids: list[int], reference: list[int]) -> list[Answer]:
        count, device, prompt = len(reference), self.model.device, len(ids) - 1
        self._reads, self._steps = [], Steps(prompt, count, device)
        fed = torch.tensor([[ids[-1], *reference[:-1]]] * len(self._rules), device=device)
        at = torch.arange(prompt, prompt + count, device=device).expand(len(fed), -1)
        logits = self.model(input_ids=fed, use_cache=False, position_ids=at).logits
        wanted = torch.tensor(reference, device=device)
        answers, of_full = [], None
        for row, rule in zip(logits, self._rules):
            log_p = torch.log_softmax(row.double(), -1)
            of_full = log_p if of_full is None else of_full
            said = log_p.argmax(-1)
            answers.append(Answer(rule.text, nats=(-log_p.gather(1, wanted[:, None])[:, 0]).tolist(),
                                  kl=(of_full.exp() * (of_full - log_p)).sum(-1).tolist(), said=said.tolist(),
                                  right=bool((said == wanted).all()), status="emulated"))
        self._count(answers)
        return answers

    def _attention(self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, scaling: float,
                   sliding_window: int | None = None, **_: Any) -> tuple[Tensor, None]:
        """query [rules, Hq, T, d]; key, value [rules, H, T, d]."""
        key, value, held = _as_bf16(key), _as_bf16(value), self._cache.layers[module.layer_idx]
        keys, values = _as_bf16(held.keys[0]), _as_bf16(held.values[0])
        held.keys = held.values = None
        q = query.unflatten(1, (key.shape[1], -1))
        if sliding_window:
            behind = lambda known, own: torch.cat([known.expand(len(own), -1, -1, -1), own], 2)
            out = attend_window(q, behind(keys, key), behind(values, value), sliding_window, scaling)
            return out.flatten(1, 2).transpose(1, 2), None
        layer = Layer(keys, values, self._rules, self._steps, scaling)
        found = [layer.attend(rule, *of_rule) for rule, *of_rule in zip(self._rules, q.transpose(2, 3), key, value)]
        self._reads.append([read for _, read in found])
        return torch.stack([out.transpose(0, 1).flatten(1, 2) for out, _ in found]), None

    def _count(self, answers: list[Answer]) -> None:
        steps = min(COUNTED_STEPS, len(answers[0].nats))
        for reads in self._reads:
            for answer, read in zip(answers, reads):
                answer.rows += float(_count(read.fine)[:steps].sum()) / len(read.fine) / len(self._reads) / steps
                answer.attend_bytes += float(read.attend_bytes[:steps].sum()) / steps
                answer.select_bytes += float(read.select_bytes[:steps].sum()) / steps


def _as_bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()
