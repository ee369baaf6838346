"""Configuration to complete run specs. No torch here: a mixer's options are read from its source with `ast`.

    config.yaml -> pick (one scale, one benchmark) -> schema -> layers -> checks -> Plan of runs

A value of the configuration may be a mapping by scale or by benchmark (`default` for the rest); `pick` chooses. A run's
model and training sections are layered: defaults < suite < model < the suite's axes. Runs of the section `scaling` have a
model section, its sizes < model < its lists, and settings of their own; so have the curves of the section `cost`. The
section `lra` has tasks in place of benchmarks, and rows of its own. Every error is a ValueError that names the key, what came,
what is allowed and the nearest valid name.
"""

from __future__ import annotations

import ast
import functools
import itertools
import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from flarepp.errors import shown, unknown
from flarepp.record import digest, sha256

if TYPE_CHECKING:
    from jsonschema import Draft202012Validator

SCALES = ("smoke", "quick", "desk", "paper")
PACKAGE = Path(__file__).parent
SCHEMA = PACKAGE.parents[1] / "workflow" / "schemas" / "config.schema.yaml"
# Arguments that the data or the configuration's names give.
NOT_OPTIONS = ("self", "in_dim", "out_dim", "grid", "seq_len", "num_documents", "mixer")
TRIVIAL = "trivial"
OF_PAPER = ("table1", "figure4", "figure3")
SCALING, COST, LRA = "table2", "figure5", "table6"  # the suites that the sections `scaling`, `cost` and `lra` make
OF_FIELDS = ("gradient_weight", "context_parallel", "data_parallel")  # training keys that runs of `lra` do not have
NO_DATA = "no data"  # of a task that is only there as published files, where those are not asked for
ABSENT = object()  # what a selector yields when neither the scale, the benchmark nor `default` is among its keys
LIMITS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below",
          "minItems": "a list of at least", "maxItems": "a list of at most", "minProperties": "a number of entries of at least"}


@dataclass(frozen=True)
class Run:
    """One run: its folder, its complete spec, the source files its numbers depend on, the verb that makes it."""

    path: str
    spec: dict
    code: tuple[str, ...]
    verb: str = "train"

    @property
    def json(self) -> str:
        """The spec as one line with sorted keys, so that reordering the configuration changes nothing."""
        return json.dumps(self.spec, sort_keys=True)


@dataclass(frozen=True)
class Plan:
    """Everything one scale asks for. `suites` holds, per suite, the entries that `record.records` turns into a table."""

    scale: str
    shown: str  # the error that tables and figures show
    compared: str  # the error that is compared with the paper's
    beside: str  # whose numbers Tables 1, 2 and 6 show
    conda: str  # the file of envs/ that `snakemake --sdm conda` makes
    lock: str  # the file that pins what was downloaded
    datasets: dict[str, dict]
    tasks: dict[str, dict]  # of the Long Range Arena, those there are data of
    runs: dict[str, Run]
    classifiers: dict[str, Run]  # runs on tasks
    predictors: dict[str, Run]  # of fields and of classes
    scaling: dict[str, Run]
    curves: dict[str, Run]  # each measures all its numbers of tokens, one cell a folder
    suites: dict[str, list[dict]]

    @property
    def trained(self) -> dict[str, Run]:
        """All runs that leave weights: those on benchmarks and those on tasks."""
        return self.runs | self.classifiers

    @property
    def num_tokens(self) -> list[int]:
        """The numbers of tokens N of every cost curve."""
        return next(iter(self.curves.values())).spec["cost"]["num_tokens"]

    def dataset_json(self, dataset: str) -> str:
        """What the data rule needs of a benchmark or task, as one line."""
        return json.dumps((self.datasets | self.tasks)[dataset], sort_keys=True)

    def published_json(self, dataset: str) -> str:
        """sha256 of the published files a benchmark or task is read from, as one line; empty when it is generated, or downloaded:
        then the lock file binds.

        A file whose size and time are those of the dataset's card is not read again, and one that is gone counts as
        unchanged: what was made from it stays valid.
        """
        spec, card = (self.datasets | self.tasks)[dataset], Path(f"results/{self.scale}/data/{dataset}.json")
        if spec["source"] != "path":
            return ""
        known = json.loads(card.read_text(encoding="utf-8")).get("published", {}) if card.exists() else {}
        digests = {}
        for file in {*known, *published_files(dataset, spec["root"])}:
            path, seen = Path(spec["root"]) / file, known.get(file, {})
            stat = path.stat() if path.is_file() else None
            unchanged = stat is None or [stat.st_size, stat.st_mtime_ns] == seen.get("size_and_time")
            digests[file] = seen.get("sha256") if unchanged else sha256(path)
        return json.dumps(digests, sort_keys=True)

    def suite_json(self, suite: str) -> str:
        """What the records rule needs to know about a suite, as one line."""
        return json.dumps({"suite": suite, "scale": self.scale, "entries": self.suites[suite]}, sort_keys=True)

    def suite_runs(self, suite: str) -> list[str]:
        """Folders of the suite's runs, trivial predictors, scaling runs and cells of cost curves included."""
        return [entry["run"] for entry in self.suites[suite] if entry["run"]]


