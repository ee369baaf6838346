"""Published layouts: what is written is read back, the splits are the published ones, damage is named."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from scipy.io import loadmat, savemat

from flarepp.data import darcy, elasticity, published
from flarepp.record import read_json
from flarepp.solvers import sampling

DARCY = {"name": "darcy", "num_train": 3, "num_test": 2, "resolution": 8, "solver_resolution": 22, "seed": 0}
ELASTICITY = {"name": "elasticity", "num_train": 3, "num_test": 2, "mesh": [12, 2], "seed": 0}
BOTH = pytest.mark.parametrize(
    "module, spec", [(darcy, DARCY), (elasticity, ELASTICITY)], ids=["darcy", "elasticity"]
)
TRAIN, TEST = darcy.FOLDER / darcy.TRAIN_FILE, darcy.FOLDER / darcy.TEST_FILE
XY, SIGMA = elasticity.FOLDER / elasticity.FILES["XY"], elasticity.FOLDER / elasticity.FILES["sigma"]


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    root = tmp_path_factory.mktemp("generated")
    darcy.write_published(root, DARCY)
    elasticity.write_published(root, ELASTICITY)
    return root


@pytest.fixture
def copy(generated, tmp_path):
    """A copy of the generated files that a test may damage."""
    return shutil.copytree(generated, tmp_path / "copy")


@pytest.fixture
def real(tmp_path):
    """Stand-ins for published elasticity files: no provenance, 972 points, 9 samples."""
    generator = np.random.default_rng(0)
    (tmp_path / XY).parent.mkdir(parents=True)
    np.save(tmp_path / XY, generator.random((972, 2, 9)))
    np.save(tmp_path / SIGMA, 200 * generator.random((972, 9)))
    return tmp_path


def visible(folder: Path) -> list[str]:
    """Names in a folder, but for locks."""
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def visible_files(root: Path) -> dict[str, bytes]:
    return {name: data for name, data in folder_files(root).items() if not name.endswith(".lock")}


def folder_files(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()
    }


# --- round trips


def test_darcy_layout_and_round_trip(generated):
    train, test = loadmat(generated / TRAIN), loadmat(generated / TEST)
    assert train["coeff"].shape == train["sol"].shape == (3, 22, 22) and test["sol"].shape == (2, 22, 22)
    assert train["coeff"].dtype == train["sol"].dtype == np.float64
    benchmark = darcy.read_published(generated, DARCY)
    assert benchmark.grid == (8, 8) and benchmark.points_correspond
    for samples, file in ((benchmark.train, train), (benchmark.test, test)):
        assert samples.features.dtype == samples.target.dtype == np.float32
        fields = samples.features.reshape(-1, 8, 8, 3)
        np.testing.assert_array_equal(fields[..., 2], file["coeff"][:, ::3, ::3])
        np.testing.assert_array_equal(
            samples.target.reshape(-1, 8, 8), file["sol"][:, ::3, ::3].astype(np.float32)
        )
        # The first position channel runs along axis 1.
        np.testing.assert_allclose(fields[0, 2, :, 0], np.linspace(0, 1, 8), rtol=1e-6)
        np.testing.assert_allclose(fields[0, :, 2, 1], np.linspace(0, 1, 8), rtol=1e-6)
    encoded = benchmark.feature_norm.encode(benchmark.train.features)
    np.testing.assert_allclose(encoded[..., :2], benchmark.train.features[..., :2])
    assert abs(encoded[..., 2].mean()) < 1e-6 and encoded[..., 2].std(ddof=1) == pytest.approx(1, abs=1e-6)
    assert benchmark.target_norm.encode(benchmark.train.target).std(ddof=1) == pytest.approx(1, abs=1e-5)


def test_elasticity_layout_and_round_trip(generated):
    arrays = {name: np.load(generated / elasticity.FOLDER / file) for name, file in elasticity.FILES.items()}
    assert {name: array.shape for name, array in arrays.items()} == {
        "XY": (216, 2, 5),
        "sigma": (216, 5),
        "rr": (42, 5),
        "theta": (5, 10),
    }
    assert all(array.dtype == np.float64 for array in arrays.values())
    benchmark = elasticity.read_published(generated, ELASTICITY)
    assert benchmark.grid is None and benchmark.points_correspond
    for samples, chosen in ((benchmark.train, range(3)), (benchmark.test, range(3, 5))):
        for row, sample in enumerate(chosen):
            np.testing.assert_array_equal(
                samples.features[row], arrays["XY"][:, :, sample].astype(np.float32)
            )
            np.testing.assert_array_equal(
                samples.target[row, :, 0], arrays["sigma"][:, sample].astype(np.float32)
            )
    np.testing.assert_array_equal(
        benchmark.feature_norm.encode(benchmark.test.features), benchmark.test.features
    )


@BOTH
def test_provenance_and_card(generated, module, spec):
    provenance = read_json(generated / module.FOLDER / published.PROVENANCE)
    assert provenance["synthetic"] is True and provenance["rejected"] == []
    assert provenance["parameters"]["seed"] == 0 and provenance["generator"].startswith("flarepp ")
    card = module.read_published(generated, spec).card
    assert card["source"] == "generated" and card["rejected"] == 0 and card["counts"]["train"] == 3
    assert len(card["files"]) == 2 and all(
        len(entry["sha256"]) == 64 and entry["bytes"] for entry in card["files"]
    )


def test_darcy_split_takes_the_first_of_each_file(generated):
    fewer = darcy.read_published(generated, DARCY | {"num_train": 2, "num_test": 1})
    everything = darcy.read_published(generated, DARCY)
    np.testing.assert_array_equal(fewer.train.target, everything.train.target[:2])
    np.testing.assert_array_equal(fewer.test.target, everything.test.target[:1])
    assert fewer.card["split"] == "smooth1[:2] / smooth2[:1]"


def test_elasticity_split_takes_the_first_and_the_last(real):
    benchmark = elasticity.read_published(real, ELASTICITY)
    stress = np.load(real / SIGMA).astype(np.float32)
    np.testing.assert_array_equal(benchmark.train.target[..., 0], stress[:, :3].T)
    np.testing.assert_array_equal(benchmark.test.target[..., 0], stress[:, 7:].T)
    assert not benchmark.points_correspond and benchmark.card["source"] == "published"
    assert benchmark.card["split"] == "first 3 / last 2 of 9"


def test_training_and_test_samples_differ(generated):
    for module, spec, channel in ((darcy, DARCY, 2), (elasticity, ELASTICITY, 0)):
        benchmark = module.read_published(generated, spec)
        inputs = np.concatenate([benchmark.train.features, benchmark.test.features])[..., channel]
        assert len(np.unique(inputs, axis=0)) == 5


def test_darcy_matlab_73_reads_the_same(copy):
    before = darcy.read_published(copy, DARCY)
    (copy / darcy.FOLDER / published.PROVENANCE).unlink()
    for path in (copy / TRAIN, copy / TEST):
        arrays = loadmat(path)
        header = b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM"
        with h5py.File(path, "w", userblock_size=512) as file:
            for name in ("coeff", "sol"):
                file[name] = arrays[name].T  # MATLAB writes its axes in reverse
        with open(path, "r+b") as stream:
            stream.write(header)
    after = darcy.read_published(copy, DARCY)
    assert after.fingerprint == before.fingerprint and after.card["source"] == "published"


@BOTH
def test_files_do_not_depend_on_workers_or_on_what_was_there(generated, copy, module, spec):
    module.write_published(copy, spec, num_workers=2)
    again, once = (folder_files(root / module.FOLDER) for root in (copy, generated))
    assert again == once
    assert visible((copy / module.FOLDER).parent) == [module.FOLDER.name]


# --- what can fail


@BOTH
def test_a_failure_while_solving_leaves_nothing_or_the_old_files(
    generated, copy, tmp_path, monkeypatch, module, spec
):
    def fail(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(sampling, "draw", fail)
    for root in (tmp_path / "new", copy):
        with pytest.raises(KeyboardInterrupt):
            module.write_published(root, spec)
    assert visible_files(tmp_path / "new") == {} and visible_files(copy) == visible_files(generated)


KILLED = """
import json, sys
from flarepp.data import elasticity
from flarepp.solvers import elasticity as solver
solve = solver.sample
def noted(*words, **options):
    print("solved", flush=True)
    return solve(*words, **options)
