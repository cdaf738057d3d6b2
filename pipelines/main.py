"""A run of the command line: a trainer, an updater, a number of updates, proof of each, the report."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from pipelines import ray_launcher, report_view, world
from pipelines.config import build
from pipelines.report import REFUSED, UpdateReport, write_report
from pipelines.trainers.base import Trainer
from pipelines.updater import WeightUpdater
from stages.backends.base import PROOFS
from stages.comm import Comm
from stages.errors import WeightstreamError

log = logging.getLogger("weightstream")

REPORT = "report.json"
_NEW_TOKENS = 8


def run(settings: dict[str, Any], output: Path) -> int:
    """Make the updates that `settings` ask for, on as many ranks. Writes report.json into `output` and prints it, whatever
    happens.

    Returns 0 only if every update was committed and verified. Raises what the trainer or the updater raises.
    """

    def show(report: dict[str, Any]) -> None:
        write_report(report, output / REPORT)
        console = report_view.table_console()
        if any(update["outcome"] != REFUSED for update in report["updates"]):
            report_view.show(report, console)
        if report["updates"]:
            console.print(f"report: {output / REPORT}", soft_wrap=True)

    if settings["launcher"]["kind"] == "ray":
        return ray_launcher.run(settings, show)
    with world.lead(settings):
        return make_updates(settings, show)


def make_updates(
    settings: dict[str, Any],
    show: Callable[[dict[str, Any]], None] | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> int:
    """One rank's part in it: a trainer, an updater, the updates, their proof. Collective; rank 0 is who shows the report.

    Raises KeyboardInterrupt between two updates once `stopped`.
    """
    comm = Comm.from_torch(settings["session"]["timeouts"]["agree"])
    with comm.together("trainer"):
        trainer: Trainer = build(settings["trainer"], Trainer)  # type: ignore[type-abstract]
    updater = WeightUpdater.from_config(settings, reference=trainer.reference)
    verify = settings["session"]["verify"]
    try:
        with updater, _progress(settings, updater, shown=comm.is_head) as begin:
            for number in range(settings["updates"]):
                if stopped():
                    raise KeyboardInterrupt
                trainer.step()
                begin(number)
                update = updater.update(trainer.source)
                if verify["probe"] or verify["minimum"] == "probe":
                    _prove(updater, update, trainer, verify["minimum"])
                log.info("update %d: version %s %s, %d bytes", number + 1, update.version, update.outcome, update.bytes)
    finally:
        if show is not None:
            show(updater.report.to_json())
    return 0 if updater.report.outcome == "committed" else 1


def _prove(updater: WeightUpdater, update: UpdateReport, trainer: Trainer, minimum: str = "acknowledged") -> None:
    """Let each engine generate greedily, and hold every token and log-probability against the trainer's own forward.

    Collective: rank 0 asks the engines, all ranks take part in the forward. Raises WeightstreamError when a token is not what
    these weights say, or when a probe is demanded that cannot be made.
    """
    prompts = [*trainer.prompts()]
    if minimum == "probe" and not prompts:
        raise WeightstreamError("session.verify.minimum=probe: this trainer has no forward pass to compare tokens with")
    comm = updater.comm
    committed = [engine.url for engine in update.engines if engine.outcome == "committed"]
    for url in comm.meet("engines to prove", committed)[0]:
        for prompt in prompts:
            answer: Any = []
            with comm.together("generate"):
                if comm.is_head:
                    answer = updater.generate(url, prompt, _NEW_TOKENS)
            tokens, logprobs = comm.meet("tokens", answer)[0]
            with comm.together("prove"):
                wrong = _first_wrong(trainer, prompt, tokens, logprobs)
                for engine in update.engines:
                    if wrong and engine.url == url:
                        engine.error = wrong
                        raise WeightstreamError(f"{url} generates otherwise than the trainer: {wrong}")
    for engine in update.engines:
        weaker = engine.verified is None or PROOFS.index(engine.verified) < PROOFS.index("probe")
        if prompts and engine.outcome == "committed" and weaker:
            engine.verified = "probe"


def _first_wrong(trainer: Trainer, prompt: list[int], tokens: list[int], logprobs: list[float]) -> str | None:
    for n, (score, logprob) in enumerate(zip(trainer.score(prompt, tokens), logprobs, strict=True)):
        if max(abs(score.logprob - logprob), score.best - score.logprob) > trainer.tolerance:
            return (
                f"token {n} after {prompt} is {tokens[n]} with logprob {logprob:.5f}; the trainer's forward "
                f"gives it {score.logprob:.5f}, and {score.best:.5f} to the likeliest"
            )
    return None


@contextmanager
def _progress(settings: dict[str, Any], updater: WeightUpdater, shown: bool) -> Iterator[Any]:
    """A bar of bytes per update on a terminal; `progress=on` forces it, `off` hides it. Never but on rank 0."""
    console = Console(stderr=True)
    shown = shown and (settings["progress"] == "on" or (settings["progress"] == "auto" and console.is_terminal))
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, disable=not shown) as progress:
        bar = progress.add_task("starting", total=None)

        def begin(number: int) -> None:
            progress.reset(bar, description=f"update {number + 1} of {settings['updates']}", total=None)

        updater.on_progress = lambda done, total: progress.update(bar, completed=done, total=total)
        yield begin
