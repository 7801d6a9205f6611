"""The one way to make a console of rich: what anybody wrote is shown as it is.

Here: consoles on which a text is not markup (``[bold]``) and not an emoji's name (``:smile:``), and sends no control
characters to the terminal, wherever it stands in what is printed. Not here: what is shown, lines without rich
(`terminal`). Called by ``omni``, ``kubectl omni`` and the reports.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from omnipipeline_spec import terminal


def console(
    *, file: IO[str] | None = None, stderr: bool = False, width_elsewhere: int | None = None, **more: Any
) -> Console:
    """A console for texts of anybody.

    width_elsewhere: columns where the output is not a terminal; None: those that rich assumes.
    """
    made = _Console(file=file, stderr=stderr, markup=False, emoji=False, highlight=False, **more)
    if width_elsewhere is not None and not made.is_terminal:
        made.width = width_elsewhere
    return made


class _Console(Console):
    """Makes control characters of texts visible; rich's own, which move the cursor, are segments of another kind."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(terminal.plain(segment.text), segment.style)
