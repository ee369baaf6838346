"""Figure 5, its tables and its claims on records of cells that were written by hand."""

from __future__ import annotations

import math
import shutil
import sys
from pathlib import Path

import numpy
import pandas
import pytest
import yaml

from flarepp import __main__, record, spec
from flarepp.paper import consistency, cost, deviations, ledger, quoted, scaling, style, typeset
from flarepp.paper.figures import figure5
from flarepp.paper.rules import steps
from flarepp.paper.tables import figure5_cells, operations

LABELS = {"full": "Full self-attention", "transolver": "Transolver", "transolverpp": "Transolver++",
          "transolver3": "Transolver-3", "flare": "FLARE", "flarepp": "FLARE++"}  # fmt: skip
FORMULAS = {"full": "4 C^2 + 2 N C", "transolver": "3 C^2 + 3 M C", "transolverpp": None, "transolver3": "3 H M C",
            "flare": "3 C^2 + 4 M C", "flarepp": "5 C^2 + 6 M C"}  # fmt: skip
DEVICES = {"cpu": "Some CPU", "cuda": "NVIDIA H100 80GB HBM3"}
SMALL = {"tokens": (1024, 4096, 16384, 65536), "latents": (64, 128), "scale": "quick", "device_type": "cpu"}
LARGE = {"tokens": (1000, 50_000, *range(100_000, 1_000_001, 100_000)), "latents": (64, 128, 256), "scale": "paper",
         "device_type": "cuda"}  # fmt: skip
GONE = {"status": "not run", "message": "predicted 83 s a step, above max_step_seconds 60"}


@pytest.fixture(autouse=True)
def folder_of_runs(tmp_path, monkeypatch):
    """Where the relative run folders lie."""
    monkeypatch.chdir(tmp_path)


def cell_spec(size, model, tokens, latents) -> dict:
    """A spec with the settings of the paper; at other scales one block in FP32."""
    options = {"name": "backbone", "mixer": model, "channel_dim": 128, "num_heads": 8, "num_blocks": 8, "ffn_ratio": 4,
               "norm": "rmsnorm", "qk_norm": False} | ({} if latents is None else {"num_latents": latents})  # fmt: skip
    settings = {"num_tokens": tokens, "batch_size": 1, "precision": "fp16", "warmup_steps": 10, "timed_steps": 30,
                "max_seconds": 2, "max_step_seconds": 60, "num_threads": 2, "device": size["device_type"], "compile": True,
                "seed": 0}  # fmt: skip
    if size["scale"] != "paper":
        options |= {"num_blocks": 1, "norm": "layernorm"}
        settings |= {"precision": "fp32", "compile": False}
    return {"scale": size["scale"], "model": options, "cost": settings}


def counted(model, tokens, latents) -> float:
    """Multiply-adds of a mixer per block and token."""
    width, rank = 128, latents or 0
    return {"full": 4 * width**2 + 2 * tokens * width, "transolver": 3 * width * (width + rank),
            "transolver3": 24 * rank * width, "transolverpp": 2 * width**2 + 4 * rank * width + 8 * rank,
            "flare": 3 * width**2 + 4 * rank * width, "flarepp": 5 * width**2 + 6 * rank * width}[model]  # fmt: skip


def measured(model, tokens, latents) -> dict:
    """Metrics that agree with all that the paper says: time and memory linear in N, but for the time of full attention."""
    rank = latents or 0
    step = {"flare": 1.0, "flarepp": 1.46 - 0.0002 * rank, "transolver3": 1.05, "transolver": 1.2, "transolverpp": 1.3,
            "full": tokens / 3500}[model] * tokens / 1000  # fmt: skip
    memory = {"flare": 1.0, "flarepp": 1.18, "transolver3": 0.83 + 0.0128125 * rank, "transolver": 0.9 + 0.005 * rank,
              "transolverpp": 1.3 + 0.005 * rank, "full": 0.95}[model] * (20 + 0.032 * tokens)  # fmt: skip
    return {"step_ms": step, "step_ms_low": 0.9 * step, "step_ms_high": 1.2 * step, "steps": 30, "first_step_ms": 3 * step,
            "peak_memory_mb": memory, "loss": 1.0, "wall_time_s": 2.0}  # fmt: skip


def leave(size, model, tokens, latents, *, status="ok", message="", changes=None, provenance=None, **metrics) -> dict:
    """Write the folder of one cell; returns its entry in the plan. changes: other settings, {"section.key": value}."""
    each = cell_spec(size, model, tokens, latents)
    for key, value in (changes or {}).items():
        section, name = key.split(".")
        each[section][name] = value
    precision = each["cost"]["precision"]
    curve = precision if latents is None else f"M{latents}-{precision}"
    folder = Path(f"results/{size['scale']}/runs/figure5/{model}/{curve}/N{tokens}")
    found = {"parameter_count": 1234, "cores": 2, "mixer_multiply_adds": counted(model, tokens, latents),
             "model_multiply_adds": 9 * tokens}  # fmt: skip
    found |= (measured(model, tokens, latents) if status == "ok" else {}) | metrics
    kind = size["device_type"]
    origin = {"dataset": {"source": "random", "fingerprint": "x"}, "device": DEVICES[kind], "device_type": kind,
              "attention": ["cpu_flash"], "operations": FORMULAS[model]} | (provenance or {})  # fmt: skip
    result = {"status": status, "message": message, "metrics": found, "spec": each, "provenance": origin}
    record.write_record(result, folder)
    record.write_json(each, folder / "spec.json")
    return {"run": str(folder), "spec": record.digest(each), "dataset": "", "dataset_label": "", "model": model,
            "label": LABELS[model], "role": "reference" if model == "full" else "ranked", "num_blocks": each["model"]["num_blocks"],
            "num_latents": latents, "num_tokens": tokens, "num_ranks": None, "precision": precision, "seed": 0,
            "absent": None}  # fmt: skip


def records(
    size=SMALL, *, models=tuple(LABELS), changes=None, each=lambda model, tokens, latents: {}, **special
) -> pandas.DataFrame:
    """Records of all cells of a size, written and read again as the pipeline does.

    special: {"flare_16384_64": {...}, "full_1024": {...}} what `leave` gets for one cell, each(model, N, M) for all; None
    leaves a cell out.
    """
    entries = []
    for model in models:
        for latents in [None] if model == "full" else size["latents"]:
            for tokens in size["tokens"]:
                name = f"{model}_{tokens}" + ("" if latents is None else f"_{latents}")
                own = special.pop(name, each(model, tokens, latents))
                if own is not None:
                    entries.append(leave(size, model, tokens, latents, **{"changes": changes} | own))
    assert not special
    frame = record.records({"suite": "figure5", "scale": size["scale"], "entries": entries})
    record.write_records(frame, Path("records.csv"))
    return record.read_records(Path("records.csv"))


