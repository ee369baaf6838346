"""Configuration to run specs: layers, selectors, refusals, and that only what a key concerns changes."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import random

import pytest
import yaml

from conftest import PROJECT
from flarepp import spec

SIZES = {"smoke": 77, "quick": 94, "desk": 99, "paper": 133}


def set_key(config: dict, path: str, value) -> None:
    *parents, last = path.split(".")
    for key in parents:
        config = config.setdefault(key, {})
    config[last] = value


def runs(config: dict, **changes) -> dict[str, str]:
    """Path -> spec of every run, after `changes` (dots written as double underscores)."""
    config = copy.deepcopy(config)
    for path, value in changes.items():
        set_key(config, path.replace("__", "."), value)
    return {path: run.json for path, run in spec.expand(config).runs.items()}


@pytest.mark.parametrize("scale", spec.SCALES)
def test_every_scale_expands(config, scale):
    assert len(runs(config, scale=scale)) == SIZES[scale]


def test_paper_settings_are_those_of_the_paper(config):
    plan = spec.expand(config | {"scale": "paper"})
    run = plan.runs["results/paper/runs/table1/darcy/flarepp/B8-M128-fp32-s0"].spec
    model, training = run["model"], run["training"]
    assert (model["channel_dim"], model["num_heads"], model["ffn_ratio"], model["norm"]) == (128, 8, 2, "layernorm")
    assert (training["steps"], training["batch_size"], training["lr"]) == (250_000, 2, 1e-3)
    assert training["gradient_weight"] == 0.1 and run["dataset"]["resolution"] == 85


RECIPES = {  # lr, betas, weight decay on Elasticity and Darcy, batch size on both, pct_start, div, clipping
    "perceiver_io": (1e-3, [0.9, 0.999], (1e-5, 1e-5), (2, 2), 0.1, 25, 1),
    "set_transformer": (1e-3, [0.9, 0.999], (1e-5, 1e-5), (1, 4), 0.3, 25, 0.1),
    "gnot": (1e-3, [0.9, 0.999], (1e-5, 5e-5), (2, 4), 0.3, 25, 0.1),
    "lno": (1e-3, [0.9, 0.99], (5e-5, 5e-5), (4, 4), 0.2, 1e4, 1000),
}
SHAPES = {
    "perceiver_io": {"channel_dim": 128, "num_heads": 8, "num_blocks": 8, "num_latents": 512, "ffn_ratio": 4,
                     "init_std": 0.02},
    "set_transformer": {"channel_dim": 128, "num_heads": 8, "num_blocks": 8, "num_inducing": 64, "ffn_ratio": 2},
    "gnot": {"channel_dim": 128, "num_heads": 8, "num_blocks": 8, "num_experts": 3, "ffn_ratio": 2, "as_published": False,
             "reference_grid": 8},
}
LNO = {"elasticity": (192, 3), "darcy": (128, 2)}  # width, hidden layers of the MLPs


@pytest.mark.parametrize("model", RECIPES)
def test_complete_architectures_keep_their_own_recipe(config, model):
    lr, betas, decays, batches, pct_start, div, clip = RECIPES[model]
    plan = spec.expand(config | {"scale": "paper"})
    for dataset, decay, batch in zip(("elasticity", "darcy"), decays, batches):
        (run,) = [run.spec for path, run in plan.runs.items() if f"/table1/{dataset}/{model}/" in path]
        found = {key: run["training"][key] for key in ("lr", "betas", "weight_decay", "batch_size", "pct_start", "div_factor",
                                                       "final_div_factor", "clip_norm", "eps", "ema_decay", "steps")}
        assert found == {"lr": lr, "betas": betas, "weight_decay": decay, "batch_size": batch, "pct_start": pct_start,
                         "div_factor": div, "final_div_factor": 1e4, "clip_norm": clip, "eps": 1e-8, "ema_decay": 0.999,
                         "steps": 500 * 1000 // batch}
        width, layers = LNO[dataset]
        lno = {"channel_dim": width, "num_heads": 8, "num_blocks": 4, "num_modes": 256, "num_layers": layers}
        assert run["model"] == {"name": model} | SHAPES.get(model, lno)


TABLE5 = {"elasticity": (8, 64, 2, 1e-5), "darcy": (8, 128, 2, 1e-5), "airfoil": (8, 64, 2, 1e-5), "pipe": (2, 64, 2, 1e-5),
          "drivaerml": (4, 64, 1, 1e-2)}  # blocks, latents, batch size, weight decay
OWN = {  # of the complete architectures: batch size and weight decay on Airfoil, Pipe, DrivAerML; LNO's blocks there
    "perceiver_io": ((2, 2, 1), (1e-5, 1e-5, 1e-4)), "set_transformer": ((4, 4, 1), (1e-5, 1e-5, 1e-4)),
    "gnot": ((4, 4, 1), (1e-5, 1e-5, 1e-4)), "lno": ((4, 4, 1), (5e-5, 5e-5, 1e-4)),
}


def test_each_benchmark_has_its_settings_of_the_paper(config):
    plan = spec.expand(config | {"scale": "paper"})
    found = {tuple(path.split("/")[4:6]): run.spec for path, run in plan.runs.items() if "/table1/" in path}
    for dataset, (blocks, latents, batch, decay) in TABLE5.items():
        for mixer in ("flare", "flarepp", "transolver3"):
            model, training = (found[dataset, mixer][key] for key in ("model", "training"))
            assert (model["num_blocks"], model["num_latents"], training["batch_size"], training["weight_decay"]) == (
                blocks, latents, batch, decay), dataset
            assert training["steps"] == 500 * ((387 if dataset == "drivaerml" else 1000) // batch)
    for name, (batches, decays) in OWN.items():
        for dataset, batch, decay in zip(("airfoil", "pipe", "drivaerml"), batches, decays):
            training = found[dataset, name]["training"]
            assert (training["batch_size"], training["weight_decay"]) == (batch, decay), (name, dataset)
    assert [found[dataset, "lno"]["model"]["num_blocks"] for dataset in TABLE5] == [4, 4, 8, 8, 4]
    assert {dataset for dataset, model in found if model == "full"} == {"elasticity", "darcy", "airfoil"}
    assert {run["dataset"]["source"] for run in found.values()} == {"download"}


def test_a_download_without_sources_is_refused_at_once(config, monkeypatch):
    found = spec._constant
    monkeypatch.setattr(spec, "_constant", lambda path, name: None if (path.stem, name) == ("pipe", "SOURCES") else found(path, name))
    assert len(runs(config)) == SIZES["quick"]
    with pytest.raises(ValueError, match="data.source: got 'download'.*pipe.py has no SOURCES.*pipe: generate"):
        spec.expand(config | {"scale": "paper"})


@pytest.mark.parametrize("missing", [None, "FNO/darcy/piececonst_r421_N1024_smooth2.mat"])
def test_auto_reads_the_published_files_where_they_all_are(config, tmp_path, missing):
    config["data"] = config["data"] | {"source": "auto", "root": str(tmp_path)}
    for file in spec._published("darcy"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        if file != missing:
            (tmp_path / file).touch()
    datasets = spec.expand(config).datasets
    assert datasets["darcy"]["source"] == ("generate" if missing else "path")
    assert ("root" in datasets["darcy"]) == (missing is None)
    assert {datasets[name]["source"] for name in datasets if name != "darcy"} == {"generate"}
    assert "num_train" in datasets["drivaerml"]


def test_a_suite_without_datasets_has_all(config):
    config["datasets"] = {name: config["datasets"][name] for name in ("darcy", "elasticity", "airfoil")}
    for section in (config["defaults"], *config["models"].values()):
        drop(section, {"pipe", "drivaerml"})
    assert list(dict.fromkeys(entry["dataset"] for entry in spec.expand(config).suites["table1"])) == ["darcy", "elasticity", "airfoil"]


def drop(value, names: set) -> None:
    """Remove benchmarks from selectors and lists below `value`."""
    if isinstance(value, dict):
        for key in list(value):
            if key in names:
                del value[key]
            elif isinstance(value[key], list):
                value[key] = [item for item in value[key] if item not in names]
            else:
                drop(value[key], names)


def test_a_spec_is_complete(config):
    """Nothing defaults later: switches of the mixer are written out, norms follow precision."""
    for run in spec.expand(config).runs.values():
        assert set(run.spec["training"]) >= set(spec._training_keys()) - {"epochs"}
        if run.spec["model"]["name"] == "backbone":
            assert run.spec["model"]["norm"] == {"fp32": "layernorm", "fp16": "rmsnorm"}[run.spec["training"]["precision"]]
    flarepp = next(run.spec for path, run in spec.expand(config).runs.items() if "/flarepp/" in path)
    assert flarepp["model"]["seed_norm"] is True and flarepp["model"]["qk_norm"] is False


def test_runs_shared_by_suites_stand_once(config):
    plan = spec.expand(config | {"scale": "paper"})
    shared = [entry["run"] for entry in plan.suites["figure4"] if entry["run"].startswith("results/paper/runs/table1/")]
    assert len(shared) == 9  # depth 8 in FP32 of three mixers on three benchmarks
    assert len({run.json for run in plan.runs.values()}) == len(plan.runs)


def test_a_models_key_changes_its_runs_only(config):
    before, after = runs(config), runs(config, models__flarepp__training={"lr": 5e-4})
    changed = {path for path in before if before[path] != after.get(path)}
    assert changed == {path for path in before if "/flarepp/" in path}


@pytest.mark.parametrize("model", ["transolver", "transolverpp", "transolver3", "flare", "flarepp", "flarepp_shared", "flarepp_anchored"])
def test_mixers_that_sum_over_tokens_run_on_several_ranks(config, model):
    after = runs(config, **{f"models__{model}__training": {"context_parallel": 3, "data_parallel": 2}})
    training = [json.loads(text)["training"] for path, text in after.items() if f"/{model}/" in path]
    assert training and all((each["context_parallel"], each["data_parallel"]) == (3, 2) for each in training)


def test_a_datasets_key_changes_its_runs_only(config):
    before, after = runs(config), runs(config, datasets__darcy__data__seed=1)
    assert {path for path in before if before[path] != after[path]} == {path for path in before if "/darcy/" in path}


def test_labels_and_other_scales_change_no_run(config):
    before = runs(config)
    assert runs(config, models__flarepp__label="F++") == before
    lr = copy.deepcopy(config)["defaults"]["training"]
    lr["steps"] = lr["steps"] | {"desk": 17}
    assert runs(config, defaults__training=lr) == before
    assert runs(config, data__root="elsewhere") == before  # nothing is read from there while data are generated


def test_order_of_keys_does_not_matter(config):
    def shuffled(value):
        if not isinstance(value, dict):
            return value
        keys = list(value)
        random.Random(1).shuffle(keys)
        return {key: shuffled(value[key]) for key in keys}

    assert runs(shuffled(config)) == runs(config)


def test_a_suite_that_joins_moves_no_run(config):
    extra = config["suites"] | {"another": {"datasets": ["darcy"], "models": ["flare"]}}
    assert runs(config, suites=extra) == runs(config)


def test_models_layer_lies_over_suites_layer(config):
    after = runs(config, models__flare__training={"steps": 77})
    steps = {json.loads(text)["training"]["steps"] for path, text in after.items() if "/flare/" in path}
    assert steps == {77}


def test_epochs_replace_steps(config):
    after = runs(config, models__flare__training={"epochs": 3})
    assert {json.loads(text)["training"]["steps"] for path, text in after.items() if "/flare/" in path} == {3 * 96 // 2}


def test_seeds_multiply_runs(config):
    assert len(runs(config, seeds=[0, 1, 2])) == 3 * SIZES["quick"]


def test_not_affordable_is_an_entry_without_a_run(config):
    plan = spec.expand(config | {"scale": "desk"})
    absent = [entry for entry in plan.suites["table1"] if entry["absent"]]
    assert [(entry["model"], entry["dataset"], entry["run"]) for entry in absent] == [
        ("full", dataset, "") for dataset in ("darcy", "airfoil", "pipe", "drivaerml")]


BROKEN = {
    "unknown top-level key": ("sale", "quick", ["'sale' is unknown", "'scale'"]),
    "unknown scale": ("scale", "quik", ["'quik'", "'quick'", "smoke, quick, desk, paper"]),
    "unknown training key": ("defaults.training.learning_rate", 1e-3, ["defaults.training", "'learning_rate'", "lr"]),
    "misspelt training key": ("models.flare.training.batchsize", 4, ["models.flare.training", "did you mean 'batch_size'"]),
    "misspelt model key": ("models.flare.model.num_latent", 4, ["models.flare.model", "did you mean 'num_latents'"]),
    "key the mixer does not take": ("models.full.model.num_latents", 4, ["models.full.model", "'num_latents'", "qk_norm"]),
    "wrong type": ("defaults.training.lr", "fast", ["defaults.training.lr", "'fast'", "number"]),
    "number that YAML reads as text": ("defaults.training.lr", "1e-3", ["defaults.training.lr", "'1e-3'", "0.001"]),
    "a number out of range": ("defaults.training.ema_decay", 1.5, ["defaults.training.ema_decay", "1.5", "1"]),
    "heads that do not divide the width": ("defaults.model.num_heads", 5, ["num_heads", "got 5", "channel_dim 16", "[1, 2, 4, 8, 16]"]),
    "a warm-up shorter than a step": ("defaults.training.pct_start", 0.001, ["pct_start", "0.001", "> 1"]),
    "steps and epochs": ("models.flare.training", {"steps": 9, "epochs": 2}, ["steps 9", "epochs 2", "exactly one"]),
    "FP16 with LayerNorm": ("models.flare.model.norm", "layernorm", ["'layernorm'", "fp16", "rmsnorm"]),
    "a tile of no token": ("models.transolver3.model", {"tile": 0}, ["models.transolver3", "tile", "got 0", "at least 1"]),
    "a tile that is no number": ("models.transolver3.model", {"tile": True}, ["models.transolver3", "tile", "True"]),
    "a tile where there is none": ("models.transolver.model", {"tile": 100}, ["models.transolver.model", "'tile'"]),
    "a form given as text": ("models.gnot.model.as_published", "yes", ["models.gnot.model.as_published", "'yes'", "true, false"]),
    "a mixer for a whole model": ("models.lno.mixer", "flare", ["models.lno.mixer", "'flare'", "takes no mixer"]),
    "no experts": ("models.gnot.model.num_experts", 0, ["models.gnot", "num_experts", "at least 1"]),
    "a size another model has": ("models.lno.model.num_latents", 4, ["models.lno.model", "'num_latents'", "num_modes"]),
    "unknown mixer": ("models.flare.mixer", "flarep", ["models.flare.mixer", "'flarep'", "did you mean 'flare"]),
    "unknown model in a suite": ("suites.table1.models", ["flair"], ["suites.table1.models", "'flair'", "did you mean 'flare'"]),
    "unknown benchmark in a suite": ("suites.table1.datasets", ["darci"], ["suites.table1.datasets", "did you mean 'darcy'"]),
    "unknown benchmark": ("datasets.darcey", {"label": "D", "data": {"num_train": 4, "num_test": 2, "seed": 0}},
        ["'darcey'", "did you mean 'darcy'"]),
    "a scale misspelt in a selector": ("defaults.training.lr", {"smoke": 1.0, "quik": 1.0}, ["defaults.training.lr", "'quik'", "'quick'"]),
    "a batch larger than the set": ("defaults.training.batch_size", 500, ["batch_size", "500", "16"]),
    "a grid that is no stride": ("datasets.darcy.data.resolution", 30, ["datasets.darcy.data.resolution", "got 30", "[3, 8, 15]"]),
    "a mesh that misses the corners": ("datasets.elasticity.data.mesh", [10, 2], ["datasets.elasticity.data.mesh", "multiple of 4"]),
    "a mesh of two numbers where three are needed": ("datasets.airfoil.data.mesh", [24, 64],
        ["datasets.airfoil.data.mesh", "[24, 64]", "3 numbers"]),
    "a grid between strides": ("datasets.darcy.data.resolution", 10, ["datasets.darcy.data.resolution", "got 10", "[3, 8, 15]"]),
    "a stride of one number": ("datasets.pipe.data.stride", [2], ["datasets.pipe.data.stride", "[2]", "2 numbers"]),
    "a lock for each benchmark": ("data.lock", {"pipe": "a", "default": "b"}, ["data.lock", "a, b"]),
    "a mesh of none": ("datasets.pipe.data.mesh", [0, 4], ["datasets.pipe.data.mesh.0", "got 0", "at least 1"]),
    "points below one": ("datasets.drivaerml.data.num_points", 0, ["datasets.drivaerml.data.num_points", "at least 1"]),
    "replicas that do not share the batch": ("defaults.training.data_parallel", 3,
        ["training.data_parallel", "got 3", "batch_size 4", "[1, 2, 4]"]),
    "tokens of full attention on two ranks": ("models.full.training", {"context_parallel": 2},
        ["models.full", "training.context_parallel", "got 2", "'full'", "allowed for it: 1", "flarepp, "]),
    "tokens of a whole model on two ranks": ("models.gnot.training.context_parallel", 2,
        ["training.context_parallel", "got 2", "'gnot'", "Mixers that can: flare, "]),
    "no rank": ("defaults.training.context_parallel", 0, ["defaults.training.context_parallel", "got 0", "at least 1"]),
    "an unknown source": ("data.source", "dowload", ["data.source", "'dowload'", "did you mean 'download'", "auto"]),
    "a gradient term without a grid": ("defaults.training.gradient_weight", 0.1, ["gradient_weight", "elasticity", "grid"]),
    "a key of another benchmark": ("datasets.elasticity.data.resolution", 29, ["datasets.elasticity.data", "'resolution'", "mesh"]),
    "an empty list of seeds": ("seeds", [], ["seeds"]),
    "more evaluations than steps": ("defaults.training.num_evaluations", 4000, ["num_evaluations", "4000"]),
    "a switch given as text": ("models.flarepp.model.seed_norm", "no", ["models.flarepp", "seed_norm", "'no'", "true, false"]),
    "a switch given as a number": ("models.flarepp.model.qk_norm", 3.7, ["qk_norm", "3.7", "true, false"]),
    "a float for an integer": ("defaults.model.channel_dim", 16.0, ["channel_dim", "16.0", "integer"]),
    "text for an integer": ("defaults.model.channel_dim", "16", ["channel_dim", "write 16)"]),
    "not a number": ("defaults.training.lr", float("nan"), ["lr", "nan", "number"]),
    "an infinite number": ("defaults.training.lr", float("inf"), ["lr", "inf", "number"]),
    "true for a number": ("defaults.training.lr", True, ["lr", "True", "number"]),
    "null": ("defaults.training.lr", None, ["defaults.training.lr", "null", "leave the key out"]),
    "a suite that is null": ("suites.table1", None, ["suites.table1", "null"]),
    "a negative seed": ("seeds", [-1], ["seeds.0", "-1", "at least 0"]),
    "a seed beyond 32 bits": ("seeds", [2**64], ["seeds.0", "at most 4294967295"]),
    "a misspelt axis": ("suites.figure4.axes", {"num_blokcs": [1, 2]}, ["suites.figure4.axes", "did you mean 'num_blocks'"]),
    "an axis of text": ("suites.figure4.axes", {"num_blocks": ["two"]}, ["model.num_blocks", "'two'", "integer"]),
    "an axis below its range": ("suites.figure4.axes", {"num_blocks": [0]}, ["model.num_blocks", "got 0", "at least 1"]),
    "an unknown precision": ("suites.figure4.axes.precision", ["fp64"], ["training.precision", "'fp64'", "fp32, fp16"]),
    "an axis that is no option": ("suites.figure4.axes", {"mixer": ["full"]}, ["suites.figure4.axes", "'mixer'"]),
    "a key that is not text": ("suites", {3: {}}, ["suites", "3", "not text"]),
    "a number of 400 digits": ("defaults.training.lr", 10**400, ["lr", "number"]),
    "a name that is a path": ("suites.../x", {"datasets": ["darcy"], "models": ["flare"]}, ["suites"]),
    "a label with markup": ("models.flare.label", "$\\bad$", ["models.flare.label"]),
    "a model called like a predictor": ("models.constant", {"label": "C", "role": "ranked", "name": "backbone", "mixer": "full"},
        ["'constant'", "twice"]),
    "two benchmarks of one label": ("datasets.darcy.label", "elasticity ", ["datasets", "'elasticity'", "twice"]),
    "a shared option nobody takes": ("defaults.model.num_latent", 3, ["defaults.model", "did you mean 'num_latents'"]),
    "a suite's option nobody takes": ("suites.figure4.model", {"qk_nrom": True}, ["suites.figure4.model", "did you mean 'qk_norm'"]),
    "an unknown predictor": ("predictors.pca_rigde", {"label": "P"}, ["predictors", "did you mean 'pca_ridge'"]),
    "two models of one label": ("models.full.label", "FLARE", ["'flare'", "twice"]),
    "a section that is missing": ("models", {}, ["models"]),
    "scaling without one rank": ("scaling.num_ranks", [2, 4], ["scaling.num_ranks", "[2, 4]", "1 must be among them"]),
    "a measurement on no rank": ("scaling.num_ranks", [0, 1], ["scaling.num_ranks.0", "got 0", "at least 1"]),
    "ranks that are no list": ("scaling.num_ranks", 2, ["scaling.num_ranks", "got 2", "array"]),
    "tokens twice": ("scaling.num_tokens", [256, 256], ["scaling.num_tokens", "without repetitions"]),
    "a misspelt key of scaling": ("scaling.num_token", [256], ["scaling", "did you mean 'num_tokens'"]),
    "an unknown model in scaling": ("scaling.models", ["flare", "flarep"], ["scaling.models", "did you mean 'flarepp'"]),
    "attention over all tokens on ranks": ("scaling.models", ["flare", "full"],
        ["scaling.models", "'full'", "cannot share tokens", "flare, flarepp"]),
    "a whole architecture on ranks": ("scaling.models", ["lno"], ["scaling.models", "'lno'", "cannot share tokens"]),
    "a device that scaling does not choose": ("scaling.device", "auto", ["scaling.device", "'auto'", "cpu, cuda"]),
    "a precision of scaling": ("scaling.precision", "fp64", ["scaling.precision", "'fp64'", "fp32, fp16"]),
    "no timed step": ("scaling.timed_steps", 0, ["scaling.timed_steps", "got 0", "at least 1"]),
    "heads of scaling": ("scaling.model.num_heads", 3, ["scaling", "num_heads", "got 3", "[1, 2, 4, 8, 16]"]),
    "latents beside the list of them": ("scaling.model.num_latents", 8, ["scaling.model", "'num_latents'", "num_blocks"]),
    "a misspelt size of scaling": ("scaling.model.chanel_dim", 8, ["scaling.model", "did you mean 'channel_dim'"]),
    "LayerNorm in half precision ranks": ("scaling", {"precision": "fp16", "model": {"norm": "layernorm"}},
        ["scaling", "'layernorm'", "rmsnorm"]),
    "scaling by benchmark": ("scaling.seed", {"darcy": 1}, ["scaling", "'seed' is missing"]),
    "scaling that is null": ("scaling", None, ["scaling", "null"]),
    "a suite of the name that scaling makes": ("suites.table2", {"models": ["flare"]}, ["suites", "'table2'", "scaling"]),
    "a suite of the name that cost makes": ("suites.figure5", {"models": ["flare"]}, ["suites", "'figure5'", "'cost'"]),
    "a misspelt key of cost": ("cost.max_step_second", 1, ["cost", "did you mean 'max_step_seconds'"]),
    "an unknown model in cost": ("cost.models", ["flare", "flarep"], ["cost.models", "did you mean 'flarepp'"]),
    "a whole architecture in cost": ("cost.models", ["lno"], ["cost.models", "'lno'", "no model of the backbone", "full, transolver"]),
    "tokens that do not ascend": ("cost.num_tokens", [128, 64], ["cost.num_tokens", "[128, 64]", "ascend"]),
    "tokens of cost twice": ("cost.num_tokens", [64, 64], ["cost.num_tokens", "without repetitions"]),
    "no latents in cost": ("cost.num_latents", [], ["cost.num_latents", "at least 1"]),
    "no time for a step": ("cost.max_step_seconds", 0, ["cost.max_step_seconds", "got 0", "above 0"]),
    "no time for all steps": ("cost.max_seconds", "1e3", ["cost.max_seconds", "number", "1000"]),
    "nothing to warm up": ("cost.warmup_steps", 0, ["cost.warmup_steps", "got 0", "at least 1"]),
    "a device that cost does not choose": ("cost.device", "gpu", ["cost.device", "'gpu'", "cpu, cuda"]),
    "a precision of cost": ("cost.precision", "fp8", ["cost.precision", "'fp8'", "did you mean 'fp32'", "fp32, fp16"]),
    "compiling on the CPU": ("cost.compile", True, ["cost.compile", "'cpu'", "false"]),
    "compile as text": ("cost.compile", "yes", ["cost.compile", "'yes'", "boolean"]),
    "heads of cost": ("cost.model.num_heads", 3, ["cost", "num_heads", "got 3", "[1, 2, 4, 8, 16]"]),
    "latents of cost beside the list of them": ("cost.model.num_latents", 8, ["cost.model", "'num_latents'", "num_blocks"]),
    "a misspelt size of cost": ("cost.model.fnn_ratio", 8, ["cost.model", "did you mean 'ffn_ratio'"]),
    "cost by benchmark": ("cost.seed", {"darcy": 1}, ["cost", "'seed' is missing"]),
    "cost that is null": ("cost", None, ["cost", "null"]),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_configuration_is_refused(config, what):
    path, value, words = BROKEN[what]
    if path == "scaling" and value is not None:
        value = config["scaling"] | value | {"model": config["scaling"]["model"] | value["model"]}
    set_key(config, path, value) if ".." not in path else config["suites"].update({"../x": value})
    config["scale"] = "smoke" if path != "scale" else value
    with pytest.raises(ValueError) as caught:
        spec.expand(config)
    for word in words:
        assert word in str(caught.value), f"{word!r} not in: {caught.value}"


def test_a_broken_value_of_another_scale_is_refused(config):
    config["defaults"]["training"]["steps"]["desk"] = -1
    with pytest.raises(ValueError, match="scale desk.*steps.*-1"):
        spec.expand(config | {"scale": "quick"})


def test_schema_and_configuration_are_in_step(config):
    """Every key of the schema's closed sections is used by config.yaml or is optional by meaning; each has a description."""
    schema = yaml.safe_load((PROJECT / "workflow/schemas/config.schema.yaml").read_text(encoding="utf-8"))
    definitions = schema["$defs"]
    unused = set(definitions["training"]["properties"]) - set(config["defaults"]["training"])
    assert unused == set()
    used = set(itertools.chain.from_iterable(section["data"] for section in config["datasets"].values()))
    assert set(definitions["dataset_data"]["properties"]) == used
    assert set(schema["properties"]) == set(config)
    for section in (definitions["training"], definitions["dataset_data"], definitions["model_options"], schema):
        for key, value in section["properties"].items():
            assert "description" in value or "$ref" in value, key
    closed = [section for section in (schema, *definitions.values()) if section.get("type") == "object"]
    assert all("additionalProperties" in section for section in closed)


