"""check_goldens.py as a command: the committed arrays agree, every disagreement is named and fails."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import flarepp

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
    assert len(files) >= 19 and all(line_of(run, name).startswith("ok") for name in files)
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
]


def test_one_changed_number_in_a_file_fails_and_is_named(tmp_path):
    for name, prefix, change, _ in ALTERATIONS:
        altered(GOLDENS / name, tmp_path / name, first_key(name, prefix), change)
    shutil.copy(GOLDENS / "flarepp_anchored_a.npz", tmp_path)
    run = check(tmp_path)
    assert run.returncode == 1, run.stderr
    for name, _, _, what in ALTERATIONS:
        line = line_of(run, name)
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


@pytest.mark.parametrize("only", [(), ("--only", "nothing*")], ids=["empty", "nothing left"])
def test_nothing_to_check_is_an_error(tmp_path, only):
    if only:
        shutil.copy(GOLDENS / "flarepp_a.npz", tmp_path)
    run = check(tmp_path, *only)
    assert run.returncode not in (0, 1) and run.stdout == "" and str(tmp_path) in run.stderr


def test_help_names_the_tolerances():
    run = check("--help")
    assert run.returncode == 0 and "--only" in run.stdout and "1e-10" in run.stdout
