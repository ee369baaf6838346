"""Transonic flow of an ideal gas around aerofoils: equations and meshes of the Geo-FNO benchmark (arXiv 2207.05209).

Steady two-dimensional Euler equations with the ratio of specific heats 1.4. Far away density and pressure are 1, the Mach
number is 0.8 and the angle of attack 0; the gas slips along the wall.

Vertex-centred finite volumes on the median dual of a C-mesh (airfoil_mesh): central fluxes with the scalar dissipation of
Jameson, Schmidt and Turkel (AIAA 81-1259) scaled with the aspect ratio of the cells, pressure alone at the wall,
Steger-Warming fluxes at the far boundary. Five-stage Runge-Kutta steps with local time steps and implicit residual
smoothing drive a V-cycle of the full-approximation multigrid scheme. The original data were made with Roe's flux and a MUSCL
reconstruction on the same mesh, so their numerical dissipation is another one.

Arrays are [component, i, j, sample], i along the C and j away from the aerofoil: with the sample last, NumPy's inner loops
are long. Only what `solve` and `samples` take and return has the sample first. Both copies of the wake cut are kept equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flarepp.solvers import airfoil_mesh
from flarepp.solvers.sampling import RejectedSample

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

BENCH_ID = 4
SETTINGS: dict[str, Any] = {
    "gamma": 1.4,
    "mach": 0.8,
    "second_difference": 1.0,
    "fourth_difference": 1 / 16,
    "coarse_difference": 1 / 8,
    "aspect_exponent": 2 / 3,
    "courant": 6.0,
    "smoothing": 0.8,
    "levels": 4,
    "start_difference": 0.25,
    "start_cycles": 10,
    "lowest": 0.1,
    "highest": 5.0,
    "min_cycles": 80,
    "max_residual": 1e-3,
    "batch_size": 16,
    "geometry": airfoil_mesh.SETTINGS,
}
STAGES = ((1 / 4, 1.0), (1 / 6, 0.0), (3 / 8, 0.56), (1 / 2, 0.0), (1.0, 0.44))  # part of a step, part of new dissipation
GAMMA = SETTINGS["gamma"]


@dataclass(frozen=True)
class Solution:
    """state [S, 4, ni, nj]: density, momentum along x and y, total energy, per volume. history [cycles, S]: root mean
    square, over the nodes, of the change of density in a step, against that of the first cycle.
    """

    state: np.ndarray
    history: np.ndarray


def samples(generators: list[np.random.Generator], mesh: tuple[int, int, int]) -> list[dict | RejectedSample]:
    """One sample a generator on `mesh` = [wake, aerofoil, normal] cells: {"X": [n1, n2], "Y": [n1, n2], "Q": [5, n1, n2]},
    float64, Q = density, velocity along x and y, pressure, Mach number; n1 = 2 wake + aerofoil + 1, n2 = normal + 1.

    A RejectedSample stands for one that did not converge or whose mesh folds.
    """
    displacement = np.stack([airfoil_mesh.random_displacement(generator) for generator in generators])
    x, y = airfoil_mesh.c_mesh(displacement, mesh)
    # A sample takes the same number of cycles whatever it is solved together with.
    solution = solve(x, y, mesh[0], cycles=max(SETTINGS["min_cycles"], mesh[1]))
    volume = airfoil_mesh.dual(*_sample_last(x, y), mesh[0]).volume.min(axis=(0, 1))
    return [_sample(*case) for case in zip(x, y, solution.state, solution.history[-1], volume, strict=True)]


def _sample(x: np.ndarray, y: np.ndarray, state: np.ndarray, residual: float, volume: float) -> dict | RejectedSample:
    density = state[0].astype(float)
    u, v, pressure = primitive(state.astype(float))
    lowest, highest = min(density.min(), pressure.min()), max(density.max(), pressure.max())
    if not volume > 0:
        return RejectedSample(f"smallest dual cell {volume:.1e}, expected above 0")
    if not residual < SETTINGS["max_residual"]:  # written so that NaN is rejected too
        return RejectedSample(f"relative residual {residual:.1e}, expected below {SETTINGS['max_residual']:.0e}")
    if not (lowest > 1.01 * SETTINGS["lowest"] and highest < 0.99 * SETTINGS["highest"]):
        return RejectedSample(f"density and pressure from {lowest:.3g} to {highest:.3g}: held by the guard of the start")
    mach = np.hypot(u, v) / np.sqrt(GAMMA * pressure / density)
    return {"X": x, "Y": y, "Q": np.stack([density, u, v, pressure, mach])}


def solve(
    x: np.ndarray,
    y: np.ndarray,
    wake: int,
    *,
    cycles: int,
    mach: float = SETTINGS["mach"],
    angle: float = 0.0,
    dtype: DTypeLike = np.float32,
) -> Solution:
    """Flow around aerofoils on the C-meshes x, y [S, ni, nj] with `wake` cells behind the trailing edge.

    angle of attack in radians; dtype that of all flow arrays. The caller looks at the residual: a sample that diverges
    holds NaN and leaves the others as they are.
    """
    stream = free_stream(mach, angle)
    levels = hierarchy(*_sample_last(x, y), wake, stream, dtype)
    state = np.empty((4, *levels[0].volume.shape), dtype)
    state[...] = stream[:, None, None, None]
    flow, history = Flow.of(state), []
    with np.errstate(all="ignore"):
        for cycle in range(cycles):
            start = max(0.0, 1 - cycle / SETTINGS["start_cycles"])
            flow, change = v_cycle(levels, flow, start * SETTINGS["start_difference"])
            history.append(np.sqrt(np.mean(np.square(change, dtype=float), axis=(0, 1))))
        return Solution(np.moveaxis(flow.state, -1, 0), np.array(history) / history[0])


def _sample_last(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.ascontiguousarray(np.moveaxis(x, 0, -1)), np.ascontiguousarray(np.moveaxis(y, 0, -1))


# --- gas


def free_stream(mach: float, angle: float) -> np.ndarray:
    """State [4] for density and pressure 1; angle in radians."""
    speed = mach * np.sqrt(GAMMA)
    return np.array([1.0, speed * np.cos(angle), speed * np.sin(angle), 1 / (GAMMA - 1) + speed**2 / 2])


def primitive(state: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Velocity along x and y and pressure, each [...], of a state [4, ...]."""
    density, momentum_x, momentum_y, energy = state
    u, v = momentum_x / density, momentum_y / density
    return u, v, (GAMMA - 1) * (energy - (momentum_x * u + momentum_y * v) / 2)