@pytest.mark.parametrize("file, part", [
    ("mixers/flarepp.py", "/flarepp/"), ("mixers/full.py", "/full/"), ("mixers/sparse.py", "/sparse/"), ("attention.py", "/"),
    ("scaling.py", "table2/"), ("cost.py", "figure5/"), ("operations.py", "figure5/"), ("classify.py", "table6/")])
def test_a_source_belongs_to_exactly_its_runs(config, file, part):
    """What Snakemake compares, without it (with it: tests/test_pipeline.py)."""
    plan = spec.expand(config)
    code = {path: run.code for kind in (plan.runs, plan.classifiers, plan.scaling, plan.curves) for path, run in kind.items()}
    assert {path for path in code if f"src/flarepp/{file}" in code[path]} == {path for path in code if part in f"{path}/"} != set()


def test_sources_of_a_run_hold_its_mixer_and_no_other(config):
    plan = spec.expand(config)
    for path, run in plan.runs.items():
        own = [file for file in run.code if file.startswith(("src/flarepp/mixers/", "src/flarepp/models/")) and "__init__" not in file]
        model = run.spec["model"]
        mixer = [f"src/flarepp/mixers/{model['mixer']}.py"] if "mixer" in model else []
        assert own == [*mixer, f"src/flarepp/models/{model['name']}.py"], path
        assert {"src/flarepp/attention.py", "src/flarepp/train.py"} <= set(run.code)
        assert not any("paper" in file or "solvers" in file or "spec.py" in file for file in run.code)
        assert all((PROJECT / file).exists() for file in run.code)


