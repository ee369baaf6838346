"""A finished run as a folder for the Hugging Face hub, and back from it as a function on physical fields.

    predict = load("folder")        # from the hub: load(huggingface_hub.snapshot_download("owner/name"))
    fields = predict(features)      # [S, N, c_in] -> [S, N, c_out], both in physical units

The folder holds model.safetensors, spec.json and metrics.json as the run left them, so that `evaluate` serves it like any
run and what was changed afterwards is refused; config.json, the same in short for the hub; README.md, the model card.
Nothing is uploaded.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import yaml
from torch import nn

from flarepp import record
from flarepp.data import benchmark_module, store
from flarepp.errors import unknown
from flarepp.evaluate import NAMES, check_weights, normaliser, read_record, read_weights
from flarepp.models import build_model
from flarepp.train import Inference, Split, predict

KEPT = ("spec.json", "model.safetensors", "metrics.json")
MADE = {"generated": "made by this project's solvers", "stand-in": "a stand-in of this project's, of simpler physics"}
HONEST = {
    "smoke": "It was trained for a few steps, to test that the code runs. Its numbers mean nothing.",
    "quick": "It was trained for some hundred steps on a hundred samples, to show that the pipeline works. Its error is no "
             "result, neither of the method nor of the paper.",
    "desk": "It is a small model, trained on data of reduced size, for comparing mixers with each other. Its error is not "
            "comparable with the paper's.",
    "paper": "It was trained at the scale of the paper; the ledger of the project says how its error compares.",
}
CARD = """
# {title}

A {model} for the benchmark {label} of *FLARE++: low-rank attention with dynamic attention routing* (arXiv 2608.11519),
exported from flarepp. It maps {inputs} to {outputs} on {points}.

**Scale `{scale}`.** {honest}

| weights | mean relative L2 error on {num_test} test samples |
|---|---|
{errors}

- data: {data}, split {split}, fingerprint `{fingerprint}`
- training: {steps} steps, precision {precision}, seed {seed}, on {device}, PyTorch {torch}, commit `{commit}`
- parameters: {parameters:,}
- licence of the weights: MIT; of the data: {licence}

```python
from flarepp.export import load  # of the installed project

# From the hub: load(huggingface_hub.snapshot_download("owner/name")); other weights: weights="last" or "ema".
predict = load("{folder}")
fields = predict(features)  # NumPy [S, N, {in_dim}] -> [S, N, {out_dim}], both in physical units
```

