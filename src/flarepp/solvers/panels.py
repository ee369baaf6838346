"""Potential flow past a body by constant-strength source panels (Hess and Smith, 1967).

The velocity U e_x + grad phi is free of divergence and rotation outside the body and tangential to it. phi comes
from sources of constant strength on each quadrilateral of a structured surface grid, cut into two flat triangles
whose influence is exact: at x, a triangle with unit normal n and strength 4 pi induces

    integral of (x - y) / |x - y|^3 dy  =  Omega n + sum over its edges of L m,    L = log((r1 + r2 + l) / (r1 + r2 - l)),

Omega the solid angle that it subtends (positive before its outer side), l the length of an edge, r1 and r2 the
distances to the edge's ends, m the unit vector in the triangle's plane that points out across the edge. Symmetry
planes are mirror images of the sources. Strengths follow from u . n = 0 at the panels' centres, one equation each.

A grid is nodes [I + 1, J + 1, 3]: the first index runs along the stream, the second around, such that the first
direction crossed with the second points into the body. A row may shrink to a point (a closed end). Panels are numbered
in row-major order, N = I J; E edges, T targets of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.sparse as sparse

MIRROR_Y, MIRROR_Z = np.array([1.0, -1.0, 1.0]), np.array([1.0, 1.0, -1.0])
FREE = (np.ones(3), MIRROR_Y)  # the half body at y > 0 and its mirror image
GROUND = (*FREE, MIRROR_Z, MIRROR_Y * MIRROR_Z)  # and both below the ground z = 0
BLOCK = 64  # targets at a time: their distances to all nodes stay in the cache
EVERY, LOW, HIGH = slice(None), slice(None, -1), slice(1, None)
# (start, end) of the edges along [I, J+1], around [I+1, J] and of the diagonals [I, J]: indices into the nodes.
EDGE_ENDS = ((LOW, EVERY), (HIGH, EVERY)), ((EVERY, LOW), (EVERY, HIGH)), ((LOW, LOW), (HIGH, HIGH))


@dataclass(frozen=True)
class Panels:
    """Geometry of a grid; N panels, each made of the triangles [0] (0, 0) (1, 0) (1, 1) and [1] (0, 0) (1, 1) (0, 1)."""

    nodes: np.ndarray  # [I+1, J+1, 3]
    centres: np.ndarray  # [N, 3] mean of the four corners
    normals: np.ndarray  # [N, 3] unit, into the fluid; 0 for a panel without area
    triangle_areas: np.ndarray  # [2, N]
    triangle_vectors: np.ndarray  # [2, N, 3] normal of the triangle times twice its area

    @property
    def areas(self) -> np.ndarray:
        return self.triangle_areas.sum(0)


@dataclass(frozen=True)
class Flow:
    """Solution at the panels' centres, in units of the free stream."""

    velocity: np.ndarray  # [N, 3]
    pressure: np.ndarray  # [N] coefficient 1 - |u|^2
    leakage: float  # largest |u . n|


def build(nodes: np.ndarray) -> Panels:
    """Panels of nodes [I+1, J+1, 3]."""
    first, second = corner(nodes, 1, 0) - corner(nodes, 0, 0), corner(nodes, 0, 1) - corner(nodes, 0, 0)
    diagonal = corner(nodes, 1, 1) - corner(nodes, 0, 0)
    vectors = np.stack([np.cross(diagonal, first), np.cross(second, diagonal)]).reshape(2, -1, 3)
    return Panels(
        nodes=nodes,
        centres=sum((corner(nodes, *place) for place in np.ndindex(2, 2)), start=np.zeros((), nodes.dtype)).reshape(-1, 3) / 4,
        normals=unit(vectors.sum(0)),
        triangle_areas=np.linalg.norm(vectors, axis=-1) / 2,
        triangle_vectors=vectors,
    )


def corner(nodes: np.ndarray, first: int, second: int) -> np.ndarray:
    """One corner of every panel, [I, J, ...], from values [I+1, J+1, ...] at the nodes."""
    rows, columns = nodes.shape[0] - 1, nodes.shape[1] - 1
    return nodes[first:rows + first, second:columns + second]


def unit(vectors: np.ndarray) -> np.ndarray:
    """Vectors [..., 3] over their lengths; 0 stays 0."""
    length = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.where(length > 0, length, 1)


def solve(panels: Panels, images: tuple[np.ndarray, ...] = GROUND) -> Flow:
    """Flow past the body and its mirror images (of which the first is the body itself) in the stream e_x.

    Memory is 4 N^2 FP32 numbers. Time grows with N^2, that of the linear system (a fifth at N = 2048) with N^3.
    """
    influence = influences(panels, images)  # [3, T, N]
    system = np.einsum("ctn,tc->tn", influence, panels.normals.astype(np.float32))
    strength = np.linalg.solve(system, -panels.normals[:, 0].astype(np.float32))
    velocity = np.array([1.0, 0.0, 0.0]) + (influence @ strength).T.astype(np.float64)  # [N, 3]
    return Flow(
        velocity=velocity,
        pressure=1 - (velocity**2).sum(-1),
        leakage=float(np.abs((velocity * panels.normals).sum(-1)).max()),
    )


