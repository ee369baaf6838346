"""The car stand-in: panels against exact flows, bodies, the published layout and what can damage it, presampling."""

import base64
import os
import shutil
import zipfile
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from scipy.special import elliprd

from flarepp.data import drivaerml as data
from flarepp.data import presample, published
from flarepp.data.vtp import Surface
from flarepp.record import read_json, write_json
from flarepp.solvers import drivaerml, panels, sampling

SPEC = {"name": "drivaerml", "num_train": 3, "num_test": 2, "panels": [8, 16], "num_points": 600, "seed": 0}
TRAIN, TEST = (data.FOLDER / split for split in data.SPLITS)

# --- panels against exact flows


def ellipsoid(axes, along, around, height=0.0):
    """Nodes of half an ellipsoid whose centre is `height` over the ground."""
    polar, angle = np.linspace(0, np.pi, along + 1)[:, None], np.linspace(0, np.pi, around + 1)
    sine = np.sin(polar)
    sine[-1] = 0.0  # a closed end is exactly one point
    x = -axes[0] * np.cos(polar) + 0 * angle
    return np.stack([x, axes[1] * sine * np.sin(angle), height - axes[2] * sine * np.cos(angle)], axis=-1)


def relative(values, exact):
    return np.linalg.norm(values - exact) / np.linalg.norm(exact)


def drag(grid, pressure):
    """Coefficient over the frontal area."""
    front = (np.abs(grid.normals[:, 0]) * grid.areas).sum() / 2
    return (pressure * grid.normals[:, 0] * grid.areas).sum() / front


@pytest.mark.parametrize("size, tolerance", [((12, 8), 0.01), ((24, 16), 0.005)])
def test_sphere_without_ground(size, tolerance):
    grid = panels.build(ellipsoid((1, 1, 1), *size))
    flow = panels.solve(grid, panels.FREE)
    direction = panels.unit(grid.centres)
    assert relative(flow.pressure, 1 - 9 / 4 * (1 - direction[:, 0] ** 2)) < tolerance
    assert abs(drag(grid, flow.pressure)) < 1e-6 and flow.leakage < 1e-5


def test_ellipsoid_of_three_axes():
    """Its surface velocity is the part of a constant vector along the surface; a car has about these proportions."""
    axes = np.array([2.4, 1.0, 0.7])
    squares = axes**2
    alpha = 2 / 3 * axes.prod() * elliprd(squares[1], squares[2], squares[0])
    errors = []
    for size in ((24, 12), (48, 24)):
        grid = panels.build(ellipsoid(axes, *size))
        flow = panels.solve(grid, panels.FREE)
        # The point of the surface above a panel's centre and the normal there.
        normal = panels.unit(grid.centres / squares)
        exact = 2 / (2 - alpha) * (np.array([1, 0, 0]) - normal[:, :1] * normal)
        errors.append(relative(flow.velocity, exact))
        assert abs(drag(grid, flow.pressure)) < 1e-5
    assert errors[1] < 0.5 * errors[0] < 0.01, errors


def test_influences_equal_their_definition():
    """The slow twin: sources spread over every triangle by subdivision, mirrored one by one."""
    grid = panels.build(ellipsoid((1.5, 1.0, 0.8), 5, 3, height=1.2))
    fast = panels.influences(grid, panels.GROUND)
    count, parts = len(grid.centres), 48
    i, j = (index.ravel() for index in np.indices((parts, parts)))
    inside = i + j < parts
    upward = np.stack([i, j], -1)[inside] + 1 / 3
    downward = np.stack([i, j], -1)[i + j < parts - 1] + 2 / 3
    weights = np.concatenate([upward, downward]) / parts  # [parts^2, 2] centres of equal small triangles
    corner = partial(panels.corner, grid.nodes)
    slow = np.zeros_like(fast, dtype=float)
    for triangle, third in enumerate((corner(1, 0), corner(0, 1))):
        near, far, third = (place.reshape(-1, 1, 3) for place in (corner(0, 0), corner(1, 1), third))
        sources = near + weights[:, :1] * (third - near) + weights[:, 1:] * (far - near)  # [N, Q, 3]
        for image in panels.GROUND:
            for source in range(count):
                way = grid.centres[:, None] - sources[source] * image  # [T, Q, 3]
                field = (way / np.linalg.norm(way, axis=-1, keepdims=True) ** 3).mean(1)
                slow[:, :, source] += (grid.triangle_areas[triangle, source] * field).T
    others = ~np.eye(count, dtype=bool)
    assert np.abs(fast - slow)[:, others].max() < 2e-3 * np.abs(slow[:, others]).max()
    # A panel moves the fluid before it away at half its strength over its area; the images add to it.
    own = np.einsum("cnn,nc->n", fast, grid.normals)
    assert own == pytest.approx(2 * np.pi, rel=0.2)


def test_the_ground_matters_near_it_and_not_far_away():
    grid, far = (panels.build(ellipsoid((1, 1, 1), 16, 8, height)) for height in (1.1, 40.0))
    free = panels.solve(panels.build(ellipsoid((1, 1, 1), 16, 8)), panels.FREE)
    np.testing.assert_allclose(panels.solve(far).pressure, free.pressure, atol=2e-4)
    near = panels.solve(grid).pressure.reshape(16, 8)
    lifted = free.pressure.reshape(16, 8)
    assert near[8, 0] < lifted[8, 0] - 0.3 and abs(near[8, -1] - lifted[8, -1]) < 0.1  # faster through the gap


