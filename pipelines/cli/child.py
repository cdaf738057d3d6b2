"""The process of one job of a sweep; started by pipelines/hydra_launcher.py, which sends the config over stdin."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra.core.utils import run_job, setup_globals
from hydra.types import HydraContext
from hydra.version import setbase
from omegaconf import DictConfig

from pipelines import config
from pipelines.cli import job
from pipelines.cli.signals import Interrupts

_GRACE_SECONDS = 15.0
_NO_LOADER: Any = None  # a job composes nothing


def main() -> int:
    """Run the job that the sweep at the other end of stdin sends, and nobody else can."""
    interrupts = Interrupts()
    interrupts.install()
    try:
        setbase("1.3")
        setup_globals()
        config.register()
        cfg = pickle.load(sys.stdin.buffer)
        threading.Thread(target=_end_with_sweep, daemon=True, name="weightstream-sweep").start()
        return _run(cfg)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return interrupts.code


def _run(cfg: DictConfig) -> int:
    results: list[job.Status] = []
    run_job(
        task_function=lambda task: results.append(job.run(task)),
        config=cfg,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
        hydra_context=HydraContext(config_loader=_NO_LOADER, callbacks=Callbacks(cfg)),
    )
    results[0].write()
    return results[0].exit_code


def _end_with_sweep() -> None:
    """Interrupt this process once the sweep's end of the pipe is closed: it was killed, or has given up on us."""
    while os.read(0, 1):  # the descriptor, for a thread blocked in the buffered file would hold its lock at exit
        pass
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(_GRACE_SECONDS)
    os._exit(128 + signal.SIGINT)


if __name__ == "__main__":
    sys.exit(main())
