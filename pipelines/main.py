"""A run of the command line: a trainer, an updater, a number of updates, proof of each, the report."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from pipelines import report_view
from pipelines.config import build
from pipelines.report import REFUSED, UpdateReport
from pipelines.trainers.base import Trainer
from pipelines.updater import WeightUpdater
from stages.backends.base import PROOFS
from stages.errors import WeightstreamError

log = logging.getLogger("weightstream")

REPORT = "report.json"
_NEW_TOKENS = 8


def run(settings: dict[str, Any], output: Path) -> int:
    """Make the updates that `settings` ask for. Writes report.json into `output` and prints it, whatever happens.

    Returns 0 only if every update was committed and verified. Raises what the trainer or the updater raises.
    """
    trainer: Trainer = build(settings["trainer"], Trainer)  # type: ignore[type-abstract]
    updater = WeightUpdater.from_config(settings, reference=trainer.reference)
    console = report_view.table_console()
    verify = settings["session"]["verify"]
    try:
        with updater, _progress(settings, updater) as begin:
            for number in range(settings["updates"]):
                trainer.step()
                begin(number)
                update = updater.update(trainer.source)
                if verify["probe"] or verify["minimum"] == "probe":
                    _prove(updater, update, trainer, verify["minimum"])
                log.info("update %d: version %s %s, %d bytes", number + 1, update.version, update.outcome, update.bytes)
    finally:
        updater.report.write(output / REPORT)
        if any(update.outcome != REFUSED for update in updater.report.updates):
            report_view.show(updater.report.to_json(), console)
        if updater.report.updates:
            console.print(f"report: {output / REPORT}", soft_wrap=True)
    return 0 if updater.report.outcome == "committed" else 1


def _prove(updater: WeightUpdater, update: UpdateReport, trainer: Trainer, minimum: str = "acknowledged") -> None:
    """Let each engine generate greedily, and hold every token and log-probability against the trainer's own forward.

    Raises WeightstreamError when one is not what these weights say, or when a probe is demanded that cannot be made.
    """
    prompts = [*trainer.prompts()]
    if minimum == "probe" and not prompts:
        raise WeightstreamError("session.verify.minimum=probe: this trainer has no forward pass to compare tokens with")
    for engine in update.engines:
        if engine.outcome != "committed":
            continue
        for prompt in prompts:
            tokens, logprobs = updater.generate(engine.url, prompt, _NEW_TOKENS)
            for n, (score, logprob) in enumerate(zip(trainer.score(prompt, tokens), logprobs, strict=True)):
                if max(abs(score.logprob - logprob), score.best - score.logprob) > trainer.tolerance:
                    engine.error = (
                        f"token {n} after {prompt} is {tokens[n]} with logprob {logprob:.5f}; the trainer's forward "
                        f"gives it {score.logprob:.5f}, and {score.best:.5f} to the likeliest"
                    )
                    raise WeightstreamError(f"{engine.url} generates otherwise than the trainer: {engine.error}")
        if prompts and (engine.verified is None or PROOFS.index(engine.verified) < PROOFS.index("probe")):
            engine.verified = "probe"


@contextmanager
def _progress(settings: dict[str, Any], updater: WeightUpdater) -> Iterator[Any]:
    """A bar of bytes per update on a terminal; `progress=on` forces it, `off` hides it."""
    console = Console(stderr=True)
    shown = settings["progress"] == "on" or (settings["progress"] == "auto" and console.is_terminal)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, disable=not shown) as progress:
        bar = progress.add_task("starting", total=None)

        def begin(number: int) -> None:
            progress.reset(bar, description=f"update {number + 1} of {settings['updates']}", total=None)

        updater.on_progress = lambda done, total: progress.update(bar, completed=done, total=total)
        yield begin
