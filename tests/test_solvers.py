"""The PDE solvers against exact solutions, conservation laws and the known statistics of the benchmarks."""

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
from scipy.interpolate import RectBivariateSpline
from skfem import Basis, ElementQuad2, ElementVector

from flarepp.solvers import darcy, elasticity, sampling

# --- sampling


def noise(generator):
    return {"value": generator.standard_normal(3)}


def noise_or_rejection(generator, threshold):
    value = generator.random()
    if value < threshold:
        raise sampling.RejectedSample(f"{value} is too small")
    return {"value": np.array(value)}


def test_a_sample_depends_on_its_index_alone():
    few, many = (sampling.draw(noise, count, bench_id=1, seed=3).arrays["value"] for count in (2, 5))
    np.testing.assert_array_equal(few, many[:2])
    np.testing.assert_array_equal(many[4], np.random.default_rng([1, 3, 4]).standard_normal(3))


def test_streams_seeds_and_benchmarks_never_meet():
    keys = [(bench, seed, stream) for bench in (1, 2) for seed in (0, 1) for stream in (0, 1)]
    drawn = [
        sampling.draw(noise, 4, bench_id=bench, seed=seed, stream=stream) for bench, seed, stream in keys
    ]
    assert len(np.unique(np.concatenate([entry.arrays["value"] for entry in drawn]))) == len(keys) * 4 * 3


def test_worker_processes_draw_the_same_bits():
    for solve in (
        partial(darcy.sample, resolution=22),
        partial(elasticity.sample, mesh=(12, 2)),
        partial(noise_or_rejection, threshold=0.2),
    ):
        alone, pooled = (
            sampling.draw(solve, 6, bench_id=1, seed=0, num_workers=workers) for workers in (1, 2)
        )
        assert alone.rejected == pooled.rejected
        for name, array in alone.arrays.items():
            np.testing.assert_array_equal(array, pooled.arrays[name])


def slow(generator):
    time.sleep(0.5)
    return noise(generator)


def test_workers_end_with_a_killed_parent(tmp_path):
    """SIGKILL of the process that draws: none of its workers stays."""
    code = (
        "import sys; sys.path[:0] = sys.argv[2:]; import test_solvers as t\n"
        "if __name__ == '__main__': t.sampling.draw(t.slow, 400, bench_id=1, seed=0, num_workers=2)"
    )
    marker = str(tmp_path / "marker")
    words = [sys.executable, "-c", code, marker, str(Path(__file__).parent), *sys.path]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    with subprocess.Popen(words, stderr=subprocess.DEVNULL, env=environment) as process:
        assert_happens(lambda: len(children(process.pid)) >= 2)
        workers = children(process.pid)
        process.kill()
    assert_happens(lambda: not any(running(worker) for worker in workers))


def children(parent: int) -> list[int]:
    return [child.pid for child in psutil.Process(parent).children()]


def running(process: int) -> bool:
    return psutil.pid_exists(process) and psutil.Process(process).status() != psutil.STATUS_ZOMBIE


def assert_happens(condition, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.1)


def test_a_rejected_sample_is_recorded_and_replaced_by_the_next():
    drawn = sampling.draw(partial(noise_or_rejection, threshold=0.2), 20, bench_id=1, seed=0)
    rejected = [entry["index"] for entry in drawn.rejected]
    assert rejected and "too small" in drawn.rejected[0]["reason"]
    assert sorted([*rejected, *drawn.indices]) == list(range(20 + len(rejected)))
    assert (np.diff(drawn.indices) > 0).all() and len(drawn.arrays["value"]) == 20


def batch_of_noise(generators, threshold, log=None):
    """A batched solver: values of the samples, and of which of them were solved together."""
    values = [generator.random() for generator in generators]
    if log is not None:
        with open(log, "a") as stream:
            stream.write(f"{len(values)}\n")
    return [
        sampling.RejectedSample(f"{value} is too small")
        if value < threshold
        else {"value": np.array(value), "together": np.array(sum(values))}
        for value in values
    ]


@pytest.mark.parametrize("workers", [1, 2])
def test_batches_are_fixed_by_index(workers):
    """Neither the number of samples nor of processes changes what a sample is solved with."""
    solve = partial(batch_of_noise, threshold=0.2)
    drawn = {
        count: sampling.draw(solve, count, bench_id=1, seed=0, batch_size=4, num_workers=workers)
        for count in (5, 20)
    }
    single = sampling.draw(partial(noise_or_rejection, threshold=0.2), 20, bench_id=1, seed=0)
    np.testing.assert_array_equal(drawn[20].arrays["value"], single.arrays["value"])
    assert drawn[20].rejected == single.rejected and (drawn[20].indices == single.indices).all()
    np.testing.assert_array_equal(drawn[5].arrays["together"], drawn[20].arrays["together"][:5])
    assert all(entry["index"] < drawn[5].indices[-1] for entry in drawn[5].rejected)
    every = [np.random.default_rng([1, 0, index]).random() for index in range(4)]
    assert drawn[5].arrays["together"][0] == sum(every)


