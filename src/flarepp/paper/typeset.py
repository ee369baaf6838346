"""Tables as values, and their outputs: LaTeX (booktabs), Markdown, CSV, and the pages of html.py.

A table is built once from cells that know whether they are bold; the escaping of each format happens only
here.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from flarepp.paper import html
from flarepp.record import atomic_path

if TYPE_CHECKING:
    import pandas

LATEX = {
    "\\": r"\textbackslash{}",
    "_": r"\_",
    "%": r"\%",
    "&": r"\&",
    "#": r"\#",
    "$": r"\$",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "≥": r"$\geq$",
    "≤": r"$\leq$",
    "≈": r"$\approx$",
    "−": "$-$",
    "→": r"$\rightarrow$",
    "²": r"$^2$",
    "⁴": r"$^4$",
    "⁵": r"$^5$",
    "⁶": r"$^6$",
    "…": r"\ldots{}",
    "–": "--",
}


WIDE = 8  # columns from which on they stand closer and headings break
LONG, LONGEST = 40, 55  # lines that fit a page in \footnotesize and, of several tables, in \scriptsize
HEADING = 4  # lines that the headings of a table take
LETTERS, SHORT = 90, 6  # letters in a line of a caption, and lines of one for which LONG and LONGEST leave room
PAGE = 520  # points that a table may be wide, margins included
SIZES = {r"\footnotesize": 4.3, r"\scriptsize": 3.95, r"\tiny": 3.15}  # points that a letter is wide, measured on tables
END = r" \tabularnewline"  # unlike \\, it ends a row after \raggedright too


@dataclass(frozen=True)
class Cell:
    """One entry: its plain text, its emphasis, the marks of its footnotes, and the run folders that its number is from."""

    text: str
    bold: bool = False
    underline: bool = False
    marks: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()


class Notes:
    """Footnotes in the order of their first use; equal texts share one mark (a, b, …, z, aa, …)."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def mark(self, text: str) -> str:
        """Return the mark of `text`, adding it if it is new."""
        if text not in self.texts:
            self.texts.append(text)
        return self._letter(self.texts.index(text))

    def items(self) -> list[tuple[str, str]]:
        """All (mark, text) in order."""
        return [(self._letter(index), text) for index, text in enumerate(self.texts)]

    @staticmethod
    def _letter(index: int) -> str:
        return chr(ord("a") + index % 26) * (index // 26 + 1)


@dataclass
class Block:
    """Rows between two rules, with an optional heading of their own."""

    rows: list[list[Cell]]
    title: str = ""


@dataclass
class Table:
    """A table: columns as (group, heading, LaTeX alignment); neighbours of a group share one above."""

    caption: str
    columns: list[tuple[str, str, str]]
    blocks: list[Block]
    stamp: str = ""
    notes: list[tuple[str, str]] = field(default_factory=list)


def three_digits(value: float) -> str:
    """`value` with three significant digits: 0.384, 1.20, 12.3, 104; 1.23e+3 and 1.00e-7 where zeros would
    tell nothing."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    text = f"{value:.2e}"
    exponent = int(text.split("e")[1])
    if not -4 <= exponent <= 2:
        return re.sub(r"(e[+-])0+", r"\1", text)
    return f"{round(value, 2 - exponent):.{2 - exponent}f}"


def spread(std: float, shown: str) -> str:
    """A standard deviation to the decimals of the value it belongs to, with one more where it would read 0."""
    if "e" in shown:
        return three_digits(std)
    decimals = len(shown.partition(".")[2])
    text = f"{std:.{decimals}f}"
    return f"{std:.{decimals + 1}f}" if std and not float(text) else text


def plain(value: object) -> str:
    """A setting as a reader writes it: 1e-05 as 1e-5, lists with commas, True as yes, None as none."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if isinstance(value, (list, tuple)):
        return ", ".join(plain(item) for item in value)
    if isinstance(value, float):
        return re.sub(r"e\+?(-?)0*(\d)", r"e\1\2", f"{value:g}")
    return str(value)


def latex_text(text: str) -> str:
    """Escape plain text for LaTeX."""
    return "".join(LATEX.get(character, character) for character in text)


def markdown_text(text: str) -> str:
    """Escape plain text for a Markdown table cell."""
    return re.sub(r"([\\|_*<>])", r"\\\1", text)


def latex(table: Table, label: str) -> str:
    """The table as a LaTeX float that needs the booktabs package only.

    It takes the largest letters in which it fits a page; one that is too wide for \\scriptsize has its column groups below
    each other, unless that is too long.
    """
    stamp = rf"\textbf{{[{latex_text(table.stamp)}]}} " if table.stamp else ""
    wide = len(table.columns) >= WIDE
    size, parts = _fitting(table, wide)
    lines = [
        "% generated; do not edit",
        r"\begin{table}[htbp]",
        r"\centering",
        rf"\caption{{{stamp}{latex_text(table.caption)}}}",
        rf"\label{{tab:{label}}}",
        size,
        *([r"\setlength{\tabcolsep}{2pt}"] if wide else []),
    ]
    for position, part in enumerate(parts):
        lines += [r"\par\medskip"] if position else []
        lines += _tabular(part, wide)
    if table.notes:
        notes = r"\quad ".join(rf"$^{{\mathrm{{{mark}}}}}$~{latex_text(text)}." for mark, text in table.notes)
        lines += [r"\par\smallskip", rf"\parbox{{\textwidth}}{{\scriptsize {notes}}}"]
    return "\n".join([*lines, r"\end{table}", ""])


def _fitting(table: Table, wide: bool) -> tuple[str, list[Table]]:
    """The size of the letters, and the tables set below each other: the whole one, or parts of its column groups."""
    large, small, smallest = SIZES
    for size in (large, small):
        if _width(table, wide, size) <= PAGE and (size == small or _length(table) <= LONG):
            return size, [table]
    for size, longest in ((large, LONG), (small, LONGEST)):
        parts = _parts(table, wide, size)
        fit = all(_width(part, wide, size) <= PAGE for part in parts)
        if parts and fit and sum(HEADING + _length(part) for part in parts) <= longest:
            return size, parts
    return smallest, [table]


def _length(table: Table) -> int:
    """Lines of a table, those of a long caption included."""
    rows = sum(len(block.rows) + bool(block.title) for block in table.blocks)
    return rows + max(0, (len(table.caption) + len(table.stamp)) // LETTERS - SHORT)


def _width(table: Table, wide: bool, size: str) -> float:
    """About how many points wide a table is; a column of given width does not count, since letters do not change it."""
    width = 0.0
    for index, (_, heading, alignment) in enumerate(table.columns):
        texts = [row[index].text + ",".join(row[index].marks) for block in table.blocks for row in block.rows]
        lines = _heading_lines(heading) if wide else [heading]
        letters = 0 if alignment.startswith("p") else max(map(len, [*lines, *texts]))
        width += letters * SIZES[size] + (4 if wide else 12)
    return width


def _parts(table: Table, wide: bool, size: str) -> list[Table]:
    """As many column groups in a part as fit the page; one group where not even that fits."""
    chosen: list[list[str]] = []
    for group in dict.fromkeys(group for group, _, _ in table.columns if group):
        if chosen and _width(_of_groups(table, [*chosen[-1], group]), wide, size) <= PAGE:
            chosen[-1].append(group)
        else:
            chosen.append([group])
    return [_of_groups(table, groups) for groups in chosen]


def _of_groups(table: Table, groups: list[str]) -> Table:
    """The columns of some groups beside those that have none; rows that have nothing there are left out."""
    kept = [index for index, column in enumerate(table.columns) if column[0] in ("", *groups)]
    own = [index for index in kept if table.columns[index][0]]
    blocks = []
    for block in table.blocks:
        rows = [[row[index] for index in kept] for row in block.rows if any(row[index].text for index in own)]
        blocks += [Block(rows, block.title)] if rows else []
    return replace(table, columns=[table.columns[index] for index in kept], blocks=blocks)


def _tabular(table: Table, wide: bool) -> list[str]:
    """The lines of one tabular, which may reach into the margins."""
    alignment = "".join(column[2] for column in table.columns)
    wraps = [column[2].startswith("p") for column in table.columns]
    lines = [
        r"\makebox[\textwidth][c]{%",
        rf"\begin{{tabular}}{{{alignment}}}",
        r"\toprule",
        *_latex_groups(table),
        " & ".join(_latex_heading(heading, wide) for _, heading, _ in table.columns) + END,
    ]
    for block in table.blocks:
        lines.append(r"\midrule")
        if block.title:
            lines.append(
                rf"\multicolumn{{{len(table.columns)}}}{{l}}{{\emph{{{latex_text(block.title)}}}}}{END}"
            )
        lines += [
            " & ".join(_latex_cell(cell, wraps_) for cell, wraps_ in zip(row, wraps)) + END for row in block.rows
        ]
    return [*lines, r"\bottomrule", r"\end{tabular}}"]


def _latex_groups(table: Table) -> list[str]:
    """The row of group headings and the short rules under it; empty when no column has a group."""
    if not any(group for group, _, _ in table.columns):
        return []
    cells, rules, start = [], [], 0
    while start < len(table.columns):
        group, stop = table.columns[start][0], start + 1
        while group and stop < len(table.columns) and table.columns[stop][0] == group:
            stop += 1
        cells.append(rf"\multicolumn{{{stop - start}}}{{c}}{{{latex_text(group)}}}" if group else "")
        rules += [rf"\cmidrule(lr){{{start + 1}-{stop}}}"] if group else []
        start = stop
    return [" & ".join(cells) + END, " ".join(rules)]


def _latex_heading(heading: str, wide: bool) -> str:
    lines = [latex_text(line) for line in _heading_lines(heading)]
    stacked = r"\\".join(lines)
    return rf"\shortstack[r]{{{stacked}}}" if wide and len(lines) > 1 else latex_text(heading)


def _heading_lines(heading: str) -> list[str]:
    """A heading, broken at its first hyphen and before its brackets."""
    name, bracket, rest = heading.partition(" (")
    return re.split("(?<=-)", name, maxsplit=1) + ([f"({rest}"] if bracket else [])


def _latex_cell(cell: Cell, wraps: bool) -> str:
    text = latex_text(cell.text)
    text = rf"\underline{{{text}}}" if cell.underline else text
    text = rf"\textbf{{{text}}}" if cell.bold else text
    marks = rf"$^{{\mathrm{{{','.join(cell.marks)}}}}}$" if cell.marks else ""
    return (r"\raggedright " if wraps else "") + text + marks


def markdown(table: Table) -> str:
    """The table as Markdown: stamp, caption, pipe table, footnotes."""
    from tabulate import tabulate

    headings = [f"{heading} ({group})" if group else heading for group, heading, _ in table.columns]
    rows = []
    for block in table.blocks:
        rows += [[f"*{markdown_text(block.title)}*"]] if block.title else []
        rows += [[_markdown_cell(cell) for cell in row] for row in block.rows]
    align = ["right" if column[2] == "r" else "left" for column in table.columns]
    grid = tabulate(
        rows, [markdown_text(heading) for heading in headings], "pipe", disable_numparse=True, colalign=align
    )
    stamp = [f"**[{markdown_text(table.stamp)}]**\n"] if table.stamp else []
    notes = [f"<sup>{mark}</sup> {markdown_text(text)}.  " for mark, text in table.notes]
    return "\n".join([*stamp, markdown_text(table.caption) + "\n", grid, "", *notes, ""])


def _markdown_cell(cell: Cell) -> str:
    text = markdown_text(cell.text)
    text = f"<u>{text}</u>" if cell.underline else text
    text = f"**{text}**" if cell.bold else text
    return text + (f"<sup>{','.join(cell.marks)}</sup>" if cell.marks else "")


def write(table: Table, data: pandas.DataFrame, out: Path, name: str) -> None:
    """Write out/<name>.tex, .md and .html from `table`, and .csv from the DataFrame `data` (full precision)."""
    write_texts(latex(table, name), markdown(table), html.page(html.title(name), [("", table)]), data, out, name)


def write_texts(tex: str, md: str, page: str, data: pandas.DataFrame, out: Path, name: str) -> None:
    """Write out/<name>.tex, .md, .html (`page`), and .csv from the DataFrame `data`."""
    for suffix, text in {".tex": tex, ".md": md, ".html": page, ".csv": data.to_csv(index=False)}.items():
        with atomic_path(Path(out) / f"{name}{suffix}") as partial:
            partial.write_text(text, encoding="utf-8")
