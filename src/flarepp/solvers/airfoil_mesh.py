"""C-meshes around deformed NACA 0012 aerofoils, as in the airfoil benchmark of Geo-FNO (arXiv 2207.05209).

The chord lies on [0, 1]. A free-form deformation moves the points vertically: eight control points on a box of 1.5 x 0.2
around the chord, cubic Lagrange polynomials along x, linear in y. The algebraic mesh has [wake, aerofoil, normal] cells:
axis 0 runs from the outflow along the upper side of the wake to the trailing edge, over the upper side to the leading edge
and back below, axis 1 from the aerofoil or the cut behind it to the far boundary. The cut appears twice, as both ends of
the first line. The far boundary is a half circle around (1, 0), continued by two straight lines.

The median dual of a mesh has one cell around each node, between the centres of the adjacent quadrilaterals and the middles
of their sides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import brentq

SETTINGS: dict[str, Any] = {
    "radius": 40.0,
    "wake_end": 40.0,
    "box": {"centre": 0.5, "length": 1.5, "height": 0.2},
    "displacement": 0.05,
    "growth": 1.02,
    "growth_fraction": 0.75,
}
THICKNESS = (0.2969, -0.1260, -0.3516, 0.2843, -0.1036)  # times 0.6: closed trailing edge


def check(mesh: tuple[int, int, int]) -> None:
    """ValueError unless `mesh` = [wake, aerofoil, normal] cells can be coarsened three times."""
    wake, aerofoil, normal = mesh
    if wake < 8 or normal < 8 or aerofoil < 16 or aerofoil % 8:
        raise ValueError(
            "mesh: expected [wake, aerofoil, normal] cells, at least [8, 16, 8] and aerofoil a multiple of 8, "
            f"got {list(mesh)}"
        )


def random_displacement(generator: np.random.Generator) -> np.ndarray:
    """[8] vertical displacements of the control points, lower row from left to right, then upper row from right to left;
    the first one stays where it is.
    """
    limit = SETTINGS["displacement"]
    return np.append(0.0, generator.uniform(-limit, limit, 7))


def c_mesh(displacement: np.ndarray, mesh: tuple[int, int, int], cosine: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Coordinates x and y, each [S, 2 wake + aerofoil + 1, normal + 1], of the meshes for displacements [S, 8].

    The benchmark's points on the aerofoil are even along x, but for one more at the leading edge. cosine: another family,
    which converges under refinement: points crowd at both edges, the first cells on the wall are half as high, and cells
    grow by one factor.
    """
    wake, aerofoil, normal = mesh
    chord = _cosine_chord(aerofoil // 2) if cosine else _even_chord(aerofoil // 2)  # from leading to trailing edge
    growth, height = (np.inf, 1 / aerofoil) if cosine else (SETTINGS["growth"], 2 / aerofoil)
    x = np.concatenate([chord[::-1], chord[1:]])  # [aerofoil + 1]
    y = thickness(x) * np.where(np.arange(len(x)) < aerofoil // 2, 1, -1)
    y = y + deformation(displacement, x, y)  # [S, aerofoil + 1]
    y[:, -1] = y[:, 0]  # one trailing edge, to the last bit
    end = SETTINGS["wake_end"]
    along = spacing(chord[-1] - chord[-2], wake, end - 1, growth) * (end - 1)  # from the trailing edge, [wake + 1]
    sink = y[:, :1] * (1 - along[1:] / (end - 1))  # [S, wake]: a straight line to (end, 0)
    x = np.concatenate([1 + along[:0:-1], x, 1 + along[1:]])
    y = np.concatenate([sink[:, ::-1], y, sink], axis=1)
    outer_x, outer_y = _far_boundary(1 + along[:0:-1], aerofoil)
    fraction = spacing(height, normal, SETTINGS["radius"], growth)  # [normal + 1]

    def blend(inner: np.ndarray, outer: np.ndarray) -> np.ndarray:
        return inner[..., None] * (1 - fraction) + outer[:, None] * fraction

    return np.broadcast_to(blend(x, outer_x), (len(y), len(x), normal + 1)).copy(), blend(y, outer_y)


def thickness(x: np.ndarray) -> np.ndarray:
    """Half the thickness of the NACA 0012 at x [P] from 0 to 1; 0 at the trailing edge."""
    powers = (np.sqrt(x), x, x**2, x**3, x**4)
    return np.abs(0.6 * sum(factor * power for factor, power in zip(THICKNESS, powers, strict=True)))


def deformation(displacement: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Vertical displacement [S, P] of the points (x, y), each [P], for control displacements [S, 8]."""
    box = SETTINGS["box"]
    columns = box["centre"] + box["length"] * np.array([-1 / 2, -1 / 6, 1 / 6, 1 / 2])
    along = np.stack([
        np.prod([(x - other) / (column - other) for other in columns if other != column], axis=0) for column in columns
    ])  # [4, P]
    upper = y / box["height"] + 0.5
    weights = np.concatenate([along * (1 - upper), along[::-1] * upper])  # [8, P]
    return displacement @ weights


def spacing(first: float, num_cells: int, length: float, growth: float) -> np.ndarray:
    """Fractions [num_cells + 1] of `length`, the first cell being `first` long.

    Cells grow by one factor; if that is larger than `growth`, they grow by `growth` over the first three quarters, and after
    that by whatever factor reaches the end.
    """
    ratio = _growth(length / first, num_cells)
    slow = num_cells if ratio <= growth else round(SETTINGS["growth_fraction"] * num_cells)
    cells = first * min(ratio, growth) ** np.arange(slow)
    if slow < num_cells:
        ratio = _growth((length - cells.sum()) / cells[-1] + 1, num_cells - slow + 1)
        cells = np.concatenate([cells, cells[-1] * ratio ** np.arange(1, num_cells - slow + 1)])
    ends = np.append(0.0, np.cumsum(cells))
    return ends / ends[-1]


def _growth(total: float, num_cells: int) -> float:
    """The ratio of a geometric series of `num_cells` terms that begins with 1 and sums to `total` >= 1."""
    largest = total ** (1 / (num_cells - 1))  # the last term is no more than the sum
    return brentq(lambda ratio: (ratio ** np.arange(num_cells)).sum() - total, 0.0, largest)


def _even_chord(num_cells: int) -> np.ndarray:
    even = np.linspace(0, 1, num_cells)
    return np.insert(even, 1, even[1] / 4)


def _cosine_chord(num_cells: int) -> np.ndarray:
    return (1 - np.cos(np.linspace(0, np.pi, num_cells + 1))) / 2


def _far_boundary(upper_line: np.ndarray, aerofoil: int) -> tuple[np.ndarray, np.ndarray]:
    """x and y, each [2 wake + aerofoil + 1]; upper_line [wake]: x from the outflow to the trailing edge, exclusive."""
    radius = SETTINGS["radius"]
    angle = np.linspace(np.pi / 2, 3 * np.pi / 2, aerofoil + 1)
    line = np.full_like(upper_line, radius)
    x = np.concatenate([upper_line, 1 + radius * np.cos(angle), upper_line[::-1]])
    return x, np.concatenate([line, radius * np.sin(angle), -line])


# --- dual mesh


@dataclass(frozen=True)
class Dual:
    """Dual cells of meshes with [ni, nj] nodes. Faces are vectors as long as the face, normal to it, towards growing i or j;
    the first and the last face of a line of nodes lie on the boundary. Each copy of the wake cut has its own half of a cell.
    """

    faces_i: np.ndarray  # [2, ni + 1, nj, S]
    faces_j: np.ndarray  # [2, ni, nj + 1, S]
    wall: np.ndarray  # [2, aerofoil + 1, S] out of the fluid, into the aerofoil
    volume: np.ndarray  # [ni, nj, S]


def dual(x: np.ndarray, y: np.ndarray, wake: int) -> Dual:
    """Median dual of the meshes x, y [ni, nj, S] (sample last) with `wake` cells behind the trailing edge."""
    ni, nj = x.shape[:2]
    halves = np.stack([_halve(_halve(values, 0), 1) for values in (x, y)])  # [2, 2 ni - 1, 2 nj - 1, S]
    ends_i, ends_j = _dual_ends(ni), _dual_ends(nj)
    along_j = np.diff(halves[:, :, ends_j], axis=2)[:, ends_i]  # [2, ni + 1, nj, S]
    along_i = np.diff(halves[:, ends_i], axis=1)[:, :, ends_j]  # [2, ni, nj + 1, S]
    # At a trailing edge half of the face lies on the cut.
    body = np.diff(halves[:, ends_i.clip(2 * wake, 2 * (ni - 1 - wake)), 0], axis=1)[:, wake : ni - wake]
    first, second = halves[:, 1:, 1:] - halves[:, :-1, :-1], halves[:, 1:, :-1] - halves[:, :-1, 1:]
    quarters = (first[0] * second[1] - first[1] * second[0]) / 2  # [2 ni - 2, 2 nj - 2, S], i and j turn clockwise
    around = np.pad(quarters, ((1, 1), (1, 1), (0, 0)))
    volume = sum((around[row::2, column::2] for row in (0, 1) for column in (0, 1)), start=np.zeros((), x.dtype))
    return Dual(_left(along_j), -_left(along_i), _left(body), volume)


def _left(tangent: np.ndarray) -> np.ndarray:
    """The normal to the left of a tangent, as long as it."""
    return np.stack([-tangent[1], tangent[0]])


def _dual_ends(num_nodes: int) -> np.ndarray:
    """Where the dual cells of a line of nodes begin and end, [num_nodes + 1], counted in half cells."""
    return np.concatenate([[0], np.arange(1, 2 * num_nodes - 2, 2), [2 * num_nodes - 2]])


def _halve(nodes: np.ndarray, axis: int) -> np.ndarray:
    """Nodes and the middles between them."""
    nodes = np.moveaxis(nodes, axis, 0)
    halves = np.empty((2 * len(nodes) - 1, *nodes.shape[1:]))
    halves[::2], halves[1::2] = nodes, (nodes[1:] + nodes[:-1]) / 2
    return np.moveaxis(halves, 0, axis)


# --- coarser meshes


def coarse_nodes(num_nodes: int, wake: int = 0) -> np.ndarray:
    """Nodes of a line that the next coarser mesh keeps: every second one, counted from both trailing edges, and the ends."""
    behind = np.append(np.arange(wake, 0, -2), 0)  # from the trailing edge to the outflow
    ahead = np.append(np.arange(wake, num_nodes - 1 - wake, 2), num_nodes - 1 - wake)
    return np.concatenate([behind[:0:-1], ahead, num_nodes - 1 - behind[1:]])


def interpolation(kept: np.ndarray, num_nodes: int) -> np.ndarray:
    """Linear interpolation by node number, [num_nodes, len(kept)], from the nodes `kept` to all."""
    return np.stack([np.interp(np.arange(num_nodes), kept, unit) for unit in np.eye(len(kept))], axis=1)
