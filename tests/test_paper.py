"""Tables, figures and the ledger on synthetic records: what is shown, what is marked, what is refused."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import numpy
import pandas
import pytest
import yaml

from flarepp import spec
from flarepp.paper import deviations, fields, ledger, quoted, rules, style, typeset
from flarepp.paper.figures import figure4, figure6, figure7
from flarepp.paper.tables import table1, table4, table5
from flarepp.record import COLUMNS, read_json, read_predictions, write_json, write_predictions

LABELS = {
    "full": ("Full self-attention", "reference"),
    "flare": ("FLARE", "ranked"),
    "flarepp": ("FLARE++", "ranked"),
    "transolver": ("Transolver", "ranked"),
    "transolver3": ("Transolver-3", "ranked"),
    "flarepp_shared": ("FLARE++_shared", "beyond"),
    "constant": ("Constant", "trivial"),
}


def entry(
    dataset,
    model,
    error,
    *,
    suite="table1",
    seed=0,
    status="ok",
    depth=2,
    precision="fp32",
    source="generated",
    run=None,
):
    """The record rows of one run; error is a fraction."""
    label, role = LABELS[model]
    base = {
        "suite": suite,
        "run": run or f"runs/{suite}/{dataset}/{model}/B{depth}-{precision}-s{seed}",
        "scale": "quick",
        "dataset": dataset,
        "dataset_label": dataset.capitalize(),
        "model": model,
        "label": label,
        "role": role,
        "num_blocks": None if role == "trivial" else depth,
        "num_latents": 16,
        "precision": precision,
        "seed": seed,
        "status": status,
        "data_source": source,
    }
    if status != "ok":
        return [
            base | {"metric": "status", "value": None, "run": "" if status.startswith("not") else base["run"]}
        ]
    metrics = (
        {"last": error} if role == "trivial" else {"last": error, "ema": 2 * error, "parameter_count": 21_333}
    )
    return [base | {"metric": key, "value": value} for key, value in metrics.items()]


def frame(*entries) -> pandas.DataFrame:
    return pandas.DataFrame([row for rows in entries for row in rows], columns=list(COLUMNS))


def tabular(out: Path, name: str) -> dict[str, str]:
    """The Markdown rows of a table by their first cell."""
    rows = [
        line.strip("| ").split("|")
        for line in (out / f"{name}.md").read_text().splitlines()
        if line.startswith("|")
    ]
    return {row[0].strip(): " | ".join(cell.strip() for cell in row[1:]) for row in rows}


def o_grid(rng, around=36, across=3):
    """Gauss points [N, 2] of an O-grid around a void in the unit square, and the void's radius(angle)."""
    waves, weights = numpy.arange(1, 6), 4 / numpy.sqrt(numpy.arange(1, 6) ** 2 + 9) / numpy.sqrt(numpy.pi)
    cosine, sine = rng.normal(size=(2, 5))

    def radius(angle):
        phase = waves * numpy.asarray(angle)[..., None]
        return 0.2 + 0.2 / (
            1 + numpy.exp((weights * (cosine * numpy.cos(phase) + sine * numpy.sin(phase))).sum(-1))
        )

    gauss = 0.5 + numpy.array([-1, 0, 1]) * numpy.sqrt(0.6) / 2
    angles = 2 * numpy.pi * (numpy.arange(around)[:, None] + gauss).ravel() / around + numpy.pi / 4
    depths = ((numpy.arange(across)[:, None] + gauss) / across).ravel()
    direction = numpy.stack([numpy.cos(angles), numpy.sin(angles)], -1)  # [A, 2]
    square = 0.5 / numpy.abs(direction).max(-1)
    length = radius(angles)[:, None] * (1 - depths) + square[:, None] * depths  # [A, R]
    return (0.5 + length[..., None] * direction[:, None]).reshape(-1, 2), radius


def paper_spec(dataset, model, depth=8, precision="fp32", seed=0) -> dict:
    """A spec with all settings of the paper."""
    data = {"name": dataset, "source": "path", "root": "data", "num_train": 1000, "num_test": 200, "seed": 0}
    own = {"darcy": {"resolution": 85, "solver_resolution": 421}, "elasticity": {"mesh": [36, 3]}}[dataset]
    sizes = {"channel_dim": 128, "num_heads": 8, "num_blocks": depth, "ffn_ratio": 2}
    sizes |= {} if model == "full" else {"num_latents": 128 if dataset == "darcy" else 64}
    norm = {"norm": "rmsnorm" if precision == "fp16" else "layernorm"}
    training = {"steps": 250_000, "batch_size": 2, "lr": 1e-3, "weight_decay": 1e-5, "decay_latents": True}
    training |= {"betas": [0.9, 0.999], "eps": 1e-8, "pct_start": 0.1, "div_factor": 1e4, "final_div_factor": 1e4}
    training |= {"clip_norm": 1.0, "ema_decay": 0.999, "precision": precision, "num_evaluations": 10, "seed": seed}
    training |= {"eval_batch_size": 5, "num_threads": 4, "device": "auto", "checkpoint_seconds": 300}
    return {
        "scale": "paper",
        "dataset": data | own,
        "model": {"name": "backbone", "mixer": model} | sizes | norm,
        "training": training,
    }