def test_a_closed_end_gives_no_panel_of_its_own():
    grid = panels.build(ellipsoid((1, 1, 1), 12, 8))
    assert (grid.triangle_areas == 0).sum() == 16 and (grid.areas > 0).all()  # one of each pair at both ends
    assert np.linalg.norm(grid.normals, axis=1) == pytest.approx(1)
    assert 2 * grid.areas.sum() == pytest.approx(4 * np.pi, rel=0.03)
    assert ((grid.normals * grid.centres).sum(1) > 0.9).all()


# --- bodies


def draw_shape(index):
    ranges = np.array(list(drivaerml.SETTINGS["parameters"].values()))
    values = sampling.generator(drivaerml.BENCH_ID, 0, index).uniform(*ranges.T)
    return dict(zip(drivaerml.SETTINGS["parameters"], values))


def extreme_shapes():
    ranges = drivaerml.SETTINGS["parameters"]
    middle = {name: sum(limits) / 2 for name, limits in ranges.items()}
    shapes = [middle | {name: limit} for name, limits in ranges.items() for limit in limits]
    corners = np.random.default_rng(0).integers(0, 2, (100, len(ranges)))
    return shapes + [{name: ranges[name][side] for name, side in zip(ranges, corner)} for corner in corners]


def test_every_body_is_sound_and_fits_the_published_box():
    assert len(drivaerml.SETTINGS["parameters"]) == 16
    size = np.subtract(drivaerml.SETTINGS["box_max"], drivaerml.SETTINGS["box_min"])
    for shape in extreme_shapes():
        nodes = drivaerml.body(shape, (10, 20))
        drivaerml.require_sound(panels.build(nodes))
        extent = np.ptp(nodes.reshape(-1, 3), axis=0)
        assert extent[0] == pytest.approx(shape["length"]) and extent[0] <= size[0]
        assert nodes[..., 1].min() >= 0 and 2 * nodes[..., 1].max() <= min(shape["width"] + 1e-9, size[1])
        assert nodes[..., 2].min() > 0.05 and nodes[..., 2].max() <= min(shape["height"] + 1e-9, size[2])
        assert (nodes[:, [0, -1], 1] == 0).all() and np.ptp(nodes[[0, -1]], axis=1).max() == 0


@pytest.fixture(scope="module")
def refined():
    """[(panels, flow)] of one car at 512, 1,152 and 2,048 panels."""
    grids = [panels.build(drivaerml.body(draw_shape(0), size)) for size in ((16, 32), (24, 48), (32, 64))]
    return [(grid, panels.solve(grid)) for grid in grids]


def test_car_flow_is_tangential_and_in_range(refined):
    for _, flow in refined:
        drivaerml.require_physical(flow)
        assert flow.leakage < 1e-4 and -6 < flow.pressure.min() and 0.95 < flow.pressure.max() <= 1 + 1e-3


def test_car_drag_falls_under_refinement(refined):
    """D'Alembert: what is left of the drag is the discretisation's."""
    values = [abs(drag(grid, flow.pressure)) for grid, flow in refined]
    assert values[0] > values[1] > values[2] and values[0] < 0.06 and values[2] < 0.03, values


def test_car_pressure_converges(refined):
    (coarse, coarse_flow), _, (fine, fine_flow) = refined
    points = [drivaerml.scatter(grid, flow.pressure.reshape(size), np.random.default_rng(0), 20_000)
              for grid, flow, size in ((coarse, coarse_flow, (32, 16)), (fine, fine_flow, (64, 32)))]
    means, spreads = ([values.mean() for _, values in points], [values.std() for _, values in points])
    assert abs(np.diff(means)[0]) < 0.02 and abs(np.diff(spreads)[0]) < 0.05
    assert -0.45 < means[1] < -0.1 and 0.25 < spreads[1] < 0.55  # the published data: -0.30 and 0.36


def inside_out(nodes):
    return nodes[:, ::-1]


def collapsed(nodes):
    nodes[3] = nodes[4]
    return nodes


def folded(nodes):
    nodes[5, 3] = nodes[3, 3]
    return nodes


@pytest.mark.parametrize("damage, message", [
    (inside_out, "faces into the body"), (collapsed, "has the area"), (folded, "folded over itself")])
def test_a_bad_body_is_rejected(damage, message):
    nodes = damage(drivaerml.body(draw_shape(0), (8, 16)))
    with pytest.raises(sampling.RejectedSample, match=message):
        drivaerml.require_sound(panels.build(nodes))


@pytest.mark.parametrize("pressure, leakage, message", [
    ([0.0, -6.5], 0.0, "pressure coefficients from -6.50"), ([1.01, 0.0], 0.0, r"to 1\.0100"),
    ([np.nan, 0.0], 0.0, "pressure coefficients from nan"), ([0.0, 0.0], 1e-3, "flow through the surface 1.0e-03"),
    ([0.0, 0.0], np.nan, "flow through the surface nan")])
