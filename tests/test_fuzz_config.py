"""Random mutations of config.yaml become a plan, or stop before any job with one line that names the key (tests/fuzz_config.py)."""

from __future__ import annotations

import pytest

from fuzz_config import Mutation, fuzz, mutated, plan_of


def test_mutations_become_a_plan_or_one_line(tmp_path):
    """Sixty, of those that pass two by a dry run and one trained; all 300 by `python tests/fuzz_config.py --full`."""
    found = fuzz(60, 2, 1, tmp_path)
    assert found["passed"] + found["refused"] == 60 and min(found["passed"], found["refused"]) >= 10
    assert (found["dry runs"], found["executed"]) == (2, 1)


def test_a_seed_makes_one_mutation_and_leaves_the_configuration_alone(config):
    before = repr(config)
    assert mutated(config, 5) == mutated(config, 5) and mutated(config, 5).config != config
    assert repr(config) == before


@pytest.mark.parametrize("error, said", [
    (ValueError("a\nb"), "not one line"), (ValueError("nothing of it"), "names no key"), (TypeError("seeds"), "TypeError"),
])  # fmt: skip
def test_a_bad_refusal_is_found(monkeypatch, error, said):
    def refuse(config):
        raise error

    monkeypatch.setattr("fuzz_config.expand", refuse)
    with pytest.raises(AssertionError, match=said):
        plan_of(Mutation({}, "seeds: [0] -> []", ("seeds",)))