CELLS = {"smoke": 4, "quick": 12, "desk": 24, "paper": 24}


@pytest.mark.parametrize("scale", spec.SCALES)
def test_scaling_is_a_suite_of_its_own(config, scale):
    plan = spec.expand(config | {"scale": scale})
    entries = plan.suites["table2"]
    assert len(plan.scaling) == len(entries) == CELLS[scale]
    assert plan.suite_runs("table2") == list(plan.scaling) and not set(plan.scaling) & set(plan.runs)
    for entry, (path, run) in zip(entries, plan.scaling.items()):
        model, settings = run.spec["model"], run.spec["scaling"]
        assert path == f"results/{scale}/runs/table2/{entry['model']}/N{settings['num_tokens']}-M{model['num_latents']}-" \
                       f"R{settings['num_ranks']}-{settings['precision']}"
        assert (entry["num_tokens"], entry["num_ranks"], entry["num_latents"], entry["num_blocks"], entry["precision"]) == (
            settings["num_tokens"], settings["num_ranks"], model["num_latents"], model["num_blocks"], settings["precision"])
        assert (entry["dataset"], entry["dataset_label"], entry["seed"], entry["absent"]) == ("", "", 0, None)
        code = {file.removeprefix("src/flarepp/") for file in run.code}
        assert {"scaling.py", "parallel.py", "losses.py", "models/backbone.py", f"mixers/{model['mixer']}.py"} <= code
        assert len([file for file in code if file.startswith("mixers/")]) == 2 and "spec.py" not in code  # its own and __init__


