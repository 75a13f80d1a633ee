# SPDX-License-Identifier: Apache-2.0
"""Draws which storage pages each step read: one panel a plan, rows are steps, columns pages.

Brightness is the share of (layer, head group) lists that read the page. Needs Pillow.
"""

from __future__ import annotations

import os

import numpy as np
from PIL import Image, ImageDraw

from .gguf_file import Array

_MARGIN, _TITLE, _ROW = 12, 18, 5
_WIDTH = 1024  # width of a panel, pixels, about
_INK, _PAPER, _UNREAD = (30, 30, 30), (255, 255, 255), np.array((232, 236, 241))
_SOME, _ALL = np.array((120, 170, 220)), np.array((8, 48, 107))


def _colours(shares: Array) -> np.ndarray:
    """uint8 [steps, pages, 3]"""
    share = shares[..., None]
    blend = np.where(share > 0, _SOME + (_ALL - _SOME) * share, _UNREAD)
    return blend.astype(np.uint8)


def draw(path: str | os.PathLike[str], panels: list[tuple[str, list[Array]]], page_tokens: int) -> None:
    """panels: (title, per step the shares [pages]); later steps may have more pages."""
    pages = max(len(step) for _, steps in panels for step in steps)
    column = max(1, _WIDTH // pages)
    heights = [_TITLE + _ROW * len(steps) + _MARGIN for _, steps in panels]
    image = Image.new("RGB", (2 * _MARGIN + column * pages, 2 * _MARGIN + _TITLE + sum(heights)), _PAPER)
    pen = ImageDraw.Draw(image)
    pen.text((_MARGIN, _MARGIN), f"pages read by each step: rows are steps, columns pages of {page_tokens} "
             "tokens; darker: by more layers and heads", fill=_INK)
    top = _MARGIN + _TITLE
    for (title, steps), height in zip(panels, heights):
        pen.text((_MARGIN, top), title, fill=_INK)
        shares = np.zeros((len(steps), pages), np.float32)
        for row, step in enumerate(steps):
            shares[row, :len(step)] = step
        pixels = np.repeat(np.repeat(_colours(shares), _ROW, axis=0), column, axis=1)
        image.paste(Image.fromarray(pixels), (_MARGIN, top + _TITLE))
        top += height
    image.save(path)
