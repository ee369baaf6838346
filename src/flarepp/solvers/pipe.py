"""Steady laminar flow through a curved pipe: generator of the Geo-FNO benchmark (arXiv 2207.05209).

Incompressible Navier-Stokes equations with viscosity nu = 0.005 in a channel of length 10 and vertical width 1,

    (u . grad) u - nu laplace(u) + grad p = 0,   div u = 0,

with the parabola u = (t (1 - t), 0) at the inlet, no slip at the walls, and the do-nothing outlet
nu du/dn - p n = 0. The pipe is a straight one that is sheared vertically: it holds the points
(X, c(X) - 1/2 + t), 0 <= X <= 10, 0 <= t <= 1, around a random centre line c. In these coordinates, with s = c'(X),

    d/dx = d/dX - s d/dt,   d/dy = d/dt,   dx dy = dX dt,

so every element is a rectangle and the geometry enters through the slope s alone, without approximation.
Taylor-Hood elements (velocity biquadratic, pressure bilinear) with 3 x 3 Gauss points, Newton's method with
the full derivative, SuperLU. Lengths and velocities have no unit.

The law of the centre line is inferred from pictures of the published data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.interpolate import CubicHermiteSpline
from scipy.sparse import csc_array
from scipy.sparse.linalg import splu

from flarepp.solvers.sampling import RejectedSample

BENCH_ID = 3
SETTINGS: dict[str, Any] = {
    "viscosity": 0.005,
    "length": 10.0,
    "num_segments": 4,  # of the centre line, a cubic each
    "position_max": 1.0,  # the centre line's position at the ends of segments is uniform on [-1, 1], 0 at the inlet
    "slope_max": 1.0,  # and its slope there likewise
    "tolerance": 1e-8,
    "max_steps": 8,
}


def sample(generator: np.random.Generator, mesh: tuple[int, int]) -> dict[str, np.ndarray]:
    """One sample on `mesh` = (streamwise, transverse) elements, float64, n = 2 * elements + 1 nodes along each axis.

    Returns {"X": [n1, n2], "Y": [n1, n2] positions, axis 0 streamwise, axis 1 from the lower wall to the upper one,
    "Q": [3, n1, n2] velocity along x, along y, and pressure, which has a value at every second node of every second
    column and 0 elsewhere}. RejectedSample when Newton's method does not converge.
    """
    space = pipe_space(mesh)
    line = centre_line(generator)
    slope = line.derivative()
    flow = solve(space, slope, start=straight_flow(space, slope), viscosity=SETTINGS["viscosity"])
    if not flow.residual < SETTINGS["tolerance"]:  # written so that NaN is rejected too
        raise RejectedSample(
            f"relative residual {flow.residual:.1e} after {flow.steps} Newton steps, "
            f"expected below {SETTINGS['tolerance']:.0e}"
        )
    along, across = space.nodes
    X, t = np.meshgrid(along, across, indexing="ij")
    return {"X": X, "Y": line(along)[:, None] - 0.5 + t, "Q": np.moveaxis(flow.fields, -1, 0)}


# --- geometry


def centre_line(generator: np.random.Generator) -> CubicHermiteSpline:
    """A random centre line c(X), zero at the inlet."""
    num_ends = SETTINGS["num_segments"] + 1
    position = SETTINGS["position_max"] * generator.uniform(-1, 1, num_ends)
    slope = SETTINGS["slope_max"] * generator.uniform(-1, 1, num_ends)
    position[0] = 0
    return CubicHermiteSpline(np.linspace(0, SETTINGS["length"], num_ends), position, slope)


@lru_cache(maxsize=4)
def pipe_space(mesh: tuple[int, int]) -> Space:
    """The unknowns of a pipe with its velocity given at the walls and at the inlet.

    ValueError unless `mesh` = (streamwise, transverse) has whole elements in each segment of the centre line.
    """
    streamwise, transverse = mesh
    segments = SETTINGS["num_segments"]
    if streamwise < segments or streamwise % segments or transverse < 1:
        raise ValueError(
            f"mesh: expected [streamwise, transverse] elements, streamwise a multiple of {segments} so that the "
            f"centre line is smooth inside each element, got {list(mesh)}"
        )
    given = np.zeros((2 * streamwise + 1, 2 * transverse + 1, 3), bool)
    given[0, :, :2] = given[:, [0, -1], :2] = True
    return build_space(mesh, SETTINGS["length"], given)


def straight_flow(space: Space, slope: Callable) -> np.ndarray:
    """Fields [n1, n2, 3] of the flow of a straight pipe, sheared with the pipe and so still free of divergence.

    At walls and inlet these are the boundary values.
    """
    along, across = space.nodes
    fields = np.zeros((len(along), len(across), 3))
    fields[..., 0] = across * (1 - across)
    fields[1:, :, 1] = slope(along[1:])[:, None] * fields[1:, :, 0]
    return fields


# --- Taylor-Hood elements on the rectangle of (X, t)


def _element() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Shape functions of the unit square at its 3 x 3 Gauss points.

    Velocity [9, Q], its derivatives along both axes [2, 9, Q], pressure [4, Q], the Gauss points of one axis
    [3], the weights [Q]. The second axis varies fastest.
    """
    point, weight = np.polynomial.legendre.leggauss(3)
    point, weight = (1 + point) / 2, weight / 2
    quadratic = np.stack([(1 - point) * (1 - 2 * point), 4 * point * (1 - point), point * (2 * point - 1)])
    derivative = np.stack([4 * point - 3, 4 - 8 * point, 4 * point - 1])
    linear = np.stack([1 - point, point])
    gradient = np.stack([np.kron(derivative, quadratic), np.kron(quadratic, derivative)])
    return np.kron(quadratic, quadratic), gradient, np.kron(linear, linear), point, np.kron(weight, weight)