def expand(config: dict) -> Plan:
    """Validate a configuration and expand its scale into a Plan; ValueError for the first thing that is wrong."""
    import jsonschema  # noqa: F401  without it nothing would be checked

    scale = config.get("scale")
    if scale not in SCALES:
        raise ValueError(f"scale: {unknown('scale', scale, SCALES)}")
    names, arena = list(_mapping(config, "datasets")), {"lra": _mapping(config, "lra")}
    config = {key: value for key, value in config.items() if key != "lra"}
    for each in (scale, *(other for other in SCALES if other != scale)):
        for dataset in names:
            validate(pick(config, each, dataset, names), f"scale {each}, {dataset}")
        picked = _without_benchmark(config, each, names)
        for section in ("scaling", "cost"):
            _refuse(_validator(section), picked[section], f"config (scale {each})", section)
        _by_task(arena, each)
    by_dataset = {dataset: pick(config, scale, dataset, names) for dataset in names}
    chosen = next(iter(by_dataset.values()))
    if len(locks := {picked["data"]["lock"] for picked in by_dataset.values()}) > 1:
        raise ValueError(f"data.lock: got {', '.join(sorted(locks))}; one file holds the pins of all benchmarks")
    datasets = {dataset: dataset_spec(picked, dataset) for dataset, picked in by_dataset.items()}
    shown, compared, beside, conda = (chosen[key] for key in ("shown_error", "compared_error", "beside", "conda"))
    plan = Plan(scale, shown, compared, beside, conda, chosen["data"]["lock"], datasets, tasks={}, runs={}, classifiers={},
                predictors={}, scaling={}, curves={}, suites={})
    known: dict[str, str] = {}  # spec -> run folder: a run that two suites share stands once, with the simpler of them
    _check_names(chosen)
    for suite in sorted(chosen["suites"], key=lambda name: _place(name, chosen["suites"][name])):
        plan.suites[suite] = list(_suite_entries(plan, known, suite, chosen, by_dataset))
    picked = _without_benchmark(config, scale, names)
    plan.suites[SCALING] = list(_scaling_entries(plan, picked))
    plan.suites[COST] = list(_cost_entries(plan.curves, picked, scale, f"results/{scale}"))
    root = picked["data"].get("root", chosen["data"]["root"])
    plan.suites[LRA] = list(_lra_entries(plan, _by_task(arena, scale), root, chosen["seeds"]))
    return plan


def _place(suite: str, section: dict) -> tuple[int, int, str]:
    """Where suites share a run it stands with the first: the one of fewer axes, then one of the paper, in this order."""
    return len(section.get("axes", {})), OF_PAPER.index(suite) if suite in OF_PAPER else len(OF_PAPER), suite


def cost_sweep(config: dict, scale: str, root: str, **changes: Any) -> tuple[dict[str, Run], list[dict]]:
    """The section `cost` alone, below the folder `root`: curves by path, and the entries of their suite.

    changes: values that replace those of the section. Without jsonschema names are checked, types and ranges are not.
    """
    if scale not in SCALES:
        raise ValueError(f"scale: {unknown('scale', scale, SCALES)}")
    for key in ("models", "cost"):
        _mapping(config, key)
    picked = _without_benchmark(config, scale, list(_mapping(config, "datasets")))
    _known(changes.get("models", ()), picked["models"], "cost.models", "model")
    picked["cost"] = picked["cost"] | changes
    _refuse(_validator("cost"), picked["cost"], f"config (scale {scale})", "cost")
    curves: dict[str, Run] = {}
    return curves, list(_cost_entries(curves, picked, scale, root))


def _mapping(config: dict, key: str) -> dict:
    value = config.get(key)
    if not isinstance(value, dict) or not value:
        raise ValueError(f"{key}: got {shown(value)}; a non-empty mapping is needed")
    return value


def pick(value: Any, scale: str, dataset: str, names: list[str], path: str = "") -> Any:
    """Resolve every mapping by scale or benchmark inside `value`; a key for which nothing applies is left out.

    `names`: the configured benchmarks. ValueError names a key that is neither a scale nor a benchmark.
    """
    if value is None:
        raise ValueError(f"{path}: got null; give a value, or leave the key out to keep what it overrides")
    if not isinstance(value, dict):
        return value
    if other := [key for key in value if not isinstance(key, str)]:
        raise ValueError(f"{path or 'the top level'}: the key {other[0]!r} is not text")
    selectors = {"default", *SCALES, *names}
    if path not in ("datasets", "lra.tasks") and selectors & set(value):
        kinds = [kind for kind in (SCALES, names) if set(value) & set(kind)][:1] or [SCALES, names]
        allowed = [*itertools.chain(*kinds), "default"]
        for key in value:
            if key not in allowed:
                raise ValueError(f"{path}: {unknown('key', key, allowed)}")
        chosen = scale if set(value) & set(SCALES) else dataset
        chosen = chosen if chosen in value else "default"
        return pick(value[chosen], scale, dataset, names, path) if chosen in value else ABSENT
    items = ((key, pick(item, scale, dataset, names, f"{path}.{key}".lstrip("."))) for key, item in value.items())
    return {key: item for key, item in items if item is not ABSENT}


def _without_benchmark(config: dict, scale: str, names: list[str]) -> dict:
    """What scaling runs and cost curves are made of, picked for no benchmark: of a mapping by benchmark its `default`."""
    return pick({key: config[key] for key in ("data", "models", "scaling", "cost") if key in config}, scale, "", names)


def validate(picked: dict, context: str) -> None:
    """Check a picked configuration against the JSON schema; ValueError for the first violation in document order."""
    _refuse(_validator(), picked, f"config ({context})", "")


def _refuse(validator: Draft202012Validator | None, value: dict, context: str, prefix: str) -> None:
    if validator is None:
        return
    errors = sorted(validator.iter_errors(value), key=lambda error: [str(step) for step in error.absolute_path])
    if errors:
        raise ValueError(f"{context}: {_explain(errors[0], prefix)}")


@functools.cache
def _schema() -> dict:
    return yaml.safe_load(SCHEMA.read_text(encoding="utf-8"))


