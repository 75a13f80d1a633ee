# SPDX-License-Identifier: Apache-2.0
"""Trains the gates' network of SeKV on spectra of spans (docs/spec/sekv.md, "Training": recon and budget).

A gate depends on its span alone, so no model is run here, and routers are learned apart.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sekv_student import R_MAX, Batch, Parameters, factors_of, rows_of

RECONSTRUCTION, RANKS = 0.5, 0.01  # the second is the paper's budget weight times its beta
RATE, DECAY, CLIP, ROWS = 1e-3, 0.01, 1.0, 4096


class Spectra(NamedTuple):
    """Spans of texts: singular values [n, R] padded with 0, mean keys [n, d], and which components there are."""
    spectrum: Tensor
    mean: Tensor
    within: Tensor


@torch.no_grad()
def spectra_of(batch: Batch, most: int, seed: int) -> Spectra:
    """Keys' and values' of about `most` spans, in all layers and heads."""
    random, found = torch.Generator().manual_seed(seed), []
    spans = sum(len(group.row) for group in batch.spans.groups)
    for group in batch.spans.groups:
        count = max(1, round(most * len(group.row) / max(1, spans)))
        drawn = torch.randperm(len(group.row), generator=random)[:count].to(group.row.device)
        some = type(group)(*(part[drawn] for part in group))
        mean = batch.k_mean[:, some.row, :, some.span].permute(1, 2, 0, 3)
        rank = some.real.sum(-1).clamp(max=min(R_MAX, mean.shape[-1]))
        within = (torch.arange(R_MAX, device=mean.device) < rank[:, None]).expand(*mean.shape[:-1], -1)
        for x in (batch.keys, batch.values):
            spectrum = factors_of(rows_of(x, some)).spectrum
            found.append(Spectra(*(part.flatten(0, 2) for part in (spectrum * within, mean, within))))
    return Spectra(*(torch.cat(column) for column in zip(*found)))


def losses(parameters: Parameters, some: Spectra) -> tuple[Tensor, Tensor]:
    """(sum of (1 - g)^2 s^2, sum of gates), each a mean over spectra."""
    gates = parameters.gates(some.spectrum, some.mean) * some.within
    return ((1 - gates).square() * some.spectrum.square() * some.within).sum(-1).mean(), gates.sum(-1).mean()


def train(parameters: Parameters, spectra: Spectra, steps: int, seed: int) -> list[dict[str, float]]:
    """Sets `gated`; a line of the log every tenth of the steps."""
    adam = torch.optim.AdamW(parameters.g_phi.parameters(), lr=RATE, weight_decay=DECAY)
    random, log = torch.Generator().manual_seed(seed), []
    for step in range(steps):
        drawn = torch.randint(len(spectra.mean), (min(ROWS, len(spectra.mean)),), generator=random).to(spectra.mean.device)
        lost, held = losses(parameters, Spectra(*(part[drawn] for part in spectra)))
        (RECONSTRUCTION * lost + min(1.0, step / steps / 0.5) * RANKS * held).backward()
        torch.nn.utils.clip_grad_norm_(parameters.g_phi.parameters(), CLIP)
        for group in adam.param_groups:
            group["lr"] = RATE * 0.5 * (1 + math.cos(math.pi * step / steps))
        adam.step()
        adam.zero_grad(set_to_none=True)
        if (step + 1) % max(1, steps // 10) == 0:
            log.append({"step": step + 1, "reconstruction": round(float(lost.detach()), 5), "gates": round(float(held.detach()), 3)})
    parameters.gated = True
    return log
