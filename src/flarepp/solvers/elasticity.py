"""A square cell with a random void, pulled from above: generator of the Geo-FNO benchmark (arXiv 2207.05209).

Unit square with a void around its centre; the bottom is clamped, the top carries the dead traction (0, 100),
sides and void are free. The material is an incompressible Rivlin-Saunders solid in plane stress; per unit
area of the undeformed cell it stores

    W(C) = C1 (I1 - 3) + C2 (I2 - 3),   C = F^T F (2 x 2),   C33 = 1 / det C,
    I1 = tr C + 1 / det C,   I2 = det C + tr C / det C,   S = 2 dW/dC,   P = F S,   sigma = F S F^T.

C33 takes up the incompressibility, so displacements are the only unknowns. Biquadratic quadrilaterals
(scikit-fem) with 3 x 3 Gauss points; the von Mises norm of sigma at these points is the target. Lengths and
stresses have no unit.

That the published array holds this stress, and the law of the void's shape, are inferred from its
statistics; the mesh here is an O-grid with as many Gauss points as the published mesh (36 x 3 x 9 = 972),
which is unstructured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.sparse.linalg import splu
from skfem import (
    Basis,
    BilinearForm,
    ElementQuad2,
    ElementVector,
    FacetBasis,
    LinearForm,
    MeshQuad,
    MeshQuad2,
)
from skfem.assembly import Dofs

from flarepp.solvers.sampling import RejectedSample

BENCH_ID = 2
SETTINGS: dict[str, Any] = {
    "c1": 1.863e5,
    "c2": 9.79e3,
    "traction": 100.0,
    "radius_min": 0.2,
    "radius_range": 0.2,
    "num_modes": 5,
    "rr_angles": 42,
    "tolerance": 1e-9,
    "max_steps": 8,
}
QUADRATURE_ORDER = 5  # 3 x 3 Gauss points
IDENTITY = np.eye(2)[:, :, None, None]  # [2, 2, 1, 1]


def sample(generator: np.random.Generator, mesh: tuple[int, int]) -> dict[str, np.ndarray]:
    """One sample on `mesh` = (angular, radial) elements, float64, N = 9 * angular * radial Gauss points.

    Returns {"XY": [N, 2] undeformed positions, "sigma": [N] von Mises stress, "rr": [42] radius of the void
    at equal angles from 0 to 2 pi, both included, "theta": [10] Fourier coefficients of the void}.
    RejectedSample for an inverted element or when Newton's method does not converge.
    """
    coefficients = generator.standard_normal(2 * SETTINGS["num_modes"])
    grid = build_mesh(lambda angle: void_radius(coefficients, angle), mesh)
    basis = Basis(grid, ElementVector(ElementQuad2()), intorder=QUADRATURE_ORDER)
    require_positive(basis.mapping.detDF(basis.X), "undeformed")
    state = stretch(basis)
    require_positive(_determinant(deformation(basis, state.displacement)), "deformed")
    if not state.residual < SETTINGS["tolerance"]:  # written so that NaN is rejected too
        raise RejectedSample(
            f"relative residual {state.residual:.1e} after {state.steps} Newton steps, "
            f"expected below {SETTINGS['tolerance']:.0e}"
        )
    points = np.asarray(basis.global_coordinates())  # [2, E, 9]
    return {
        "XY": points.reshape(2, -1).T,
        "sigma": von_mises(basis, state.displacement).ravel(),
        "rr": void_radius(coefficients, np.linspace(0, 2 * np.pi, SETTINGS["rr_angles"])),
        "theta": coefficients,
    }


def require_positive(determinant: np.ndarray, configuration: str) -> None:
    """RejectedSample unless the Jacobian determinant [E, Q] is positive at every Gauss point."""
    if not determinant.min() > 0:
        raise RejectedSample(
            f"inverted element in the {configuration} mesh: smallest Jacobian {determinant.min():.1e}"
        )


# --- geometry


def void_radius(coefficients: np.ndarray, angle: np.ndarray) -> np.ndarray:
    """Radius of the void, 0.2 to 0.4, at polar angles [A] about the centre.

    coefficients [10]: those of cos t .. cos 5t, then those of sin t .. sin 5t.
    """
    mode = np.arange(1, SETTINGS["num_modes"] + 1)
    scale = 4 / np.sqrt(np.pi * (mode**2 + 9))
    cosine, sine = coefficients.reshape(2, -1)
    phase = np.outer(mode, angle)  # [5, A]
    field = (scale * cosine) @ np.cos(phase) + (scale * sine) @ np.sin(phase)
    return SETTINGS["radius_min"] + SETTINGS["radius_range"] / (1 + np.exp(field))


@dataclass(frozen=True)
class Topology:
    """What O-grids of one size share: connectivity, and each node's place in the (angle, layer) lattice."""

    quads: np.ndarray  # [4, E] vertices of each element
    angle: np.ndarray  # [D] from 0 to 2 * angular - 1, counter-clockwise from the lower right corner
    layer: np.ndarray  # [D] from 0 (void) to 2 * radial (square)
    outer: np.ndarray  # [2, 2 * angular] nodes on the square