@functools.cache
def _draft() -> type[Draft202012Validator] | None:
    """Draft 2020-12, stricter: an integer is no 16.0, a number lies within 1e300. Checks the schema. None without jsonschema,
    which `cost_sweep` can do without."""
    try:
        import jsonschema
    except ImportError:
        return None
    draft = jsonschema.Draft202012Validator
    draft.check_schema(_schema())
    checker = draft.TYPE_CHECKER.redefine_many({
        "integer": lambda _, value: isinstance(value, int) and not isinstance(value, bool),
        "number": lambda _, value: isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300})
    return jsonschema.validators.extend(draft, type_checker=checker)


@functools.cache
def _validator(definition: str | None = None) -> Draft202012Validator | None:
    """What checks against one `$defs` entry of the schema, or all of it; None without jsonschema."""
    draft, schema = _draft(), _schema()
    if definition is not None:
        schema = {"$schema": schema["$schema"], "$ref": f"#/$defs/{definition}", "$defs": schema["$defs"]}
    return None if draft is None else draft(schema)


def _explain(error: Any, prefix: str) -> str:
    """Key, what came, what is allowed."""
    path = ".".join([*filter(None, [prefix]), *(str(step) for step in error.absolute_path)]) or "the top level"
    if error.validator == "additionalProperties":
        known = sorted(error.schema.get("properties", {}))
        extra = next(key for key in error.instance if key not in known)
        return f"{path}: {unknown('key', extra, known)}"
    if error.validator == "required":
        missing = next(key for key in error.validator_value if key not in error.instance)
        return f"{path}: the key {missing!r} is missing"
    if error.validator == "enum":
        return f"{path}: {unknown('value', error.instance, error.validator_value)}"
    meaning, allowed = error.schema.get("description", ""), ""
    if error.validator == "type":
        kinds = error.validator_value if isinstance(error.validator_value, str) else " or ".join(error.validator_value)
        allowed = f"a value of type {kinds}{_yaml_hint(error.instance)}"
    elif error.validator == "uniqueItems":
        allowed = "a list without repetitions"
    else:
        allowed = f"{LIMITS.get(error.validator, error.validator)} {error.validator_value}"
    return f"{path}: got {shown(error.instance)}, needed is {allowed}. {meaning}".rstrip()


def _yaml_hint(value: object) -> str:
    """YAML reads 1e-3 as text, and `--config` hands over numbers inside lists and mappings as text."""
    if not isinstance(value, str):
        return ""
    try:
        number = float(value)
    except ValueError:
        return ""
    written = int(number) if number.is_integer() and not set(value) & set(".eE") else number
    return f" ({value!r} is text; in a YAML file write {written!r})"


def dataset_spec(picked: dict, name: str) -> dict:
    """Everything that makes one dataset: what the data rule gets and every run's spec repeats."""
    if name not in dataset_names():
        raise ValueError(f"datasets: {unknown('benchmark', name, dataset_names())}")
    options = picked["datasets"][name]["data"]
    where = f"datasets.{name}.data"
    common = ("num_train", "num_test", "seed")
    wanted = _constant(PACKAGE / "data" / f"{name}.py", "OPTIONS")
    for key in options:
        if key not in (*common, *wanted):
            raise ValueError(f"{where}: {unknown('key', key, (*common, *wanted))}")
    for key in (*common, *wanted):
        if key not in options:
            raise ValueError(f"{where}: the key {key!r} is missing at scale {picked['scale']}")
    _check_grid(options, _constant(PACKAGE / "data" / f"{name}.py", "MULTIPLES") or {}, where)
    source, root = picked["data"]["source"], picked["data"]["root"]
    if source == "auto":
        source = "path" if all(published_files(name, root, pattern) for pattern in _published(name)) else "generate"
    if source == "download" and _constant(PACKAGE / "data" / f"{name}.py", "SOURCES") is None:
        raise ValueError(f"data.source: got 'download', but src/flarepp/data/{name}.py has no SOURCES; allowed for it: "
                         f"auto, generate, path, as in data.source: {{{name}: generate, default: download}}")
    origin = {"source": source} | ({} if source == "generate" else {"root": root})
    return {"name": name, **origin, **options}


def _published(name: str) -> tuple[str, ...]:
    """What a dataset's PUBLISHED_FILES say: paths below the data root, or patterns of paths."""
    return _constant(_module_file(data_module(name)), "PUBLISHED_FILES")


def published_files(name: str, root: str, *patterns: str) -> list[str]:
    """The published files of a dataset that are below `root`, relative to it, sorted; of all its patterns by default."""
    found = (path for pattern in patterns or _published(name) for path in Path(root).glob(pattern))
    return sorted(path.relative_to(root).as_posix() for path in found if path.is_file())


def _check_grid(options: dict, multiples: dict, where: str) -> None:
    """A model's grid is a stride of the solved one; the numbers of a list are multiples of those its dataset's file names."""
    if "solver_resolution" in options:
        solved, seen = options["solver_resolution"] - 1, options["resolution"] - 1
        if solved % seen:
            allowed = [divisor + 1 for divisor in range(2, solved + 1) if solved % divisor == 0]
            raise ValueError(f"{where}.resolution: got {seen + 1}; with solver_resolution {solved + 1} allowed are {allowed}")
    for key, factors in multiples.items():
        if len(options[key]) != len(factors):
            raise ValueError(f"{where}.{key}: got {options[key]}; {len(factors)} numbers are needed")
        for index, (value, factor) in enumerate(zip(options[key], factors)):
            if value % factor:
                raise ValueError(f"{where}.{key}.{index}: got {value}; it must be a multiple of {factor}")


