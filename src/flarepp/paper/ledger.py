"""The claims ledger: every claim of the paper that carries a figure, what was measured here, and a verdict.

claims.yaml holds the claims as data, the modules of rules/ the functions that decide them; this file decides whether a
claim may be judged at all. Verdicts: `reproduced`, `not reproduced`, `not comparable (why)`, `not run`.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pandas

from flarepp.paper import cost, deviations, quoted, scaling, typeset
from flarepp.paper.cells import SYMBOLS, WORDS, cells, check_scale, describe
from flarepp.paper.rules import accuracy, steps, sweeps
from flarepp.paper.rules.words import Outcome

RULES = (accuracy, sweeps, steps)  # modules whose public functions are rules
CLAIMS = Path(__file__).with_name("claims.yaml")
AXES = {
    "dataset": "",
    "model": "",
    "num_blocks": 0,
    "precision": "",
    "num_tokens": 0,
    "num_latents": 0,
    "num_ranks": 0,
}  # and what a rule sees where a claim names no values
OOM = WORDS["oom"]
NOTHING = "too little to compare"
COLUMNS = ["id", "place", "statement", "paper", "measured", "n", "verdict", "runs"]
REQUIRED = {"id", "place", "statement", "paper", "needs"}
OPTIONAL = {"partial", "structural", "oom", "rule", "with", "criterion"}
OF_SCALE = ("num_tokens", "num_latents", "num_ranks")  # axes whose values at other scales than paper are the scale's own
# What the paper says of its own numbers that no run can show.
FORMULAS = "operations"
PRINTED = [
    {
        "id": "cp.unity",
        "paper": "two entries exceed unity",
        "needs": {"suite": scaling.SUITE},
        "rule": "above_one",
        "with": {"count": 2},
    },
    {
        "id": "ops.printed",
        "paper": "(5 C² + 3 M C) / (3 C² + 2 M C), about 1.6",
        "needs": {"suite": FORMULAS},
        "rule": "arithmetic_ratio",
        "with": {
            "model": "flarepp",
            "against": "flare",
            "formulas": {"flare": [3, 2], "flarepp": [5, 3]},
            "ratio": 1.6,
            "tolerance": 0.1,
        },
    },
]


def build(
    records: pandas.DataFrame, out: Path, *, shown: str, scale: str, claims: list[dict] | None = None
) -> None:
    """Write out/ledger.md, .csv and .tex.

    records: the tidy table of all suites. claims: those of claims.yaml unless given. ValueError names the
    claim whose rule or parameters are wrong, or the scales that do not agree.
    """
    check_scale(records, scale)
    claims = read_claims() if claims is None else claims
    suites = dict.fromkeys(claim["needs"]["suite"] for claim in claims if claim.get("rule"))
    by_suite = {suite: _frame(records, suite, shown) for suite in suites}
    for frame in by_suite.values():
        frame["dataset_label"] = list(map(quoted.heading, frame["dataset_label"], frame["data_source"]))
    differing = {suite: _differing(records, suite, scale) for suite in suites}
    entries = pandas.DataFrame([decide(claim, by_suite, differing, scale) for claim in claims], columns=COLUMNS)
    weights = quoted.weights_words(shown)
    caption = f"Claims of the paper and what was measured here. Scale: {scale}. Shown: {weights}."
    stamp = quoted.stamp(
        scale,
        (source for frame in by_suite.values() for source in frame["data_source"] if source),
        deviations.words(texts for found in differing.values() for texts in found.values()),
    )
    families = entries.groupby(entries["id"].str.split(".").str[0], sort=False)
    tex = "\n".join(_latex(group, caption, stamp, family) for family, group in families)
    typeset.write_texts(tex, _markdown(entries, claims, caption, stamp), entries, out, "ledger")


def _frame(records: pandas.DataFrame, suite: str, shown: str) -> pandas.DataFrame:
    """What the rules of a suite's claims are about: what its steps took, or its errors called `shown`."""
    of_steps = {
        scaling.SUITE: scaling.efficiencies,
        cost.SUITE: lambda records: cost.at_every_latents(cost.cells(records)),
        cost.HARNESS: cost.harness,
    }
    return of_steps[suite](records) if suite in of_steps else cells(records, suite, shown)


def _differing(records: pandas.DataFrame, suite: str, scale: str) -> dict[str, list[str]]:
    """What every run that a suite's claims are about has other than the paper."""
    parts = cost.PARTS.get(suite, (suite,))
    return {run: texts for part in parts for run, texts in deviations.find(records, part, scale).items()}