def on_one_rank(size=LARGE, *, memory=None, **changes) -> list[dict]:
    """Folders of Table 2 on one rank beside cells of the cost study, with step times 1 % above and `memory` times the peak;
    returns its plan's entries. changes: other settings, "section__key"."""
    entries, factor = [], memory or {"flare": 1.89, "flarepp": 1.0}
    for model in factor:
        for tokens in size["tokens"][-6::5]:
            for latents in size["latents"][:2]:
                each = cell_spec(size, model, tokens, latents)
                settings = {key: each["cost"][key] for key in ("num_tokens", "batch_size", "precision", "warmup_steps",
                            "timed_steps", "num_threads", "device", "seed")} | {"num_ranks": 1}  # fmt: skip
                each = {"scale": size["scale"], "model": each["model"], "scaling": settings}
                for key, value in changes.items():
                    section, name = key.split("__")
                    each[section][name] = value
                found = measured(model, tokens, latents)
                steps = {name: 1.01 * found[name] for name in ("step_ms", "step_ms_low", "step_ms_high")}
                metrics = (
                    dict.fromkeys(scaling.METRICS, 0) | steps | {"peak_memory_mb": factor[model] * found["peak_memory_mb"]}
                )
                folder = Path(f"results/{size['scale']}/runs/table2/{model}/N{tokens}-M{latents}-R1")
                origin = {
                    "dataset": {"source": "random"},
                    "device": DEVICES[size["device_type"]],
                    "device_type": size["device_type"],
                }
                record.write_record({"status": "ok", "message": "", "metrics": metrics, "spec": each, "provenance": origin}, folder)
                record.write_json(each, folder / "spec.json")
                entries.append({"run": str(folder), "spec": record.digest(each), "dataset": "", "dataset_label": "",
                                "model": model, "label": LABELS[model], "role": "ranked",
                                "num_blocks": each["model"]["num_blocks"], "num_latents": latents, "num_tokens": tokens,
                                "num_ranks": 1, "precision": settings["precision"], "seed": 0})  # fmt: skip
    return entries


def with_table2(frame: pandas.DataFrame, entries: list[dict], scale="paper") -> pandas.DataFrame:
    return pandas.concat([frame, record.records({"suite": "table2", "scale": scale, "entries": entries})])


def by_keys(frame: pandas.DataFrame) -> pandas.DataFrame:
    return frame.set_index(cost.KEYS)


def built(module, frame: pandas.DataFrame, scale="quick") -> str:
    """The Markdown of a table."""
    module.build(frame, Path("out"), scale=scale)
    return Path(f"out/{module.__name__.split('.')[-1]}.md").read_text()


def table_rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")]


def verdicts(frame: pandas.DataFrame, scale="paper", claims=None) -> pandas.DataFrame:
    ledger.build(frame, Path("out"), shown="last", compared="last", scale=scale, claims=claims)
    return pandas.read_csv("out/ledger.csv", keep_default_na=False).set_index("id")


def judged(name: str, frame: pandas.DataFrame, scale="paper") -> list[str]:
    """Verdict and measured words of one claim."""
    claims = [claim for claim in ledger.read_claims() if claim["id"] == name]
    return verdicts(frame, scale, claims).loc[name, ["verdict", "measured"]].tolist()


@pytest.fixture
def drawing(saved_figure):
    """Draw Figure 5 without rendering it; returns the matplotlib figure."""
    return lambda frame, scale="quick": saved_figure(figure5.build, frame, Path("out"), scale=scale)


# --- cells


def test_a_cell_is_a_row_with_its_numbers_settings_and_formula():
    found = cost.cells(records())
    assert len(found) == 44 and {*cost.KEYS, *cost.METRICS, *cost.KNOWN, *cost.SETTINGS, *cost.OF_RUN} <= set(found.columns)
    row = by_keys(found).loc[("flarepp", 16384, 128)]
    assert row["step_ms"] == pytest.approx(16.384 * 1.4344) and row["peak_memory_mb"] == pytest.approx(1.18 * 544.288)
    names = ["label", "status", "reason", "n", "operations", "blocks", "channel_dim", "num_threads", "compile"]
    assert row[names].tolist() == [
        "FLARE++", "ok", "ok", 1, "5 C^2 + 6 M C", 1, 128, 2, False]  # fmt: skip
    assert row["mixer_multiply_adds"] == 5 * 128**2 + 6 * 128 * 128 and row["device"] == "Some CPU"
    assert row["runs"] == ("results/quick/runs/figure5/flarepp/M128-fp32/N16384",)
    full = found[found["model"] == "full"]
    assert (
        len(full) == 4
        and full["num_latents"].isna().all()
        and found[found["model"] == "transolverpp"]["operations"].eq("").all()
    )


def test_a_cell_without_a_result_keeps_what_is_known():
    found = by_keys(cost.cells(records(
        flare_1024_64={"status": "oom", "asked_mb": 9769.0}, flare_4096_64={"status": "oom"},
        flare_16384_64=GONE | {"predicted_ms": 83e3}, flare_1024_128={"status": "diverged", "message": "the loss is nan"},
        flare_4096_128={"asked_mb": 5.0},
    )))  # fmt: skip
    out = found.loc[("flare", 1024, 64)]
    assert out[["status", "reason", "n"]].tolist() == ["out of memory", "out of memory (asked for 9.54 GiB)", 0]
    assert pandas.isna(out["step_ms"]) and out["mixer_multiply_adds"] == 81920 and out["asked_mb"] == 9769
    assert found.loc[("flare", 4096, 64), "reason"] == "out of memory"
    gone = found.loc[("flare", 16384, 64)]
    assert gone["reason"] == "not run: predicted 83 s a step, above max_step_seconds 60" and gone["predicted_ms"] == 83e3
    assert found.loc[("flare", 1024, 128), ["status", "n"]].tolist() == ["diverged", 0]
    assert found.loc[("flare", 4096, 128), "reason"] == "ok"


def test_records_that_cannot_be_used_are_refused():
    frame = records(models=["flare"])
    twice = frame[frame["run"] == frame["run"].iloc[0]]
    with pytest.raises(ValueError, match="figure5: more than one run of model flare, num_tokens 1024, num_latents 64"):
        cost.cells(pandas.concat([frame, twice.assign(run="other")]))
    for name in cost.METRICS:
        with pytest.raises(ValueError, match=f"N1024: status ok, but no metric .*{name}"):
            cost.cells(frame[frame["metric"] != name])
    for module in (figure5, operations, figure5_cells):
        with pytest.raises(ValueError, match="scale 'paper' was asked for"):
            module.build(frame, Path("out"), scale="paper")
    shutil.rmtree(frame["run"].iloc[0])
    with pytest.raises(FileNotFoundError):
        cost.cells(frame)
    assert not Path("out").exists()


def test_ratios_are_of_the_same_tokens_and_latents_where_both_were_measured():
    found = cost.cells(records(
        flare_1024_64={"step_ms": 2.0}, flarepp_1024_64={"step_ms": 5.0}, flare_4096_64={"status": "oom"},
        flarepp_16384_64={"peak_memory_mb": 0.0}, flare_65536_64=None,
    ))  # fmt: skip
    times, peaks = (cost.over(found, metric, "flarepp") for metric in ("step_ms", "peak_memory_mb"))
    assert times[1024, 64] == 2.5 and times[4096, 128] == pytest.approx(1.4344) and len(times) == 6
    assert list(peaks.index) == [(1024, 64), (1024, 128), (4096, 128), (16384, 128), (65536, 128)]
    assert peaks.to_numpy() == pytest.approx(1.18)
    beside = by_keys(found.assign(ratio=cost.ratios(found, "step_ms")))["ratio"]
    assert beside["flarepp", 1024, 64] == 2.5 and beside["flare", 1024, 64] == 1
    assert beside[["full"]].isna().all() and pandas.isna(beside["transolver", 4096, 64])
    assert cost.over(found[found["model"] != "flare"], "step_ms", "flarepp").empty
    assert cost.ratios(found[found["model"] != "flare"], "step_ms").isna().all()


