"""Pathfinder-32: do two marked ends belong to one dashed contour? (arXiv 1805.08315; Long Range Arena, 2011.04006)

An image has two target contours of `contour_length` paddles that grow in turn, and up to `num_distractors` short ones. A
paddle is a line of LENGTH from its pivot p at an angle a. The next pivot is ceil(p + (LENGTH + 2 MARGIN) u(a)); its angle
is that of a pixel on the circle of radius LENGTH + MARGIN around it, drawn with

    weight = cos^2(min(CONTINUITY |change of angle|, pi / 2)) (1 - occupied within MARGIN of the pixel)

and refused where its surroundings and what is occupied add up to REFUSED. A paddle occupies its surroundings once its
contour has left it. A target that cannot go on discards the image, a distractor starts anew. The label says whether the
markers are the two ends of one target or belong to both. This is our own renderer after that description; it draws not
the published images.

Images grow many at once and drop out as they fail. Occupancy is in 1 / 255; everything is drawn on a window with REACH
pixels around it, so that no stamp leaves it.
"""

from __future__ import annotations

import functools

import numpy as np

from flarepp.data.lra.sequences import Sequences, Task, divided
from flarepp.solvers import sampling

OPTIONS = ("num_dev", "resolution", "contour_length", "seed_distance", "num_distractors", "distractor_length")
PUBLISHED_FILES = ()  # the 200,000 pictures are read from the processed files alone
LICENCE = "generated here"
LABEL, NUM_CLASSES, NUM_SYMBOLS = "Pathfinder", 2, 256
BENCH_ID = 8
PADDING = 1  # pixels at the edge that stay free
LENGTH, THICKNESS, MARGIN, FINE = 2, 0.5, 1, 2  # of a paddle, in pixels; drawn FINE times finer
MARKER_RADIUS = 1.5
CONTINUITY = 1.0
RINGING = 0.05  # of the filter, is cut
REFUSED = 459  # 1.8
PADDLE_TRIES, SNAKE_TRIES, SEED_TRIES = 3, 5, 64
TARGET, DISTRACTOR, MARKER = 1.5, 2.0, 1.0  # brightness
REACH = 5
CHUNK = 500  # images made from one generator
STARTS = 2000  # images begun together; about one in ten has room for its contours
EMPTY = 20  # times in a row that none of them may have


def ball(radius: float, least: float = 0) -> np.ndarray:
    """Pixels [n, 2] whose distance from the origin is from `least` up to `radius`."""
    pixels = np.argwhere(np.ones((2 * REACH + 1, 2 * REACH + 1))) - REACH
    distance = np.hypot(*pixels.T)
    return pixels[(least <= distance) & (distance <= radius)]


def direction(degree: np.ndarray) -> np.ndarray:
    """Unit vectors [..., 2] as (row, column)."""
    angle = np.deg2rad(degree)
    return np.stack([np.sin(angle), np.cos(angle)], -1)


@functools.cache
def stamps() -> tuple[np.ndarray, np.ndarray]:
    """Lines [360, K, K] in 0 .. 1 and their surroundings [360, K, K] in 0 .. 255 around the pivot, for each degree.

    K = 2 REACH + 1. Drawn FINE times finer and reduced with a Lanczos filter of three lobes.
    """
    fine = np.arange(-FINE * REACH, FINE * REACH + 1) / FINE
    rows, columns = np.meshgrid(fine, fine, indexing="ij")
    coarse = np.arange(-REACH, REACH + 1)
    offset = coarse[:, None] - fine
    weights = np.where(np.abs(offset) < 3, np.sinc(offset) * np.sinc(offset / 3), 0)
    weights /= weights.sum(1, keepdims=True)
    u = direction(np.arange(360))[:, :, None, None]
    along = np.clip(u[:, 0] * rows + u[:, 1] * columns, 0, LENGTH)
    distance = np.hypot(rows - along * u[:, 0], columns - along * u[:, 1])  # [360, fine, fine]
    lines, masks = (np.clip(weights @ (distance <= width + 1e-9) @ weights.T, 0, 1) for width in (THICKNESS / 2, MARGIN))
    lines, masks = (np.where(part < RINGING, 0, part) for part in (lines, masks))
    return lines.astype(np.float32), np.rint(255 * masks).astype(np.int16)


