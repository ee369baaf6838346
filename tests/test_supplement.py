"""The supplementary figures on synthetic run folders: what is drawn, what is said to be missing, what is refused."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy
import pytest

from flarepp import record
from flarepp.paper import style
from flarepp.paper.figures import error_distribution, learning_curves
from folders import MODELS, entry, leave

FIGURES = [learning_curves, error_distribution]
DATASETS = ("darcy", "pipe")


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def collected(*entries, scale="quick"):
    return record.records({"suite": "table1", "scale": scale, "entries": list(entries)})


def four(*more, datasets=DATASETS):
    """Records of four models and the constant predictor."""
    errors = {"flarepp_shared": 0.02, "full": 0.05, "flare": 0.0625, "flarepp": 0.03125, "constant": 0.5}
    entries = [leave(model, error, dataset=dataset) for dataset in datasets for model, error in errors.items()]
    return collected(*entries, *more)


@pytest.fixture
def drawing(saved_figure):
    """Build a figure; returns the matplotlib Figure that is saved."""
    return lambda module, records, shown="last": saved_figure(module.build, records, Path("out"), shown=shown, scale="quick")


def lines(axis) -> dict[str, list[float]]:
    """The curves of a panel by model."""
    names = {look.colour: model for model, look in style.LOOKS.items()}
    return {names[line.get_color()]: list(line.get_ydata()) for line in axis.lines if line.get_color() in names}


def below(figure) -> str:
    return " ".join(text.get_text() for text in figure.texts).replace("\n", " ")


@pytest.mark.parametrize("shown, factor", [("last", 1), ("best_test", 1), ("ema", 2)])
def test_a_curve_is_the_test_error_at_the_evaluations(drawing, shown, factor):
    figure = drawing(learning_curves, four(), shown)
    darcy, pipe, legend = figure.axes
    assert [axis.get_title() for axis in figure.axes] == ["Darcy", "Pipe", ""] and darcy.get_yscale() == "log"
    assert lines(darcy) == lines(pipe) and set(lines(darcy)) == {"full", "flare", "flarepp", "flarepp_shared"}
    assert lines(darcy)["flare"] == pytest.approx([90 + 5 * (factor - 1), 6.25 * factor])
    dotted = [line for line in darcy.lines if line.get_linestyle() == ":" and line.get_color() == "#777777"]
    assert [line.get_ydata()[0] for line in dotted] == pytest.approx([50])  # it has no weights
    assert ("averaged" in below(figure)) == (shown == "ema") and "no curve" not in below(figure)
    assert {text.get_text() for text in legend.get_legend().get_texts()} == set(MODELS.values()) - {"Transolver"}


def test_flare_and_flarepp_stand_out(drawing):
    axis = drawing(learning_curves, four()).axes[0]
    widths = {line.get_color(): line.get_linewidth() for line in axis.lines}
    main, rest = [style.LOOKS[model].colour for model in learning_curves.MAIN], ("full", "flarepp_shared")
    assert min(widths[colour] for colour in main) > 2 * max(widths[style.LOOKS[model].colour] for model in rest)


def test_several_seeds_are_a_mean_and_a_band(drawing):
    figure = drawing(learning_curves, collected(*(leave("flare", 0.1 * (seed + 1), seed=seed) for seed in range(3))))
    axis = figure.axes[0]
    assert lines(axis)["flare"] == pytest.approx([90, 20])
    (band,) = axis.collections
    assert {round(float(y), 6) for y in band.get_paths()[0].vertices[:, 1]} == {90, 10, 30}
    assert "mean over n = 3 seeds" in below(figure)


def test_runs_without_a_value_are_named(drawing):
    gone = entry("transolver", absent="not affordable")
    records = four(gone, leave("transolver", 0.1, dataset="pipe", status="diverged"), datasets=("darcy", "pipe"))
    for module in FIGURES:
        figure = drawing(module, records)
        assert "Transolver on Darcy: not affordable; Transolver on Pipe: diverged" in below(figure)
    assert [text.get_text() for axis in figure.axes for text in axis.texts] == ["not affordable", "diverged"]
    assert lines(drawing(learning_curves, records).axes[1])["transolver"] == pytest.approx([90])  # as far as it came


def test_a_seed_that_failed_is_left_out_and_named(drawing):
    records = collected(leave("flare", 0.1), leave("flare", 0.2, seed=1, status="diverged"), leave("flarepp", 0.1))
    figure = drawing(error_distribution, records)
    assert "FLARE on Darcy: 1 of 2 seeds diverged" in below(figure)
    assert medians(figure.axes[0]) == pytest.approx({0: 10, 1: 10})


def medians(axis) -> dict[int, float]:
    (marks,) = (line for line in axis.lines if line.get_marker() == "o")
    return dict(zip(marks.get_ydata(), marks.get_xdata()))


@pytest.mark.parametrize("shown, factor", [("last", 1), ("best_test", 1), ("ema", 2)])
def test_the_median_over_all_cases_is_marked_in_the_order_of_table_1(drawing, shown, factor):
    cases = numpy.array([0.1, 0.9, 1.0, 1.1, 9.0])
    records = four(leave("transolver", 0.2, cases=cases), leave("transolver", 0.4, seed=1, cases=cases))
    figure = drawing(error_distribution, records, shown)
    darcy = figure.axes[0]
    names = ["Full self-attention", "FLARE", "FLARE++", "Transolver", "FLARE++ (shared)"]  # beyond the paper: last
    assert [text.get_text() for text in darcy.get_yticklabels()] == names and darcy.get_ylim() == (4.5, -0.5)
    pooled = numpy.median(numpy.concatenate([20 * cases, 40 * cases]))
    assert medians(darcy) == pytest.approx({place: factor * value for place, value in
                                            enumerate([5, 6.25, 3.125, pooled, 2])})  # fmt: skip
    ends = [paths.get_paths()[0].vertices[:, 0] for paths in darcy.collections]
    assert (min(ends[3]), max(ends[3])) == pytest.approx((2 * factor, 360 * factor))  # no further than the cases
    assert darcy.get_xscale() == "log" and len(darcy.get_xticks()) >= 3 and "of all n = 2 seeds" in below(figure)
    assert figure.axes[1].get_title() == "Pipe" and set(medians(figure.axes[1])) == {0, 1, 2, 4}


@pytest.mark.parametrize("module", FIGURES)
def test_drawn_again_the_bytes_are_the_same_and_nothing_stays_open(module):
    import matplotlib.pyplot

    records, name = four(leave("transolver", 0.1, cases=[1.0])), module.__name__.rpartition(".")[2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for out in ("first", "second"):
            module.build(records, Path(out), shown="last", scale="quick")
    for kind in ("pdf", "png"):
        assert Path(f"first/{name}.{kind}").read_bytes() == Path(f"second/{name}.{kind}").read_bytes()
    assert matplotlib.pyplot.get_fignums() == []
    content = Path(f"first/{name}.pdf").read_bytes()
    assert b"/FontFile2" in content and b"/Type3" not in content


@pytest.mark.parametrize("module", FIGURES)
def test_without_a_run_the_figure_says_so(module, drawing):
    figure = drawing(module, collected(entry("flare", absent="not run"), entry("flarepp", absent="not affordable")))
    assert "FLARE on Darcy: not run; FLARE++ on Darcy: not affordable" in below(figure)
    empty = drawing(module, four().iloc[:0])
    assert "no data" in below(empty)


@pytest.mark.parametrize("module, lost", [(learning_curves, "history.csv"), (error_distribution, "predictions.h5")])
def test_what_a_run_lost_is_named(module, lost):
    records = four()
    (Path(records["run"].iloc[0]) / lost).unlink()
    with pytest.raises(FileNotFoundError, match=lost):
        module.build(records, Path("out"), shown="last", scale="quick")
    assert not Path("out").exists()


@pytest.mark.parametrize("module", FIGURES)
def test_records_of_another_scale_are_refused(module):
    with pytest.raises(ValueError, match="scale 'desk' was asked for"):
        module.build(four(datasets=("darcy",)), Path("out"), shown="last", scale="desk")
