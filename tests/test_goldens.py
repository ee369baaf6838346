"""check_goldens.py as a command: the committed arrays agree, every disagreement is named and fails."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import flarepp
from flarepp.mixers import build_mixer
from reference import TWINS

SCRIPT = Path(__file__).with_name("check_goldens.py")
GOLDENS = Path(__file__).with_name("goldens")


def check(*arguments):
    environment = os.environ | {"PYTHONPATH": str(Path(flarepp.__file__).parents[1])}
    return subprocess.run([sys.executable, str(SCRIPT), *map(str, arguments)], capture_output=True, text=True,
                          env=environment, timeout=120)


def line_of(run, name):
    (line,) = [line for line in run.stdout.splitlines() if name in line]
    return line


def altered(source, target, key, change):
    """Copy an .npz with the largest entry of one array changed."""
    with np.load(source) as file:
        arrays = dict(file)
    value = np.array(arrays[key])
    value.flat[np.abs(value).argmax()] *= change
    np.savez(target, **arrays | {key: value})


def first_key(name, prefix):
    with np.load(GOLDENS / name) as file:
        return next(key for key in file.files if key.startswith(prefix))


def test_the_committed_goldens_agree():
    run = check(GOLDENS)
    files = sorted(path.name for path in GOLDENS.glob("*.npz"))
    assert run.returncode == 0, run.stdout + run.stderr
    assert len(files) == 30 and all(line_of(run, name).startswith("ok") for name in files)
    assert f"{len(files)} of {len(files)} files agree" in run.stdout


ALTERATIONS = [  # file, array, factor on its largest entry, what the line must name
    ("flarepp_a.npz", "output", 1 + 1e-8, "output"),
    ("flarepp_qknorm.npz", "grad_param/", 1 + 1e-6, "gradients"),
    ("mixer_backbone_flare.npz", "grad_input/x", 1 + 1e-6, "gradients"),
    ("residual_mlp_b.npz", "output", 1.001, "output"),
    ("rel_loss_a.npz", "grad_input/pred", 1 + 1e-6, "gradients"),
    ("onecycle_lra.npz", "aux/beta1", 1 + 1e-8, "beta1"),
    ("darcy_loss_a.npz", "aux/gt_grad_y", 1 + 1e-8, "d/dy"),
    ("train_backbone_darcy.npz", "ema/", 1 + 1e-6, "ema"),
    ("flarepp_shared_a.npz", "output", np.nan, "output"),
    ("flarepp_rms.npz", "param/", 1.01, "output"),
    ("gnot_unified2d.npz", "output", 1 + 1e-8, "output"),
    ("gnot_unified2d.npz", "aux/pos", 1.001, "positions"),
    ("gnot_unstructured.npz", "grad_param/blocks.0.gatenet", 1 + 1e-5, "gradients"),
    ("lno_x.npz", "param/attention_projector", 1.01, "output"),
    ("perceiverio_default.npz", "grad_input/x", 1 + 1e-6, "gradients"),
    ("set_transformer_a.npz", "param/blocks.0.attn.I", 1.01, "output"),
    ("transolver_mixer_flarepy3b66_a.npz", "output", 1 + 1e-8, "output"),
    ("transolver3_mixer_flarepy3b66_b.npz", "param/temperature", 1.01, "output"),
    ("transolverpp_attn_noise.npz", "aux/u", 0.9, "output"),
    ("mixer_backbone_transolver3.npz", "grad_input/x", 1 + 1e-6, "gradients"),
]


def test_one_changed_number_in_a_file_fails_and_is_named(tmp_path):
    for index, (name, prefix, change, _) in enumerate(ALTERATIONS):
        altered(GOLDENS / name, tmp_path / f"{Path(name).stem}_{index}.npz", first_key(name, prefix), change)
    shutil.copy(GOLDENS / "flarepp_anchored_a.npz", tmp_path)
    run = check(tmp_path)
    assert run.returncode == 1, run.stderr
    for index, (name, _, _, what) in enumerate(ALTERATIONS):
        line = line_of(run, f"{Path(name).stem}_{index}.npz")
        assert line.startswith("FAILED") and what in line.split("<-")[1], line
    assert line_of(run, "flarepp_anchored_a.npz").startswith("ok")
    assert f"1 of {len(ALTERATIONS) + 1} files agree" in run.stdout


def test_an_unmapped_file_fails_and_only_leaves_it_out(tmp_path):
    for name in ("flarepp_a.npz", "onecycle_flare.npz"):
        shutil.copy(GOLDENS / name, tmp_path)
    shutil.copy(GOLDENS / "flarepp_a.npz", tmp_path / "perceiver_a.npz")
    run = check(tmp_path)
    assert run.returncode == 1 and line_of(run, "perceiver_a.npz").startswith("UNMAPPED")
    assert line_of(run, "flarepp_a.npz").startswith("ok")
    run = check(tmp_path, "--only", "flarepp*", "--only", "onecycle_flare.npz")
    assert run.returncode == 0 and "perceiver" not in run.stdout and "2 of 2 files agree" in run.stdout


SLICE_PARAMETERS = {  # our name -> the reference's
    "routing_proj": "in_project_x", "token_proj": "in_project_fx", "slice_proj": "in_project_slice",
    "temperature_proj": "proj_temperature", "slice_attention.query_proj": "to_q", "slice_attention.key_proj": "to_k",
    "slice_attention.value_proj": "to_v", "out_proj": "to_out.0",
}


def reference_names(name, values):
    """A slice mixer's arrays in the reference's layout: 4-D temperatures, Transolver-3's two input projections as one."""
    found = {}
    for key, value in values.items():
        ours = next((ours for ours in SLICE_PARAMETERS if key.startswith(ours + ".")), None)
        found[key if ours is None else key.replace(ours, SLICE_PARAMETERS[ours])] = value
    if name == "transolver3":
        for part in ("weight", "bias"):
            found[f"in_project.{part}"] = torch.cat([found.pop(f"in_project_fx.{part}"), found.pop(f"in_project_x.{part}")])
            found[f"to_out_linear.{part}"] = found.pop(f"to_out.0.{part}")
    return {key: value[None] if key in ("temperature", "bias") else value for key, value in found.items()}


