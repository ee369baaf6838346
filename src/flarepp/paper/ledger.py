"""The claims ledger: every claim of the paper that carries a figure, what was measured here, and a verdict.

claims.yaml holds the claims as data, the modules of rules/ the functions that decide them; this file decides whether a
claim may be judged at all. Verdicts: `reproduced`, `not reproduced`, `not comparable (why)`, `not run`. Entries beyond the
paper are `measured` or `not run`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pandas

from flarepp.paper import claims as data
from flarepp.paper import consistency, cost, deviations, further, html, location, quoted, scaling, sequences, typeset
from flarepp.paper.cells import SYMBOLS, WORDS, cells, check_scale, describe
from flarepp.paper.claims import AXES
from flarepp.paper.claims import read as read_claims
from flarepp.paper.rules.words import Outcome

OOM = WORDS["oom"]
NOTHING = "too little to compare"
COLUMNS = ["id", "place", "statement", "paper", "measured", "n", "verdict", "runs"]
PARTS = cost.PARTS | {location.SUITE: (location.SOURCE,)} | {name: (suite,) for name, suite in further.SOURCES.items()}
BEYOND_WORDS = "Measured beyond the paper, at every scale; no verdict about it."
BEYOND = ["id", "statement", "measured", "n", "verdict", "runs"]  # columns of entries that the paper has no value of


def build(
    records: pandas.DataFrame, out: Path, *, shown: str, compared: str, scale: str, claims: list[dict] | None = None
) -> None:
    """Write out/ledger.md, .csv, .tex and .html, and out/consistency.csv; print what in the paper does not agree.

    records: the tidy table of all suites. compared: the error that is judged; shown: the one that figures show, whose
    predictions say where errors sit. claims: those of claims.yaml unless given. ValueError names the claim whose rule or
    parameters are wrong, or the scales that do not agree.
    """
    check_scale(records, scale)
    claims = read_claims() if claims is None else claims
    suites = dict.fromkeys(claim["needs"]["suite"] for claim in claims if claim.get("rule"))
    by_suite = {suite: frame(records, suite, shown if suite == location.SUITE else compared) for suite in suites}
    differing = {suite: _differing(records, suite, scale) for suite in suites}
    entries = pandas.DataFrame([decide(claim, by_suite, differing, scale) for claim in claims], columns=COLUMNS)
    how = f"Scale: {scale}. Errors: {quoted.weights_words(compared)}."
    caption = f"Claims of the paper and what was measured here. {how}"
    stamp = quoted.stamp(
        scale,
        (source for found in by_suite.values() for source in found["data_source"] if source),
        deviations.words(texts for found in differing.values() for texts in found.values()),
    )
    check = consistency.rows(claims)
    parts = _parts(entries, claims, check, caption, stamp)
    beyond = {claim["id"] for claim in claims if claim.get("beyond")}
    captions = [f"{BEYOND_WORDS} {how}" if name in beyond else caption for name in entries["id"]]
    texts = _latex(entries.assign(caption=captions), check, stamp), _markdown(parts), html.page("Claims ledger", parts)
    typeset.write_texts(*texts, entries, out, "ledger")
    consistency.write(check, out)
    for line in consistency.disagreeing(check):
        print(line)


def frame(records: pandas.DataFrame, suite: str, shown: str) -> pandas.DataFrame:
    """What the rules of a suite's claims are about: what its steps took, where errors sit, accuracies, or its errors called
    `shown`. The labels of datasets tell stand-ins."""
    special = {
        scaling.SUITE: scaling.efficiencies,
        cost.SUITE: lambda records: cost.at_every_latents(cost.cells(records)),
        cost.HARNESS: cost.harness,
        location.SUITE: lambda records: location.frame(records, shown),
        sequences.SUITE: sequences.frame,
        further.SELECTION: further.selection,
        further.HALF_DEPTH: lambda records: further.half_depth(records, shown),
    }
    found = special[suite](records) if suite in special else cells(records, suite, shown)
    return found.assign(dataset_label=list(map(quoted.heading, found["dataset_label"], found["data_source"])))


def _differing(records: pandas.DataFrame, suite: str, scale: str) -> dict[str, list[str]]:
    """What every run that a suite's claims are about has other than the paper."""
    parts = PARTS.get(suite, (suite,))
    return {run: texts for part in parts for run, texts in deviations.find(records, part, scale).items()}