`python -m flarepp evaluate {folder} --data {dataset}.h5` computes the errors above again from the dataset file.
`model.safetensors` has both sets of weights, `last/…` and `ema/…`, and the normalisers `norm/features` and `norm/target`
(mean and standard deviation of each channel). `metrics.json` has its SHA-256.
"""


@dataclass
class Pretrained:
    """A trained model on physical fields: call it with features [S, N, c_in], and a mask [S, N] where sizes differ."""

    model: nn.Module
    inference: Inference  # without a test set
    norms: dict[str, store.Affine]

    @torch.no_grad()
    def __call__(self, features: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
        """Fields [S, N, c_out], float32, 0 where the mask is False. ValueError for arrays of another shape."""
        run = self.inference
        channels, points = len(self.norms["features"].mean), run.grid and math.prod(run.grid)
        if features.ndim != 3 or features.shape[2] != channels or points not in (None, features.shape[1]):
            raise ValueError(f"features: got {list(features.shape)}; expected [samples, {points or 'points'}, {channels}]")
        encoded = self.norms["features"].encode(features).astype(np.float32)
        if mask is not None:
            encoded[~mask] = 0
        real = None if mask is None else torch.tensor(mask, device=run.device)
        return predict(run, self.model, torch.tensor(encoded, device=run.device), real).cpu().numpy()


def load(folder: str | Path, weights: str | None = None, device: str = "cpu") -> Pretrained:
    """The model of an exported folder, or of the folder of a finished run.

    weights: "last" or "ema", by default those that config.json names, else "last". ValueError or FileNotFoundError for a
    folder that is not as it was exported.
    """
    folder = Path(folder)
    spec, run = read_record(folder)
    if weights is None:
        weights = record.read_json(folder / "config.json").get("weights") if (folder / "config.json").exists() else "last"
    if weights not in NAMES:
        raise ValueError(f"{folder}: {unknown('weights', weights, NAMES)}")
    path = record.read_output(folder, "model.safetensors")
    tensors = read_weights(path, run)
    norms = {name: normaliser(path, tensors, name) for name in ("features", "target")}
    grid = tuple(run.grid) if run.grid else None
    in_dim, out_dim = len(norms["features"].mean), len(norms["target"].mean)
    with torch.random.fork_rng(devices=[]):
        model = build_model(**spec["model"], in_dim=in_dim, out_dim=out_dim, grid=grid)
    check_weights(path, tensors, model, grid, run)
    model.load_state_dict({key: tensors[f"{weights}/{key}"] for key in model.state_dict()})
    target = norms["target"]
    mean, std = (torch.tensor(value, dtype=torch.float32, device=device) for value in (target.mean, target.std))
    model, nothing = model.to(device).eval(), torch.empty(0, 0, 0, device=device)
    return Pretrained(model, Inference(spec, grid, Split(nothing, nothing, None), mean, std, {weights: model}), norms)


def export(run_dir: Path, out: Path, shown: str) -> str:
    """Write the folder `out`; returns what is in it, in words.

    shown: the weights that are loaded by default. ValueError or FileNotFoundError for a run without usable weights, and for
    a folder that is there already.
    """
    spec, result = record.read_whole_run(run_dir)
    if result["status"] != "ok" or spec["model"].get("name") == "lra" or "training" not in spec:
        raise ValueError(f"{run_dir}: status {result['status']!r}, model {spec['model'].get('name')!r}; exported are finished "
                         "runs on the benchmarks of fields, status 'ok'")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out}: is there already; name a new folder")
    model = load(run_dir, shown)
    out.mkdir(parents=True, exist_ok=True)
    for name in KEPT:
        shutil.copyfile(run_dir / name, out / name)
    channels, grid = {name: len(norm.mean) for name, norm in model.norms.items()}, model.inference.grid
    config = {"library_name": "flarepp", "model": spec["model"], "weights": shown, "scale": spec["scale"],
              "in_dim": channels["features"], "out_dim": channels["target"], "grid": grid and list(grid),
              "dataset": result["provenance"]["dataset"], "precision": spec["training"]["precision"]}
    record.write_json(config, out / "config.json")
    with record.atomic_path(out / "README.md") as partial:
        partial.write_text(card(config, result, channel_names(run_dir, spec, channels), out.name), encoding="utf-8")
    names = ", ".join(sorted(path.name for path in out.iterdir()))
    return f"{out}: {names}; mean test error {result['metrics'][shown]} ({shown})"


def channel_names(run_dir: Path, spec: dict, channels: dict[str, int]) -> dict[str, str]:
    """What features and target are, by the dataset card of the same results folder; their number where it is not there."""
    runs = next((parent for parent in run_dir.absolute().parents if parent.name == "runs"), None)
    path = runs and runs.parent / "data" / f"{spec['dataset']['name']}.json"
    if path and path.exists():
        return {name: ", ".join(names) for name, names in record.read_card(path)["channels"].items()}
    return {name: f"{number} channels" for name, number in channels.items()}


def card(config: dict, result: dict, channels: dict[str, str], folder: str) -> str:
    """README.md: what the hub reads (YAML), then what people do."""
    spec, metrics, origin = result["spec"], result["metrics"], result["provenance"]
    data, model = origin["dataset"], f"{spec['model'].get('mixer', spec['model']['name'])} model"
    published = getattr(benchmark_module(data["name"]), "LICENCE", "not stated")
    label, grid = data["name"].capitalize(), " x ".join(map(str, config["grid"] or []))
    text = CARD.format(
        title=f"{model} on {label}, scale {spec['scale']}", model=model, label=label, folder=folder, scale=spec["scale"],
        inputs=channels["features"], outputs=channels["target"], in_dim=config["in_dim"], out_dim=config["out_dim"],
        points=f"a grid of {grid} points" if grid else "unstructured points", honest=HONEST[spec["scale"]],
        errors="\n".join(f"| {key} | {metrics[key]:.6g} |" for key in NAMES), num_test=spec["dataset"]["num_test"],
        data=MADE.get(data["source"], "published files"), split=data["split"], fingerprint=data["fingerprint"][:12],
        licence="MIT, as this project" if data["source"] in MADE else published,
        dataset=data["name"], steps=metrics["steps"], precision=config["precision"], seed=spec["training"]["seed"],
        device=origin["device"], torch=origin["versions"]["torch"], commit=(origin.get("git") or {}).get("commit") or "unknown",
        parameters=metrics["parameter_count"])
    return f"---\n{yaml.safe_dump(for_hub(data, spec['scale'], metrics, folder), sort_keys=False)}---\n{text}"


def for_hub(data: dict, scale: str, metrics: dict, folder: str) -> dict:
    """The head of README.md: licence, tags, and the errors as the hub lists them."""
    errors = [{"type": "relative_l2", "name": f"mean relative L2 error ({key} weights)", "value": metrics[key]} for key in NAMES]
    results = [{"task": {"type": "field-prediction"}, "metrics": errors,
                "dataset": {"type": data["name"], "name": f"{data['name']} ({data['source']})"}}]
    licence = {"license": "mit"} if data["source"] in MADE else {"license": "other", "license_name": "mit-and-that-of-the-data"}
    return {**licence, "library_name": "flarepp", "model-index": [{"name": folder, "results": results}],
            "tags": ["pde", "surrogate", "attention", data["name"], f"scale-{scale}"]}
