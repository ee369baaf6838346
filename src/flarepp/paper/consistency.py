"""The paper against itself: every average, reduction and count that it states, again from the numbers it prints.

A printed number stands for every value that rounds to it, and what follows from several of them for a range of values; a
statement agrees when some value of that range rounds to what is stated. Nothing here was measured by this project.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pandas

from flarepp.paper import claims as data
from flarepp.paper import cost, quoted, scaling, typeset
from flarepp.record import atomic_path

COLUMNS = ["id", "paper states", "from its own tables", "agrees"]
YES, NO, OPEN = "yes", "no", "cannot be told"
FORMULAS = "operations"
TASKS = {"listops": "ListOps", "text": "Text", "retrieval": "Retrieval", "image": "Image", "pathfinder32": "Pathfinder"}
BUDGETS, TABLE1_BLOCKS = (32, 64, 128), 8  # of Elasticity, in Figure 3; its blocks in Table 1, with 64 latents
LATENT_BUDGETS = 7  # of both benchmarks of Figure 3
EDGE = 1e-9  # of a range, which binary fractions only come close to
# What the paper says of its own numbers that no run can show.
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
Range = tuple[float, float]


def rows(claims: list[dict]) -> list[list[str]]:
    """Rows of COLUMNS: claims of Tables 1 and 2 under their rules on the paper's numbers, and what else it states of its
    tables, figures and formulas."""
    figures = [*_reductions(), *_means(), *_sweep(), *_half_depth(), *_precision()]
    return [*_under_rules(claims), *figures, *_averages(), *_lra()]


def summary(found: list[list[str]]) -> str:
    """How many statements agree, and which do not."""
    counts = [sum(row[3] == word for row in found) for word in (YES, NO, OPEN)]
    names = ", ".join(row[0] for row in found if row[3] == NO) or "none"
    return (
        f"Statements of the paper about its own numbers: {len(found)}; {counts[0]} agree, {counts[1]} do not ({names}),"
        f" of {counts[2]} it cannot be told. A printed number stands for all that round to it; nothing here was measured"
        " by this project."
    )


def disagreeing(found: list[list[str]]) -> list[str]:
    """What does not agree, a line each."""
    rows_ = [row for row in found if row[3] == NO]
    return [f"the paper against itself: {name}: states {states}; its own numbers: {own}" for name, states, own, _ in rows_]


def write(found: list[list[str]], out: Path) -> None:
    """Write out/consistency.csv."""
    with atomic_path(Path(out) / "consistency.csv") as partial:
        pandas.DataFrame(found, columns=COLUMNS).to_csv(partial, index=False)


def latex(found: list[list[str]]) -> list[str]:
    """Two floats: all but Table 6, which has a row a model, and Table 6."""
    columns = [("", name, align) for name, align in zip(COLUMNS, ("p{3.6cm}", "p{4.2cm}", "p{6.2cm}", "p{1.6cm}"))]
    floats = []
    for name in ("own", "lra"):
        part = [[typeset.Cell(text) for text in row] for row in found if row[0].startswith("lra.") == (name == "lra")]
        floats.append(typeset.latex(typeset.Table(summary(found), columns, [typeset.Block(part)]), f"consistency_{name}"))
    return floats


def printed(text: str) -> Range:
    """All that rounds to a printed number."""
    half = 0.5 * 10.0 ** -len(text.partition(".")[2])
    return float(text) - half, float(text) + half


def reduction(lower: Range, upper: Range) -> Range:
    """By how many percent the first number is below the second."""
    return 100 * (1 - lower[1] / upper[0]), 100 * (1 - lower[0] / upper[1])


def mean(values: Iterable[Range]) -> Range:
    low, high = zip(*values)
    return sum(low) / len(low), sum(high) / len(high)


def minus(first: Range, second: Range) -> Range:
    return first[0] - second[1], first[1] - second[0]


def agrees(found: Range, stated: str) -> str:
    """Whether some value of a range rounds to what is stated."""
    low, high = printed(stated)
    return YES if found[0] <= high + EDGE and found[1] >= low - EDGE else NO


def words(found: Range, digits: int = 1) -> str:
    """A range in words: "37.3 (36.8 to 37.9)"."""
    low, high = (f"{value:.{digits}f}" for value in found)
    return f"{sum(found) / 2:.{digits}f} ({low} to {high})"


def table1_cells() -> pandas.DataFrame:
    """The paper's own Table 1 as cells, so that the rules can be applied to what it prints."""
    names = [(row["kind"], row["name"], row["paper"]) for row in quoted.rows("names")]
    grid = [
        {
            "dataset": dataset,
            "dataset_label": dataset_label,
            "model": model,
            "label": label,
            "mean": quoted.table1(model, dataset),
        }
        for kind, model, label in names
        if kind == "model"
        for other, dataset, dataset_label in names
        if other == "dataset"
    ]
    frame = pandas.DataFrame(grid).assign(num_blocks=0, precision="")
    return frame[[isinstance(value, float) for value in frame["mean"]]].astype({"mean": float})