def at_paper_scale(records: pandas.DataFrame, root: Path, **changes) -> pandas.DataFrame:
    """Records as of published data at scale `paper`, their run folders made below root with the paper's
    settings.

    changes: other values of settings, {"section__key": value}, in every run.
    """
    records = records.assign(scale="paper", data_source="published")
    records["run"] = [str(root / run) if run else "" for run in records["run"]]
    for row in records[(records["run"] != "") & (records["role"] != "trivial")].drop_duplicates("run").itertuples():
        depth = 8 if row.suite == "table1" else row.num_blocks
        spec = paper_spec(row.dataset, row.model, depth, row.precision, row.seed)
        for key, value in changes.items():
            section, name = key.split("__")
            spec[section][name] = value
        write_json({"status": "ok", "metrics": {}, "spec": spec}, Path(row.run) / "metrics.json")
    return records


@pytest.fixture
def drawings(monkeypatch):
    """The matplotlib figures that are saved, one a build, with their final layout; nothing is rendered."""
    from matplotlib.figure import Figure

    saved = []

    def savefig(self, path, **options):
        Path(path).touch()
        saved.extend([self] if self not in saved else [])

    monkeypatch.setattr(Figure, "savefig", savefig)
    return saved


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Records and run folders of Elasticity and Darcy with predictions of five test cases."""
    root, rng, entries = tmp_path_factory.mktemp("project"), numpy.random.default_rng(0), []
    for dataset in ("elasticity", "darcy"):
        if dataset == "elasticity":
            points, grid = numpy.stack([o_grid(rng)[0] for _ in range(5)]), None
        else:
            axes = numpy.meshgrid(numpy.linspace(0, 1, 12), numpy.linspace(0, 1, 9), indexing="ij")
            points, grid = numpy.tile(numpy.stack(axes, -1).reshape(1, -1, 2), (5, 1, 1)), (12, 9)
        target = 1 + numpy.sin(3 * points[..., :1] + points[..., 1:])
        for model, size in (("full", 0.05), ("flare", 0.1), ("flarepp", 0.07), ("constant", 0.5)):
            run = root / f"runs/table1/{dataset}/{model}/s0"
            cases = [1.0, 5, 3, 2, 4] if model == "flare" else [5.0, 1, 2, 4, 3]  # the medians are not the same case
            noise = size * numpy.array(cases)[:, None, None] * numpy.cos(9 * points[..., :1])
            errors = numpy.linalg.norm(noise, axis=(1, 2)) / numpy.linalg.norm(target, axis=(1, 2))
            attributes = {"dataset": dataset, "data_source": "generated"} | ({"grid": grid} if grid else {})
            write_predictions(
                run,
                points=points,
                target=target,
                predictions={"last": target + noise},
                errors={"last": errors},
                attributes=attributes,
            )
            spec = {
                "dataset": {"name": dataset, "num_train": 96, "num_test": 5, "root": "data"}
                | ({"source": "generate", "mesh": [12, 2]} if grid is None else {"source": "path"}),
                "model": {
                    "name": "backbone",
                    "mixer": model,
                    "channel_dim": 32,
                    "num_heads": 4,
                    "num_blocks": 2,
                    "ffn_ratio": 4 if model == "full" else 2,
                }
                | ({} if model == "full" else {"num_latents": 16}),
                "training": {
                    "steps": 240,
                    "batch_size": 4,
                    "lr": 1e-3,
                    "weight_decay": 1e-5,
                    "seed": 0,
                    "betas": [0.9, 0.999],
                    "gradient_weight": 0.1 if dataset == "darcy" else 0,
                    "precision": "fp32",
                },
            }
            write_json({"status": "ok", "metrics": {}, "spec": spec}, run / "metrics.json")
            entries.append(entry(dataset, model, float(errors.mean()), run=str(run)))
    return root, frame(*entries)


def test_three_significant_digits_and_settings():
    values = {
        0.38412: "0.384",
        1.2: "1.20",
        9.996: "10.0",
        12.345: "12.3",
        104.4: "104",
        1234.0: "1.23e+3",
        999.7: "1.00e+3",
        1e12: "1.00e+12",
        1e-7: "1.00e-7",
        0.000384: "0.000384",
        0.0: "0",
    }
    assert [typeset.spread(*each) for each in ((2.828, "4.00"), (0.02, "12.3"), (0.4, "123"), (0.0, "1.00"))] == [
        "2.83",
        "0.02",
        "0.4",
        "0.00",
    ]
    assert {value: typeset.three_digits(value) for value in values} == values
    assert [typeset.plain(value) for value in (1e-5, 1e4, True, None, [0.9, 0.999], 3)] == [
        "1e-5",
        "10000",
        "yes",
        "none",
        "0.9, 0.999",
        "3",
    ]


def test_table1_ranks_by_what_is_shown(tmp_path):
    records = frame(
        entry("darcy", "full", 0.001),
        entry("darcy", "flare", 0.012341),
        entry("darcy", "flarepp", 0.012339),
        entry("darcy", "transolver", 0.0201),
        entry("darcy", "flarepp_shared", 0.002),
        entry("darcy", "constant", 0.5),
    )
    table1.build(records, tmp_path, shown="last", compared="last", scale="quick")
    rows = tabular(tmp_path, "table1")
    assert "**1.23**" in rows["FLARE"] and "**1.23**" in rows["FLARE++"]  # equal in the digits shown
    assert "<u>2.01</u>" in rows["Transolver"]
    for unranked in ("Full self-attention<sup>a</sup>", "FLARE++\\_shared", "Constant"):
        assert "**" not in rows[unranked] and "<u>" not in rows[unranked]
    assert rows["FLARE"].endswith("0.76")  # the paper's value, in its own column
    assert "not the paper's numbers" in (tmp_path / "table1.md").read_text()
    latex = (tmp_path / "table1.tex").read_text()
    assert r"FLARE++\_shared" in latex and r"in \% on" in latex and r"\textbf{1.23}" in latex
    tidy = pandas.read_csv(tmp_path / "table1.csv").set_index("model")
    assert tidy.loc["flare", "error_percent"] == pytest.approx(1.2341)
    assert tidy.loc["flare", "paper_error_percent_published_data"] == 0.76


def test_table1_puts_the_compared_error_beside_the_papers(tmp_path):
    records = frame(entry("darcy", "flare", 0.01), entry("darcy", "full", None, status="oom"), entry("darcy", "constant", 0.5))
    table1.build(records, tmp_path, shown="last", compared="ema", scale="quick")
    rows = tabular(tmp_path, "table1")
    assert [cell.strip() for cell in rows["FLARE"].split("|")[-3:]] == ["**1.00**", "2.00", "0.76"]
    assert rows["Constant"].split("|")[-2].strip() == ""
    text = (tmp_path / "table1.md").read_text()
    assert "Darcy (averaged weights)" in text and "not ranked: averaged (EMA) weights" in text


def test_table1_names_every_empty_cell_and_the_seeds(tmp_path):
    records = frame(
        entry("darcy", "flare", 0.01),
        entry("darcy", "flare", 0.03, seed=1),
        entry("darcy", "flarepp", 0.005),
        entry("darcy", "flarepp", None, seed=1, status="diverged"),
        entry("darcy", "transolver", None, status="oom"),
        entry("darcy", "full", None, status="not affordable"),
        entry("pipe", "full", None, status="not run"),
    )
    table1.build(records, tmp_path, shown="ema", compared="ema", scale="quick")
    text, rows = (tmp_path / "table1.md").read_text(), tabular(tmp_path, "table1")
    assert "4.00 ± 2.83" in rows["FLARE"]  # EMA values are twice the last ones; n - 1
    assert "n = 2 seeds" in text
    for reason in (
        "1 of 2 seeds diverged: mean of the other 1, not ranked",
        "out of memory",
        "not affordable",
        "not run",
        "not affordable (paper)",  # the paper's own reason, under its Pipe
    ):
        assert f"{reason}." in text
    assert "**" not in rows["FLARE++"] and "nan" not in text.lower()


def test_table1_keeps_the_papers_columns_in_the_order_of_ours(tmp_path):
    records = frame(entry("elasticity", "flare", 0.01), entry("darcy", "flare", 0.02))
    table1.build(records, tmp_path, shown="last", compared="last", scale="quick")
    rows = tabular(tmp_path, "table1")
    assert [cell.strip() for cell in rows["FLARE"].split("|")[-4:]] == ["**1.00**", "**2.00**", "0.64", "0.76"]
    heading = rows["model"].split("|")
    assert "Elasticity (paper" in heading[-2] and "Darcy (paper" in heading[-1]


def test_absurd_errors_are_shown_but_not_ranked(tmp_path):
    records = frame(
        entry("darcy", "flare", 1e10), entry("darcy", "flarepp", 1e-9), entry("darcy", "transolver", 9.0)
    )
    table1.build(records, tmp_path, shown="last", compared="last", scale="quick")
    rows, text = tabular(tmp_path, "table1"), (tmp_path / "table1.md").read_text()
    assert rows["FLARE"].split("|")[1].strip() == "1.00e+12<sup>a</sup>" and "**1.00e-7**" in rows["FLARE++"]
    assert "<u>900</u>" in rows["Transolver"] and "above 1000 %, counted as failed, not ranked." in text
    sweeping = sweep()
    sweeping.loc[(sweeping["dataset"] == "darcy") & (sweeping["metric"] == "last"), "value"] = 1e10
    assert "runs failed" in verdicts(sweeping, tmp_path).loc["prec.order.darcy", "verdict"]


def test_table1_refuses_what_it_cannot_average(tmp_path):
    with pytest.raises(ValueError, match="more than one configuration of FLARE on Darcy"):
        table1.build(
            frame(entry("darcy", "flare", 0.1), entry("darcy", "flare", 0.1, depth=4)),
            tmp_path,
            shown="last",
            compared="last",
            scale="quick",
        )
    with pytest.raises(ValueError, match="no metric 'best_test'"):
        table1.build(frame(entry("darcy", "flare", 0.1)), tmp_path, shown="last", compared="best_test", scale="quick")
    with pytest.raises(ValueError, match="allowed: last, ema, best_test"):
        table1.build(frame(), tmp_path, shown="best", compared="best", scale="quick")
    assert not list(tmp_path.iterdir())


def test_stamp_is_absent_only_for_the_papers_experiment():
    assert quoted.stamp("paper", ["published"]) == ""
    assert "generated" in quoted.stamp("paper", ["generated"]) and "quick" in quoted.stamp(
        "quick", ["published"]
    )


@pytest.mark.parametrize("build", [table1, table4, table5, figure4, figure6, figure7, ledger])
@pytest.mark.parametrize("scales", [["quick"], ["paper", "quick"], [None]])
def test_records_of_another_scale_are_refused(tmp_path, build, scales):
    runs = [entry("darcy", "flare", 0.1, seed=seed) for seed in range(len(scales))]
    records = pandas.concat([frame(run).assign(scale=scale) for run, scale in zip(runs, scales)])
    words = "scale 'paper' was asked for, but the records are of scale " + ", ".join(f"'{each}'" for each in scales)
    compared = {"compared": "last"} if build in (table1, table4, table5) else {}
    with pytest.raises(ValueError, match=words):
        build.build(records, tmp_path, shown="last", scale="paper", **compared)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("dataset__num_train", 16, "epochs 31250 (500), training samples 16 (1000)"),
        ("dataset__resolution", 29, "tokens 841 (7225)"),
        ("model__channel_dim", 16, "width C 16 (128)"),
        ("model__num_latents", 16, "latents 16 (128)"),
        ("model__norm", "rmsnorm", "normalisation rmsnorm (layernorm)"),
        ("training__steps", 1500, "epochs 3 (500)"),
        ("training__lr", 2e-3, "peak learning rate 0.002 (1e-3)"),
        ("training__betas", [0.9, 0.99], "AdamW betas 0.9, 0.99 (0.9, 0.999)"),
        ("training__clip_norm", None, "clipping of the gradient's global norm none (1.0)"),
        ("training__ema_decay", 0.99, "decay of the averaged (EMA) weights 0.99 (0.999)"),
        ("training__num_evaluations", 2, "evaluations on the test set during a run 2 (10)"),
        ("training__precision", "fp16", "precision fp16 (fp32)"),
        ("model__mixer", "flare", "mixer flare (flarepp)"),
        ("model__seed_norm", False, "seed norm no (yes)"),
        ("model__qk_norm", True, "qk norm yes (no)"),
        ("training__gradient_weight", 0, "gradient weight 0 (0.1)"),
        ("training__seed", 3, ""),
        ("training__num_threads", 1, ""),
        ("training__device", "cpu", ""),
        ("training__eval_batch_size", 50, ""),
        ("training__checkpoint_seconds", 5, ""),
    ],
)
def test_settings_that_are_not_the_papers_are_named(tmp_path, key, value, words):
    records = at_paper_scale(frame(entry("darcy", "flarepp", 0.1), entry("darcy", "constant", 0.5)), tmp_path)
    assert deviations.words(deviations.find(records, "table1", "paper").values()) == ""
    records = at_paper_scale(records, tmp_path, **{key: value})
    assert deviations.words(deviations.find(records, "table1", "paper").values()) == words


def test_what_a_sweep_varies_is_no_deviation(tmp_path):
    records = at_paper_scale(sweep(), tmp_path)
    found = deviations.find(records, "figure4", "paper")
    assert len(found) == 24 and not any(found.values())
    one = next(run for run in found if "fp16" in run)
    spec = read_json(Path(one) / "metrics.json")["spec"]
    spec["model"]["norm"] = "layernorm"
    write_json({"status": "ok", "metrics": {}, "spec": spec}, Path(one) / "metrics.json")
    assert deviations.find(records, "figure4", "paper")[one] == ["normalisation layernorm (rmsnorm)"]


@pytest.mark.parametrize("suite", ["table1", "figure4"])
def test_our_scale_paper_has_the_papers_settings(tmp_path, suite):
    config = yaml.safe_load((Path(__file__).parents[1] / "config.yaml").read_text())
    plan = spec.expand(config | {"scale": "paper"})
    rows = [each | {"suite": suite, "run": str(tmp_path / each["run"])} for each in plan.suites[suite] if each["run"]]
    for path in {each["run"] for each in plan.suites[suite] if each["role"] != "trivial"}:
        write_json({"status": "ok", "metrics": {}, "spec": plan.runs[path].spec}, tmp_path / path / "metrics.json")
    found = deviations.find(pandas.DataFrame(rows, columns=list(COLUMNS)), suite, "paper")
    assert len(found) >= 10 and deviations.words(found.values()) == ""


def test_many_deviations_are_counted_and_lost_folders_refused(tmp_path):
    many = [f"setting {number}" for number in range(9)]
    assert deviations.words([many[:5], many]) == ", ".join([*many[:8], "1 more"])
    with pytest.raises(FileNotFoundError):
        deviations.find(frame(entry("darcy", "flare", 0.1)), "table1", "paper")


@pytest.mark.parametrize("width", [128, 16])
def test_only_the_papers_settings_drop_the_stamp(tmp_path, drawings, width):
    changes = {} if width == 128 else {"model__channel_dim": width}
    sweeping = at_paper_scale(sweep(), tmp_path / "runs", **changes)
    accuracy = frame(*(entry(dataset, "flarepp", 0.1, depth=8) for dataset in ("elasticity", "darcy")))
    accuracy = at_paper_scale(accuracy, tmp_path / "runs", **changes)
    for table in (table1, table4):
        table.build(accuracy, tmp_path, shown="last", compared="last", scale="paper")
    figure4.build(sweeping, tmp_path, shown="last", scale="paper")
    texts = [(tmp_path / f"{name}.md").read_text() for name in ("table1", "table4")]
    texts += ["".join(text.get_text() for text in drawing.texts) for drawing in drawings]
    assert len(texts) == 3
    for text in texts:
        assert ("settings differ from the paper's: width C 16 (128)" in text.replace("\n", " ")) == (width == 16)


def test_tables_4_and_5_show_the_specs_that_ran(project, tmp_path):
    for table in (table4, table5):
        table.build(project[1], tmp_path, shown="last", compared="last", scale="quick")
    shared, own = tabular(tmp_path, "table4"), tabular(tmp_path, "table5")
    assert shared["width C"] == "32 | 128" and shared["head width D = C / H"] == "8 | 16"
    assert (
        shared["FFN ratio"] == "2<sup>a</sup> | 2"
        and "Full self-attention: 4." in (tmp_path / "table4.md").read_text()
    )
    assert own["latents (slices)"] == "16 | 16 | 64 | 128" and own["epochs"] == "10 | 10 | 500 | 500"
    assert own["tokens"] == "972 | 108 | 972 | 7225" and own["test samples"] == "5 | 5 | 200 | 200"
    assert own["data made by"] == "our solvers | published files" and "source" not in own
    assert own["elements around, across"] == "12, 2 | --"
    assert own["gradient weight"] == "0 | 0.1" and "gradient weight" not in shared


def test_median_case_is_the_lower_median_and_the_lowest_index():
    assert fields.median_case(numpy.array([5.0, 1, 2, 4, 3])) == 4
    assert fields.median_case(numpy.array([4.0, 1, 2, 3])) == 2
    assert fields.median_case(numpy.array([9.0, 2, 2, 2, 1])) == 1


def test_triangles_fill_the_material_and_nothing_else():
    rng = numpy.random.default_rng(1)
    for _ in range(20):
        points, radius = o_grid(rng)
        mesh = fields.triangulate(points)
        corners = points[mesh.triangles]
        middle = corners.mean(axis=1) - 0.5
        assert (numpy.hypot(*middle.T) > radius(numpy.arctan2(middle[:, 1], middle[:, 0]))).all()
        first, second = corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]
        area = numpy.abs(first[:, 0] * second[:, 1] - first[:, 1] * second[:, 0]).sum() / 2
        material = 1 - (radius(numpy.linspace(0, 2 * numpy.pi, 2000)) ** 2 / 2).mean() * 2 * numpy.pi
        assert area > 0.9 * material  # the points keep off the edges
        assert numpy.unique(mesh.triangles).size == len(points)


def test_error_scale_is_the_larger_percentile():
    small, large = numpy.linspace(-1, 1, 1001), numpy.linspace(-3, 2, 1001)
    assert fields.error_limit([small, large]) == pytest.approx(numpy.percentile(numpy.abs(large), 99.5))


@pytest.mark.parametrize("figure", [figure6, figure7])
def test_field_figures_are_drawn_alike_every_time(project, tmp_path, figure):
    name = figure.__name__.rsplit(".", 1)[1]
    for copy in ("a", "b"):
        figure.build(project[1], tmp_path / copy, shown="last", scale="quick")
    for kind in ("pdf", "png"):
        first, second = ((tmp_path / copy / f"{name}.{kind}").read_bytes() for copy in ("a", "b"))
        assert first == second and len(first) > 10_000
    assert b"CreationDate" not in (tmp_path / "a" / f"{name}.pdf").read_bytes()
    assert len(list((tmp_path / "a").iterdir())) == 2  # no temporary file left


@pytest.mark.parametrize("figure, dataset", [(figure6, "elasticity"), (figure7, "darcy")])
def test_field_figures_draw_the_median_case_of_flarepp(project, tmp_path, drawings, figure, dataset):
    figure.build(project[1], tmp_path, shown="last", scale="quick")
    found = {model: read_predictions(project[0] / f"runs/table1/{dataset}/{model}/s0", "last") for model in fields.MODELS}
    case = 4
    assert fields.median_case(found["flarepp"]["error"]) == case != fields.median_case(found["flare"]["error"])
    truth = found["flarepp"]["target"][case, :, 0]
    predictions = [each["prediction"][case, :, 0] for each in found.values()]
    expect = [truth, *predictions, *(prediction - truth for prediction in predictions)]
    axes = drawings[0].axes[:6]
    assert [axis.get_title() for axis in axes] == [
        "reference", "FLARE", "FLARE++", "", "FLARE − reference", "FLARE++ − reference"
    ]  # fmt: skip
    meshes = [axis.collections[0] for axis in axes if axis.collections]
    for mesh, values in zip(meshes, expect, strict=True):
        numpy.testing.assert_allclose(numpy.ravel(mesh.get_array()), values)
        numpy.testing.assert_allclose(_vertices(mesh), found["flarepp"]["points"][case])
    both = numpy.concatenate([truth, *predictions])
    limit = fields.error_limit(expect[3:])
    assert [mesh.get_clim() for mesh in meshes] == [pytest.approx((both.min(), both.max()))] * 3 + [
        pytest.approx((-limit, limit))
    ] * 2
    assert truth.min() > both.min() or truth.max() < both.max()
    assert "test case 4 (0 to 4)" in axes[3].texts[0].get_text() and "seed" not in axes[3].texts[0].get_text()


def _vertices(mesh) -> numpy.ndarray:
    """Where the values of a coloured mesh stand, [N, 2]."""
    if hasattr(mesh, "get_coordinates"):
        return mesh.get_coordinates().reshape(-1, 2)
    return numpy.stack([mesh._triangulation.x, mesh._triangulation.y], -1)


def test_field_figure_names_the_seed_that_is_drawn(project, tmp_path, drawings):
    again = project[1].assign(seed=1)
    figure7.build(pandas.concat([again, project[1]]), tmp_path, shown="last", scale="quick")
    assert drawings[0].axes[3].texts[0].get_text().endswith("seed 0, the first of 2")


def test_field_figure_is_stamped_when_settings_differ(project, tmp_path, drawings):
    records = project[1].assign(scale="paper")
    figure7.build(records[records["dataset"] == "darcy"], tmp_path, shown="last", scale="paper")
    assert "settings differ from the paper's: width C 32 (128)" in drawings[0].texts[-1].get_text().replace("\n", " ")
    figure7.build(project[1], tmp_path, shown="last", scale="quick")
    assert "settings differ" not in drawings[1].texts[-1].get_text()


@pytest.mark.parametrize("gone", ["flare", "flarepp"])
def test_field_figure_says_what_diverged(project, tmp_path, drawings, gone):
    records = project[1].copy()
    records.loc[records["model"] == gone, ["status", "value"]] = ["diverged", None]
    figure7.build(records, tmp_path, shown="best_test", scale="quick")
    (drawing,) = drawings
    words = [text.get_text() for place in (drawing, *drawing.axes) for text in place.texts]
    fallback = "no case was chosen: FLARE++ on Darcy diverged"
    assert words.count("diverged") == (2 if gone == "flare" else 0) and (fallback in words) == (gone == "flarepp")


def sweep(**failed) -> pandas.DataFrame:
    """Records of suite figure4 at depths 2 and 4; failed: {"dataset": status} of FLARE in FP16 at 4."""
    size = {"full": 0.05, "flare": 0.09, "flarepp": 0.06}
    return frame(
        *(
            entry(
                dataset,
                model,
                size[model] / depth * (1.2 if precision == "fp16" else 1),
                suite="figure4",
                depth=depth,
                precision=precision,
                status=failed.get(dataset, "ok")
                if (model, precision, depth) == ("flare", "fp16", 4)
                else "ok",
            )
            for dataset in ("elasticity", "darcy")
            for model in size
            for precision in ("fp32", "fp16")
            for depth in (2, 4)
        )
    )


def lines(axis) -> dict[str, list[float]]:
    """The plotted values of every mixer's line in a panel, by its colour."""
    names = {look.colour: model for model, look in style.LOOKS.items()}
    return {
        names[str(bar[0].get_color())]: [float(value) for value in bar[0].get_ydata()] for bar in axis.containers
    }


