"""The table of what real engines took, as README.md shows it between its two markers.

Cells are tests marked `support`. A run in which all of an engine's cells ran writes that engine's rows anew; the other
rows stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from . import provision
from .served import Served

TABLE = provision.HERE / "support.md"
MARKERS = re.compile(r"(<!-- support:begin -->\n)(.*?)(<!-- support:end -->)", re.DOTALL)
NAMES = {"vllm": "vLLM", "sglang": "SGLang", "lmdeploy": "LMDeploy"}
TRANSPORTS = ("ipc", "nccl", "disk")
RANKS = (1, 2)
HEAD = "| engine | transport | tp=1 | tp=2 |\n|---|---|---|---|\n"


@dataclass
class Results:
    """What this run has seen: the cells it should run, by test, and how those that ran came out."""

    cells: dict[str, tuple[Served, str]] = field(default_factory=dict)
    passed: dict[str, bool] = field(default_factory=dict)

    def complete(self) -> list[str]:
        """Engines all of whose cells ran."""
        engines = {served.name for served, _ in self.cells.values()}
        left = {served.name for test, (served, _) in self.cells.items() if test not in self.passed}
        return sorted(engines - left)

    def row(self, engine: str, transport: str) -> str:
        """One line of the table."""
        name = f"{NAMES[engine]} {provision.version_of(engine)}"
        ours = [
            (served, self.passed[test])
            for test, (served, by) in self.cells.items()
            if (served.name, by) == (engine, transport)
        ]
        columns = [_column((_model(s), good) for s, good in ours if s.tp == tp) for tp in RANKS]
        return f"| {name} | {transport} | {' | '.join(columns)} |\n"


RESULTS = pytest.StashKey[Results]()


def refresh(old: str, results: Results) -> str:
    """`old` with the rows of every engine that this run has seen whole."""
    rows = {row.split("|")[1].split()[0]: "" for row in old.removeprefix(HEAD).splitlines()}
    for row in old.removeprefix(HEAD).splitlines(keepends=True):
        rows[row.split("|")[1].split()[0]] += row
    for engine in results.complete():
        rows[NAMES[engine]] = "".join(results.row(engine, transport) for transport in TRANSPORTS)
    return HEAD + "".join(rows[name] for name in sorted(rows))


def shown(readme: Path) -> str:
    """The table in the README, or an error that says what is missing."""
    found = MARKERS.search(readme.read_text())
    assert found is not None, f"{readme} has no lines <!-- support:begin --> and <!-- support:end -->"
    return found[2]


def _column(outcomes: Iterable[tuple[str, bool]]) -> str:
    every: dict[str, bool] = {}
    for model, fine in outcomes:
        every[model] = every.get(model, True) and fine
    good = ", ".join(model for model, fine in sorted(every.items()) if fine)
    bad = ", ".join(model for model, fine in sorted(every.items()) if not fine)
    return "; ".join(part for part in (good, bad and f"**failed:** {bad}") if part) or "no"


def _model(served: Served) -> str:
    recipe = served.recipe
    words = {"fp8": recipe.fp8, "fp8 online": "fp8_per_block" in served.extra, "tied": recipe.tied}
    return " ".join([recipe.arch, *(word for word, true in words.items() if true)])