def decide(
    claim: dict, by_suite: dict[str, pandas.DataFrame], differing: dict[str, dict], scale: str
) -> dict:
    """One row of the ledger.

    by_suite: the cells (`frame`) of every suite that has a rule. differing: for every such suite, what its runs have
    other than the paper (`_differing`). Of a claim with `oom`, running out of memory is a result like any other.
    """
    row = {key: claim[key] for key in ("id", "place", "statement", "paper")} | {"n": 0, "runs": ""}
    if not claim.get("rule"):
        return row | {"measured": f"nothing yet (suite {claim['needs']['suite']})", "verdict": "not run"}
    if claim.get("beyond"):
        return row | _beyond(claim, by_suite[claim["needs"]["suite"]])
    rule = data.rule(claim)
    suite = claim["needs"]["suite"]
    needs = data.needs_at(by_suite[suite], claim["needs"], scale)
    needed = _needed(by_suite[suite], needs, claim["id"])
    if claim.get("oom"):
        needed = needed.assign(n=needed["n"].mask(needed["status"] == OOM, 1))
    failed = (needed["status"].isin(["diverged", OOM]) & (needed["n"] == 0)) | (needed["failed"] != "")
    good, bad, there = needed[needed["n"] > 0], needed[failed], needed[(needed["n"] > 0) | failed]
    missing = _missing(there, needs)
    unnamed = {axis: value for axis, value in AXES.items() if axis not in needs}
    outcome = rule(good.assign(**unnamed)) if not missing or claim.get("partial") else None
    measured = [outcome[0] + _spread(good)] if outcome else []
    measured += dict.fromkeys(f"{_name(cell, needs)}: {cell['failed'] or cell['status']}" for _, cell in bad.iterrows())
    measured += [f"missing: {missing}"] if missing else []
    runs = _runs(needed)
    settings = deviations.words(differing[suite].get(run, []) for run in runs)
    return row | {
        "measured": "; ".join(measured) or NOTHING,
        "n": int(there["n"].min()) if len(there) else 0,
        "verdict": _verdict(outcome, bad, missing, scale, good["data_source"].unique(), settings, claim.get("structural")),
        "runs": ";".join(runs),
    }


def _beyond(claim: dict, suite: pandas.DataFrame) -> dict:
    """The rest of a row about what the paper does not measure, from all that is there."""
    chosen = data.on_axes(suite, claim["needs"])
    good = chosen[chosen["n"] > 0]
    outcome = data.rule(claim)(good)
    measured = {"measured": outcome[0], "verdict": "measured"} if outcome else {"measured": NOTHING, "verdict": "not run"}
    return measured | {"n": int(good["n"].min()) if len(good) else 0, "runs": ";".join(_runs(good))}


def _runs(cells_: pandas.DataFrame) -> list[str]:
    return list(dict.fromkeys(run for runs in cells_["runs"] for run in runs))


def _spread(good: pandas.DataFrame) -> str:
    """The standard deviation over seeds in percent of the mean error or accuracy, of the cells with two seeds or more."""
    if "std" not in good or good["std"].isna().all():
        return ""
    share = (100 * good["std"] / good["mean"]).dropna()
    what = "accuracies" if "protocol" in good else "errors"
    return f" ({what} ± {' to '.join(dict.fromkeys(f'{each:.1f}' for each in (share.min(), share.max())))} % over seeds)"


def _name(cell: pandas.Series, needs: dict) -> str:
    """A cell in words, with its latents where a claim tells cells apart by them."""
    latents = f", M = {cell['num_latents']:.0f}" if "num_latents" in needs and "num_tokens" not in cell else ""
    return describe(cell) + latents


def _verdict(
    outcome: Outcome, bad: pandas.DataFrame, missing: str, scale: str, sources: Iterable[str], settings: str, structural: bool | None
) -> str:
    """The paper's numbers are about published data, its scale and its settings; nothing else confirms or
    refutes them, and no part of what a claim takes does.

    A structural claim is about what is computed, not about a number of the paper: any run can refute it, and all that it
    takes confirm it, at every scale.
    """
    if outcome is None:
        return "not run" if missing else f"not comparable ({_reasons(bad) if len(bad) else NOTHING})"
    if structural and outcome[1] is False:
        return "not reproduced"
    reasons = [f"scale {scale}"] if scale != "paper" else []
    reasons += [f"{quoted.kind(source)} data" for source in sources if source not in ("published", quoted.RANDOM)]
    reasons += [f"settings differ: {settings}"] if settings else []
    reasons = [] if structural else reasons
    reasons += [_reasons(bad)] if len(bad) else []
    reasons = reasons or ([f"missing: {missing}"] if missing else [])
    reasons = reasons or ([NOTHING] if outcome[1] is None else [])
    if reasons:
        return f"not comparable ({', '.join(reasons)})"
    return "reproduced" if outcome[1] else "not reproduced"


def _reasons(bad: pandas.DataFrame) -> str:
    count = bad["runs"].nunique()
    return f"{count} needed run{'s' if count > 1 else ''} failed"


