"""Darcy flow through a random two-phase medium: generator of the FNO benchmark (Li et al., arXiv 2010.08895).

    -div(a grad u) = 1 on the unit square, u = 0 on its boundary,

where a = 12 wherever a Gaussian random field g is >= 0, and 3 elsewhere. g has zero mean and the covariance
tau^(2 alpha - 2) (-Laplace + tau^2)^(-alpha), alpha = 2, tau = 3, with homogeneous Neumann conditions.

Two grids of K x K points are in play. Coefficient and solution are reported at cell centres (i + 1/2) / K;
the equation is solved by the five-point finite-volume scheme at nodes i / (K - 1); cubic not-a-knot splines
lead from one to the other. Axis 0 of every array is the first coordinate.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sparse
from scipy.fft import idctn
from scipy.interpolate import CubicSpline
from scipy.sparse.linalg import splu

from flarepp.solvers.sampling import RejectedSample

BENCH_ID = 1
SETTINGS: dict[str, Any] = {
    "alpha": 2.0,
    "tau": 3.0,
    "coefficient_low": 3.0,
    "coefficient_high": 12.0,
    "forcing": 1.0,
    "threshold_at_nodes_below": 241,
    "max_residual": 1e-9,
}


def sample(generator: np.random.Generator, resolution: int) -> dict[str, np.ndarray]:
    """One sample: {"coeff": [K, K] of 3 and 12, "sol": [K, K]} at cell centres, float64, K = resolution.

    RejectedSample when the solution is not finite or does not satisfy the discrete equation.
    """
    field = gaussian_field(generator.standard_normal((resolution, resolution)))
    nodal = node_coefficient(field)
    solution = solve(nodal)
    residual = relative_residual(nodal, solution)
    if not residual < SETTINGS["max_residual"]:  # written so that NaN is rejected too
        raise RejectedSample(
            f"relative residual {residual:.1e}, expected below {SETTINGS['max_residual']:.0e}"
        )
    return {
        "coeff": two_phase(field),
        "sol": _resample(solution, nodes(resolution), cell_centres(resolution)),
    }


def cell_centres(resolution: int) -> np.ndarray:
    return (np.arange(resolution) + 0.5) / resolution


def nodes(resolution: int) -> np.ndarray:
    return np.arange(resolution) / (resolution - 1)


def gaussian_field(noise: np.ndarray) -> np.ndarray:
    """Gaussian random field [K, K] at cell centres; white noise [K, K] gives its cosine coefficients."""
    resolution, alpha, tau = len(noise), SETTINGS["alpha"], SETTINGS["tau"]
    squared = np.arange(resolution) ** 2
    spectrum = tau ** (alpha - 1) * (np.pi**2 * (squared[:, None] + squared) + tau**2) ** (-alpha / 2)
    modes = resolution * spectrum * noise  # [K, K]
    modes[0, 0] = 0.0
    return idctn(modes, norm="ortho")


def two_phase(field: np.ndarray) -> np.ndarray:
    """Coefficient of a field: 12 where it is >= 0, else 3."""
    return np.where(field >= 0, SETTINGS["coefficient_high"], SETTINGS["coefficient_low"])


def node_coefficient(field: np.ndarray) -> np.ndarray:
    """Coefficient [K, K] at the nodes from the random field [K, K] at cell centres.

    The original recipe interpolates the coefficient itself; the spline overshoots at the jumps, and where it
    is extrapolated to the boundary a few faces become negative. On fine grids this hardly shows (0.04 % of
    the solution at K = 421). Below K = 241 the smooth field is interpolated instead and then cut at zero.
    """
    resolution = len(field)
    grids = cell_centres(resolution), nodes(resolution)
    if resolution < SETTINGS["threshold_at_nodes_below"]:
        return two_phase(_resample(field, *grids))
    return _resample(two_phase(field), *grids)


def _resample(values: np.ndarray, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Tensor-product cubic spline of values [K, K] on old x old, evaluated (or extrapolated) on new x new."""
    for axis in (0, 1):
        values = CubicSpline(old, values, axis=axis, bc_type="not-a-knot")(new)
    return values


def face_coefficients(nodal: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Arithmetic means on the faces of interior nodes: across axis 0 [K-1, K-2], across axis 1 [K-2, K-1]."""
    return (nodal[1:, 1:-1] + nodal[:-1, 1:-1]) / 2, (nodal[1:-1, 1:] + nodal[1:-1, :-1]) / 2


def assemble(nodal: np.ndarray) -> sparse.csc_array:
    """Five-point matrix [(K-2)^2, (K-2)^2] of -div(a grad .) for the interior nodes, in row-major order."""
    size = len(nodal) - 2
    first, second = (face * (len(nodal) - 1) ** 2 for face in face_coefficients(nodal))
    diagonal = first[1:] + first[:-1] + second[:, 1:] + second[:, :-1]  # [K-2, K-2]
    along_second = -second[:, 1:].copy()
    along_second[:, -1] = 0.0  # the last node of a row and the first of the next are no neighbours
    along_second, along_first = along_second.ravel()[:-1], -first[1:-1].ravel()
    return sparse.diags_array(
        [diagonal.ravel(), along_second, along_second, along_first, along_first],
        offsets=[0, 1, -1, size, -size],
        format="csc",
    )


def solve(
    nodal: np.ndarray, forcing: np.ndarray | float = SETTINGS["forcing"], boundary: np.ndarray | float = 0.0
) -> np.ndarray:
    """Solve -div(a grad u) = forcing with u = boundary on the boundary.

    nodal [K, K] coefficient at the nodes; forcing and boundary scalars or [K, K] (only their interior, or
    only their outer ring, counts). Returns u [K, K].
    """
    solution = np.array(np.broadcast_to(boundary, nodal.shape), dtype=float)
    solution[1:-1, 1:-1] = 0.0  # what is left are the boundary values, which the load takes up
    load = np.broadcast_to(forcing, nodal.shape)[1:-1, 1:-1] + divergence(nodal, solution)  # [K-2, K-2]
    # Symmetric positive definite: minimum degree on the symmetric pattern and diagonal pivots fill in least.
    factors = splu(
        assemble(nodal), permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options={"SymmetricMode": True}
    )
    solution[1:-1, 1:-1] = factors.solve(load.ravel()).reshape(load.shape)
    return solution


def divergence(nodal: np.ndarray, solution: np.ndarray) -> np.ndarray:
    """Discrete div(a grad u) at the interior nodes [K-2, K-2], from u [K, K]."""
    first, second = face_coefficients(nodal)
    flux_first = first * np.diff(solution, axis=0)[:, 1:-1]  # [K-1, K-2]
    flux_second = second * np.diff(solution, axis=1)[1:-1]  # [K-2, K-1]
    return (np.diff(flux_first, axis=0) + np.diff(flux_second, axis=1)) * (len(nodal) - 1) ** 2


def relative_residual(nodal: np.ndarray, solution: np.ndarray, forcing: float = SETTINGS["forcing"]) -> float:
    """‖div(a grad u) + forcing‖ / ‖forcing‖ over the interior nodes."""
    return float(np.sqrt(np.mean((divergence(nodal, solution) + forcing) ** 2)) / abs(forcing))
