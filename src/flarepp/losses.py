"""Relative L2 error, its training loss and Darcy's gradient term (FLARE study, arXiv 2508.12594); cross-entropy for classes.

    error(p, t) = ||p - t||_2 / ||t||_2 over all points and channels of one sample, on decoded fields
    Darcy loss  = mean error(p, t) + w [ mean error(Dx(m p), Dx t) + mean error(Dy(m p), Dy t) ],  w = 0.1
D are central differences with zero padding on the s x s grid, step 1/s; m zeroes the outermost ring of the prediction.
Everything runs in FP32 or better: in half precision the sum of squares overflows and the error reads 0.

A loss of points that are divided among processes is that of all points: `norms` turns the norms of a part into those of the
whole, `whole` puts the parts of a field together. Both are the identity for one process.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def identity(x: Tensor) -> Tensor:
    """What one process makes of its part of the points: it is the whole."""
    return x


def relative_l2(prediction: Tensor, target: Tensor, norms: Callable[[Tensor], Tensor] = identity) -> Tensor:
    """Error of each sample, [B], from prediction and target [B, ...]; FP32, or FP64 for FP64 targets."""
    target = target.flatten(1).to(torch.promote_types(target.dtype, torch.float32))  # [B, N * c]
    difference = prediction.flatten(1).to(target.dtype) - target
    error, size = norms(torch.stack([torch.linalg.vector_norm(part, dim=1) for part in (difference, target)]))
    return error / size


def mean_squared_error(prediction: Tensor, target: Tensor, *, count: int) -> Tensor:
    """This process's part of the mean squared error: its sum of squares, in FP32 or better, over `count`, the number of
    elements of all processes together. Padding is 0 in both and not counted."""
    target = target.to(torch.promote_types(target.dtype, torch.float32))
    return (prediction.to(target.dtype) - target).square().sum() / count


def central_differences(field: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """(d/d axis 1, d/d axis 0) of field [B, N, 1] on a row-major grid, each [B, *grid]; zeros beyond the edge."""
    rows, columns = grid
    padded = F.pad(field.unflatten(1, grid)[..., 0], (1, 1, 1, 1))  # [B, rows + 2, columns + 2]
    along_columns = (padded[:, 1:-1, 2:] - padded[:, 1:-1, :-2]) * (columns / 2)
    along_rows = (padded[:, 2:, 1:-1] - padded[:, :-2, 1:-1]) * (rows / 2)
    return along_columns, along_rows


def training_loss(prediction: Tensor, target: Tensor, *, gradient_weight: float, grid: tuple[int, ...] | None,
                  norms: Callable[[Tensor], Tensor] = identity, whole: Callable[[Tensor], Tensor] = identity) -> Tensor:
    """Mean relative L2 over the batch, plus `gradient_weight` times the gradient term on a two-dimensional grid.

    prediction, target: decoded [B, N, c]. The gradient term needs one channel and a grid; ValueError otherwise.
    """
    target = target.to(torch.promote_types(target.dtype, torch.float32))
    prediction = prediction.to(target.dtype)
    loss = relative_l2(prediction, target, norms).mean()
    if gradient_weight == 0:
        return loss
    if grid is None or len(grid) != 2 or target.shape[-1] != 1:
        raise ValueError(f"gradient_weight {gradient_weight} needs one channel on a 2-D grid; "
                         f"got grid {grid}, {target.shape[-1]} channels")
    prediction, target = whole(torch.cat([prediction, target], -1)).split(1, -1)  # [B, N, 1] of all points
    interior = F.pad(target.new_ones([extent - 2 for extent in grid]), (1, 1, 1, 1)).flatten()[:, None]  # [N, 1]
    pairs = zip(central_differences(prediction * interior, grid), central_differences(target, grid))
    return loss + gradient_weight * sum(relative_l2(ours, theirs).mean() for ours, theirs in pairs)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean of -log softmax(logits)[label] over the batch, from logits [B, K] and labels [B], in FP32 or better."""
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels)
