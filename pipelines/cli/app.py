"""Hydra's main function around a job: flags, refusals before anything starts, exit codes."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra._internal.utils import get_args_parser  # Hydra has no public way to know what its own flags will do
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from pipelines import config, hydra_launcher, torchrun
from pipelines.cli import job, rank, sweep, usage
from pipelines.cli.signals import Interrupts
from pipelines.suggest import explain
from stages.errors import ConfigError, WeightstreamError


class App:
    """The function that Hydra calls for each job. Collects what came of the jobs.

    Exit codes: 0 all updates committed and verified; 1 not so; 2 the config was refused; 130 Ctrl-C, 143 SIGTERM.
    """

    def __init__(self) -> None:
        self.finished: list[job.Status] = []
        self.sweep_folder: str | None = None

    def __call__(self, cfg: DictConfig) -> None:
        status = job.run(cfg)
        self.finished.append(status)
        if HydraConfig.get().mode == RunMode.MULTIRUN:  # a launcher other than ours
            status.write()
            if status.failed:
                raise WeightstreamError(status.error or "the job failed")

    def main(self, argv: list[str]) -> int:
        """Run what `argv` asks for and return the exit code."""
        interrupts = Interrupts()
        interrupts.install()
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # a stage of your own in the current folder is found, and hides nothing
        try:
            return self._main(argv)
        except KeyboardInterrupt:
            print("\ninterrupted", file=sys.stderr)
            return interrupts.code
        except BrokenPipeError:  # the reader of our output has gone, as `| head` does
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        except (HydraException, OmegaConfBaseException) as error:
            job.show(explain(error, config.compose_config([])))
            return 2
        except WeightstreamError as error:
            job.show(error)
            return 2 if isinstance(error, ConfigError) else 1

    def _main(self, argv: list[str]) -> int:
        args = _parse(argv)
        if args.help:
            print(usage.text())
            return 0
        config.register()
        hydra_launcher.register()
        runs = not (args.hydra_help or args.cfg or args.info or args.shell_completion)
        if runs and torchrun.rank() > 0:
            return rank.under_torchrun()
        if runs:
            searchpath = [f"hydra.searchpath=[file://{os.path.abspath(args.config_dir)}]"] if args.config_dir else []
            settings = config.precheck([*args.overrides, *searchpath], sweep=args.multirun)
            if settings is not None and settings["task"] != "run":
                return job.perform(settings, Path.cwd())  # leaves nothing behind, so needs no run folder
        start = hydra.main(config_path=str(config.CONF), config_name="config", version_base="1.3")(self)
        before = os.environ.get("HYDRA_FULL_ERROR")
        os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then leaves its errors to us
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", category=UserWarning, module="hydra")
                start()
        finally:
            if before is None:
                del os.environ["HYDRA_FULL_ERROR"]
            else:
                os.environ["HYDRA_FULL_ERROR"] = before
        if self.sweep_folder is not None:
            sweep.summarize(self.finished, self.sweep_folder)
            return int(any(status.failed for status in self.finished))
        return max((status.exit_code for status in self.finished), default=0)


def _parse(argv: list[str]) -> Any:
    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{message}\n  settings are written key=value, without dashes; --help shows examples")

    parser.error = refuse  # type: ignore[method-assign]
    try:
        return parser.parse_args(argv)
    except argparse.ArgumentError as error:
        refuse(str(error))