def test_the_line_through_peaks_and_what_lies_beside_it():
    line = cost.cells(records(models=["flare"], flare_65536_64={"peak_memory_mb": 0.0}))
    line = line[line["num_latents"] == 64]
    start, slope, beside = cost.fit(line)
    assert (start, slope) == pytest.approx((20, 0.032)) and len(beside) == 3 and beside.abs().max() < 1e-9
    assert cost.fit(line[line["num_tokens"] > 1024]) is None
    bent = pandas.DataFrame({"num_tokens": [0, 1, 2], "peak_memory_mb": [2.0, 2.0, 8.0]})
    assert cost.fit(bent)[:2] == pytest.approx((1, 3)) and cost.fit(bent)[2].tolist() == pytest.approx([12.5, -25, 12.5])


def test_a_model_without_latents_is_compared_at_every_number_of_them():
    found = cost.at_every_latents(cost.cells(records()))
    full = found[found["model"] == "full"]
    assert len(full) == 8 and set(full["num_latents"]) == {64, 128} and not full["has_latents"].any()
    assert len(found) == 48 and found.loc[found["model"] == "flare", "has_latents"].all()
    times = cost.over(found, "step_ms", "full", "flarepp")
    assert times[65536, 64] == pytest.approx(65536 / 3500 / 1.4472)
    assert set(cost.at_every_latents(cost.cells(records(models=["full"])))["num_latents"]) == {0}


def test_no_records_are_empty_tables_and_a_figure(drawing):
    empty = records().iloc[:0]
    assert cost.cells(empty).empty and cost.at_every_latents(cost.cells(empty)).empty and cost.harness(empty).empty
    assert len(table_rows(built(operations, empty))) == 1 and "No cell was measured." in built(figure5_cells, empty)
    assert len(drawing(empty).axes) == 4
    rows = verdicts(empty, "quick")
    names = [name for name in rows.index if name.startswith(("cost.", "ops.")) or name == "cp.harness"]
    assert len(names) == 10 and set(rows.loc[names, "verdict"]) == {"not run"}


def test_sizes_and_times_in_words():
    assert [cost.mebibytes(size) for size in (0.5, 512, 999.4, 999.6, 9769)] == [
        "0.5 MiB",
        "512 MiB",
        "999 MiB",
        "0.976 GiB",
        "9.54 GiB",
    ]
    assert [cost.seconds(time) for time in (8.34, 999.4, 83e3)] == ["8.34 ms", "999 ms", "83 s"]


# --- the operation counts


def test_operations_are_formulas_counts_and_the_papers():
    rows = table_rows(built(operations, records()))
    assert rows[0] == ["mixer", "M", "N", "formula (this project)", "counted (this project)", "over FLARE (this project)",
                       "formula (the paper's)", "value (the paper's)", "over FLARE (the paper's)"]  # fmt: skip
    assert len(rows) == 1 + 11
    by = {(row[0], row[1]): row[2:] for row in rows}
    assert by["FLARE", "64"] == ["65,536", "3 C² + 4 M C", "81,920", "1.00", "3 C² + 2 M C", "65,536", "1.00"]
    assert by["FLARE++", "64"] == ["65,536", "5 C² + 6 M C", "131,072", "1.60", "5 C² + 3 M C", "106,496", "1.62"]
    assert by["FLARE++", "128"][3:] == ["1.57", "5 C² + 3 M C", "131,072", "1.60"]
    assert by["Transolver-3", "128"] == ["65,536", "3 H M C", "393,216", "3.43", "", "", ""]
    assert by["Transolver++", "64"][1] == "--" and by["Full self-attention", ""][1:] == [
        "4 C² + 2 N C",
        "16,842,752",
        "",
        "",
        "",
        "",
    ]
    text = Path("out/operations.md").read_text()
    for words in (
        "Scale: quick, C = 128, H = 8.",
        "which is 2 M C multiply-adds",
        "**[scale quick: not the paper's numbers]**",
    ):
        assert words in text


def test_operations_take_the_largest_cell_that_was_counted():
    frame = records(full_65536=GONE | {"predicted_ms": 83e3}, flare_65536_64=None,
                    flare_65536_128={"status": "oom", "mixer_multiply_adds": None},
                    **{f"transolver_{tokens}_64": {"status": "oom", "mixer_multiply_adds": None}
                       for tokens in SMALL["tokens"]})  # fmt: skip
    by = {(row[0], row[1]): row[2:] for row in table_rows(built(operations, frame))}
    assert by["Full self-attention", ""][0] == "65,536" and by["FLARE", "64"][0] == by["FLARE", "128"][0] == "16,384"
    assert by["Transolver", "64"] == ["", "3 C² + 3 M C", "--<sup>a</sup>", "", "", "", ""]
    assert "<sup>a</sup> out of memory." in Path("out/operations.md").read_text()
    without = {(row[0], row[1]): row[2:] for row in table_rows(built(operations, records(models=["flarepp"])))}
    assert without["FLARE++", "64"] == ["65,536", "5 C² + 6 M C", "131,072", "", "5 C² + 3 M C", "106,496", "1.62"]


def captured(monkeypatch, module, frame: pandas.DataFrame) -> list[list]:
    """The rows of cells that a module shows in Markdown."""
    tables = []
    monkeypatch.setattr(typeset, "markdown", lambda table: tables.append(table) or "")
    monkeypatch.setattr(figure5_cells, "markdown", typeset.markdown)
    module.build(frame, Path("out"), scale="quick")
    return [row for block in tables[0].blocks for row in block.rows]


def test_every_measured_number_names_its_runs(monkeypatch):
    frame = records(flare_1024_64={"peak_memory_mb": 0.0}, transolver3_65536_64=GONE)
    own, flare = (f"results/quick/runs/figure5/{line}/N65536" for line in ("flarepp/M64-fp32", "flare/M64-fp32"))
    rows = {row[0].text + row[1].text: row for row in captured(monkeypatch, operations, frame)}
    counted = rows["FLARE++64"]
    assert [cell.runs for cell in counted] == [(), (), (), (), (own,), (own, flare), (), (), ()]
    rows = captured(monkeypatch, figure5_cells, frame)
    (pair,) = [row for row in rows if row[1].runs == (own,)]
    assert [cell.runs for cell in pair] == [(), (own,), (own, flare), (own,), (own,), (own,), (own, flare), (own,)]
    (gone,) = [row for row in rows if row[1].text == "--"]
    assert gone[1].runs[0].endswith("transolver3/M64-fp32/N65536") and not any(cell.runs for cell in gone[2:])
    empty = [cell for row in rows for cell in row if cell.text == ""]
    assert empty and not any(cell.runs for cell in empty)


def test_the_three_files_of_the_operations():
    built(operations, records(LARGE), "paper")
    tidy = pandas.read_csv("out/operations.csv").set_index(["model", "num_latents"])
    assert tidy.loc[("flarepp", 256), "over_flare"] == pytest.approx(17 / 11)
    assert tidy.loc[("flarepp", 256), "runs"].endswith("figure5/flarepp/M256-fp16/N1000000")
    assert tidy.loc[("flarepp", 256), "paper_over_flare"] == pytest.approx(11 / 7) and len(tidy) == 16
    text = Path("out/operations.tex").read_text()
    assert (
        r"\label{tab:operations}" in text
        and r"5 C$^2$ + 6 M C" in text
        and "nan" not in text
        and "not the paper's numbers" not in text
    )


# --- the table of cells


