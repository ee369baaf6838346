"""Table 2 and its claims on records of runs that were written by hand: efficiencies, footnotes, stamps, verdicts."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pandas
import pytest
import yaml

from flarepp import __main__, record, spec
from flarepp.paper import consistency, deviations, ledger, quoted, scaling
from flarepp.paper.rules import steps
from flarepp.paper.tables import table2

LABELS = {"flare": "FLARE", "flarepp": "FLARE++"}
ENCODERS = {"flare": 1, "flarepp": 2}
SMALL = {"tokens": (4096, 16384), "latents": (16, 32), "scale": "quick", "device_type": "cpu", "cores": 2}
LARGE = {"tokens": (500_000, 1_000_000), "latents": (64, 128), "scale": "paper", "device_type": "cuda", "cores": 4}
DEVICES = {"cpu": "Some CPU", "cuda": "NVIDIA H100 80GB HBM3"}


@pytest.fixture(autouse=True)
def folder_of_runs(tmp_path, monkeypatch):
    """Where the relative run folders lie."""
    monkeypatch.chdir(tmp_path)


def run_spec(scale, model, tokens, latents, ranks) -> dict:
    """A spec; at scale paper with the settings of the paper."""
    options = {"name": "backbone", "mixer": model, "channel_dim": 32, "num_heads": 4, "num_blocks": 2, "ffn_ratio": 4,
               "norm": "layernorm", "num_latents": latents, "qk_norm": False}
    settings = {"num_tokens": tokens, "num_ranks": ranks, "batch_size": 1, "precision": "fp32", "warmup_steps": 3,
                "timed_steps": 30, "num_threads": 1, "device": "cpu", "seed": 0}
    if scale == "paper":
        options |= {"channel_dim": 128, "num_heads": 8, "num_blocks": 8, "norm": "rmsnorm"}
        settings |= {"precision": "fp16", "device": "cuda"}
    return {"scale": scale, "model": options, "scaling": settings}


def traffic(model, latents, scale) -> dict:
    """What a rank hands in: an encoder's D + 1 numbers a latent forward and D backward, of 4 bytes."""
    blocks, heads, width = (8, 8, 16) if scale == "paper" else (2, 4, 8)
    count = ENCODERS[model] * blocks
    return {"forward_collectives": count, "forward_bytes": count * heads * latents * (width + 1) * 4,
            "backward_collectives": count, "backward_bytes": count * heads * latents * width * 4}  # fmt: skip


def measured(model, tokens, latents, ranks, scale, cores) -> dict:
    """Metrics: 1 ms a thousand tokens, 1 MiB a hundred; R ranks lose 2 (R - 1) % of the time and 1 (R - 1) % of memory."""
    alone = {"flare": 1.0, "flarepp": 1.5}[model]
    step = alone * tokens / 1000 / ranks / (1 - 0.02 * (ranks - 1))
    one_rank = dict.fromkeys(traffic(model, latents, scale), 0)
    return {
        "step_ms": step, "step_ms_low": 0.9 * step, "step_ms_high": 1.2 * step, "steps": 30, "parameter_count": 1234,
        "peak_memory_mb": alone * tokens / 100 / ranks / (1 - 0.01 * (ranks - 1)), "loss_collectives": 0,
        "gradient_collectives": int(ranks > 1), "cores": cores, "loss": 1.0, "wall_time_s": 2.0,
    } | (one_rank if ranks == 1 else traffic(model, latents, scale))  # fmt: skip


def leave(size, model, tokens, latents, ranks, *, status="ok", message="", changes=None, **metrics) -> dict:
    """Write the folder of one run; returns its entry in the plan. changes: other settings, {"section.key": value}."""
    scale, each = size["scale"], run_spec(size["scale"], model, tokens, latents, ranks)
    for key, value in (changes or {}).items():
        section, name = key.split(".")
        each[section][name] = value
    folder = Path(f"results/{scale}/runs/table2/{model}/N{tokens}-M{latents}-R{ranks}-{each['scaling']['precision']}")
    found = measured(model, tokens, latents, ranks, scale, size["cores"]) | metrics if status == "ok" else {}
    kind = size["device_type"]
    provenance = {"dataset": {"source": "random", "fingerprint": "x"}, "device": DEVICES[kind], "device_type": kind}
    result = {"status": status, "message": message, "metrics": found, "spec": each, "provenance": provenance}
    record.write_record(result, folder)
    record.write_json(each, folder / "spec.json")
    return {"run": str(folder), "spec": record.digest(each), "dataset": "", "dataset_label": "", "model": model,
            "label": LABELS[model], "role": "ranked", "num_blocks": each["model"]["num_blocks"], "num_latents": latents,
            "num_tokens": tokens, "num_ranks": ranks, "precision": each["scaling"]["precision"],
            "seed": each["scaling"]["seed"], "absent": None}  # fmt: skip


