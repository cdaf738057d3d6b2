"""A Hydra launcher that gives each job of a sweep a process of its own.

Hydra's own launcher runs jobs inside one process: a crash ends the sweep, and memory, threads, signal handlers and
environment of one job reach the next.

    this process                          job process (pipelines/cli/child.py)
    compose and check every job
    start it, send config over stdin  ->  run it in its folder, write status.json
    copy its output to output.log     <-  stdout and stderr
    keep stdin open                       stdin closed: the sweep is gone, so end as by Ctrl-C
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import IO

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, configure_log, filter_overrides, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from pipelines import config as settings
from pipelines import torchrun
from pipelines.cli.job import STATUS, Status, describe
from stages.errors import ConfigError, WeightstreamError

_GRACE_SECONDS = 15.0
_PLUGIN_MODULE = "hydra_plugins.weightstream"


@dataclass
class _Job:
    """A job of the sweep: what it is, its process once started, and the thread that copies its output."""

    status: Status
    config: DictConfig
    process: subprocess.Popen[bytes] | None = None
    copier: threading.Thread | None = None


class SubprocessLauncher(Launcher):
    """`n_jobs` jobs at a time. The task function's `finished` list, where it has one, gets the Status of each job."""

    __module__ = _PLUGIN_MODULE  # see register()

    def __init__(self, n_jobs: int = 1) -> None:
        if n_jobs < 1:
            raise ConfigError(f"hydra.launcher.n_jobs: {n_jobs} must be at least 1")
        self.n_jobs = n_jobs

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Called by Hydra before `launch`."""
        self._context, self._task, self._config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Check all jobs, run all jobs, whatever comes of each."""
        if torchrun.ranks() > 1:
            raise ConfigError(
                "a sweep starts the ranks of each job itself, and torchrun has started some already\n"
                "  start it without torchrun, with launcher.ranks=N"
            )
        setup_globals()
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        jobs = [self._compose(initial_job_idx + n, list(overrides)) for n, overrides in enumerate(job_overrides)]
        waiting, running = list(jobs), list[_Job]()
        try:
            while waiting or running:
                while waiting and len(running) < self.n_jobs:
                    job = waiting.pop(0)
                    running.append(job)
                    self._start(job)
                for job in [j for j in running if j.process is not None and j.process.poll() is not None]:
                    running.remove(job)
                    self._finish(job)
                time.sleep(0.02)
        finally:
            _stop(running)
        finished = getattr(self._task, "finished", None)
        if isinstance(finished, list):
            finished.extend(job.status for job in jobs)
            self._task.sweep_folder = os.path.abspath(self._config.hydra.sweep.dir)  # type: ignore[attr-defined]
        return [self._answer(job) for job in jobs]

    def _compose(self, number: int, overrides: list[str]) -> _Job:
        config = self._context.config_loader.load_sweep_config(self._config, overrides)
        with open_dict(config):
            config.hydra.job.id = number
            config.hydra.job.num = number
            folder = os.path.abspath(os.path.join(config.hydra.sweep.dir, config.hydra.sweep.subdir))
            config.hydra.runtime.output_dir = folder
        try:
            settings.check_job(config)
        except ConfigError as error:
            raise ConfigError(f"job {number} ({' '.join(filter_overrides(overrides))}): {error}") from error
        return _Job(describe(config.hydra), config)

    def _start(self, job: _Job) -> None:
        folder = Path(job.status.folder)
        folder.mkdir(parents=True, exist_ok=True)
        print(f"#{job.status.number}: {' '.join(job.status.overrides)}", flush=True)
        root = str(settings.CONF.parent)
        job.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "pipelines.cli.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))},
            start_new_session=True,  # Ctrl-C reaches us alone, and we pass it on
        )
        assert job.process.stdin is not None
        assert job.process.stdout is not None
        prefix = b"" if self.n_jobs == 1 else f"#{job.status.number} ".encode()
        streams = (job.process.stdout, folder / "output.log", prefix)
        job.copier = threading.Thread(target=_copy, args=streams, daemon=True, name="weightstream-output")
        job.copier.start()
        try:
            pickle.dump(job.config, job.process.stdin)
            job.process.stdin.flush()
        except BrokenPipeError:
            pass  # it died at once; its exit code and output tell

    def _finish(self, job: _Job) -> None:
        assert job.process is not None
        assert job.process.stdin is not None
        assert job.copier is not None
        code = job.process.returncode
        job.process.stdin.close()
        job.copier.join(_GRACE_SECONDS)
        path = Path(job.status.folder) / STATUS
        if path.is_file():
            try:
                job.status = Status.read(path)
                job.status.read_report()
            except WeightstreamError as error:
                job.status.exit_code, job.status.error = code or 1, str(error)
        else:  # it did not live to write one
            job.status.exit_code = code if code > 0 else 128 - code if code else 1
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            job.status.error = f"the process was {how}" if code < 0 else f"the process {how}"
            job.status.traceback = _tail(Path(job.status.folder) / "output.log")
            job.status.write()
            with contextlib.suppress(WeightstreamError):
                job.status.read_report()

    def _answer(self, job: _Job) -> JobReturn:
        # Always "completed": Hydra would raise the first failure and forget the rest. The summary lists all of them.
        answer = JobReturn(overrides=job.status.overrides, cfg=job.config, task_name="weightstream")
        answer.return_value = job.status.exit_code
        answer.status = JobStatus.COMPLETED
        return answer


def register() -> None:
    """Make the launcher known to Hydra, as `hydra/launcher=subprocess`.

    Hydra takes launchers from modules called hydra_plugins.* only. There is no such top-level package here, so this
    module gets a second name.
    """
    plugins = Plugins.instance()  # first: it looks through the real hydra_plugins, if one is installed
    if importlib.util.find_spec("hydra_plugins") is None:
        sys.modules["hydra_plugins"] = ModuleType("hydra_plugins")
    sys.modules[_PLUGIN_MODULE] = sys.modules[__name__]
    plugins.register(SubprocessLauncher)


def _copy(source: IO[bytes], log: Path, prefix: bytes) -> None:
    with open(log, "wb", buffering=0) as file:
        for line in source:
            file.write(line)
            sys.stdout.buffer.write(prefix + line)
            sys.stdout.flush()


def _tail(log: Path, lines: int = 40) -> str | None:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.is_file() else None


def _stop(jobs: list[_Job]) -> None:
    """Interrupt what still runs, give it time to clean up, then kill it."""
    alive = [job.process for job in jobs if job.process is not None]
    for process in alive:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + _GRACE_SECONDS
    for process in alive:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