def test_every_cell_is_a_row_below_its_line():
    frame = records(
        flare_16384_64={"step_ms": 1234.5, "step_ms_low": 999.4, "step_ms_high": 2000.0, "peak_memory_mb": 500.0}
    )
    rows = table_rows(built(figure5_cells, frame))
    assert len(rows) == 1 + 44 + 11
    titles = {row[0]: place for place, row in enumerate(rows) if row[0].startswith("\\*") or row[0].startswith("*")}
    place = next(place for title, place in titles.items() if title.startswith("*FLARE, M = 64"))
    assert rows[place][0] == "*FLARE, M = 64: peak ≈ 7 MiB + 32.9 KiB × N, off by at most 1.5 %*"
    assert rows[place + 1] == ["1,024", "1.02 (0.92–1.23)", "1.00", "30", "3.07", "52.8", "1.00", "+0.6"]
    assert rows[place + 3] == ["16,384", "1,234 (999–2,000)", "1.00", "30", "49.2", "500", "1.00", "−1.5"]
    place = next(place for title, place in titles.items() if title.startswith("*FLARE++, M = 64"))
    assert rows[place + 3][2] == "0.02" and rows[place + 3][6] == "1.28" and rows[place + 4][2] == "1.45"
    full = next(place for title, place in titles.items() if title.startswith("*Full"))
    assert rows[full + 1][2] == "" and rows[full][0].startswith("*Full self-attention: peak ≈ 19 MiB + 31.1 KiB")
    text = Path("out/figure5_cells.md").read_text()
    for words in ("Batch 1, blocks 1, C = 128, H = 8, FFN ratio 4, FP32, CPU threads: 2.", "on Some CPU", "over 30 steps",
                  "the peak resident set above the idle process", "**[scale quick"):  # fmt: skip
        assert words in text
    assert "nan" not in text and "−0.0" not in text


def test_cells_without_a_number_say_why():
    frame = records(full_65536=GONE | {"predicted_ms": 83e3}, flare_1024_64={"peak_memory_mb": 0.0},
                    transolver3_65536_128={"status": "oom", "asked_mb": 9769.0})  # fmt: skip
    text = built(figure5_cells, frame)
    rows = [row for row in table_rows(text) if row[1].startswith("--") or "--" in row[5]]
    assert rows[0] == ["65,536", "--<sup>a</sup>", *["--"] * 6] and rows[1][1] == "--<sup>b</sup>"
    assert rows[2][5:] == ["--<sup>c</sup>", "", ""] and len(rows) == 3
    assert "<sup>a</sup> not run: predicted 83 s a step, above max\\_step\\_seconds 60." in text
    assert "<sup>b</sup> out of memory (asked for 9.54 GiB)." in text and "<sup>c</sup> too little to be measured." in text


def test_the_files_of_the_cells():
    built(figure5_cells, records(LARGE, transolver3_1000000_128={"status": "oom"}), "paper")
    tidy = pandas.read_csv("out/figure5_cells.csv").set_index(cost.KEYS)
    assert len(tidy) == 12 * 16 and tidy.loc[("transolver3", 500_000, 128), "memory_over_flare"] == pytest.approx(2.47)
    assert tidy.loc[("flare", 1000, 64), "runs"].endswith("figure5/flare/M64-fp16/N1000")
    assert tidy.loc[("transolver3", 1_000_000, 128), "reason"] == "out of memory"
    text = Path("out/figure5_cells.tex").read_text()
    assert text.count(r"\begin{table}") == 6 and r"\label{tab:figure5_cells_flarepp}" in text and r"\tiny" not in text
    assert "nan" not in text and ", compiled" in text and "CPU threads" not in text and "not the paper's" not in text


# --- the figure


def shown(axis) -> dict[tuple, list[float]]:
    """The plotted values of every line in a panel, by model and dashes; marks at the edge are left out."""
    names = {look.colour: model for model, look in style.LOOKS.items()}
    return {(names[line.get_color()], line.get_linestyle()): [float(value) for value in line.get_ydata()]
            for line in axis.lines
            if line.get_color() in names and line.get_transform() == axis.transData and len(line.get_ydata()) > 1}  # fmt: skip


def edge(axis) -> list[tuple]:
    """The marks at the top edge: colour, marker and N."""
    return [
        (line.get_color(), line.get_marker(), float(line.get_xdata()[0]))
        for line in axis.lines
        if len(line.get_xdata()) == 1
    ]


def below(figure) -> str:
    """The words below the panels."""
    return "\n".join(text.get_text() for text in figure.texts).replace("\n", " ")


def test_a_line_is_drawn_for_every_mixer_and_number_of_latents(drawing):
    frame = records(flare_4096_64={"step_ms": 7.0, "step_ms_low": 6.0, "step_ms_high": 9.0})
    time, memory, time_ratio, memory_ratio = drawing(frame).axes
    lines = shown(time)
    assert set(lines) == {(model, dashes) for model in LABELS for dashes in "- --".split()} - {("full", "--")}
    assert lines["flare", "-"] == pytest.approx([1.024, 7, 16.384, 65.536]) and lines["full", "-"][3] == pytest.approx(
        65536**2 / 3.5e6
    )
    assert shown(memory)["transolver3", "--"][3] == pytest.approx(2.47 * 2117.152)
    assert set(shown(time_ratio)) == {(model, dashes) for model in figure5.COMPARED for dashes in "- --".split()}
    assert shown(time_ratio)["flarepp", "-"] == pytest.approx([1.4472, 1.4472 * 4.096 / 7, 1.4472, 1.4472])
    assert shown(memory_ratio)["transolver3", "-"] == pytest.approx([1.65] * 4)
    assert [axis.get_ylabel() for axis in (time, memory, time_ratio, memory_ratio)] == [
        "time of a step (ms)", "peak memory (MiB)", "time over FLARE's", "memory over FLARE's"]  # fmt: skip
    assert time.get_xscale() == time.get_yscale() == memory.get_yscale() == "log" and time_ratio.get_yscale() == "linear"
    assert [text.get_text() for text in time_ratio.get_xticklabels()] == ["1,024", "4,096", "16,384", "65,536"]
    bars = [path.vertices[:, 1].tolist() for part in time.collections for path in part.get_paths()]
    assert [6, 9] in bars and edge(time) == edge(memory) == []
    band = [patch for patch in time_ratio.patches]
    assert len(band) == 1 and band[0].get_extents().transformed(time_ratio.transData.inverted()).y1 == pytest.approx(1.6)


def test_mixers_and_latents_are_told_apart_without_colour(drawing):
    figure = drawing(records(LARGE | {"tokens": (1000, 50_000)}), "paper")
    lines = [line for line in figure.axes[0].lines]
    assert len({line.get_marker() for line in lines}) == 6
    looks = [(line.get_marker(), line.get_linestyle(), line.get_markersize()) for line in lines]
    assert len(set(looks)) == len(looks) == 16
    assert len({look.colour for look in style.LOOKS.values()}) == len({look.marker for look in style.LOOKS.values()}) == 12
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert set(labels) - {" "} == {*LABELS.values(), "M = 64", "M = 128", "M = 256"}


@pytest.mark.parametrize("size, scale", [(SMALL | {"tokens": (1000, 65536)}, "quick"), (LARGE, "paper")])
def test_the_legend_covers_nothing_and_lies_within_the_page(drawing, size, scale):
    figure = drawing(records(size, models=["full", "transolverpp", "flare", "flarepp"], full_1000={"status": "oom"}), scale)
    figure.draw_without_rendering()
    legend = figure.legends[0].get_window_extent()
    assert not any(legend.overlaps(axis.get_tightbbox()) for axis in figure.axes)
    assert figure.bbox.x0 <= legend.x0 and legend.x1 <= figure.bbox.x1 and legend.y1 <= figure.bbox.y1
    words = max(text.get_window_extent().y1 for text in figure.texts)
    assert all(axis.get_tightbbox().y0 >= words for axis in figure.axes)