def test_what_was_solved_is_not_solved_again(tmp_path):
    """Rejections included; another stream has files of its own."""
    log = tmp_path / "log"
    (tmp_path / "cache").mkdir()
    solve = partial(batch_of_noise, threshold=0.2, log=log)
    keys = {"bench_id": 1, "seed": 0, "batch_size": 3, "cache": tmp_path / "cache"}
    first = sampling.draw(solve, 6, **keys)
    solved = len(log.read_text().splitlines())
    again = sampling.draw(solve, 12, **keys)
    fresh = sampling.draw(partial(batch_of_noise, threshold=0.2), 12, bench_id=1, seed=0, batch_size=3)
    for name in ("value", "together"):
        np.testing.assert_array_equal(again.arrays[name], fresh.arrays[name])
        np.testing.assert_array_equal(first.arrays[name], fresh.arrays[name][:6])
    assert again.rejected == fresh.rejected != []
    total = len(log.read_text().splitlines())
    assert total == len(list((tmp_path / "cache").iterdir())) > solved
    other = sampling.draw(solve, 6, stream=1, **keys)
    assert not np.isin(other.arrays["value"], fresh.arrays["value"]).any()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"solve": partial(noise_or_rejection, threshold=0.9)}, "rejected, allowed are 8 for 20"),
        ({"solve": noise, "seed": -1}, "seed: expected"),
        ({"solve": noise, "num_workers": 0}, "at least 1"),
    ],
)
def test_sampling_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        sampling.draw(**{"count": 20, "bench_id": 1, "seed": 0} | arguments)


# --- Darcy


@pytest.fixture(scope="module")
def darcy_case():
    """(nodal coefficient, nodal solution) of one random medium at K = 85."""
    field = darcy.gaussian_field(sampling.generator(1, 0, 0).standard_normal((85, 85)))
    nodal = darcy.node_coefficient(field)
    return nodal, darcy.solve(nodal)


def test_darcy_matrix_equals_its_definition():
    """The slow twin: one row per interior node, written out face by face."""
    nodal = np.random.default_rng(0).uniform(3, 12, (6, 6))
    matrix = np.zeros((16, 16))
    for i in range(1, 5):
        for j in range(1, 5):
            row = 4 * (i - 1) + j - 1
            for k, m in ((i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)):
                face = 25 * (nodal[i, j] + nodal[k, m]) / 2
                matrix[row, row] += face
                if 1 <= k <= 4 and 1 <= m <= 4:
                    matrix[row, 4 * (k - 1) + m - 1] -= face
    np.testing.assert_allclose(darcy.assemble(nodal).toarray(), matrix, rtol=1e-13, atol=1e-13)


def test_darcy_second_order_on_a_manufactured_solution():
    """u = sin(pi x) exp(y), a = 2 + x + y^2: u does not vanish on the boundary and a is smooth."""
    sizes, errors = (22, 43, 85, 169), []
    for size in sizes:
        x, y = np.meshgrid(darcy.nodes(size), darcy.nodes(size), indexing="ij")
        exact, a = np.sin(np.pi * x) * np.exp(y), 2 + x + y**2
        forcing = -(np.pi * np.cos(np.pi * x) * np.exp(y) + 2 * y * exact + a * (1 - np.pi**2) * exact)
        errors.append(np.linalg.norm(darcy.solve(a, forcing, exact) - exact) / np.linalg.norm(exact))
    orders = np.diff(np.log(errors)) / -np.diff(np.log([size - 1 for size in sizes]))
    assert ((orders > 1.95) & (orders < 2.05)).all(), (errors, orders)


def test_darcy_conserves_residual_and_sign(darcy_case):
    nodal, solution = darcy_case
    first, second = darcy.face_coefficients(nodal)
    flux_first = first * np.diff(solution, axis=0)[:, 1:-1]
    flux_second = second * np.diff(solution, axis=1)[1:-1]
    outflow = flux_first[0].sum() - flux_first[-1].sum() + flux_second[:, 0].sum() - flux_second[:, -1].sum()
    source = (83 / 84) ** 2  # the unit source over the cells of the interior nodes
    assert abs(outflow / source - 1) < 1e-10
    assert darcy.relative_residual(nodal, solution) < 1e-9
    assert solution.min() >= -1e-12 and set(np.unique(nodal)) == {3.0, 12.0}


def test_darcy_constant_coefficient_is_the_torsion_problem():
    assert darcy.solve(np.full((85, 85), 12.0)).max() == pytest.approx(0.0736713533 / 12, rel=2e-4)


