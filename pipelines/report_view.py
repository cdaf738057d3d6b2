"""The report as a table for people. Takes the dict that is written as report.json."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

_STYLES = {"committed": "green", "refused": "yellow", "aborted": "yellow", "tainted": "bold red"}
_LAST = 5  # updates that are shown besides the first


def table_console() -> Console:
    """Standard output; where that is no terminal, wide enough for our tables."""
    return Console(width=None if sys.stdout.isatty() else 120)


def show(report: dict[str, Any], console: Console) -> None:
    """Print one table for the whole run, and below it what went wrong."""
    console.print(render(report))
    for name, error in _errors(report["updates"]):
        console.print(Text(f"{name}: {error}", "red"), soft_wrap=True)


def render(report: dict[str, Any]) -> Table:
    """A column per update; rows for phases, bytes, rates, and the outcome of each engine."""
    every = report["updates"]
    updates = every if len(every) <= _LAST + 1 else [every[0], *every[-_LAST:]]
    left_out = f" (the first and the last {_LAST} of {len(every)} updates)" if len(updates) < len(every) else ""
    version = f", version {report['version']}" if report["version"] is not None else ""
    table = Table(title=Text(f"{report['outcome']}{version}{left_out}", _STYLES.get(report["outcome"], "")))
    table.add_column("version", no_wrap=True)
    for update in updates:
        table.add_column(str(update["version"]), justify="right")
    for phase in dict.fromkeys(phase for update in updates for phase in update["seconds"]):
        _row(table, f"{phase} ms", [update["seconds"].get(phase) for update in updates], 1e3, "{:.1f}")
    _row(table, "MB", [update["bytes"] for update in updates], 1e-6, "{:.2f}")
    _row(table, "GB/s", [update["gb_per_s"] for update in updates], 1, "{:.3f}")
    _row(table, "of copy limit", [update["limit_fraction"] for update in updates], 1, "{:.1%}")
    table.add_section()
    for url in dict.fromkeys(engine["url"] for update in updates for engine in update["engines"]):
        table.add_row(url, *(_engine(update, url) for update in updates))
    if not any(update["engines"] for update in updates):
        table.add_row("outcome", *(_outcome(update["outcome"]) for update in updates))
    return table


def _row(table: Table, name: str, values: list[float | None], factor: float, form: str) -> None:
    """One row; none at all for what no update has."""
    if any(value is not None for value in values):
        table.add_row(name, *("-" if value is None else form.format(value * factor) for value in values))


def _engine(update: dict[str, Any], url: str) -> Text:
    engine = next((e for e in update["engines"] if e["url"] == url), None)
    if engine is None:
        return Text("-")
    proof = engine.get("verified")
    return Text.assemble(_outcome(engine["outcome"]), Text(f"\n{proof}" if proof else ""))


def _outcome(outcome: str) -> Text:
    return Text(outcome, _STYLES.get(outcome, ""))


def _errors(updates: list[dict[str, Any]]) -> list[tuple[str, str]]:
    found = []
    for update in updates:
        name = f"version {update['version']}"
        engines = [(f"{name}, {e['url']}", e["error"]) for e in update["engines"] if e.get("error")]
        found += engines or ([(name, update["error"])] if update.get("error") else [])
    return found
