"""Devices of a job's own on a machine with several: `python -m flarepp.devices N COMMAND ...` takes N, then becomes COMMAND.

Snakemake counts devices (`resources: gpu`), it does not say which. A device taken is a locked file: free again when the
command and its forks are gone, however they ended. One process collects at a time, behind a turnstile, so that of two that
need several neither waits for what the other holds, and none is overtaken for ever. Where Snakemake counts (profile `gpu4`)
nothing waits; where it does not, a job that waits has its cores meanwhile.

The devices are those of CUDA_VISIBLE_DEVICES where it is set, else all that nvidia-smi lists. In a scheduler's allocation
they are its devices: a job that gets them all passes, jobs that share an allocation take theirs of it.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NAME = re.compile(r"\d+|(GPU|MIG)-[\w/-]+")  # of a device; at anything else CUDA stops reading CUDA_VISIBLE_DEVICES

LISTING_SECONDS = 120


def pool() -> list[str]:
    """The devices to choose from. nvidia-smi's go by UUID: in the order of its numbers they need not be CUDA's.

    OSError if nvidia-smi hangs.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        try:
            listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=LISTING_SECONDS).stdout
        except FileNotFoundError:
            return []
        except subprocess.TimeoutExpired:
            told = f"nvidia-smi -L did not answer in {LISTING_SECONDS} s; CUDA_VISIBLE_DEVICES can name them"
            raise OSError(told) from None
        return re.findall(r"^GPU .*\(UUID: (GPU-[\w-]+)\)", listed, re.MULTILINE)
    names = [*dict.fromkeys(name.strip() for name in given.split(","))]  # one named twice is one
    valid = [NAME.fullmatch(name) is not None for name in names]
    return names[: (*valid, False).index(False)]


def lock_folder() -> Path:
    """Of this user on this machine; where a scheduler numbers the devices of each allocation, of the allocation."""
    words = ["flarepp-devices", str(os.getuid()), os.environ.get("SLURM_JOB_ID")]
    return Path(tempfile.gettempdir()) / "-".join(filter(None, words))


def lock(path: Path) -> bool:
    """Hold a file for as long as this process lives, whatever it becomes, and its forks; False where another does."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    os.set_inheritable(descriptor, True)
    return True


def take(number: int, devices: list[str], folder: Path) -> list[str]:
    """Lock `number` of the devices; waits until as many are free, and says so. OSError for a folder that is not ours."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():
        raise PermissionError(f"{folder} is another user's; TMPDIR can name a place without one")
    taken: set[str] = set()
    said = None
    with open(folder / "turnstile", "w") as turnstile:
        fcntl.flock(turnstile, fcntl.LOCK_EX)
        while True:
            for name in devices:
                if len(taken) < number and name not in taken and lock(folder / name.replace("/", "_")):
                    taken.add(name)
            if len(taken) == number:
                return [name for name in devices if name in taken]
            if said != (said := len(taken)):
                print(f"waiting for devices: {said} of {number} taken, the others are in use", file=sys.stderr, flush=True)
            time.sleep(0.2)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m flarepp.devices", description="Run a command on CUDA devices of its own.")
    top.add_argument("--up-to", action="store_true", help="be content with fewer where there are fewer, or none")
    top.add_argument("number", type=int, metavar="N", help="how many")
    top.add_argument("command", metavar="COMMAND", help="what to run on them")
    top.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    return top


def choose(number: int, up_to: bool) -> None:
    """Set CUDA_VISIBLE_DEVICES to devices of this process's own. ValueError if there are fewer, or for a negative number."""
    if number < 0:
        raise ValueError(f"{number} asked for; allowed: 0 and more")
    devices = pool()
    number = min(number, len(devices)) if up_to else number
    if number > len(devices):
        listed = "CUDA_VISIBLE_DEVICES has" if "CUDA_VISIBLE_DEVICES" in os.environ else "nvidia-smi lists"
        raise ValueError(f"{number} asked for; {listed} {len(devices)}")
    if number and not (number == len(devices) and "SLURM_JOB_ID" in os.environ):
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(take(number, devices, lock_folder()))


def main() -> int:
    """Become the command. Exit code 2: there are fewer devices, or they cannot be listed or locked; 127: there is no command."""
    arguments = parser().parse_args()
    try:
        choose(arguments.number, arguments.up_to)
    except (ValueError, OSError) as error:
        print(f"error: devices: {error}", file=sys.stderr)
        return 2
    try:
        os.execvp(arguments.command, [arguments.command, *arguments.arguments])
    except OSError as error:
        print(f"error: {arguments.command}: {error.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main())