def test_figure4_draws_fp32_above_fp16_and_marks_what_failed(tmp_path, drawings):
    records = sweep(darcy="diverged")
    wild = (records["dataset"] == "elasticity") & (records["model"] == "full") & (records["num_blocks"] == 2)
    records.loc[wild & (records["precision"] == "fp16") & (records["metric"] == "last"), "value"] = 7.0
    figure4.build(records, tmp_path, shown="last", scale="quick")
    axes = numpy.reshape(drawings[0].axes, (2, 2))
    assert [axis.get_title() for axis in axes.flat] == [
        f"{dataset}, {precision}" for precision in ("FP32", "FP16") for dataset in ("Elasticity", "Darcy")
    ]
    expect = {"full": [2.5, 1.25], "flare": [4.5, 2.25], "flarepp": [3.0, 1.5]}
    for column in (0, 1):
        assert lines(axes[0, column]) == {model: pytest.approx(values) for model, values in expect.items()}
    gap = pytest.approx([numpy.nan, 1.5], nan_ok=True)
    assert lines(axes[1, 0])["full"] == gap and lines(axes[1, 1])["flare"][0] == pytest.approx(5.4)
    assert numpy.isnan(lines(axes[1, 1])["flare"][1])
    assert [[text.get_text() for text in axis.texts] for axis in axes.flat] == [[], [], ["700 %"], ["diverged"]]
    assert axes[1, 0].get_ylim()[1] < 10


