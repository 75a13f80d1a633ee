# SPDX-License-Identifier: Apache-2.0
"""Tables of README.md and docs/cuda_measured.md that are made of several suites, for a reader who decides.

TABLES names each and the function that makes its lines. What was not measured says so; no figure is typed.
"""
import dataclasses
import re

from kept_results import figure, is_older, note, number, result_of, results_of, row_of

NOT_MEASURED = "not measured"
MODEL = "smollm2-retrieval"  # whose answers are scored


@dataclasses.dataclass
class Plan:
    """Where its figures are kept."""
    name: str
    reads: str
    linked: str = ""  # as ids of cuda-linked call it; "": not there
    where: str = "CPU, GPU; every engine"
    preset: bool = True  # not options of another


# Neither vLLM nor SGLang tells the surprisal of a prompt's tokens, which spans are cut by.
PLANS = [
    Plan("full", "everything", "full"),
    Plan("window", "the first and the last tokens"),
    Plan("quest", "pages, by their keys' extremes (Quest)", "quest"),
    Plan("quest_softmax", "pages of 32, by extremes balanced over heads", "quest_softmax", preset=False),
    Plan("bits", "tokens, by keys in two bits (ours)", "bits"),
    Plan("chess", "pages in a hierarchy, rarely chosen anew (CHESS)", "chess"),
    Plan("tokenselect", "tokens that heads vote for (TokenSelect)", "tokenselect_0.9"),
    Plan("sentencekv", "tokens of sentences near the present one (SentenceKV)", "sentencekv"),
    Plan("mosaickv", "blocks of compressed tokens (MosaicKV)", "mosaickv"),
    Plan("sekv", "summaries of spans, some expanded (SeKV)", "sekv", "CPU, GPU; transformers"),
]
# It has suites of its own: its preset has no share, and its op no row of `cuda-linked`.
STRATA = Plan("strata", "all tokens by 2 of 8 bits, those that weigh by all 8 (ours)")
DECODED = next(p for p in PLANS if p.name == "quest_softmax")  # `bits`, once its loop is measured
LENGTHS = (("32K", "b1/32K"), ("128K", "b1/128K"), ("1M", "b1/1024K"), ("8 x 128K", "b8/128K"))


def grid(head, rows):
    return ["| " + " | ".join(head) + " |", "| --- |" + " --- |" * (len(head) - 1),
            *("| " + " | ".join(cells) + " |" for cells in rows)]


def cell(row, expression="ratio", digits=3):
    """A figure of a row, or NOT_MEASURED."""
    return number(figure(row, expression), digits) if row else NOT_MEASURED


def short_note(suite):
    result = result_of(suite)
    return f"{result['device']}, {result['date']}" if result else NOT_MEASURED


def error_cell(plan):
    row = row_of("demo", f"demo/{plan.name}")
    mark = "\\*" if is_older("demo", plan.name) else ""
    return number(row["accuracy"]["output_error"], 2) + mark if row else NOT_MEASURED


def read_cell(plan):
    row = row_of("demo", f"demo/{plan.name}")
    mark = "\\*" if is_older("demo", plan.name) else ""
    return number(row["accuracy"]["MB_read"], 3) + mark if row else NOT_MEASURED


def answers_cell(plan):
    """What is kept of the answers with a tenth of the tokens, and for how many of the bytes."""
    row = row_of("accuracy", f"accuracy/{plan.name}{'' if plan.name == 'full' else '_10%'}/{MODEL}")
    if not row:
        return NOT_MEASURED
    return f"{min(row['accuracy']['relative_score'], 1):.1%} for {row['accuracy']['of_full_bytes']:.0%}"


def answers():
    """Each plan of suite `accuracy`, over the prompts of both models."""
    head = ["plan", "tokens read", "bytes read", "loss, SmolLM2", "loss, tuned", "score kept, tuned", "95 % interval"]
    result = result_of("accuracy")
    rows = {row["id"].removeprefix("accuracy/"): row for row in result["rows"]}
    prompts = rows["full/smollm2"]["n"]  # a plan that was measured on fewer of them has another mean
    lines = []
    for name in dict.fromkeys(key.split("/")[0] for key in rows):
        base, tuned = (rows.get(f"{name}/{model}") for model in ("smollm2", MODEL))
        a = tuned["accuracy"]
        lines.append([f"`{name}`", f"{a['tokens_a_step'] / a['tokens_of_prompt']:.1%}", f"{a['of_full_bytes']:.1%}",
                      f"{base['value']:+.3f} ± {base['accuracy']['interval']:.3f}" if base and base["n"] == prompts else NOT_MEASURED,
                      f"{tuned['value']:+.3f} ± {a['interval']:.3f}", f"{a['relative_score']:.3f}",
                      f"{a['relative_low']:.2f} to {a['relative_high']:.2f}"])
    return [*grid(head, lines), "", note(result)]