def test_an_unphysical_flow_is_rejected(pressure, leakage, message):
    with pytest.raises(sampling.RejectedSample, match=message):
        drivaerml.require_physical(panels.Flow(np.zeros((2, 3)), np.array(pressure), leakage))


# --- points


def test_points_are_uniform_over_the_area_of_both_halves():
    grid = panels.build(ellipsoid((1, 1, 1), 48, 24))
    position, _ = drivaerml.scatter(grid, np.zeros((48, 24)), np.random.default_rng(0), 40_000)
    # Archimedes: on a sphere every coordinate is uniform.
    for axis in range(3):
        counts, _ = np.histogram(position[:, axis], bins=8, range=(-1, 1))
        assert np.abs(counts / 5000 - 1).max() < 0.06
    np.testing.assert_allclose(np.linalg.norm(position, axis=1), 1, atol=5e-3)


def test_values_between_centres_are_bilinear():
    first, second = np.indices((6, 4)) + 0.5
    place = np.random.default_rng(0).uniform([0.5, 0.5], [5.5, 3.5], (50, 2)).T
    np.testing.assert_allclose(drivaerml.bilinear(2 * first - 3 * second, *place), 2 * place[0] - 3 * place[1])
    values = np.random.default_rng(1).random((6, 4))
    np.testing.assert_allclose(drivaerml.bilinear(values, first.ravel(), second.ravel()), values.ravel())
    on_plane, beside = (drivaerml.bilinear(values, np.array([2.5]), np.array([v])) for v in (0.0, 0.5))
    np.testing.assert_allclose(on_plane, beside)  # symmetric: no slope at the symmetry plane
    pole = drivaerml.bilinear(values, np.zeros(4), second[0])
    np.testing.assert_allclose(pole, (values[0] + values[0, ::-1]) / 2)  # opposite sides meet at a closed end


def test_pressure_at_points_of_a_sphere():
    grid = panels.build(ellipsoid((1, 1, 1), 32, 16))
    values = panels.solve(grid, panels.FREE).pressure.reshape(32, 16)
    position, pressure = drivaerml.scatter(grid, values, np.random.default_rng(0), 5000)
    assert relative(pressure, 1 - 9 / 4 * (1 - panels.unit(position)[:, 0] ** 2)) < 0.02


def test_a_sample_has_the_published_form():
    arrays = drivaerml.sample(sampling.generator(6, 0, 0), (8, 16), 500)
    centres, fields = arrays["surface_mesh_centers"], arrays["surface_fields"]
    assert centres.shape == (500, 3) and fields.shape == (500, 4) and centres.dtype == fields.dtype == np.float32
    assert (fields[:, 1:] == 0).all() and fields[:, 0].max() <= 757 and -300 < fields[:, 0].mean() < -50
    assert (centres >= drivaerml.SETTINGS["box_min"]).all() and (centres <= drivaerml.SETTINGS["box_max"]).all()
    assert 0.4 < (centres[:, 1] > 0).mean() < 0.6


# --- the published layout


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    root = tmp_path_factory.mktemp("generated")
    data.write_published(root, SPEC)
    return root


@pytest.fixture
def copy(generated, tmp_path):
    """A copy of the generated files that a test may damage."""
    return shutil.copytree(generated, tmp_path / "copy")


@pytest.fixture(scope="module")
def like_published(tmp_path_factory):
    """Files as the archive holds them, without provenance: runs 2, 10, 30 for training and 4, 11 for the test."""
    root, generator = tmp_path_factory.mktemp("published"), np.random.default_rng(0)
    for folder, runs in ((TRAIN, (2, 10, 30)), (TEST, (4, 11))):
        (root / folder).mkdir(parents=True)
        for run in runs:
            fields = generator.normal([-230, 0, 0, 0], [270, 2, 1, 1], (40_000, 4)).astype(np.float32)
            centres = generator.uniform(data.BOX_MIN, data.BOX_MAX, (40_000, 3)).astype(np.float32)
            np.savez(root / folder / f"run_{run}.npz", surface_mesh_centers=centres, surface_fields=fields)
    (root / TRAIN / "._run_2.npz").write_bytes(b"a file of another operating system")
    return root


@pytest.fixture
def damaged(like_published, tmp_path):
    """A copy of those files whose run 10 a test may damage."""
    return shutil.copytree(like_published, tmp_path / "damaged")


def folder_files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_generated_layout_and_round_trip(generated):
    names = sorted(path.relative_to(generated / data.FOLDER).as_posix() for path in generated.rglob("*.npz"))
    assert names == ["test/run_4.npz", "test/run_5.npz", "train/run_1.npz", "train/run_2.npz", "train/run_3.npz"]
    benchmark = data.read_published(generated, SPEC)
    assert benchmark.grid is None and not benchmark.points_correspond and benchmark.num_coordinates == 3
    for samples, folder, runs in ((benchmark.train, TRAIN, (1, 2, 3)), (benchmark.test, TEST, (4, 5))):
        assert samples.features.dtype == samples.target.dtype == np.float32
        for row, run in enumerate(runs):
            with np.load(generated / folder / f"run_{run}.npz", allow_pickle=False) as arrays:
                assert sorted(arrays.files) == sorted(data.COLUMNS)
                np.testing.assert_array_equal(samples.features[row], arrays["surface_mesh_centers"])
                np.testing.assert_array_equal(samples.target[row], arrays["surface_fields"][:, :1])
    encoded = benchmark.target_norm.encode(benchmark.train.target)
    assert abs(encoded.mean()) < 1e-5 and encoded.std(ddof=1) == pytest.approx(1, abs=1e-5)  # fitted


