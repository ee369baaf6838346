"""Pipe: the flow solver against exact solutions, another assembly and conservation; the published layout and its damage."""

import itertools
import os
import shutil
from functools import partial

import numpy as np
import pytest
from skfem import Basis, ElementQuad1, ElementQuad2, ElementVector, LinearForm, MeshQuad, MeshQuad2

from conftest import changed, put
from flarepp.data import pipe as layout
from flarepp.data import published
from flarepp.record import read_json
from flarepp.solvers import pipe, sampling

SPEC = {"name": "pipe", "num_train": 3, "num_test": 2, "mesh": [8, 4], "stride": [2, 1], "seed": 0}
FILES = {name: layout.FOLDER / file for name, file in layout.FILES.items()}


# --- flows that are known exactly


def enclosed(mesh, length):
    """A space with the velocity given on the whole boundary, and the pressure at one corner."""
    given = np.zeros((2 * mesh[0] + 1, 2 * mesh[1] + 1, 3), bool)
    given[[0, -1], :, :2] = given[:, [0, -1], :2] = given[0, 0, 2] = True
    return pipe.build_space(mesh, length, given)


def perturbed(space, exact, scale=0.05):
    """The exact fields where they are given, and somewhat wrong ones elsewhere."""
    start = exact.copy()
    start[space.present] += scale * space.free * np.random.default_rng(0).standard_normal(len(space.free))
    return start


def test_straight_pipe_has_poiseuilles_flow(monkeypatch):
    monkeypatch.setitem(pipe.SETTINGS, "tolerance", 1e-13)
    space = pipe.pipe_space((16, 4))
    exact = pipe.straight_flow(space, np.zeros_like)
    exact[..., 2] = 2 * 0.005 * (10 - space.nodes[0])[:, None]
    flow = pipe.solve(space, np.zeros_like, perturbed(space, exact), viscosity=0.005)
    assert np.abs(flow.fields - exact)[space.present].max() < 1e-12


def test_oblique_pipe_has_an_exact_flow_too(monkeypatch):
    """u = t (1 - t) (1, s) between parallel walls of slope s; its pressure is linear in x and y."""
    monkeypatch.setitem(pipe.SETTINGS, "tolerance", 1e-13)
    slope, space = 0.7, enclosed((8, 4), 2.0)
    X, t = np.meshgrid(*space.nodes, indexing="ij")
    speed = t * (1 - t)
    exact = np.stack([speed, slope * speed, -2 * 0.05 * (1 + slope**2) * (X + slope * (slope * X + t))], axis=-1)
    flow = pipe.solve(space, lambda X: np.full_like(X, slope), perturbed(space, exact), viscosity=0.05)
    assert np.abs(flow.fields - exact)[space.present].max() < 1e-12


def kovasznay_errors(mesh):
    """Largest nodal errors of velocity and of pressure on a sheared domain, Reynolds number 40."""
    space, rate = enclosed(mesh, 1.5), 20 - np.sqrt(400 + 4 * np.pi**2)
    X, t = np.meshgrid(*space.nodes, indexing="ij")
    x, y = X - 0.5, 0.2 * np.sin(2 * X) - 0.5 + t
    decay = np.exp(rate * x)
    exact = np.stack(
        [
            1 - decay * np.cos(2 * np.pi * y),
            rate / (2 * np.pi) * decay * np.sin(2 * np.pi * y),
            (1 - decay**2) / 2,
        ],
        axis=-1,
    )
    start = exact * ~space.present  # zero, but for the given values
    start[space.present] = exact[space.present] * ~space.free
    flow = pipe.solve(space, lambda X: 0.4 * np.cos(2 * X), start, viscosity=1 / 40)
    assert flow.residual < 1e-8 and flow.steps <= 8
    error = np.abs(flow.fields - exact)
    return error[..., :2].max(), error[::2, ::2, 2].max()


