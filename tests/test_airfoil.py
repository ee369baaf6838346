"""Airfoil: meshes, fluxes and multigrid against slow twins, exact flows, known drag; the published layout and its damage."""

import os
import shutil
from functools import partial

import numpy as np
import pytest

from conftest import changed, put
from flarepp.data import airfoil as layout
from flarepp.data import published
from flarepp.record import read_json
from flarepp.solvers import airfoil, airfoil_mesh, sampling

SPEC = {"name": "airfoil", "num_train": 3, "num_test": 2, "mesh": [8, 16, 8], "stride": [4, 2], "seed": 0}
FILES = {name: layout.FOLDER / file for name, file in layout.FILES.items()}
NACA_0012 = np.zeros((1, 8))
QUICK = (24, 64, 24)


def generators(count):
    return [sampling.generator(airfoil.BENCH_ID, 0, index) for index in range(count)]


def displacements(count):
    return np.stack([airfoil_mesh.random_displacement(generator) for generator in generators(count)])


def dual_cells(x, y, wake):
    return airfoil_mesh.dual(np.moveaxis(x, 0, -1), np.moveaxis(y, 0, -1), wake)


def finest_level(x, y, wake):
    stream = airfoil.free_stream(0.8, 0.0)
    return airfoil.hierarchy(np.moveaxis(x, 0, -1), np.moveaxis(y, 0, -1), wake, stream, np.float64)[0]


# --- meshes


def test_published_mesh():
    x, y = airfoil_mesh.c_mesh(displacements(3), (50, 120, 50))
    assert x.shape == y.shape == (3, 221, 51)
    wall, outer = np.hypot(np.diff(x[:, :, 0]), np.diff(y[:, :, 0])), np.stack([x[:, :, -1], y[:, :, -1]])
    for position in (x, y):  # both copies of the cut
        np.testing.assert_array_equal(position[:, :51, 0], position[:, :-52:-1, 0])
    np.testing.assert_allclose(x[:, [50, 110, 170], 0], [[1, 0, 1]] * 3, atol=1e-15)
    np.testing.assert_allclose(np.hypot(outer[0] - 1, outer[1])[:, 50:171], 40)
    np.testing.assert_allclose(np.abs(outer[1][:, :51]), 40)
    np.testing.assert_allclose(np.diff(x[0, 110:, 0])[:3], np.array([0.25, 0.75, 1]) / 59)
    assert (np.diff(wall[:, 170:]) > 0).all()
    cells = np.diff(airfoil_mesh.spacing(2 / 120, 50, 40.0, 1.02)) * 40
    np.testing.assert_allclose(cells[[0, 1]], [2 / 120, 1.02 * 2 / 120])
    np.testing.assert_allclose(cells[-10:] / cells[-11:-1], 1.664, atol=5e-4)


def test_undeformed_aerofoil_is_the_naca_0012():
    x, y = airfoil_mesh.c_mesh(NACA_0012, (8, 400, 8))
    surface = y[0, 8:-8, 0]
    assert surface.max() == pytest.approx(0.06, abs=1e-4) and surface.min() == -surface.max()
    assert x[0, 8 + surface.argmax(), 0] == pytest.approx(0.3, abs=0.01) and abs(surface[0]) < 1e-15


def test_deformation_interpolates_its_control_points():
    columns, rows = np.array([-0.25, 0.25, 0.75, 1.25]), np.array([-0.1] * 4 + [0.1] * 4)
    at_controls = airfoil_mesh.deformation(np.eye(8), np.concatenate([columns, columns[::-1]]), rows)
    np.testing.assert_allclose(at_controls, np.eye(8), atol=1e-12)
    x, y = np.random.default_rng(0).random((2, 20))
    np.testing.assert_allclose(airfoil_mesh.deformation(np.full((1, 8), 0.3), x, y), 0.3)
    drawn = displacements(300)
    assert (drawn[:, 0] == 0).all() and 0.0499 < np.abs(drawn).max() <= 0.05 and abs(drawn[:, 1:].mean()) < 3e-3