@dataclass(frozen=True)
class Flow:
    """A state [4, ...] with its velocities and pressure, each [...]."""

    state: np.ndarray
    u: np.ndarray
    v: np.ndarray
    pressure: np.ndarray

    @classmethod
    def of(cls, state: np.ndarray) -> Flow:
        """With density and pressure held between bounds that only the first cycles ever reach."""
        u, v, pressure = primitive(state)
        if not (_is_allowed(state[0]) and _is_allowed(pressure)):
            bounds = SETTINGS["lowest"], SETTINGS["highest"]
            density, pressure = state[0].clip(*bounds), pressure.clip(*bounds)
            energy = pressure / (GAMMA - 1) + density * (u * u + v * v) / 2
            state = np.stack([density, density * u, density * v, energy])
        return cls(state, u, v, pressure)

    def __getitem__(self, nodes: tuple) -> Flow:
        return Flow(self.state[:, *nodes], self.u[nodes], self.v[nodes], self.pressure[nodes])

    @property
    def sound(self) -> np.ndarray:
        return np.sqrt(GAMMA * self.pressure / self.state[0])


def _is_allowed(values: np.ndarray) -> bool:
    return bool(values.min() >= SETTINGS["lowest"] and values.max() <= SETTINGS["highest"])


def split_flux(flow: Flow, face: np.ndarray, sign: int) -> np.ndarray:
    """Steger-Warming flux [4, ...] that leaves through face [2, ...] with the outgoing (sign 1) or incoming (-1) waves."""
    area = np.hypot(*face)
    nx, ny = face / area
    sound, normal = flow.sound, flow.u * nx + flow.v * ny
    convected, slower, faster = ((speed + sign * np.abs(speed)) / 2 for speed in (normal, normal - sound, normal + sound))
    mass = 2 * (GAMMA - 1) * convected + slower + faster
    push = sound * (faster - slower)
    energy = mass * (flow.u**2 + flow.v**2) / 2 + push * normal + sound**2 * (faster + slower) / (GAMMA - 1)
    waves = np.stack([mass, mass * flow.u + push * nx, mass * flow.v + push * ny, energy])
    return flow.state[0] * area / (2 * GAMMA) * waves


# --- mesh hierarchy


@dataclass(frozen=True)
class Boundary:
    """A side of the mesh where gas enters or leaves."""

    nodes: tuple  # index
    face: np.ndarray  # [2, n, S] outwards
    entering: np.ndarray  # [4, n, S] flux of the free stream's incoming waves