@pytest.mark.parametrize("factor", [1.0, 0.3])  # a linear and a logarithmic axis
@pytest.mark.parametrize("datasets", [["elasticity"], ["elasticity", "darcy"]])
def test_figure4_writes_each_reason_once_and_clear_of_everything(tmp_path, drawings, datasets, factor):
    records = deep_sweep()
    records = records[records["dataset"].isin(datasets)]
    full = records["model"] == "full"
    records["value"] = records["value"].mask(full, factor * records["value"])
    records["value"] = records["value"].mask(full & (records["num_blocks"] == 4), 7.0)
    for model, status in (("flarepp", "not affordable"), ("full", "diverged")):
        gone = (records["model"] == model) & ((model == "flarepp") | (records["num_blocks"] == 8))
        records.loc[gone & (records["precision"] == "fp16"), ["status", "value"]] = [status, None]
    figure4.build(records, tmp_path, shown="last", scale="quick")
    drawing = drawings[0]
    renderer = drawing.canvas.get_renderer()
    assert drawing.get_figwidth() >= 5.5
    assert drawing.axes[0].get_yscale() == ("linear" if factor == 1 else "log")
    for axis in drawing.axes[len(datasets) :]:
        assert [text.get_text() for text in axis.texts] == ["700 %, diverged", "not affordable"]
        inside, top = axis.get_window_extent(), numpy.nanmax(list(lines(axis).values()))
        boxes = [text.get_window_extent(renderer) for text in axis.texts]
        for box in boxes:
            assert inside.x0 < box.x0 and box.x1 < inside.x1 and box.y1 < inside.y1
            assert box.y0 > axis.transData.transform((2, top))[1]
        assert not boxes[0].overlaps(boxes[1])
    stamp, foot = (text.get_window_extent(renderer) for text in drawing.texts)
    page, legend = drawing.bbox, drawing.legends[0].get_window_extent(renderer)
    assert not stamp.overlaps(foot) and max(stamp.x1, foot.x1, legend.x1) < page.x1 and legend.x0 > 0
    below = min(axis.get_tightbbox(renderer).y0 for axis in drawing.axes)
    assert stamp.y1 <= foot.y0 and foot.y1 <= below and legend.y1 < page.y1


