"""ListOps of the Long Range Arena: the value of nested operators MIN, MAX, MED, SM over digits (arXiv 2011.04006).

    node(depth) = [OP node(depth + 1) ... node(depth + 1) ]    with probability 1/4 where depth < 10, else a digit

from the root, depth 1, on; OP one of the four, 2 .. 10 arguments, all uniform. MED is the floor of the median, SM the
sum modulo 10. An operator with its bracket and the closing bracket are a token each; an expression is kept iff
min_length < tokens < max_length, and once. With 500, 2000, 10 and 10 that is the published distribution; its files were
drawn without a seed. 0 .. 9 are the digits' symbols, then the operators, then the closing bracket.

Trees grow level by level, many at once: arrays over the nodes of a level, siblings beside each other.
"""

from __future__ import annotations

import csv
import functools
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from flarepp.data.lra.sequences import Sequences, Task, check_counts, divided
from flarepp.solvers import sampling

OPTIONS = ("num_dev", "min_length", "max_length", "max_depth", "max_arguments")
PUBLISHED_FILES = ("LRA/listops/basic_train.tsv", "LRA/listops/basic_val.tsv", "LRA/listops/basic_test.tsv")
LICENCE = "Apache-2.0 (google-research/long-range-arena)"
LABEL, NUM_CLASSES = "ListOps", 10
PUBLISHED = 96_000, 2_000, 2_000  # expressions of the published files
OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
SYMBOLS = (*map(str, range(10)), *OPERATORS, "]")
CLOSE = SYMBOLS.index("]")
OPERATOR_SHARE = 0.25
BENCH_ID = 7  # first word of the generators' seeds
CHUNK = 1000  # expressions made from one generator
ROOTS = 2000  # trees that grow together
EMPTY = 100  # times in a row that none of them may be within the limits


@dataclass
class Level:
    """The nodes of one depth: arguments [n] (0 for a digit), parent [n] (index into the level above), and per node the
    tokens of its expression, its value, the position of its first token."""

    arguments: np.ndarray
    parent: np.ndarray
    size: np.ndarray = field(init=False)
    symbol: np.ndarray = field(init=False)
    value: np.ndarray = field(init=False)
    position: np.ndarray = field(init=False)

    @property
    def starts(self) -> np.ndarray:
        """Index of the first argument of each operator in the level below."""
        arguments = self.arguments[self.arguments > 0]
        return np.cumsum(arguments) - arguments


def grow(generator: np.random.Generator, max_depth: int, max_arguments: int) -> list[Level]:
    """The shapes of ROOTS trees."""
    levels, parent = [], np.arange(ROOTS)
    for depth in range(1, max_depth + 1):
        arguments = np.zeros(len(parent), np.int64)
        if depth < max_depth:
            operators = np.flatnonzero(generator.random(len(parent)) < OPERATOR_SHARE)
            arguments[operators] = generator.integers(2, max_arguments + 1, len(operators))
        levels.append(Level(arguments, parent))
        parent = np.repeat(np.arange(len(arguments)), arguments)
        if not len(parent):
            break
    return levels


def measure(levels: list[Level]) -> None:
    """The number of tokens of every node's expression, from the leaves up."""
    below = None
    for level in reversed(levels):
        level.size = np.ones(len(level.arguments), np.int64)
        if below is not None:
            level.size[level.arguments > 0] = 2 + np.add.reduceat(below.size, level.starts)
        below = level


def select(levels: list[Level], kept: np.ndarray) -> list[Level]:
    """The levels of the trees whose roots are `kept` (bool)."""
    selected = []
    for level in levels:  # the parent of a root is itself
        inside, new_index = kept[level.parent], np.cumsum(kept) - 1
        if not inside.any():
            break
        selected.append(Level(level.arguments[inside], new_index[level.parent[inside]]))
        selected[-1].size = level.size[inside]
        kept = inside
    return selected


def evaluate(levels: list[Level], generator: np.random.Generator) -> None:
    """Draw digits and operators, and the value of every node from those of its arguments."""
    below = None
    for level in reversed(levels):
        operators = level.arguments > 0
        level.symbol = generator.integers(0, 10, len(operators), np.uint8)
        level.value = level.symbol.astype(np.int64)
        if below is not None:
            level.symbol[operators] = generator.integers(0, len(OPERATORS), operators.sum(), np.uint8) + 10
            level.value[operators] = apply(level.symbol[operators] - 10, below.value, level.starts,
                                           level.arguments[operators])
        below = level