@dataclass(frozen=True)
class Space:
    """What flows on one mesh with the same kinds of boundaries share.

    E elements, Q = 9 Gauss points each; of the D unknowns an element holds 22: 9 velocities along x, 9 along y and
    4 pressures. Unknowns are numbered column by column of nodes. F of them are free, the others are given.
    """

    mesh: tuple[int, int]
    length: float
    present: np.ndarray  # [n1, n2, 3] where there is an unknown: pressure has every second node only
    free: np.ndarray  # [D] bool
    unknowns: np.ndarray  # [E, 22] numbers of each element's unknowns
    slot: np.ndarray  # [E * 22 * 22] where an entry of an element's matrix is in the sparse one; past its end if not free
    indices: np.ndarray  # [entries] row of each entry of the sparse matrix over the free unknowns
    indptr: np.ndarray  # [F + 1] where its columns begin

    @property
    def nodes(self) -> tuple[np.ndarray, np.ndarray]:
        """X [n1] and t [n2] of the nodes."""
        streamwise, transverse = self.mesh
        return np.linspace(0, self.length, 2 * streamwise + 1), np.linspace(0, 1, 2 * transverse + 1)


def build_space(mesh: tuple[int, int], length: float, given: np.ndarray) -> Space:
    """given [n1, n2, 3] bool: where velocities and pressure are not free but keep their start value."""
    present = np.ones(given.shape, bool)
    present[1::2, :, 2] = present[:, 1::2, 2] = False
    number = np.cumsum(present).reshape(present.shape) - 1  # [n1, n2, 3]
    first, second = np.meshgrid(*(2 * np.arange(count) for count in mesh), indexing="ij")  # corners of elements
    node = np.arange(3)
    rows, columns = np.repeat(node, 3), np.tile(node, 3)
    velocity = number[first.ravel()[:, None] + rows, second.ravel()[:, None] + columns]  # [E, 9, 3]
    corner = (rows != 1) & (columns != 1)
    unknowns = np.concatenate([velocity[..., 0], velocity[..., 1], velocity[:, corner, 2]], axis=1)  # [E, 22]
    free = ~given[present]
    num_free = np.count_nonzero(free)
    reduced = np.where(free, np.cumsum(free) - 1, -1)[unknowns]  # [E, 22]
    row, column = np.broadcast_arrays(reduced[:, :, None], reduced[:, None, :])  # [E, 22, 22]
    key = np.where((row < 0) | (column < 0), num_free**2, column * num_free + row).ravel()
    entries, slot = np.unique(key, return_inverse=True)
    entries = entries[entries < num_free**2]
    indptr = np.searchsorted(entries, num_free * np.arange(num_free + 1))
    return Space(mesh, length, present, free, unknowns, slot, entries % num_free, indptr)


@dataclass(frozen=True)
class Flow:
    """fields [n1, n2, 3] velocity along x, along y, pressure; relative residual; number of Newton steps."""

    fields: np.ndarray
    residual: float
    steps: int


def solve(space: Space, slope: Callable, start: np.ndarray, viscosity: float) -> Flow:
    """Newton's method from `start` [n1, n2, 3], which holds the given values too.

    slope: X -> c'(X), the shear of the domain. The residual is relative to the forces where velocities are given.
    It ends below the tolerance or after `max_steps`; the caller looks at the residual.
    """
    forms = Forms(space, slope, viscosity)
    state, free = start[space.present], space.free  # [D]
    for steps in range(SETTINGS["max_steps"] + 1):
        force = forms.residual(state)
        residual = np.linalg.norm(force[free]) / np.linalg.norm(force[~free])
        if not residual >= SETTINGS["tolerance"] or steps == SETTINGS["max_steps"]:  # NaN ends it too
            break
        factors = splu(
            forms.derivative(state),
            permc_spec="MMD_AT_PLUS_A",
            diag_pivot_thresh=1e-3,
            options={"SymmetricMode": True},
        )
        state[free] -= factors.solve(force[free])
    fields = np.zeros(space.present.shape)
    fields[space.present] = state
    return Flow(fields, float(residual), steps)


