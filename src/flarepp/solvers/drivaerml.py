"""Surface pressure of a car body in potential flow: a stand-in for DrivAerML (Ashton et al., arXiv 2408.11969).

The published data are scale-resolving simulations of morphed DrivAer notchbacks. Here a smooth notchback without
wheels, mirrors or gaps, drawn from sixteen uniform parameters, stands in an inviscid, incompressible flow that stays
attached (panel method, see panels.py), over flat ground: NO boundary layer, separation, wake or base drag, and the wall
shear stress is zero. As in the published task a pressure field belongs to each shape, but it is another one; the drag
(0 but for the discretisation) means nothing.

Shapes have their nose at x = 0 and the ground at z = 0, in metres, and are solved for the half at y > 0. A sample is
shifted into the frame of the published data, centred in the length of their bounding box, which holds every shape.
Pressure is measured from that far away and per density, in m^2/s^2: speed^2 / 2 = 756 times its coefficient.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flarepp.solvers import panels
from flarepp.solvers.sampling import RejectedSample

BENCH_ID = 6
SETTINGS: dict[str, Any] = {
    "physics": "inviscid, attached, incompressible potential flow; wall shear stress 0",
    "speed": 38.889,  # m/s
    "density": 1.0,
    "box_min": [-0.9425, -1.1314, -0.3176],  # of the published data, m
    "box_max": [4.1325, 1.1317, 1.2445],
    "parameters": {  # lowest and highest; m where nothing else is said
        "length": [4.35, 5.07],
        "width": [1.75, 2.20],
        "height": [1.33, 1.56],  # of the roof over the ground
        "clearance": [0.14, 0.24],
        "hood": [0.84, 1.00],  # height of its end
        "trunk": [0.95, 1.12],  # height of its end
        "windscreen_foot": [0.22, 0.29],  # over the length
        "windscreen_run": [0.75, 1.15],  # along x
        "roof_end": [0.58, 0.66],  # over the length
        "backlight_run": [0.65, 1.10],  # along x
        "taper": [0.00, 0.16],  # width lost at the tail, over the width
        "nose_radius": [0.45, 0.85],
        "tail_radius": [0.25, 0.55],
        "exponent": [2.5, 4.0],  # of the superelliptic sections
        "tumblehome": [0.05, 0.22],  # width lost at the roof, over the width
        "diffuser": [0.00, 0.16],  # rise of the underbody at the tail
    },
    "lowest_pressure": -6.0,  # coefficients
    "highest_pressure": 1.001,
    "max_leakage": 1e-4,  # over the speed
}
FINE = 4000  # points of a profile that stations are placed on


def sample(generator: np.random.Generator, panel_counts: tuple[int, int], num_points: int) -> dict[str, np.ndarray]:
    """One car of `panel_counts` = (around, along) panels on its half, float32, at `num_points` random points of both halves.

    Returns {"surface_mesh_centers": [P, 3] positions, "surface_fields": [P, 4] pressure and wall shear stress, which is
    0}, in the frame and units of the published data. RejectedSample for panels that are folded, inside out or without
    area, and for a solution out of range.
    """
    ranges = np.array(list(SETTINGS["parameters"].values()))
    shape = dict(zip(SETTINGS["parameters"], generator.uniform(*ranges.T)))
    grid = panels.build(body(shape, panel_counts))
    require_sound(grid)
    flow = panels.solve(grid)
    require_physical(flow)
    position, pressure = scatter(grid, flow.pressure.reshape(panel_counts[::-1]), generator, num_points)
    low, high = np.array(SETTINGS["box_min"]), np.array(SETTINGS["box_max"])
    shift = np.array([(low[0] + high[0] - shape["length"]) / 2, 0.0, low[2]])
    fields = np.zeros((num_points, 4), np.float32)
    fields[:, 0] = SETTINGS["density"] * SETTINGS["speed"] ** 2 / 2 * pressure
    return {"surface_mesh_centers": (position + shift).astype(np.float32), "surface_fields": fields}


# --- geometry


def body(shape: dict[str, float], panel_counts: tuple[int, int]) -> np.ndarray:
    """Nodes [along + 1, around + 1, 3] of the half at y > 0, from nose to tail and from the keel to the roof's middle."""
    around, along = panel_counts
    x = stations(shape, along)[:, None]  # [I+1, 1]
    bottom, top, half_width = profile(shape, x)
    middle, half_height = (top + bottom) / 2, (top - bottom) / 2
    angle = np.linspace(0, np.pi, around + 1)
    sine, cosine = np.sin(angle), -np.cos(angle)
    sine[-1] = 0.0
    # Superellipse |y / half_width|^n + |z / half_height|^n = 1 at equal angles of the section stretched to a square.
    power = shape["exponent"]
    radius = (np.abs(sine) ** power + np.abs(cosine) ** power) ** (-1 / power)
    y, z = half_width * radius * sine, middle + half_height * radius * cosine  # [I+1, J+1]
    belt, roof = 0.55 * shape["height"], shape["height"]
    y *= 1 - shape["tumblehome"] * step((z - belt) / (roof - belt))
    return np.stack(np.broadcast_arrays(x, y, z), axis=-1)


def stations(shape: dict[str, float], along: int) -> np.ndarray:
    """Positions [along + 1] from 0 to the length, equally far apart along the outline in height and width."""
    x = shape["length"] * (1 - np.cos(np.linspace(0, np.pi, FINE))) / 2
    bottom, top, half_width = profile(shape, x)
    way = np.hypot(np.diff(x), np.hypot(np.diff(top - bottom), np.diff(half_width)))
    way = np.concatenate([[0], np.cumsum(way)])
    return np.interp(np.linspace(0, way[-1], along + 1), way, x)


