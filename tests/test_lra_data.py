"""Data of the Long Range Arena: generators against slow twins, readers on files of the published layouts, the store."""

import gzip
import io
import math
import os
import pickle
import tarfile

import h5py
import numpy as np
import pytest

from flarepp import class_baselines, data
from flarepp.data import lra
from flarepp.data.lra import archives, image, listops, pathfinder, processed, retrieval, sequences, text
from flarepp.data.lra.sequences import Sequences, Task
from flarepp.record import read_json, write_json

LISTOPS = {"name": "listops", "source": "generate", "seed": 0, "num_train": 600, "num_dev": 50, "num_test": 60,
           "min_length": 20, "max_length": 128, "max_depth": 10, "max_arguments": 10}
PATHFINDER = {"name": "pathfinder", "source": "generate", "seed": 0, "num_train": 400, "num_dev": 60, "num_test": 70,
              "resolution": 16, "contour_length": 5, "seed_distance": 3, "num_distractors": 1, "distractor_length": 2}
TEXT = {"name": "text", "source": "path", "seed": 0, "num_dev": 0, "max_length": 13}


def test_the_folder_is_the_list_of_tasks():
    assert lra.task_names() == ("image", "listops", "pathfinder", "retrieval", "text")
    assert not set(lra.task_names()) & set(data.names())
    with pytest.raises(ValueError, match="task 'listop' is unknown; did you mean 'listops'"):
        lra.task_module("listop")


# --- ListOps


def value_of(symbols, depth=1):
    """(value, depth, symbols that follow) of the expression that begins a list of symbols, checked on the way."""
    first, rest = symbols[0], symbols[1:]
    if first < 10:
        return first, depth, rest
    assert depth < 10 and first < listops.CLOSE
    arguments, deepest = [], depth
    while rest[0] != listops.CLOSE:
        argument, reached, rest = value_of(rest, depth + 1)
        arguments.append(argument)
        deepest = max(deepest, reached)
    assert 2 <= len(arguments) <= 10
    found = {"[MIN": min, "[MAX": max, "[MED": lambda values: int(np.median(values)), "[SM": lambda values: sum(values) % 10}
    return found[listops.SYMBOLS[first]](arguments), deepest, rest[1:]


def slow_expression(generator, depth=1, limit=128):
    """The definition, a node at a time; None for more than `limit` symbols."""
    if depth == 10 or generator.random() >= 0.25:
        return [int(generator.integers(10))]
    symbols = [10 + int(generator.integers(4))]
    for _ in range(generator.integers(2, 11)):
        argument = slow_expression(generator, depth + 1, limit)
        if argument is None or len(symbols) + len(argument) > limit:
            return None
        symbols += argument
    return [*symbols, listops.CLOSE]


