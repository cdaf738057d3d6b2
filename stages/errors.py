"""Errors a caller can catch. Every message says what was expected, what was found and what to do."""

from __future__ import annotations

from collections.abc import Sequence


class WeightstreamError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(WeightstreamError):
    """A setting is unknown, missing or has a value that cannot work."""


class CompositionError(ConfigError):
    """The stages, the backend and the transport do not fit together."""


class PreflightError(WeightstreamError):
    """The planned tensors are not the ones an engine expects. `problems` lists every mismatch, the text the first ones."""

    SHOWN = 40

    def __init__(self, engine: str, problems: list[str], hints: Sequence[str] = ()) -> None:
        self.engine = engine
        self.problems = problems
        many = "1 mismatch" if len(problems) == 1 else f"{len(problems)} mismatches"
        more = len(problems) - self.SHOWN
        shown = [*hints, *problems[: self.SHOWN], *([f"... and {more} more"] if more > 0 else [])]
        lines = "\n  ".join(shown)
        super().__init__(
            f"preflight: {engine} does not expect what would be sent ({many}); nothing was touched:\n  {lines}"
        )


class PlanMismatch(WeightstreamError):
    """What streams by is not what was planned."""


class TransportError(WeightstreamError):
    """Bytes could not be moved, or arrived changed."""


class WaitTimeout(WeightstreamError):
    """A wait reached its configured limit."""


class EngineError(WeightstreamError):
    """An engine failed or refused a request; carries the engine's own words.

    Attributes: `engine` (URL or actor name), `phase` (pause, begin, put, ...), `status` (HTTP status or None),
    `body` (the answer's text, cut to 2,000 characters).
    """

    def __init__(self, engine: str, phase: str, message: str, *, status: int | None = None, body: str = "") -> None:
        self.engine = engine
        self.phase = phase
        self.status = status
        self.body = body[:2000]
        super().__init__(f"{engine}: {phase}: {message}")


class EngineUnreachable(EngineError):
    """No answer: connection refused, dropped or timed out. The engine may be dead or restarting."""


class EngineBusy(EngineError):
    """Another updater on this host holds the engine; carries who."""

    def __init__(self, engine: str, holder: str) -> None:
        super().__init__(
            engine,
            "probe",
            f"{holder} updates this engine; an engine has one updater at a time: close that one, or remove the engine there",
        )


class RemoteRankError(WeightstreamError):
    """Another trainer rank failed; carries that rank's root cause."""

    def __init__(self, rank: int, cause: str) -> None:
        self.rank = rank
        self.cause = cause
        super().__init__(f"trainer rank {rank} failed: {cause}")


class UpdateFailed(WeightstreamError):
    """An update did not commit on every required engine. `report` says which, and why."""

    def __init__(self, message: str, report: object) -> None:
        self.report = report
        super().__init__(message)