def test_dual_cells_are_closed_and_fill_the_mesh():
    for mesh in (QUICK, (50, 120, 50)):
        x, y = airfoil_mesh.c_mesh(displacements(3), mesh)
        cells = dual_cells(x, y, mesh[0])
        gap = np.diff(cells.faces_i, axis=1) + np.diff(cells.faces_j, axis=2)
        assert np.abs(gap).max() < 1e-12 and cells.volume.min() > 0
        sides = np.s_[:, ::-1, -1], np.s_[:, 0, -2:0:-1], np.s_[:, :, 0], np.s_[:, -1, 1:-1]
        outline_x, outline_y = (np.concatenate([position[side] for side in sides], axis=1) for position in (x, y))
        area = (outline_x * np.roll(outline_y, -1, axis=1) - outline_y * np.roll(outline_x, -1, axis=1)).sum(axis=1) / 2
        np.testing.assert_allclose(cells.volume.sum(axis=(0, 1)), np.abs(area), rtol=1e-12)
        np.testing.assert_allclose(cells.wall.sum(axis=1), 0, atol=1e-15)


def test_dual_cell_of_one_node():
    """The polygon around a node: middles of its edges and centres of its quadrilaterals, in turn."""
    x, y = airfoil_mesh.c_mesh(displacements(1), (8, 16, 8))
    points, (i, j) = np.stack([x[0], y[0]]), (14, 3)
    corners = []
    for a, b in ((1, 0), (0, 1), (-1, 0), (0, -1)):  # with the next one (-b, a), a quadrilateral
        corners.append((points[:, i, j] + points[:, i + a, j + b]) / 2)
        quadrilateral = ((0, 0), (a, b), (a - b, b + a), (-b, a))
        corners.append(np.mean([points[:, i + k, j + m] for k, m in quadrilateral], axis=0))
    px, py = np.array(corners).T
    cells = dual_cells(x, y, 8)
    assert abs(np.sum(px * np.roll(py, -1) - py * np.roll(px, -1))) / 2 == pytest.approx(cells.volume[i, j, 0])
    side = corners[1] - corners[7]  # between the nodes (i, j) and (i + 1, j)
    np.testing.assert_allclose(cells.faces_i[:, i + 1, j, 0], [-side[1], side[0]], atol=1e-15)


def test_coarser_meshes_keep_ends_and_trailing_edges():
    for num_nodes, wake in ((221, 50), (111, 25), (57, 13), (113, 24), (9, 2), (25, 0), (26, 0)):
        kept = airfoil_mesh.coarse_nodes(num_nodes, wake)
        assert {0, wake, num_nodes - 1 - wake, num_nodes - 1} <= set(kept) and set(np.diff(kept)) <= {1, 2}
        if wake:
            np.testing.assert_array_equal(kept, num_nodes - 1 - kept[::-1])
        matrix = airfoil_mesh.interpolation(kept, num_nodes)
        np.testing.assert_allclose(matrix @ (3.0 * kept - 1), 3.0 * np.arange(num_nodes) - 1)


# --- fluxes


def random_flow(shape):
    """A state [4, ...] that differs from node to node, subsonic and supersonic."""
    generator = np.random.default_rng(1)
    density, pressure = generator.uniform(0.5, 1.5, (2, *shape))
    u, v = generator.uniform(-2, 2, (2, *shape))
    energy = pressure / 0.4 + density * (u**2 + v**2) / 2
    return airfoil.Flow.of(np.stack([density, density * u, density * v, energy]))


def euler_flux(state, face):
    density, momentum_x, momentum_y, energy = state
    u, v, pressure = airfoil.primitive(state)
    through = u * face[0] + v * face[1]
    pushed = np.stack([0 * pressure, pressure * face[0], pressure * face[1], pressure * through])
    return np.stack([density, momentum_x, momentum_y, energy]) * through + pushed


