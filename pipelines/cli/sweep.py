"""The end of a sweep: one table, results.csv, results.html, and every failed job with its overrides and traceback."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table
from rich.text import Text

from pipelines.cli import page
from pipelines.cli.job import Status
from pipelines.report_view import table_console

_COLUMNS = ("outcome", "updates", "bytes", "seconds", "gb_per_s", "limit_fraction")
_HEADINGS = {"gb_per_s": "GB/s", "limit_fraction": "of limit"}
_BAR = 12  # characters of the fastest job


def summarize(jobs: Sequence[Status], folder: str) -> None:
    """Print the table, write `results.csv` and `results.html` into the sweep's folder, list what failed and why."""
    console = table_console()
    rows = [result_row(job) for job in jobs]
    write_csv(rows, Path(folder) / "results.csv")
    console.print(_table(rows))
    failed = [job for job in jobs if job.failed]
    for job in failed:
        console.print(Text(f"\n#{job.number} failed: {' '.join(job.overrides)}", "bold red"), soft_wrap=True)
        console.print(Text((job.traceback or job.error or "no error was recorded").rstrip()), soft_wrap=True)
        console.print(Text(f"folder: {job.folder}"), soft_wrap=True)
    if failed:
        console.print(Text(f"\n{len(failed)} of {len(jobs)} jobs failed:", "bold red"), soft_wrap=True)
        for job in failed:
            reason = (job.error or "").partition("\n")[0]
            console.print(Text(f"  #{job.number}: {' '.join(job.overrides)}: {reason}"), soft_wrap=True)
    title = " ".join(["weightstream sweep", *_common(rows)])
    (Path(folder) / "results.html").write_text(
        page.render([page.Job(row, page.phases_of(job.report)) for row, job in zip(rows, jobs, strict=True)], title)
    )
    console.print(Text(f"results: {Path(folder) / 'results.html'} and results.csv"), soft_wrap=True)


def _common(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What all jobs have in common: the rest is in the table."""
    keys = dict.fromkeys(
        key for row in rows for key in row if not _tells(key, rows) and key not in ("exit_code", "error")
    )
    return [f"{key}={rows[0][key]}" for key in keys if key in rows[0]]


def result_row(job: Status) -> dict[str, Any]:
    """One line of results.csv: number, overrides by key, and medians over the updates after the first."""
    report = job.report or {}
    updates = report.get("updates", [])
    warm = updates[1:] or updates
    row: dict[str, Any] = {"job": job.number}
    row |= dict(override.lstrip("+").partition("=")[::2] for override in job.overrides)
    row |= {
        "outcome": "failed" if job.failed and not updates else report.get("outcome", "failed"),
        "updates": len(updates),
        "bytes": _median([u.get("bytes") for u in warm]),
        "seconds": _median([(u.get("seconds") or {}).get("total") for u in warm]),
        "gb_per_s": _median([u.get("gb_per_s") for u in warm]),
        "limit_fraction": _median([u.get("limit_fraction") for u in warm]),
        "exit_code": job.exit_code,
        "error": job.error or "",
    }
    return row


def write_csv(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """All rows under the union of their columns."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)


def _median(values: Sequence[Any]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="sweep")
    hidden = {"exit_code", "error"}
    columns = [
        key for key in dict.fromkeys(key for row in rows for key in row) if key not in hidden and _tells(key, rows)
    ]
    for column in columns:
        justify: Any = "right" if column in _COLUMNS[1:] or column == "job" else "left"
        table.add_column(_HEADINGS.get(column, column), justify=justify)
    table.add_column("", no_wrap=True)
    fastest = max((row["gb_per_s"] or 0.0 for row in rows), default=0.0) or 1.0
    for row in rows:
        bar = "\u2588" * round(_BAR * (row["gb_per_s"] or 0.0) / fastest)
        style = "red" if row["exit_code"] else None
        table.add_row(*(Text(_cell(row.get(column))) for column in columns), Text(bar, "cyan"), style=style)
    return table


def _tells(column: str, rows: Sequence[dict[str, Any]]) -> bool:
    """Measurements, and those overrides that are not the same in every job."""
    return column in _COLUMNS or len(rows) == 1 or len({row.get(column) for row in rows}) > 1


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if value < 1e6 else f"{value:,.0f}"
    return "-" if value is None else str(value)
