"""How every figure of the paper layer looks, and how it is saved: the same bytes for the same data.

Figures are made without pyplot, so nothing is registered, no window system is asked for, and nothing stays
open.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Literal

from flarepp.record import atomic_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RC: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.labelsize": 8,
    "legend.fontsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.4,
    "lines.markersize": 5,
    "text.usetex": False,
    "pdf.fonttype": 42,
    "ps.fonttype": 42,
    "savefig.dpi": 200,
    "svg.hashsalt": "flarepp",
}
SPARSE = (0, (5, 1, 1, 1, 1, 1))  # dashes of the complete architectures
LETTERS, LINE = 18, 0.125  # of the small texts: letters an inch, height of a line in inches


@dataclass(frozen=True)
class Look:
    """Line of one model. The mixers' colours are Okabe and Ito's; any two lines differ in two of luminance, dashes, marker
    and fill, so that they are told apart in grey and whatever colours a reader sees."""

    colour: str
    marker: str
    dashes: str | tuple
    filled: bool

    def line(self) -> dict:
        """Keyword arguments for Axes.plot and Axes.errorbar."""
        face = self.colour if self.filled else "white"
        return {
            "color": self.colour,
            "marker": self.marker,
            "linestyle": self.dashes,
            "markerfacecolor": face,
        }


LOOKS = {  # of the mixers in the matched backbone, then of the complete architectures
    "full": Look("#000000", "s", ":", False),
    "flare": Look("#0072B2", "o", "--", False),
    "flarepp": Look("#D55E00", "D", "-", True),
    "transolver": Look("#009E73", "^", "-.", False),
    "transolverpp": Look("#CC79A7", "v", "-.", True),
    "transolver3": Look("#E69F00", "P", "-.", True),
    "flarepp_shared": Look("#56B4E9", "p", "-", True),
    "flarepp_anchored": Look("#7F4B1E", "*", "-", True),
    "perceiver_io": Look("#5D3A9B", "<", SPARSE, False),
    "set_transformer": Look("#595959", "h", SPARSE, True),
    "gnot": Look("#9C9600", ">", SPARSE, False),
    "lno": Look("#0F8B93", "X", SPARSE, True),
}
OTHER = Look("#999999", "d", ":", True)


@contextmanager
def figure(
    out: Path, name: str, size: tuple[float, float], stamp: str, foot: str = "",
    layout: Literal["constrained", "compressed"] = "constrained"
) -> Iterator[Figure]:
    """Yield an empty matplotlib Figure of `size` inches; on success save it as out/<name>.pdf and .png (200
    dpi).

    foot, stamp: small texts below, on lines of their own, empty for none. layout: matplotlib's layout engine
    ("compressed" for panels of fixed aspect).
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with rc_context(RC):
        drawing = Figure(figsize=size, layout=layout)
        yield drawing
        _write_below(drawing, foot, stamp)
        FigureCanvasAgg(drawing)
        drawing.draw_without_rendering()  # the layout settles at the second draw; the PDF would be the first
        # No date and no program version, so that equal data give equal bytes.
        unstamped = {"pdf": ("CreationDate", "Producer", "Creator"), "png": ("Software",)}
        for kind, keys in unstamped.items():
            with atomic_path(Path(out) / f"{name}.{kind}") as partial:
                drawing.savefig(partial, format=kind, metadata=dict.fromkeys(keys))


def _write_below(drawing: Figure, foot: str, stamp: str) -> None:
    """Write foot and then stamp at the lower left, wrapped to the width, and leave room for them."""
    width, height = drawing.get_size_inches()
    used = 0.04  # inches from the lower edge
    for text, colour in ((stamp, "#a00000"), (foot, "black")):
        lines = [line for part in text.splitlines() for line in wrap(part, int(width * LETTERS))]
        if lines:
            place = (0.04 / width, used / height)
            drawing.text(*place, "\n".join(lines), va="bottom", fontsize=6.5, color=colour, linespacing=1.2)
            used += LINE * len(lines)
    engine: Any = drawing.get_layout_engine()
    engine.set(rect=(0, used / height, 1, 1 - used / height))