def test_card_of_the_stand_in(generated):
    card = data.read_published(generated, SPEC).card
    assert card["source"] == "stand-in" and "potential flow" in card["stand_in"] and "Not comparable" in card["stand_in"]
    assert card["split"] == "folders: 3 of 3 train / 2 of 2 test" and len(card["split_hash"]) == 12
    assert card["rejected"] == 0
    assert card["counts"] == {"train": 3, "test": 2, "points": 600}
    assert [(entry["name"], entry["count"], len(entry["sha256"])) for entry in card["files"]] == [
        ("train/run_*.npz", 3, 64), ("test/run_*.npz", 2, 64)]
    assert card["solver"]["physics"].startswith("inviscid") and card["solver"]["panels"] == [8, 16]
    assert read_json(generated / data.FOLDER / published.PROVENANCE)["synthetic"] is True


def test_files_do_not_depend_on_workers_or_on_what_was_there(generated, copy):
    data.write_published(copy, SPEC, num_workers=2)
    assert folder_files(copy) == folder_files(generated)


def test_published_files_read_with_the_documented_constants(like_published):
    benchmark = data.read_published(like_published, SPEC)
    with np.load(like_published / TRAIN / "run_2.npz") as arrays:  # by number: run 2 comes before run 10
        np.testing.assert_array_equal(benchmark.train.features[0], arrays["surface_mesh_centers"][:600])
        np.testing.assert_array_equal(benchmark.train.target[0], arrays["surface_fields"][:600, :1])
    assert benchmark.target_norm.mean.tolist() == [-229.845718] and benchmark.target_norm.std.tolist() == [269.598572]
    encoded = benchmark.feature_norm.encode(benchmark.train.features)
    assert 0 <= encoded.min() < 0.01 and 0.99 < encoded.max() <= 1
    lower = benchmark.feature_norm.encode(np.array([-0.9425, -1.1314, -0.3176]))
    upper = benchmark.feature_norm.encode(np.array([4.1325, 1.1317, 1.2445]))
    np.testing.assert_allclose([lower, upper], [[0, 0, 0], [1, 1, 1]], atol=1e-12)
    assert benchmark.card["source"] == "published" and "stand_in" not in benchmark.card
    assert benchmark.card["normalisation"]["target"].startswith("documented")


def test_the_split_hash_tells_the_runs(like_published):
    hashes = {data.read_published(like_published, SPEC | change).card["split_hash"]
              for change in ({}, {"num_train": 2}, {"num_test": 1})}
    assert len(hashes) == 3


def test_published_files_are_never_overwritten(damaged):
    before = folder_files(damaged)
    with pytest.raises(ValueError, match="holds files without provenance.json"):
        data.write_published(damaged, SPEC)
    assert {name: content for name, content in folder_files(damaged).items() if not name.endswith(".lock")} == before


def test_too_few_panels_fail_before_anything_is_solved(tmp_path):
    with pytest.raises(ValueError, match=r"panels \[3, 16\]: expected at least \[4, 8\]"):
        data.write_published(tmp_path, SPEC | {"panels": [3, 16]})
    assert list(tmp_path.iterdir()) == []


# --- damaged files


def edit(path: Path, change) -> None:
    """Apply change(arrays by name) to a .npz file."""
    with np.load(path) as file:
        arrays = dict(file)
    change(arrays)
    np.savez(path, **arrays)


def setting(name, index, value):
    def change(arrays):
        arrays[name][index] = value

    return change


def replaced(name, make):
    return lambda path: edit(path, lambda arrays: arrays.update({name: make(arrays[name])}))


def claim(shape, name="surface_fields", version=b"\x01\x00", descr="<f4"):
    """Put an array in the file whose header claims `shape`, without its numbers."""
    def damage(path):
        header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
        length = len(header).to_bytes(2 if version == b"\x01\x00" else 4, "little")
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("surface_mesh_centers.npy", b"\x93NUMPY" + version + length + header)
            archive.writestr(f"{name}.npy", b"\x93NUMPY" + version + length + header)

    return damage


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def pickled(path):
    np.savez(path, surface_mesh_centers=np.zeros((40_000, 3)), surface_fields=np.array([{}], dtype=object))