@pytest.fixture(scope="module")
def expressions():
    """3,000 expressions of the published distribution: tokens, lengths, labels."""
    limits = {"min_length": 500, "max_length": 2000, "max_depth": 10, "max_arguments": 10}
    parts = [listops.expressions(np.random.default_rng(seed), **limits) for seed in range(3)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def test_every_label_is_the_value_of_its_expression(expressions):
    depths = []
    for tokens, length, label in zip(*(expressions[name][:300] for name in ("tokens", "lengths", "labels"))):
        value, depth, rest = value_of(tokens[:length].tolist())
        assert value == label and not rest and 500 < length < 2000 and not tokens[length:].any()
        depths.append(depth)
    assert max(depths) == 10


def test_the_published_distribution(expressions):
    """Figures of 100,000 samples of the definition: lengths 1034 (mean) and 951 (median), classes 0 and 9 17 % each, the
    others 7 to 9 %; majority 17.1 %, best constant of each root operator 36.3 %."""
    lengths, labels = expressions["lengths"], expressions["labels"]
    assert abs(lengths.mean() - 1034) < 4 * lengths.std() / math.sqrt(len(lengths)) and abs(np.median(lengths) - 951) < 40
    shares = np.bincount(labels, minlength=10) / len(labels)
    assert (np.abs(shares[[0, 9]] - 0.17) < 0.028).all() and ((0.05 < shares[1:9]) & (shares[1:9] < 0.11)).all()
    samples = Sequences(expressions["tokens"][:, None], lengths[:, None], labels)
    for predict, expected in ((class_baselines.majority, 0.171), (class_baselines.first_token, 0.363)):
        assert abs((predict(samples, samples) == labels).mean() - expected) < 0.035


def test_the_fast_generator_draws_what_the_definition_draws():
    generator, slow = np.random.default_rng(1), []
    while len(slow) < 400:
        symbols = slow_expression(generator)
        if symbols is not None and 20 < len(symbols) < 128:
            slow.append(symbols)
    fast = listops.expressions(np.random.default_rng(2), min_length=20, max_length=128, max_depth=10, max_arguments=10)
    fast = [tokens[:length].tolist() for tokens, length in zip(fast["tokens"], fast["lengths"])]
    statistics = {
        "length": len, "value": lambda symbols: value_of(symbols)[0], "depth": lambda symbols: value_of(symbols)[1],
        "root": lambda symbols: symbols[0], "operators": lambda symbols: sum(symbol == listops.CLOSE for symbol in symbols),
        "first digit": lambda symbols: next(symbol for symbol in symbols if symbol < 10)}
    for name, statistic in statistics.items():
        a, b = (np.array([statistic(symbols) for symbols in group], float) for group in (slow, fast))
        assert abs(a.mean() - b.mean()) < 4 * math.hypot(a.std() / 20, b.std() / math.sqrt(len(b))), name


def test_listops_is_the_same_on_any_number_of_processes_and_has_no_expression_twice():
    one, two = (listops.generate(LISTOPS, num_workers=workers) for workers in (1, 2))
    assert one.fingerprint == two.fingerprint
    assert [len(split) for split in one.splits.values()] == [600, 50, 60]
    rows = {row.tobytes() for split in one.splits.values() for row in split.tokens}
    assert len(rows) == 710 and one.vocabulary == 16 and one.max_length == 128
    assert listops.generate(LISTOPS | {"seed": 1}).fingerprint != one.fingerprint


def test_too_few_different_expressions_are_an_error():
    with pytest.raises(ValueError, match=r"2000 expressions are needed, \d+ different"):
        listops.generate(LISTOPS | {"num_train": 1890, "min_length": 3, "max_length": 5, "max_depth": 2, "max_arguments": 2})
    with pytest.raises(ValueError, match="max_arguments"):
        listops.generate(LISTOPS | {"max_arguments": 1})
    with pytest.raises(ValueError, match="none of 200,000 expressions has more than 20 .* max_depth 2 and max_arguments 2"):
        listops.generate(LISTOPS | {"max_depth": 2, "max_arguments": 2})


@pytest.mark.parametrize("module, spec", [(listops, LISTOPS), (pathfinder, PATHFINDER)])
def test_without_dev_samples_the_test_split_is_the_dev_split(module, spec):
    task, other = (module.generate(spec | {"num_train": 60, "num_dev": count}) for count in (0, 10))
    assert task.dev_is_test and [len(split) for split in task.splits.values()] == [60, spec["num_test"]]
    parts = [other.train.tokens, other.dev.tokens, other.test.tokens]
    assert [len(part) for part in parts] == [60, 10, spec["num_test"]] and not other.dev_is_test
    assert (np.concatenate(parts)[60:60 + spec["num_test"]] == task.test.tokens).all()


def test_published_listops(tmp_path, monkeypatch):
    monkeypatch.setattr(listops, "PUBLISHED", (10, 10, 10))
    folder = tmp_path / "LRA" / "listops"
    folder.mkdir(parents=True)
    for split in ("train", "val", "test"):
        rows = [f"( ( ( [MED {digit} ) [MIN 7 3 ] ) ] )\t{digit}" for digit in range(10)]
        (folder / f"basic_{split}.tsv").write_text("Source\tTarget\n" + "\n".join(rows) + "\n")
    files, task = lra.read_published(listops, tmp_path, LISTOPS | {"max_length": 50})
    assert [file.name for file in files] == ["basic_train.tsv", "basic_val.tsv", "basic_test.tsv"]
    assert task.train.tokens[4, 0, :8].tolist() == [12, 4, 10, 7, 3, 14, 14, 0] and task.train.lengths[4, 0] == 7
    assert task.train.labels.tolist() == list(range(10))
    (folder / "basic_val.tsv").write_text("Source\tTarget\n[MED 1 2 ]\t1\n[AVG 1 2 ]\t1\n")
    with pytest.raises(ValueError, match=r"basic_val.tsv: row 2: KeyError '\[AVG'"):
        lra.read_published(listops, tmp_path, LISTOPS | {"max_length": 50})


# --- Pathfinder


def test_stamps_are_lines_reduced_with_a_lanczos_filter():
    lines, masks = pathfinder.stamps()
    reach, fine = pathfinder.REACH, range(-10, 11)
    for degree in (0, 37, 90, 200):
        sine, cosine = math.sin(math.radians(degree)), math.cos(math.radians(degree))
        for width, stamp, scale in ((0.25, lines, 1), (1.0, masks, 255)):
            on = {}
            for row in fine:
                for column in fine:
                    y, x = row / 2, column / 2
                    along = min(max(y * sine + x * cosine, 0), 2)
                    on[row, column] = math.hypot(y - along * sine, x - along * cosine) <= width + 1e-9

            def weight(place, index):
                offset = place - index / 2
                return np.sinc(offset) * np.sinc(offset / 3) if abs(offset) < 3 else 0.0

            for place in ((0, 0), (0, 1), (1, 1), (-1, 2), (2, 0)):
                norms = [sum(weight(axis, index) for index in fine) for axis in place]
                value = sum(weight(place[0], row) * weight(place[1], column) for (row, column), lit in on.items() if lit)
                value = min(max(value / norms[0] / norms[1], 0), 1)
                value = scale * (0 if value < 0.05 else value)
                assert abs(stamp[degree, place[0] + reach, place[1] + reach] - value) < (1e-6 if scale == 1 else 0.51)


def test_the_next_paddle_is_drawn_as_defined():
    """From one place many times, a part of the window occupied: frequencies against the weights, pixel by pixel."""
    count, degree = 20_000, 30
    mask = np.zeros((count, 42, 42), np.int16)
    mask[:, 26, 24] = 255
    pivot = np.tile([20, 20], (count, 1))
    found, reached, degrees = pathfinder.next_paddle(np.random.default_rng(0), mask, pivot, np.full(count, degree))
    y, x = (math.ceil(20 + 4 * part) for part in (math.sin(math.radians(30)), math.cos(math.radians(30))))
    assert found.all() and (reached == [y, x]).all() and (y, x) == (22, 24)
    weights = {}
    for row in range(-3, 4):
        for column in range(-3, 4):
            if round(math.hypot(row, column)) == 3:
                angle = round(math.degrees(math.atan2(row, column)))
                change = abs((angle - degree + 180) % 360 - 180)
                blocked = math.hypot(y + row - 26, x + column - 24) <= 1
                refused = mask[0, 26, 24] + pathfinder.stamps()[1][angle % 360, 26 - y + 5, 24 - x + 5] >= 459
                weights[angle % 360] = math.cos(math.radians(min(change, 90))) ** 2 * (not blocked) * (not refused)
    assert len(weights) == 16 and sum(weights.values()) > 0
    total = sum(weights.values())
    for angle, value in weights.items():
        share = value / total
        assert abs((degrees == angle).mean() - share) < 4.5 * math.sqrt(share * (1 - share) / count) + 1e-9, angle


def test_a_contour_that_cannot_go_on_is_dropped():
    mask = np.full((3, 42, 42), 255, np.int16)
    mask[1, 6:36, 6:36] = 0
    first = np.full((3, 1, 2), 20), np.zeros((3, 1), int)
    kept, grown, pivots, degrees = pathfinder.grow(np.random.default_rng(0), mask, *first, 3)
    assert kept.tolist() == [1] and grown.shape == (1, 42, 42)
    assert pivots.shape == (1, 1, 3, 2) and degrees.shape == (1, 1, 3)
    assert np.abs(np.diff(pivots[0, 0], axis=0)).max() <= 4


def test_a_paddle_occupies_its_surroundings_one_step_late(monkeypatch):
    seen, step = [], pathfinder.next_paddle
    monkeypatch.setattr(pathfinder, "next_paddle", lambda generator, mask, *last: (seen.append(mask.copy()),
                                                                                  step(generator, mask, *last))[1])
    empty = np.zeros((1, 42, 42), np.int16)
    _, grown, pivots, degrees = pathfinder.grow(np.random.default_rng(0), empty.copy(), np.full((1, 1, 2), 20),
                                                np.zeros((1, 1), int), 4)
    expected = empty.copy()
    for place, mask in enumerate([*seen, None]):
        if mask is not None:  # drawing the paddle after `place`, that one is not there yet
            assert (mask == expected).all(), place
        pathfinder.paint(expected, pivots[:, 0, place], pathfinder.stamps()[1][degrees[:, 0, place]])
    assert (grown == expected).all() and len(seen) == 3


def test_markers_are_the_ends_of_one_contour_or_of_two():
    count = 400
    canvas = np.zeros((count, 42, 42), np.float32)
    pivots = np.tile(np.array([[[10, 10], [10, 14]], [[30, 10], [30, 14]]]), (count, 1, 1, 1))
    labels = pathfinder.mark(np.random.default_rng(0), canvas, pivots, np.zeros((count, 2, 2), int))
    tails, ends = canvas[:, [10, 30], 10], canvas[:, [10, 30], 16]
    assert (canvas.sum((1, 2)) == 18).all() and 0.4 < labels.mean() < 0.6  # two discs of nine pixels
    assert ((tails == ends).all(1) == (labels == 1)).all() and (tails.sum(1) == 1).all() and (ends.sum(1) == 1).all()


def test_pathfinder_is_the_same_on_any_number_of_processes():
    one, two = (pathfinder.generate(PATHFINDER, num_workers=workers) for workers in (1, 2))
    assert one.fingerprint == two.fingerprint and one.max_length == 256
    pictures = one.train.tokens.reshape(-1, 16, 16)
    assert (pictures.max((1, 2)) == 255).all() and 0.4 < one.train.labels.mean() < 0.6
    assert 0.3 < (pictures == 0).mean() < 0.9
    assert len({picture.tobytes() for picture in pictures}) > 0.99 * len(pictures)
    with pytest.raises(ValueError, match="seed_distance: got 4; allowed for the resolution 16: up to 3"):
        pathfinder.generate(PATHFINDER | {"seed_distance": 4})
    with pytest.raises(ValueError, match="none of 40,000 images has room for two contours of 30 paddles; resolution 16"):
        pathfinder.generate(PATHFINDER | {"contour_length": 30})
    with pytest.raises(ValueError, match="distractor_length: got 0; allowed: from 1 on"):
        pathfinder.generate(PATHFINDER | {"distractor_length": 0})


def test_pathfinder_of_the_published_size():
    found = pathfinder.images(np.random.default_rng(0), resolution=32, contour_length=14, seed_distance=7, num_distractors=5,
                              distractor_length=4)
    pictures = found["tokens"].reshape(-1, 32, 32)
    assert len(pictures) == pathfinder.CHUNK and 0.65 < (pictures == 0).mean() < 0.85
    assert abs(found["labels"].mean() - 0.5) < 4 * 0.5 / math.sqrt(len(pictures))


# --- published files


def tar_of(path, files):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


@pytest.fixture
def reviews(tmp_path, monkeypatch):
    """An IMDB archive with three reviews of each class and half."""
    monkeypatch.setattr(text, "REVIEWS", 3)
    files = {f"aclImdb/{half}/{kind}/{number}_{8 if kind == 'pos' else 2}.txt": f"{half} {kind} {number}é".encode()
             for half in ("train", "test") for kind in ("pos", "neg") for number in (2, 0, 10)}
    files |= {"aclImdb/train/unsup/0_0.txt": b"no", "aclImdb/README": b"no"}
    return tar_of(tmp_path / text.PUBLISHED_FILES[0], files)


def test_published_text(reviews, tmp_path):
    task = text.read_published([reviews], TEXT)
    assert task.dev_is_test and set(task.splits) == {"train", "test"} and task.vocabulary == 257
    texts = [bytes(tokens[0, :length[0]]) for tokens, length in zip(task.test.tokens, task.test.lengths)]
    assert texts == [b"test neg 0\xc3\xa9", b"test neg 2\xc3\xa9", b"test neg 10\xc3\xa9"[:13], b"test pos 0\xc3\xa9",
                     b"test pos 2\xc3\xa9", b"test pos 10\xc3\xa9"[:13]]
    assert task.test.labels.tolist() == [0, 0, 0, 1, 1, 1]
    held_out = text.read_published([reviews], TEXT | {"num_dev": 2})
    parts = [{bytes(tokens[0]) for tokens in split.tokens} for split in (held_out.train, held_out.dev)]
    assert [len(part) for part in parts] == [4, 2] and not parts[0] & parts[1]
    assert parts[0] | parts[1] == {bytes(tokens[0]) for tokens in task.train.tokens}


def test_text_of_other_numbers_or_cut_short_is_refused(reviews, monkeypatch):
    monkeypatch.setattr(text, "REVIEWS", 4)
    with pytest.raises(ValueError, match="aclImdb/train has 3 bad and 3 good reviews, expected 4 of each"):
        text.read_published([reviews], TEXT)
    reviews.write_bytes(reviews.read_bytes()[:-40])
    with pytest.raises(ValueError, match="aclImdb_v1.tar.gz: damaged or cut short"):
        text.read_published([reviews], TEXT)


def test_members_that_are_no_files_or_too_large_are_not_read(tmp_path, monkeypatch):
    path = tmp_path / "a.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        link = tarfile.TarInfo("a/1")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    assert archives.members(path, r"a/\d") == {}
    monkeypatch.setattr(archives, "LARGEST", 3)
    with pytest.raises(ValueError, match="a/2 has 4 bytes, at most 3"):
        archives.members(tar_of(path, {"a/2": b"1234"}), r"a/\d")
    monkeypatch.setattr(archives, "ALL", 2 * 512 + 5)
    assert len(archives.members(tar_of(path, {"a/1": b"123", "a/2": b"12"}), r"a/\d")) == 2
    for files in ({"a/1": b"123", "a/2": b"123"}, {"a/1": b"", "a/2": b"", "a/3": b""}):
        with pytest.raises(ValueError, match="more than 1029 bytes in all"):
            archives.members(tar_of(path, files), r"a/\d")


def test_a_member_that_is_there_twice_is_refused(tmp_path):
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        for _ in range(2):
            tar.addfile(tarfile.TarInfo("a/1"), io.BytesIO())
    with pytest.raises(ValueError, match="a/1 is there twice"):
        archives.members(tmp_path / "a.tar.gz", r"a/\d")


def test_published_image(tmp_path, monkeypatch):
    monkeypatch.setattr(image, "PICTURES", 2)
    generator = np.random.default_rng(0)
    names = [*image.BATCHES[0], *image.BATCHES[1]]
    records = {name: generator.integers(0, 256, (2, 3073)).astype(np.uint8) for name in names}
    for index, name in enumerate(names):
        records[name][:, 0] = [index, 9 - index]
    path = tar_of(tmp_path / image.PUBLISHED_FILES[0],
                  {f"cifar-10-batches-bin/{name}": array.tobytes() for name, array in records.items()})
    task = image.read_published([path], {})
    assert [len(split) for split in task.splits.values()] == [9, 1, 2] and task.max_length == 1024
    red, green, blue = records["data_batch_2.bin"][1, 1:].reshape(3, 1024).astype(float)
    expected = (0.2989 * red + 0.5870 * green + 0.1140 * blue).astype(int)
    assert task.train.tokens[3, 0].tolist() == expected.tolist() and task.train.labels[3] == 8
    assert (task.train.lengths == 1024).all()
    tar_of(path, {"cifar-10-batches-bin/data_batch_1.bin": b"12"})
    with pytest.raises(ValueError, match="data_batch_1.bin has 2 bytes, expected 2 records of 3073"):
        image.read_published([path], {})


def test_published_retrieval(tmp_path, monkeypatch):
    monkeypatch.setattr(retrieval, "PUBLISHED", (2, 2, 2))
    paths = [tmp_path / f"{split}.tsv" for split in ("train", "eval", "test")]
    for path in paths:
        path.write_bytes(b'1.0\tA1\tB1\tabc "d\tx\n0.0\tA2\tB2\tq\tsecond \xc3\xa9\r\n')
    task = retrieval.read_published(paths, {"max_length": 5})
    assert task.num_documents == 2 and task.train.labels.tolist() == [1, 0]
    assert bytes(task.train.tokens[0, 0]) == b'abc "' and task.train.lengths.tolist() == [[5, 1], [1, 5]]
    paths[1].write_bytes(b"1.0\tA1\tB1\tabc\n")
    with pytest.raises(ValueError, match="eval.tsv: row 1: 4 fields, the first b'1.0'"):
        retrieval.read_published(paths, {"max_length": 5})
    paths[1].write_bytes(b"1.0\tA1\tB1\tabc\td\n")
    with pytest.raises(ValueError, match="eval.tsv: 1 samples, expected 2"):
        retrieval.read_published(paths, {"max_length": 5})


# --- processed files


@pytest.fixture
def any_number(monkeypatch):
    """Files of the processed tasks may have any number of samples."""
    monkeypatch.setattr(processed, "SLACK", 1)


def pickles(root, name, rows):
    paths = processed.files(root, name)
    paths[0].parent.mkdir(parents=True, exist_ok=True)
    for path, split in zip(paths, rows):
        path.write_bytes(pickle.dumps(split))
    return paths


def test_processed_files_are_read(tmp_path, any_number):
    row = {"input_ids_0": np.array([3, 1, 5, 0, 0], np.int32), "input_ids_1": np.array([2, 2, 2, 2, 1]),
           "label": np.int64(1)}
    other = {"input_ids_0": [1, 0, 0, 0, 0], "input_ids_1": np.array([4, 0, 0, 0, 0]), "label": 0}
    pickles(tmp_path, "retrieval", [[row, other]] * 3)
    files, task = lra.read_published(retrieval, tmp_path, {"name": "retrieval", "max_length": 5})
    assert [file.name for file in files] == [f"lra-retrieval.{split}.pickle" for split in ("train", "dev", "test")]
    assert task.train.tokens[0].tolist() == [[2, 0, 4, 0, 0], [1, 1, 1, 1, 0]]
    assert task.train.lengths.tolist() == [[3, 5], [1, 1]] and task.num_symbols == 5 and task.dev_is_test
    _, cut = lra.read_published(retrieval, tmp_path, {"name": "retrieval", "max_length": 2})
    assert cut.max_length == 2 and cut.train.lengths.tolist() == [[2, 2], [1, 1]]


def test_processed_files_whose_dev_split_is_another_and_of_too_few_samples(tmp_path, monkeypatch):
    rows = [[{"input_ids_0": [1 + number, 2], "label": label} for label in (0, 1)] for number in range(3)]
    monkeypatch.setitem(processed.COUNTS, "text", (2, 2, 2))
    task = processed.read(pickles(tmp_path, "text", rows), {"name": "text"})
    assert not task.dev_is_test and task.card["split"] == "as in the processed files"
    same = processed.read(pickles(tmp_path, "text", [rows[0], rows[1][::-1], rows[1]]), {"name": "text"})
    assert same.dev_is_test and same.card["split"].endswith(", dev is test")
    monkeypatch.setitem(processed.COUNTS, "text", (2, 300, 2))
    with pytest.raises(ValueError, match="lra-text.dev.pickle: 2 samples, expected about 300"):
        processed.read(pickles(tmp_path, "text", rows), {"name": "text"})


def test_one_sample_in_common_makes_no_test_split_of_the_dev_split(tmp_path, any_number):
    rows = [[{"input_ids_0": [first, 2], "label": label} for label, first in enumerate(pair)] for pair in ((1, 2), (3, 4), (4, 5))]
    task = processed.read(pickles(tmp_path, "text", rows), {"name": "text"})
    assert not task.dev_is_test and task.dev.tokens[:, 0, 0].tolist() == [2, 3]
    assert task.card["split"] == "as in the processed files, 1 of 2 dev samples are test samples too"


def test_processed_pixels_may_be_black(tmp_path, any_number):
    rows = [{"input_ids_0": np.array([0, 255, 0, 0]), "label": label} for label in (0, 1)]
    pickles(tmp_path, "pathfinder", [rows] * 3)
    _, task = lra.read_published(pathfinder, tmp_path, {"name": "pathfinder"})
    assert (task.train.lengths == 4).all() and task.train.tokens[0, 0].tolist() == [0, 255, 0, 0] and task.num_symbols == 256


class Evil:
    def __reduce__(self):
        return os.system, ("touch executed",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_no_pickle_is_executed(tmp_path, monkeypatch, protocol):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "a.pickle"
    path.write_bytes(pickle.dumps([{"label": 0, "more": Evil()}], protocol=protocol))
    with pytest.raises(ValueError, match=r"a.pickle: not a pickle of arrays .*system, which is refused"):
        processed.load(path)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("protocol", [3, 4, 5])  # Python 3's own; those before write arrays as calls of a codec
def test_arrays_are_read_whatever_the_version_of_numpy(tmp_path, protocol):
    path = tmp_path / "a.pickle"
    for values in (np.arange(3), np.int64(7), np.arange(6, dtype=np.uint8)[::2]):
        content = pickle.dumps([{"input_ids_0": values}], protocol=protocol)
        assert b"numpy._core" in content
        path.write_bytes(content)
        assert processed.load(path)[0]["input_ids_0"].values.tolist() == values.tolist()
        if protocol == 3:  # names of the modules as lines
            path.write_bytes(content.replace(b"numpy._core", b"numpy.core"))
            assert processed.load(path)[0]["input_ids_0"].values.tolist() == values.tolist()


class Built:
    """Pickled as a call of a function with a state to set, whatever it may be."""

    def __init__(self, *how):
        self.how = how

    def __reduce__(self):
        return self.how


@pytest.mark.parametrize("value", [
    np.dtype("O"), np.dtype("f8"), np.dtype([("a", "i4")]), np.float64(1.0), np.array(["a"]),
    Built(np.dtype, ("i8",), (3, "<", "a", None, None, -1, -1, 63)), Built(np.dtype, ("i8",), (4, "<")),
    Built(np.dtype, ("i8",), 5),
])
def test_only_whole_numbers_are_built(tmp_path, value):
    path = tmp_path / "a.pickle"
    path.write_bytes(pickle.dumps([{"input_ids_0": value, "label": 0}]))
    with pytest.raises(ValueError, match="not a pickle of arrays .*(whole numbers|unknown layout)"):
        processed.load(path)


def test_arrays_shorter_than_they_say_are_refused(tmp_path):
    path, (make, arguments, state) = tmp_path / "a.pickle", np.arange(3).__reduce__()
    path.write_bytes(pickle.dumps(Built(make, arguments, (state[0], (2**40,), *state[2:]))))
    with pytest.raises(ValueError, match="not a pickle of arrays .*cannot reshape"):
        processed.load(path)


@pytest.mark.parametrize("value", [eval, getattr, pickle.Unpickler, np.load, np.memmap, Sequences])
def test_other_names_are_refused(tmp_path, value):
    path = tmp_path / "a.pickle"
    path.write_bytes(pickle.dumps([value]))
    with pytest.raises(ValueError, match="which is refused"):
        processed.load(path)


@pytest.mark.parametrize("rows, words", [
    ([{"input_ids_0": [1.5], "label": 0}], "sample 0: float64"), ([{"label": 0}], "samples of \\[0\\] documents"),
    ([{"input_ids_0": np.array([1.5]), "label": 0}], "other than whole numbers"),
    ([{"input_ids_0": np.array([1]), "label": "x"}], "sample 0: <U1"), ([{"input_ids_0": [1], "label": 256}], "no class"),
    ([{"input_ids_0": [[1]], "label": 0}], "shape \\(1, 1\\)"), ([5], "sample 0"), ([{"input_ids_0": [2**70], "label": 0}], "sample 0"),
    ([{"input_ids_0": np.array([1, 300]), "label": 0}], "beyond 256"),
    ([{"input_ids_0": np.array([1, 0, 2]), "label": 0}], "padding inside"), ([], "expected a list of samples"),
    ([{"input_ids_0": np.array([None]), "label": 0}], "not a pickle of arrays"),
    ([{"input_ids_0": [1], "label": 0}, {"input_ids_0": [1], "input_ids_1": [1], "label": 0}], "expected one, or two, in all")])
def test_processed_files_of_something_else_are_refused(tmp_path, rows, words):
    paths = pickles(tmp_path, "text", [rows] * 3)
    with pytest.raises(ValueError, match=words):
        processed.read(paths, {"name": "text"})


def test_a_damaged_pickle_is_an_error(tmp_path):
    path = tmp_path / "a.pickle"
    for content in (b"", b"<html>", pickle.dumps([1, 2, 3])[:-3], gzip.compress(b"a")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="a.pickle: not a pickle of arrays"):
            processed.load(path)


# --- files of the pipeline


def prepare(spec, folder):
    lra.prepare(spec, folder / "task.h5", folder / "task.json", folder / "lock.json", 1)
    return sequences.read(folder / "task.h5"), read_json(folder / "task.json")


def test_a_generated_task_and_its_card(tmp_path):
    task, card = prepare(LISTOPS, tmp_path)
    assert task.fingerprint == listops.generate(LISTOPS).fingerprint == card["fingerprint"]
    assert card["counts"] == {"train": 600, "dev": 50, "test": 60} and card["source"] == "generated"
    assert 20 < card["length"]["min"] <= card["length"]["median"] <= card["length"]["max"] < 128
    assert abs(sum(card["class_frequencies"]) - 1) < 1e-3 and not card["dev_is_test"]


def test_a_task_of_files_that_are_there(reviews, tmp_path):
    spec = TEXT | {"root": str(tmp_path)}
    task, card = prepare(spec, tmp_path)
    assert task.dev is task.test and card["dev_is_test"] and card["source"] == "published"
    (path,) = card["published"]
    assert path == text.PUBLISHED_FILES[0] and len(card["published"][path]["sha256"]) == 64
    write_json({path: {"source": "path", "name": "a", "bytes": 3, "sha256": "0" * 64}}, tmp_path / "lock.json")
    with pytest.raises(ValueError, match="expected sha256 0000"):
        prepare(spec, tmp_path)


@pytest.mark.parametrize("spec, error, words", [
    (TEXT | {"source": "generate", "num_train": 1, "num_test": 1}, ValueError, "text: its samples cannot be drawn"),
    (TEXT | {"root": "nowhere"}, FileNotFoundError, "aclImdb_v1.tar.gz or .*lra-text.train.pickle"),
    (LISTOPS | {"name": "lists"}, ValueError, "task 'lists' is unknown"),
    ({"name": "listops"}, ValueError, "'source' is missing"),
    ({key: value for key, value in LISTOPS.items() if key != "max_depth"}, ValueError, "'max_depth' is missing")])
def test_what_cannot_be_prepared_is_said(tmp_path, spec, error, words):
    with pytest.raises(error, match=words):
        prepare(spec, tmp_path)
    assert not (tmp_path / "task.h5").exists()


def task_of(**changes):
    tokens = np.array([[1, 2, 0], [0, 1, 2]], np.uint8)[:, None]
    split = Sequences(tokens, np.array([[2], [3]], np.int32), np.array([0, 1], np.uint8))
    return Task(**{"name": "toy", "train": split, "dev": split, "test": split[:1], "num_symbols": 3, "num_classes": 2,
                   "card": {"source": "generated", "split": "toy"}} | changes)


def test_a_task_round_trips_and_a_dev_split_that_is_the_test_split_stays_it(tmp_path):
    for task in (task_of(), task_of(dev=(test := task_of().test), test=test)):
        sequences.write(task, tmp_path / "task.h5")
        read = sequences.read(tmp_path / "task.h5")
        assert read.fingerprint == task.fingerprint and read.dev_is_test == task.dev_is_test
        assert (read.train.tokens == task.train.tokens).all() and read.card == task.card and read.vocabulary == 4


def test_damaged_files_are_refused(tmp_path):
    path = tmp_path / "task.h5"
    sequences.write(task_of(), path)
    with h5py.File(path, "a") as file:
        file["train/tokens"][0, 0, 0] = 2
    with pytest.raises(ValueError, match="do not match their fingerprint"):
        sequences.read(path)
    with h5py.File(path, "a") as file:
        del file["test/labels"]
    with pytest.raises(ValueError, match="not a whole file"):
        sequences.read(path)
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="cannot be read as HDF5"):
        sequences.read(path)
    with pytest.raises(FileNotFoundError):
        sequences.read(tmp_path / "none.h5")


@pytest.mark.parametrize("changes, words", [
    ({"num_symbols": 2}, "train: the symbol 2"), ({"num_classes": 1}, "train: the class 1"),
    ({"num_classes": 3}, "train: no sample of the class 2"), ({"test": task_of().test[:0]}, "test: there is no sample"),
    ({"train": Sequences(np.zeros((1, 1, 2), np.uint8), np.zeros((1, 1), np.int32), np.zeros(1, np.uint8))}, "is empty")])
def test_numbers_that_cannot_be_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        sequences.check(task_of(**changes))