def test_figure4_writes_a_reason_at_the_last_depth_to_its_left(tmp_path, drawings):
    figure4.build(sweep(elasticity="oom", darcy="not affordable"), tmp_path, shown="last", scale="quick")
    axes = drawings[0].axes[2:]
    for axis, words in zip(axes, ("out of memory", "not affordable")):
        (text,) = axis.texts
        assert text.get_text() == words
        box, mark = text.get_window_extent(drawings[0].canvas.get_renderer()), axis.transData.transform((4, 1))[0]
        assert axis.get_window_extent().x0 < box.x0 and box.x1 < mark


def test_figure4_says_which_seeds_failed_and_what_the_bars_are(tmp_path, drawings):
    seeds = [sweep().assign(seed=seed) for seed in range(3)]
    lost = (seeds[1][["dataset", "model", "precision"]] == ["darcy", "flarepp", "fp16"]).all(axis=1)
    seeds[1].loc[lost & (seeds[1]["num_blocks"] == 4), ["status", "value"]] = ["diverged", None]
    figure4.build(pandas.concat(seeds), tmp_path, shown="last", scale="quick")
    foot = drawings[0].texts[1].get_text().replace("\n", " ")
    assert "n = 2 to 3 seeds, mean ± standard deviation (n − 1)" in foot
    assert "FLARE++ on Darcy, B = 4, fp16: 1 of 3 seeds diverged" in foot
    rings = [
        [line.get_xydata().tolist() for line in axis.lines if line.get_markersize() == 10] for axis in drawings[0].axes
    ]
    assert rings == [[], [], [], [[[4, pytest.approx(1.8)]]]]
    assert "not all seeds (see below)" in [text.get_text() for text in drawings[0].legends[0].get_texts()]