def written(folder, name, seed, width, heads, slices, shape, twin):
    """A file of the family `name` from a naive formula, sizes and numbers drawn anew."""
    torch.manual_seed(seed)
    mixer = build_mixer(name, channel_dim=width, num_heads=heads, num_latents=slices).double()
    p = {key: (value + 0.3 * torch.randn_like(value)).abs_() if value.ndim == 3 else 0.3 * torch.randn_like(value)
         for key, value in mixer.state_dict().items()}
    p, x = {key: value.requires_grad_() for key, value in p.items()}, torch.randn(*shape, width).double().requires_grad_()
    w, aux, options = torch.randn(*shape, width).double(), {}, {}
    if name == "transolverpp":
        options, state = {"eval_noise": True}, torch.get_rng_state()
        aux["aux/u"] = torch.rand(shape[0], heads, shape[1], slices, dtype=torch.float64)
        torch.set_rng_state(state)
    output = twin(p, x, num_heads=heads, norm="layernorm", **options)
    grads = torch.autograd.grad((output * w).sum(), [x, *p.values()])
    arrays = aux | {"input/x": x, "output": output, "w": w}
    arrays |= {f"param/{key}": value for key, value in reference_names(name, p).items()}
    arrays |= {f"grad_param/{key}": value for key, value in reference_names(name, dict(zip(p, grads[1:]))).items()}
    meta = json.dumps({"ctor": {"dim": width, "heads": heads, "slice_num": slices}})
    family = {"transolverpp": "transolverpp_attn"}.get(name, f"{name}_mixer_flarepy3b66")
    path = folder / f"{family}_{seed}.npz"
    np.savez(path, meta=meta, **{key: value.detach().numpy() for key, value in (arrays | {"grad_input/x": grads[0]}).items()})
    return path


def test_other_sizes_and_seeds_of_the_slice_families(tmp_path):
    sizes = [(1, 24, 3, 7, (1, 13)), (2, 8, 2, 3, (3, 40)), (3, 10, 1, 9, (2, 5))]
    for name in ("transolver", "transolverpp", "transolver3"):
        for size in sizes:
            written(tmp_path, name, *size, TWINS[name])
    run = check(tmp_path)
    assert run.returncode == 0 and "9 of 9 files agree" in run.stdout, run.stdout


def without(name, key):
    """The naive formula of mixer `name` with parameter `key` left out: a factor of 1, a term of 0."""
    neutral = torch.ones_like if key == "temperature" else torch.zeros_like
    return lambda p, x, **options: TWINS[name](p | {key: neutral(p[key]) + 0 * p[key]}, x, **options)


def test_a_wrong_formula_of_a_slice_mixer_fails(tmp_path):
    wrong = [("transolver", "temperature"), ("transolver", "token_proj.bias"), ("transolver3", "temperature"),
             ("transolver3", "slice_proj.bias"), ("transolverpp", "bias"), ("transolverpp", "temperature_proj.2.bias")]
    for seed, (name, key) in enumerate(wrong):
        written(tmp_path, name, seed, 24, 3, 7, (1, 13), without(name, key))
    run = check(tmp_path)
    lines = run.stdout.splitlines()
    assert run.returncode == 1 and lines.pop() == "0 of 6 files agree"
    assert all(line.startswith("FAILED") and "output" in line.split("<-")[1] for line in lines), run.stdout


@pytest.mark.parametrize("only", [(), ("--only", "nothing*")], ids=["empty", "nothing left"])
def test_nothing_to_check_is_an_error(tmp_path, only):
    if only:
        shutil.copy(GOLDENS / "flarepp_a.npz", tmp_path)
    run = check(tmp_path, *only)
    assert run.returncode not in (0, 1) and run.stdout == "" and str(tmp_path) in run.stderr


def test_help_names_the_tolerances():
    run = check("--help")
    assert run.returncode == 0 and "--only" in run.stdout and "1e-10" in run.stdout
