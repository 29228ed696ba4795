"""Progress that a person sees, and reports that a program reads."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int], None]


def no_progress(n: int) -> None:
    """An :data:`Advance` that shows nothing."""


@contextmanager
def progress_bar(total: int, description: str, *, show: bool | None = None) -> Iterator[Advance]:
    """A byte-counting bar on stderr; silent when that is no terminal.

    Args:
        total: Bytes in all.
        description: What is going on.
        show: Force it on or off; None decides by the terminal and HF_HUB_DISABLE_PROGRESS_BARS.

    Yields:
        A function to call with the number of bytes just done; safe to call from several threads.
    """
    if show is None:
        hidden = os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS", "").upper() in ("1", "ON", "YES", "TRUE")
        show = sys.stderr.isatty() and not hidden
    if not show:
        yield no_progress
        return
    from tqdm.auto import tqdm

    with tqdm(total=total, desc=description, unit="B", unit_scale=True, dynamic_ncols=True, file=sys.stderr) as bar:

        def advance(n: int) -> None:
            bar.update(n)

        yield advance