def _check_names(chosen: dict) -> None:
    """Labels that tell models apart, predictors there is code for, shared options that some model takes."""
    for sections in (("models", "predictors"), ("datasets",)):
        keys = [key for name in sections for key in chosen[name]]
        labels = [section["label"].strip().casefold() for name in sections for section in chosen[name].values()]
        for what, given in (("key", keys), ("label", labels)):
            if twice := [item for item in given if given.count(item) > 1]:
                raise ValueError(f"{' and '.join(sections)}: the {what} {twice[0]!r} is given twice; tables could not tell "
                                 "them apart")
    known = _dict_keys(PACKAGE / "predictors.py", "PREDICTORS")
    _known(chosen["predictors"], known, "predictors", "predictor")
    taken = {key for name, section in chosen["models"].items() for key in _accepted(section, f"models.{name}")}
    _known(chosen["defaults"]["model"], taken, "defaults.model", "key")
    for suite, section in ((SCALING, "scaling"), (COST, "cost"), (LRA, "lra")):
        if suite in chosen["suites"]:
            raise ValueError(f"suites: the name {suite!r} belongs to the suite that the section {section!r} makes; "
                             "choose another")
    for suite, section in chosen["suites"].items():
        _known(section["models"], chosen["models"], f"suites.{suite}.models", "model")
        options = {key for name in section["models"] for key in _accepted(chosen["models"][name], f"models.{name}")}
        _known(section.get("model", ()), options, f"suites.{suite}.model", "key")
        _known(section.get("axes", ()), sorted(options | set(_training_keys())), f"suites.{suite}.axes", "key")


def _suite_entries(plan: Plan, known: dict, suite: str, chosen: dict, by_dataset: dict) -> Iterator[dict]:
    """Yield one entry per table cell and seed; runs that are new join the plan."""
    section = chosen["suites"][suite]
    where = f"suites.{suite}"
    _known(section.get("predictors", ()), chosen["predictors"], f"{where}.predictors", "predictor")
    datasets = section.get("datasets", list(by_dataset))
    _known(datasets, by_dataset, f"{where}.datasets", "benchmark")
    for model in section["models"]:
        for dataset in datasets:
            yield from _model_entries(plan, known, suite, model, dataset, by_dataset[dataset])
    for predictor in section.get("predictors", ()):
        for dataset in datasets:
            yield _predictor_entry(plan, suite, predictor, dataset, by_dataset[dataset])


def _known(names: Iterable[str], allowed: Collection[str], where: str, what: str) -> None:
    for name in names:
        if name not in allowed:
            raise ValueError(f"{where}: {unknown(what, name, allowed)}")


def _model_entries(plan: Plan, known: dict, suite: str, model: str, dataset: str, picked: dict) -> Iterator[dict]:
    section, axes = picked["models"][model], picked["suites"][suite].get("axes", {})
    base = {"dataset": dataset, "dataset_label": picked["datasets"][dataset]["label"], "model": model,
            "label": section["label"], "role": section["role"]}
    _known(section.get("not_affordable", ()), picked["datasets"], f"models.{model}.not_affordable", "benchmark")
    absent = "not affordable" if dataset in section.get("not_affordable", ()) else None
    for values in itertools.product(*axes.values()):
        for seed in picked["seeds"]:
            spec = run_spec(picked, suite, model, dataset, plan.datasets[dataset], dict(zip(axes, values)), seed)
            key = json.dumps(spec, sort_keys=True)
            path = f"results/{plan.scale}/runs/{suite}/{dataset}/{model}/{variant(spec, axes)}"
            path = known.setdefault(key, path)
            if absent is None:
                plan.runs.setdefault(path, Run(path, spec, run_sources(spec["model"])))
            yield base | {"run": "" if absent else path, "spec": digest(spec), "absent": absent,
                          "num_blocks": spec["model"].get("num_blocks"), "num_latents": spec["model"].get("num_latents"),
                          "precision": spec["training"]["precision"], "seed": seed}


def _predictor_entry(plan: Plan, suite: str, predictor: str, dataset: str, picked: dict) -> dict:
    path = f"results/{plan.scale}/runs/{suite}/{dataset}/{predictor}/s0"
    spec = {"scale": plan.scale, "dataset": plan.datasets[dataset], "model": {"name": predictor}, "training": {"seed": 0}}
    plan.predictors[path] = Run(path, spec, sources("flarepp.predictors"), "predictor")
    return {"dataset": dataset, "dataset_label": picked["datasets"][dataset]["label"], "model": predictor,
            "label": picked["predictors"][predictor]["label"], "role": TRIVIAL, "run": path, "spec": digest(spec), "absent": None,
            "seed": 0}


def _scaling_entries(plan: Plan, picked: dict) -> Iterator[dict]:
    """Yield one entry per cell of the scaling experiment, models x tokens x latents x ranks; its runs join the plan."""
    section = picked["scaling"]
    _known(section["models"], picked["models"], "scaling.models", "model")
    if 1 not in section["num_ranks"]:
        raise ValueError(f"scaling.num_ranks: got {section['num_ranks']}; 1 must be among them, since efficiencies are "
                         "relative to one rank")
    for model in section["models"]:
        base = {"dataset": "", "dataset_label": "", "model": model, "label": picked["models"][model]["label"],
                "role": picked["models"][model]["role"], "absent": None}
        axes = (section[key] for key in ("num_tokens", "num_latents", "num_ranks"))
        for tokens, latents, ranks in itertools.product(*axes):
            spec = scaling_spec(plan.scale, picked, model, tokens, latents, ranks)
            precision, seed = spec["scaling"]["precision"], spec["scaling"]["seed"]
            path = f"results/{plan.scale}/runs/{SCALING}/{model}/N{tokens}-M{latents}-R{ranks}-{precision}"
            plan.scaling[path] = Run(path, spec, _model_sources("flarepp.scaling", spec["model"]))
            yield base | {"run": path, "spec": digest(spec), "num_blocks": spec["model"]["num_blocks"], "num_latents": latents,
                          "num_tokens": tokens, "num_ranks": ranks, "precision": precision, "seed": seed}