@dataclass(frozen=True)
class Level:
    """What the solver needs of one mesh. Pairs belong to the directions i and j."""

    half_faces: tuple  # [2, ni - 1, nj, S] and [2, ni, nj - 1, S]: half of each inner face, as fluxes are means of two nodes
    node_faces: tuple  # [2, ni, nj, S]: mean of the two faces of a node, as long as if its cell were not cut by a boundary
    node_areas: tuple  # [ni, nj, S]: their lengths
    share: tuple  # [1, nj, 1] and [ni, 1, 1]: 1/2 where a boundary leaves only half of a node's faces
    volume: np.ndarray  # [ni, nj, S] of whole cells
    inverse_volume: np.ndarray  # [ni, nj, S] of what the boundaries leave of them
    wall: np.ndarray  # [2, aerofoil + 1, S] out of the fluid
    far: tuple  # three Boundary
    wake: int
    smoother: tuple  # [ni, ni], [nj, nj]
    coarse: tuple  # nodes that the next level has, along i and j
    prolongation: tuple  # [ni, coarse ni], [nj, coarse nj]
    finest: bool


def hierarchy(x: np.ndarray, y: np.ndarray, wake: int, stream: np.ndarray, dtype: DTypeLike) -> list[Level]:
    """Levels from fine to coarse of the meshes x, y [ni, nj, S]; stream [4]: state of the gas far away."""
    levels = []
    for depth in range(SETTINGS["levels"]):
        level = _level(x, y, wake, stream, dtype, finest=depth == 0)
        x, y, wake = x[np.ix_(*level.coarse)], y[np.ix_(*level.coarse)], (wake + 1) // 2
        levels.append(level)
    return levels


