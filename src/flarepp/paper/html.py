"""Tables as pages: self-contained HTML in which a number links to its runs, listed with their origin on the same page."""

from __future__ import annotations

import re
from html import escape
from typing import Any

from flarepp.paper import origin

STYLE = """
body { color: #1a1a1a; background: #fff; font: 15px/1.45 system-ui, sans-serif; margin: 1.5rem auto; padding: 0 1rem; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; border-top: 2px solid; border-bottom: 2px solid; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; text-align: left; vertical-align: top; max-width: 34rem; }
th { vertical-align: bottom; font-weight: 600; }
th[colspan] { text-align: center; border-bottom: 1px solid; }
th.r, td.r { text-align: right; }
td.r, td a { white-space: nowrap; }
th.g, td.g { border-left: 1px solid #bbb; }
sup { line-height: 0; }
tbody { border-top: 1px solid; }
td.title { font-style: italic; }
.stamp { font-weight: 600; color: #8a1c00; }
.notes, section { font-size: 13px; }
section { border-top: 1px solid #ddd; padding: .2rem .6rem; overflow-wrap: anywhere; }
section h3 { margin: .3rem 0; }
section ul { columns: 34rem; list-style: none; margin: .3rem 0; padding: 0; }
a { color: #0b4a8f; text-decoration: none; }
a:hover { text-decoration: underline dotted; }
:target { background: #fff1b8; }
"""


class Links:
    """The runs that the numbers of a page are from: an anchor for each run, and one for each set of several."""

    def __init__(self) -> None:
        self.sets: list[tuple[str, ...]] = []
        self.runs: list[str] = []

    def to(self, runs: tuple[str, ...]) -> str:
        """The anchor of the run, or of the set of runs, that a number is from."""
        self.runs += [run for run in dict.fromkeys(runs) if run not in self.runs]
        if len(runs) == 1:
            return f"run-{self.runs.index(runs[0]) + 1}"
        self.sets += [runs] if runs not in self.sets else []
        return f"runs-{self.sets.index(runs) + 1}"


def title(name: str) -> str:
    """An artefact as readers call it: table1 is Table 1, figure5_cells is Figure 5 cells."""
    return re.sub(r"^(table|figure)(\d+)", r"\1 \2", name).replace("_", " ").capitalize()


def page(heading: str, parts: list[tuple[str, Any]]) -> str:
    """A page of parts (heading or "", a `typeset.Table` or a list of lines), and the runs that its numbers link to."""
    links, body = Links(), [f"<h1>{escape(heading)}</h1>"]
    for name, content in parts:
        body += [f"<h2>{escape(name)}</h2>"] if name else []
        body += _list(content) if isinstance(content, list) else _table(content, links)
    return "\n".join(
        [
            "<!DOCTYPE html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{escape(heading)}</title>',
            f"<style>{STYLE}</style></head><body>",
            *body,
            *_runs(links),
            "</body></html>",
            "",
        ]
    )


def _list(lines: list[str]) -> list[str]:
    return ["<ul>", *(f"<li>{escape(line)}</li>" for line in lines), "</ul>"]


def _table(table: Any, links: Links) -> list[str]:
    """The stamp, the caption, the grid and the footnotes of one table."""
    kinds, before = [], ""
    for group, _, alignment in table.columns:
        kinds.append(("r" if alignment == "r" else "l") + (" g" if group != before else ""))
        before = group
    lines = [f'<p class="stamp">{escape(table.stamp)}</p>'] if table.stamp else []
    lines += [f"<p>{escape(table.caption)}</p>", '<div class="wide"><table>', "<thead>", *_groups(table)]
    headings = (f'<th class="{kind}">{escape(heading)}</th>' for kind, (_, heading, _) in zip(kinds, table.columns))
    lines += [f"<tr>{''.join(headings)}</tr>", "</thead>"]
    for block in table.blocks:
        lines.append("<tbody>")
        lines += [f'<tr><td class="title" colspan="{len(kinds)}">{escape(block.title)}</td></tr>'] if block.title else []
        lines += [f"<tr>{''.join(_cell(cell, kind, links) for cell, kind in zip(row, kinds))}</tr>" for row in block.rows]
        lines.append("</tbody>")
    notes = [f"<sup>{mark}</sup> {escape(text)}.<br>" for mark, text in table.notes]
    return [*lines, "</table></div>", *(['<p class="notes">', *notes, "</p>"] if notes else [])]


def _groups(table: Any) -> list[str]:
    """The row of group headings; empty when no column has a group."""
    spans: list[list] = []
    for group, _, _ in table.columns:
        if spans and group and spans[-1][0] == group:
            spans[-1][1] += 1
        else:
            spans.append([group, 1])
    if not any(group for group, _ in spans):
        return []
    cells = (f'<th colspan="{count}">{escape(group)}</th>' if group else "<td></td>" for group, count in spans)
    return [f"<tr>{''.join(cells)}</tr>"]


def _cell(cell: Any, kind: str, links: Links) -> str:
    text = escape(cell.text)
    text = f"<u>{text}</u>" if cell.underline else text
    text = f"<b>{text}</b>" if cell.bold else text
    text = f'<a href="#{links.to(cell.runs)}">{text}</a>' if cell.runs and text else text
    marks = f"<sup>{escape(','.join(cell.marks))}</sup>" if cell.marks else ""
    return f'<td class="{kind}">{text}{marks}</td>'


def _runs(links: Links) -> list[str]:
    """Every run once with its origin, then numbers from several runs with the folders of each."""
    if not links.runs:
        return []
    lines = ["<h2>Runs</h2>"]
    for run in links.runs:
        facts = [escape(f"{name}: {_fact(value)}") for name, value in origin.of_run(run).items()]
        lines += _section(links.to((run,)), run, facts)
    lines += ["<h2>Numbers from several runs</h2>"] if links.sets else []
    for runs in tuple(links.sets):
        items = [f'<a href="#{links.to((run,))}">{escape(run)}</a>' for run in runs]
        lines += _section(links.to(runs), f"{len(runs)} runs", items)
    return lines


def _section(anchor: str, heading: str, items: list[str]) -> list[str]:
    """What a link leads to. items: in HTML."""
    listed = "".join(f"<li>{item}</li>" for item in items)
    return [f'<section id="{anchor}"><h3>{escape(heading)}</h3>', f"<ul>{listed}</ul></section>"]


def _fact(value: object) -> str:
    return ", ".join(f"{name} {number:g}" for name, number in value.items()) if isinstance(value, dict) else str(value)