def scaling_spec(scale: str, picked: dict, model: str, num_tokens: int, num_latents: int, num_ranks: int) -> dict:
    """The complete spec of one scaling run; ValueError for a model that cannot run on several ranks."""
    section, where = picked["scaling"], f"models.{model} (scaling)"
    if not _shards(picked["models"][model].get("mixer")):
        raise ValueError(f"scaling.models: got {model!r}; it cannot share tokens among ranks, allowed are models of the "
                         f"backbone with one of the mixers {', '.join(filter(_shards, _names('mixers')))}")
    options = {key for name in section["models"] for key in _accepted(picked["models"][name], f"models.{name}")}
    _known(section["model"], sorted(options - {"num_latents"}), "scaling.model", "key")
    axes = {"num_latents": num_latents}
    given = _model_options(picked["models"][model], section["model"], axes, section["precision"], where)
    _check_model(given, section["precision"], where)
    cell = {"num_tokens": num_tokens, "num_ranks": num_ranks}
    settings = {key: value for key, value in section.items() if key not in ("models", "model", "num_latents")}
    return {"scale": scale, "model": given, "scaling": settings | cell}


def _cost_entries(curves: dict[str, Run], picked: dict, scale: str, root: str) -> Iterator[dict]:
    """Yield one entry per cell of the cost curves, models x latents x tokens; the curves join `curves`."""
    section = picked["cost"]
    _known(section["models"], picked["models"], "cost.models", "model")
    if section["num_tokens"] != sorted(section["num_tokens"]):
        raise ValueError(f"cost.num_tokens: got {section['num_tokens']}; they must ascend, since the time of a step is "
                         "predicted from fewer tokens")
    if section["compile"] and section["device"] == "cpu":
        raise ValueError("cost.compile: got True with device 'cpu', where the compiler's memory would count as the model's; "
                         "allowed there: false")
    for model in section["models"]:
        found = picked["models"][model]
        if "mixer" not in found:
            allowed = (name for name, other in picked["models"].items() if "mixer" in other)
            raise ValueError(f"cost.models: got {model!r}; it is no model of the backbone, allowed are {', '.join(allowed)}")
        has_latents = "num_latents" in _accepted(found, f"models.{model}")
        for latents in section["num_latents"] if has_latents else (None,):
            spec = cost_spec(scale, picked, model, latents)
            precision, seed = spec["cost"]["precision"], spec["cost"]["seed"]
            path = f"{root}/runs/{COST}/{model}/{f'M{latents}-' if has_latents else ''}{precision}"
            curves[path] = Run(path, spec, _model_sources("flarepp.cost", spec["model"]))
            base = {"dataset": "", "dataset_label": "", "model": model, "label": found["label"], "role": found["role"],
                    "num_blocks": spec["model"]["num_blocks"], "num_latents": latents, "num_ranks": None,
                    "precision": precision, "seed": seed, "absent": None}
            for tokens in section["num_tokens"]:
                cell = spec | {"cost": spec["cost"] | {"num_tokens": tokens}}
                yield base | {"run": f"{path}/N{tokens}", "spec": digest(cell), "num_tokens": tokens}


def cost_spec(scale: str, picked: dict, model: str, num_latents: int | None) -> dict:
    """The complete spec of one cost curve."""
    section, where = picked["cost"], f"models.{model} (cost)"
    options = {key for name in section["models"] for key in _accepted(picked["models"][name], f"models.{name}")}
    _known(section["model"], sorted(options - {"num_latents"}), "cost.model", "key")
    axes = {} if num_latents is None else {"num_latents": num_latents}
    given = _model_options(picked["models"][model], section["model"], axes, section["precision"], where)
    _check_model(given, section["precision"], where)
    settings = {key: value for key, value in section.items() if key not in ("models", "model", "num_latents")}
    return {"scale": scale, "model": given, "cost": settings}


def _shards(mixer: str | None) -> bool:
    """Whether a mixer has what context parallelism replaces: its class assigns `encode` or `sum_over_tokens`."""
    if mixer is None:
        return False
    (found,) = (node for node in _tree(PACKAGE / "mixers" / f"{mixer}.py").body
                if isinstance(node, ast.ClassDef) and node.name == "Mixer")
    assigned = {target.id for node in found.body if isinstance(node, ast.Assign) for target in node.targets
                if isinstance(target, ast.Name)}
    return bool(assigned & {"encode", "sum_over_tokens"})


def _by_task(arena: dict, scale: str) -> dict[str, dict]:
    """The section `lra` at a scale as each task sees it, checked."""
    names = list(_mapping(arena["lra"], "tasks"))
    by_task = {task: pick(arena, scale, task, names)["lra"] for task in names}
    for task, section in by_task.items():
        _refuse(_validator("lra"), section, f"config (scale {scale}, {task})", "lra")
    return by_task