class Forms:
    """The weak form and its derivative in one sheared domain, for a state [D].

    slope: X -> c'(X). Arrays over Gauss points are [E, Q].
    """

    def __init__(self, space: Space, slope: Callable, viscosity: float) -> None:
        self.space, self.viscosity = space, viscosity
        self.value, gradient, self.pressure, point, weight = _element()
        streamwise, transverse = space.mesh
        sizes = np.array([space.length / streamwise, 1 / transverse])
        self.gradient = gradient / sizes[:, None, None]  # [2, 9, Q] along X and t
        self.weight = weight * sizes.prod()  # [Q]
        at_points = slope(sizes[0] * (np.arange(streamwise)[:, None] + point))  # [streamwise, 3]
        self.slope = np.tile(np.repeat(at_points, 3, axis=1)[:, None], (1, transverse, 1)).reshape(-1, 9)

    def _at_points(self, state: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Velocity [2, E, Q], its gradient [component, axis, E, Q] by x and y, pressure [E, Q]."""
        local = state[self.space.unknowns]  # [E, 22]
        components = np.stack([local[:, :9], local[:, 9:18]])  # [2, E, 9]
        along, across = (components @ derivative for derivative in self.gradient)  # [2, E, Q] by X and t
        gradient = np.stack([along - self.slope * across, across], axis=1)
        return components @ self.value, gradient, local[:, 18:] @ self.pressure

    def residual(self, state: np.ndarray) -> np.ndarray:
        """Imbalance [D] of momentum at velocities, of mass at pressures."""
        velocity, gradient, pressure = self._at_points(state)
        convection = self.weight * np.einsum("beq,abeq->aeq", velocity, gradient)
        stress = self.viscosity * gradient
        stress[0, 0] -= pressure
        stress[1, 1] -= pressure
        stress *= self.weight
        momentum = (
            convection @ self.value.T
            + stress[:, 0] @ self.gradient[0].T
            + (stress[:, 1] - self.slope * stress[:, 0]) @ self.gradient[1].T
        )  # [2, E, 9]
        mass = -(self.weight * (gradient[0, 0] + gradient[1, 1])) @ self.pressure.T  # [E, 4]
        local = np.concatenate([*momentum, mass], axis=1)  # [E, 22]
        return np.bincount(self.space.unknowns.ravel(), local.ravel(), minlength=len(state))

    def derivative(self, state: np.ndarray) -> csc_array:
        """Derivative [F, F] of the residual by the free unknowns."""
        velocity, gradient, _ = self._at_points(state)
        local = np.zeros((len(self.slope), 22, 22))
        # Convection by the flow and viscosity act alike on both components.
        along = self.weight * velocity[0]
        across = self.weight * (velocity[1] - self.slope * velocity[0])
        diffusion = self.viscosity * self.weight
        shear = self.slope * diffusion
        (by_X, by_t), value = self.gradient, self.value
        both = (
            _integrate(along, value, by_X)
            + _integrate(across, value, by_t)
            + _integrate(diffusion, by_X, by_X)
            - _integrate(shear, by_X, by_t)
            - _integrate(shear, by_t, by_X)
            + _integrate(diffusion + self.slope * shear, by_t, by_t)
        )
        for row, test in enumerate((slice(9), slice(9, 18))):
            for column, trial in enumerate((slice(9), slice(9, 18))):
                local[:, test, trial] = _integrate(self.weight * gradient[row, column], value, value)
            local[:, test, test] += both
        local[:, :9, 18:] = _integrate(self.weight * self.slope, by_t, self.pressure) - _integrate(
            self.weight, by_X, self.pressure
        )
        local[:, 9:18, 18:] = -_integrate(self.weight, by_t, self.pressure)
        local[:, 18:, :18] = local[:, :18, 18:].swapaxes(1, 2)
        space, entries = self.space, len(self.space.indices)
        data = np.bincount(space.slot, local.ravel(), minlength=entries)[:entries]
        return csc_array((data, space.indices, space.indptr))


def _integrate(factor: np.ndarray, test: np.ndarray, trial: np.ndarray) -> np.ndarray:
    """Sum over Gauss points of factor [E, Q], or [Q], times test [i, Q] times trial [j, Q]: [E, i, j], or [1, i, j]."""
    products = test[:, None] * trial  # [i, j, Q]
    return (factor @ products.reshape(-1, factor.shape[-1]).T).reshape(-1, len(test), len(trial))
