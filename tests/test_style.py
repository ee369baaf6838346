"""Figures can be read in grey and by the colour-blind, and their files stand alone; sources keep to ruff, mypy and snakefmt."""

from __future__ import annotations

import importlib.metadata
import itertools
import re
import subprocess
import sys

import numpy
import pytest

from conftest import PROJECT
from flarepp.paper import style

# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB; "grey" is the luminance of sRGB.
SIMULATIONS = {
    "everyone": numpy.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
    "grey": [[0.2126729, 0.7151522, 0.0721750]] * 3,
}
TO_XYZ = numpy.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
OF_FIGURE5 = ("full", "transolver", "transolverpp", "transolver3", "flare", "flarepp")  # there dashes mean M


def lab(colour: str, simulation="everyone") -> numpy.ndarray:
    """CIELAB of a colour as it is seen."""
    encoded = numpy.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    linear = numpy.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)
    seen = numpy.clip(numpy.array(SIMULATIONS[simulation]) @ linear, 0, 1)
    x, y, z = numpy.cbrt(TO_XYZ @ seen / [0.95047, 1, 1.08883])  # the linear part near black is left out
    return numpy.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def differences(first: style.Look, second: style.Look) -> dict[str, bool]:
    return {
        "luminance": abs(lab(first.colour)[0] - lab(second.colour)[0]) >= 6,  # a difference of 2.3 is just noticeable
        "dashes": first.dashes != second.dashes,
        "marker": first.marker != second.marker,
        "fill": first.filled != second.filled,
    }


def test_lab_is_what_the_standard_says():
    assert lab("#FFFFFF") == pytest.approx([100, 0, 0], abs=0.05) and lab("#808080") == pytest.approx([53.6, 0, 0], abs=0.05)
    assert lab("#0000FF") == pytest.approx([32.3, 79.2, -107.9], abs=0.1)
    assert lab("#D55E00", "grey")[1:] == pytest.approx([0, 0], abs=0.01)


@pytest.mark.parametrize("first, second", list(itertools.combinations(style.LOOKS, 2)))
def test_any_two_lines_differ_in_two_ways_that_are_not_colour(first, second):
    found = differences(style.LOOKS[first], style.LOOKS[second])
    assert sum(found.values()) >= 2, found
    if {first, second} <= set(OF_FIGURE5):
        assert sum(value for name, value in found.items() if name != "dashes") >= 2, found


@pytest.mark.parametrize("simulation", SIMULATIONS)
def test_flare_and_flarepp_stay_apart_for_every_eye(simulation):
    """In grey they also differ in dashes, marker and fill."""
    first, second = (lab(style.LOOKS[model].colour, simulation) for model in ("flare", "flarepp"))
    assert numpy.linalg.norm(first - second) > (8 if simulation == "grey" else 80)


@pytest.mark.parametrize("model", style.LOOKS)
def test_every_line_stands_out_from_the_paper(model):
    assert all(lab(style.LOOKS[model].colour, simulation)[0] < 80 for simulation in SIMULATIONS)


def draw(out):
    """A figure with every line and letters beyond ASCII."""
    with style.figure(out, "one", (3.0, 2.0), "scale quick", "mean ± deviation") as drawing:
        axis = drawing.subplots()
        for model, look in style.LOOKS.items():
            axis.plot([1, 2], [1, 2], label=model, **look.line())
        axis.set_title("relative L² error (%)")
    return {kind: (out / f"one.{kind}").read_bytes() for kind in ("pdf", "png")}


def test_fonts_are_embedded_and_pixels_are_200_an_inch(tmp_path):
    files = draw(tmp_path)  # the PDF's dictionaries of fonts are not compressed
    assert b"/FontFile2" in files["pdf"] and b"/CIDFontType2" in files["pdf"] and b"/Type3" not in files["pdf"]
    width, height = (int.from_bytes(files["png"][place : place + 4], "big") for place in (16, 20))
    assert (width, height) == (600, 400)


def test_the_same_figure_has_the_same_bytes(tmp_path):
    assert draw(tmp_path / "first") == draw(tmp_path / "second")


def other_versions(*packages: str) -> list[str]:
    """Those of the packages that are not of the tested set of versions; a build for a device (+cpu) is."""
    pinned = dict(re.findall(r"^([\w-]+)==([\w.]+)", (PROJECT / "envs/constraints.txt").read_text(), re.MULTILINE))
    found = {name: importlib.metadata.version(name) for name in packages}
    return [f"{name} {version}" for name, version in found.items() if version.partition("+")[0] != pinned[name]]


@pytest.mark.parametrize("words, said", [
    (("ruff", "check", "src", "tests"), "All checks passed"),
    (("snakefmt", "--check", "Snakefile", "workflow/rules"), "would be left unchanged"),
    (("snakemake", "--lint"), "in a good condition"),
    (("mypy", "--python-version", "3.11"), "no issues found"),
], ids=lambda value: value[0] if isinstance(value, tuple) else "")  # fmt: skip
def test_sources_are_clean(words, said):
    """By the settings of pyproject.toml; mypy strictly, on the package, where types come from the tested versions."""
    if words[0] == "mypy" and (others := other_versions("mypy", "numpy", "torch")):
        pytest.skip(f"mypy: types come from other versions than those of envs/constraints.txt: {', '.join(others)}")
    answer = subprocess.run([sys.executable, "-m", *words], cwd=PROJECT, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0 and said in answer.stdout + answer.stderr, answer.stdout + answer.stderr