def test_scaling_at_paper_scale_is_that_of_the_paper(config):
    runs = spec.expand(config | {"scale": "paper"}).scaling
    cells = {(run.spec["model"]["mixer"], run.spec["scaling"]["num_tokens"], run.spec["scaling"]["num_ranks"],
              run.spec["model"]["num_latents"]) for run in runs.values()}
    assert cells == set(itertools.product(("flare", "flarepp"), (500_000, 1_000_000), (1, 2, 4), (64, 128)))
    one = runs["results/paper/runs/table2/flarepp/N1000000-M64-R4-fp16"].spec
    assert one["model"] == {
        "name": "backbone", "mixer": "flarepp", "channel_dim": 128, "num_heads": 8, "num_blocks": 8, "num_latents": 64,
        "ffn_ratio": 4, "norm": "rmsnorm", "seed_norm": True, "qk_norm": False}
    assert one["scaling"] == {"num_tokens": 1_000_000, "num_ranks": 4, "batch_size": 1, "precision": "fp16", "warmup_steps": 10,
                              "timed_steps": 30, "num_threads": 1, "device": "cuda", "seed": 0}


def test_a_key_of_scaling_changes_its_runs_only(config):
    before, after = spec.expand(config), spec.expand(config | {"scaling": config["scaling"] | {"timed_steps": 7}})
    assert after.runs == before.runs and after.scaling.keys() == before.scaling.keys()
    assert {run.spec["scaling"]["timed_steps"] for run in after.scaling.values()} == {7}
    models = copy.deepcopy(config["models"])
    models["flare"]["training"] = {"lr": 0.1}
    models["flarepp"]["model"] = {"qk_norm": {"darcy": True, "default": False}}
    assert spec.expand(config | {"models": models}).scaling == before.scaling


