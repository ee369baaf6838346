"""All tables, figures and the ledger in one LaTeX document, and as PDF where pdflatex is installed.

A figure's caption is the text that the report shows beside it (workflow/report/<name>.rst).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from flarepp.paper.html import title
from flarepp.paper.typeset import latex_text
from flarepp.record import atomic_path

ENGINE = "pdflatex"
PASSES = 3  # contents, then the page numbers that they move
# Nothing in the PDF says when or where it was made, so that it is the same whenever it is made again.
HEAD = r"""% generated; do not edit
\documentclass[10pt,a4paper]{article}
\pdfinfoomitdate=1 \pdftrailerid{} \pdfsuppressptexinfo=-1
\usepackage[margin=2.2cm]{geometry}
\usepackage{booktabs,graphicx}
\usepackage[hidelinks,hypertexnames=false]{hyperref}
\setcounter{secnumdepth}{0}
\setlength{\parindent}{0pt}
\setlength{\belowcaptionskip}{6pt}
"""
FLOATS = ("table", "figure")
LETTERS = {"further": "S", "ledger": "L"}  # before the numbers of what the paper has no number for
COUNTERS = r"\setcounter{FLOAT}{0}\renewcommand{\theFLOAT}{LETTER\arabic{FLOAT}}"
FIGURE = r"""\begin{figure}[htbp]
\centering
\includegraphics[width=\textwidth,height=0.8\textheight,keepaspectratio]{%s}
\caption{%s}
\label{fig:%s}
\end{figure}"""


def build(tables: list[Path], figures: list[Path], captions: Path, out: Path, *, scale: str) -> str:
    """Write out/paper.tex, and out/paper.pdf if pdflatex is there; return in a line what was made.

    tables: the .tex files; figures: the .pdf files; both are read where they are; the numbered ones stand first, under the
    paper's numbers. captions: folder of <figure>.rst. FileNotFoundError for an input or a caption that is not there,
    ValueError for a file of another kind, or with LaTeX's error for a document that does not compile.
    """
    out = Path(out)
    _check(tables, ".tex")
    _check(figures, ".pdf")
    with atomic_path(out / "paper.tex") as partial:
        partial.write_text(_document(tables, figures, Path(captions), out, scale), encoding="utf-8")
    (out / "paper.pdf").unlink(missing_ok=True)  # of an older paper.tex
    if not shutil.which(ENGINE):
        return f"{out / 'paper.tex'} is written; no paper.pdf: no LaTeX engine ({ENGINE}) is installed"
    return _compile(out)


def _check(paths: list[Path], suffix: str) -> None:
    """ValueError unless all paths end in `suffix`, FileNotFoundError unless they are files."""
    for path in map(Path, paths):
        if path.suffix != suffix:
            raise ValueError(f"{path}: a {suffix} file is wanted; the verbs that make it write one as {path.stem}{suffix}")
        if not path.is_file():
            raise FileNotFoundError(f"{path}: not there; `snakemake {path.stem}` makes it")


def _document(tables: list[Path], figures: list[Path], captions: Path, out: Path, scale: str) -> str:
    """The text of paper.tex, an artefact a section."""
    lines = [HEAD + rf"\title{{Tables, figures and claims of FLARE++, scale {latex_text(scale)}}}", r"\author{}\date{}"]
    lines += [r"\begin{document}", r"\maketitle", r"\tableofcontents", r"\clearpage"]
    paths = {path.stem: path for path in map(Path, [*tables, *figures])}
    letter = ""
    for name in sorted(paths, key=_place):
        relative = Path(os.path.relpath(paths[name], out)).as_posix()
        kind, number = _kind(name)
        lines.append(rf"\section{{{title(name)}}}")
        lines += [rf"\setcounter{{{kind}}}{{{number - 1}}}"] if number else []
        if letter != LETTERS.get(kind, ""):
            letter = LETTERS[kind]
            lines += [COUNTERS.replace("FLOAT", float_).replace("LETTER", letter) for float_ in FLOATS]
        if paths[name].suffix == ".pdf":
            lines.append(FIGURE % (relative, _caption(captions / f"{name}.rst", scale), name))
        else:
            lines.append(rf"\input{{{relative}}}")
        lines.append(r"\clearpage")
    return "\n".join([*lines, r"\end{document}", ""])


def _kind(name: str) -> tuple[str, int]:
    """What an artefact is, a key of LETTERS unless the paper has a number for it, and that number, or 0."""
    found = re.fullmatch(r"(table|figure)(\d+)", name)
    return (found[1], int(found[2])) if found else ("ledger" if name == "ledger" else "further", 0)


def _place(name: str) -> tuple:
    kind, number = _kind(name)
    return ([*FLOATS, *LETTERS].index(kind), number, name)


def _caption(path: Path, scale: str) -> str:
    """The caption of a figure from its reStructuredText, whose only markup is literals and the name of the scale."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: not there; the caption of figure {path.stem}, in the folder of --captions")
    text = re.sub(r"\{\{ *snakemake\.config\[.scale.\] *\}\}", scale, path.read_text(encoding="utf-8"))
    parts = [latex_text(part) for part in re.split("``(.*?)``", " ".join(text.split()))]
    return "".join(rf"\texttt{{{part}}}" if place % 2 else part for place, part in enumerate(parts))


def _compile(out: Path) -> str:
    """Make out/paper.pdf; without a package that it needs there is none."""
    with TemporaryDirectory() as folder:
        options = ["-interaction=nonstopmode", "-halt-on-error", "-no-shell-escape", f"-output-directory={folder}"]
        for _ in range(PASSES):
            answer = subprocess.run([ENGINE, *options, "paper.tex"], cwd=out, capture_output=True, text=True, errors="replace",
                                    stdin=subprocess.DEVNULL)  # fmt: skip
            if answer.returncode:
                lacking = re.search(r"File `(.*?\.sty)' not found", answer.stdout)
                if lacking:
                    return f"{out / 'paper.tex'} is written; no paper.pdf: {ENGINE} lacks {lacking[1]}"
                said = re.search(r"^! .*?^l\.\d+.*?$", answer.stdout, re.MULTILINE | re.DOTALL)
                raise ValueError(f"{out / 'paper.tex'}: {ENGINE} failed: {said[0] if said else answer.stdout[-500:]}")
        with atomic_path(out / "paper.pdf") as partial:
            shutil.copyfile(Path(folder) / "paper.pdf", partial)
    return f"{out / 'paper.tex'} and {out / 'paper.pdf'} are written"
