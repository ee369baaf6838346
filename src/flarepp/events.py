"""TensorBoard event files of a run: the rows of its learning curve as they come. An option: no error and no weight
depends on it, but time and memory of the process do.

They lie in the run's folder, so that `tensorboard --logdir results/quick/runs` shows all runs by what they are.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

FILES = "events.out.tfevents.*"


def require() -> None:
    """ValueError where the package tensorboard is missing."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ValueError("tensorboard: got True, but the package tensorboard is not installed; "
                         "pip install 'flarepp[tensorboard]', from the project's folder pip install -e '.[tensorboard]'")


def event_writer(run_dir: Path) -> Callable[[dict], None]:
    """What writes one row, {"step": ..., name: number}, to a new event file in `run_dir`; older ones there are removed.

    ValueError where the package tensorboard is missing.
    """
    require()
    from torch.utils.tensorboard import SummaryWriter

    for old in run_dir.glob(FILES):
        old.unlink()
    summary = SummaryWriter(str(run_dir))

    def write(row: dict) -> None:
        for name, value in row.items():
            if name != "step":
                summary.add_scalar(name, value, row["step"])
        summary.flush()

    return write
