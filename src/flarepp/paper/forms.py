"""Which form of a model ran, in words, where it has more than one: read from the options in the specs of the runs."""

from __future__ import annotations

from flarepp.paper import quoted, settings

FLAGS: dict[tuple[str, object], str] = {
    ("model.as_published", True): "as published: on grids the input reaches the model through its expert gates only",
    ("model.as_published", False): "not as published: on grids the input also enters as features, beside the expert gates",
    ("model.eval_noise", True): "noise in evaluation too, as in the public code: test errors are random",
    ("model.eval_noise", False): "noise in training only: test errors are not random",
    ("model.tile", None): "untiled: all slice weights in memory",
}
ON_GRIDS = ("model.as_published",)  # options without effect on an unstructured benchmark


def of_run(run: settings.Run) -> str:
    """The forms that a run's options choose, joined by "; "; empty for a model that has one form."""
    on_grid = quoted.dataset_row("table3", "benchmark", run.dataset).get("grid") != "unstructured"
    return "; ".join(_words(key, value) for key, value in run.settings.items()
                     if key in {key for key, _ in FLAGS} and (on_grid or key not in ON_GRIDS))


def _words(key: str, value: object) -> str:
    return FLAGS.get((key, value)) or f"tiled: {value} points a tile"


def of_row(runs: list[settings.Run]) -> str:
    """The forms of one model's runs, naming the datasets where they are not the same on all; empty for one form."""
    datasets: dict[str, dict[str, None]] = {}
    for run in runs:
        if form := of_run(run):
            datasets.setdefault(form, {})[run.dataset_label] = None
    if len(datasets) < 2:
        return "".join(datasets)
    return "; ".join(f"{form} ({', '.join(labels)})" for form, labels in datasets.items())