CURVES = {"smoke": 4, "quick": 11, "desk": 22, "paper": 16}


@pytest.mark.parametrize("scale", spec.SCALES)
def test_cost_is_a_suite_of_cells_on_curves(config, scale):
    plan = spec.expand(config | {"scale": scale})
    entries = plan.suites["figure5"]
    assert len(plan.curves) == CURVES[scale] and len(entries) == CURVES[scale] * len(plan.num_tokens)
    assert plan.suite_runs("figure5") == [f"{path}/N{tokens}" for path in plan.curves for tokens in plan.num_tokens]
    for entry in entries:
        path, cell = entry["run"].rsplit("/N", 1)
        run = plan.curves[path]
        model, settings = run.spec["model"], run.spec["cost"]
        latents = f"M{model['num_latents']}-" if entry["model"] != "full" else ""
        assert path == f"results/{scale}/runs/figure5/{entry['model']}/{latents}{settings['precision']}"
        assert (entry["num_tokens"], entry["num_ranks"], entry["num_latents"], entry["num_blocks"], entry["precision"]) == (
            int(cell), None, model.get("num_latents"), model["num_blocks"], settings["precision"])
        assert (entry["dataset"], entry["dataset_label"], entry["seed"], entry["absent"]) == ("", "", 0, None)
        assert settings["num_tokens"] == plan.num_tokens == sorted(plan.num_tokens)
        code = {file.removeprefix("src/flarepp/") for file in run.code}
        assert {"cost.py", "step.py", "operations.py", "models/backbone.py", f"mixers/{model['mixer']}.py"} <= code
        assert len([file for file in code if file.startswith("mixers/")]) == 2  # its own and __init__
        assert not code & {"spec.py", "train.py", "scaling.py", "parallel.py"}