def test_kovasznay_flow_on_a_sheared_mesh_converges():
    errors = np.array([kovasznay_errors((size, size)) for size in (8, 16, 32)])
    orders = np.log2(errors[:-1] / errors[1:])
    assert (orders[:, 0] >= 2.8).all() and (orders[:, 1] >= 1.8).all(), (errors, orders)


# --- the equations themselves


@pytest.fixture(scope="module")
def random_state():
    """(space of 4 x 3 elements, forms with a quadratic centre line, random unknowns)."""
    space = enclosed((4, 3), 2.0)
    forms = pipe.Forms(space, lambda X: 0.6 - 0.4 * X, viscosity=0.3)
    return space, forms, np.random.default_rng(1).standard_normal(len(space.free))


@LinearForm
def momentum(test, data):
    gradient = data["velocity"].grad
    convection = np.einsum("ij...,j...->i...", gradient, data["velocity"])
    return (
        np.einsum("i...,i...->...", convection, test)
        + 0.3 * np.einsum("ij...,ij...->...", gradient, test.grad)
        - data["pressure"] * (test.grad[0, 0] + test.grad[1, 1])
    )


@LinearForm
def mass(test, data):
    return -test * (data["velocity"].grad[0, 0] + data["velocity"].grad[1, 1])


def test_residual_equals_that_of_isoparametric_elements(random_state):
    """The slow twin: scikit-fem on a mesh with curved elements, which hold a quadratic centre line exactly."""
    space, forms, state = random_state
    straight = MeshQuad.init_tensor(np.linspace(0, 2, 5), np.linspace(0, 1, 4))
    mesh = MeshQuad2.from_mesh(straight)
    X, t = mesh.p
    mesh = MeshQuad2(np.stack([X, 0.6 * X - 0.2 * X**2 + t]), mesh.t)
    flow, head = (Basis(mesh, element, intorder=5) for element in (ElementVector(ElementQuad2()), ElementQuad1()))
    fields = np.zeros(space.present.shape)
    fields[space.present] = state

    def places(locations):
        X, y = locations
        return np.rint(4 * X).astype(int), np.rint(6 * (y - 0.6 * X + 0.2 * X**2)).astype(int)

    velocity, pressure = np.zeros(flow.N), fields[(*places(head.doflocs), 2)]
    dofs = [flow.get_dofs(elements=True).all([name]) for name in ("u^1", "u^2")]
    for component, numbers in enumerate(dofs):
        velocity[numbers] = fields[(*places(flow.doflocs[:, numbers]), component)]
    data = {"velocity": flow.interpolate(velocity), "pressure": head.interpolate(pressure)}
    found = np.zeros(space.present.shape)
    assembled = momentum.assemble(flow, **data)
    for component, numbers in enumerate(dofs):
        found[(*places(flow.doflocs[:, numbers]), component)] = assembled[numbers]
    found[(*places(head.doflocs), 2)] = mass.assemble(head, velocity=data["velocity"])
    np.testing.assert_allclose(forms.residual(state), found[space.present], atol=1e-12)


def test_derivative_is_that_of_the_residual(random_state):
    space, forms, state = random_state
    matrix = forms.derivative(state).toarray()
    assert matrix.shape == (space.free.sum(),) * 2
    for column, number in enumerate(np.flatnonzero(space.free)):
        change = np.zeros_like(state)
        change[number] = 1e-3  # the residual is quadratic: central differences are exact
        difference = (forms.residual(state + change) - forms.residual(state - change)) / 2e-3
        np.testing.assert_allclose(matrix[:, column], difference[space.free], atol=1e-11)


def test_newton_converges_quadratically(monkeypatch):
    monkeypatch.setitem(pipe.SETTINGS, "tolerance", 0.0)
    space, slope = pipe.pipe_space((16, 4)), pipe.centre_line(sampling.generator(3, 0, 4)).derivative()
    residuals = []
    for steps in range(4):
        monkeypatch.setitem(pipe.SETTINGS, "max_steps", steps)
        residuals.append(pipe.solve(space, slope, pipe.straight_flow(space, slope), viscosity=0.005).residual)
    assert residuals[1] < 0.1 and all(after < before**1.7 for before, after in itertools.pairwise(residuals[1:])), residuals


