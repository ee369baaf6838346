"""What a run folder says of its run: for the pages that numbers link to, and for the verb `trace`."""

from __future__ import annotations

from pathlib import Path

from flarepp.record import imported_from, read_run

GONE = "the record is not here"
VERBS = {"scaling": "parallel", "cost": "cost"}  # by the section that a spec has
LEARNED = {"lra": "classify"}  # by the name of the model, of others train
RECORD, SPEC, WEIGHTS = "metrics.json", "spec.json", "model.safetensors"


def of_run(folder: str) -> dict[str, object]:
    """Facts of one run by their names, those that its record has; of a run without a record its status alone.

    `metrics` are {name: value}, digests those that the record holds. ValueError for a record that is not as the run left it.
    """
    path = Path(folder)
    if not (path / RECORD).exists():
        return {"status": GONE}
    spec, result = read_run(path)
    origin, files = result.get("provenance", {}), result.get("files", {})
    asked: dict = next((spec[part] for part in ("training", "scaling", "cost") if part in spec), {})
    data, git = origin.get("dataset", {}), origin.get("git") or {}
    dirty = " with uncommitted changes" if git.get("dirty") else ""
    facts = {
        "status": ": ".join(filter(None, [result.get("status"), result.get("message")])),
        "seed": asked.get("seed"),
        "metrics": {name: value for name, value in result.get("metrics", {}).items() if value is not None},
        "scale": spec.get("scale"),
        "precision": asked.get("precision"),
        "data": data.get("source"),
        "dataset fingerprint": data.get("fingerprint"),
        "device": origin.get("device"),
        "imported from": imported_from(path, result),
        "git commit": git["commit"] + dirty if git.get("commit") else None,
        "spec": (path / SPEC).as_posix(),
        "record": (path / RECORD).as_posix(),
        "record sha256": result.get("sha256"),
        "weights": (path / WEIGHTS).as_posix() if WEIGHTS in files else None,
        "weights sha256": files.get(WEIGHTS),
        "made again by": _command(path, spec),
    }
    return {name: value for name, value in facts.items() if value not in (None, "", {})}


def _command(path: Path, spec: dict) -> str:
    """What makes a run again from its spec; a cell of a cost curve comes with its curve."""
    verb = next((VERBS[part] for part in VERBS if part in spec), "")
    learned = LEARNED.get(spec.get("model", {}).get("name"), "train")
    verb = verb or (learned if "precision" in spec.get("training", {}) else "predictor")
    return f"python -m flarepp {verb} '{((path.parent if verb == 'cost' else path) / SPEC).as_posix()}'"