def _under_rules(claims: list[dict]) -> list[list[str]]:
    """The claims that a rule decides on what is printed whole: Tables 1 and 2, the operation counts."""
    tables, found = {"table1": table1_cells(), scaling.SUITE: scaling.printed(), FORMULAS: cost.printed()}, []
    for claim in [*claims, *PRINTED]:
        table = tables.get(claim["needs"]["suite"]) if claim.get("rule") and not claim.get("beyond") else None
        if table is not None and (outcome := data.rule(claim)(data.on_axes(table, claim["needs"]))):
            found.append([claim["id"], claim["paper"], outcome[0], YES if outcome[1] else NO])
    return found


def _stated(name: str) -> dict[str, str]:
    """What stated.csv has of a claim, {quantity: value}."""
    return {row["quantity"]: row["value"] for row in quoted.rows("stated") if row["id"] == name}


def _figure3() -> dict[tuple[str, str, int, int], Range]:
    """Figure 3's printed errors, {(dataset, model, B, M)}; M is 0 for the mean over M."""
    return {key: (value - 0.005, value + 0.005) for key, value in quoted.figure3().items()}


def _pairs(found: dict) -> dict[tuple[str, int, int], Range]:
    """The reductions from FLARE to FLARE++ wherever both are printed, {(dataset, B, M)}."""
    return {
        (dataset, blocks, latents): reduction(found[dataset, "flarepp", blocks, latents], error)
        for (dataset, model, blocks, latents), error in found.items()
        if model == "flare" and (dataset, "flarepp", blocks, latents) in found
    }


def _reductions() -> list[list[str]]:
    """Figure 3's reductions from FLARE to FLARE++: the range over all cells, one of which is Table 1's, and those at every
    depth."""
    of_table1 = {model: printed(_table1(model, "elasticity")) for model in ("flare", "flarepp")}
    cell = {("elasticity", model, TABLE1_BLOCKS, 64): error for model, error in of_table1.items()}
    pairs, stated = _pairs(_figure3() | cell), _stated("f3.cells")
    low, high = (float(stated[name]) for name in ("least reduction", "largest reduction"))
    cells = sorted(each for (_, _, latents), each in pairs.items() if latents)
    inside = all(each[1] >= low - 0.5 and each[0] <= high + 0.5 for each in cells)
    text = f"{sum(cells[0]) / 2:.0f} to {sum(cells[-1]) / 2:.0f} % in the {len(cells)} that are printed"
    found = [["f3.cells", f"reduced by {low:.0f} to {high:.0f} % in 21 cells", text, OPEN if inside else NO]]
    for dataset, latents, of in (("elasticity", 0, "the means over M"), ("darcy", 128, "M = 128")):
        for depth, value in _stated(f"f3.depth.{dataset}").items():
            own = pairs[dataset, int(depth), latents]
            states, text = f"{value} % at B = {depth}", f"{words(own)} % from {of}"
            found.append([f"f3.depth.{dataset}.b{depth}", states, text, agrees(own, value)])
    return found