def _needed(suite: pandas.DataFrame, needs: dict, name: str) -> pandas.DataFrame:
    """The cells that the claim `name` needs. ValueError when one is there twice on the axes that it names."""
    chosen = data.on_axes(suite, needs)
    twice = chosen[chosen.duplicated([axis for axis in AXES if axis in needs])]
    if len(twice):
        raise ValueError(f"claim {name}: more than one configuration of {describe(twice.iloc[0])}")
    return chosen


def _missing(there: pandas.DataFrame, needs: dict) -> str:
    """What is absent, axis by axis and then by number of cells; empty when nothing is."""
    axes = [axis for axis in AXES if axis in needs]
    absent = data.wanted(needs).keys() - set(there[axes].itertuples(index=False, name=None))
    parts = []
    for position, axis in enumerate(axes):
        absent_values = {cell[position] for cell in absent}
        wanted = dict.fromkeys(cell[position] for cell in data.wanted(needs))
        gone = [value for value in wanted if value in absent_values - set(there[axis])]
        absent = {cell for cell in absent if cell[position] not in gone}
        words = [
            f"{SYMBOLS[axis]} = {value:,.0f}" if axis in SYMBOLS else quoted.paper_name(axis, value) or value
            for value in gone
        ]
        parts += [", ".join(words)] if words else []
    parts += (
        [f"{len(absent)} {'further ' if parts else ''}cell{'s' if len(absent) > 1 else ''}"] if absent else []
    )
    return "; ".join(parts)


def _parts(entries: pandas.DataFrame, claims: list[dict], check: list[list[str]], caption: str, stamp: str) -> list[tuple]:
    """The sections (heading, table or lines) of the ledger as a page."""
    beyond = entries["id"].isin([claim["id"] for claim in claims if claim.get("beyond")])
    counts = entries.loc[~beyond, "verdict"].str.replace(r" \(.*", "", regex=True).value_counts()
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    criteria = [f"{claim['id']}: {claim['criterion']}" for claim in claims if claim.get("criterion")]
    parts = [("", _linked(entries[~beyond], COLUMNS, f"{caption} {summary or 'No claim'}.", stamp))]
    if beyond.any():
        parts.append(("Beyond the paper", _linked(entries[beyond], BEYOND, BEYOND_WORDS, stamp)))
    headings = [(name, "l") for name in consistency.COLUMNS]
    parts.append(("The paper against itself", _table(headings, check, consistency.summary(check), "")))
    return [*parts, ("What counts as reproduced", criteria)]


def _linked(entries: pandas.DataFrame, columns: list[str], caption: str, stamp: str) -> typeset.Table:
    """Entries as a table whose last column tells how many runs there are, and leads to them."""
    table = _table([(name, "l") for name in columns], entries[columns].values.tolist(), caption, stamp)
    for row, runs in zip(table.blocks[0].rows, entries["runs"]):
        folders = tuple(runs.split(";")) if runs else ()
        count = f"{len(folders)} run{'' if len(folders) == 1 else 's'}" if folders else ""
        row[-1] = typeset.Cell(count, runs=folders)
    return table


def _table(columns: list[tuple[str, str]], rows: list[list], caption: str, stamp: str) -> typeset.Table:
    """A table without groups or emphasis. columns: (heading, LaTeX alignment)."""
    cells_ = [[typeset.Cell(str(value)) for value in row] for row in rows]
    return typeset.Table(
        caption, [("", heading, align) for heading, align in columns], [typeset.Block(cells_)], stamp
    )


def _latex(entries: pandas.DataFrame, check: list[list[str]], stamp: str) -> str:
    """A float per family of claims, with the caption of its entries, and the paper against itself; the run folders are in the
    CSV."""
    widths = {
        "id": "p{2.8cm}",
        "place": "p{1.6cm}",
        "statement": "p{4.2cm}",
        "paper": "p{2.2cm}",
        "measured": "p{3.8cm}",
        "n": "r",
        "verdict": "p{2.1cm}",
    }
    floats = []
    for family, group in entries.groupby(entries["id"].str.split(".").str[0], sort=False):
        caption = f"{group['caption'].iloc[0]} Entries {family}.*."
        table = _table(list(widths.items()), group[list(widths)].values.tolist(), caption, stamp)
        floats.append(typeset.latex(table, f"ledger_{family}"))
    return "\n".join([*floats, *consistency.latex(check)])


def _markdown(parts: list[tuple]) -> str:
    """The sections of the ledger as Markdown."""
    lines = ["# Claims ledger", ""]
    for heading, content in parts:
        lines += [f"## {heading}", ""] if heading else []
        if isinstance(content, typeset.Table):
            lines.append(typeset.markdown(content))
        else:
            lines += [f"- `{name}`: {text}" for name, text in (line.split(": ", 1) for line in content)]
    return "\n".join([*lines, ""])