def text_member(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("surface_mesh_centers.npy", "import os")


@pytest.mark.parametrize("damage, message", [
    (lambda p: p.write_text("<!DOCTYPE html><html>403 Forbidden</html>"), "damaged or cut short .*zip"),
    (lambda p: p.write_bytes(b""), "damaged or cut short"),
    (lambda p: os.truncate(p, 300_000), "damaged or cut short"),
    (lambda p: os.truncate(p, p.stat().st_size - 10), "damaged or cut short"),
    (flip, "damaged or cut short .*CRC"),
    (text_member, "damaged or cut short .*magic"),
    (pickled, r"surface_fields has the shape \(1,\), expected \(40000, 4\)"),
    (claim((40_000, 4), version=b"\x02\x00"), r"damaged or cut short .*version \(2, 0\)"),
    (claim((10**15, 3)), r"surface_mesh_centers has the shape \(1000000000000000, 3\)"),
    (claim((40_000, 3)), r"surface_fields has the shape \(40000, 3\)"),
    (claim((40_000, 3), descr="|O"), "dtype object, expected floating"),
    (claim((40_000, 3), name="fields"), "no array surface_fields; it has fields.npy, surface_mesh_centers.npy"),
    (replaced("surface_fields", lambda a: a[:, 0]), r"shape \(40000,\), expected \(40000, 4\)"),
    (replaced("surface_fields", np.transpose), r"shape \(4, 40000\), expected \(40000, 4\)"),
    (replaced("surface_mesh_centers", lambda a: a[:10_000]), r"shape \(10000, 3\), expected \(40000, 3\)"),
    (replaced("surface_fields", lambda a: a.astype(int)), "dtype int64, expected floating"),
    (lambda p: edit(p, setting("surface_fields", (5, 2), np.nan)), "surface_fields has 1 values that FP32 cannot hold"),
    (lambda p: edit(p, setting("surface_mesh_centers", (5, 2), np.inf)), "surface_mesh_centers has 1 values that FP32"),
    (lambda p: edit(p, setting("surface_mesh_centers", 7, [9, 0, 0])), r"the point \[9.0, 0.0, 0.0\] is outside the box"),
    (replaced("surface_mesh_centers", lambda a: a[:, ::-1]), "outside the box"),
    (replaced("surface_fields", lambda a: a[:, ::-1]), "mean pressure is .*, expected from -290 to -170"),
    (replaced("surface_fields", lambda a: 2 * a), "mean pressure is -4.*, expected from -290 to -170"),
])
def test_damaged_run(damaged, damage, message):
    damage(damaged / TRAIN / "run_10.npz")
    with pytest.raises(ValueError, match=f"(?s)run_10.npz: .*{message}"):
        data.read_published(damaged, SPEC)


def test_a_pickled_array_of_the_right_shape_is_refused(damaged):
    path = damaged / TRAIN / "run_10.npz"
    edit(path, lambda arrays: arrays.update(surface_fields=np.full((40_000, 4), None)))
    with pytest.raises(ValueError, match="run_10.npz: surface_fields has the dtype object"):
        data.read_published(damaged, SPEC)


def test_a_compressed_bomb_is_refused_unread(damaged):
    with zipfile.ZipFile(damaged / TRAIN / "run_10.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in data.COLUMNS:
            archive.writestr(f"{name}.npy", bytes(20_000_000))
    with pytest.raises(ValueError, match="run_10.npz: damaged or cut short"):
        data.read_published(damaged, SPEC)


@pytest.mark.parametrize("change, message", [
    ({"num_train": 4}, r"train: 3 runs, expected at least 4"),
    ({"num_points": 40_001}, "num_points 40001: the published files hold 40000 points"),
])
def test_more_than_there_is(like_published, change, message):
    with pytest.raises(ValueError, match=message):
        data.read_published(like_published, SPEC | change)


def test_folders_that_are_no_split(damaged, tmp_path):
    shutil.copy(damaged / TRAIN / "run_10.npz", damaged / TEST)
    with pytest.raises(ValueError, match="run_10.npz: run 10 is in both folders"):
        data.read_published(damaged, SPEC)
    with pytest.raises(FileNotFoundError, match="train: no files run_<number>.npz"):
        data.read_published(tmp_path / "nothing", SPEC)


def test_a_replaced_generated_file_is_found(copy):
    edit(copy / TRAIN / "run_2.npz", setting("surface_fields", (0, 0), 0.0))
    with pytest.raises(ValueError, match="(?s)run_2.npz: sha256 .*replaced"):
        data.read_published(copy, SPEC)


def test_generated_files_of_other_points_are_refused(generated):
    with pytest.raises(ValueError, match=r"run_1.npz: surface_mesh_centers has the shape \(600, 3\), expected \(500, 3\)"):
        data.read_published(generated, SPEC | {"num_points": 500})


# --- presampling

VTK_FILE = """<?xml version="1.0"?>
<VTKFile type="PolyData" version="0.1" byte_order="LittleEndian" header_type="UInt32" compressor="vtkZLibDataCompressor">
  <PolyData>
    <Piece NumberOfPoints="5" NumberOfVerts="0" NumberOfLines="0" NumberOfStrips="0" NumberOfPolys="2">
      <CellData>
        <DataArray type="Float32" Name="pMeanTrim" format="binary">
          AQAAAACAAAAIAAAAEAAAAA==eF5jYEg7zMDg4QgABwwBsw==
        </DataArray>
        <DataArray type="Float32" Name="wallShearStressMeanTrim" NumberOfComponents="3" format="binary">
          AQAAAACAAAAYAAAAGgAAAA==eF5jYGiwZ2BgcAAiIG4A4gVAfMABAClDBCA=
          <InformationKey name="L2_NORM_RANGE" length="2"><Value index="0">3.7</Value></InformationKey>
        </DataArray>
      </CellData>
      <Points>
        <DataArray type="Float32" Name="Points" NumberOfComponents="3" format="binary">
          AQAAAACAAAA8AAAAFQAAAA==eF5jYEAGDfaobHQ+GDjA+ABiPwP8
        </DataArray>
      </Points>
      <Polys>
        <DataArray type="Int64" Name="connectivity" format="binary">AQAAAACAAAA4AAAAFgAAAA==eF5jYIAARijNBKWZ0cRZ0OQBAYAADg==
        </DataArray>
        <DataArray type="Int64" Name="offsets" format="binary">AQAAAACAAAAQAAAADgAAAA==eF5jYYAAdigNAACIAAw=</DataArray>
      </Polys>
    </Piece>
  </PolyData>
</VTKFile>"""  # written by VTK 9.7, a quadrilateral and a triangle


def write_vtp(path: Path, arrays: dict, mode: str, compressed: bool = False, header: str = "<u8") -> None:
    """A .vtp file of arrays {"points", "connectivity", "offsets", pressure, shear}; mode ascii, binary, raw or base64."""
    def pack(array):
        content, encode = array.tobytes(), bytes if mode == "raw" else base64.b64encode
        if not compressed:
            return encode(np.array([len(content)], header).tobytes() + content)
        size = 1000
        blocks = [zlib.compress(content[at:at + size]) for at in range(0, len(content), size)]
        counts = [len(blocks), size, len(content) % size, *map(len, blocks)]
        return encode(np.array(counts, header).tobytes()) + encode(b"".join(blocks))

    appended = b""

    def element(name):
        nonlocal appended
        array = arrays[name]
        kind = {"f": "Float", "i": "Int"}[array.dtype.kind] + str(8 * array.itemsize)
        start = f'<DataArray type="{kind}" Name="{name}" '
        if mode in ("raw", "base64"):
            appended += pack(array)
            return start + f'format="appended" offset="{len(appended) - len(pack(array))}"/>'
        text = " ".join(map(str, array.ravel().tolist())) if mode == "ascii" else pack(array).decode()
        return start + f'format="{mode}">{text}</DataArray>'

    head = ('<?xml version="1.0"?><VTKFile type="PolyData" byte_order="LittleEndian" '
            f'header_type="UInt{8 * int(header[2:])}"' + ' compressor="vtkZLibDataCompressor"' * compressed
            + '><PolyData><Piece '
            f'NumberOfPoints="{len(arrays["points"])}" NumberOfPolys="{len(arrays["offsets"])}"><CellData>'
            + element(presample.PRESSURE) + element(presample.SHEAR) + "</CellData><Points>" + element("points")
            + "</Points><Polys>" + element("connectivity") + element("offsets") + "</Polys></Piece></PolyData>")
    tail = f'<AppendedData encoding="{mode}">\n_'.encode() + appended + b"\n</AppendedData>" if appended else b""
    path.write_bytes(head.encode() + tail + b"</VTKFile>")


def surface_arrays(num_cells: int) -> dict:
    """Triangles and quadrilaterals between random points of the box."""
    generator = np.random.default_rng(num_cells)
    counts = generator.integers(3, 5, num_cells)
    return {
        "points": generator.uniform(data.BOX_MIN, data.BOX_MAX, (500, 3)).astype(np.float32),
        "connectivity": generator.integers(0, 500, counts.sum()),
        "offsets": np.cumsum(counts),
        presample.PRESSURE: generator.normal(-230, 270, num_cells).astype(np.float32),
        presample.SHEAR: generator.normal(0, 2, (num_cells, 3)).astype(np.float32),
    }


def slow_centres(arrays: dict) -> np.ndarray:
    corners = np.split(arrays["connectivity"], arrays["offsets"][:-1])
    return np.stack([arrays["points"][corner].astype(float).mean(0) for corner in corners])


def test_a_file_that_vtk_wrote(tmp_path):
    (tmp_path / "boundary.vtp").write_text(VTK_FILE)
    surface = Surface(tmp_path / "boundary.vtp")
    assert surface.num_cells == 2
    triangle, quadrilateral = [4 / 3, 1 / 3, 1 / 3], [0.5, 0.5, 0]
    np.testing.assert_allclose(surface.centres(np.array([1, 0, 1])), [triangle, quadrilateral, triangle])
    np.testing.assert_array_equal(surface.values("pMeanTrim", 1), [[-230], [12.5]])
    np.testing.assert_array_equal(surface.values("wallShearStressMeanTrim", 3), [[1, 2, 3], [4, 5, 6]])


@pytest.mark.parametrize("mode, compressed, header", [
    ("ascii", False, "<u4"), ("binary", False, "<u4"), ("binary", True, "<u8"), ("raw", False, "<u8"), ("raw", True, "<u4"),
    ("base64", False, "<u8"), ("base64", True, "<u4")])
def test_every_encoding_of_vtp(tmp_path, mode, compressed, header):
    arrays = surface_arrays(700)
    write_vtp(tmp_path / "boundary.vtp", arrays, mode, compressed, header)
    surface, cells = Surface(tmp_path / "boundary.vtp"), np.random.default_rng(0).permutation(700)[:300]
    np.testing.assert_allclose(surface.centres(cells), slow_centres(arrays)[cells], rtol=1e-12)
    np.testing.assert_array_equal(surface.values(presample.PRESSURE, 1)[:, 0], arrays[presample.PRESSURE])
    np.testing.assert_array_equal(surface.values(presample.SHEAR, 3), arrays[presample.SHEAR])


BOMB = '<!DOCTYPE b [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;">]>'


@pytest.mark.parametrize("old, new, message", [
    ('<?xml version="1.0"?>', '<?xml version="1.0"?>' + BOMB, "document type declaration"),
    ("<VTKFile", "<VTKFile <", "expected polygons in VTK's XML format"),
    ('type="PolyData"', "", "missing"),
    ("vtkZLibDataCompressor", "vtkLZ4DataCompressor", "compressor vtkLZ4DataCompressor, expected none or zlib"),
    ('NumberOfLines="0"', 'NumberOfLines="3"', "other cells too"),
    ("pMeanTrim", "pressure", r"DataArray\[@Name='pMeanTrim'\] is missing"),
    ('NumberOfPolys="2"', 'NumberOfPolys="3"', "pMeanTrim.* is damaged or cut short"),
    ("eF5jYEg7zMDg4QgABwwBsw==", "eF5jYEg7zMDg4QgABww", "pMeanTrim.* is damaged or cut short"),
    ("eF5jYEg7zMDg4QgABwwBsw==", "AAAAAAAAAAAAAAAAAAAAAA==", "pMeanTrim.* is damaged or cut short"),
])
def test_damaged_vtp(tmp_path, old, new, message):
    path = tmp_path / "boundary_1.vtp"
    text = VTK_FILE.replace(old, new)
    path.write_text("<html>sign in</html>" if message == "missing" else text)
    expected = "expected polygons in VTK's XML format" if message == "missing" else message
    with pytest.raises(ValueError, match=f"(?s)boundary_1.vtp: .*({expected})"):
        surface = Surface(path)
        surface.values("pMeanTrim", 1)
        surface.centres(np.arange(2))


@pytest.mark.parametrize("name, index, value, message", [
    ("connectivity", 5, 500, "a corner that is no point"), ("connectivity", 5, -1, "a corner that is no point"),
    ("offsets", 3, 0, "a polygon without corners"), ("offsets", -1, 10**15, "connectivity.* is damaged or cut short"),
    ("offsets", -1, -5, "connectivity.* is damaged or cut short|a polygon without corners")])
def test_polygons_that_cannot_be(tmp_path, name, index, value, message):
    arrays = surface_arrays(700)
    arrays[name][index] = value
    for mode, compressed in (("ascii", False), ("raw", False), ("raw", True)):
        write_vtp(tmp_path / "boundary_1.vtp", arrays, mode, compressed)
        with pytest.raises(ValueError, match=f"boundary_1.vtp: .*({message})"):
            Surface(tmp_path / "boundary_1.vtp").centres(np.arange(700))


def test_a_truncated_vtp_is_named(tmp_path):
    path = tmp_path / "boundary_1.vtp"
    for mode in ("raw", "binary"):
        write_vtp(path, surface_arrays(700), mode)
        os.truncate(path, path.stat().st_size - 6000)
        with pytest.raises(ValueError, match="boundary_1.vtp: "):
            Surface(path).centres(np.arange(700))


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """Runs 1, 2 and 3 of the full data with 900 cells, run 3 already extracted."""
    root = tmp_path_factory.mktemp("full")
    for run in (1, 2, 3):
        (root / f"run_{run}").mkdir()
        arrays = surface_arrays(900 + run)
        if run < 3:
            write_vtp(root / f"run_{run}" / f"boundary_{run}.vtp", arrays, "raw")
            continue
        extracted = slow_centres(arrays).astype(np.float32), arrays[presample.PRESSURE], arrays[presample.SHEAR]
        for name, array in zip(presample.EXTRACTED, extracted):
            np.save(root / f"run_{run}" / f"boundary_{run}_{name}.npy", array)
    return root


SPLIT = {"train": [3, 1], "test": [2]}


def test_presampling_follows_the_legacy_recipe(full, tmp_path):
    presample.presample(full, tmp_path, SPLIT, size=400)
    assert sorted(folder_files(tmp_path)) == [
        "presampled.json", "test/run_2.npz", "train/run_1.npz", "train/run_3.npz"]
    for side, run in (("train", 1), ("test", 2), ("train", 3)):
        np.random.seed(run)
        cells = np.random.choice(900 + run, 400, replace=False)
        arrays = surface_arrays(900 + run)
        centres, fields = data.load_run(tmp_path / side / f"run_{run}.npz", 400)
        assert centres.dtype == fields.dtype == np.float32
        np.testing.assert_allclose(centres, slow_centres(arrays)[cells], rtol=1e-6, atol=1e-7)
        np.testing.assert_array_equal(fields[:, 0], arrays[presample.PRESSURE][cells])
        np.testing.assert_array_equal(fields[:, 1:], arrays[presample.SHEAR][cells])


def test_a_small_sample_is_the_beginning_of_a_large_one(full, tmp_path):
    many = presample.choose(7, 100_000, 40_000, tmp_path)
    np.testing.assert_array_equal(presample.choose(7, 100_000, 10_000, tmp_path), many[:10_000])
    assert len(np.unique(many)) == 40_000
    small, large = (presample.sample_run(full / "run_1", 1, size) for size in (100, 400))
    for name in data.COLUMNS:
        np.testing.assert_array_equal(small[name], large[name][:100])


def test_presampled_files_are_read_like_published_ones_and_named(tmp_path):
    for run in (1, 2):
        folder = tmp_path / "full" / f"run_{run}"
        folder.mkdir(parents=True)
        write_vtp(folder / f"boundary_{run}.vtp", surface_arrays(40_500 + run), "raw")
    presample.presample(tmp_path / "full", tmp_path / data.FOLDER, {"train": [2], "test": [1]})
    benchmark = data.read_published(tmp_path, SPEC | {"num_train": 1, "num_test": 1})
    assert benchmark.train.target.shape == (1, 600, 1) and benchmark.card["source"] == "presampled"
    assert benchmark.target_norm == data.PUBLISHED_NORM


def test_presampling_goes_on_where_it_was(full, tmp_path, monkeypatch):
    sampled = []

    def sample_run(folder, run, size):
        sampled.append(run)
        if len(sampled) == 2:
            raise KeyboardInterrupt
        return {"run": np.array(run)}

    monkeypatch.setattr(presample, "sample_run", sample_run)
    with pytest.raises(KeyboardInterrupt):
        presample.presample(full, tmp_path, SPLIT, 400)
    assert list(folder_files(tmp_path)) == ["train/run_3.npz"]
    presample.presample(full, tmp_path, SPLIT, 400)
    assert sampled == [3, 1, 1, 2]


@pytest.mark.parametrize("split, error, message", [
    ({"train": [1, 2], "test": [2]}, ValueError, "run 2 is there twice"),
    ({"train": [1, 1], "test": [2]}, ValueError, "run 1 is there twice"),
    ({"train": [1], "test": [4]}, FileNotFoundError, r"boundary_4.vtp: no such file, nor boundary_4_\{points,p,tau\}.npy"),
])
def test_a_bad_split_fails_before_anything_is_read(full, tmp_path, split, error, message):
    with pytest.raises(error, match=message):
        presample.presample(full, tmp_path, split, 400)
    assert list(tmp_path.iterdir()) == []


def test_too_few_cells_and_arrays_that_do_not_fit(full, tmp_path):
    with pytest.raises(ValueError, match="boundary_1.vtp: 901 cells, expected at least 40000"):
        presample.presample(full, tmp_path / "out", SPLIT | {"train": [1]})
    copied = shutil.copytree(full / "run_3", tmp_path / "run_3")
    np.save(copied / "boundary_3_tau.npy", np.zeros((5, 3)))
    with pytest.raises(ValueError, match=r"boundary_3_tau.npy: shape \(5, 3\), expected \(903, 3\)"):
        presample.sample_run(copied, 3, 400)


@pytest.mark.parametrize("split", [{"train": [1]}, {"train": [1], "test": []}, {"train": [1], "test": ["2"]},
                                   {"train": [True], "test": [2]}, {"train": [1], "test": [2], "val": [3]},
                                   {"train": 1, "test": [2]}])
def test_a_split_file_that_is_none(tmp_path, split):
    write_json(split, tmp_path / "split.json")
    with pytest.raises(ValueError, match="split.json: expected .*numbers of runs"):
        presample.read_split(tmp_path / "split.json")


def test_a_split_file(tmp_path):
    write_json(SPLIT, tmp_path / "split.json")
    assert presample.read_split(tmp_path / "split.json") == SPLIT


def test_the_command_line_presamples(tmp_path, flarepp):
    """`presample` writes what the reader takes; without a run's data it is one line and nothing is written."""
    generator = np.random.default_rng(0)
    for run in (3, 12):
        folder = tmp_path / "full" / f"run_{run}"
        folder.mkdir(parents=True)
        for name, columns in (("points", 3), ("p", 1), ("tau", 3)):
            values = generator.random((40_100, columns)) - (230.0 if name == "p" else 0)
            np.save(folder / f"boundary_{run}_{name}.npy", values.astype(np.float32))
    split = tmp_path / "split.json"
    write_json({"train": [3], "test": [12, 13]}, split)
    words = ("presample", "--full", tmp_path / "full", "--root", tmp_path / "data", "--split", split)
    refused = flarepp(*words)
    assert refused.returncode == 2 and "boundary_13" in refused.stderr and len(refused.stderr.splitlines()) == 1
    assert not (tmp_path / "data").exists()
    write_json({"train": [3], "test": [12]}, split)
    assert flarepp(*words).returncode == 0
    benchmark = data.read_published(tmp_path / "data", {"num_train": 1, "num_test": 1, "num_points": 500})
    assert benchmark.card["source"] == "presampled"  # not the published split
    chosen = np.random.RandomState(3).choice(40_100, 40_000, replace=False)[:500]
    expected = np.load(tmp_path / "full/run_3/boundary_3_p.npy")[chosen]
    np.testing.assert_array_equal(benchmark.train.target[0], expected)
