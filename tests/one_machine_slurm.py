"""Slurm on this machine, with four GPUs that are none: `python tests/one_machine_slurm.py COMMAND ...` runs a command in it.

Daemons, configuration and state live in a temporary folder and end with the command. Its packages have to be there (on
Debian and Ubuntu slurmctld slurmd slurm-client munge); without them `Unavailable` says which programs are missing.
"""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch")
DEVICES = ("null", "zero", "full", "random")  # slurmd wants a character device for each GPU, which nobody opens
CONFIGURATION = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherParams=OverMemoryKill,UsePss
JobAcctGatherFrequency=1
AccountingStorageType=accounting_storage/none
MinJobAge=3600
SchedulerParameters=sched_min_interval=100000,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
GresTypes=gpu
KillWait=30
NodeName=one NodeHostname={host} NodeAddr=127.0.0.1 CPUs=8 RealMemory=64000 Gres=gpu:4
PartitionName=all Nodes=one Default=YES DefMemPerCPU=1000 State=UP
"""


class Unavailable(Exception):
    """Slurm is not installed; the message says what is missing."""


def find() -> None:
    """Put the daemons on the path, or raise Unavailable."""
    os.environ["PATH"] += ":/usr/sbin"
    if missing := [name for name in DAEMONS if shutil.which(name) is None]:
        raise Unavailable(f"{', '.join(missing)} not found; apt-get install slurmctld slurmd slurm-client munge")


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def configure(folder: Path) -> dict[str, str]:
    """Write configuration, key and an srun that knows them; returns the environment in which commands find them.

    An executor that clears the environment of its job steps takes away the path of a configuration that is not Slurm's own.
    """
    host = socket.gethostname().partition(".")[0]
    text = CONFIGURATION.format(folder=folder, host=host, user=getpass.getuser(), ports=free_ports(2))
    (folder / "slurm.conf").write_text(text)
    lines = [f"NodeName=one Name=gpu File=/dev/{device}\n" for device in DEVICES]
    (folder / "gres.conf").write_text("AutoDetect=off\n" + "".join(lines))
    for name in ("state", "spool", "bin"):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    srun = folder / "bin" / "srun"
    srun.write_text(f'#!/bin/sh\nSLURM_CONF={folder}/slurm.conf exec {shutil.which("srun")} "$@"\n')
    srun.chmod(0o755)
    return os.environ | {"SLURM_CONF": f"{folder}/slurm.conf", "PATH": f"{folder}/bin:{os.environ['PATH']}"}


@contextmanager
def daemon(folder: Path, environment: dict[str, str], name: str, *words: str) -> Iterator[subprocess.Popen]:
    """A daemon in the foreground, its log in the folder; ends with the block."""
    with open(folder / f"{name}.log", "w") as log:
        process = subprocess.Popen([name, *words], stdout=log, stderr=subprocess.STDOUT, env=environment)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for_node(environment: dict[str, str], folder: Path, seconds: float = 90) -> None:
    """Until the node takes jobs; RuntimeError with the last words of the daemons if it does not."""
    deadline, state = time.monotonic() + seconds, ""
    while not state.startswith("idle"):
        if time.monotonic() > deadline:
            words = [f"{name}: {(folder / f'{name}.log').read_text()[-500:]}" for name in DAEMONS[:3]]
            raise RuntimeError(f"Slurm: the node is {state or 'unknown'} after {seconds:.0f} s\n" + "\n".join(words))
        time.sleep(0.2)
        command = ["sinfo", "--noheader", "--Format=StateLong"]
        state = subprocess.run(command, capture_output=True, text=True, env=environment).stdout.strip()


@contextmanager
def slurm() -> Iterator[dict[str, str]]:
    """Slurm for as long as the block lasts: yields its commands' environment. Unavailable where it is not installed."""
    find()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True)))
        environment = configure(folder)
        files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        starts = {"munged": ("--force", "--foreground", f"--socket={folder}/munge.socket", *files),
                  "slurmctld": ("-D",), "slurmd": ("-D", "-N", "one")}  # fmt: skip
        for name, words in starts.items():
            stack.enter_context(daemon(folder, environment, name, *words))
        wait_for_node(environment, folder)
        try:
            yield environment
        finally:
            subprocess.run(["scancel", "--user", getpass.getuser()], env=environment)
            wait_until_empty(environment)


def wait_until_empty(environment: dict[str, str], seconds: float = 40) -> None:
    """Until no job runs any more: their processes end with them."""
    deadline = time.monotonic() + seconds
    while subprocess.run(["squeue", "--noheader"], capture_output=True, text=True, env=environment).stdout.strip():
        if time.monotonic() > deadline:
            return
        time.sleep(0.2)


def main() -> int:
    try:
        with slurm() as environment:
            return subprocess.run(sys.argv[1:], env=environment).returncode
    except Unavailable as error:
        print(f"no Slurm here: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