# --- samples


@pytest.fixture(scope="module")
def samples():
    return sampling.draw(partial(pipe.sample, mesh=(64, 16)), 8, bench_id=pipe.BENCH_ID, seed=0).arrays


def test_sample_layout(samples):
    X, Y, Q = samples["X"], samples["Y"], samples["Q"]
    assert X.shape == Y.shape == (8, 129, 33) and Q.shape == (8, 3, 129, 33) and Q.dtype == np.float64
    np.testing.assert_array_equal(X, np.broadcast_to(np.linspace(0, 10, 129)[:, None], X.shape))
    np.testing.assert_allclose(Y - Y[..., :1], np.broadcast_to(np.linspace(0, 1, 33), Y.shape), atol=1e-14)
    np.testing.assert_allclose(Y[:, 0, 16], 0, atol=1e-15)
    pressure = Q[:, 2]
    assert (pressure[:, 1::2] == 0).all() and (pressure[:, :, 1::2] == 0).all()
    assert (pressure[:, :-2:2, ::2] != 0).all() and (pressure[:, 0, ::2].mean(axis=1) > 0.09).all()  # straight: 0.1


def test_walls_inlet_and_outlet(samples):
    velocity, t = samples["Q"][:, :2], np.linspace(0, 1, 33)
    assert (velocity[..., [0, -1]] == 0).all()
    np.testing.assert_array_equal(velocity[:, 0, 0], np.broadcast_to(t * (1 - t), (8, 33)))
    assert (velocity[:, 1, 0] == 0).all()
    assert np.abs(samples["Q"][:, 2, -1]).max() < 0.02


def test_every_section_carries_the_same_flux(samples):
    simpson = np.ones(33)
    simpson[1:-1:2], simpson[2:-1:2] = 4, 2
    flux = samples["Q"][:, 0] @ simpson / simpson.sum()
    assert np.abs(6 * flux - 1).max() < 0.015


def test_newton_needs_few_steps():
    space = pipe.pipe_space((64, 8))
    for index in range(5):
        slope = pipe.centre_line(sampling.generator(3, 1, index)).derivative()
        flow = pipe.solve(space, slope, pipe.straight_flow(space, slope), viscosity=0.005)
        assert flow.residual < 1e-8 and flow.steps <= 5


def test_64_elements_along_the_pipe_are_enough(samples):
    """64 x 16 elements against twice as many along the pipe."""
    for index in range(2):
        fine = pipe.sample(sampling.generator(3, 0, index), (128, 16))["Q"][0, ::2]
        assert np.linalg.norm(samples["Q"][index, 0] - fine) < 0.004 * np.linalg.norm(fine)


def test_centre_lines():
    lines = [pipe.centre_line(sampling.generator(3, 0, index)) for index in range(1000)]
    height = np.array([line(np.linspace(0, 10, 101)) for line in lines])
    assert (height[:, 0] == 0).all() and np.abs(height[:, 25::25]).max() <= 1
    assert 0.985 < np.mean(np.ptp(height, axis=1) < 2.31) <= 1  # as in pictures of the published pipes
    slopes = np.array([line.derivative()(np.linspace(0, 10, 5)) for line in lines])
    assert 0.99 < np.abs(slopes).max() <= 1 and abs(slopes.mean()) < 0.05


def test_statistics_of_many_pipes():
    """How far from their mean they are tells that neither geometry nor flow is trivial."""
    velocity = sampling.draw(partial(pipe.sample, mesh=(32, 4)), 60, bench_id=pipe.BENCH_ID, seed=0).arrays["Q"][:, 0]
    distance = np.linalg.norm(velocity - velocity.mean(axis=0), axis=(1, 2)) / np.linalg.norm(velocity, axis=(1, 2))
    assert distance.mean() == pytest.approx(0.17, abs=0.03)
    assert 0.29 < velocity.max() < 0.4 and -0.03 < velocity.min() <= 0