def test_darcy_random_field_statistics():
    drawn = sampling.draw(random_field, 200, bench_id=1, seed=0).arrays["field"]
    assert drawn.std() == pytest.approx(0.27, abs=0.02)
    assert (drawn >= 0).mean() == pytest.approx(0.50, abs=0.03)
    assert abs(drawn.mean(axis=(1, 2))).max() < 1e-14  # the constant mode is left out


def random_field(generator):
    return {"field": darcy.gaussian_field(generator.standard_normal((85, 85)))}


def test_darcy_spline_equals_the_bivariate_one(monkeypatch):
    monkeypatch.setitem(darcy.SETTINGS, "threshold_at_nodes_below", 0)
    field = random_field(sampling.generator(1, 0, 1))["field"]
    centres, nodes = darcy.cell_centres(85), darcy.nodes(85)
    spline = RectBivariateSpline(centres, centres, darcy.two_phase(field), bbox=[0, 1, 0, 1], kx=3, ky=3)
    np.testing.assert_allclose(darcy.node_coefficient(field), spline(nodes, nodes), atol=1e-10)


def test_darcy_both_node_coefficients_nearly_agree(monkeypatch):
    """The recipe of coarse grids against the original one: 0.5 % apart on average at K = 85."""
    cut = sampling.draw(partial(darcy.sample, resolution=85), 10, bench_id=1, seed=0).arrays["sol"]
    monkeypatch.setitem(darcy.SETTINGS, "threshold_at_nodes_below", 0)
    original = sampling.draw(partial(darcy.sample, resolution=85), 10, bench_id=1, seed=0).arrays["sol"]
    distance = np.linalg.norm(cut - original, axis=(1, 2)) / np.linalg.norm(original, axis=(1, 2))
    assert 0 < distance.mean() < 0.01


def test_darcy_fine_grid_follows_the_original_recipe():
    arrays = darcy.sample(sampling.generator(1, 0, 0), 241)
    assert arrays["coeff"].shape == arrays["sol"].shape == (241, 241) and arrays["coeff"].dtype == np.float64
    assert set(np.unique(arrays["coeff"])) == {3.0, 12.0}
    # Between the maxima for a = 12 and for a = 3 everywhere.
    assert arrays["sol"].min() > 0 and 0.0737 / 12 < arrays["sol"].max() < 0.0737 / 3


# --- elasticity


def quadratic_basis(grid):
    return Basis(grid, ElementVector(ElementQuad2()), intorder=elasticity.QUADRATURE_ORDER)


def circle(radius):
    return lambda angle: np.full_like(angle, radius)


@pytest.fixture(scope="module")
def deformations():
    """Deformation gradients [2, 2, 5, 4] of some ten per cent of strain."""
    return elasticity.IDENTITY + 0.1 * np.random.default_rng(0).standard_normal((2, 2, 5, 4))


def differences(function, F, step=1e-5):
    """Central differences of `function` by F [2, 2, E, Q]; F's two indices come before E and Q."""
    columns = []
    for row, column in np.ndindex(2, 2):
        change = np.zeros_like(F)
        change[row, column] = step
        columns.append((function(F + change) - function(F - change)) / (2 * step))
    return np.moveaxis(np.reshape(columns, (2, 2, *np.shape(columns)[1:])), (0, 1), (-4, -3))


def test_elasticity_stress_is_the_derivative_of_the_energy(deformations):
    stress = elasticity.first_piola(deformations)
    assert np.abs(differences(elasticity.energy, deformations) - stress).max() < 1e-8 * np.abs(stress).max()


def test_elasticity_tangent_is_the_derivative_of_the_stress(deformations):
    tangent = elasticity.tangent(deformations)
    error, scale = differences(elasticity.first_piola, deformations) - tangent, np.abs(tangent).max()
    assert np.abs(error).max() < 1e-8 * scale
    np.testing.assert_allclose(tangent, tangent.transpose(2, 3, 0, 1, 4, 5), atol=1e-9 * scale)


def test_elasticity_undeformed_is_free_of_stress():
    assert np.abs(elasticity.first_piola(elasticity.IDENTITY)).max() < 1e-9


def test_elasticity_converges_and_carries_the_load():
    coefficients = np.random.default_rng(1).standard_normal(10)
    grid = elasticity.build_mesh(partial(elasticity.void_radius, coefficients), (36, 3))
    basis = quadratic_basis(grid)
    state = elasticity.stretch(basis)
    assert state.residual < 1e-9 and state.steps <= 5
    bottom = basis.get_dofs(grid.facets_satisfying(lambda x: x[1] < 1e-9))
    sideways, upward = (state.force[bottom.all([component])].sum() for component in ("u^1", "u^2"))
    assert abs(sideways) < 1e-4 and upward == pytest.approx(-100, rel=1e-6)
    F = elasticity.deformation(basis, state.displacement)
    assert basis.mapping.detDF(basis.X).min() > 0
    assert np.linalg.det(np.moveaxis(F, (0, 1), (-2, -1))).min() > 0
    assert np.abs(F - elasticity.IDENTITY).max() < 5e-3  # the load is small: this task is nearly linear


