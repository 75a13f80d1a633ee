# SPDX-License-Identifier: Apache-2.0
"""The plots of README.md and docs: SVG, text that bench/report.py writes and compares.

PLOTS names each file under docs/images and the function that makes its text from bench/results. A picture has
its own ground, and follows the reader's light or dark mode.
"""
import dataclasses
import html
import math

from kept_results import is_older, result_of
from report_tables import MODEL

WIDTH, HEIGHT = 540, 420
LEFT, RIGHT, TOP, BOTTOM = 60, 430, 66, 344
LABEL_GAP = 17  # between two names at the right edge

# A colour a plan, for the light and the dark ground.
COLOURS = {
    "bits": ("#0550ae", "#79c0ff"), "quest_softmax": ("#1b7c83", "#56d4dd"), "quest": ("#bc4c00", "#ffa657"),
    "chess": ("#116329", "#7ee787"),
    "tokenselect": ("#a40e26", "#ff9492"), "sentencekv": ("#6639ba", "#d2a8ff"),
    "mosaickv": ("#7d4e00", "#e3b341"), "sekv": ("#99286e", "#ff9bce"), "full": ("#57606a", "#9da7b3"),
}


@dataclasses.dataclass
class Series:
    name: str
    points: list  # (x, y), by x
    hollow: bool = False
    named_at: tuple | None = None  # a point; else the last one, and the name stands at the right edge
    words: str = ""  # what stands there, if not the name


@dataclasses.dataclass
class Axes:
    """Both are logarithmic but for y_is_linear; ticks are (value, text), the first and the last x are the edges."""
    title: str
    subtitle: str
    x_label: str
    x_edges: tuple
    x_ticks: list
    y_edges: tuple
    y_ticks: list
    notes: list
    right: float = RIGHT
    y_is_linear: bool = False

    def x(self, value):
        return _between(value, self.x_edges, LEFT, self.right)

    def y(self, value):
        if self.y_is_linear:
            low, high = self.y_edges
            return BOTTOM + (value - low) / (high - low) * (TOP - BOTTOM)
        return _between(value, self.y_edges, BOTTOM, TOP)


def _between(value, edges, low, high):
    share = math.log(value / edges[0]) / math.log(edges[1] / edges[0])
    return low + share * (high - low)


def style():
    def rules(shade, ground, frame, text, faint):
        yield f".ground {{ fill: {ground}; stroke: {frame}; }}"
        yield f".text {{ fill: {text}; }} .faint {{ fill: {faint}; }} .grid {{ stroke: {frame}; }}"
        yield f".one {{ stroke: {faint}; }}"
        for plan, colours in COLOURS.items():
            colour = colours[shade]
            yield (f".line.{plan} {{ stroke: {colour}; }} .mark.{plan} {{ stroke: {colour}; fill: {colour}; }} "
                   f".name.{plan} {{ fill: {colour}; }}")
        yield f".mark.hollow {{ fill: {ground}; }}"
    light = "\n    ".join(rules(0, "#ffffff", "#d0d7de", "#1f2328", "#59636e"))
    dark = "\n      ".join(rules(1, "#0d1117", "#3d444d", "#f0f6fc", "#9198a1"))
    return f"""<style>
    text {{ font: 13px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; }}
    .title {{ font-size: 16px; font-weight: 600; }} .name {{ font-weight: 600; }}
    .line {{ fill: none; stroke-width: 2; }} .strong {{ stroke-width: 3.5; }}
    .mark {{ stroke-width: 2; }} .one {{ stroke-dasharray: 5 4; }}
    {light}
    @media (prefers-color-scheme: dark) {{
      {dark}
    }}
  </style>"""


def text(x, y, words, classes="text", anchor="start"):
    return f'<text class="{classes}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(words)}</text>'