def test_a_sample_depends_neither_on_the_count_nor_on_processes():
    draw = partial(sampling.draw, partial(pipe.sample, mesh=(8, 4)), bench_id=pipe.BENCH_ID, seed=0)
    many, few, pooled = draw(4), draw(2), draw(4, num_workers=2)
    for name, array in many.arrays.items():
        np.testing.assert_array_equal(array[:2], few.arrays[name])
        np.testing.assert_array_equal(array, pooled.arrays[name])


def test_a_flow_that_does_not_converge_is_rejected(monkeypatch):
    monkeypatch.setitem(pipe.SETTINGS, "max_steps", 1)
    with pytest.raises(sampling.RejectedSample, match="relative residual .* after 1 Newton steps, expected below 1e-08"):
        pipe.sample(sampling.generator(3, 0, 0), (8, 4))


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
    assert X.shape == Y.shape == (5, 17, 9) and Q.shape == (5, 3, 17, 9) and X.dtype == Y.dtype == Q.dtype == np.float64
    benchmark = layout.read_published(generated, SPEC)
    assert benchmark.grid == (9, 9) and benchmark.points_correspond and benchmark.num_coordinates == 2
    for samples, chosen in ((benchmark.train, slice(3)), (benchmark.test, slice(3, 5))):
        assert samples.features.dtype == samples.target.dtype == np.float32
        fields = samples.features.reshape(-1, 9, 9, 2)
        np.testing.assert_array_equal(fields[..., 0], X[chosen, ::2].astype(np.float32))
        np.testing.assert_array_equal(fields[..., 1], Y[chosen, ::2].astype(np.float32))
        np.testing.assert_array_equal(samples.target.reshape(-1, 9, 9), Q[chosen, 0, ::2].astype(np.float32))
    for norm, values in (
        (benchmark.feature_norm, benchmark.train.features),
        (benchmark.target_norm, benchmark.train.target),
    ):
        encoded = norm.encode(values).reshape(-1, values.shape[-1])
        np.testing.assert_allclose(encoded.mean(axis=0), 0, atol=1e-6)
        np.testing.assert_allclose(encoded.std(axis=0, ddof=1), 1, atol=1e-6)


def test_provenance_and_card(generated):
    provenance = read_json(generated / layout.FOLDER / published.PROVENANCE)
    assert provenance["parameters"]["viscosity"] == 0.005 and provenance["parameters"]["mesh"] == [8, 4]
    card = layout.read_published(generated, SPEC).card
    assert card["source"] == "generated" and card["rejected"] == 0 and card["split"] == "[:3] / [3:5]"
    assert [entry["name"] for entry in card["files"]] == ["Pipe_X.npy", "Pipe_Y.npy", "Pipe_Q.npy"]


def test_test_samples_follow_the_training_samples(generated):
    everything = layout.read_published(generated, SPEC)
    fewer = layout.read_published(generated, SPEC | {"num_train": 1, "num_test": 2})
    np.testing.assert_array_equal(fewer.train.target, everything.train.target[:1])
    np.testing.assert_array_equal(fewer.test.target, everything.train.target[1:])


def published_files(root, count=4):
    """Stand-ins for the published files, which have no provenance: straight pipes on 129 x 129 points."""
    t = np.linspace(0, 1, 129)
    X, Y = np.meshgrid(np.linspace(0, 10, 129), t - 0.5, indexing="ij")
    speed = (1 + 0.1 * np.arange(count))[:, None, None] * (t * (1 - t))
    Q = np.zeros((count, 3, 129, 129))
    Q[:, 0] = speed
    (root / layout.FOLDER).mkdir(parents=True)
    for name, array in (("X", X), ("Y", Y)):
        np.save(root / FILES[name], np.broadcast_to(array, (count, 129, 129)))
    np.save(root / FILES["Q"], Q)