def judged():
    """Each plan of suite `judged`, of all its devices, on prompts that no setting was chosen by."""
    head = ["plan", "tokens read", "bytes read", "loss, nats", "score kept", "95 % interval", "scored prompts", "chosen half",
            "judged half"]
    lines, notes = [], []
    for result in results_of("judged"):
        rows = {row["id"].removeprefix("judged/"): row for row in result["rows"]}
        for name in [key.split("/")[0] for key in rows if key.endswith(f"/{MODEL}") and not key.startswith("full/")]:
            a = rows[f"{name}/{MODEL}"]["accuracy"]
            halves = (rows.get(f"{name}/{MODEL} {half} half") for half in ("chosen", "judged"))
            lines.append([f"`{name}`", f"{a['tokens_a_step'] / a['tokens_of_prompt']:.1%}", f"{a['of_full_bytes']:.1%}",
                          f"{a['nats_above_full']:+.3f} ± {a['interval']:.3f}", f"{a['relative_score']:.3f}",
                          f"{a['relative_low']:.2f} to {a['relative_high']:.2f}", str(a["scored_prompts"]),
                          *(f"{half['accuracy']['relative_score']:.3f}" if half else NOT_MEASURED for half in halves)])
        notes.append(note(result) + "  ")
    return [*grid(head, lines), "", *notes]


def pages():
    """Each plan of suite `pages` by how far its next tokens are from those of full, on both models."""
    result = result_of("pages")
    rows = {row["id"].removeprefix("pages/"): row["accuracy"] for row in result["rows"]}
    models = (("smollm2", "SmolLM2"), (MODEL, "tuned"))
    kl = lambda a: f"{a['kl']:.4f} ± {a['kl_interval']:.4f}" if a else NOT_MEASURED
    lines = []
    for name in dict.fromkeys(key.split("/")[0] for key in rows if not key.startswith("full/")):
        tuned = rows[f"{name}/{MODEL}"]
        lines.append([f"`{name}`", f"{tuned['tokens_a_step'] / tuned['tokens_of_prompt']:.1%}",
                      f"{tuned['of_full_bytes']:.1%}", *(kl(rows.get(f"{name}/{model}")) for model, _ in models), f"{tuned['kl_worst']:.2f}",
                      f"{tuned['exact']} of {tuned['exact_under_full']}", f"{tuned['relative_score']:.3f}"])
    head = ["plan", "tokens read", "bytes read",
            *(f"KL, {title}, {rows[f'full/{model}']['prompts']} prompts" for model, title in models), "worst, tuned",
            "exact answers, tuned", "score kept, tuned"]
    return [*grid(head, lines), "", note(result)]


PLANES_MODELS = (("smollm2", "SmolLM2"), (MODEL, "tuned"), ("gemma-3-270m", "Gemma 3"))


def planes(suite):
    """Each rule of the suite by how far its next tokens are from those of full: of each model, and the mean of models."""
    result = result_of(suite)
    rows = {row["id"].removeprefix(f"{suite}/"): row["accuracy"] for row in result["rows"]}
    lines = []
    for name in dict.fromkeys(key.split("/")[0] for key in rows if not key.startswith("full/")):
        of = [rows[f"{name}/{model}"] for model, _ in PLANES_MODELS]
        mean = lambda key: sum(a[key] for a in of) / len(of)
        lines.append([f"`{name}`", f"{sum(a['tokens_a_step'] / a['tokens_of_prompt'] for a in of) / len(of):.1%}",
                      f"{mean('of_full_bytes'):.1%}", *(f"{a['kl']:.5f} ± {a['kl_interval']:.5f}" for a in of), f"{mean('kl'):.5f}",
                      f"{max(a['kl_worst'] for a in of):.3f}", answers_lost(of)])
    head = ["rule", "read finely", "bytes read",
            *(f"KL, {title}, {rows[f'full/{model}']['prompts']} prompts" for model, title in PLANES_MODELS), "KL, mean of models",
            "worst", "exact answers lost"]
    return [*grid(head, lines), "", note(result)]


def answers_lost(of):
    return f"{sum(a['exact_lost'] for a in of)} of {sum(a['exact_under_full'] for a in of)}"