def records(size=SMALL, *, models=("flare", "flarepp"), ranks=(1, 2, 4), changes=None, **special) -> pandas.DataFrame:
    """Records of all runs of a size, written and read again as the pipeline does.

    special: {"flare_16384_32_2": {...}} what `leave` gets for one run; None leaves it out.
    """
    entries = []
    for model in models:
        for tokens in size["tokens"]:
            for latents in size["latents"]:
                for count in ranks:
                    own = special.pop(f"{model}_{tokens}_{latents}_{count}", {})
                    if own is not None:
                        entries.append(leave(size, model, tokens, latents, count, **{"changes": changes} | own))
    assert not special
    frame = record.records({"suite": "table2", "scale": size["scale"], "entries": entries})
    record.write_records(frame, Path("records.csv"))
    return record.read_records(Path("records.csv"))


def by_keys(frame: pandas.DataFrame) -> pandas.DataFrame:
    return frame.set_index(scaling.KEYS)


def built(frame: pandas.DataFrame, scale="quick") -> str:
    """The Markdown of Table 2."""
    table2.build(frame, Path("out"), scale=scale)
    return Path("out/table2.md").read_text()


def lines(text: str) -> dict[tuple, list[str]]:
    """Rows by (model, N, M, R), without footnote marks there; the cells after them."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")]
    return {(row[0], *(cell.split("<")[0] for cell in row[1:4])): row[4:] for row in rows}


def verdicts(frame: pandas.DataFrame, scale="quick", claims=None) -> pandas.DataFrame:
    ledger.build(frame, Path("out"), shown="last", compared="last", scale=scale, claims=claims)
    return pandas.read_csv("out/ledger.csv", keep_default_na=False).set_index("id")


# --- efficiencies


def test_efficiencies_are_of_the_same_model_tokens_and_latents_on_one_rank():
    frame = records(SMALL | {"cores": 4})
    found = scaling.efficiencies(frame)
    assert list(found.columns) == scaling.COLUMNS and len(found) == 24
    assert found[scaling.KEYS].iloc[:4].values.tolist() == [["flare", 4096, latents, ranks] for latents, ranks in
                                                            ((16, 1), (16, 2), (16, 4), (32, 1))]  # fmt: skip
    several = found[found["num_ranks"] > 1].set_index("num_ranks")
    assert several.loc[2, "time_efficiency"].to_numpy() == pytest.approx(0.98)
    assert several.loc[4, "time_efficiency"].to_numpy() == pytest.approx(0.94)
    assert several.loc[2, "memory_efficiency"].to_numpy() == pytest.approx(0.99)
    assert several.loc[4, "memory_efficiency"].to_numpy() == pytest.approx(0.97)
    assert found.loc[found["num_ranks"] == 1, list(scaling.EFFICIENCIES)].isna().all(axis=None)
    row = by_keys(found).loc[("flarepp", 16384, 32, 2)]
    assert row["step_ms"] == pytest.approx(1.5 * 16.384 / 2 / 0.98)
    assert row["step_ms_high"] == pytest.approx(1.2 * row["step_ms"])
    assert row["peak_memory_mb"] == pytest.approx(1.5 * 163.84 / 2 / 0.99)
    assert row[["forward_collectives", "forward_bytes", "backward_bytes"]].tolist() == [4, 18432, 16384]
    assert row[["blocks", "latent_rows", "head_dim", "num_threads"]].tolist() == [2, 256, 8, 1]
    assert row[["label", "role", "status", "reason", "n"]].tolist() == ["FLARE++", "ranked", "ok", "ok", 1]
    assert row["runs"] == ("results/quick/runs/table2/flarepp/N16384-M32-R2-fp32",) and row["data_source"] == "random"
    assert not found["shared_cores"].any()


@pytest.mark.parametrize("metric, column, other", [("step_ms", "time", "memory"), ("peak_memory_mb", "memory", "time")])
def test_each_efficiency_is_of_its_own_metric(metric, column, other):
    frame = records(flare_4096_16_2={metric: 8.0}, flare_4096_16_1={metric: 12.0})
    found = by_keys(scaling.efficiencies(frame))
    assert found.loc[("flare", 4096, 16, 2), f"{column}_efficiency"] == pytest.approx(12 / (2 * 8))
    assert found.loc[("flare", 4096, 16, 2), f"{other}_efficiency"] == pytest.approx({"time": 0.98, "memory": 0.99}[other])
    for unchanged in (("flare", 4096, 32, 2), ("flare", 16384, 16, 2), ("flarepp", 4096, 16, 2)):
        assert found.loc[unchanged, f"{column}_efficiency"] == pytest.approx({"time": 0.98, "memory": 0.99}[column])


def test_a_run_that_failed_has_no_number_and_none_refers_to_it():
    frame = records(
        flare_4096_16_1={"status": "oom"}, flare_4096_32_1=None, flare_16384_16_4={"status": "diverged"},
        flarepp_4096_16_4={"status": "not run", "message": "needs 4 CUDA devices, 1 is visible."},
    )  # fmt: skip
    found = by_keys(scaling.efficiencies(frame))
    for gone in (("flare", 4096, 16), ("flare", 4096, 32)):
        for ranks in (2, 4):
            row = found.loc[(*gone, ranks)]
            assert row["n"] == 1 and row[list(scaling.EFFICIENCIES)].isna().all() and row["step_ms"] > 0
    assert ("flare", 4096, 32, 1) not in found.index
    row = found.loc[("flare", 4096, 16, 1)]
    assert row["status"] == row["reason"] == "out of memory" and pandas.isna(row["step_ms"]) and row["n"] == 0
    assert found.loc[("flare", 16384, 16, 4), "status"] == "diverged"
    assert pandas.isna(found.loc[("flare", 16384, 16, 4), "time_efficiency"])
    assert found.loc[("flare", 16384, 16, 2), "time_efficiency"] == pytest.approx(0.98)
    row = found.loc[("flarepp", 4096, 16, 4)]
    assert row["status"] == "not run" and row["reason"] == "not run: needs 4 CUDA devices, 1 is visible"


def test_memory_that_does_not_rise_above_the_idle_process_has_no_ratio():
    frame = records(flare_4096_16_1={"peak_memory_mb": 0.0}, flarepp_4096_16_2={"peak_memory_mb": 0.0})
    found = by_keys(scaling.efficiencies(frame))
    for keys in (("flare", 4096, 16, 2), ("flare", 4096, 16, 4), ("flarepp", 4096, 16, 2)):
        assert pandas.isna(found.loc[keys, "memory_efficiency"]) and found.loc[keys, "time_efficiency"] > 0.9
    assert lines(built(frame))["FLARE", "4,096", "16", "2"][3].startswith("--<sup>")
    assert "too little to be measured." in built(frame)


def test_ranks_share_cores_where_they_have_more_threads_than_those():
    def shared(size, **changes):
        found = scaling.efficiencies(records(size, models=["flare"], changes=changes))
        return set(found.loc[found["shared_cores"].astype(bool), "num_ranks"])

    assert shared(SMALL) == {4} and shared(SMALL | {"cores": 4}) == set()
    assert shared(SMALL | {"cores": 4}, **{"scaling.num_threads": 2}) == {4}
    assert shared(SMALL | {"cores": 1}) == {2, 4}
    assert shared(LARGE, **{"scaling.num_threads": 8}) == set()  # of a device a rank the host's threads are no part


def test_records_that_cannot_be_used_are_refused():
    frame = records()
    twice = frame[frame["run"] == frame["run"].iloc[0]]
    with pytest.raises(ValueError, match="more than one run of model flare, num_tokens 4096, num_latents 16, num_ranks 1"):
        scaling.efficiencies(pandas.concat([frame, twice.assign(run="other")]))
    with pytest.raises(ValueError, match="more than once"):
        scaling.efficiencies(pandas.concat([frame, twice]))
    for name in scaling.METRICS:
        with pytest.raises(ValueError, match=f"R1-fp32: status ok, but no metric .*{name}"):
            scaling.efficiencies(frame[frame["metric"] != name])
    shutil.rmtree(frame["run"].iloc[0])
    with pytest.raises(FileNotFoundError):
        scaling.efficiencies(frame)
    with pytest.raises(ValueError, match="scale 'paper' was asked for"):
        table2.build(frame, Path("out"), scale="paper")
    assert not Path("out").exists()


def test_no_records_are_an_empty_frame():
    empty = records().iloc[:0]
    assert list(scaling.efficiencies(empty).columns) == scaling.COLUMNS and scaling.efficiencies(empty).empty
    text = built(empty)
    assert "No run ended well." in text and len(lines(text)) == 1 + 1 + 8  # the heading, a title, the paper's rows


# --- the table


def test_every_run_is_a_row_with_its_numbers():
    text = built(records(flarepp_16384_32_4={"step_ms": 1234.5, "step_ms_low": 999.4, "step_ms_high": 2000.0}))
    rows = lines(text)
    ours = {key: cells for key, cells in rows.items() if key[1] in ("4,096", "16,384")}
    assert len(ours) == 24
    # step, peak, efficiencies, the paper's, collectives and KiB forward and backward
    assert ours["FLARE", "4,096", "16", "1"] == ["4.10 (3.69–4.92)", "41.0", "ref.", "ref.", "", "", "0 / 0", "0 / 0"]
    assert ours["FLARE", "4,096", "16", "2"] == ["2.09 (1.88–2.51)", "20.7", "0.98", "0.99", "", "", "2 / 2", "4.50 / 4.00"]
    assert ours["FLARE++", "4,096", "32", "2"][6:] == ["4 / 4", "18.0 / 16.0"]
    assert ours["FLARE++", "16,384", "32", "4"][:2] == ["1,234 (999–2,000)", "63.3"]
    heading = [cell.strip() for cell in next(line for line in text.splitlines() if line.startswith("|")).split("|")][5:]
    assert heading[:2] == ["step (ms) (this project, scale quick)", "peak (MiB) (this project, scale quick)"]
    assert heading[2:6] == ["time (efficiency)", "memory (efficiency)", "time (the paper's)", "memory (the paper's)"]
    for words in (
        "**[scale quick: not the paper's numbers]**",
        "Scale: quick. A step is a forward and a backward pass on random tokens",
        "over 30 steps", "on Some CPU. Batch 1, blocks 2, C = 32, H = 4, FFN ratio 4, FP32, CPU threads a rank: 1.",
        "the peak resident set above the idle process in a first step, while freed memory returns to the system at once.",
        "a step has 0 collectives of the loss and 1 of the parameter gradients.",
        "T(1) / (R T(R)) in time and P(1) / (R P(R)) in memory", "prints M = 128 alone",
        "its batch and FFN ratio are not stated",
    ):  # fmt: skip
        assert words in text
    assert "allocated" not in text


def test_ranks_on_shared_cores_are_marked():
    text = built(records())
    marked = [line for line in text.splitlines() if line.startswith("| FLARE") and "<sup>" in line]
    assert len(marked) == 8 and all("4<sup>a</sup>" in line.split("|")[4] for line in marked)
    note = "<sup>a</sup> the ranks had 2 CPU cores for all their threads: efficiency there says nothing about the method."
    assert note in text and "<sup>" not in built(records(SMALL | {"cores": 4}))


def test_what_was_not_measured_says_why():
    text = built(records(
        SMALL | {"cores": 4}, flare_4096_16_1={"status": "oom"}, flare_16384_16_1=None, flare_4096_32_2={"status": "oom"},
        flarepp_4096_16_4={"status": "not run", "message": "needs 4 CUDA devices, 1 is visible"},
    ))  # fmt: skip
    rows = lines(text)
    assert rows["FLARE", "4,096", "16", "1"] == ["--<sup>a</sup>", "--", "--", "--", "", "", "--", "--"]
    assert rows["FLARE", "4,096", "16", "2"][2:7] == ["--<sup>b</sup>"] * 2 + ["", "", "2 / 2"]
    assert rows["FLARE", "4,096", "32", "2"][0] == "--<sup>a</sup>" and rows["FLARE", "4,096", "32", "4"][2] == "0.94"
    assert rows["FLARE", "16,384", "16", "4"][2:4] == ["--<sup>c</sup>"] * 2
    assert rows["FLARE++", "4,096", "16", "4"][0] == "--<sup>d</sup>"
    for mark, words in zip("abcd", (
        "out of memory", "nothing to compare with, on one rank: out of memory",
        "nothing to compare with, on one rank: not run",
        "not run: needs 4 CUDA devices, 1 is visible",
    )):  # fmt: skip
        assert f"<sup>{mark}</sup> {words}." in text
    assert "nan" not in text.lower().replace("nano", "")


def test_the_papers_values_stand_beside_the_same_row_alone():
    rows = lines(built(records(LARGE), "paper"))
    printed = {(row["model"], row["num_tokens"], row["num_ranks"]): [row["time_efficiency"], row["memory_efficiency"]]
               for row in quoted.rows("table2")}  # fmt: skip
    assert len(rows) == 1 + 24  # and the heading
    for (model, tokens, latents, ranks), cells in list(rows.items())[1:]:
        expected = printed.get((model, tokens.replace(",", ""), ranks)) if latents == "128" else None
        assert cells[4:6] == (expected or ["", ""])
    assert rows["FLARE", "1,000,000", "128", "2"][4:6] == ["1.01", "0.98"]
    # at other sizes the paper's rows stand below ours
    below = lines(built(records()))
    assert below["FLARE", "1,000,000", "128", "2"] == ["", "", "", "", "1.01", "0.98", "", ""]
    assert len(below) == 1 + 24 + 1 + 8 and "*rows of the paper that were not run here*" in built(records())
    partly = lines(built(records(LARGE | {"tokens": (500_000,)}), "paper"))
    assert len(partly) == 1 + 12 + 1 + 4 and partly["FLARE++", "1,000,000", "128", "4"][4:6] == ["0.97", "0.96"]


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("beside", ["both", "ours", "paper", "difference"])
def test_the_switch_says_whose_numbers_table2_shows(size, beside):
    scale = size["scale"]
    frame = records(size | {"cores": 4}, **({"flare_1000000_128_1": {"status": "oom"}} if size is LARGE else {}))
    table2.build(frame, Path("out"), scale=scale, beside=beside)
    text = Path("out/table2.md").read_text()
    rows, headings = lines(text), next(line for line in text.splitlines() if line.startswith("|"))
    assert ("(this project" in headings) == (beside != "paper")
    assert ("time (the paper's)" in headings) == (beside in ("both", "paper"))
    assert ("time (to the paper's (%))" in headings) == (beside == "difference")
    assert ("The paper, on four H100 GPUs, prints M = 128 alone" in text) == (beside != "ours")
    assert ("*rows of the paper that were not run here*" in text) == (beside == "both" and size is SMALL)
    stamped = "[the paper's own numbers, on four H100 GPUs, none of this project]" in text
    assert stamped == (beside == "paper") and ("[scale quick" in text) == (beside != "paper" and size is SMALL)
    if beside == "paper":
        assert len(rows) == 1 + 8 and rows["FLARE", "1,000,000", "128", "2"] == ["1.01", "0.98"] and "Scale" not in text
    if beside == "ours":
        assert len(rows) == 1 + 24 and {len(cells) for cells in rows.values()} == {6}
    if beside == "difference" and size is SMALL:
        assert len(rows) == 1 + 24 and all(cells[4:6] == ["", ""] for cells in list(rows.values())[1:])
    if beside == "difference" and size is LARGE:
        found = {key: cells[4:6] for key, cells in list(rows.items())[1:] if key[3] != "1" and key[2] == "128"}
        assert found["FLARE", "500,000", "128", "2"] == ["+0.0", "+2.1"]
        assert found["FLARE", "1,000,000", "128", "2"] == ["--", "--"]  # nothing on one rank
        assert found["FLARE++", "1,000,000", "128", "4"] == ["−3.1", "+1.0"] and rows["FLARE", "500,000", "64", "2"][4] == ""
    tidy = pandas.read_csv("out/table2.csv").set_index(scaling.KEYS)  # whatever is shown
    assert tidy["paper_time_efficiency"].notna().sum() == (8 if size is LARGE else 0)


def test_a_switch_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="beside = 'none' is unknown; allowed: both, ours, paper, difference"):
        table2.build(records(), Path("out"), scale="quick", beside="none")


def test_every_measured_number_names_its_runs(monkeypatch):
    tables = []
    monkeypatch.setattr(table2, "write", lambda table, *rest: tables.append(table))
    table2.build(records(SMALL, flare_4096_16_4={"status": "oom"}), Path("out"), scale="quick")
    rows = {tuple(cell.text for cell in row[:4]): row[4:] for block in tables[0].blocks[:-1] for row in block.rows}
    folder = "results/quick/runs/table2/flare/N4096-M16-R{}-fp32"
    step, peak, time, memory, *theirs, collectives, size = rows["FLARE", "4,096", "16", "2"]
    assert {cell.runs for cell in (step, peak, collectives, size)} == {(folder.format(2),)}
    assert time.runs == memory.runs == (folder.format(2), folder.format(1)) and not any(cell.runs for cell in theirs)
    failed = rows["FLARE", "4,096", "16", "4"]
    assert failed[0].text == "--" and failed[0].runs == (folder.format(4),)
    rest = [cell for row in tables[0].blocks[-1].rows for cell in row]
    assert len(rest) == 8 * 12 and not any(cell.runs for cell in rest)


def test_the_three_files_hold_the_table():
    built(records(flare_4096_16_4={"status": "oom"}))
    tidy = pandas.read_csv("out/table2.csv").set_index(scaling.KEYS)
    assert len(tidy) == 24 and set(tidy["scale"]) == {"quick"}
    assert tidy.loc[("flarepp", 16384, 32, 2), "time_efficiency"] == pytest.approx(0.98)
    assert tidy.loc[("flarepp", 16384, 32, 2), ["forward_bytes", "gradient_collectives"]].tolist() == [18432, 1]
    failed = tidy.loc[("flare", 4096, 16, 4)]
    assert failed["reason"] == "out of memory" and pandas.isna(failed["step_ms"])
    assert tidy.loc[("flare", 4096, 16, 2), "runs"].endswith("table2/flare/N4096-M16-R2-fp32")
    text = Path("out/table2.tex").read_text()
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 1 and r"\footnotesize" in text
    assert r"\label{tab:table2}" in text and r"2.09 (1.88--2.51)" in text and r"$^{\mathrm{" in text
    assert "nan" not in text and {path.suffix for path in Path("out").iterdir()} == {".tex", ".md", ".csv", ".html"}
    built(records(LARGE), "paper")
    tidy = pandas.read_csv("out/table2.csv").set_index(scaling.KEYS)
    theirs = tidy.loc[("flare", 1_000_000, 128, 2), ["paper_time_efficiency", "paper_memory_efficiency"]]
    assert theirs.tolist() == [1.01, 0.98]
    assert tidy["paper_time_efficiency"].notna().sum() == 8


@pytest.mark.parametrize("changes, size, words", [
    ({}, {}, ""),
    ({"scaling.warmup_steps": 50, "scaling.num_threads": 2, "scaling.seed": 7}, {}, ""),
    ({"model.channel_dim": 64}, {}, "width C 64 (128)"),
    ({"model.num_blocks": 2, "model.num_heads": 4}, {}, "heads H 4 (8), blocks 2 (8)"),
    ({"model.ffn_ratio": 2}, {}, "FFN ratio 2 (4)"),
    ({"model.norm": "layernorm"}, {}, "normalisation layernorm (rmsnorm)"),
    ({"scaling.precision": "fp32"}, {}, "precision fp32 (fp16)"),
    ({"scaling.batch_size": 2}, {}, "batch size 2 (1)"),
    ({"scaling.timed_steps": 5}, {}, "timed steps 5 (30)"),
    ({"model.qk_norm": True}, {}, "qk norm yes (no)"),
    ({"model.mixer": "transolver"}, {}, "mixer transolver (flare), mixer transolver (flarepp)"),
    ({}, {"device_type": "cpu", "cores": 64}, "device cpu (cuda)"),
])  # fmt: skip
def test_the_stamp_at_scale_paper_says_what_differs(changes, size, words):
    frame = records(LARGE | size, changes=changes)
    assert deviations.words(deviations.find(frame, "table2", "paper").values()) == words
    text = built(frame, "paper")
    assert text.startswith("Context parallelism: R ranks" if not words else "**[settings differ from the paper's: ")
    assert "not the paper's numbers" not in text and ("peak allocated memory" in text) == (not size)
    held = f"not comparable (settings differ: {words})"
    found = verdicts(frame, "paper")["verdict"]
    assert found["cp.time"] == (held if words else "reproduced")


def test_another_gpu_is_on_the_stamp_and_does_not_hold_the_verdict_back(monkeypatch):
    monkeypatch.setitem(DEVICES, "cuda", "NVIDIA A100")
    frame = records(LARGE)
    assert built(frame, "paper").startswith("**[settings differ from the paper's: device NVIDIA A100 (H100)]**")
    assert verdicts(frame, "paper").loc["cp.time", "verdict"] == "reproduced"


def test_random_tokens_are_no_defect_of_the_data():
    assert quoted.stamp("paper", ["random"]) == quoted.stamp("paper", ["published", "random"]) == ""
    assert quoted.stamp("quick", ["random"]) == "scale quick: not the paper's numbers"
    assert quoted.stamp("quick", ["generated", "random"]) == quoted.stamp("quick", ["generated"])
    assert quoted.stamp("quick", []) == "scale quick, no data: not the paper's numbers"
    assert quoted.stamp("paper", ["generated", "random"]).startswith("scale paper, generated data")


def test_our_scale_paper_has_the_papers_settings():
    config = yaml.safe_load((Path(__file__).parents[1] / "config.yaml").read_text())
    plan = spec.expand(config | {"scale": "paper"})
    entries = plan.suites["table2"]
    assert {(each["model"], each["num_tokens"], each["num_latents"], each["num_ranks"]) for each in entries} == {
        (model, tokens, latents, ranks) for model in LABELS for tokens in LARGE["tokens"] for latents in LARGE["latents"]
        for ranks in (1, 2, 4)
    }  # fmt: skip
    provenance = {"dataset": {"source": "random"}, "device_type": "cuda"}
    for each in entries:
        own = plan.scaling[each["run"]].spec
        result = {"status": "ok", "metrics": {}, "spec": own, "provenance": provenance}
        record.write_record(result, Path(each["run"]))
    frame = pandas.DataFrame([each | {"suite": "table2"} for each in entries], columns=list(record.COLUMNS))
    found = deviations.find(frame, "table2", "paper")
    assert len(found) == 24 and deviations.words(found.values()) == ""


def test_the_command_line_makes_table2_from_records_alone(monkeypatch):
    records()
    monkeypatch.setattr(sys, "argv", "flarepp table table2 --records records.csv --out out --scale quick".split())
    assert __main__.main() == 0 and Path("out/table2.md").exists()


# --- the claims


def test_claims_about_efficiency_are_measured_at_every_scale_and_judged_at_none_but_the_papers():
    rows = verdicts(records())
    for name in ("cp.time", "cp.memory", "cp.latents"):
        assert rows.loc[name, ["verdict", "n"]].tolist() == ["not comparable (scale quick)", 1]
    assert rows.loc["cp.time", "measured"] == "0.94 to 0.98 over 16 rows, 8 of them on shared cores"
    assert rows.loc["cp.memory", "measured"] == "0.97 to 0.99 over 16 rows, 8 of them on shared cores"
    assert rows.loc["cp.latents", "measured"] == "at most 0.0 % in time and 0.0 % in memory, over 8 settings"
    assert len(rows.loc["cp.time", "runs"].split(";")) == 24
    assert rows.loc["cp.harness", "verdict"] == "not run"
    text = Path("out/ledger.md").read_text()
    assert text.count("| cp.") == 5 + 3 and "scale quick: not the paper's numbers" in text


def test_the_papers_experiment_is_judged():
    rows = verdicts(records(LARGE), "paper")
    assert rows.loc["cp.time", ["verdict", "measured"]].tolist() == ["reproduced", "0.94 to 0.98 over 8 rows"]
    assert rows.loc["cp.memory", ["verdict", "measured"]].tolist() == ["not reproduced", "0.97 to 0.99 over 8 rows"]
    assert rows.loc["cp.latents", "verdict"] == rows.loc["cp.payload", "verdict"] == "reproduced"
    assert rows.loc["cp.payload", "measured"] == (
        "16 of 16 rows as the formula says, the same at every N in 8 of 8 settings, FLARE++ over FLARE 2")  # fmt: skip
    assert len(rows.loc["cp.time", "runs"].split(";")) == 12 and len(rows.loc["cp.latents", "runs"].split(";")) == 24
    assert "not the paper's" not in Path("out/ledger.md").read_text()


@pytest.mark.parametrize("metric, ratio, time, memory", [
    ("step_ms", 0.915001, "reproduced", "reproduced"), ("step_ms", 0.914999, "not reproduced", "reproduced"),
    ("step_ms", 1.2, "reproduced", "reproduced"),
    ("peak_memory_mb", 0.9451, "reproduced", "reproduced"), ("peak_memory_mb", 0.9449, "reproduced", "not reproduced"),
    ("peak_memory_mb", 0.9849, "reproduced", "reproduced"), ("peak_memory_mb", 0.9851, "reproduced", "not reproduced"),
])  # fmt: skip
def test_the_bounds_are_the_papers_to_two_digits(metric, ratio, time, memory):
    within = {"step_ms": 1.0, "peak_memory_mb": 1.0}
    special = {f"{model}_{tokens}_128_{ranks}": within | ({"peak_memory_mb": 1 / (ranks * 0.97)} if ranks > 1 else {})
               | ({"step_ms": 1 / (ranks * 0.96)} if ranks > 1 else {})
               for model in LABELS for tokens in LARGE["tokens"] for ranks in (1, 2, 4)}  # fmt: skip
    special["flarepp_500000_128_4"] |= {metric: 1 / (4 * ratio)}
    rows = verdicts(records(LARGE, **special), "paper")
    assert rows.loc[["cp.time", "cp.memory"], "verdict"].tolist() == [time, memory]
    least = f"{ratio:.2f}" if metric == "step_ms" else "0.96"
    assert least in rows.loc["cp.time", "measured"]


def test_efficiencies_of_sixty_four_latents_are_no_part_of_table_2():
    rows = verdicts(records(LARGE, flare_500000_64_4={"step_ms": 1e4}), "paper")
    assert rows.loc["cp.time", "verdict"] == "reproduced" and rows.loc["cp.latents", "verdict"] == "not reproduced"


@pytest.mark.parametrize("metric, factor, holds", [
    ("step_ms", 1.029, True), ("step_ms", 1 / 1.029, True), ("step_ms", 1.031, False), ("step_ms", 1 / 1.031, False),
    ("peak_memory_mb", 1.009, True), ("peak_memory_mb", 1 / 1.011, False),
])  # fmt: skip
def test_latents_agree_within_the_criterion(metric, factor, holds):
    value = measured("flare", 500_000, 64, 2, "paper", 4)[metric]
    rows = verdicts(records(LARGE, flare_500000_64_2={metric: factor * value}), "paper")
    assert rows.loc["cp.latents", "verdict"] == ("reproduced" if holds else "not reproduced")
    largest = 100 * (max(factor, 1 / factor) - 1)
    assert f"{largest:.1f} % in {'time' if metric == 'step_ms' else 'memory'}" in rows.loc["cp.latents", "measured"]


def test_what_is_missing_or_failed_is_named():
    out = {"status": "oom"}
    rows = verdicts(records(LARGE, flare_1000000_128_1=out), "paper")
    assert rows.loc["cp.time", "verdict"] == "not comparable (1 needed run failed)"
    words = "FLARE, N = 1,000,000, M = 128, R = 1: out of memory"
    assert rows.loc["cp.time", "measured"] == f"0.94 to 0.98 over 6 rows; {words}" and rows.loc["cp.time", "n"] == 0
    away = {"status": "not run", "message": "needs 4 CUDA devices, 2 are visible"}
    gone = {f"{model}_{tokens}_{latents}_4": away for model in LABELS for tokens in LARGE["tokens"] for latents in (64, 128)}
    rows = verdicts(records(LARGE, **gone), "paper")
    assert rows.loc["cp.time", ["measured", "verdict"]].tolist() == [
        "0.98 over 4 rows; missing: R = 4", "not comparable (missing: R = 4)"]  # fmt: skip
    assert rows.loc["cp.payload", "verdict"] == "not comparable (missing: R = 4)"
    rows = verdicts(records(LARGE, flarepp_500000_128_2=None), "paper")
    assert rows.loc["cp.time", "verdict"] == "not comparable (missing: 1 cell)"
    one = LARGE | {"tokens": (500_000,)}
    assert verdicts(records(one), "paper").loc["cp.time", "verdict"] == "not comparable (missing: N = 1,000,000)"
    none = verdicts(records(LARGE, ranks=[1]), "paper")
    assert set(none.loc[["cp.time", "cp.memory", "cp.latents", "cp.payload"], "verdict"]) == {"not run"}
    everywhere = verdicts(records().iloc[:0])
    assert everywhere.loc["cp.payload", ["verdict", "measured"]].tolist() == ["not run", "missing: FLARE, FLARE++"]


def test_the_payload_is_judged_at_every_scale_and_on_every_device():
    assert verdicts(records()).loc["cp.payload", "verdict"] == "reproduced"
    frame = records(LARGE | {"device_type": "cpu"}, changes={"model.norm": "layernorm"})
    rows = verdicts(frame, "paper")
    assert rows.loc["cp.payload", "verdict"] == "reproduced" and rows.loc["cp.time", "verdict"].startswith("not comparable")
    alone = verdicts(records(models=["flarepp"])).loc["cp.payload"]
    assert alone["verdict"] == "not comparable (missing: FLARE)" and "8 of 8 rows as the formula says" in alone["measured"]
    one = verdicts(records(SMALL | {"tokens": (4096,)})).loc["cp.payload"]
    assert one["verdict"] == "not comparable (too little to compare)"
    assert one["measured"] == "8 of 8 rows as the formula says, at one N only, FLARE++ over FLARE 2"
    one = verdicts(records(SMALL | {"latents": (16,)})).loc["cp.latents"]
    assert one[["verdict", "measured"]].tolist() == ["not comparable (too little to compare)", "too little to compare"]
    failed = verdicts(records(flare_4096_16_2={"status": "oom"})).loc["cp.payload"]
    assert failed["verdict"] == "not comparable (1 needed run failed)"


@pytest.mark.parametrize("change, words", [
    ({"forward_bytes": 4608 + 4}, "15 of 16 rows as the formula says, the same at every N in 7 of 8 settings"),
    ({"backward_bytes": 4096 - 4}, "15 of 16 rows as the formula says, the same at every N in 7 of 8 settings"),
    ({"forward_collectives": 3}, "15 of 16 rows as the formula says, the same at every N in 8 of 8 settings"),
    ({"backward_collectives": 1}, "15 of 16 rows as the formula says, the same at every N in 8 of 8 settings"),
])  # fmt: skip
def test_one_run_refutes_the_payload(change, words):
    row = verdicts(records(flare_16384_16_2=change)).loc["cp.payload"]
    assert row["verdict"] == "not reproduced" and row["measured"].startswith(words)
    # also where others are missing
    fewer = verdicts(records(flare_16384_16_2=change, flarepp_4096_16_2=None))
    assert fewer.loc["cp.payload", "verdict"] == "not reproduced"


def test_a_payload_that_grows_with_the_tokens_or_is_not_doubled_is_refuted():
    twice = {f"{model}_16384_{latents}_{ranks}": {key: 4 * value for key, value in traffic(model, latents, "quick").items()}
             for model in LABELS for latents in (16, 32) for ranks in (2, 4)}  # fmt: skip
    row = verdicts(records(**twice)).loc["cp.payload"]
    assert row["verdict"] == "not reproduced"
    assert "the same at every N in 0 of 8 settings, FLARE++ over FLARE 2" in row["measured"]
    equal = {f"flarepp_{tokens}_{latents}_{ranks}": traffic("flare", latents, "quick")
             for tokens in SMALL["tokens"] for latents in (16, 32) for ranks in (2, 4)}  # fmt: skip
    row = verdicts(records(**equal)).loc["cp.payload"]
    assert row["verdict"] == "not reproduced" and row["measured"].endswith("8 of 8 settings, FLARE++ over FLARE 1")


@pytest.mark.parametrize("column, value", [("num_tokens", 16384), ("model", "flarepp")])
def test_a_formula_that_holds_row_by_row_is_not_enough(column, value):
    """Some rows of another width, each as the formula says for it: then other rows are not the same, or not half as much."""
    claim = next(each for each in ledger.read_claims() if each["id"] == "cp.payload")
    frame = scaling.efficiencies(records())
    assert steps.payload(frame, **claim["with"])[1] is True
    wide, count = frame[column] == value, frame["model"].map(ENCODERS)
    for name, numbers in (("forward_bytes", 17), ("backward_bytes", 16)):
        frame[name] = frame[name].mask(wide & (frame["num_ranks"] > 1), count * frame["latent_rows"] * numbers * 4)
    told, holds = steps.payload(frame.assign(head_dim=frame["head_dim"].mask(wide, 16)), **claim["with"])
    assert told.startswith("16 of 16 rows as the formula says") and holds is False


def test_the_papers_table_2_agrees_with_itself_but_for_one_count():
    rows = {row[0]: row[1:] for row in consistency.rows(ledger.read_claims()) if row[0].startswith("cp.")}
    assert rows == {
        "cp.time": ["0.92", "0.92 to 1.01 over 8 rows", "yes"],
        "cp.memory": ["0.95 to 0.98", "0.95 to 0.98 over 8 rows", "yes"],
        "cp.unity": ["two entries exceed unity", "1 entry: FLARE, N = 1,000,000, R = 2: 1.01 in time", "no"],
    }


def test_entries_above_one_are_counted_in_time_and_memory():
    frame = scaling.printed()
    frame.loc[0, "memory_efficiency"], frame.loc[1, "time_efficiency"] = 1.02, 1.0
    told, holds = steps.above_one(frame, 2)
    expected = "2 entries: FLARE, N = 1,000,000, R = 2: 1.01 in time; FLARE, N = 500,000, R = 2: 1.02 in memory"
    assert holds and told == expected
    assert steps.above_one(frame.iloc[:1].assign(memory_efficiency=0.9), 0) == ("0 entries", True)


def test_the_printed_table_is_the_papers():
    printed = scaling.printed()
    assert list(printed.columns) == scaling.COLUMNS and len(printed) == 8 and set(printed["num_latents"]) == {128}
    row = printed[(printed["model"] == "flarepp") & (printed["num_tokens"] == 500_000) & (printed["num_ranks"] == 4)].iloc[0]
    assert row[["time_efficiency", "memory_efficiency"]].tolist() == [0.92, 0.95]
    assert quoted.table2("flarepp", 500_000.0, 128.0, 4.0) == ("0.92", "0.95")
    for keys in ((500_000, 64, 4), (500_000, 128, 1), (5, 128, 4)):
        assert quoted.table2("flarepp", *keys) is None
    assert quoted.table2("full", 500_000, 128, 4) is None