def test_cost_at_paper_scale_is_that_of_the_paper(config):
    plan = spec.expand(config | {"scale": "paper"})
    one = plan.curves["results/paper/runs/figure5/flare/M64-fp16"].spec
    assert one["model"] == {"name": "backbone", "mixer": "flare", "channel_dim": 128, "num_heads": 8, "num_blocks": 8,
                            "num_latents": 64, "ffn_ratio": 4, "norm": "rmsnorm", "qk_norm": False}
    assert one["cost"] | {"num_tokens": 0} == {
        "num_tokens": 0, "batch_size": 1, "precision": "fp16", "warmup_steps": 10, "timed_steps": 30, "max_seconds": 2,
        "max_step_seconds": 60, "num_threads": 4, "device": "cuda", "compile": True, "seed": 0}
    assert {1000, 100_000, 500_000, 1_000_000} < set(plan.num_tokens)
    assert {run.spec["model"].get("num_latents") for run in plan.curves.values()} == {None, 64, 128, 256}


@pytest.mark.parametrize("scale", ["desk", "paper"])
def test_cost_and_scaling_meet(config, scale):
    """On one rank they measure the same cells: a claim compares them."""
    plan = spec.expand(config | {"scale": scale})
    shared = ("batch_size", "precision", "device", "seed")
    for run in plan.scaling.values():
        model, settings = run.spec["model"], run.spec["scaling"]
        curve = plan.curves[f"results/{scale}/runs/figure5/{model['mixer']}/M{model['num_latents']}-{settings['precision']}"]
        assert curve.spec["model"] == model and settings["num_tokens"] in curve.spec["cost"]["num_tokens"]
        assert all(curve.spec["cost"][key] == settings[key] for key in shared)