PLANES_RULES = ("above_2", "above_4", "above_4_variance", "above_4_half_variance", "above_8_variance_skip_2", "share_10%")
PLANES_PARTS = (("all", ""), ("seen before", " seen"), ("new", " new"), ("chosen half", " chosen half"),
                ("judged half", " judged half"))


def planes_parts():
    """By parts of the prompts of suite `planes`: KL, a mean of models, over that of fp8 and of bits; exact answers lost."""
    result = result_of("planes")
    rows = {row["id"].removeprefix("planes/"): row["accuracy"] for row in result["rows"]}
    of = lambda name, part: [rows[f"{name}/{model}{part}"] for model, _ in PLANES_MODELS if f"{name}/{model}{part}" in rows]
    kl = lambda name, part: sum(a["kl"] for a in of(name, part))
    over = lambda name, part: f"{kl(name, part) / kl('fp8', part):.2f}, {kl(name, part) / kl('bits_10%', part):.2f}"
    head = ["rule", *(f"{title}, {sum(a['prompts'] for a in of('full', part))} prompts" for title, part in PLANES_PARTS)]
    return [*grid(head, [[f"`{name}`", *(f"{over(name, part)}; {answers_lost(of(name, part))}" for _, part in PLANES_PARTS)]
                         for name in ("fp8", "bits_10%", *PLANES_RULES)]), "", note(result)]


def planes_by_length():
    """KL, and bytes of full's, of some rules of suite `planes` by the prompts' length."""
    result = result_of("planes")
    rows = {row["id"].removeprefix("planes/"): row["accuracy"] for row in result["rows"]}
    groups = [(model, title, length) for model, title in PLANES_MODELS for length in (4096, 8192, 16384, 32768)
              if f"full/{model} {length}" in rows]
    cell = lambda a: f"{a['kl']:.5f} for {a['of_full_bytes']:.1%}"
    head = ["rule", *(f"{title}, {length // 1024}K, {rows[f'full/{model} {length}']['prompts']} prompts"
                      for model, title, length in groups)]
    return [*grid(head, [[f"`{name}`", *(cell(rows[f"{name}/{model} {length}"]) for model, _, length in groups)]
                         for name in ("fp8", "turboquant_k8v4", "bits_10%", *PLANES_RULES)]), "", note(result)]


LOSSES = (0.01, 0.02, 0.05)  # nats a token


def least_share(rows, plan, model, loss):
    """The smallest measured share of the tokens with which the plan loses at most `loss` in the mean."""
    shares = sorted((row["accuracy"]["tokens_a_step"] / row["accuracy"]["tokens_of_prompt"], row["value"])
                    for row in rows if row["id"].endswith(f"/{model}") and is_by_budget(row["id"].split("/")[1], plan))
    fitting = [share for share, lost in shares if lost <= loss]
    return f"{fitting[0]:.0%}" if fitting else f"above {shares[-1][0]:.0%}"


def is_by_budget(name, plan):
    """tokenselect_10% is tokenselect's, tokenselect_head_10% is not; bits_at_quest_10% is that of bits."""
    return re.fullmatch(rf"{plan}(_at_quest)?_[\d.]+%", name) is not None


def budgets():
    """What share of the tokens each plan needs for a loss, on both models."""
    result = result_of("accuracy")
    names = [plan.name for plan in PLANS if plan.name not in ("full", "window")]
    names.insert(names.index("tokenselect") + 1, "tokenselect_head")
    head = ["plan", *(f"{loss} nats, {model}" for model in ("SmolLM2", "tuned") for loss in LOSSES)]
    return [*grid(head, [[f"`{name}`", *(least_share(result["rows"], name, model, loss) for model in ("smollm2", MODEL)
                                        for loss in LOSSES)] for name in names]), "", note(result)]


def memory_cell(plan):
    row = row_of("cuda-pool", f"memory/{plan.name}/128K")
    if not row:
        return NOT_MEASURED
    host = f" + {number(row['host_mib'] / 1024, 3)} host" if row["host_mib"] else ""
    return f"{number(row['value'] / 1024, 3)}{host}"


def speed_cell(plan):
    rows = [row_of("cuda-linked", f"linked/{plan.linked}/{length}") for length in ("b1/128K", "b1/1024K")]
    mark = "\\*" if is_older("cuda-linked", plan.name) else ""
    return ", ".join(cell(row, digits=2) + "x" for row in rows) + mark if all(rows) else NOT_MEASURED