def frame(axes):
    yield f'<rect class="ground" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>'
    yield text(20, 28, axes.title, "text title")
    yield text(20, 48, axes.subtitle, "faint")
    for value, words in axes.y_ticks:
        y = axes.y(value)
        yield f'<line class="grid" x1="{LEFT}" x2="{axes.right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield text(LEFT - 8, y + 4.5, words, "faint", "end")
    for value, words in axes.x_ticks:
        x = axes.x(value)
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{BOTTOM}"/>'
        yield text(x, BOTTOM + 18, words, "faint", "middle")
    yield text((LEFT + axes.right) / 2, BOTTOM + 36, axes.x_label, "faint", "middle")
    for i, words in enumerate(axes.notes):
        yield text(20, BOTTOM + 54 + 15 * i, words, "faint")


def drawn(axes, series):
    """A line with a mark at each point."""
    at = [(axes.x(x), axes.y(y)) for x, y in series.points]
    strong = " strong" if series.name == "bits" else ""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
    yield f'<polyline class="line {series.name}{strong}" points="{path}"/>'
    hollow = " hollow" if series.hollow else ""
    for x, y in at:
        yield f'<circle class="mark {series.name}{hollow}" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>'


def names(axes, all_series):
    """Names at the right edge, moved apart where lines end close together, and those beside a point."""
    edge = sorted((s for s in all_series if not s.named_at), key=lambda s: axes.y(s.points[-1][1]))
    places = [axes.y(s.points[-1][1]) for s in edge]
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + LABEL_GAP)
    for i in range(len(places) - 2, -1, -1):
        places[i] = min(places[i], places[i + 1] - LABEL_GAP) if places[-1] > BOTTOM else places[i]
    for series, y in zip(edge, places):
        yield text(RIGHT + 12, y + 4.5, series.words or series.name, f"name {series.name}")
    for series in all_series:
        if series.named_at:
            x, y, anchor = series.named_at
            yield text(x, y, series.words or series.name, f"name {series.name}", anchor)


def picture(axes, all_series, extra=()):
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
             f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(axes.title)}">',
             "<!-- Made by bench/report.py from bench/results. -->", style(), *frame(axes), *extra]
    for series in all_series:
        lines += drawn(axes, series)
    lines += [*names(axes, all_series), "</svg>"]
    return "\n  ".join(lines[:-1]) + "\n</svg>\n"


def _row(plan, tokens):
    """cuda-linked's name of a plan's row; of tokenselect nine steps in ten keep the selection."""
    return f"linked/{'tokenselect_0.9' if plan == 'tokenselect' else plan}/b1/{tokens}"


def speed():
    """How many times faster than dense attention a layer's attention is, over the length."""
    suite = "cuda-linked"
    result = result_of(suite)
    ratios = {r["id"]: r["ratio"] for r in result["rows"] if "ratio" in r}
    lengths = {"32K": 32768, "128K": 131072, "1024K": 1048576}
    all_series = [Series(plan, [(n, ratios[_row(plan, k)]) for k, n in lengths.items() if _row(plan, k) in ratios],
                         is_older(suite, plan)) for plan in reversed(COLOURS)]
    axes = Axes("Attention's speed-up over context length", "times faster than dense attention (cuDNN), one sequence",
                "tokens of context", (30000, 1150000), [(n, k.replace("1024K", "1M")) for k, n in lengths.items()],
                (0.6, 70), [(v, f"{v}×") for v in (1, 2, 5, 10, 20, 50)],
                [f"{result['device']}, one layer of Llama-3.1-8B's shape, bf16, {result['date']}"])
    one = f'<line class="one" x1="{LEFT}" x2="{RIGHT}" y1="{axes.y(1):.1f}" y2="{axes.y(1):.1f}"/>'
    return picture(axes, [s for s in all_series if s.points], [one])