def _means() -> list[list[str]]:
    """Figure 3's means over M on Elasticity against its cells; the cell at M = 64 and B = 8 is Table 1's."""
    cells, found = _figure3(), []
    for (dataset, model, blocks, latents), error in cells.items():
        if latents:
            continue
        own = {each: cells[dataset, model, blocks, each] for each in BUDGETS if (dataset, model, blocks, each) in cells}
        if blocks == TABLE1_BLOCKS:
            own[64] = printed(_table1(model, dataset))
        stated, word = f"{sum(error) / 2:.2f}", OPEN
        text = f"{len(own)} of {len(BUDGETS)} cells are printed"
        if len(own) == len(BUDGETS) - 1:  # what the other cell must be
            low, high = (len(BUDGETS) * end for end in error)
            least, most = map(sum, zip(*own.values()))
            left = minus((low, high), (least, most))
            text += f", M = {(set(BUDGETS) - set(own)).pop()} must be {words(left, 2)}"
        if len(own) == len(BUDGETS):
            text, word = words(mean(own.values()), 2), agrees(mean(own.values()), stated)
        label = quoted.paper_name("model", model)
        found.append([f"f3.mean.{model}.b{blocks}", f"{label} {stated} at B = {blocks}, mean over M", text, word])
    return found


def _table1(model: str, dataset: str) -> str:
    """A number of Table 1 as it is printed."""
    return f"{quoted.table1(model, dataset):.2f}"


def _sweep() -> list[list[str]]:
    """What else Figure 3's text says: where a budget stops paying, and Table 1's cells."""
    cells = quoted.figure3()
    ends = [("flare", 2), ("flare", 4), ("flarepp", 2), ("flarepp", 8)]
    changes = [cells["elasticity", *end, 128] - cells["elasticity", *end, 32] for end in ends]
    rises = [change > 0 for change in changes] == [True, True, False, False]
    labels = {model: quoted.paper_name("model", model) for model, _ in ends}
    text = ", ".join(f"{labels[model]} {change:+.2f} (B = {depth})" for (model, depth), change in zip(ends, changes))
    states = "from M = 32 to 128 FLARE rises at B = 2 and 4, FLARE++ falls"
    found = [["f3.saturate.elasticity", states, text, YES if rises else NO]]
    states = "+0.5 % and 1.2 % from M = 128 to 256 at B = 8"
    found.append(["f3.saturate.darcy", states, "no error at M = 256 is printed", OPEN])
    for model, label in labels.items():
        own, stated = _table1(model, "darcy"), f"{cells['darcy', model, 8, 128]:.2f}"
        states = f"{label} {stated} on Darcy, B = 8, M = 128"
        found.append([f"f3.table1.{model}", states, f"{own} in Table 1", agrees(printed(own), stated)])
    return found


def _half_depth() -> list[list[str]]:
    """FLARE++ against FLARE with twice the blocks, in the cells of Figure 3 that are printed."""
    cells, found = quoted.figure3(), []
    for shallow, deep, count in ((4, 8, 7), (2, 4, 2)):
        gaps = [
            cells[dataset, "flarepp", shallow, latents] - error
            for (dataset, model, depth, latents), error in cells.items()
            if (model, depth) == ("flare", deep) and latents and (dataset, "flarepp", shallow, latents) in cells
        ]
        lower, equal = sum(gap < 0 for gap in gaps), sum(gap == 0 for gap in gaps)
        possible = lower <= count <= lower + equal + LATENT_BUDGETS - len(gaps)
        text = f"of {len(gaps)} printed, {lower} lower and {equal} equal as rounded"
        states = f"FLARE++ at B = {shallow} below FLARE at {deep} at {count} of {LATENT_BUDGETS} latent budgets"
        found.append([f"f3.half_depth.b{shallow}", states, text, OPEN if possible else NO])
    return found