def influences(panels: Panels, images: tuple[np.ndarray, ...]) -> np.ndarray:
    """Velocity [3, T = N, N] at the centres that unit strengths (4 pi) of the panels and their images induce, FP32."""
    count = len(panels.centres)
    combine = combination(panels)
    total = np.zeros((3, count, count), np.float32)
    for start in range(0, count, BLOCK):
        inside = np.arange(start, min(start + BLOCK, count))
        for image in images:  # the image of a source acts on x as the source on the image of x, seen in the mirror
            own = inside if image is images[0] else None
            induced = combine @ kernels(panels, panels.centres[inside] * image, own)  # [3 N, T]
            mirrored = image[:, None, None].astype(np.float32) * induced.reshape(3, count, -1)
            total[:, start:start + BLOCK] += mirrored.transpose(0, 2, 1)
        total[:, inside, inside] += 2 * np.pi * panels.normals[inside].T  # a panel seen from its own outer side
    return total


def kernels(panels: Panels, targets: np.ndarray, own: np.ndarray | None) -> np.ndarray:
    """What `combination` combines, [E + 2 N, T] FP32: L of the edges (along, around, diagonal), Omega of the triangles.

    targets [T, 3]; own [T]: the panel whose centre each target is, whose Omega is left out: its sign would be rounding's.
    """
    nodes = panels.nodes[..., None].astype(np.float32)  # [I+1, J+1, 3, 1]
    squares = ((nodes - targets.T.astype(np.float32)) ** 2).sum(2)  # [I+1, J+1, T]
    distance = np.sqrt(squares)
    logs, products = [], []  # of each family of edges; a . b for the vectors from the target to the edge's ends
    for start, end in EDGE_ENDS:
        length = np.linalg.norm(panels.nodes[end] - panels.nodes[start], axis=-1)[..., None].astype(np.float32)
        way = distance[start] + distance[end]
        # A target on an edge has only one of its own: a diagonal, whose two triangles cancel there.
        beyond = np.maximum(way - length, np.float32(1e-6) * way)
        logs.append(np.log((way + length) / beyond))
        products.append((squares[start] + squares[end] - length**2) / 2)
    along, across, diagonal = products
    near, far = corner(distance, 0, 0), corner(distance, 1, 1)
    angles = []
    for triangle, third in enumerate((corner(distance, 1, 0), corner(distance, 0, 1))):
        # Edges opposite the near, far and third corner.
        opposite_near, opposite_far = (across[1:], along[:, :-1]) if triangle == 0 else (along[:, 1:], across[:-1])
        denominator = near * far * third + opposite_near * near + opposite_far * far + diagonal * third  # [I, J, T]
        height = _heights(panels, triangle, targets)
        angle = 2 * np.arctan2(height, denominator.reshape(height.shape))  # [N, T]
        if own is not None:
            angle[own, np.arange(len(own))] = 0
        angles.append(angle)
    return np.concatenate([part.reshape(-1, len(targets)) for part in (*logs, *angles)])


def _heights(panels: Panels, triangle: int, targets: np.ndarray) -> np.ndarray:
    """Height of targets [T, 3] over the triangles' planes, times twice the area, [N, T]."""
    vectors = panels.triangle_vectors[triangle]
    offset = (vectors * corner(panels.nodes, 0, 0).reshape(-1, 3)).sum(-1, keepdims=True)
    return (vectors @ targets.T - offset).astype(np.float32)


def combination(panels: Panels) -> sparse.csr_array:
    """The matrix [3 N, E + 2 N] that makes velocities of the kernels."""
    shapes = [panels.nodes[start].shape[:2] for start, _ in EDGE_ENDS]
    *firsts, num_edges = np.cumsum([0, *map(np.prod, shapes)])
    along, across, diagonal = (first + np.arange(np.prod(shape)).reshape(shape) for first, shape in zip(firsts, shapes))
    number = np.arange(len(panels.centres))
    near, far = corner(panels.nodes, 0, 0), corner(panels.nodes, 1, 1)
    columns, values = [], []
    for triangle, third in enumerate((corner(panels.nodes, 1, 0), corner(panels.nodes, 0, 1))):
        normal = unit(panels.triangle_vectors[triangle])
        # Counter-clockwise, seen from the fluid.
        edges = (((near, far, diagonal), (far, third, across[1:]), (third, near, along[:, :-1])) if triangle == 0 else
                 ((near, third, across[:-1]), (third, far, along[:, 1:]), (far, near, diagonal)))
        for start, end, index in edges:
            columns.append(index.ravel())
            values.append(np.cross(unit((end - start).reshape(-1, 3)), normal))
        columns.append(num_edges + triangle * number.size + number)
        values.append(normal)
    entries = np.concatenate(values).T  # [3, 8 N], one row an axis
    rows = np.tile(number, 8) + number.size * np.arange(3)[:, None]
    places = np.broadcast_to(np.concatenate(columns), rows.shape)
    size = (3 * number.size, num_edges + 2 * number.size)
    return sparse.coo_array((entries.ravel(), (rows.ravel(), places.ravel())), size).tocsr().astype(np.float32)
