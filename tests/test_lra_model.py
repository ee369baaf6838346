"""The sequence classifier of the Long Range Arena and its training: a slow twin, padding, protocols, records, resume."""

import copy
import csv
import dataclasses

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from flarepp import class_baselines, classify, loop
from flarepp.data.lra import sequences
from flarepp.data.lra.sequences import Sequences, Task
from flarepp.losses import cross_entropy
from flarepp.models import build_model
from flarepp.record import read_json

SIZES = {"channel_dim": 16, "num_heads": 2, "num_blocks": 2, "ffn_ratio": 2, "norm": "layernorm"}
MIXERS = {"full": {}, "flare": {"num_latents": 4}, "flarepp": {"num_latents": 4}}
VOCABULARY, CLASSES, LENGTH = 7, 3, 12


def model(mixer="flare", **options):
    """A double precision model in evaluation, its embeddings large enough to matter."""
    torch.manual_seed(0)
    built = build_model("lra", in_dim=VOCABULARY, out_dim=CLASSES, mixer=mixer, seq_len=LENGTH,
                        **SIZES | MIXERS.get(mixer, {}) | options).double().eval()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return built


def batch(documents=1, lengths=(5, 12, 1)):
    """tokens [3, D, 12] and mask; identity 0 is padding."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, VOCABULARY, (len(lengths), documents, LENGTH), generator=generator)
    mask = (torch.arange(LENGTH) < torch.tensor(lengths)[:, None])[:, None].expand(-1, documents, -1)
    return tokens.masked_fill(~mask, 0), mask


def by_hand(built, tokens):
    """Logits [K] of one sample, its real tokens [D, n], strict protocol and mean pooling, one document after the other."""
    documents = []
    for sequence in tokens:
        x = built.token_embedding.weight[sequence] + built.position_embedding.weight[:len(sequence)]
        for block in built.blocks:
            x = x + block.mixer(block.norm1(x)[None])[0]
            x = x + block.ffn(block.norm2(x))
        documents.append(built.out_norm(x).mean(0))
    if len(documents) == 1:
        return built.head.weight @ documents[0] + built.head.bias
    a, b = documents
    return built.head.mlp(torch.cat([a, b, a * b, a - b]))


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("documents", [1, 2])
def test_a_batch_gives_what_each_sample_gives_by_hand(mixer, documents):
    built = model(mixer, num_documents=documents)
    tokens, mask = batch(documents)
    logits = built(tokens, mask)
    assert logits.shape == (3, CLASSES)
    for sample, real, length in zip(logits, tokens, (5, 12, 1)):
        torch.testing.assert_close(sample, by_hand(built, real[:, :length]), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_what_stands_in_padding_and_how_much_there_is_does_not_matter(pooling):
    built = model(pooling=pooling)
    tokens, mask = batch(lengths=(5, 8, 1))
    logits = built(tokens, mask)
    torch.testing.assert_close(built(tokens.masked_fill(~mask, 3), mask), logits, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(built(tokens[..., :8], mask[..., :8]), logits, rtol=1e-10, atol=1e-12)


def test_the_authors_protocol_attends_and_pools_padding_and_adds_positions_again():
    built = model(protocol="authors")
    tokens, mask = batch()
    logits = built(tokens, mask)
    torch.testing.assert_close(built(tokens, None), logits, rtol=0, atol=0)
    assert (built(tokens[..., :6], mask[..., :6])[0] - logits[0]).abs().max() > 1e-3
    x = built.token_embedding(tokens[:, 0])
    for block in built.blocks:
        x = block(x + built.position_embedding.weight)
    torch.testing.assert_close(built.head(built.out_norm(x).mean(1)[:, None]), logits, rtol=1e-12, atol=1e-12)


def test_the_authors_head_of_two_documents_is_linear_in_both():
    built = model(protocol="authors", num_documents=2)
    assert built.head.weight.shape == (CLASSES, 32)
    a, b = torch.randn(2, 4, 16, dtype=torch.float64)
    expected = torch.cat([a, b], -1) @ built.head.weight.T + built.head.bias
    torch.testing.assert_close(built.head(torch.stack([a, b], 1)), expected)


def test_cls_reads_a_token_of_its_own_in_front():
    built = model(pooling="cls")
    tokens, mask = batch()
    seen = []
    built.blocks[0].register_forward_pre_hook(lambda _, arguments: seen.append(arguments))
    built(tokens, mask)
    x, places = seen[0]
    assert x.shape == (3, LENGTH + 1, 16) and places[:, 0].all() and torch.equal(places[:, 1:], mask[:, 0])
    expected = built.token_embedding.weight[VOCABULARY] + built.position_embedding.weight[0]
    torch.testing.assert_close(x[:, 0], expected.expand(3, -1))


def test_positions_matter():
    built = model()
    tokens, _ = batch(lengths=(12, 12, 12))
    assert (built(tokens.flip(-1)) - built(tokens)).abs().max() > 1e-3


def test_embeddings_and_biases_are_not_decayed():
    from flarepp.optimise import parameter_groups

    built = model()
    kept = {id(parameter) for parameter in parameter_groups(built, 0.1, True)[1]["params"]}
    names = {name for name, parameter in built.named_parameters() if id(parameter) in kept}
    assert {"token_embedding.weight", "position_embedding.weight", "head.bias", "out_norm.weight"} <= names
    assert "head.weight" not in names


def test_dropout_acts_in_training_alone():
    built = model(embedding_dropout=0.5, block_dropout=0.5, head_dropout=0.5)
    tokens, mask = batch()
    torch.testing.assert_close(built(tokens, mask), built(tokens, mask), rtol=0, atol=0)
    built.train()
    assert not torch.equal(built(tokens, mask), built(tokens, mask))


@pytest.mark.parametrize("options, words", [
    ({"pooling": "max"}, ["pooling 'max'", "cls"]), ({"protocol": "strikt"}, ["strikt", "did you mean 'strict'"]),
    ({"num_documents": 3}, ["num_documents: got 3"])])
def test_unknown_options_are_named(options, words):
    with pytest.raises(ValueError) as error:
        model(**options)
    assert all(word in str(error.value) for word in words)


def test_too_many_tokens_and_documents_are_refused():
    with pytest.raises(ValueError, match=r"tokens \[1, 1, 13\].*at most 12"):
        model()(torch.ones(1, 1, 13, dtype=torch.long))
    with pytest.raises(ValueError, match="1 documents"):
        model()(torch.ones(1, 2, 3, dtype=torch.long))


def test_cross_entropy_of_half_precision_is_computed_in_full():
    logits = torch.tensor([[40.0, -40.0], [1.0, 2.0]])
    labels = torch.tensor([1, 0])
    expected = -(logits.log_softmax(-1)[[0, 1], labels]).mean()
    for dtype in (torch.float16, torch.float32):
        loss = cross_entropy(logits.to(dtype), labels)
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, expected)
    assert cross_entropy(logits.double(), labels).dtype == torch.float64


# --- training


def toy(num_train=96, documents=1, seed=0):
    """Does the first token occur again? Lengths 3 to 12, six symbols, two classes."""
    generator = np.random.default_rng(seed)

    def split(count):
        lengths = generator.integers(3, LENGTH + 1, (count, documents)).astype(np.int32)
        tokens = generator.integers(0, VOCABULARY - 1, (count, documents, LENGTH)).astype(np.uint8)
        tokens[np.arange(LENGTH) >= lengths[..., None]] = 0
        return Sequences(tokens, lengths, (tokens[:, 0, 0] > 2).astype(np.uint8))

    train, dev, test = split(num_train), split(33), split(41)
    return Task("toy", train, dev, test, VOCABULARY - 1, 2, {"source": "generated", "split": "toy"})


@pytest.fixture
def spec():
    training = {"steps": 24, "batch_size": 8, "lr": 5e-3, "weight_decay": 0.0, "decay_latents": True, "betas": [0.9, 0.98],
                "eps": 1e-8, "pct_start": 0.1, "div_factor": 1e4, "final_div_factor": 1e4, "clip_norm": 1.0,
                "ema_decay": 0.9, "precision": "fp32", "num_evaluations": 4, "eval_batch_size": 7, "num_threads": 1,
                "device": "cpu", "checkpoint_seconds": 1e9, "seed": 0}
    return {"scale": "smoke", "dataset": {"name": "toy"}, "training": training,
            "model": {"name": "lra", "mixer": "flarepp", "num_latents": 4} | SIZES}


@pytest.fixture
def data(tmp_path):
    sequences.write(toy(), tmp_path / "toy.h5")
    return tmp_path / "toy.h5"


def test_a_run_learns_and_leaves_a_record(spec, data, tmp_path):
    spec["training"] |= {"steps": 120}
    result = classify.classify(spec, data, tmp_path / "run")
    assert result["status"] == "ok" and result == read_json(tmp_path / "run" / "metrics.json")
    metrics = result["metrics"]
    assert metrics["last"] > 0.9 and metrics["steps"] == 120
    with h5py.File(tmp_path / "run" / "predictions.h5") as file:
        for name in ("last", "ema"):
            assert np.mean(file[name][:] == file["labels"][:]) == metrics[name]
    with open(tmp_path / "run" / "history.csv") as stream:
        rows = [row for row in csv.DictReader(stream) if row["dev_last"]]
    assert [row["step"] for row in rows] == ["30", "60", "90", "120"]
    best = max(rows, key=lambda row: float(row["dev_last"]))
    assert float(best["test_last"]) == metrics["selected"] and float(best["dev_last"]) == metrics["dev_selected"]
    weights = load_file(tmp_path / "run" / "model.safetensors")
    assert {name.partition("/")[0] for name in weights} == {"last", "ema"}
    assert result["provenance"]["dataset"]["fingerprint"] == sequences.read(data).fingerprint


def test_the_dev_split_selects_and_the_test_split_is_shown(spec, tmp_path):
    task = toy()
    dev = Sequences(task.dev.tokens, task.dev.lengths, 1 - task.dev.labels)  # what is learned is wrong there
    sequences.write(dataclasses.replace(task, dev=dev), tmp_path / "toy.h5")
    spec["training"] |= {"steps": 120, "num_evaluations": 12}
    metrics = classify.classify(spec, tmp_path / "toy.h5", tmp_path / "run")["metrics"]
    assert metrics["dev_last"] < 0.2 and metrics["last"] > 0.8
    assert metrics["selected_step"] < 120 and metrics["selected"] < metrics["last"] and metrics["dev_selected"] > metrics["dev_last"]
    with open(tmp_path / "run" / "history.csv") as stream:
        (row,) = [row for row in csv.DictReader(stream) if row["step"] == str(metrics["selected_step"])]
    assert (float(row["test_last"]), float(row["dev_last"])) == (metrics["selected"], metrics["dev_selected"])


def test_the_same_spec_gives_the_same_bits_also_after_a_kill(spec, data, tmp_path, monkeypatch):
    first = classify.classify(spec, data, tmp_path / "first")
    spec["training"]["checkpoint_seconds"] = 0.0
    step, calls = classify.training_step, []

    def killed(run):
        calls.append(1)
        if len(calls) == 14:
            raise KeyboardInterrupt
        return step(run)

    monkeypatch.setattr(classify, "training_step", killed)
    with pytest.raises(KeyboardInterrupt):
        classify.classify(spec, data, tmp_path / "second")
    assert not (tmp_path / "second" / "metrics.json").exists()
    second = classify.classify(spec, data, tmp_path / "second")
    assert len(calls) == 14 + 24 - 13
    same = ("last", "ema", "selected", "dev_last", "dev_ema", "dev_selected")
    assert [first["metrics"][key] for key in same] == [second["metrics"][key] for key in same]
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert not list((tmp_path / "second").glob("checkpoint-*"))


def test_accuracies_do_not_depend_on_the_evaluation_batch(spec):
    task = toy()
    run = classify.build_run(spec, task)
    found = [classify.evaluate(run, "test")]
    run.spec = copy.deepcopy(spec)
    run.spec["training"]["eval_batch_size"] = 1
    assert found == [classify.evaluate(run, "test")]


def test_evaluation_leaves_the_draws_of_training_alone_and_repeats_its_own(spec):
    spec["model"] |= {"mixer": "transolverpp", "eval_noise": True}
    run = classify.build_run(spec, toy())
    before = torch.get_rng_state()
    found = []
    for _ in range(2):
        classify.evaluate(run, "dev")
        found.append(run.predicted["dev"]["last"])
        assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(*found)


def test_batches_are_as_long_as_their_longest_document(spec):
    task = toy(documents=2)
    spec["model"]["mixer"] = "full"
    del spec["model"]["num_latents"]
    split = classify.build_run(spec, task).splits["train"]
    indices = torch.tensor([3, 1, 4])
    tokens, mask = split.batch(indices)
    lengths = torch.tensor(task.train.lengths)[indices]
    assert tokens.shape == mask.shape == (3, 2, lengths.max()) and torch.equal(mask.sum(-1), lengths)
    assert (tokens[~mask] == 0).all() and (tokens[mask] > 0).all()
    spec["model"]["protocol"] = "authors"
    assert classify.build_run(spec, task).splits["train"].batch(indices)[0].shape == (3, 2, LENGTH)


def test_every_sample_is_seen_once_an_epoch(spec):
    run = classify.build_run(spec, toy(num_train=32))
    epochs = [torch.cat([loop.next_batch(run) for _ in range(4)]).tolist() for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(32)) and epochs[0] != epochs[1]


def test_the_test_split_selects_nothing():
    history = [{"step": 1}, {"step": 2, "dev_last": 0.5, "test_last": 0.1}, {"step": 3, "dev_last": 0.7, "test_last": 0.2},
               {"step": 4, "dev_last": 0.7, "test_last": 0.9}]
    assert classify.selected(history)["step"] == 3 and classify.selected(history[:1]) is None


def test_divergence_is_a_result(spec, data, tmp_path, monkeypatch):
    monkeypatch.setattr(classify, "cross_entropy", lambda *words: cross_entropy(*words) * float("nan"))
    result = classify.classify(spec, data, tmp_path / "run")
    assert result["status"] == "diverged" and "step 0" in result["message"] and "last" not in result["metrics"]
    with h5py.File(tmp_path / "run" / "predictions.h5") as file:
        assert set(file) == {"labels"}


def test_weights_whose_logits_are_not_finite_at_the_last_evaluation_are_no_result(spec, data, tmp_path, monkeypatch):
    step = classify.training_step

    def broken(run):
        norm = step(run)
        if run.progress.steps == run.spec["training"]["steps"]:
            run.model.head.bias.data[1] = float("nan")  # whose largest is the first class, which many samples have
        return norm

    monkeypatch.setattr(classify, "training_step", broken)
    result = classify.classify(spec, data, tmp_path / "run")
    assert result["status"] == "diverged" and result["message"] == "logits on the dev split are not finite at step 24"


def test_several_processes_are_refused(spec, data, tmp_path):
    spec["training"]["data_parallel"] = 2
    with pytest.raises(ValueError, match="data_parallel: got 2; allowed here: 1"):
        classify.classify(spec, data, tmp_path / "run")


def test_half_precision_trains(spec, data, tmp_path):
    spec["training"] |= {"precision": "fp16", "steps": 8}
    spec["model"]["norm"] = "rmsnorm"
    assert classify.classify(spec, data, tmp_path / "run")["status"] == "ok"


# --- accuracies without learning


def test_constant_classes(tmp_path):
    tokens = np.array([[0, 1], [0, 2], [0, 1], [1, 1], [1, 2], [2, 0]], np.uint8)
    train = Sequences.of_one_length(tokens, [4, 4, 1, 3, 3, 3])
    test = Sequences.of_one_length([[0, 0], [1, 0], [2, 2], [5, 0]], [4, 3, 4, 3])
    assert class_baselines.majority(train, test).tolist() == [3, 3, 3, 3]
    assert class_baselines.first_token(train, test).tolist() == [4, 3, 3, 3]
    sequences.write(Task("toy", train, test, test, 6, 5, {"source": "generated", "split": "toy"}), tmp_path / "toy.h5")
    result = class_baselines.run({"model": {"name": "first_token"}}, tmp_path / "toy.h5", tmp_path / "run")
    assert result["metrics"]["last"] == result["metrics"]["dev_last"] == 0.75
