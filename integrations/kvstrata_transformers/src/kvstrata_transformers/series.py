# SPDX-License-Identifier: Apache-2.0
"""What plans need of the model beside keys, values and queries (docs/python.md, "Report series").

Surprisal takes the head over every prompt token that is computed: tokens x vocabulary x hidden size multiplications,
for SmolLM2-135M a fifth of its prefill, and LOGIT_ROWS x vocabulary x 4 bytes of memory. Entropy is of logits that
are there anyway. Neither is computed for a plan that does not need it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

LOGIT_ROWS = 256

Head = Callable[[torch.Tensor], torch.Tensor]


def surprisals(head: Head, hidden: torch.Tensor, following: list[int]) -> npt.NDArray[np.float32]:
    """-ln p of following[i], nats, by the distribution after hidden[i]; hidden [len(following)][size]."""
    targets = torch.tensor(following, dtype=torch.long, device=hidden.device)
    parts = [torch.nn.functional.cross_entropy(head(h).float(), t, reduction="none").clamp_min(0)
             for h, t in zip(hidden.split(LOGIT_ROWS), targets.split(LOGIT_ROWS))]
    return torch.cat(parts).cpu().numpy() if following else np.empty(0, np.float32)


def entropies(logits: torch.Tensor) -> npt.NDArray[np.float32]:
    """Nats, of logits [rows][vocabulary]."""
    log_p = torch.log_softmax(logits.detach().float(), -1)
    return -(log_p.exp() * log_p).sum(-1).clamp_min(0).cpu().numpy()
