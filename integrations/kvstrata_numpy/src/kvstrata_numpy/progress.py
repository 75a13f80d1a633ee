# SPDX-License-Identifier: Apache-2.0
"""Progress bars on stderr, as callbacks progress(done, of)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tqdm import tqdm

from .llama import Progress


@contextlib.contextmanager
def bar(name: str, unit: str) -> Iterator[Progress]:
    """A bar that appears with the first call. Bytes (unit "B") are scaled."""
    shown = tqdm(desc=f"{name:<9}", unit=unit, unit_scale=unit == "B", unit_divisor=1000, leave=True,
                 dynamic_ncols=True, mininterval=0.2, disable=False, delay=0)

    def progress(done: int, of: int) -> None:
        shown.total = of
        shown.update(done - shown.n)

    try:
        yield progress
    finally:
        shown.close()
