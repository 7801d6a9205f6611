"""The common parts of the pictures: fonts, colours in light and dark, the page around a drawing."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Final

MONO: Final = 'ui-monospace, "SF Mono", SFMono-Regular, Menlo, Consolas, monospace'
SANS: Final = 'ui-sans-serif, system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'

# Light, and dark where the reader's system asks for it.
COLOURS: Final = """\
.page { fill: #ffffff; stroke: #d0d7de } .bar { fill: #f6f8fa }
.ink { fill: #1f2328 } .dim { fill: #6e7781 } .green { fill: #1a7f37 } .yellow { fill: #9a6700 }
.bold { font-weight: 600 }
.box { fill: #eef4fc; stroke: #8aa4c8 } .lane { stroke: #d0d7de; stroke-dasharray: 4 4 }
.http { stroke: #57606a } .control { stroke: #2f6fde } .data { stroke: #bf3989 }
.tip-http { fill: #57606a } .tip-control { fill: #2f6fde } .tip-data { fill: #bf3989 }
@media (prefers-color-scheme: dark) {
  .page { fill: #0d1117; stroke: #30363d } .bar { fill: #161b22 }
  .ink { fill: #f0f6fc } .dim { fill: #9198a1 } .green { fill: #3fb950 } .yellow { fill: #d29922 }
  .box { fill: #131d2e; stroke: #4d6f9e } .lane { stroke: #30363d }
  .http { stroke: #9198a1 } .control { stroke: #58a6ff } .data { stroke: #f778ba }
  .tip-http { fill: #9198a1 } .tip-control { fill: #58a6ff } .tip-data { fill: #f778ba }
}
"""


def page(width: float, height: float, label: str, style: str, body: Iterable[str]) -> str:
    """A whole SVG file. label: what it shows, for readers who cannot see it."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}"'
        f' height="{height:g}" role="img" aria-label="{escape(label)}">',
        f"<style>\n{style}{COLOURS}</style>",
        f'<rect class="page" x=".5" y=".5" width="{width - 1:g}" height="{height - 1:g}" rx="10"/>',
        *body,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"
