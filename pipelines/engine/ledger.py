"""What a real engine does not keep track of: how much of an update arrived, and whether the weights are whole."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipelines.engine.loading.base import Outcome


@dataclass(slots=True)
class Ledger:
    """`names` are the model's tensors. `updates`, `errors` and `commits` count update calls and finished updates."""

    names: frozenset[str]
    updates: int = 0
    errors: int = 0
    commits: int = 0
    _written: set[str] = field(default_factory=set)
    _spoilt: str | None = None

    @property
    def half_loaded(self) -> str | None:
        """Why the weights are not those of one version, or None."""
        if self._spoilt is not None:
            return self._spoilt
        return (
            f"{len(self._written)} of {len(self.names)} tensors of an unfinished update are in"
            if self._written
            else None
        )

    def took(self, outcome: Outcome) -> None:
        """Record one update call. A failed one spoils the weights if it, or one before it, wrote anything."""
        self._written.update(outcome.applied)
        if outcome.error is None:
            self.updates += 1
            return
        self.errors += 1
        if self._written:
            self.spoil(f"an update failed: {outcome.error}")

    def spoil(self, reason: str) -> None:
        """The weights are not those of one version until every tensor was sent again and the update finished."""
        self._spoilt = reason
        self._written.clear()

    def settle(self) -> None:
        """The weights count as whole, as far as can be known."""
        self._spoilt = None
        self._written.clear()

    def commit(self) -> list[str]:
        """An update was finished. Returns what a real engine would not have noticed."""
        missing = sorted(self.names - self._written)
        self.commits += 1
        self._written.clear()
        if not missing:
            self._spoilt = None
            return []
        some = ", ".join(missing[:3]) + ("..." if len(missing) > 3 else "")
        return [f"{len(missing)} of {len(self.names)} tensors were not sent and keep their old values: {some}"]