def _precision() -> list[list[str]]:
    """Figure 4's printed errors at B = 8 on Airfoil against each other and against Table 1."""
    full, own = _stated("prec.full.airfoil.b8"), _stated("prec.flip.airfoil.b8")
    found = []
    for model, values in (("full", full), ("flarepp", own)):
        label, table = quoted.paper_name("model", model), _table1(model, "airfoil")
        states = f"{label} {values['fp32']} on Airfoil, B = 8, FP32"
        found.append([f"prec.table1.{model}", states, f"{table} in Table 1", agrees(printed(table), values["fp32"])])
    lower = reduction(printed(full["fp16"]), printed(full["fp32"]))
    change = (-lower[1], -lower[0])
    states = f"{full['change']} % from FP32 to FP16"
    found.append(["prec.full.airfoil.b8", states, f"{words(change)} %", agrees(change, full["change"])])
    flips = float(own["fp32"]) < float(full["fp32"]) and float(own["fp16"]) > float(full["fp16"])
    text = f"{own['fp32']} against {full['fp32']}; {own['fp16']} against {full['fp16']}"
    return [*found, ["prec.flip.airfoil.b8", "FLARE++ ahead of full in FP32, behind in FP16", text, YES if flips else NO]]


def _averages() -> list[list[str]]:
    """The average of every row of Table 6."""
    found = []
    for row in quoted.rows("table6_lra"):
        own, stated = mean(printed(row[task]) for task in TASKS), row["average"]
        found.append([f"lra.average.{_slug(row['model'])}", f"{row['model']} {stated}", words(own, 3), agrees(own, stated)])
    return found


def _slug(name: str) -> str:
    kept = "".join(letter if letter.isalnum() else "_" for letter in name.lower().replace("++", "pp"))
    return "_".join(filter(None, kept.split("_")))


def _lra() -> list[list[str]]:
    """Table 6: the gains of FLARE++ over FLARE, the best row, and the rows that were not run in the one backbone."""
    table = {row["model"]: row for row in quoted.rows("table6_lra")}
    gains = {task: minus(printed(table["FLARE++"][task]), printed(table["FLARE"][task])) for task in TASKS}
    least, largest = (choose(gains, key=lambda task: sum(gains[task])) for choose in (min, max))
    average = minus(printed(table["FLARE++"]["average"]), printed(table["FLARE"]["average"]))
    gain, stated, other = _stated("lra.average")["gain"], _stated("lra.tasks"), _stated("lra.skyformer")["ListOps"]
    fits = agrees(gains[least], stated["least gain"]) == agrees(gains[largest], stated["largest gain"]) == YES
    right = fits and (least, largest) == ("retrieval", "image")
    best = max(table, key=lambda name: float(table[name]["average"]))
    quotes, listops = sum(row["source"] == "quoted" for row in table.values()), table["Skyformer"]["listops"]
    span = f"by {stated['least gain']} (Retrieval) to {stated['largest gain']} (Image)"
    ends = " to ".join(f"{words(gains[task], 2)} ({TASKS[task]})" for task in (least, largest))
    return [
        ["lra.average", f"+{gain} from FLARE to FLARE++", words(average, 2), agrees(average, gain)],
        ["lra.tasks", span, ends, YES if right else NO],
        ["lra.best", "FLARE++ has the best average", f"{best} {table[best]['average']}", YES if best == "FLARE++" else NO],
        ["lra.backbone", "all models share one backbone", f"{quotes} of {len(table)} rows quoted", NO if quotes else YES],
        ["lra.skyformer", f"{listops} on ListOps, quoted", f"{other} in Skyformer's paper", agrees(printed(other), listops)],
    ]  # fmt: skip