def _level(x: np.ndarray, y: np.ndarray, wake: int, stream: np.ndarray, dtype: DTypeLike, finest: bool) -> Level:
    ni, nj = x.shape[:2]
    dual = airfoil_mesh.dual(x, y, wake)
    share = _boundary_share(nj)[None, :, None], _boundary_share(ni)[:, None, None]
    means = (dual.faces_i[:, 1:] + dual.faces_i[:, :-1]) / 2, (dual.faces_j[:, :, 1:] + dual.faces_j[:, :, :-1]) / 2
    node_faces = tuple(mean / part for mean, part in zip(means, share, strict=True))
    volume = join_cut(dual.volume.copy(), wake)
    on_wall = _boundary_share(nj)[None, :, None] * np.ones((ni, 1, 1))
    on_wall[: wake + 1, 0], on_wall[ni - 1 - wake :, 0] = 1, 1  # the halves of the cut make up a whole
    coarse = airfoil_mesh.coarse_nodes(ni, wake), airfoil_mesh.coarse_nodes(nj)

    def cast(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(array.astype(dtype) for array in arrays)

    sides = (np.s_[:, -1], dual.faces_j[:, :, -1]), (np.s_[0, :], -dual.faces_i[:, 0]), (np.s_[-1, :], dual.faces_i[:, -1])
    return Level(
        half_faces=cast(dual.faces_i[:, 1:-1] / 2, dual.faces_j[:, :, 1:-1] / 2),
        node_faces=cast(*node_faces),
        node_areas=cast(*(np.hypot(*face) for face in node_faces)),
        share=cast(*share),
        volume=(volume / on_wall / share[1]).astype(dtype),
        inverse_volume=(1 / volume).astype(dtype),
        wall=dual.wall.astype(dtype),
        far=tuple(_boundary(nodes, face.astype(dtype), stream.astype(dtype)) for nodes, face in sides),
        wake=wake,
        smoother=cast(_smoother(ni), _smoother(nj)),
        coarse=coarse,
        prolongation=cast(airfoil_mesh.interpolation(coarse[0], ni), airfoil_mesh.interpolation(coarse[1], nj)),
        finest=finest,
    )


def _boundary_share(num_nodes: int) -> np.ndarray:
    share = np.ones(num_nodes)
    share[[0, -1]] = 0.5
    return share


def _boundary(nodes: tuple, face: np.ndarray, stream: np.ndarray) -> Boundary:
    outside = Flow.of(np.broadcast_to(stream[:, None, None], (4, *face.shape[1:])))
    return Boundary(nodes, face, split_flux(outside, face, -1))


def _smoother(num_nodes: int) -> np.ndarray:
    """Inverse of 1 - smoothing * second difference along a line with free ends; far entries, which vanish, are left out."""
    difference = np.diff(np.eye(num_nodes), axis=0)
    inverse = np.linalg.inv(np.eye(num_nodes) + SETTINGS["smoothing"] * difference.T @ difference)
    return np.where(inverse < 1e-16, 0, inverse)


# --- both directions alike


def _pair(values: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes behind and ahead of each inner face, views of values [ni, nj, S]."""
    return (values[:-1], values[1:]) if axis == 0 else (values[:, :-1], values[:, 1:])


def _inner(values: np.ndarray, axis: int) -> np.ndarray:
    return values[1:-1] if axis == 0 else values[:, 1:-1]


def _difference(values: np.ndarray, axis: int) -> np.ndarray:
    behind, ahead = _pair(values, axis)
    return ahead - behind


def _mean(values: np.ndarray, axis: int) -> np.ndarray:
    behind, ahead = _pair(values, axis)
    return (ahead + behind) / 2


def _leave(balance: np.ndarray, flux: np.ndarray, axis: int) -> None:
    """Take a flux through the inner faces from the nodes behind to the nodes ahead: balance is what leaves each node."""
    behind, ahead = _pair(balance, axis)
    behind += flux
    ahead -= flux


def _apply(matrices: tuple, values: np.ndarray) -> np.ndarray:
    """Matrices [mi, ni] and [mj, nj] along i and j of values [4, ni, nj, S]."""
    along_i = matrices[0] @ values.reshape(4, values.shape[1], -1)
    return matrices[1] @ along_i.reshape(4, -1, *values.shape[2:])


def _cut(values: np.ndarray, wake: int, line: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The nodes of values [..., ni, nj, S] `line` cells above and below the cut, from the outflow to the trailing edge."""
    return values[..., : wake + 1, line, :], values[..., : -wake - 2 : -1, line, :]


def join_cut(values: np.ndarray, wake: int, weight: float = 1.0) -> np.ndarray:
    """Give both copies of the cut `weight` times their sum, in place."""
    upper, lower = _cut(values, wake)
    upper[...] = weight * (upper + lower)
    lower[...] = upper
    return values


# --- balance of each dual cell


def convection(level: Level, flow: Flow) -> np.ndarray:
    """What central, wall and far fluxes take out of each dual cell, [4, ni, nj, S]; each copy of the cut has its half."""
    density, momentum_x, momentum_y, energy = flow.state
    u, v, pressure = flow.u, flow.v, flow.pressure
    enthalpy, cross = energy + pressure, momentum_x * v
    flux_x = momentum_x, momentum_x * u + pressure, cross, enthalpy * u
    flux_y = momentum_y, cross, momentum_y * v + pressure, enthalpy * v
    balance = np.zeros_like(flow.state)
    for component, x, y in zip(balance, flux_x, flux_y, strict=True):
        for axis, (face_x, face_y) in enumerate(level.half_faces):
            behind, ahead = _pair(x, axis)
            flux = (behind + ahead) * face_x
            behind, ahead = _pair(y, axis)
            flux += (behind + ahead) * face_y
            _leave(component, flux, axis)
    aerofoil = slice(level.wake, len(density) - level.wake)
    balance[1:3, aerofoil, 0] += pressure[aerofoil, 0] * level.wall
    for side in level.far:
        balance[:, *side.nodes] += split_flux(flow[side.nodes], side.face, 1) + side.entering
    return balance


@dataclass(frozen=True)
class Factors:
    """What a step holds fixed."""

    step: np.ndarray  # [ni, nj, S] time step over volume
    second: tuple  # [ni - 1, nj, S] and [ni, nj - 1, S]: of first differences across the faces
    fourth: tuple | None  # of third differences


def step_factors(level: Level, flow: Flow, start: float) -> Factors:
    """start: least factor of the first differences, relative to the wave speed."""
    sound = flow.sound
    speeds = tuple(
        np.abs(flow.u * x + flow.v * y) + sound * area
        for (x, y), area in zip(level.node_faces, level.node_areas, strict=True)
    )
    fastest = speeds[0] + speeds[1]
    fastest[:, -1] += speeds[1][:, -1]  # where waves leave through the far boundary, twice as much does
    fastest[[0, -1]] += speeds[0][[0, -1]]
    step = join_cut(SETTINGS["courant"] * level.volume / fastest, level.wake, 0.5) * level.inverse_volume
    stretch = (speeds[1] / speeds[0]) ** SETTINGS["aspect_exponent"]
    scales = speeds[0] * (1 + stretch) * level.share[0], speeds[1] * (1 + 1 / stretch) * level.share[1]
    means = tuple(_mean(scale, axis) for axis, scale in enumerate(scales))
    if not level.finest:
        return Factors(step, tuple(SETTINGS["coarse_difference"] * mean for mean in means), None)
    sensors = (np.maximum(np.maximum(*_pair(sensor, axis)), start) for axis, sensor in enumerate(shock_sensor(level, flow)))
    pairs = [(mean, SETTINGS["second_difference"] * sensor) for mean, sensor in zip(means, sensors, strict=True)]
    fourth = tuple(scale * np.maximum(SETTINGS["fourth_difference"] - second, 0) for scale, second in pairs)
    return Factors(step, tuple(scale * second for scale, second in pairs), fourth)


def shock_sensor(level: Level, flow: Flow) -> tuple[np.ndarray, np.ndarray]:
    """Second differences of the pressure over its sum, along i and j, [ni, nj, S]; 0 on boundaries."""

    def ratio(behind: np.ndarray, middle: np.ndarray, ahead: np.ndarray) -> np.ndarray:
        return np.abs((behind - 2 * middle + ahead) / (behind + 2 * middle + ahead))

    pressure, sensors = flow.pressure, (np.zeros_like(flow.pressure), np.zeros_like(flow.pressure))
    sensors[0][1:-1] = ratio(pressure[:-2], pressure[1:-1], pressure[2:])
    sensors[1][:, 1:-1] = ratio(pressure[:, :-2], pressure[:, 1:-1], pressure[:, 2:])
    above, below = _cut(pressure, level.wake, 1)
    for copy in _cut(sensors[1], level.wake):
        copy[...] = ratio(above, _cut(pressure, level.wake)[0], below)
    return sensors


def dissipation(level: Level, flow: Flow, factors: Factors) -> np.ndarray:
    """What first and third differences of density, momentum and enthalpy bring into each dual cell, [4, ni, nj, S]."""
    balance = np.zeros_like(flow.state)
    for component, values in zip(balance, (*flow.state[:3], flow.state[3] + flow.pressure), strict=True):
        for axis in (0, 1):
            first = _difference(values, axis)
            flux = factors.second[axis] * first
            if factors.fourth is not None:
                second = np.zeros_like(values)
                _inner(second, axis)[...] = _difference(first, axis)
                if axis == 1:  # across the cut to the other side's first line
                    upper, lower = _cut(first, level.wake)
                    for copy in _cut(second, level.wake):
                        copy[...] = upper + lower
                flux -= factors.fourth[axis] * _difference(second, axis)
            _leave(component, flux, axis)
    return balance


def imbalance(level: Level, flow: Flow, start: float) -> np.ndarray:
    return convection(level, flow) - dissipation(level, flow, step_factors(level, flow, start))


# --- iteration


def advance(level: Level, flow: Flow, forcing: np.ndarray | float, start: float) -> tuple[Flow, np.ndarray]:
    """One step of d state / dt = -(imbalance + forcing), and the change of density [ni, nj, S] of its first stage."""
    factors, before, change = step_factors(level, flow, start), flow.state, None
    for part, renewed in STAGES:
        if renewed == 1:
            damping = dissipation(level, flow, factors)
        elif renewed:
            damping = renewed * dissipation(level, flow, factors) + (1 - renewed) * damping
        update = convection(level, flow)
        update -= damping
        update += forcing
        join_cut(update, level.wake)
        update *= factors.step
        change = update[0] if change is None else change
        flow = Flow.of(before - part * join_cut(_apply(level.smoother, update), level.wake, 0.5))
    assert change is not None
    return flow, change


def v_cycle(levels: list[Level], flow: Flow, start: float, forcing: np.ndarray | float = 0.0) -> tuple[Flow, np.ndarray]:
    """One step on each level from fine to coarse; the coarser ones correct the finer ones. Returns what `advance` does."""
    level, *coarser = levels
    flow, change = advance(level, flow, forcing, start)
    if not coarser:
        return flow, change
    restriction = tuple(matrix.T for matrix in level.prolongation)
    restricted = _apply(restriction, imbalance(level, flow, start) + forcing)
    before = Flow.of(flow.state[:, *np.ix_(*level.coarse)])
    after, _ = v_cycle(coarser, before, start, restricted - imbalance(coarser[0], before, start))
    correction = _apply(level.prolongation, after.state - before.state)
    return Flow.of(flow.state + join_cut(correction, level.wake, 0.5)), change
