"""Table 3: the benchmarks as they were used, from the cards of the datasets, each with the paper's values below."""

from __future__ import annotations

from pathlib import Path

import pandas

from flarepp.paper import quoted
from flarepp.paper.typeset import Block, Cell, Notes, Table, plain, write

COLUMNS = {  # heading and LaTeX alignment of what stands in a row, in this order
    "dimension": ("dimension", "l"),
    "grid": ("structure", "l"),
    "points": ("points", "r"),
    "input_features": ("inputs", "r"),
    "output_features": ("outputs", "r"),
    "train_cases": ("train", "r"),
    "test_cases": ("test", "r"),
    "source": ("source", "l"),
    "rejected": ("rejected", "r"),
    "split": ("split", "l"),
}
NEEDED = {"label", "dimension", "structure", "counts", "channels", "source", "split", "rejected"}  # of a card
COORDINATES = ("x", "y", "z")
SOURCES = {
    "published": "published files",
    "presampled": "our points of the full data",
    "generated": "our solver",
    quoted.STAND_IN: "STAND-IN",
}


def build(cards: dict[str, dict], out: Path, *, scale: str) -> None:
    """Write out/table3.tex, .csv and .md.

    cards: the dataset cards by the names of the datasets. scale: name of the scale. ValueError names a card that
    lacks something.
    """
    for name, each in cards.items():
        if missing := sorted(NEEDED - each.keys()):
            raise ValueError(f"card of the dataset {name}: {', '.join(missing)} missing")
    printed = {row["benchmark"]: row for row in quoted.rows("table3")}
    names = {quoted.paper_name("dataset", name) or name: name for name in cards}
    notes, blocks, data = Notes(), [], []
    for name in dict.fromkeys([*printed, *names]):
        card, paper = cards.get(names.get(name, "")), printed.get(name, {})
        label, ours = (card["label"], _row(card)) if card else (name, {"note": _why_unused(name)})
        rows = [[Cell(label), *(_cells(ours, _marks(card, notes)) if card else _dashes(notes.mark(ours["note"])))]]
        rows += [[Cell("the paper's"), *(Cell(paper.get(key, "")) for key in COLUMNS)]] if paper else []
        blocks.append(Block(rows))
        theirs = {f"paper_{key}": paper[key] for key in COLUMNS if key in paper}
        path = f"results/{scale}/data/{names[name]}.json" if card else ""
        data.append({"benchmark": label, "scale": scale} | ours | theirs | {"card": path})
    caption = (
        f"The benchmarks, from the cards of the data that were used. Scale: {scale}. Inputs are the features of a point"
        " besides its coordinates, or the coordinates where there is nothing else; rejected are samples that a solver gave"
        " up, and others took their place."
    )
    columns = [("", "benchmark", "l"), *(("", *column) for column in COLUMNS.values())]
    stamp = quoted.stamp(scale, (card["source"] for card in cards.values()))
    write(Table(caption, columns, blocks, stamp, notes.items()), pandas.DataFrame(data, dtype=object), out, "table3")


def _row(card: dict) -> dict:
    """What a card says, by the keys of COLUMNS, and as a note the sentence of a stand-in."""
    features = card["channels"]["features"]
    fields = [channel for channel in features if channel not in COORDINATES]
    return {
        "dimension": card["dimension"],
        "grid": " × ".join(map(str, card["grid"])) if card.get("grid") else card["structure"],
        "points": card["counts"]["points"],
        "input_features": len(fields or features),
        "output_features": len(card["channels"]["target"]),
        "train_cases": card["counts"]["train"],
        "test_cases": card["counts"]["test"],
        "source": card["source"],
        "rejected": "" if card["rejected"] is None else card["rejected"],  # of published files nobody knows
        "split": card["split"],
        "note": card.get("stand_in", ""),
    }


def _marks(card: dict, notes: Notes) -> dict[str, str]:
    """Footnote marks by the keys of COLUMNS: what a stand-in is, and inputs that are not counted."""
    features = card["channels"]["features"]
    coordinates = [channel for channel in features if channel in COORDINATES]
    texts = {"source": card.get("stand_in", "").rstrip(".")}
    if len(coordinates) < len(features):
        texts["input_features"] = f"a model is given the {len(coordinates)} coordinates too"
    return {key: notes.mark(text) for key, text in texts.items() if text}


def _cells(row: dict, marks: dict[str, str]) -> list[Cell]:
    shown = row | {"source": SOURCES.get(row["source"], row["source"])}
    return [Cell(plain(shown[key]), marks=tuple(filter(None, [marks.get(key)]))) for key in COLUMNS]


def _dashes(mark: str) -> list[Cell]:
    return [Cell("--", marks=(mark,)), *[Cell("--")] * (len(COLUMNS) - 1)]


def _why_unused(name: str) -> str:
    """The paper lists more than it experiments on."""
    known = any((row["kind"], row["paper"]) == ("dataset", name) for row in quoted.rows("names"))
    return "not among the datasets of this configuration" if known else "no experiment in the paper"