def test_split_fluxes_add_up_and_follow_the_waves():
    flow, face = random_flow((200,)), np.random.default_rng(2).standard_normal((2, 200))
    out, back = (airfoil.split_flux(flow, face, sign) for sign in (1, -1))
    np.testing.assert_allclose(out + back, euler_flux(flow.state, face), atol=1e-12)
    speed = (flow.u * face[0] + flow.v * face[1]) / np.hypot(*face) / flow.sound
    assert (speed > 1).any() and (speed < -1).any()
    assert np.abs(back[:, speed > 1]).max() < 1e-12 and np.abs(out[:, speed < -1]).max() < 1e-12
    assert (out[0] >= 0).all() and (back[0] <= 0).all()


@pytest.fixture(scope="module")
def small():
    """(level, dual cells, random flow with equal copies of the cut) on [8, 16, 8] cells."""
    x, y = airfoil_mesh.c_mesh(displacements(1), (8, 16, 8))
    state = random_flow((33, 9, 1)).state
    return finest_level(x, y, 8), dual_cells(x, y, 8), airfoil.Flow.of(airfoil.join_cut(state.copy(), 8, 0.5))


def test_convection_equals_its_definition(small):
    """The slow twin: node by node, face by face."""
    level, cells, flow = small
    stream = airfoil.Flow.of(airfoil.free_stream(0.8, 0.0))
    expected = np.zeros((4, 33, 9))

    def leave(i, j, k, m, face):
        at, there = (flow.state[:, a, b, 0] for a, b in ((i, j), (k, m)))
        expected[:, i, j] += (euler_flux(at, face) + euler_flux(there, face)) / 2

    def far(i, j, face):
        expected[:, i, j] += airfoil.split_flux(flow[i, j, 0], face, 1) + airfoil.split_flux(stream, face, -1)

    for i, j in np.ndindex(33, 9):
        behind_i, ahead_i = -cells.faces_i[:, i, j, 0], cells.faces_i[:, i + 1, j, 0]
        behind_j, ahead_j = -cells.faces_j[:, i, j, 0], cells.faces_j[:, i, j + 1, 0]
        leave(i, j, i - 1, j, behind_i) if i > 0 else far(i, j, behind_i)
        leave(i, j, i + 1, j, ahead_i) if i < 32 else far(i, j, ahead_i)
        leave(i, j, i, j + 1, ahead_j) if j < 8 else far(i, j, ahead_j)
        if j > 0:
            leave(i, j, i, j - 1, behind_j)
        elif 8 <= i <= 24:
            expected[1:3, i, 0] += flow.pressure[i, 0, 0] * cells.wall[:, i - 8, 0]
    np.testing.assert_allclose(airfoil.convection(level, flow)[..., 0], expected, atol=1e-10)


def line_dissipation(values, pressure, scale, before=None):
    """What differences bring into the nodes of one line: values [n, 4], pressure [n], scale [n].

    before: (values, pressure) of the node that precedes the first one.
    """
    size = len(values)
    second, sensor = np.zeros((size, 4)), np.zeros(size)
    for k in range(size - 1):
        if k == 0 and before is None:
            continue
        last_values, last_pressure = before if k == 0 else (values[k - 1], pressure[k - 1])
        second[k] = values[k + 1] - 2 * values[k] + last_values
        sensor[k] = abs(pressure[k + 1] - 2 * pressure[k] + last_pressure)
        sensor[k] /= pressure[k + 1] + 2 * pressure[k] + last_pressure
    brought = np.zeros((size, 4))
    for k in range(size - 1):
        strength, weight = (scale[k] + scale[k + 1]) / 2, max(sensor[k], sensor[k + 1])
        flux = weight * (values[k + 1] - values[k]) - max(0, 1 / 16 - weight) * (second[k + 1] - second[k])
        brought[k] += strength * flux
        brought[k + 1] -= strength * flux
    return brought