noted.__module__, noted.__qualname__ = "__main__", "noted"
solver.sample = noted
elasticity.write_published(sys.argv[1], json.loads(sys.argv[2]))
"""


def test_a_killed_generation_goes_on_where_it_was(tmp_path):
    """SIGKILL after five of twelve samples: the next start solves the others only, and the files are those of one go."""
    spec = ELASTICITY | {"num_train": 8, "num_test": 4}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", KILLED, str(tmp_path / "killed"), json.dumps(spec)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment) as process:
        for _ in range(5):
            assert process.stdout.readline() == "solved\n"
        process.kill()
    assert not (tmp_path / "killed" / elasticity.FOLDER).exists()
    again = subprocess.run(words, capture_output=True, text=True, env=environment, check=True)
    assert again.stdout.count("solved") in (7, 8)  # the fifth may have been in the making
    elasticity.write_published(tmp_path / "once", spec)
    assert visible_files(tmp_path / "killed") == visible_files(tmp_path / "once")
    assert visible((tmp_path / "killed" / elasticity.FOLDER).parent) == ["elasticity"]


def test_samples_of_another_recipe_are_not_taken_over(tmp_path):
    with pytest.raises(KeyboardInterrupt), published.generated_folder(tmp_path / "set", {"seed": 0}, []) as (_, cache):
        (cache / "0-0.npz").touch()
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt), published.generated_folder(tmp_path / "set", {"seed": 0}, []) as (_, same):
        assert same == cache and (same / "0-0.npz").exists()
        raise KeyboardInterrupt
    with published.generated_folder(tmp_path / "set", {"seed": 1}, []) as (_, other):
        assert other != cache and not cache.exists() and list(other.iterdir()) == []
    assert visible(tmp_path) == ["set"]


def test_of_two_processes_one_waits(tmp_path):
    """Both end well, and the files are those of one."""
    spec = ELASTICITY | {"num_train": 12, "num_test": 4}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    call = "import json, sys; from flarepp.data import elasticity as e; e.write_published(sys.argv[1], json.loads(sys.argv[2]))"
    words = [sys.executable, "-c", call, str(tmp_path / "both"), json.dumps(spec)]
    pair = [subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    errors = [process.communicate(timeout=120)[1] for process in pair]
    assert [process.returncode for process in pair] == [0, 0], errors
    elasticity.write_published(tmp_path / "once", spec)
    assert visible_files(tmp_path / "both") == visible_files(tmp_path / "once")


def test_published_files_are_never_overwritten(real):
    before = folder_files(real)
    with pytest.raises(ValueError, match="holds files without provenance.json"):
        elasticity.write_published(real, ELASTICITY)
    assert visible_files(real) == before


@pytest.mark.parametrize(
    "module, spec, message",
    [
        (darcy, DARCY | {"resolution": 10}, "solver_resolution 22: .* allowed: 22, 8, 4, 2"),
        (
            darcy,
            DARCY | {"solver_resolution": 421, "resolution": 85, "num_train": 2000},
            "at most 1514 samples",
        ),
        (elasticity, ELASTICITY | {"mesh": [10, 2]}, "multiple of 4"),
    ],
)
def test_a_bad_spec_fails_before_anything_is_solved(tmp_path, module, spec, message):
    with pytest.raises(ValueError, match=message):
        module.write_published(tmp_path, spec)
    assert list(tmp_path.iterdir()) == []


def edit(path: Path, change) -> None:
    """Apply change(arrays by name) in place to a .mat file, or change(array) -> array to a .npy file."""
    if path.suffix == ".npy":
        np.save(path, change(np.load(path)))
        return
    arrays = {name: array for name, array in loadmat(path).items() if not name.startswith("__")}
    change(arrays)
    savemat(path, arrays)


def setting(name, index, value):
    def change(arrays):
        arrays[name][index] = value

    return change


def setting_npy(index, value):
    def change(array):
        array[index] = value
        return array

    return change


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda p: p.unlink(), "no such file"),
        (
            lambda p: p.write_text("<!DOCTYPE html><html>403 Forbidden</html>"),
            "expected a MATLAB file.*web page",
        ),
        (lambda p: p.write_bytes(b""), "expected a MATLAB file"),
        (lambda p: os.truncate(p, 9000), "damaged or cut short"),
        (lambda p: os.truncate(p, 200), "damaged or cut short"),
        (
            lambda p: edit(p, lambda a: a.update(Kcoeff=a.pop("coeff"))),
            "no variable coeff; it has Kcoeff, sol",
        ),
        (
            lambda p: edit(p, lambda a: a.update(sol=a["sol"][:, :-1])),
            r"sol has the shape \(3, 21, 22\), expected",
        ),
        (
            lambda p: edit(p, lambda a: a.update({k: v.T for k, v in a.items()})),
            r"shape \(22, 22, 3\), expected \[samples",
        ),
        (
            lambda p: edit(p, lambda a: a.update({k: v[:2] for k, v in a.items()})),
            "2 samples, expected at least 3",
        ),
        (
            lambda p: edit(p, lambda a: a.update(coeff=a["coeff"].astype(int))),
            "dtype int64, expected floating",
        ),
        (
            lambda p: edit(p, setting("coeff", (1, 4, 5), 7.0)),
            r"sample 1: coeff 7\.0, expected only 3 and 12",
        ),
        (
            lambda p: edit(p, setting("coeff", (1, 4, 5), np.nan)),
            "sample 1: coeff has 1 values that FP32 cannot hold.* nan",
        ),
        (
            lambda p: edit(p, setting("sol", (2, 4, 5), np.inf)),
            "sample 2: sol has 1 values that FP32 cannot hold.* inf",
        ),
        (lambda p: edit(p, setting("sol", (2, 4, 5), -1.0)), "sample 2: sol goes down to -1 .*expected >= 0"),
        (lambda p: edit(p, setting("sol", 1, 0.0)), "sample 1: sol up to 0, expected a maximum between 0.005 and 0.03"),
        (lambda p: edit(p, setting("sol", (0, 0, 3), 0.02)), "sample 0: sol is 0.02 on its outer ring"),
        (lambda p: edit(p, setting("sol", (2, 4, 5), 1e3)), r"sample 2: sol up to 1e\+03, expected a maximum"),
        (
            lambda p: edit(
                p,
                (
                    setting("coeff", (0, 0, 0), 3.0)
                    if loadmat(p)["coeff"][0, 0, 0] == 12
                    else setting("coeff", (0, 0, 0), 12.0)
                ),
            ),
            "sha256 .*replaced",
        ),
        (lambda p: (p.parent / published.PROVENANCE).write_text("{}"), 'expected "synthetic": true'),
    ],
)
def test_damaged_darcy_file(copy, damage, message):
    damage(copy / TRAIN)
    with pytest.raises((ValueError, FileNotFoundError), match=f"(?s)(smooth1|provenance).*{message}"):
        darcy.read_published(copy, DARCY)


def test_darcy_resolution_must_divide_the_points(generated):
    with pytest.raises(
        ValueError, match="smooth1.*22 points a side cannot be thinned to resolution 10; allowed: 22, 8, 4, 2"
    ):
        darcy.read_published(generated, DARCY | {"resolution": 10})


@pytest.mark.parametrize(
    "file, damage, message",
    [
        (SIGMA, lambda p: p.unlink(), "no such file"),
        (XY, lambda p: p.unlink(), "no such file"),
        (SIGMA, lambda p: p.write_text("<html>sign in</html>"), "expected a NumPy array.*web page"),
        (SIGMA, lambda p: os.truncate(p, 5000), "damaged or cut short"),
        (SIGMA, lambda p: os.truncate(p, 40), "damaged or cut short"),
        (
            SIGMA,
            lambda p: np.save(p, np.array([{}]), allow_pickle=True),
            "damaged or cut short .*Python objects",
        ),
        (SIGMA, lambda p: edit(p, np.transpose), r"shape \(9, 972\), expected \[972 points, samples\]"),
        (
            XY,
            lambda p: edit(p, lambda a: a.transpose(2, 0, 1)),
            r"shape \(9, 972, 2\), expected \(972, 2, 9\)",
        ),
        (XY, lambda p: edit(p, lambda a: a[..., :8]), r"shape \(972, 2, 8\), expected \(972, 2, 9\)"),
        (SIGMA, lambda p: edit(p, lambda a: a.astype(int)), "dtype int64, expected floating"),
        (
            SIGMA,
            lambda p: edit(p, setting_npy((5, 8), np.nan)),
            "sample 8: sigma has 1 values that FP32 cannot hold",
        ),
        (XY, lambda p: edit(p, setting_npy((5, 1, 2), 1.5)), r"sample 2: coordinate 1\.5, expected 0 to 1"),
        (
            SIGMA,
            lambda p: edit(p, setting_npy((slice(20), 1), -3.0)),
            "sample 1: 20 of 972 stresses are negative",
        ),
    ],
)
def test_damaged_elasticity_file(real, file, damage, message):
    damage(real / file)
    with pytest.raises((ValueError, FileNotFoundError), match=f"(?s){file.name}.*{message}"):
        elasticity.read_published(real, ELASTICITY)


def test_elasticity_needs_disjoint_training_and_test_samples(real):
    with pytest.raises(ValueError, match="9 samples, expected at least 10"):
        elasticity.read_published(real, ELASTICITY | {"num_train": 6, "num_test": 4})


def test_elasticity_of_another_mesh_is_refused(generated):
    with pytest.raises(ValueError, match=r"shape \(216, 5\), expected \[972 points"):
        elasticity.read_published(generated, ELASTICITY | {"mesh": [36, 3]})