def test_published_files_have_129_points_an_axis_whatever_mesh_is_configured(tmp_path):
    published_files(tmp_path)
    spec = SPEC | {"num_train": 2, "num_test": 1, "stride": [4, 8]}
    benchmark = layout.read_published(tmp_path, spec)
    assert benchmark.grid == (33, 17) and benchmark.card["source"] == "published"
    np.testing.assert_allclose(benchmark.test.target.max(), 0.25 * 1.2, rtol=1e-6)
    with pytest.raises(ValueError, match="holds files without provenance.json"):
        layout.write_published(tmp_path, spec)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"mesh": [10, 4]}, r"multiple of 4 .* got \[10, 4\]"),
        ({"mesh": [0, 4]}, r"multiple of 4 .* got \[0, 4\]"),
        ({"mesh": [8, 0]}, r"got \[8, 0\]"),
        ({"stride": [3, 1]}, r"mesh \[8, 4\]: 17 x 9 points cannot be thinned by the stride \[3, 1\]; .* 16 and 8"),
        ({"stride": [1, 16]}, r"stride \[1, 16\]"),
        ({"stride": [0, 1]}, r"stride \[0, 1\]"),
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
        ("X", changed(lambda X: X[:, ::2]), r"shape \(5, 9, 9\), expected \[samples, 17, 9\]"),
        ("Y", changed(lambda Y: Y.transpose(0, 2, 1)), r"shape \(5, 9, 17\), expected \[samples, 17, 9\]"),
        ("Q", changed(lambda Q: np.moveaxis(Q, 1, -1)), r"shape \(5, 17, 9, 3\), expected \[samples, 3, 17, 9\]"),
        ("Q", changed(lambda Q: Q[:4]), "4 samples, but Pipe_X.npy has 5"),
        ("Q", changed(lambda Q: Q.astype(int)), "dtype int64, expected floating"),
        ("Y", put((4, 3, 2), np.nan), "sample 4: Y has 1 values that FP32 cannot hold.* nan"),
        ("Q", put((0, 0, 3, 2), np.inf), "sample 0: velocity along x has 1 values that FP32 cannot hold.* inf"),
        ("X", changed(lambda X: X[:, ::-1]), "sample 0: X changes by -.* along axis 1, expected to grow downstream"),
        ("Y", changed(lambda Y: Y[..., ::-1]), "sample 0: Y changes by -.* along axis 2, .*lower wall"),
        ("Q", put((3, 0, 5, -1), 0.1), r"sample 3: velocity 0\.1 at the walls .* expected 0"),
        ("Q", put((2, 0, 0), 0.0), "sample 2: velocity at the inlet .* peak 0; expected a parabola"),
        ("Q", changed(lambda Q: -Q), "sample 0: velocity at the inlet .* peak -0.25"),
        ("Q", changed(lambda Q: Q[:, [1, 0, 2]]), "sample 0: velocity at the inlet"),
        ("Q", put((1, 1, 5, 5), 0.123), "sha256 .*replaced"),
    ],
)
def test_damaged_files_are_named(copy, name, damage, message):
    damage(copy / FILES[name])
    with pytest.raises((ValueError, FileNotFoundError), match=f"(?s)Pipe_{name}.npy: .*{message}"):
        layout.read_published(copy, SPEC)


def test_too_few_samples(generated):
    with pytest.raises(ValueError, match="Pipe_X.npy: 5 samples, expected at least 6"):
        layout.read_published(generated, SPEC | {"num_test": 3})


def test_square_arrays_with_exchanged_axes_are_found(tmp_path):
    """On 129 x 129 points a shape does not tell."""
    published_files(tmp_path)
    spec = SPEC | {"num_train": 2, "num_test": 1, "stride": [4, 4]}
    for name, message in (("X", "X changes by 0 "), ("Y", "Y changes by 0 "), ("Q", "at the walls")):
        path = tmp_path / FILES[name]
        array = np.load(path)
        np.save(path, np.swapaxes(array, -1, -2))
        with pytest.raises(ValueError, match=f"Pipe_{name}.npy: sample 0: .*{message}"):
            layout.read_published(tmp_path, spec)
        np.save(path, array)