def profile(shape: dict[str, float], x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Heights of underbody and upper outline, and half the width, at positions x along the body, each shaped as x."""
    length, roof = shape["length"], shape["height"]
    foot, end = shape["windscreen_foot"] * length, shape["roof_end"] * length
    hood = shape["hood"] - 0.15 * (1 - x / foot).clip(0)
    upper = hood + (roof - hood) * step((x - foot) / shape["windscreen_run"])
    upper -= (roof - shape["trunk"]) * step((x - end) / shape["backlight_run"])
    under = shape["clearance"] + shape["diffuser"] * step((x - 0.75 * length) / (0.35 * length))
    width = shape["width"] / 2 * (1 - shape["taper"] * step((x - 0.45 * length) / (0.55 * length)))
    nose, tail = x / shape["nose_radius"], (length - x) / shape["tail_radius"]
    middle, half_height = (upper + under) / 2, (upper - under) / 2 * cap(nose, 2.5) * cap(tail, 2.5)
    return middle - half_height, middle + half_height, width * cap(nose, 2.0) * cap(tail, 2.5)


def step(t: np.ndarray) -> np.ndarray:
    """From 0 at t <= 0 to 1 at t >= 1, with two continuous derivatives."""
    t = np.clip(t, 0, 1)
    return t**3 * (10 - 15 * t + 6 * t**2)


def cap(t: np.ndarray, power: float) -> np.ndarray:
    """Superelliptic end: from 0, vertically, at t = 0 to 1 at t >= 1."""
    return (1 - (1 - np.clip(t, 0, 1)) ** power) ** (1 / power)


# --- checks


def require_sound(grid: panels.Panels) -> None:
    """RejectedSample for a panel without area or folded over itself, or whose normal points into the body."""
    alignment = (grid.triangle_vectors * grid.normals).sum(-1).min(0)  # [N]
    if not grid.areas.min() > 1e-7:
        raise RejectedSample(f"a panel has the area {grid.areas.min():.1e} m^2")
    if not alignment.min() >= -1e-12:
        raise RejectedSample(f"panel {alignment.argmin()} is folded over itself")
    rows = grid.centres.reshape(grid.nodes.shape[0] - 1, -1, 3)
    inside = rows.mean(axis=1, keepdims=True) * [1, 0, 1]  # on the symmetry plane
    outward = ((rows - inside).reshape(-1, 3) * grid.normals)[:, 1:].sum(-1)
    if not outward.min() > 0:
        raise RejectedSample(f"panel {outward.argmin()} faces into the body")


def require_physical(flow: panels.Flow) -> None:
    """RejectedSample for flow through the surface, or a pressure coefficient out of range (NaN too)."""
    if not flow.leakage < SETTINGS["max_leakage"]:
        raise RejectedSample(f"flow through the surface {flow.leakage:.1e}, expected below {SETTINGS['max_leakage']:.0e}")
    lowest, highest = flow.pressure.min(), flow.pressure.max()
    if not (lowest > SETTINGS["lowest_pressure"] and highest <= SETTINGS["highest_pressure"]):
        raise RejectedSample(f"pressure coefficients from {lowest:.2f} to {highest:.4f}, expected from "
                             f"{SETTINGS['lowest_pressure']:g} to {SETTINGS['highest_pressure']:g}")


# --- from panels to points


def scatter(
    grid: panels.Panels, values: np.ndarray, generator: np.random.Generator, num_points: int
) -> tuple[np.ndarray, np.ndarray]:
    """Points [P, 3], uniform over the area of both halves, and there [P] the values [I, J] of the panels' centres.

    In a panel's own coordinates (u, v) values are bilinear between neighbouring centres.
    """
    areas = grid.triangle_areas.ravel()  # [2 N]
    triangle, panel = np.divmod(generator.choice(areas.size, num_points, p=areas / areas.sum()), values.size)
    low, high = np.sort(generator.random((2, num_points)), axis=0)
    # Barycentric coordinates of the triangles (0, 0) (1, 0) (1, 1) and (0, 0) (1, 1) (0, 1).
    u, v = np.where(triangle == 0, high, low), np.where(triangle == 0, low, high)
    i, j = np.divmod(panel, values.shape[1])
    near, far = grid.nodes[i, j], grid.nodes[i + 1, j + 1]
    third = np.where((triangle == 0)[:, None], grid.nodes[i + 1, j], grid.nodes[i, j + 1])
    position = near + (high - low)[:, None] * (third - near) + low[:, None] * (far - near)
    position[:, 1] *= generator.choice([-1.0, 1.0], num_points)
    return position, bilinear(values, i + u, j + v)


def bilinear(values: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Values [I, J] at centres (i + 1/2, j + 1/2), taken at points [P] of [0, I] x [0, J]; beyond the edges by symmetry."""
    # Past the symmetry plane comes the mirror image; past a closed end the section's opposite side.
    padded = np.pad(values, ((0, 0), (1, 1)), mode="edge")
    padded = np.concatenate([padded[:1, ::-1], padded, padded[-1:, ::-1]])
    i, j = (np.minimum((place + 0.5).astype(int), extent) for place, extent in zip((first, second), values.shape))
    u, v = first + 0.5 - i, second + 0.5 - j
    return ((1 - u) * (1 - v) * padded[i, j] + u * (1 - v) * padded[i + 1, j]
            + (1 - u) * v * padded[i, j + 1] + u * v * padded[i + 1, j + 1])