def read_claims(path: Path = CLAIMS) -> list[dict]:
    """The claims of a YAML file. ValueError for missing or unknown keys, or an id given twice."""
    import yaml

    claims = yaml.safe_load(path.read_text(encoding="utf-8"))
    seen: set[str] = set()
    for claim in claims:
        name = claim.get("id", claim)
        wrong = [f"{key} is missing" for key in sorted(REQUIRED - claim.keys())]
        wrong += [f"{key} is unknown" for key in sorted(claim.keys() - REQUIRED - OPTIONAL)]
        wrong += ["the id is used twice"] if name in seen else []
        if wrong:
            raise ValueError(f"{path.name}: claim {name}: {'; '.join(wrong)}")
        seen.add(name)
    return claims


def decide(
    claim: dict, by_suite: dict[str, pandas.DataFrame], differing: dict[str, dict], scale: str
) -> dict:
    """One row of the ledger.

    by_suite: the cells (`_frame`) of every suite that has a rule. differing: for every such suite, what its runs have
    other than the paper (`_differing`). Of a claim with `oom`, running out of memory is a result like any other.
    """
    row = {key: claim[key] for key in ("id", "place", "statement", "paper")} | {"n": 0, "runs": ""}
    if not claim.get("rule"):
        return row | {"measured": f"nothing yet (suite {claim['needs']['suite']})", "verdict": "not run"}
    rule = _rule(claim)
    suite = claim["needs"]["suite"]
    needs = _needs(by_suite[suite], claim["needs"], scale)
    needed = _needed(by_suite[suite], needs, claim["id"])
    if claim.get("oom"):
        needed = needed.assign(n=needed["n"].mask(needed["status"] == OOM, 1))
    failed = (needed["status"].isin(["diverged", OOM]) & (needed["n"] == 0)) | (needed["failed"] != "")
    good, bad, there = needed[needed["n"] > 0], needed[failed], needed[(needed["n"] > 0) | failed]
    missing = _missing(there, needs)
    unnamed = {axis: value for axis, value in AXES.items() if axis not in needs}
    outcome = rule(good.assign(**unnamed)) if not missing or claim.get("partial") else None
    measured = [outcome[0]] if outcome else []
    measured += dict.fromkeys(f"{describe(cell)}: {cell['failed'] or cell['status']}" for _, cell in bad.iterrows())
    measured += [f"missing: {missing}"] if missing else []
    runs = list(dict.fromkeys(run for runs in needed["runs"] for run in runs))
    settings = deviations.words(differing[suite].get(run, []) for run in runs)
    return row | {
        "measured": "; ".join(measured) or NOTHING,
        "n": int(there["n"].min()) if len(there) else 0,
        "verdict": _verdict(outcome, bad, missing, scale, good["data_source"].unique(), settings, claim.get("structural")),
        "runs": ";".join(runs),
    }