def test_dissipation_equals_its_definition(small):
    """The slow twin: line by line, the wave speeds from the faces of each node."""
    level, cells, random = small
    # Nearly uniform, so that both kinds of differences are switched on somewhere.
    flow = airfoil.Flow.of(0.1 * random.state + airfoil.free_stream(0.8, 0.0)[:, None, None, None])
    values = np.concatenate([flow.state[:3], (flow.state[3] + flow.pressure)[None]])[..., 0]
    pressure, sound = flow.pressure[..., 0], flow.sound[..., 0]
    speeds, halves = [], [np.ones((33, 9)), np.ones((33, 9))]
    halves[0][:, [0, -1]], halves[1][[0, -1]] = 0.5, 0.5
    for faces, half in ((cells.faces_i[:, 1:] + cells.faces_i[:, :-1], halves[0]),
                        (cells.faces_j[:, :, 1:] + cells.faces_j[:, :, :-1], halves[1])):
        face = faces[..., 0] / 2 / half
        speeds.append(np.abs(flow.u[..., 0] * face[0] + flow.v[..., 0] * face[1]) + sound * np.hypot(*face))
    scale_i = halves[0] * speeds[0] * (1 + (speeds[1] / speeds[0]) ** (2 / 3))
    scale_j = halves[1] * speeds[1] * (1 + (speeds[0] / speeds[1]) ** (2 / 3))
    expected = np.zeros((4, 33, 9))
    for j in range(9):
        expected[:, :, j] += line_dissipation(values[:, :, j].T, pressure[:, j], scale_i[:, j]).T
    for i in range(33):
        on_cut = i <= 8 or i >= 24
        before = (values[:, 32 - i, 1], pressure[32 - i, 1]) if on_cut else None
        expected[:, i] += line_dissipation(values[:, i].T, pressure[i], scale_j[i], before).T
    factors = airfoil.step_factors(level, flow, 0.0)
    assert all((part > 0).any() and (part == 0).any() for part in factors.fourth)
    np.testing.assert_allclose(airfoil.dissipation(level, flow, factors)[..., 0], expected, atol=1e-10)


def test_a_uniform_stream_stays_uniform():
    mesh = (8, 32, 16)
    x, y = airfoil_mesh.c_mesh(displacements(2), mesh)
    level = finest_level(x, y, 8)
    state = np.broadcast_to(airfoil.free_stream(0.8, 0.0)[:, None, None, None], (4, *level.volume.shape))
    balance = airfoil.join_cut(airfoil.imbalance(level, airfoil.Flow.of(state), 0.25), 8)
    wall = balance[:, 8:-8, 0].copy()
    balance[:, 8:-8, 0] = 0
    assert np.abs(balance).max() < 1e-12 and np.abs(wall).max() > 1e-3


# --- flows


@pytest.fixture(scope="module")
def batch():
    """What sixteen generators give on the mesh of the quick scale."""
    return airfoil.samples(generators(16), QUICK)


def forces(x, y, wake, solution, mach):
    """Drag and lift coefficient [S] along x and y, and the largest pressure coefficient [S]."""
    body = slice(wake, x.shape[1] - wake)
    pressure = airfoil.primitive(np.moveaxis(solution.state.astype(float), 1, 0))[2][:, body, 0]
    coefficient = (pressure - 1) / (0.7 * mach**2)
    cells = dual_cells(x, y, wake)
    return *np.einsum("sn,cns->cs", coefficient, cells.wall), coefficient.max(axis=1)


def enthalpy_error(solution, mach):
    state = np.moveaxis(solution.state.astype(float), 1, 0)
    enthalpy = (state[3] + airfoil.primitive(state)[2]) / state[0]
    return np.abs(enthalpy / (1.4 / 0.4 + 0.7 * mach**2) - 1).max()