@lru_cache(maxsize=8)
def topology(mesh: tuple[int, int]) -> Topology:
    """Topology of `mesh` = (angular, radial) elements. ValueError unless angular is a multiple of 4."""
    angular, radial = mesh
    if angular < 4 or angular % 4 or radial < 1:
        raise ValueError(
            f"mesh: expected [angular, radial] elements, angular a multiple of 4 so that corners are nodes, "
            f"got {list(mesh)}"
        )
    first, second = (
        index.ravel() for index in np.meshgrid(np.arange(angular), np.arange(radial), indexing="ij")
    )
    quads = np.stack(
        [(first + i) % angular + angular * (second + j) for i, j in ((0, 0), (0, 1), (1, 1), (1, 0))]
    )
    dofs = Dofs(MeshQuad(np.zeros((2, angular * (radial + 1))), quads), ElementQuad2())
    angle, layer = np.zeros(dofs.N, int), np.zeros(dofs.N, int)
    for node, (outwards, around) in zip(dofs.element_dofs, ElementQuad2.doflocs, strict=True):
        angle[node] = (2 * first + int(2 * around)) % (2 * angular)
        layer[node] = 2 * second + int(2 * outwards)
    step = np.arange(angular // 2) / (angular // 2)  # along one side
    low, high = np.zeros_like(step), np.ones_like(step)
    sides = [(high, step), (1 - step, high), (low, 1 - step), (step, low)]  # right, top, left, bottom
    return Topology(
        np.ascontiguousarray(quads), angle, layer, np.concatenate([np.stack(side) for side in sides], axis=1)
    )


def build_mesh(
    radius: Callable[[np.ndarray], np.ndarray], mesh: tuple[int, int], fractions: np.ndarray | None = None
) -> MeshQuad2:
    """O-grid between the void and the square.

    radius: polar angles [A] -> radii [A] of the void about (0.5, 0.5). Each spoke of nodes has one polar
    angle; its inner node lies on the exact curve. fractions [2 * radial + 1] from 0 to 1 place the nodes
    along a spoke (default: evenly).
    """
    shape = topology(mesh)
    x, y = shape.outer - 0.5
    angle = np.arctan2(y, x)
    inner = 0.5 + radius(angle) * np.stack([np.cos(angle), np.sin(angle)])  # [2, 2 * angular]
    fractions = np.linspace(0, 1, 2 * mesh[1] + 1) if fractions is None else fractions
    weight = fractions[shape.layer]  # [D]
    positions = (1 - weight) * inner[:, shape.angle] + weight * shape.outer[:, shape.angle]  # [2, D]
    return MeshQuad2(np.ascontiguousarray(positions), shape.quads)


# --- material
# F is [2, 2, E, Q]: row, column, element, Gauss point.


def _determinant(tensor: np.ndarray) -> np.ndarray:
    return tensor[0, 0] * tensor[1, 1] - tensor[0, 1] * tensor[1, 0]


def _invariants(F: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """C = F^T F [2, 2, E, Q], its trace and its determinant [E, Q]."""
    C = np.einsum("ki...,kj...->ij...", F, F)
    return C, C[0, 0] + C[1, 1], _determinant(C)


def energy(F: np.ndarray) -> np.ndarray:
    """Stored energy W [E, Q]."""
    _, trace, det = _invariants(F)
    return SETTINGS["c1"] * (trace + 1 / det - 3) + SETTINGS["c2"] * (det + trace / det - 3)


def _second_piola(F: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """S = alpha 1 + beta C^-1 [2, 2, E, Q], with beta [E, Q] and C^-1 for the tangent."""
    c1, c2 = SETTINGS["c1"], SETTINGS["c2"]
    C, trace, det = _invariants(F)
    inverse = np.array([[C[1, 1], -C[0, 1]], [-C[1, 0], C[0, 0]]]) / det
    beta = 2 * (c2 * det - (c1 + c2 * trace) / det)
    return 2 * (c1 + c2 / det) * IDENTITY + beta * inverse, beta, inverse


def first_piola(F: np.ndarray) -> np.ndarray:
    """P = dW/dF [2, 2, E, Q]."""
    return np.einsum("ik...,kj...->ij...", F, _second_piola(F)[0])


def tangent(F: np.ndarray) -> np.ndarray:
    """dP/dF [2, 2, 2, 2, E, Q], the last index pair belongs to F."""
    c1, c2 = SETTINGS["c1"], SETTINGS["c2"]
    _, trace, det = _invariants(F)
    S, beta, inverse = _second_piola(F)
    result = np.empty((2, 2) + F.shape)
    for row in range(2):
        for column in range(2):
            # dF has a single 1 at (row, column): then F^T dF is column `column` filled with row `row` of F.
            half = np.zeros_like(F)
            half[:, column] = F[row]
            dC = half + half.swapaxes(0, 1)
            dtrace = dC[0, 0] + dC[1, 1]
            ddet = det * np.einsum("ij...,ij...->...", inverse, dC)
            dinverse = -np.einsum("ij...,jk...->ik...", inverse, np.einsum("ij...,jk...->ik...", dC, inverse))
            dalpha = -2 * c2 * ddet / det**2
            dbeta = 2 * (c2 * ddet + (c1 + c2 * trace) * ddet / det**2 - c2 * dtrace / det)
            dS = dalpha * IDENTITY + dbeta * inverse + beta * dinverse
            result[:, :, row, column] = np.einsum("ik...,kj...->ij...", F, dS)
            result[row, :, row, column] += S[column]
    return result


# --- equilibrium


def _stiffness(trial: Any, test: Any, data: Any) -> np.ndarray:
    stress = np.einsum("ijkl...,kl...->ij...", data["tangent"], trial.grad)
    return np.einsum("ij...,ij...->...", stress, test.grad)


def _internal_force(test: Any, data: Any) -> np.ndarray:
    return np.einsum("ij...,ij...->...", data["stress"], test.grad)


def _upward(test: Any, _: Any) -> np.ndarray:
    return test[1]


@dataclass(frozen=True)
class Equilibrium:
    """displacement [D], internal nodal forces [D], relative residual, number of Newton steps."""

    displacement: np.ndarray
    force: np.ndarray
    residual: float
    steps: int


def deformation(basis: Basis, displacement: np.ndarray) -> np.ndarray:
    """Deformation gradient F [2, 2, E, Q] at the Gauss points."""
    return IDENTITY + np.asarray(basis.interpolate(displacement).grad)


def equilibrium(basis: Basis, load: np.ndarray, fixed: np.ndarray, start: np.ndarray) -> Equilibrium:
    """Newton's method for internal force = load.

    load [D] nodal forces; fixed [k] numbers of the degrees of freedom that keep their value in `start` [D].
    The residual is relative to load and reactions. It ends below the tolerance or after `max_steps`; the
    caller looks at the residual.
    """
    displacement = start.copy()
    free = np.setdiff1d(np.arange(basis.N), fixed)
    steps = 0
    while True:
        F = deformation(basis, displacement)
        force = LinearForm(_internal_force).assemble(basis, stress=first_piola(F))
        imbalance = (load - force)[free]
        residual = np.linalg.norm(imbalance) / (np.linalg.norm(load) + np.linalg.norm(force[fixed]))
        if not residual >= SETTINGS["tolerance"] or steps == SETTINGS["max_steps"]:  # NaN ends it too
            return Equilibrium(displacement, force, float(residual), steps)
        matrix = BilinearForm(_stiffness).assemble(basis, tangent=tangent(F)).tocsr()[free][:, free].tocsc()
        factors = splu(
            matrix, permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options={"SymmetricMode": True}
        )
        displacement[free] += factors.solve(imbalance)
        steps += 1


def stretch(basis: Basis, traction: float = SETTINGS["traction"]) -> Equilibrium:
    """Equilibrium of a cell that is clamped below and pulled by `traction` per undeformed length above."""
    grid = basis.mesh
    top = grid.facets_satisfying(lambda x: np.isclose(x[1], 1), boundaries_only=True)
    bottom = grid.facets_satisfying(lambda x: np.isclose(x[1], 0), boundaries_only=True)
    load = traction * LinearForm(_upward).assemble(FacetBasis(grid, basis.elem, facets=top, intorder=QUADRATURE_ORDER))
    return equilibrium(basis, load, basis.get_dofs(bottom).all(), np.zeros(basis.N))


def von_mises(basis: Basis, displacement: np.ndarray) -> np.ndarray:
    """Plane-stress von Mises norm [E, Q] of the Cauchy stress (the volume does not change)."""
    F = deformation(basis, displacement)
    stress = np.einsum("ik...,jk...->ij...", first_piola(F), F)
    xx, yy, xy = stress[0, 0], stress[1, 1], stress[0, 1]
    return np.sqrt(xx**2 - xx * yy + yy**2 + 3 * xy**2)