def apply(operator: np.ndarray, values: np.ndarray, starts: np.ndarray, arguments: np.ndarray) -> np.ndarray:
    """The value of each operator (index into OPERATORS) of the `arguments` values that begin at `starts`."""
    group = np.repeat(np.arange(len(starts)), arguments)
    ascending = np.sort(10 * group + values) % 10  # within each group
    median = (ascending[starts + (arguments - 1) // 2] + ascending[starts + arguments // 2]) // 2
    results = (ascending[starts], ascending[starts + arguments - 1], median, np.add.reduceat(values, starts) % 10)
    return np.choose(operator, results)


def spell(levels: list[Level]) -> np.ndarray:
    """All expressions one behind the other, [P] uint8, root by root."""
    roots = levels[0]
    tokens = np.empty(roots.size.sum(), np.uint8)
    roots.position = np.cumsum(roots.size) - roots.size
    above = None
    for level in levels:
        if above is not None:
            before = np.cumsum(level.size) - level.size  # tokens of all nodes to the left
            first = np.repeat(before[above.starts], above.arguments[above.arguments > 0])
            level.position = above.position[level.parent] + 1 + before - first
        tokens[level.position] = level.symbol
        operators = level.arguments > 0
        tokens[level.position[operators] + level.size[operators] - 1] = CLOSE
        above = level
    return tokens


def expressions(generator: np.random.Generator, *, min_length: int, max_length: int, max_depth: int,
                max_arguments: int) -> dict[str, np.ndarray]:
    """tokens [CHUNK, max_length] uint8, lengths [CHUNK] and labels [CHUNK] of expressions within the limits; ValueError where
    next to none is."""
    tokens = np.zeros((CHUNK, max_length), np.uint8)
    lengths, labels = np.zeros(CHUNK, np.int32), np.zeros(CHUNK, np.uint8)
    count = empty = 0
    while count < CHUNK:
        levels = grow(generator, max_depth, max_arguments)
        measure(levels)
        size = levels[0].size
        levels = select(levels, (size > min_length) & (size < max_length))
        empty = 0 if levels else empty + 1
        if empty == EMPTY:
            raise ValueError(f"listops: none of {EMPTY * ROOTS:,} expressions has more than {min_length} and fewer than "
                             f"{max_length} tokens with max_depth {max_depth} and max_arguments {max_arguments}")
        if not levels:
            continue
        evaluate(levels, generator)
        flat, size = spell(levels), levels[0].size
        part = slice(count, count + len(size))
        size = size[:CHUNK - count]
        tokens[part][np.arange(max_length) < size[:, None]] = flat[:size.sum()]
        lengths[part], labels[part] = size, levels[0].value[:len(size)]
        count += len(size)
    return {"tokens": tokens, "lengths": lengths, "labels": labels}


def generate(spec: dict, *, num_workers: int = 1) -> Task:
    """Draw the task; ValueError where there are not enough different expressions."""
    limits = {key: spec[key] for key in ("min_length", "max_length", "max_depth", "max_arguments")}
    if limits["max_depth"] < 2 or limits["max_arguments"] < 2 or limits["max_length"] - limits["min_length"] < 2:
        raise ValueError(f"listops: got {limits}; max_depth and max_arguments are at least 2, and there is a length between")
    total = sum(spec[f"num_{split}"] for split in ("train", "dev", "test"))
    drawn = sampling.draw(functools.partial(expressions, **limits), -(-total // CHUNK) + 1, bench_id=BENCH_ID,
                          seed=spec["seed"], num_workers=num_workers, label=f"listops, {CHUNK} each").arrays
    drawn = {name: array.reshape(-1, *array.shape[2:]) for name, array in drawn.items()}
    known = list({row.tobytes(): index for index, row in reversed(list(enumerate(drawn["tokens"])))}.values())
    different = np.sort(known)[:total]
    if len(different) < total:
        raise ValueError(f"listops: {total} expressions are needed, {len(different)} different ones were drawn; allow more "
                         "lengths")
    tokens, lengths, labels = (drawn[name][different] for name in ("tokens", "lengths", "labels"))
    samples = Sequences(tokens[:, None], lengths[:, None], labels)
    card = {"source": "generated", "solver": limits | {"seed": spec["seed"]}, "rejected": None}
    return _task(*divided(samples, spec), card)


def _task(train: Sequences, dev: Sequences, test: Sequences, card: dict) -> Task:
    card = {"label": LABEL, "split": "drawn independently" if card["source"] == "generated" else "as published"} | card
    return Task("listops", train, dev, test, len(SYMBOLS), NUM_CLASSES, card)


def read_published(paths: list[Path], spec: dict) -> Task:
    """The published files: columns Source, with parentheses that say nothing, and Target."""
    splits = [_read(path, spec["max_length"]) for path in paths]
    check_counts(paths, splits, PUBLISHED)
    train, dev, test = splits
    return _task(train, dev, test, {"source": "published"})


def _read(path: Path, max_length: int) -> Sequences:
    identity = {symbol: index for index, symbol in enumerate(SYMBOLS)}
    texts, labels = [], []
    with open(path, encoding="ascii", newline="") as stream:
        for row, line in enumerate(csv.DictReader(stream, delimiter="\t"), 1):
            try:
                texts.append([bytes(identity[word] for word in line["Source"].split() if word not in "()")])
                labels.append(range(NUM_CLASSES).index(int(line["Target"])))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise ValueError(f"{path}: row {row}: {type(error).__name__} {error}; expected Source, an expression, and "
                                 "Target, a digit") from None
    return Sequences.of_bytes(texts, labels, max_length)