def _lra_entries(plan: Plan, by_task: dict[str, dict], root: str, seeds: list[int]) -> Iterator[dict]:
    """Yield one entry per row, task and seed, then those of the baselines; tasks and runs join the plan."""
    section = next(iter(by_task.values()))
    _check_lra_names(section, plan.datasets)
    for task, picked in by_task.items():
        if data := task_spec(picked, task, root, plan.scale):
            plan.tasks[task] = data
    for row, task, seed in itertools.product(section["mixers"], by_task, seeds):
        found = by_task[task]["mixers"][row]
        base = _lra_base(section, task, row, found["label"]) | {"role": found["role"], "seed": seed}
        if task not in plan.tasks:
            yield base | {"run": "", "spec": "", "absent": NO_DATA}
            continue
        spec = lra_spec(by_task[task], row, plan.tasks[task], plan.scale, seed)
        path = f"results/{plan.scale}/runs/{LRA}/{task}/{row}/{variant(spec, ())}"
        plan.classifiers[path] = Run(path, spec, _model_sources("flarepp.classify", spec["model"]), "classify")
        yield base | {"run": path, "spec": digest(spec), "absent": None, "num_blocks": spec["model"]["num_blocks"],
                      "num_latents": spec["model"].get("num_latents"), "precision": spec["training"]["precision"]}
    for name, task in itertools.product(section["baselines"], plan.tasks):
        path = f"results/{plan.scale}/runs/{LRA}/{task}/{name}/s0"
        spec = {"scale": plan.scale, "dataset": plan.tasks[task], "model": {"name": name}, "training": {"seed": 0}}
        plan.predictors[path] = Run(path, spec, sources("flarepp.class_baselines"), "predictor")
        yield _lra_base(section, task, name, section["baselines"][name]["label"]) | {
            "role": TRIVIAL, "seed": 0, "run": path, "spec": digest(spec), "absent": None}


def _lra_base(section: dict, task: str, row: str, label: str) -> dict:
    return {"dataset": task, "dataset_label": section["tasks"][task]["label"], "model": row, "label": label}


def _check_lra_names(section: dict, datasets: dict) -> None:
    """Names and labels that tell rows and tasks apart, tasks and baselines there is code for, options some mixer has."""
    _known(section["tasks"], task_names(), "lra.tasks", "task")
    _known(section["baselines"], _dict_keys(PACKAGE / "class_baselines.py", "PREDICTORS"), "lra.baselines", "baseline")
    rows, where_rows = [*section["mixers"].items(), *section["baselines"].items()], "lra.mixers and lra.baselines"
    labels = [row["label"].strip().casefold() for _, row in rows]
    columns = [task["label"].strip().casefold() for task in section["tasks"].values()]
    for what, where, given in (("label", where_rows, labels), ("label", "lra.tasks", columns),
                               ("key", where_rows, [key for key, _ in rows]),
                               ("name", "datasets and lra.tasks", [*datasets, *section["tasks"]])):
        if twice := [item for item in given if given.count(item) > 1]:
            raise ValueError(f"{where}: the {what} {twice[0]!r} is given twice; tables could not tell them apart")
    taken = {key for mixer in _names("mixers") for key in _accepted({"name": "lra", "mixer": mixer}, "lra.model")}
    _known(section["model"], sorted(taken), "lra.model", "key")


def task_spec(picked: dict, name: str, root: str, scale: str) -> dict | None:
    """Everything that makes one task's file; None for a task that is published only, where `source` is to generate."""
    path, options, source = _module_file(data_module(name)), picked["tasks"][name]["data"], picked["source"]
    where, wanted = f"lra.tasks.{name}.data", _constant(path, "OPTIONS")
    drawn = ("num_train", "num_test") if any(getattr(node, "name", "") == "generate" for node in _tree(path).body) else ()
    _known(options, (*drawn, *wanted, "seed"), where, "key")
    if source == "generate" and not drawn:
        return None
    if source == "download" and _constant(path, "SOURCES") is None:
        raise ValueError(f"lra.source: got 'download', but src/flarepp/data/lra/{name}.py has no SOURCES; allowed for it: "
                         "generate, path")
    kept = [*(drawn if source == "generate" else ()), *wanted, "seed"]
    if missing := [key for key in kept if key not in options]:
        raise ValueError(f"{where}: the key {missing[0]!r} is missing at scale {scale}")
    origin = {"source": source} | ({} if source == "generate" else {"root": root})
    return {"name": name, **origin, **{key: options[key] for key in kept}}


def lra_spec(picked: dict, row: str, data: dict, scale: str, seed: int) -> dict:
    """The complete spec of one run on a task."""
    section, where = picked["mixers"][row] | {"name": "lra"}, f"lra.mixers.{row}"
    seen = {"name": data["name"], **picked["tasks"][data["name"]]["data"]}
    training = _recipe((picked["training"], section.get("training", {})), seen, where, OF_FIELDS)
    options = _model_options(section, picked["model"] | {"protocol": picked["protocol"]}, {}, training["precision"], where)
    _check_model(options, training["precision"], f"{where} ({data['name']})")
    _check_length(training, f"{where} ({data['name']})")
    return {"scale": scale, "dataset": data, "model": options, "training": training | {"seed": seed}}


def variant(spec: dict, axes: Iterable[str]) -> str:
    """The folder of a run: depth, latents, precision and seed, then any other axis of its suite."""
    model, training = spec["model"], spec["training"]
    parts = [f"B{model['num_blocks']}" if "num_blocks" in model else "",
             f"M{model['num_latents']}" if "num_latents" in model else "", training["precision"]]
    others = (key for key in axes if key not in ("num_blocks", "num_latents", "precision"))
    parts += [f"{key}={model.get(key, training.get(key))}" for key in others]
    return "-".join([*filter(None, parts), f"s{training['seed']}"])


