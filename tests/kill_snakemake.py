"""Kill Snakemake and, run again, end with the same bits: `python tests/kill_snakemake.py --scale quick [TARGET ...]`.

The project is copied twice. In one copy the targets are made undisturbed. In the other Snakemake is killed (SIGKILL) at
random moments, unlocked as it asks, and started again until it is done; what it had started goes on meanwhile. Then every
run of the two is compared, in all but times, memory and provenance.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from clone import clone, variables
from test_train import bits


def start(folder: Path, words: list[str]) -> subprocess.Popen:
    """Snakemake under the profile `local` in a copy, with the copy's own package; its words go to snakemake.log."""
    command = [sys.executable, "-m", "snakemake", "--profile", "workflow/profiles/local", *words]
    with open(folder / "snakemake.log", "w") as log:
        return subprocess.Popen(command, cwd=folder, env=variables(folder), stdout=log, stderr=subprocess.STDOUT)


def run(folder: Path, words: list[str]) -> tuple[int, str]:
    """Exit code and words of a whole call."""
    code = start(folder, words).wait()
    return code, (folder / "snakemake.log").read_text()


def kill(folder: Path, words: list[str], due: Callable[[float], bool]) -> bool:
    """Start, and SIGKILL when it is due, by the time of the start; whether it was still at work."""
    started, process = time.time(), start(folder, words)
    while process.poll() is None and not due(started):
        time.sleep(0.01)
    process.kill()
    return process.wait() == -signal.SIGKILL


def differences(first: Path, second: Path) -> tuple[int, list[str]]:
    """How many runs were compared, and what differs."""
    runs = [{path.parent.relative_to(folder) for path in folder.glob("results/*/runs/**/model.safetensors")}
            for folder in (first, second)]
    found = [f"{path}: in one copy only" for path in sorted(runs[0] ^ runs[1])]
    found += [f"{path}: other bits" for path in sorted(runs[0] & runs[1]) if bits(first / path) != bits(second / path)]
    return len(runs[0] & runs[1]), found


def disturb(folder: Path, words: list[str], moments: list[Callable[[float], bool]]) -> int:
    """Make the targets with a kill at each of the moments; returns how many left a lock."""
    locked = 0
    for number, due in enumerate(moments):
        for _ in range(5):
            if working := kill(folder, words, due):
                break
            shutil.rmtree(folder / "results", ignore_errors=True)  # done first: from the start
        assert working, f"done, or failed, before kill {number + 1}\n" + (folder / "snakemake.log").read_text()
        if any(folder.glob(".snakemake/locks/*")):
            code, said = run(folder, words)
            assert code != 0 and "--unlock" in said, said
            assert run(folder, ["--unlock", *words])[0] == 0
            locked += 1
    code, said = run(folder, words)
    assert code == 0, said
    return locked


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", default="quick")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=120, help="a kill comes at most so long after a start")
    parser.add_argument("targets", nargs="*", default=[])
    arguments = parser.parse_args()
    words = ["--config", f"scale={arguments.scale}", "--", *arguments.targets]
    with tempfile.TemporaryDirectory(prefix="killed snakemake ") as folder:
        first, second = (clone(Path(folder) / name) for name in ("undisturbed", "killed"))
        started = time.monotonic()
        code, said = run(first, words)
        assert code == 0, said
        print(f"undisturbed: {time.monotonic() - started:.0f} s", flush=True)
        waits = [random.Random(number).uniform(0.2, 1) * arguments.seconds for number in range(arguments.kills)]
        locked = disturb(second, words, [lambda started, wait=wait: time.time() > started + wait for wait in waits])
        print(f"killed {arguments.kills} times, {locked} of them in need of --unlock", flush=True)
        count, found = differences(first, second)
    print("\n".join([*found, f"{count} runs, {len(found)} differ"]))
    return bool(found) or not count


if __name__ == "__main__":
    sys.exit(main())