def test_figure4_is_drawn_from_no_records(tmp_path):
    figure4.build(frame(), tmp_path, shown="last", scale="quick")
    assert (tmp_path / "figure4.png").stat().st_size > 1_000


def verdicts(records, tmp_path, scale="quick"):
    ledger.build(records, tmp_path, shown="last", scale=scale)
    return pandas.read_csv(tmp_path / "ledger.csv", keep_default_na=False).set_index("id")


def test_ledger_lists_every_claim_and_judges_none_on_generated_data(tmp_path):
    rows = verdicts(sweep(), tmp_path)
    assert len(rows) == 37
    assert rows.loc["prec.order.darcy", "verdict"] == "not comparable (scale quick, generated data)"
    assert rows.loc["prec.order.darcy", "measured"].startswith("lower in 4 of 4 cells, change -33 to -33 %")
    assert rows.loc["prec.full.darcy.b2", "measured"] == "+20 %"
    assert rows.loc["prec.full.airfoil.b8", "measured"] == "missing: Airfoil"
    assert rows.loc["lra.best", "verdict"] == "not run" and "table6" in rows.loc["lra.best", "measured"]
    assert (rows.loc["t1.best", ["verdict", "n"]] == ["not run", 0]).all()
    assert set(rows["verdict"].str.split(" (", regex=False).str[0]) == {"not comparable", "not run"}
    assert (tmp_path / "ledger.md").exists() and r"prec.full.darcy.b2" in (
        tmp_path / "ledger.tex"
    ).read_text()