CIRCLE = ball(LENGTH + MARGIN + 0.5, LENGTH + MARGIN - 0.5)
NEAR = CIRCLE[:, None] + ball(MARGIN)  # [circle, disc, 2]
CIRCLE_DEGREES = np.rint(np.rad2deg(np.arctan2(*CIRCLE.T))).astype(int) % 360


WINDOW = np.stack(np.meshgrid(*(np.arange(-REACH, REACH + 1),) * 2, indexing="ij"), -1)  # [K, K, 2]


def places(canvas: np.ndarray, pivot: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Indices [B, ...] into the flat canvas [B, E, E] of pivot [B, 2] + offsets [..., 2]."""
    extent = canvas.shape[1]
    start = (np.arange(len(canvas)) * extent + pivot[:, 0]) * extent + pivot[:, 1]
    return start.reshape(-1, *(1,) * (offsets.ndim - 1)) + (offsets[..., 0] * extent + offsets[..., 1])


def around(canvas: np.ndarray, pivot: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Values [B, ...] of canvas [B, E, E] at pivot [B, 2] + offsets [..., 2]."""
    return canvas.reshape(-1).take(places(canvas, pivot, offsets))


def paint(canvas: np.ndarray, pivot: np.ndarray, patch: np.ndarray) -> None:
    """Lay patch [B, K, K] on canvas [B, E, E] around pivot [B, 2]; the larger value stays."""
    index = places(canvas, pivot, WINDOW)
    canvas.reshape(-1)[index] = np.maximum(canvas.reshape(-1).take(index), patch)


def next_paddle(generator: np.random.Generator, mask: np.ndarray, pivot: np.ndarray,
                degree: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The next paddle after one at pivot [B, 2], degree [B]: whether there is one [B], pivot and degree."""
    step = np.ceil((LENGTH + 2 * MARGIN) * direction(degree) - 1e-9).astype(int)
    pivot = pivot + step
    clipped = np.clip(pivot, REACH, mask.shape[1] - REACH - 1)
    found, outside = np.zeros(len(mask), bool), (pivot != clipped).any(1)
    occupied = around(mask, clipped, NEAR).max(2) / 255  # [B, circle]
    change = np.abs((CIRCLE_DEGREES - degree[:, None] + 180) % 360 - 180)
    weight = np.cos(np.minimum(CONTINUITY * np.deg2rad(change), np.pi / 2)) ** 2 * (1 - occupied)
    total = weight.cumsum(1)
    possible, taken, degree = ~outside & (total[:, -1] > 1e-9), around(mask, clipped, WINDOW), degree.copy()
    for _ in range(PADDLE_TRIES):
        drawn = generator.random(len(mask)) * total[:, -1]
        candidate = CIRCLE_DEGREES[(total <= drawn[:, None]).sum(1).clip(max=len(CIRCLE) - 1)]
        fits = possible & ~found & ((taken + stamps()[1][candidate]).max((1, 2)) < REFUSED)
        degree[fits], found = candidate[fits], found | fits
    return found, clipped, degree


def grow(generator: np.random.Generator, mask: np.ndarray, pivot: np.ndarray, degree: np.ndarray,
         length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Contours of `length` paddles from first ones at pivot [B, S, 2], degree [B, S], S of them in turn on one window.

    Returns those of the B windows on which all of them had room, [A], their masks, and pivots [A, S, length, 2] and degrees
    [A, S, length].
    """
    kept = np.arange(len(mask))
    pivots, degrees = (np.repeat(part[:, :, None], length, 2) for part in (pivot, degree))
    for place in range(1, length):
        for snake in range(pivots.shape[1]):
            last = pivots[:, snake, place - 1], degrees[:, snake, place - 1]
            found, *paddle = next_paddle(generator, mask, *last)
            kept, mask, pivots, degrees = (part[found] for part in (kept, mask, pivots, degrees))
            pivots[:, snake, place], degrees[:, snake, place] = (part[found] for part in paddle)
            paint(mask, last[0][found], stamps()[1][last[1][found]])
    for snake in range(pivots.shape[1]):
        paint(mask, pivots[:, snake, -1], stamps()[1][degrees[:, snake, -1]])
    return kept, mask, pivots, degrees


@functools.cache
def footprints() -> np.ndarray:
    """Pixels [360, n, 2] of each line, the first repeated where there are fewer."""
    found = [np.argwhere(line > 0) - REACH for line in stamps()[0]]
    longest = max(map(len, found))
    return np.stack([np.concatenate([pixels, np.repeat(pixels[:1], longest - len(pixels), 0)]) for pixels in found])


def first_paddles(generator: np.random.Generator, mask: np.ndarray,
                  border: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A random degree and a uniform one of the pixels at least `border` from the edge where its line is on free ground:
    whether there is one [B], pivot [B, 2] and degree [B]."""
    least, most = border + REACH, mask.shape[1] - border - REACH
    degree, pivot = generator.integers(0, 360, len(mask)), np.zeros((len(mask), 2), int)
    waiting = np.arange(len(mask))
    for _ in range(SEED_TRIES):
        pivot[waiting] = generator.integers(least, most, (len(waiting), 2))
        pixels = pivot[waiting, None] + footprints()[degree[waiting]]  # [W, n, 2]
        free = (mask[waiting[:, None], pixels[..., 0], pixels[..., 1]] == 0).all(1)
        waiting = waiting[~(free & ((pixels >= least) & (pixels < most)).all((1, 2)))]
    return ~np.isin(np.arange(len(mask)), waiting), pivot, degree


def targets(generator: np.random.Generator, resolution: int, length: int,
            seed_distance: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As `grow`, from STARTS empty windows, two contours each that begin `seed_distance` apart near the centre."""
    mask = np.full((STARTS, *[resolution + 2 * REACH] * 2), 255, np.int16)
    mask[:, REACH + PADDING:-REACH - PADDING, REACH + PADDING:-REACH - PADDING] = 0
    found, first, degree = first_paddles(generator, mask, 2 * seed_distance)
    mask, first, degree = mask[found], first[found], degree[found]
    second = first + np.rint(seed_distance * direction(generator.integers(0, 360, len(mask)))).astype(int)
    degrees = np.stack([degree, generator.integers(0, 360, len(mask))], 1)
    return grow(generator, mask, np.stack([first, second], 1), degrees, length)[1:]


def draw(canvas: np.ndarray, pivots: np.ndarray, degrees: np.ndarray, brightness: float) -> None:
    """Paint paddles at pivots [B, n, 2], degrees [B, n]."""
    for pivot, degree in zip(np.moveaxis(pivots, 1, 0), degrees.T):
        paint(canvas, pivot, brightness * stamps()[0][degree])


def distract(generator: np.random.Generator, canvas: np.ndarray, mask: np.ndarray, length: int) -> None:
    """Add one distractor to every window that has room for it."""
    waiting = np.arange(len(mask))
    for _ in range(SNAKE_TRIES):
        found, pivot, degree = first_paddles(generator, mask[waiting], PADDING)
        begun = waiting[found]
        kept, grown, pivots, degrees = grow(generator, mask[begun], pivot[found][:, None], degree[found][:, None], length)
        done = begun[kept]
        mask[done], part = grown, canvas[done]
        draw(part, pivots[:, 0], degrees[:, 0], DISTRACTOR)
        canvas[done], waiting = part, np.setdiff1d(waiting, done)


def mark(generator: np.random.Generator, canvas: np.ndarray, pivots: np.ndarray, degrees: np.ndarray) -> np.ndarray:
    """Discs at the tail of one target and at the end of it or of the other; returns labels [B], 1 for one and the same."""
    rows = np.arange(len(canvas))
    labels, snake = generator.integers(0, 2, (2, len(canvas)))
    other = np.where(labels == 1, snake, 1 - snake)
    end = pivots[rows, other, -1] + np.rint(LENGTH * direction(degrees[rows, other, -1])).astype(int)
    disc = np.where(np.hypot(*np.moveaxis(WINDOW, -1, 0)) <= MARKER_RADIUS, MARKER, 0).astype(np.float32)
    for place in (pivots[rows, snake, 0], end):
        paint(canvas, place, disc[None])
    return labels


def images(generator: np.random.Generator, *, resolution: int, contour_length: int, seed_distance: int, num_distractors: int,
           distractor_length: int) -> dict[str, np.ndarray]:
    """tokens [CHUNK, resolution^2] uint8, brightness stretched from 0 to 255 in each image, and labels [CHUNK]; ValueError
    where next to no image has room for its contours."""
    found, count = [], 0
    while count < CHUNK:
        found.append(targets(generator, resolution, contour_length, seed_distance))
        count += len(found[-1][0])
        if not any(len(part[0]) for part in found[-EMPTY:]) and len(found) >= EMPTY:
            raise ValueError(f"pathfinder: none of {EMPTY * STARTS:,} images has room for two contours of {contour_length} "
                             f"paddles; resolution {resolution} is too small, or contour_length too large")
    mask, pivots, degrees = (np.concatenate(part)[:CHUNK] for part in zip(*found))
    canvas = np.zeros(mask.shape, np.float32)
    for snake in (0, 1):
        draw(canvas, pivots[:, snake], degrees[:, snake], TARGET)
    for _ in range(num_distractors):
        distract(generator, canvas, mask, distractor_length)
    labels = mark(generator, canvas, pivots, degrees)
    seen = canvas[:, REACH:-REACH, REACH:-REACH].reshape(CHUNK, -1)
    return {"tokens": np.rint(255 * seen / seen.max(1, keepdims=True)).astype(np.uint8), "labels": labels.astype(np.uint8)}


def generate(spec: dict, *, num_workers: int = 1) -> Task:
    """Draw the task; ValueError where the window has no room for what is to be drawn."""
    settings = {key: spec[key] for key in OPTIONS if key != "num_dev"}
    for key in ("contour_length", "seed_distance", "distractor_length"):
        if spec[key] < 1:
            raise ValueError(f"pathfinder: {key}: got {spec[key]}; allowed: from 1 on")
    largest = (spec["resolution"] - 4) // 4  # targets begin in the middle, twice as far from the edge as from each other
    if spec["seed_distance"] > largest:
        raise ValueError(f"pathfinder: seed_distance: got {spec['seed_distance']}; allowed for the resolution "
                         f"{spec['resolution']}: up to {largest}")
    total = sum(spec[f"num_{split}"] for split in ("train", "dev", "test"))
    drawn = sampling.draw(functools.partial(images, **settings), -(-total // CHUNK), bench_id=BENCH_ID, seed=spec["seed"],
                          num_workers=num_workers, label=f"pathfinder, {CHUNK} each").arrays
    tokens, labels = (drawn[key].reshape(-1, *drawn[key].shape[2:])[:total] for key in ("tokens", "labels"))
    samples = Sequences.of_one_length(tokens, labels)
    card = {"label": LABEL, "split": "drawn independently", "source": "generated", "rejected": None,
            "solver": settings | {"seed": spec["seed"]}}
    return Task("pathfinder", *divided(samples, spec), NUM_SYMBOLS, NUM_CLASSES, card)