def test_cells_without_a_value_are_marked_at_the_edge_with_what_is_known(drawing):
    figure = drawing(records(full_16384=GONE | {"predicted_ms": 8.3e3}, full_65536=GONE | {"predicted_ms": 83e3},
                             transolver3_65536_64={"status": "oom", "asked_mb": 512.0},
                             transolver3_65536_128={"status": "oom", "asked_mb": 9769.0},
                             transolver_1024_64={"status": "diverged"}))  # fmt: skip
    time, memory = figure.axes[:2]
    black, orange, green = (style.LOOKS[model].colour for model in ("full", "transolver3", "transolver"))
    marks = [(black, "d", 16384), (black, "d", 65536), (green, "+", 1024), (orange, "x", 65536), (orange, "x", 65536)]
    assert sorted(edge(time)) == sorted(edge(memory)) == sorted(marks)
    assert [text.get_text() for text in time.texts] == ["predicted 8.3 s to 83 s", "diverged", "out of memory"]
    assert [text.get_text() for text in memory.texts] == ["not run", "diverged", "asked for 512 MiB to 9.54 GiB"]
    lines = shown(time)
    assert (
        math.isnan(lines["full", "-"][3])
        and not math.isnan(lines["full", "-"][1])
        and math.isnan(lines["transolver", "-"][0])
    )
    top = time.transData.inverted().transform(time.transAxes.transform((0, 1 - 3 * figure5.EDGE)))[1]
    assert max(numpy.nanmax(values) for values in lines.values()) < top  # the marks have a strip of their own
    assert all(tick < top for tick in time.get_yticks())
    foot = below(figure)
    assert "Not run: Full self-attention at N = 16,384, 65,536 (predicted 8.3 s to 83 s)" in foot
    assert "Out of memory: Transolver-3, M = 64 at N = 65,536 (asked for 512 MiB); Transolver-3, M = 128 at" in foot
    assert "Diverged: Transolver, M = 64 at N = 1,024" in foot
    assert {"not run", "out of memory", "diverged"} <= {text.get_text() for text in figure.legends[0].get_texts()}


@pytest.mark.parametrize(
    "gone", [{"status": "oom"}, GONE, {"status": "diverged"}, {"status": "not run", "message": "needs a CUDA device"}]
)
def test_a_line_without_any_value_has_its_words_below_its_marks(drawing, gone):
    figure = drawing(records(each=lambda model, tokens, latents: gone if model == "transolver3" else {}))
    time = figure.axes[0]
    assert len(edge(time)) == 8 and len(time.texts) == 1 and time.texts[0].get_position()[0] == 0
    figure.draw_without_rendering()
    marks = [line.get_window_extent() for line in time.lines if len(line.get_xdata()) == 1]
    words = time.texts[0].get_window_extent()
    assert (
        not any(words.overlaps(mark) for mark in marks) and words.y0 > time.transAxes.transform((0, 1 - 2 * figure5.EDGE))[1]
    )
    assert "Transolver-3, M = 64; Transolver-3, M = 128 at N = 1,024 to 65,536" in below(figure)


def test_words_at_the_right_stand_left_of_their_marks_and_at_the_left_right_of_them(drawing):
    figure = drawing(records(transolver_1024_64={"status": "oom"}, transolver3_65536_64={"status": "oom"}))
    left, right = figure.axes[0].texts
    assert (left.get_ha(), left.xy[0]) == ("left", 1024) and (right.get_ha(), right.xy[0]) == ("right", 65536)


@pytest.mark.parametrize("each", [
    lambda model, tokens, latents: {"status": "oom"},
    lambda model, tokens, latents: {"status": "not run", "message": "needs a CUDA device, none is visible"},
    lambda model, tokens, latents: {} if (model, tokens, latents) == ("flarepp", 4096, 64) else None,
    lambda model, tokens, latents: {} if model == "flare" else None,
    lambda model, tokens, latents: {"status": "oom"} if model == "flare" else {},
    lambda model, tokens, latents: {"peak_memory_mb": 0.0},
    lambda model, tokens, latents: {} if model == "full" else None,
])  # fmt: skip
def test_whatever_is_there_is_drawn_and_listed(drawing, each):
    frame = records(each=each)
    assert len(drawing(frame).axes) == 4
    for module in (operations, figure5_cells):
        assert "nan" not in built(module, frame).replace("nano", "")
    rows = verdicts(frame, "quick")
    assert (
        not rows.loc[[name for name in rows.index if name.startswith("cost.")], "verdict"].str.contains("reproduced").any()
    )


def test_a_cell_that_was_never_begun_is_not_run(drawing):
    entries = [leave(SMALL, model, tokens, 64) for model in ("flare", "flarepp") for tokens in SMALL["tokens"]]
    entries[-1:] = [entries[-1] | {"run": "", "absent": "not run"}]
    entries += [entry | {"num_latents": 128, "run": "", "absent": "not run"} for entry in entries]
    frame = record.records({"suite": "figure5", "scale": "quick", "entries": entries})
    words = "Not run: FLARE++, M = 64 at N = 65,536; FLARE, M = 128; FLARE++, M = 128 at N = 1,024 to 65,536"
    assert words in below(drawing(frame))
    rows = {(row[0], row[1]): row[2:] for row in table_rows(built(operations, frame))}
    assert rows["FLARE++", "64"][2] == "131,072" and rows["FLARE++", "128"] == ["", "--", "--<sup>a</sup>", "", "5 C² + 3 M C", "", ""]
    text = built(figure5_cells, frame)
    assert text.count("--<sup>a</sup>") == 9 and "<sup>a</sup> not run." in text and "nan" not in text
    told = ["not comparable (scale quick)", "1.18 over 3 cells; missing: M = 128; 1 further cell"]
    assert judged("cost.pp.memory", frame, "quick") == told


def test_nothing_to_compare_is_said(drawing):
    figure = drawing(records(models=["flarepp", "full"]))
    for axis in figure.axes[2:]:
        assert [text.get_text() for text in axis.texts] == ["nothing to compare"] and not shown(axis)


def test_the_foot_says_how_the_cells_were_made_and_what_was_too_small(drawing):
    frame = records(each=lambda model, tokens, latents: {"peak_memory_mb": -0.5} if tokens == 1024 else {})
    figure = drawing(frame)
    words = below(figure)
    assert (
        "over 30 steps after a warm-up, on Some CPU. Batch 1, blocks 1, C = 128, H = 8, FFN ratio 4, FP32, CPU threads: 2."
        in words
    )
    assert (
        "Too little memory to be measured: every line at N = 1,024" in words
        and "scale quick: not the paper's numbers" in words
    )
    assert math.isnan(shown(figure.axes[1])["flare", "-"][0])
    paper = drawing(records(LARGE, models=["flare"], changes={"model.num_blocks": 4}), "paper")
    words = below(paper)
    assert "on NVIDIA H100 80GB HBM3" in words and "settings differ from the paper's: blocks 4 (8)" in words


def test_the_figure_is_drawn_alike_every_time():
    frame = records(
        models=["full", "flare", "flarepp"], full_65536=GONE | {"predicted_ms": 83e3}, flare_1024_64={"status": "oom"}
    )
    for folder in ("a", "b"):
        figure5.build(frame, Path(folder), scale="quick")
        assert Path(f"{folder}/figure5.png").stat().st_size > 1000
    for kind in ("png", "pdf"):
        assert Path(f"a/figure5.{kind}").read_bytes() == Path(f"b/figure5.{kind}").read_bytes()