def run_spec(picked: dict, suite: str, model: str, dataset: str, data: dict, axes: dict, seed: int) -> dict:
    """The complete spec of one run; ValueError for combinations that cannot run."""
    section, where = picked["models"][model], f"models.{model}"
    training_axes = {key: value for key, value in axes.items() if key in _training_keys()}
    layers = (picked["defaults"]["training"], picked["suites"][suite].get("training", {}), section.get("training", {}),
              training_axes)
    training = _recipe(layers, data, where)
    model_axes = {key: value for key, value in axes.items() if key not in training_axes}
    shared = picked["defaults"]["model"] | picked["suites"][suite].get("model", {})
    options = _model_options(section, shared, model_axes, training["precision"], where)
    spec = {"scale": picked["scale"], "dataset": data, "model": options, "training": training | {"seed": seed}}
    _check_run(spec, f"{where} ({suite}, {dataset})")
    return spec


@functools.cache
def _training_keys() -> tuple[str, ...]:
    return tuple(_schema()["$defs"]["training"]["properties"])


def _recipe(layers: Iterable[dict], data: dict, where: str, without: tuple[str, ...] = ()) -> dict:
    """The complete training section of a run on `data`, its length in steps. without: keys that it does not have."""
    training = _layered_training(layers, where, without)
    _refuse(_validator("training"), training, where, "training")
    training["steps"] = _steps(training, data)
    training.pop("epochs", None)
    numbers = _schema()["$defs"]["training"]["properties"]
    return {key: float(value) if numbers[key].get("type") == "number" else value for key, value in training.items()}


def _layered_training(layers: Iterable[dict], where: str, without: tuple[str, ...]) -> dict:
    """Later layers win; a layer that gives `steps` removes an earlier layer's `epochs` and the other way round."""
    training: dict = {}
    for layer in layers:
        if "steps" in layer and "epochs" in layer:
            raise ValueError(f"{where}.training: steps {layer['steps']} and epochs {layer['epochs']} are both given; "
                             "give exactly one")
        replaced = {"steps": "epochs", "epochs": "steps"}
        training = {key: value for key, value in training.items() if replaced.get(key) not in layer} | layer
    _known(without and training, [key for key in _training_keys() if key not in without], f"{where}.training", "key")
    missing = [key for key in _training_keys() if key not in (*training, *without, "steps", "epochs")]
    if missing or not training.keys() & {"steps", "epochs"}:
        raise ValueError(f"{where}.training: {', '.join(missing) or 'steps or epochs'} is missing")
    return training


def _steps(training: dict, data: dict) -> int:
    """Optimiser steps; epochs count whole batches, the short last one is dropped."""
    if "num_train" not in data:  # the published files say how many there are
        if "epochs" in training:
            raise ValueError(f"training.epochs: got {training['epochs']}; how many samples {data['name']} has is not known "
                             "here, give steps")
        return training["steps"]
    batches = data["num_train"] // training["batch_size"]
    if batches == 0:
        raise ValueError(f"training.batch_size: got {training['batch_size']}; "
                         f"{data['name']} has {data['num_train']} training samples")
    return training["steps"] if "steps" in training else training["epochs"] * batches


def _accepted(section: dict, where: str) -> dict:
    """Options that a model and its mixer take, with their literal defaults (`...` for none)."""
    accepted = _arguments(section["name"], "models", "Model", f"{where}.name")
    if "mixer" in accepted:
        if "mixer" not in section:
            raise ValueError(f"{where}: the key 'mixer' is missing; allowed: {', '.join(_names('mixers'))}")
        accepted = accepted | _arguments(section["mixer"], "mixers", "Mixer", f"{where}.mixer")
    elif "mixer" in section:
        raise ValueError(f"{where}.mixer: got {section['mixer']!r}; the model {section['name']!r} takes no mixer")
    return {key: default for key, default in accepted.items() if key not in NOT_OPTIONS}


def _model_options(section: dict, shared: dict, axes: dict, precision: str, where: str) -> dict:
    """Name, mixer and every keyword of the model and its mixer, defaults of the code written out."""
    accepted = _accepted(section, where)
    own = section.get("model", {})
    _known(own, accepted, f"{where}.model", "key")
    given = {key: value for key, value in shared.items() if key in accepted} | own
    given |= {key: value for key, value in axes.items() if key in accepted}
    if "norm" in accepted:
        given.setdefault("norm", "rmsnorm" if precision == "fp16" else "layernorm")
    for key, value in given.items():
        if isinstance(accepted[key], bool) and not isinstance(value, bool):
            raise ValueError(f"{where}.model.{key}: got {value!r}; it is a switch, allowed: true, false")
    values = {key: default for key, default in accepted.items() if default is not ...} | given
    missing = [key for key in accepted if key not in values]
    if missing:
        raise ValueError(f"{where}.model: {', '.join(missing)} is missing")
    _refuse(_validator("model_options"), values, where, "model")
    names = {key: section[key] for key in ("name", "mixer") if key in section}
    return names | values


def _check_run(spec: dict, where: str) -> None:
    """Refuse what could only fail later."""
    model, training, data = spec["model"], spec["training"], spec["dataset"]
    _check_model(model, training["precision"], where)
    _check_length(training, where)
    if training["gradient_weight"] and "resolution" not in data:
        raise ValueError(f"{where} training.gradient_weight: got {training['gradient_weight']}; "
                         f"{data['name']} has no square grid, allowed: 0")
    _check_ranks(model, training, where)


def _check_length(training: dict, where: str) -> None:
    """Refuse a schedule or evaluations for which a run is too short."""
    if training["pct_start"] * training["steps"] <= 1:
        raise ValueError(f"{where} training.pct_start: got {training['pct_start']} of {training['steps']} steps; "
                         f"OneCycle needs pct_start * steps > 1, here pct_start > {1 / training['steps']:.4g}")
    if training["num_evaluations"] > training["steps"]:
        raise ValueError(f"{where} training.num_evaluations: got {training['num_evaluations']}; "
                         f"allowed: 1 to {training['steps']}, the number of steps")


