"""What a real engine does not keep track of: how much of an update arrived, and whether the weights are whole."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipelines.engine.loading.base import Outcome


@dataclass(slots=True)
class Ledger:
    """`names` are the model's tensors. `half_loaded` says why the weights are not those of one version, or None."""

    names: frozenset[str]
    updates: int = 0
    errors: int = 0
    commits: int = 0
    half_loaded: str | None = None
    _touched: set[str] = field(default_factory=set)

    def took(self, outcome: Outcome) -> None:
        """Record one update call."""
        if outcome.error is None:
            self.updates += 1
            self._touched.update(outcome.applied)
            if outcome.applied and self.half_loaded is None:
                self.half_loaded = "an update has begun and is not finished"
            return
        self.errors += 1
        self.spoil(f"an update failed: {outcome.error}")

    def spoil(self, reason: str) -> None:
        """The weights are not those of one version until every tensor was sent again and finished."""
        self.half_loaded = reason
        self._touched.clear()

    def commit(self) -> list[str]:
        """An update was finished. Returns what a real engine would not have noticed."""
        missing = sorted(self.names - self._touched)
        spoilt = self.half_loaded is not None and self.half_loaded != "an update has begun and is not finished"
        self.commits += 1
        self._touched.clear()
        if not missing:
            self.half_loaded = None
            return []
        if not spoilt:
            self.half_loaded = None
        count = f"{len(missing)} of {len(self.names)} tensors were not sent and keep their old values"
        return [f"{count}: {', '.join(missing[:3])}{'...' if len(missing) > 3 else ''}"]