def test_the_command_line_makes_all_three_from_records_alone(monkeypatch):
    records()
    for kind, name, made in (
        ("figure", "figure5", "png"),
        ("table", "operations", "tex"),
        ("table", "figure5_cells", "csv"),
    ):
        monkeypatch.setattr(sys, "argv", f"flarepp {kind} {name} --records records.csv --out out --scale quick".split())
        assert __main__.main() == 0 and Path(f"out/{name}.{made}").exists()


# --- settings


@pytest.mark.parametrize("changes, size, words", [
    ({}, {}, ""),
    ({"cost.timed_steps": 5, "cost.warmup_steps": 1, "cost.compile": False, "cost.num_threads": 9}, {}, ""),
    ({"model.channel_dim": 64}, {}, "width C 64 (128)"),
    ({"model.num_heads": 4, "model.ffn_ratio": 2}, {}, "heads H 4 (8), FFN ratio 2 (4)"),
    ({"model.norm": "layernorm", "cost.precision": "fp32"}, {}, "normalisation layernorm (rmsnorm), precision fp32 (fp16)"),
    ({"cost.batch_size": 2}, {}, "batch size 2 (1)"),
    ({"model.mixer": "flarepp"}, {}, "mixer flarepp (flare)"),
    ({}, {"device_type": "cpu"}, "device cpu (cuda)"),
])  # fmt: skip
def test_the_stamp_at_scale_paper_says_what_differs(changes, size, words):
    frame = records(LARGE | size, models=["flare"], changes=changes)
    assert deviations.words(deviations.find(frame, "figure5", "paper").values()) == words
    text = built(figure5_cells, frame, "paper")
    assert text.startswith("The cells of Figure 5" if not words else f"**[settings differ from the paper's: {words}]**")
    expected = f"not comparable (settings differ: {words})" if words else "reproduced"
    assert judged("cost.flare.memory", frame)[0] == expected


def test_what_could_not_run_is_on_no_device():
    frame = records(LARGE | {"device_type": "cpu"}, models=["flare"], each=lambda *_: GONE)
    assert deviations.words(deviations.find(frame, "figure5", "paper").values()) == ""
    frame = records(LARGE | {"device_type": "cpu"}, models=["flare"], each=lambda *_: {"status": "oom"})
    assert deviations.words(deviations.find(frame, "figure5", "paper").values()) == "device cpu (cuda)"


def test_our_scale_paper_has_the_papers_settings_and_all_that_claims_need():
    config = yaml.safe_load((Path(__file__).parents[1] / "config.yaml").read_text())
    entries = spec.expand(config | {"scale": "paper"}).suites["figure5"]
    there = {(each["model"], each["num_tokens"], each["num_latents"]) for each in entries}
    for claim in ledger.read_claims():
        if claim["needs"]["suite"] == "figure5":
            for model in claim["needs"]["model"]:
                for tokens in claim["needs"]["num_tokens"]:
                    for latents in [None] if model == "full" else claim["needs"]["num_latents"]:
                        assert (model, tokens, latents) in there


# --- the claims


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Records of all that the claims need, with which each is reproduced, Table 2's on one rank included."""
    folder = tmp_path_factory.mktemp("published")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        size = LARGE | {"tokens": (1000, *LARGE["tokens"][2:])}
        kept = {"provenance": {"device_memory_mb": 81559}}
        frame = records(size, models=["full", "transolver3", "flare", "flarepp"], each=lambda *_: kept,
                        transolver3_1000000_128=kept | {"status": "oom", "asked_mb": 9769.0})  # fmt: skip
        frame = with_table2(frame, on_one_rank()).reset_index(drop=True)
    return frame.assign(run=[str(folder / run) for run in frame["run"]])


def of(frame, suite="figure5", **where) -> pandas.Series:
    """Which rows are of these cells."""
    chosen = frame["suite"] == suite
    for key, value in where.items():
        chosen &= frame[key] == value
    return chosen


def scaled(frame, metric, factor, suite="figure5", **where) -> pandas.DataFrame:
    """The records with one metric of some cells times a factor, or a function of N."""
    rows = of(frame, suite, **where) & (frame["metric"] == metric)
    factors = factor(frame["num_tokens"]) if callable(factor) else factor
    return frame.assign(value=frame["value"].where(~rows, frame["value"] * factors))


def ended(frame, status, suite="figure5", **where) -> pandas.DataFrame:
    """The records with some cells ended otherwise, their metrics lost."""
    rows = of(frame, suite, **where)
    return pandas.concat(
        [frame[~rows], frame[rows].drop_duplicates("run").assign(status=status, metric="status", value=numpy.nan)]
    )


def test_all_claims_are_reproduced_where_all_is_as_the_paper_says(published):
    rows = verdicts(published)
    names = [name for name in rows.index if name.startswith(("cost.", "ops.")) or name == "cp.harness"]
    assert rows.loc[names, "measured"].to_dict() == {
        "cp.harness": "FLARE 1.89 in memory and 1.01 in time, FLARE++ 1.00 in memory and 1.01 in time, over 8 pairs",
        "ops.ratio": "6 of 6 counts as the formula says, FLARE++ over FLARE 1.55 to 1.60",
        "cost.ratio": "1.41 to 1.45 over 30 cells of N ≥ 100,000, changing by at most 0.0 % along N, largest at M = 64, below "
                      "the arithmetic ratio in 30",
        "cost.full.time": "98.7 to 101 times, N = 500,000, M = 64, 128, 256",
        "cost.full.memory": "Full self-attention over FLARE++ 0.81, N = 500,000, M = 64, 128; 7 lines in N straight to 0.0 %",
        "cost.t3.time": "1.05 over 10 cells",
        "cost.t3.memory": "1.65 at M = 64, 2.47 at M = 128 (N = 500,000)",
        "cost.t3.oom": "out of memory at N = 1,000,000, M = 128, of 79.6 GiB",
        "cost.flare.memory": "at most 0.0 % apart at 10 numbers of tokens",
        "cost.pp.memory": "1.18 over 30 cells",
    }  # fmt: skip
    assert set(rows.loc[names, "verdict"]) == {"reproduced"} and set(rows.loc[names, "n"]) == {1}
    assert len(rows.loc["cp.harness", "runs"].split(";")) == 16 and len(rows.loc["cost.full.time", "runs"].split(";")) == 4
    assert "not the paper's" not in Path("out/ledger.md").read_text()