def loss():
    """How far a plan's attention is from full attention, over the bytes that a step reads."""
    suite = "pydoc-fidelity"
    result = result_of(suite)
    points = {}
    for row in result["rows"]:
        plan = row["id"].split("/")[-1].split(" ")[0]
        points.setdefault(plan, set()).add((row["accuracy"]["KB_a_step_and_layer"], row["accuracy"]["output_error"]))
    axes = Axes("Attention error over bytes read", "relative error of attention's output; lower is better",
                "KB that a token reads in one layer", (320, 5200),
                [(500, "500"), (1000, "1,000"), (2000, "2,000"), (4000, "4,000")],
                (0.002, 1), [(v, str(v)) for v in (0.003, 0.01, 0.03, 0.1, 0.3, 1)],
                [f"SmolLM2-135M-Instruct on a text that no plan was tuned on, {result['date']}"],
                WIDTH - 24)
    all_series = []
    for plan in reversed(COLOURS):
        if plan in points:
            at = sorted(points[plan])
            left_of = plan in ("bits", "quest_softmax")
            x, y = at[-1] if left_of or plan == "sentencekv" else at[0]
            beside = (axes.x(x) + (-12 if left_of else 12), axes.y(y) + (5 if left_of else -5),
                      "end" if left_of else "start")
            all_series.append(Series(plan, at, is_older(suite, plan), beside))
    if any(s.hollow for s in all_series):
        axes.notes.append("hollow: an earlier rule of that plan; today's is not measured")
    return picture(axes, all_series)


def answers():
    """How much of full's score a plan's answers keep, over the share of full's bytes that a token reads."""
    result = result_of("accuracy")
    ending = f"/{MODEL}"
    rows = {r["id"].removeprefix("accuracy/").removesuffix(ending): r for r in result["rows"] if r["id"].endswith(ending)}
    all_series = []
    for plan in reversed(COLOURS):
        found = [rows[f"{plan}_{budget}%"]["accuracy"] for budget in (5, 10, 25) if f"{plan}_{budget}%" in rows]
        if found:
            all_series.append(Series(plan, sorted((a["of_full_bytes"], min(a["relative_score"], 1)) for a in found)))
    prompts = rows["full"]["accuracy"]
    axes = Axes("Answers kept over bytes read", "score relative to reading everything; higher is better",
                "share of the cache's bytes that a token reads", (0.04, 1),
                [(v, f"{v:.0%}") for v in (0.05, 0.1, 0.2, 0.5, 1)], (0, 1.05),
                [(v, f"{v:.0%}") for v in (0, 0.25, 0.5, 0.75, 1)],
                [f"RULER at 4K to 16K, {prompts['scored_prompts']} prompts, SmolLM2-135M tuned, {result['date']}",
                 "three points a plan: 5, 10 and 25 % of the tokens"], y_is_linear=True)
    return picture(axes, all_series)


def vllm():
    """Milliseconds of a token in vLLM, plain and by plans, over the length."""
    result = result_of("vllm-gpu-plans")
    values = {r["id"]: r["value"] for r in result["rows"]}
    lengths = {"8K": 8192, "16K": 16384, "32K": 32768, "64K": 65536, "128K": 131072}
    all_series = [Series(name, [(n, values[f"vllm-gpu-plans/decode/{k} x 1/{engine}"]) for k, n in lengths.items()],
                         words=words)
                  for name, engine, words in (("full", "plain", "plain vLLM"), ("bits", "bits{run = 8}", "bits"),
                                              ("quest", "quest", "quest"))]
    axes = Axes("A token in vLLM over context length", "milliseconds a token, one sequence, full graphs",
                "tokens of context", (7600, 140000), [(n, k) for k, n in lengths.items()], (4, 9.5),
                [(v, f"{v} ms") for v in (4, 5, 6, 7, 8, 9)],
                [f"vLLM 0.32, FlashAttention 3, Llama-3.1-8B's shape, {result['device']}, {result['date']}",
                 "plans read 2,048 tokens; bits chooses them in runs of 8"], y_is_linear=True)
    return picture(axes, all_series)


PLOTS = {"vllm.svg": vllm, "speed.svg": speed, "loss.svg": loss, "answers.svg": answers}
