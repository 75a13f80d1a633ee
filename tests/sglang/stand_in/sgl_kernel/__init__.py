# SPDX-License-Identifier: Apache-2.0
"""In place of SGLang's kernels on a machine without a GPU: PyPI's sglang-kernel is built for CUDA only.

SGLang imports many of them by name at start and calls none of those on a CPU without AMX; what is called all the same
says its name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

__version__ = "0.0.0"


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name}: this is the stand-in of kvstrata's tests; build sgl_kernel")

    return absent