@pytest.mark.parametrize("name, change, words", [
    ("ops.ratio", ("mixer_multiply_adds", 1.01, {"model": "flare", "num_tokens": 1000, "num_latents": 64}), "5 of 6 counts"),
    ("ops.ratio", ("mixer_multiply_adds", 0.5, {"model": "flarepp"}),
     "3 of 6 counts as the formula says, FLARE++ over FLARE 0.77 to 0.80"),
    ("cost.ratio", ("step_ms", 1.1, {"model": "flarepp"}), "1.55 to 1.59 over"),  # above 1.5
    ("cost.ratio", ("step_ms", 0.85, {"model": "flarepp"}), "1.20 to 1.23 over"),  # below 1.3
    ("cost.ratio", ("step_ms", 0.9, {"model": "flarepp", "num_tokens": 100_000}), "changing by at most 11.1 % along N"),
    ("cost.ratio", ("step_ms", 0.95, {"model": "flarepp", "num_latents": 64}), "largest at M = 128"),
    ("cost.ratio", ("mixer_multiply_adds", 0.9, {"model": "flarepp"}), "below the arithmetic ratio in 0"),
    ("cost.full.time", ("step_ms", 0.3, {"model": "full"}), "29.6 to 30.4 times"),
    ("cost.full.time", ("step_ms", 3.2, {"model": "full"}), "316 to 324 times"),
    ("cost.full.memory", ("peak_memory_mb", 1.25, {"model": "full"}), "Full self-attention over FLARE++ 1.01"),
    ("cost.full.memory", ("peak_memory_mb", 1.06, {"model": "transolver3", "num_tokens": 300_000, "num_latents": 64}),
     "7 lines in N straight to 2.9 %"),
    ("cost.full.memory", ("peak_memory_mb", lambda tokens: tokens / 1e6, {"model": "full"}), "7 lines in N straight to 8.0 %"),
    ("cost.t3.time", ("step_ms", 1.15, {"model": "transolver3", "num_tokens": 200_000}), "1.05 to 1.21 over 10 cells"),
    ("cost.t3.memory", ("peak_memory_mb", 1.06, {"model": "transolver3", "num_latents": 64}), "1.75 at M = 64, 2.47 at M = 128"),
    ("cost.t3.memory", ("peak_memory_mb", 0.94, {"model": "transolver3", "num_latents": 128}), "1.65 at M = 64, 2.32 at M = 128"),
    ("cost.flare.memory", ("peak_memory_mb", 1.021, {"model": "flare", "num_tokens": 300_000, "num_latents": 256}),
     "at most 2.1 % apart"),
    ("cost.pp.memory", ("peak_memory_mb", 1.05, {"model": "flarepp", "num_tokens": 300_000}), "1.18 to 1.24 over 30 cells"),
    ("cp.harness", ("peak_memory_mb", 0.96, {"suite": "table2", "model": "flare"}), "FLARE 1.81 in memory"),
    ("cp.harness", ("peak_memory_mb", 1.04, {"suite": "table2", "model": "flarepp", "num_tokens": 500_000}),
     "FLARE++ 1.00 to 1.04 in memory"),
    ("cp.harness", ("step_ms", 1.05, {"suite": "table2", "model": "flarepp"}), "FLARE++ 1.00 in memory and 1.06 in time"),
])  # fmt: skip
def test_a_claim_that_does_not_hold_is_not_reproduced(published, name, change, words):
    metric, factor, where = change
    verdict, told = judged(name, scaled(published, metric, factor, **where))
    assert verdict == "not reproduced" and words in told


@pytest.mark.parametrize("name, change", [
    ("cost.ratio", ("step_ms", 1.04, {"model": "flarepp", "num_tokens": 100_000})),
    ("cost.ratio", ("step_ms", 5.0, {"model": "flarepp", "num_tokens": 1000})),  # below 100,000 tokens nothing is claimed
    ("cost.full.memory", ("peak_memory_mb", 1.02, {"model": "transolver3", "num_tokens": 300_000, "num_latents": 64})),
    ("cost.flare.memory", ("peak_memory_mb", 1.019, {"model": "flare", "num_tokens": 300_000, "num_latents": 256})),
    ("cp.harness", ("step_ms", 0.96, {"suite": "table2"})),
])  # fmt: skip
def test_a_claim_holds_within_its_criterion(published, name, change):
    metric, factor, where = change
    assert judged(name, scaled(published, metric, factor, **where))[0] == "reproduced"


CLAIMS = [("ops.ratio", 1000), ("cost.ratio", 500_000), ("cost.full.time", 500_000), ("cost.full.memory", 500_000),
          ("cost.t3.time", 500_000), ("cost.t3.memory", 500_000), ("cost.flare.memory", 500_000), ("cost.pp.memory", 500_000),
          ("cp.harness", 500_000)]  # fmt: skip


@pytest.mark.parametrize(
    "name, tokens, status", [*((*claim, "oom") for claim in CLAIMS), ("cost.ratio", 500_000, "diverged")]
)
def test_a_needed_cell_that_failed_holds_the_verdict_back(published, name, tokens, status):
    model, label = ("flarepp", "FLARE++") if name == "cost.full.time" else ("flare", "FLARE")
    verdict, told = judged(name, ended(published, status, model=model, num_tokens=tokens, num_latents=64))
    assert verdict == "not comparable (1 needed run failed)"
    ranks, words = ", R = 1" if name == "cp.harness" else "", {"oom": "out of memory"}.get(status, status)
    assert f"{label}, N = {tokens:,}, M = 64{ranks}: {words}" in told


@pytest.mark.parametrize("name, tokens", CLAIMS)
def test_a_needed_cell_that_is_missing_holds_the_verdict_back(published, name, tokens):
    gone = {"model": "flarepp" if name == "cost.full.time" else "flare", "num_tokens": tokens, "num_latents": 64}
    for frame in (published[~of(published, **gone)], ended(published, "not run", **gone)):
        assert judged(name, frame)[0] == "not comparable (missing: 1 cell)"
    nothing = published[~of(published)]
    assert judged(name, nothing)[0] == "not run"


def test_a_model_without_latents_fails_once(published):
    verdict, told = judged("cost.full.time", ended(published, "oom", model="full"))
    assert verdict == "not comparable (1 needed run failed)"
    assert told == "Full self-attention, N = 500,000: out of memory"


@pytest.mark.parametrize("name, tokens", CLAIMS)
def test_at_other_scales_numbers_are_measured_and_not_judged(name, tokens):
    frame = records(full_65536=GONE, transolver3_65536_128={"status": "oom"})
    frame = (
        with_table2(frame, on_one_rank(SMALL | {"tokens": SMALL["tokens"] + (0,) * 5}), "quick")
        if name == "cp.harness"
        else frame
    )
    verdict, told = judged(name, frame, "quick")
    if name == "ops.ratio":
        assert (verdict, told) == ("reproduced", "16 of 16 counts as the formula says, FLARE++ over FLARE 1.57 to 1.60")
    else:
        assert verdict.startswith("not comparable (scale quick") and told != ledger.NOTHING


def test_the_counts_are_judged_wherever_they_were_made(published):
    frame = records(
        SMALL | {"latents": (64,)},
        models=["flare", "flarepp"],
        each=lambda model, tokens, latents: {} if tokens < 9999 else GONE,
    )
    assert judged("ops.ratio", frame, "quick") == ["not comparable (missing: N = 16,384, N = 65,536)",
                                                   "4 of 4 counts as the formula says, FLARE++ over FLARE 1.60"
                                                   "; missing: N = 16,384, N = 65,536"]  # fmt: skip
    wrong = scaled(frame, "mixer_multiply_adds", 2.0, model="flare")
    assert judged("ops.ratio", wrong, "quick")[0] == "not reproduced"
    assert judged("ops.ratio", scaled(published, "mixer_multiply_adds", 1.0005, model="flare"))[0] == "reproduced"


def test_one_number_of_tokens_or_latents_shows_neither_flatness_nor_order(published):
    claim = next(each for each in ledger.read_claims() if each["id"] == "cost.ratio")
    frame = cost.cells(published)
    for part, words in (
        (frame[frame["num_tokens"].isin([500_000])], "at one N"),
        (frame[frame["num_latents"] == 64], "at one M"),
    ):
        told, holds = steps.steady_ratio(part, **claim["with"])
        assert words in told and holds is None
        assert (
            steps.steady_ratio(
                part.assign(step_ms=part["step_ms"] * part["model"].map({"flare": 1, "flarepp": 2})), **claim["with"]
            )[1]
            is False
        )
    told, holds = steps.steady_ratio(frame[frame["num_tokens"] == 1000], **claim["with"])
    assert told == "1.41 to 1.45 over 3 cells, none of N ≥ 100,000" and holds is None
    assert steps.steady_ratio(frame[frame["model"] == "flare"], **claim["with"]) is None