def deep_sweep(**failed) -> pandas.DataFrame:
    """`sweep` with the runs at depth 4 again at depth 8."""
    records = sweep(**failed)
    again = records[records["num_blocks"] == 4]
    runs = again["run"].str.replace("B4", "B8")
    return pandas.concat([records, again.assign(num_blocks=8, run=runs)])


def test_ledger_judges_published_data_at_paper_scale(tmp_path):
    rows = verdicts(at_paper_scale(deep_sweep(), tmp_path), tmp_path, "paper")
    assert rows.loc["prec.order.darcy", ["verdict", "n"]].tolist() == ["reproduced", 1]
    assert rows.loc["prec.full.darcy.b2", "verdict"] == "not reproduced"  # +20 % is not +82 %
    assert rows.loc["prec.band", "verdict"] == "not run" and "Airfoil" in rows.loc["prec.band", "measured"]
    assert "not the paper's" not in (tmp_path / "ledger.md").read_text()
    rows = verdicts(at_paper_scale(sweep(darcy="diverged"), tmp_path), tmp_path, "paper")
    assert rows.loc["prec.order.darcy", "verdict"] == "not comparable (1 needed run failed)"
    assert "FLARE on Darcy, B = 4, fp16: diverged" in rows.loc["prec.order.darcy", "measured"]
    assert rows.loc["prec.order.darcy", "n"] == 0