def is_inside_the_guard(solution):
    state = np.moveaxis(solution.state, 1, 0)
    held = np.stack([state[0], airfoil.primitive(state)[2]])
    return held.min() > 1.5 * airfoil.SETTINGS["lowest"] and held.max() < 0.5 * airfoil.SETTINGS["highest"]


def test_symmetric_aerofoil_has_a_symmetric_flow():
    x, y = airfoil_mesh.c_mesh(NACA_0012, QUICK)
    solution = airfoil.solve(x, y, QUICK[0], cycles=80, dtype=np.float64)
    assert solution.history[-1, 0] < 1e-3 and is_inside_the_guard(solution)
    mirrored = solution.state[:, :, ::-1] * np.array([1, 1, -1, 1])[:, None, None]
    assert np.abs(solution.state - mirrored).max() < 1e-10
    _, lift, _ = forces(x, y, QUICK[0], solution, 0.8)
    assert abs(lift[0]) < 1e-10 and enthalpy_error(solution, 0.8) < 0.005


@pytest.mark.parametrize(
    "mach, cells, drag, tolerance",
    [(0.8, 64, 0.030, 0.003), (0.8, 128, 0.0143, 0.00143), (0.5, 64, 0.0135, 0.00135), (0.5, 128, 0.0025, 0.0025)],
)
def test_drag_of_the_naca_0012_on_refined_meshes(mach, cells, drag, tolerance):
    """It goes down to about 0.008 at Mach 0.8, and to 0 at Mach 0.5, where there is no shock."""
    mesh = (3 * cells // 8, cells, 3 * cells // 8)
    x, y = airfoil_mesh.c_mesh(NACA_0012, mesh, cosine=True)
    solution = airfoil.solve(x, y, mesh[0], mach=mach, cycles=max(100, cells))
    found, lift, stagnation = forces(x, y, mesh[0], solution, mach)
    assert found[0] == pytest.approx(drag, abs=tolerance) and abs(lift[0]) < 1e-4
    assert solution.history[-1, 0] < 1e-3 and is_inside_the_guard(solution) and enthalpy_error(solution, mach) < 0.005
    exact = ((1 + 0.2 * mach**2) ** 3.5 - 1) / (0.7 * mach**2)
    assert stagnation[0] == pytest.approx(exact, rel=0.12 * 64 / cells)


def test_lift_grows_with_the_angle_as_linear_theory_has_it():
    """2 pi / sqrt(1 - M^2) for a thin aerofoil, and up to a tenth more for one as thick as this."""
    x, y = airfoil_mesh.c_mesh(NACA_0012, QUICK, cosine=True)
    solution = airfoil.solve(x, y, QUICK[0], mach=0.5, angle=0.02, cycles=80)
    drag, lift, _ = forces(x, y, QUICK[0], solution, 0.5)
    slope = (lift[0] * np.cos(0.02) - drag[0] * np.sin(0.02)) / 0.02
    assert 1.0 < slope / (2 * np.pi / np.sqrt(0.75)) < 1.1


def test_multigrid_ends_where_the_finest_mesh_is_balanced():
    x, y = airfoil_mesh.c_mesh(displacements(1), (8, 16, 8))
    solution = airfoil.solve(x, y, 8, cycles=250, dtype=np.float64)
    flow = airfoil.Flow.of(np.moveaxis(solution.state, 0, -1))
    balance = airfoil.join_cut(airfoil.imbalance(finest_level(x, y, 8), flow, 0.0), 8)
    assert np.abs(balance).max() < 1e-11 and solution.history[-1] < 1e-11


def test_sixteen_samples(batch):
    assert not any(isinstance(sample, sampling.RejectedSample) for sample in batch)
    X, Y, Q = (np.stack([sample[name] for sample in batch]) for name in ("X", "Y", "Q"))
    assert X.shape == Y.shape == (16, 113, 25) and Q.shape == (16, 5, 113, 25) and Q.dtype == np.float64
    assert dual_cells(X, Y, 24).volume.min() > 0
    mach = Q[:, 4]
    np.testing.assert_allclose(mach, np.hypot(Q[:, 1], Q[:, 2]) / np.sqrt(1.4 * Q[:, 3] / Q[:, 0]))
    assert 0 < mach.min() < 0.3 and 1.4 < mach.max() < 1.8 and np.abs(mach[:, :, -1] - 0.8).max() < 0.01
    for field in Q.swapaxes(0, 1):
        np.testing.assert_allclose(field[:, :25, 0], field[:, :-26:-1, 0], rtol=1e-6, atol=1e-6)
    flat = mach.reshape(16, -1)
    distance = np.linalg.norm(flat - flat.mean(axis=0), axis=1) / np.linalg.norm(flat, axis=1)
    assert distance.mean() == pytest.approx(0.085, abs=0.025)


def test_a_sample_does_not_depend_on_its_batch(batch):
    alone, = airfoil.samples(generators(3)[2:], QUICK)
    for name in ("X", "Y", "Q"):
        assert np.abs(alone[name] - batch[2][name]).max() < 1e-5


def test_a_sample_depends_neither_on_the_count_nor_on_processes():
    draw = partial(sampling.draw, partial(airfoil.samples, mesh=(8, 16, 8)), bench_id=airfoil.BENCH_ID, seed=0, batch_size=3)
    many, few, pooled = draw(6), draw(2), draw(6, num_workers=2)
    for name, array in many.arrays.items():
        np.testing.assert_array_equal(array[:2], few.arrays[name])
        np.testing.assert_array_equal(array, pooled.arrays[name])


@pytest.mark.parametrize(
    "setting, value, message",
    [
        ("max_residual", 1e-12, "relative residual .*, expected below 1e-12"),
        ("min_cycles", 3, "relative residual"),
        ("lowest", 0.8, "density and pressure from .* held by the guard"),
    ],
)
def test_what_does_not_converge_is_rejected(monkeypatch, setting, value, message):
    monkeypatch.setitem(airfoil.SETTINGS, setting, value)
    found = airfoil.samples(generators(2), (8, 16, 8))
    assert all(isinstance(sample, sampling.RejectedSample) for sample in found)
    with pytest.raises(sampling.RejectedSample, match=message):
        raise found[0]


def test_a_folded_mesh_is_rejected_and_harms_no_other(monkeypatch):
    far_too_much = np.random.default_rng(0).uniform(-60, 60, 8)
    drawn = iter([far_too_much, np.zeros(8)])
    monkeypatch.setattr(airfoil_mesh, "random_displacement", lambda _: next(drawn))
    folded, sound = airfoil.samples(generators(2), (12, 32, 12))
    assert isinstance(folded, sampling.RejectedSample) and "smallest dual cell -" in str(folded)
    x, y = airfoil_mesh.c_mesh(NACA_0012, (12, 32, 12))
    solution = airfoil.solve(x, y, 12, cycles=80)
    np.testing.assert_allclose(sound["Q"][0], solution.state[0, 0], atol=1e-5)


# --- the published layout


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    root = tmp_path_factory.mktemp("generated")
    layout.write_published(root, SPEC)
    return root


@pytest.fixture
def copy(generated, tmp_path):
    """A copy of the generated files that a test may damage."""
    return shutil.copytree(generated, tmp_path / "copy")


def test_layout_and_round_trip(generated):
    X, Y, Q = (np.load(generated / FILES[name]) for name in ("X", "Y", "Q"))
    assert X.shape == Y.shape == (5, 33, 9) and Q.shape == (5, 5, 33, 9) and X.dtype == Y.dtype == Q.dtype == np.float64
    benchmark = layout.read_published(generated, SPEC)
    assert benchmark.grid == (9, 5) and benchmark.points_correspond and benchmark.num_coordinates == 2
    for samples, chosen in ((benchmark.train, slice(3)), (benchmark.test, slice(3, 5))):
        assert samples.features.dtype == samples.target.dtype == np.float32
        fields = samples.features.reshape(-1, 9, 5, 2)
        np.testing.assert_array_equal(fields[..., 0], X[chosen, ::4, ::2].astype(np.float32))
        np.testing.assert_array_equal(fields[..., 1], Y[chosen, ::4, ::2].astype(np.float32))
        np.testing.assert_array_equal(samples.target.reshape(-1, 9, 5), Q[chosen, 4, ::4, ::2].astype(np.float32))
    np.testing.assert_array_equal(benchmark.feature_norm.encode(benchmark.test.features), benchmark.test.features)
    encoded = benchmark.target_norm.encode(benchmark.train.target)
    assert abs(encoded.mean()) < 1e-6 and encoded.std(ddof=1) == pytest.approx(1, abs=1e-6)
    near = benchmark.regions()["near_field"]
    assert near.shape == (2, 45, 1) and 0 < near.mean() < 1


def test_provenance_and_card(generated):
    parameters = read_json(generated / layout.FOLDER / published.PROVENANCE)["parameters"]
    assert parameters["mach"] == 0.8 and parameters["mesh"] == [8, 16, 8] and parameters["geometry"]["growth"] == 1.02
    card = layout.read_published(generated, SPEC).card
    assert card["source"] == "generated" and card["rejected"] == 0 and card["split"] == "[:3] / [3:5]"
    assert [entry["name"] for entry in card["files"]] == [f"NACA_Cylinder_{name}.npy" for name in "XYQ"]


def test_test_samples_follow_the_training_samples(generated):
    everything = layout.read_published(generated, SPEC)
    fewer = layout.read_published(generated, SPEC | {"num_train": 1, "num_test": 2})
    np.testing.assert_array_equal(fewer.train.target, everything.train.target[:1])
    np.testing.assert_array_equal(fewer.test.target, everything.train.target[1:])


def test_published_files_have_221_by_51_points_whatever_mesh_is_configured(tmp_path):
    """Stand-ins without provenance: a uniform stream that rests at the wall."""
    x, y = airfoil_mesh.c_mesh(displacements(4), (50, 120, 50))
    speed = 0.8 * np.sqrt(1.4)
    fields = np.broadcast_to(np.array([1, speed, 0, 1, 0.8])[:, None, None], (4, 5, 221, 51)).copy()
    fields[:, [1, 4], :, 0] = 0
    (tmp_path / layout.FOLDER).mkdir(parents=True)
    for name, array in (("X", x), ("Y", y), ("Q", fields.astype(np.float32))):
        np.save(tmp_path / FILES[name], array)
    spec = SPEC | {"num_train": 2, "num_test": 1, "stride": [2, 2]}
    benchmark = layout.read_published(tmp_path, spec)
    assert benchmark.grid == (111, 26) and benchmark.card["source"] == "published"
    np.testing.assert_array_equal(benchmark.test.features[0, :, 0], x[2, ::2, ::2].astype(np.float32).ravel())
    with pytest.raises(ValueError, match="holds files without provenance.json"):
        layout.write_published(tmp_path, spec)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"mesh": [8, 20, 8]}, r"multiple of 8, got \[8, 20, 8\]"),
        ({"mesh": [4, 16, 8]}, r"at least \[8, 16, 8\] .* got \[4, 16, 8\]"),
        ({"stride": [3, 1]}, r"mesh \[8, 16, 8\]: 33 x 9 points cannot be thinned by the stride \[3, 1\]; .* 32 and 8"),
        ({"stride": [1, 0]}, r"stride \[1, 0\]"),
    ],
)
def test_a_bad_spec_fails_before_anything_is_solved(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        layout.write_published(tmp_path, SPEC | change)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name, damage, message",
    [
        ("X", lambda path: path.unlink(), "no such file"),
        ("Q", lambda path: path.write_text("<html>sign in</html>"), "expected a NumPy array.*web page"),
        ("Q", lambda path: os.truncate(path, 9000), "damaged or cut short"),
        ("X", changed(lambda X: X[:, ::2]), r"shape \(5, 17, 9\), expected \[samples, 33, 9\]"),
        ("Y", changed(lambda Y: Y.transpose(0, 2, 1)), r"shape \(5, 9, 33\), expected \[samples, 33, 9\]"),
        ("Q", changed(lambda Q: np.moveaxis(Q, 1, -1)), r"shape \(5, 33, 9, 5\), expected \[samples, 5, 33, 9\]"),
        ("Q", changed(lambda Q: Q[:, 4]), r"shape \(5, 33, 9\), expected \[samples, 5, 33, 9\]"),
        ("Q", changed(lambda Q: Q[:4]), "4 samples, but NACA_Cylinder_X.npy has 5"),
        ("Q", changed(lambda Q: Q.astype(int)), "dtype int64, expected floating"),
        ("Y", put((4, 3, 2), np.nan), "sample 4: Y has 1 values that FP32 cannot hold.* nan"),
        ("Q", put((1, 3, 3, 2), np.inf), "sample 1: pressure has 1 values that FP32 cannot hold.* inf"),
        ("Q", changed(lambda Q: Q[:, :, ::-1]), "velocity through the aerofoil is .* one of them reversed"),
        ("Y", changed(lambda Y: np.roll(Y, 2, axis=1)), "sample 0: the two copies of the cut .* expected one point"),
        ("X", changed(lambda X: 1000 * X), "sample 0: X up to 4e\\+04, expected below 100"),
        ("Y", changed(lambda Y: Y[..., ::-1]), r"sample 0: the two copies of the cut .* are 40 and -40, expected one"),
        ("X", changed(lambda X: X + 20), r"sample 0: the first line of axis 2 comes as near as 19.* the aerofoil first"),
        ("Q", put((2, 0, 5, 5), 0.0), "sample 2: density goes down to 0, expected above 0"),
        ("Q", put((3, 4, 5, 5), -0.1), r"sample 3: Mach number from -0\.1 to .*, expected 0 to 3"),
        ("Q", put((3, 4, 5, 5), 3.1), r"sample 3: Mach number from .* to 3\.1, expected 0 to 3"),
        ("Q", changed(lambda Q: Q[:, [4, 1, 2, 3, 0]]), "sample 0: the Mach number is off by .* the channels are density"),
        ("Q", changed(lambda Q: Q * [[[1]], [[1.2]], [[1.2]], [[1]], [[1.2]]]), r"sample 0: .* far boundary .* by 0\.16 in"),
        ("Q", put((1, 1, 5, 5), 0.123), "sha256 .*replaced"),
    ],
)
def test_damaged_files_are_named(copy, name, damage, message):
    damage(copy / FILES[name])
    with pytest.raises((ValueError, FileNotFoundError), match=f"(?s)NACA_Cylinder_{name}.npy: .*{message}"):
        layout.read_published(copy, SPEC)


def test_exchanged_coordinate_files_are_found(copy):
    X, Y = (np.load(copy / FILES[name]) for name in ("X", "Y"))
    np.save(copy / FILES["X"], Y)
    np.save(copy / FILES["Y"], X)
    with pytest.raises(ValueError, match="NACA_Cylinder_Y.npy: sample 0: Y up to .* on the aerofoil .* may be exchanged"):
        layout.read_published(copy, SPEC)


def test_too_few_samples(generated):
    with pytest.raises(ValueError, match="NACA_Cylinder_X.npy: 5 samples, expected at least 6"):
        layout.read_published(generated, SPEC | {"num_test": 3})
