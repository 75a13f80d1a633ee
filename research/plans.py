# SPDX-License-Identifier: Apache-2.0
"""The grid: which plans are compared, at which budgets.

In a text P% is a share of the prompt's tokens, P%-K the same less K tokens, P/100 the share as a number; P itself is the
budget. Budgets count what is always attended, so that a row reads what its name says, as far as the plan can.
"""

from __future__ import annotations

import re

BUDGETS = (5, 10, 25)
BY_BUDGET = {
    "window": "window{n_sink = 64, n_recent = P%-64, min_tokens = 0}",
    "quest": "quest{budget = P%, min_tokens = 0}",
    "quest_softmax": 'quest{page = 32, n_sink = 4, n_recent = 64, group = "softmax", budget = P%-68, min_tokens = 0}',
    "quest_sinks": "quest{n_sink = 4, n_recent = 64, budget = P%-80, min_tokens = 0}",
    "quest_deviation_sinks": 'quest{score = "deviation", n_sink = 4, n_recent = 64, budget = P%-80, min_tokens = 0}',
    "quest_deviation_sinks_8": 'quest{score = "deviation", page = 8, n_sink = 4, n_recent = 64, budget = P%-72, '
                               'min_tokens = 0}',
    "bits": "bits{budget = P%-68, min_tokens = 0}",
    "bits_runs": "bits{run = 8, budget = P%-72, min_tokens = 0}",
    "tokenselect": "tokenselect{k = P%-192, n_init = 64, n_local = 128, min_tokens = 0}",
    "tokenselect_head": 'tokenselect{k = P%-192, n_init = 64, n_local = 128, cosine = "head", min_tokens = 0}',
    "sentencekv": "sentencekv{tau = P%-64, min_tokens = 0}",
    "chess": 'chess{page = 16, window = 4, rho = [ROOT, ROOT, ROOT], trigger = "every", min_tokens = 0}',
    "mosaickv": "mosaickv{share = P/100, min_tokens = 0}",
    "sekv": "sekv{rows_share = P/100, local = 128, min_tokens = 0}",
}
# As their papers have them; with what they always attend they read most of a short prompt.
PRESETS = {f"{name}_preset": f"{name}{{min_tokens = 0}}"
           for name in ("quest", "chess", "tokenselect", "sentencekv", "sekv", "mosaickv", "bits")}
# Settings beside the papers', which were tried on half of the tasks and judged on the others (bench/notes/accuracy.md).
NAMED = {
    "sentencekv_words_10%": "sentencekv{max_length = 1, r = 4, tau = 10%-64, min_tokens = 0}",
    "sentencekv_words_25%": "sentencekv{max_length = 1, r = 4, tau = 25%-64, min_tokens = 0}",
    "sentencekv_four_25%": "sentencekv{max_length = 4, r = 4, tau = 25%-64, min_tokens = 0}",
    "mosaickv_48_25%": "mosaickv{keep = 48, share = 0.25, max_loss = 1, truncate = false, min_tokens = 0}",
    "tokenselect_near_10%": 'tokenselect{k = 10%-68, n_init = 4, n_local = 64, cosine = "head", min_tokens = 0}',
    "chess_flat_25%": 'chess{page = 16, window = 1, rho = [1, 1, 0.25], trigger = "always", min_tokens = 0}',
    "chess_always_25%": 'chess{page = 16, window = 1, rho = [0.63, 0.63, 0.63], trigger = "always", min_tokens = 0}',
}
# The same, of what a GPU refuses: with --device cpu alone.
ON_CPUS = {
    "chess_layer_25%": 'chess{page = 16, window = 1, rho = [1, 1, 0.25], lists = "layer", anchor = "query", '
                       'trigger = "always", min_tokens = 0}',
}
# bits at the bytes of quest: its index takes 1/64 of the prompt's rows more (docs/plans.md, "Memory").
EQUAL_BYTES = {f"bits_at_quest_{p}%": f"bits{{budget = {p - 100 / 64:.2f}%-68, min_tokens = 0}}" for p in BUDGETS}

# Rules of planes, and what they are judged beside (--emulate; emulated.py has the texts). `variance`: scores have it.
EMULATED = {"fp8": "fp8{}", "fp8_by_tensor": "fp8{by_tensor = 1}", "fp8_by_channel": "fp8{by_channel = 1}",
            "turboquant_k8v4": "turboquant{keys = 8}", "turboquant_4bit": "turboquant{keys = 4}",
            "bits_10%": "bits{budget = 10%-68, min_tokens = 0}", "quest_10%": "quest{budget = 10%, min_tokens = 0}"} | {
    name: f"strata{{{options}}}" for name, options in {
        "share_10%": "share = 0.1, skip_below = 1, variance = 0", "above_2": "fine_above = 2, skip_below = 1, variance = 0",
        "above_4": "fine_above = 4, skip_below = 1, variance = 0",
        "above_4_variance": "fine_above = 4, skip_below = 1, variance = 1",
        "above_4_half_variance": "fine_above = 4, skip_below = 1, variance = 0.5",
        "above_8_variance_skip_2": "fine_above = 8, skip_below = 2, variance = 1"}.items()}

_SHARE = re.compile(r"([\d.]+)%(?:-(\d+))?")


def at(text: str, budget: float) -> str:
    """A text of BY_BUDGET for a budget in percent. ROOT: the share of each of three levels whose product is the budget."""
    return (text.replace("P%", f"{budget:g}%").replace("P/100", f"{budget / 100:g}")
            .replace("ROOT", f"{(budget / 100) ** (1 / 3):.3f}"))


def grid(budgets: tuple[float, ...] = BUDGETS) -> dict[str, str]:
    """Names and texts, which still have shares of the prompt."""
    by_budget = {f"{name}_{p:g}%": at(text, p) for p in budgets for name, text in BY_BUDGET.items()}
    return by_budget | EQUAL_BYTES | PRESETS | NAMED


def for_prompt(text: str, tokens: int) -> str:
    """The text with numbers for P% and P%-K; at least one token each."""
    return _SHARE.sub(lambda m: str(max(1, round(float(m[1]) / 100 * tokens) - int(m[2] or 0))), text)