def _verdict(
    outcome: Outcome, bad: pandas.DataFrame, missing: str, scale: str, sources, settings: str, structural: bool | None
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


def _rule(claim: dict) -> Callable[[pandas.DataFrame], Outcome]:
    """The function a claim names, with the claim's parameters bound and checked."""
    known = {
        name: item
        for module in RULES
        for name, item in vars(module).items()
        if inspect.isfunction(item) and item.__module__ == module.__name__ and not name.startswith("_")
    }
    if claim["rule"] not in known:
        nearest = difflib.get_close_matches(claim["rule"], known, n=1, cutoff=0.0)[0]
        raise ValueError(f"claim {claim['id']}: no rule {claim['rule']!r}; nearest: {nearest!r}")
    function, parameters = known[claim["rule"]], claim.get("with", {})
    try:
        inspect.signature(function).bind(None, **parameters)
    except TypeError as error:
        raise ValueError(f"claim {claim['id']}: rule {claim['rule']!r}: {error}") from None
    return lambda good: function(good, **parameters)


def _needs(suite: pandas.DataFrame, needs: dict, scale: str) -> dict:
    """What a claim needs at a scale: those sizes that the scale chooses are all that its suite has."""
    if scale == "paper" or suite.empty:
        return needs
    return {axis: list(suite[axis].unique()) if axis in OF_SCALE else values for axis, values in needs.items()}


def _needed(suite: pandas.DataFrame, needs: dict, name: str) -> pandas.DataFrame:
    """The cells that the claim `name` needs. ValueError when one is there twice on the axes that it names."""
    chosen = _on_axes(suite, needs)
    twice = chosen[chosen.duplicated([axis for axis in AXES if axis in needs])]
    if len(twice):
        raise ValueError(f"claim {name}: more than one configuration of {describe(twice.iloc[0])}")
    return chosen


def _on_axes(frame: pandas.DataFrame, needs: dict) -> pandas.DataFrame:
    """The rows with the values that `needs` lists on axes."""
    kept = pandas.Series(True, index=frame.index)
    for axis in AXES:
        kept &= frame[axis].isin(needs[axis]) if axis in needs else True
    return frame[kept]


def _missing(there: pandas.DataFrame, needs: dict) -> str:
    """What is absent, axis by axis and then by number of cells; empty when nothing is."""
    axes = [axis for axis in AXES if axis in needs]
    absent = set(product(*(needs[axis] for axis in axes))) - set(
        there[axes].itertuples(index=False, name=None)
    )
    parts = []
    for position, axis in enumerate(axes):
        absent_values = {cell[position] for cell in absent}
        gone = [value for value in needs[axis] if value in absent_values - set(there[axis])]
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


def paper_cells() -> pandas.DataFrame:
    """The paper's own Table 1 as cells, so that the rules can be applied to what it prints."""
    names = [(row["kind"], row["name"], row["paper"]) for row in quoted.rows("names")]
    grid = [
        {
            "dataset": dataset,
            "dataset_label": dataset_label,
            "model": model,
            "mean": quoted.table1(model, dataset),
        }
        for kind, model, _ in names
        if kind == "model"
        for other, dataset, dataset_label in names
        if other == "dataset"
    ]
    frame = pandas.DataFrame(grid).assign(num_blocks=0, precision="")
    return frame[[isinstance(value, float) for value in frame["mean"]]].astype({"mean": float})


def consistency(claims: list[dict]) -> list[list[str]]:
    """Rows (id, stated, recomputed, agrees): claims of Tables 1 and 2 under their rules, on the paper's numbers, and what
    else the paper says of these tables and of its formulas."""
    printed, rows = {"table1": paper_cells(), scaling.SUITE: scaling.printed(), FORMULAS: cost.printed()}, []
    for claim in [*claims, *PRINTED]:
        if claim.get("rule") and (table := printed.get(claim["needs"]["suite"])) is not None:
            outcome = _rule(claim)(_on_axes(table, claim["needs"]))
            rows += [[claim["id"], claim["paper"], outcome[0], "yes" if outcome[1] else "no"]] if outcome else []
    return rows


def _table(columns: list[tuple[str, str]], rows: list[list], caption: str, stamp: str) -> typeset.Table:
    """A table without groups or emphasis. columns: (heading, LaTeX alignment)."""
    cells_ = [[typeset.Cell(str(value)) for value in row] for row in rows]
    return typeset.Table(
        caption, [("", heading, align) for heading, align in columns], [typeset.Block(cells_)], stamp
    )


def _latex(entries: pandas.DataFrame, caption: str, stamp: str, family: str) -> str:
    """One float per family of claims; the run folders are in the CSV."""
    widths = {
        "id": "p{2.8cm}",
        "place": "p{1.6cm}",
        "statement": "p{4.2cm}",
        "paper": "p{2.2cm}",
        "measured": "p{3.8cm}",
        "n": "r",
        "verdict": "p{2.1cm}",
    }
    table = _table(
        list(widths.items()), entries[list(widths)].values.tolist(), f"{caption} Claims {family}.*.", stamp
    )
    return typeset.latex(table, f"ledger_{family}")


def _markdown(entries: pandas.DataFrame, claims: list[dict], caption: str, stamp: str) -> str:
    """The ledger, the paper's own numbers under the same rules, and what each verdict takes."""
    short = entries.assign(runs=[_short(runs) for runs in entries["runs"]])
    counts = entries["verdict"].str.replace(r" \(.*", "", regex=True).value_counts()
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    main = _table([(name, "l") for name in COLUMNS], short.values.tolist(), f"{caption} {summary}.", stamp)
    check = _table(
        [(name, "l") for name in ("id", "paper states", "from its own tables", "agrees")],
        consistency(claims),
        "The same rules on the numbers the paper prints; nothing here was measured by this project.",
        "",
    )
    criteria = [f"- `{claim['id']}`: {claim['criterion']}" for claim in claims if claim.get("criterion")]
    return "\n".join(
        [
            "# Claims ledger",
            "",
            typeset.markdown(main),
            "## The paper against itself",
            "",
            typeset.markdown(check),
            "## What counts as reproduced",
            "",
            *criteria,
            "",
        ]
    )


def _short(runs: str) -> str:
    """Run folders for a narrow column: how many; the CSV lists them."""
    count = len(runs.split(";")) if runs else 0
    return f"{count} run{'' if count == 1 else 's'}" if count else ""