def test_a_key_of_cost_changes_its_curves_only(config):
    before, after = spec.expand(config), spec.expand(config | {"cost": config["cost"] | {"timed_steps": 7}})
    assert after.runs == before.runs and after.scaling == before.scaling and after.curves.keys() == before.curves.keys()
    assert {run.spec["cost"]["timed_steps"] for run in after.curves.values()} == {7}


def test_a_sweep_is_the_section_below_another_folder(config):
    plan = spec.expand(config | {"scale": "desk"})
    curves, entries = spec.cost_sweep(config, "desk", "elsewhere")
    assert [run.spec for run in curves.values()] == [run.spec for run in plan.curves.values()]
    assert [entry["run"].replace("elsewhere/", "results/desk/", 1) for entry in entries] == plan.suite_runs("figure5")
    curves, entries = spec.cost_sweep(config, "desk", "here", models=["flarepp"], device="cuda")
    assert {run.spec["model"]["mixer"] for run in curves.values()} == {"flarepp"} == {entry["model"] for entry in entries}
    assert {run.spec["cost"]["device"] for run in curves.values()} == {"cuda"}
    with pytest.raises(ValueError, match="cost.device.*'gpu'.*cpu, cuda"):
        spec.cost_sweep(config, "desk", "here", device="gpu")


def test_what_shards_is_read_from_the_source():
    assert [name for name in spec._names("mixers") if spec._shards(name)] == [
        "flare", "flarepp", "flarepp_anchored", "flarepp_shared", "transolver", "transolver3", "transolverpp"]


@pytest.mark.parametrize("source", ["path", "download"])
def test_only_files_that_no_lock_binds_are_watched(config, tmp_path, monkeypatch, source):
    """With source "path" the rule sees the digests of the files that are there; a folder is none of them."""
    monkeypatch.chdir(tmp_path)
    first, second = spec._published("darcy")
    (tmp_path / "data" / first).parent.mkdir(parents=True)
    (tmp_path / "data" / first).write_bytes(b"fields")
    (tmp_path / "data" / second).mkdir()
    plan = spec.expand(config | {"data": config["data"] | {"source": source}})
    expected = {first: hashlib.sha256(b"fields").hexdigest()}
    assert plan.published_json("darcy") == ("" if source == "download" else json.dumps(expected))
    assert spec.expand(config).published_json("darcy") == ""