def _check_ranks(model: dict, training: dict, where: str) -> None:
    """Refuse numbers of processes that cannot share the batch or the tokens."""
    batch, replicas, shards = (training[key] for key in ("batch_size", "data_parallel", "context_parallel"))
    if batch % replicas:
        allowed = [divisor for divisor in range(1, batch + 1) if batch % divisor == 0]
        raise ValueError(f"{where} training.data_parallel: got {replicas}; batch_size {batch} must be divisible by it, "
                         f"allowed: {allowed}")
    if shards > 1 and not _shards(model.get("mixer")):
        raise ValueError(f"{where} training.context_parallel: got {shards}; {model.get('mixer', model['name'])!r} cannot share "
                         f"tokens among processes, allowed for it: 1. Mixers that can: "
                         f"{', '.join(filter(_shards, _names('mixers')))}")


def _check_model(model: dict, precision: str, where: str) -> None:
    """Refuse a model that could not be built or would not run as it should."""
    width, heads = model.get("channel_dim"), model.get("num_heads")
    if width is not None and heads is not None and width % heads:
        allowed = [divisor for divisor in range(1, width + 1) if width % divisor == 0]
        raise ValueError(f"{where} num_heads: got {heads}; channel_dim {width} must be divisible by it, allowed: {allowed}")
    if precision == "fp16" and model.get("norm") == "layernorm":
        raise ValueError(f"{where} norm: got 'layernorm' with precision 'fp16'; mixed precision runs with 'rmsnorm'")


def dataset_names() -> tuple[str, ...]:
    """Benchmarks there is a file for: those in the data folder that say which OPTIONS they take."""
    return tuple(name for name in _names("data") if _constant(PACKAGE / "data" / f"{name}.py", "OPTIONS") is not None)


def task_names() -> tuple[str, ...]:
    """Tasks of the Long Range Arena there is a file for."""
    folder = PACKAGE / "data" / "lra"
    return tuple(name for name in _names("data/lra") if _constant(folder / f"{name}.py", "OPTIONS") is not None)


def data_module(name: str) -> str:
    """The module that makes a benchmark or a task."""
    return f"flarepp.data.lra.{name}" if name in task_names() else f"flarepp.data.{name}"


def _names(folder: str) -> tuple[str, ...]:
    """Modules of a folder of the package: its listing is the registry."""
    return tuple(sorted(path.stem for path in (PACKAGE / folder).glob("*.py") if path.stem != "__init__"))


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _constant(path: Path, name: str) -> Any:
    """The literal that a module assigns to `name`, None if it assigns none."""
    for node in _tree(path).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return ast.literal_eval(node.value)
    return None


def _dict_keys(path: Path, name: str) -> list[str]:
    """The keys of the dictionary that a module assigns to `name`."""
    found = (node.value for node in _tree(path).body if isinstance(node, ast.Assign)
             and any(isinstance(target, ast.Name) and target.id == name for target in node.targets))
    keys = next(node.keys for node in found if isinstance(node, ast.Dict))
    return [ast.literal_eval(key) for key in keys if key is not None]


def _arguments(name: str, folder: str, class_name: str, where: str) -> dict:
    """Argument names of a class's constructor and their literal defaults (`...` for none), from the source."""
    if name not in _names(folder):
        raise ValueError(f"{where}: {unknown(folder.removesuffix('s'), name, _names(folder))}")
    found = (node for node in _tree(PACKAGE / folder / f"{name}.py").body
             if isinstance(node, ast.ClassDef) and node.name == class_name)
    constructor = next(item for item in next(found).body if isinstance(item, ast.FunctionDef) and item.name == "__init__")
    arguments = constructor.args
    positional = [argument.arg for argument in arguments.args]
    defaults = [...] * (len(positional) - len(arguments.defaults)) + [ast.literal_eval(d) for d in arguments.defaults]
    keywords = {argument.arg: ... if default is None else ast.literal_eval(default)
                for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults)}
    return {key: value for key, value in (dict(zip(positional, defaults)) | keywords).items() if key != "self"}


def run_sources(model: dict) -> tuple[str, ...]:
    """Source files that a run's numbers depend on: the loop, the model, its mixer, and what they import."""
    return _model_sources("flarepp.train", model)


def _model_sources(module: str, model: dict) -> tuple[str, ...]:
    """Source files of a module, of the model it runs and of its mixer, with what they import."""
    mixer = [f"flarepp.mixers.{model['mixer']}"] if "mixer" in model else []
    return sources(module, f"flarepp.models.{model['name']}", *mixer)


@functools.cache
def sources(*modules: str) -> tuple[str, ...]:
    """Files of these modules and of every module of the package they import, relative to the project, sorted."""
    files: set[Path] = set()
    waiting = list(modules)
    while waiting:
        path = _module_file(waiting.pop())
        if path in files:
            continue
        files.add(path)
        waiting += _imports(path)
    return tuple(sorted(str(path.relative_to(PACKAGE.parents[1])) for path in files))


@functools.cache
def _imports(path: Path) -> list[str]:
    """Modules of the package that a file imports, inside functions too."""
    found = []
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.ImportFrom) and (module := node.module or "").split(".")[0] == "flarepp":
            inner = [f"{module}.{alias.name}" for alias in node.names]
            found += [name if _module_file(name).exists() else module for name in inner]
    return found


def _module_file(module: str) -> Path:
    path = PACKAGE.parent.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
