"""Run folders of suite "table1" as training leaves them, in the working folder, for tests of what is read from them."""

from __future__ import annotations

from pathlib import Path

import numpy

from flarepp import record

MODELS = {"full": "Full self-attention", "flare": "FLARE", "flarepp": "FLARE++", "transolver": "Transolver",
          "flarepp_shared": "FLARE++ (shared)", "constant": "Constant"}  # fmt: skip
ROLES = {"full": "reference", "flarepp_shared": "beyond", "constant": "trivial"}


def entry(model: str, dataset: str = "darcy", **changes) -> dict:
    """An entry of the plan, without a run unless `changes` name one."""
    return {"run": "", "dataset": dataset, "dataset_label": dataset.capitalize(), "model": model, "label": MODELS[model],
            "role": ROLES.get(model, "ranked"), "num_blocks": 2, "num_latents": None, "precision": "fp32", "seed": 0,
            "absent": None} | changes  # fmt: skip


def leave(model: str, error: float, *, seed=0, dataset="darcy", status="ok", cases=(0.5, 1.0, 1.5), scale="quick") -> dict:
    """Write the folder of a run with this test error, `cases` times it on every case; returns its entry in the plan.

    Evaluated at steps 1 and 2 with an error of 0.9 and then `error`; a run that diverged did so before the second.
    """
    folder = Path(f"results/{scale}/runs/table1/{dataset}/{model}/B2-fp32-s{seed}")
    spec = {"scale": scale, "dataset": {"name": dataset}, "model": {"name": "backbone", "mixer": model, "num_blocks": 2},
            "training": {"precision": "fp32", "seed": seed}}  # fmt: skip
    folder.mkdir(parents=True)
    curve = "step,loss,test_last,test_ema\n1,0.5,0.9,0.95\n" + (f"2,0.25,{error},{2 * error}\n" if status == "ok" else "")
    (folder / "history.csv").write_text(curve)
    (folder / "model.safetensors").write_bytes(model.encode())
    target, factors = numpy.ones((len(cases), 4, 1)), numpy.array(cases)
    found = {"last": error * factors, "ema": 2 * error * factors} if status == "ok" else {}
    attributes = {"dataset": dataset, "data_source": "generated"}
    record.write_predictions(folder, points=numpy.zeros((len(cases), 4, 2)), target=target, errors=found,
                             predictions=dict.fromkeys(found, target), attributes=attributes)  # fmt: skip
    record.write_json(spec, folder / "spec.json")
    errors = {"last": error, "ema": 2 * error, "best_test": error} if status == "ok" else {}
    metrics = {"parameter_count": 1234} | errors
    record.write_record({"status": status, "message": "", "metrics": metrics, "spec": spec,
                         "provenance": {"dataset": {"source": "generated"}}}, folder)  # fmt: skip
    return entry(model, dataset, run=str(folder), spec=record.digest(spec), seed=seed)