def test_elasticity_patch():
    """An affine displacement of the whole boundary is taken on exactly inside, on curved elements too."""
    grid = elasticity.build_mesh(
        partial(elasticity.void_radius, np.random.default_rng(2).standard_normal(10)), (12, 2)
    )
    basis = quadratic_basis(grid)
    gradient = np.array([[0.10, 0.05], [-0.03, 0.08]])
    exact = np.empty(basis.N)
    for row, component in zip(gradient, ("u^1", "u^2"), strict=True):
        dofs = basis.get_dofs(elements=True).all([component])
        exact[dofs] = row @ basis.doflocs[:, dofs]
    boundary = basis.get_dofs().all()
    start = exact + 1e-3 * np.random.default_rng(3).standard_normal(basis.N)
    start[boundary] = exact[boundary]
    state = elasticity.equilibrium(basis, np.zeros(basis.N), boundary, start)
    assert np.abs(state.displacement - exact).max() < 1e-10


def test_elasticity_compliance_converges():
    coefficients = 0.5 * np.random.default_rng(4).standard_normal(10)
    works = []
    for mesh in ((12, 1), (24, 2), (48, 4)):
        basis = quadratic_basis(elasticity.build_mesh(partial(elasticity.void_radius, coefficients), mesh))
        state = elasticity.stretch(basis)
        works.append(state.force @ state.displacement)
    first, second = np.diff(works)
    assert first > 0 and second > 0 and np.log2(first / second) >= 2, works  # finer is softer, and converges


def test_elasticity_small_hole_concentrates_the_stress_threefold():
    """Kirsch's plate: von Mises stress around a hole of radius a in a wide plate under tension along y."""
    radius, layers = 0.02, 24
    # Elements grow with the distance from the hole.
    fractions = (25 ** np.linspace(0, 1, 2 * layers + 1) - 1) / 24
    basis = quadratic_basis(elasticity.build_mesh(circle(radius), (36, layers), fractions))
    stress = elasticity.von_mises(basis, elasticity.stretch(basis).displacement) / 100
    x, y = np.asarray(basis.global_coordinates()) - 0.5
    distance, angle = np.hypot(x, y) / radius, np.arctan2(y, x)
    inverse, cosine, sine = distance**-2, np.cos(2 * angle), np.sin(2 * angle)
    radial = (1 - inverse) / 2 - (1 - 4 * inverse + 3 * inverse**2) / 2 * cosine
    hoop = (1 + inverse) / 2 + (1 + 3 * inverse**2) / 2 * cosine
    shear = (1 + 2 * inverse - 3 * inverse**2) / 2 * sine
    exact = np.sqrt(radial**2 - radial * hoop + hoop**2 + 3 * shear**2)
    near = (distance < 2) & (np.abs(angle) < 0.06)
    assert near.sum() >= 6 and np.abs(stress / exact - 1)[near].max() < 0.06
    wall = near & (distance < 1.03)
    assert exact[wall].max() > 2.8 and np.abs(stress / exact - 1)[wall].max() < 0.05  # 3.0 on the wall itself


def test_elasticity_statistics_and_layout():
    drawn = sampling.draw(partial(elasticity.sample, mesh=(36, 3)), 200, bench_id=2, seed=0)
    positions, stress = drawn.arrays["XY"], drawn.arrays["sigma"]
    assert not drawn.rejected and positions.shape == (200, 972, 2) and stress.shape == (200, 972)
    assert 180 < stress.mean() < 198 and 120 < stress.std() < 140 and stress.min() > 0
    assert 0 < positions.min() < 0.01 and 0.99 < positions.max() < 1
    assert drawn.arrays["theta"].shape == (200, 10) and drawn.arrays["rr"].shape == (200, 42)
    rr = drawn.arrays["rr"]
    np.testing.assert_allclose(rr[:, 0], rr[:, -1], rtol=1e-12)
    assert 0.2 < rr.min() and rr.max() < 0.4


def test_elasticity_refuses_what_it_cannot_solve():
    with pytest.raises(ValueError, match="multiple of 4"):
        elasticity.topology((10, 2))
    inside_out = quadratic_basis(elasticity.build_mesh(circle(0.6), (12, 1)))
    with pytest.raises(sampling.RejectedSample, match="inverted element"):
        elasticity.require_positive(inside_out.mapping.detDF(inside_out.X), "undeformed")