def test_full_attention_is_judged_by_what_there_is():
    claim = next(each for each in ledger.read_claims() if each["id"] == "cost.full.memory")
    frame = cost.at_every_latents(cost.cells(records(SMALL | {"tokens": (1024, 4096)})))
    told, holds = steps.less_memory_and_linear(frame, **claim["with"])
    assert told == "Full self-attention over FLARE++ 0.81, N = 4,096, M = 64, 128; too few N for a line" and holds is None
    more = frame.assign(peak_memory_mb=frame["peak_memory_mb"].mask(frame["model"] == "full", 1e6))
    assert steps.less_memory_and_linear(more, **claim["with"])[1] is False
    assert steps.less_memory_and_linear(frame[frame["model"] != "full"], **claim["with"]) is None
    assert steps.times_slower(frame[frame["model"] != "full"], "full", "flarepp", 32, 316) is None


def test_the_memory_of_transolver3_is_compared_at_the_latents_that_are_stated(published):
    claim = next(each for each in ledger.read_claims() if each["id"] == "cost.t3.memory")
    frame = cost.cells(published)
    frame = frame[frame["num_tokens"] == 500_000]
    assert steps.ratio_by_latents(frame, **claim["with"])[0].startswith("1.65 at M = 64, 2.47 at M = 128, 4.11 at M = 256")
    told, holds = steps.ratio_by_latents(frame[frame["num_latents"] == 128], **claim["with"])
    assert told == "2.47 at M = 128 (N = 500,000)" and holds is None
    assert steps.ratio_by_latents(frame[frame["model"] == "flare"], **claim["with"]) is None
    assert steps.ratio_about(frame[frame["model"] == "flare"], "step_ms", "transolver3", "flare", 1, 0.2) is None
    assert steps.same_at_every_latents(frame[frame["num_latents"] == 64], "peak_memory_mb", 2) is None
    own = frame["model"].isin(["flare", "flarepp"])
    assert steps.same_at_every_latents(frame[own], "peak_memory_mb", 2) == (
        "at most 0.0 % apart at 2 numbers of tokens",
        True,
    )


@pytest.mark.parametrize("cell, verdict, words", [
    ({"status": "oom", "provenance": {"device_memory_mb": 143771}}, "reproduced",
     "out of memory at N = 1,000,000, M = 128, of 140 GiB"),
    ({"status": "oom", "provenance": {"device_memory_mb": 24268}}, "not comparable (too little to compare)", "of 23.7 GiB"),
    ({"status": "oom"}, "not comparable (too little to compare)", "of an unknown size"),
    ({"peak_memory_mb": 76295.0}, "reproduced", "74.5 GiB at N = 1,000,000, M = 128"),
    ({"peak_memory_mb": 76293.0}, "not reproduced", "74.5 GiB"),
    ({"peak_memory_mb": 0.0}, "not reproduced", "0 MiB at N = 1,000,000"),
    ({"status": "diverged"}, "not comparable (1 needed run failed)", "Transolver-3, N = 1,000,000, M = 128: diverged"),
    (GONE, "not run", "missing: Transolver-3"),
    (None, "not run", "missing: "),
])  # fmt: skip
def test_running_out_of_memory_is_what_one_claim_is_about(cell, verdict, words):
    frame = records(LARGE | {"tokens": (1_000_000,)}, models=["transolver3"], transolver3_1000000_128=cell)
    found, told = judged("cost.t3.oom", frame)
    assert found == verdict and words in told
    quick = records(models=["transolver3"], transolver3_65536_128={"status": "oom"})
    assert judged("cost.t3.oom", quick, "quick")[0] == "not comparable (scale quick)"


# --- the two harnesses


def test_pairs_are_of_the_same_sizes_precision_and_device(published):
    found = cost.harness(published)
    assert len(found) == 8 and set(found["num_tokens"]) == {500_000, 1_000_000} and set(found["num_latents"]) == {64, 128}
    flare = found[found["model"] == "flare"]
    assert (flare["peak_memory_mb_alone"] / flare["peak_memory_mb"]).to_numpy() == pytest.approx(1.89)
    assert all(len(runs) == 2 and "figure5" in runs[0] and "table2" in runs[1] for runs in found["runs"])
    assert cost.harness(published[of(published)]).empty and cost.harness(published[~of(published)]).empty


@pytest.mark.parametrize("changes", [{"model__num_blocks": 4}, {"model__channel_dim": 64}, {"model__num_heads": 4},
                                     {"model__ffn_ratio": 2}, {"scaling__batch_size": 2}, {"scaling__precision": "fp32"}])  # fmt: skip
def test_what_differs_in_anything_else_is_no_pair(changes):
    frame = records(LARGE | {"tokens": (500_000, 1_000_000)}, models=["flare", "flarepp"])
    assert len(cost.harness(with_table2(frame, on_one_rank()))) == 8
    assert cost.harness(with_table2(frame, on_one_rank(**changes))).empty
    assert judged("cp.harness", with_table2(frame, on_one_rank(**changes)))[0] == "not run"


def test_a_pair_is_what_the_worse_of_the_two_is(published):
    frame = ended(published, "oom", suite="table2", model="flare", num_tokens=500_000, num_latents=64)
    pair = by_keys(cost.harness(frame)).loc[("flare", 500_000, 64)]
    assert pair[["n", "status", "reason"]].tolist() == [0, "out of memory", "out of memory"]
    verdict, told = judged("cp.harness", frame)
    assert verdict == "not comparable (1 needed run failed)" and "FLARE, N = 500,000, M = 64, R = 1: out of memory" in told
    frame = ended(published, "not run", suite="table2", model="flare")
    assert judged("cp.harness", frame)[0] == "not comparable (missing: FLARE)"


def test_step_times_are_compared_where_the_threads_are_equal():
    size = SMALL | {"tokens": (1024, 4096, 16384, 32768, 65536, 131072)}
    frame = records(size, models=["flare", "flarepp"])
    told = judged("cp.harness", with_table2(frame, on_one_rank(size), "quick"), "quick")
    assert told == ["not comparable (scale quick)",
                    "FLARE 1.89 in memory and 1.01 in time, FLARE++ 1.00 in memory and 1.01 in time, over 8 pairs"]  # fmt: skip
    other = cost.harness(with_table2(frame, on_one_rank(size, scaling__num_threads=1), "quick"))
    claim = next(each for each in ledger.read_claims() if each["id"] == "cp.harness")
    assert steps.same_harness(other, **claim["with"]) == ("FLARE 1.89 in memory, FLARE++ 1.00 in memory, over 8 pairs", None)
    assert steps.same_harness(other.assign(device_type="cuda"), **claim["with"])[1] is True
    assert steps.same_harness(other.assign(peak_memory_mb=0.0), **claim["with"]) is None
    assert steps.same_harness(other.iloc[:0], **claim["with"]) is None


def test_settings_of_both_harnesses_hold_the_verdict_back():
    frame = records(LARGE | {"tokens": (500_000, 1_000_000)}, models=["flare", "flarepp"])
    verdict = judged("cp.harness", with_table2(frame, on_one_rank(scaling__timed_steps=5)))[0]
    assert verdict == "not comparable (settings differ: timed steps 5 (30))"


def test_the_papers_formulas_give_the_ratio_it_states():
    rows = {row[0]: row[1:] for row in consistency.rows(ledger.read_claims())}
    assert rows["ops.printed"][1:] == ["6 of 6 counts as the formula says, FLARE++ over FLARE 1.57 to 1.62", "yes"]
    assert quoted.operations("flare", 128, 64) == ("3 C² + 2 M C", 65536) and quoted.operations("full", 128, 64) is None
