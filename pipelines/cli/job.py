"""One job: run the settings in a run folder, and say what came of it in a form that a sweep can list."""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from pipelines import config
from pipelines.cli.advice import advice
from pipelines.redact import redacted
from pipelines.report import read_object, read_report
from stages.errors import ConfigError, WeightstreamError

log = logging.getLogger("weightstream")

STATUS = "status.json"
REPORT = "report.json"


@dataclass
class Status:
    """What a job came to; `status.json` in its folder. `number` is its place in the sweep."""

    number: int
    overrides: list[str]
    folder: str
    exit_code: int = 0
    error: str | None = None
    traceback: str | None = None
    report: dict[str, Any] | None = field(default=None, repr=False)

    @property
    def failed(self) -> bool:
        return self.exit_code != 0

    def write(self) -> None:
        values = redacted(asdict(self)) | {"status": "failed" if self.failed else "completed"}
        del values["report"]
        target = Path(self.folder) / STATUS
        unfinished = target.with_suffix(".tmp")
        unfinished.write_text(json.dumps(values, indent=1) + "\n")
        os.replace(unfinished, target)

    @classmethod
    def read(cls, path: Path) -> Status:
        """Raises WeightstreamError for a file that is no status."""
        values = read_object(path)
        kinds = {"number": int, "exit_code": int, "overrides": list, "folder": str}
        wrong = [n for n, kind in kinds.items() if type(values.get(n)) is not kind]
        words = [values.get("error") or "", values.get("traceback") or "", *([] if wrong else values["overrides"])]
        if wrong or not all(isinstance(w, str) for w in words):
            raise WeightstreamError(f"{path} is no status of a job")
        return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})

    def read_report(self) -> None:
        """Take in the job's report.json, if it came that far. Raises WeightstreamError for a file that is none."""
        path = Path(self.folder) / REPORT
        self.report = read_report(path) if path.is_file() else None


def run(cfg: DictConfig) -> Status:
    """Run the job that Hydra composed, in the run folder that it made. Errors end here: told, logged and in the result.

    Expected errors are two lines on stderr, with their traceback in the log; unexpected ones show it in both.
    """
    status = describe(HydraConfig.get())
    try:
        settings = config.load(cfg)
        status.exit_code = perform(settings, Path(status.folder))
    except WeightstreamError as error:
        status.exit_code = 2 if isinstance(error, ConfigError) else 1
        log.info("failed", exc_info=True)
        show(error)
        _keep(status, error)
    except Exception as error:
        status.exit_code = 1
        log.exception("unexpected error")
        _keep(status, error)
    except KeyboardInterrupt:
        log.info("interrupted")
        raise
    return status


def perform(settings: dict[str, Any], folder: Path) -> int:
    """Do the task. Imports torch here, which a refused config need not wait for."""
    if settings["task"] == "run":
        from pipelines.main import run as run_updates

        return run_updates(settings, folder)
    from pipelines import tasks

    return tasks.run(settings)


def describe(hydra: Any) -> Status:
    """The job's number, overrides and folder."""
    number = hydra.job.num if not OmegaConf.is_missing(hydra.job, "num") else 0
    return Status(int(number), [str(o) for o in hydra.overrides.task], str(hydra.runtime.output_dir))


def show(error: Exception) -> None:
    """What is wrong, and what to do; without the traceback."""
    print(redacted(f"weightstream: {error}"), file=sys.stderr)
    if (what := advice(error)) is not None:
        print(f"  {what}", file=sys.stderr)


def _keep(status: Status, error: Exception) -> None:
    status.error = str(error) or type(error).__name__
    status.traceback = "".join(traceback.format_exception(error))