def test_ledger_judges_no_run_with_other_settings(tmp_path):
    records = at_paper_scale(deep_sweep(), tmp_path, model__channel_dim=16, training__steps=1500)
    rows = verdicts(records, tmp_path, "paper")
    words = "settings differ: width C 16 (128), epochs 3 (500)"
    assert rows.loc["prec.order.darcy", "verdict"] == f"not comparable ({words})"
    assert "settings differ from the paper's: width C 16 (128)" in (tmp_path / "ledger.md").read_text()
    assert not rows["verdict"].str.contains("reproduced").any()


def test_ledger_counts_the_fewest_seeds_and_names_cells_as_they_are(tmp_path):
    again = sweep()[lambda rows: rows["model"] == "flare"].assign(seed=1)
    again["run"] = again["run"].str.replace("s0", "s1")
    rows = verdicts(pandas.concat([sweep(), again]), tmp_path)
    assert rows.loc["prec.order.darcy", "n"] == 1 and "change -33 to -33" in rows.loc["prec.order.darcy", "measured"]
    records = frame(entry("darcy", "flare", 0.1), entry("darcy", "flarepp", None, status="diverged", depth=8))
    measured = verdicts(records, tmp_path).loc["t1.vs_flare", "measured"]
    assert measured.startswith("FLARE++ on Darcy, B = 8, fp32: diverged; missing:")


def errors(**mean) -> pandas.DataFrame:
    """Cells on one dataset for a rule."""
    rows = [{"model": model, "mean": value} for model, value in mean.items()]
    return pandas.DataFrame(rows).assign(dataset="drivaerml", dataset_label="DrivAerML", num_blocks=0, precision="")


def test_the_strongest_other_is_ahead_of_all_it_leads():
    cell = errors(set_transformer=2.0, transolver=1.0, transolver3=3.0, flarepp=0.5)
    ask = {"model": "set_transformer", "apart_from": ["flarepp"], "count": 1, "leads_on": "drivaerml"}
    measured, holds = rules.strongest_other(cell, leads=["transolver", "transolver3"], **ask)
    assert not holds and measured.endswith("; not ahead on DrivAerML")
    best = cell.assign(mean=[0.9, 1.0, 3.0, 0.5])
    measured, holds = rules.strongest_other(best, leads=["transolver", "transolver3"], **ask)
    assert holds and measured.endswith("; ahead on DrivAerML")


def test_no_change_has_no_sign():
    cell = errors(flare=1.0, flarepp=1.001)
    small = rules.mean_reduction(pandas.concat([cell, cell.assign(dataset="b")]), "flarepp", "flare", 24, 5)[0]
    assert small.startswith("-0.1 % (0 to 0)")
    measured = rules.better_on(errors(flare=1.0, flarepp=0.999), "flarepp", "flare", ["drivaerml"])[0]
    assert measured == "DrivAerML 0 %"


def test_paper_agrees_with_itself_where_it_does():
    agrees = {row[0]: row[3] for row in ledger.consistency(ledger.read_claims())}
    assert [name for name, word in agrees.items() if word == "no"] == ["t1.workspace"] and len(agrees) == 7
    mean = {row[0]: row[2] for row in ledger.consistency(ledger.read_claims())}
    assert mean["t1.vs_flare"].startswith("24.3 % (9 to 41)") and mean["t1.vs_t3"].startswith(
        "31.3 % (18 to 44)"
    )


def test_ledger_errors_name_the_claim(tmp_path):
    claim = next(each for each in ledger.read_claims() if each["id"] == "prec.order.darcy")
    with pytest.raises(ValueError, match="prec.order.darcy.*nearest: 'order_at_every_depth'"):
        ledger.build(
            sweep(), tmp_path, shown="last", scale="quick", claims=[claim | {"rule": "order_at_each_depth"}]
        )
    with pytest.raises(ValueError, match="prec.order.darcy.*missing a required argument: 'against'"):
        ledger.build(
            sweep(), tmp_path, shown="last", scale="quick", claims=[claim | {"with": {"model": "flare"}}]
        )
    wrong = tmp_path / "claims.yaml"
    wrong.write_text("- {id: x, place: p, statement: s, paper: v, needs: {suite: t}, rul: r}\n")
    with pytest.raises(ValueError, match="claim x: rul is unknown"):
        ledger.read_claims(wrong)


def test_paper_layer_imports_record_only_and_never_torch():
    folder = Path(ledger.__file__).parent
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("flarepp"):
                assert node.module == "flarepp.record" or node.module.startswith("flarepp.paper"), (
                    path,
                    node.module,
                )
    names = [
        ".".join(path.relative_to(folder).with_suffix("").parts)
        for path in folder.rglob("*.py")
        if path.stem != "__init__"
    ]
    code = f"import sys\nfor name in {names}: __import__('flarepp.paper.' + name)\n"
    code += "assert not {'torch', 'matplotlib.pyplot'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