def strata_row():
    judged = row_of("planes", f"planes/above_8_variance_skip_2/{MODEL}")
    kept = f"{judged['accuracy']['relative_score']:.1%} for {judged['accuracy']['of_full_bytes']:.0%}" if judged else NOT_MEASURED
    speeds = (row_of("cuda-planes", f"planes/{length} x 1, recorded") for length in ("128K", "1M"))
    return [f"`{STRATA.name}`", STRATA.reads, read_cell(STRATA), error_cell(STRATA), kept + "†",
            cell(row_of("memory", "planes/128K"), digits=2) + "x less†",
            ", ".join(cell(row, digits=2) + "x" for row in speeds) + "†", STRATA.where]


def plans():
    head = ["plan", "a token reads", "MB read", "attention error", "answers kept, for bytes", "GPU memory, GiB", "GPU speed-up",
            "runs on"]
    measured = (("MB read, attention error", "demo"), ("answers kept", "accuracy"), ("GPU memory", "cuda-pool"),
                ("speed-up", "cuda-linked"))
    of_planes = (("†answers kept", "planes"), ("memory", "memory"), ("speed-up", "cuda-planes"))
    sources = ". ".join("; ".join(f"{what}: {short_note(suite)}" for what, suite in group)
                        for group in (measured, of_planes)) + "."
    rows = [[f"`{p.name}`", p.reads, read_cell(p), error_cell(p), answers_cell(p), memory_cell(p), speed_cell(p), p.where]
            for p in PLANS if p.preset]
    return [*grid(head, [rows[0], strata_row(), *rows[1:]]), "", sources]


def linked(suite):
    """Us of a layer and the ratio to dense attention, by plan and length, of one card."""
    rows = []
    for plan in PLANS:
        for name in [plan.linked] if plan.linked != "tokenselect_0.9" else ["tokenselect_0.9", "tokenselect_miss"]:
            if name:
                found = [row_of(suite, f"linked/{name}/{length}") for _, length in LENGTHS]
                mark = "\\*" if is_older(suite, plan.name) else ""
                label = {"tokenselect_miss": "`tokenselect`, choosing at each token"}.get(name, f"`{plan.name}`")
                rows.append([label + mark, *(f"{cell(r, 'value')} us, {cell(r)}x" if r else NOT_MEASURED for r in found)])
    return [*grid(["plan", *(title for title, _ in LENGTHS)], rows), "", note(result_of(suite))]


def decode():
    ways = ("torch cudnn", "torch flash", "full", DECODED.name + "{budget = 2048}")
    runs = (("1", "decode/max-autotune/b1/"), ("4", "decode/default/b4/"), ("7", "decode/default/b7/"))
    rows = []
    for title, prefix in runs:
        found = {way: row_of("cuda-decode", prefix + way) for way in ways}
        rows.append([title, *(cell(found[way], "value") for way in ways),
                     cell({"ratio": found["torch cudnn"]["value"] / found[ways[-1]]["value"]}) + "x"])
    head = ["sequences", "cuDNN, ms a token", "flash", "`full`", f"`{DECODED.name}{{budget = 2048}}`", "speed-up"]
    return [*grid(head, rows), "", note(result_of("cuda-decode"))]


def memory():
    rows = [row_of("cuda-pool", f"memory/{p.name}/128K") for p in PLANS]
    cells = [[f"`{p.name}`", cell(r, "value:1024"), cell(r, "host_mib:1024"), cell(r) + "x"]
             for p, r in zip(PLANS, rows) if r]
    missing = ", ".join(f"`{p.name}`" for p, r in zip(PLANS, rows) if not r)
    return [*grid(["plan", "GPU, GiB", "host, GiB", "`full` over that"], cells), "",
            f"Not measured: {missing}. {note(result_of('cuda-pool'))}"]


def cold():
    suite = "cuda-linked"
    names = [p.linked for p in PLANS if p.linked] + ["tokenselect_hit"]
    rows = [(n, row_of(suite, f"linked/{n}/b1/128K/host")) for n in names]
    cells = [["`tokenselect`, choosing nothing anew" if n == "tokenselect_hit" else f"`{n}`",
              cell(r, "baseline"), cell(r, "value")] for n, r in rows if r]
    return [*grid(["plan", "pages on the GPU, us", "pages in host memory, us"], cells), "", note(result_of(suite))]


TABLES = {"plans": plans, "answers": answers, "judged": judged, "pages": pages, "planes": lambda: planes("planes"),
          "planes-parts": planes_parts, "planes-by-length": planes_by_length,
          "planes-settings": lambda: planes("planes-settings"), "budgets": budgets, "decode": decode,
          "linked-h200": lambda: linked("cuda-linked-h200"), "linked-h100": lambda: linked("cuda-linked"), "memory": memory,
          "cold": cold}
