"""The end of a sweep as one HTML page: no script, no other file, readable on a phone.

Bars are boxes whose width is a percentage, so that they fit any screen; the lines over a number are a small SVG. Written by
hand: the page has some kilobytes, where a plotting library would put megabytes of script into it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median
from typing import Any

PHASES = ("pause", "begin", "gather", "quantize", "pack", "wire", "apply", "commit", "resume")
# Okabe and Ito's colours, which colour-blind readers tell apart, and two greys.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a800", "#888888", "#bbbbbb")
_MEASURES = ("job", "outcome", "updates", "bytes", "seconds", "gb_per_s", "limit_fraction", "exit_code", "error")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 360.0, 230.0, 34.0, 34.0, 22.0, 22.0

_STYLE = """
:root{color-scheme:light dark;--line:#8884;--dim:#777}
body{font:16px/1.45 system-ui,sans-serif;max-width:54rem;margin:0 auto;padding:1rem;overflow-wrap:anywhere}
h1{font-size:1.35rem;margin:.2rem 0}h2{font-size:1.1rem;margin:1.8rem 0 .5rem}p{margin:.3rem 0}
sup{line-height:0}.dim{color:var(--dim);font-size:.9rem}.bar{margin:.55rem 0}
.bar .name{display:flex;justify-content:space-between;gap:1rem}
.bar .name span:last-child{white-space:nowrap;font-variant-numeric:tabular-nums}
.track{display:flex;height:1.1rem;background:var(--line);border-radius:3px;overflow:hidden}
.track i{display:block;height:100%}.key{display:flex;flex-wrap:wrap;gap:.2rem 1rem;margin:.4rem 0}
.key i{display:inline-block;width:.8rem;height:.8rem;border-radius:2px;margin-right:.35rem}
svg{display:block;width:100%;max-width:34rem;height:auto}svg text{font-size:11px;fill:currentColor}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.9rem;overflow-wrap:normal}
td,th{padding:.25rem .6rem;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
td.text,th.text{text-align:left}.bad{color:#c33}pre{white-space:pre-wrap;font-size:.85rem}
"""


@dataclass(frozen=True, slots=True)
class Job:
    """One job of the page: its line of results.csv, and its phases in seconds, the medians of the updates after the first."""

    row: Mapping[str, Any]
    phases: Mapping[str, float]


def phases_of(report: Mapping[str, Any] | None) -> dict[str, float]:
    """The medians of one report; without phases that did not happen."""
    updates = (report or {}).get("updates", [])
    warm = updates[1:] or updates
    found = {p: [s for u in warm if (s := (u.get("seconds") or {}).get(p)) is not None] for p in PHASES}
    return {phase: median(seconds) for phase, seconds in found.items() if seconds}


def render(jobs: Sequence[Job], title: str) -> str:
    """The whole page."""
    swept = _swept([job.row for job in jobs])
    names = {id(job): _name(job.row, swept) for job in jobs}
    done = [job for job in jobs if job.row["gb_per_s"]]
    failed = len(jobs) - sum(1 for job in jobs if not job.row["exit_code"])
    fastest = max(done, key=lambda job: float(job.row["gb_per_s"]), default=None)
    parts = [f"<h1>{escape(title)}</h1>", f"<p>{len(jobs)} jobs over {escape(', '.join(swept)) or 'one setting'}."]
    if fastest is not None:
        parts.append(f" Fastest: <b>{escape(names[id(fastest)])}</b>, {fastest.row['gb_per_s']:.3g} GB/s.")
    parts.append(f' <b class="bad">{failed} failed.</b></p>' if failed else "</p>")
    parts.append('<p class="dim">Medians of the updates after the first. GB are 10<sup>9</sup> bytes.</p>')
    if done:
        numeric = _numeric(swept, done)
        if numeric is not None:
            parts += ["<h2>Throughput over ", escape(numeric), "</h2>", *_lines(done, numeric, swept)]
        parts += ["<h2>Throughput</h2>", *_bars(done, names, "gb_per_s", lambda v: f"{v:.3g} GB/s", None)]
        parts += [
            "<h2>Share of the copy limit</h2>",
            '<p class="dim">Of one memcpy of that process on that machine, which is a full bar.</p>',
            *_bars(done, names, "limit_fraction", lambda v: f"{v:.1%}", 1.0),
        ]
        parts += [
            "<h2>Where the time goes</h2>",
            '<p class="dim">Self-time of each phase. Phases overlap, so a bar may be longer than the update took.</p>',
            *_phases(done, names),
        ]
    parts += ["<h2>All jobs</h2>", *_table([job.row for job in jobs], swept)]
    for job in jobs:
        if job.row["error"]:
            parts.append(
                f'<p class="bad">#{job.row["job"]} {escape(names[id(job)])}</p><pre>{escape(job.row["error"])}</pre>'
            )
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    )
    return f"{head}<title>{escape(title)}</title><style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"


def _swept(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings that are not the same in every job."""
    keys = dict.fromkeys(key for row in rows for key in row if key not in _MEASURES)
    return [key for key in keys if len({row.get(key) for row in rows}) > 1]


def _name(row: Mapping[str, Any], swept: Sequence[str], without: str = "") -> str:
    """`ipc, bucket.capacity 4MiB`: the word of a choice tells by itself, a number needs its key."""
    shown = [k for k in swept if k != without]
    words = [str(row.get(k, "-")) if _number(row.get(k)) is None else f"{k} {row[k]}" for k in shown]
    return ", ".join(words) or f"job {row['job']}"


def _number(value: object) -> float | None:
    """A number, or a size in bytes; None for a word."""
    from stages.bucket import parse_size
    from stages.errors import ConfigError

    text = str(value)
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return float(parse_size(text))
    except ConfigError:
        return None


def _numeric(swept: Sequence[str], jobs: Sequence[Job]) -> str | None:
    """The swept setting to draw lines over: the one with most numbers, if there are three at least."""
    counts = {key: {_number(job.row.get(key)) for job in jobs} for key in swept}
    able = {key: len(values) for key, values in counts.items() if None not in values}
    best = max(able, key=lambda key: able[key], default=None)
    return best if best is not None and able[best] >= 3 else None


def _lines(jobs: Sequence[Job], key: str, swept: Sequence[str]) -> Iterator[str]:
    series: dict[str, list[tuple[float, float, str]]] = {}
    for job in jobs:
        x = _number(job.row[key])
        if x is not None:
            point = (math.log2(x) if x > 0 else 0.0, float(job.row["gb_per_s"]), str(job.row[key]))
            series.setdefault(_name(job.row, swept, without=key), []).append(point)
    every = [point for points in series.values() for point in points]
    low, high = min(p[0] for p in every), max(p[0] for p in every)
    top = _nice(max(p[1] for p in every))

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - low) / (high - low or 1.0)
        right = _LEFT + across * (_WIDTH - _LEFT - _RIGHT)
        return right, _HEIGHT - _BOTTOM - y / top * (_HEIGHT - _BOTTOM - _TOP)

    if len(series) > 1 or next(iter(series)):
        yield _key([*series])
    yield f'<svg viewBox="0 0 {_WIDTH:.0f} {_HEIGHT:.0f}" role="img" aria-label="GB/s over {escape(key)}">'
    for step in range(5):
        value = top * step / 4
        _, y = at(low, value)
        yield f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor" opacity=".2"/>'
        yield f'<text x="{_LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>'
    for x, label in sorted({(p[0], p[2]) for p in every}):
        yield f'<text x="{at(x, 0)[0]:.1f}" y="{_HEIGHT - _BOTTOM + 15}" text-anchor="middle">{escape(label)}</text>'
    yield f'<text x="{(_LEFT + _WIDTH) / 2}" y="{_HEIGHT - 4}" text-anchor="middle" opacity=".7">{escape(key)}</text>'
    yield f'<text x="{_LEFT - 5}" y="11" text-anchor="end" opacity=".7">GB/s</text>'
    for number, points in enumerate(series.values()):
        colour = _COLOURS[number % len(_COLOURS)]
        places = [at(x, y) for x, y, _ in sorted(points)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places)
    yield "</svg>"


def _nice(value: float) -> float:
    """The next 1, 2, 4 or 8 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 8, 10) if step * power >= value * 0.999)


def _bars(jobs: Sequence[Job], names: Mapping[int, str], key: str, form: Any, full: float | None) -> Iterator[str]:
    known = [job for job in jobs if job.row[key] is not None]
    longest = full or max((float(job.row[key]) for job in known), default=0.0) or 1.0
    for job in sorted(known, key=lambda job: -float(job.row[key])):
        value = float(job.row[key])
        yield _bar(names[id(job)], form(value), [(min(1.0, value / longest), _COLOURS[0], "")])


def _phases(jobs: Sequence[Job], names: Mapping[int, str]) -> Iterator[str]:
    used = [phase for phase in PHASES if any(job.phases.get(phase) for job in jobs)]
    longest = max((sum(job.phases.values()) for job in jobs), default=0.0) or 1.0
    yield _key(used)
    for job in jobs:
        pieces = [
            (job.phases[p] / longest, _COLOURS[n], f"{p} {job.phases[p] * 1e3:.1f} ms")
            for n, p in enumerate(used)
            if p in job.phases
        ]
        yield _bar(names[id(job)], f"{sum(job.phases.values()) * 1e3:.1f} ms", pieces)


def _key(names: Sequence[str]) -> str:
    entries = (
        f'<span><i style="background:{_COLOURS[n % len(_COLOURS)]}"></i>{escape(s)}</span>' for n, s in enumerate(names)
    )
    return f'<div class="key">{"".join(entries)}</div>'


def _bar(name: str, value: str, pieces: Sequence[tuple[float, str, str]]) -> str:
    boxes = "".join(
        f'<i style="width:{share:.2%};background:{colour}" title="{escape(words)}"></i>'
        for share, colour, words in pieces
    )
    label = f'<div class="name"><span>{escape(name)}</span><span>{escape(value)}</span></div>'
    return f'<div class="bar">{label}<div class="track">{boxes}</div></div>'


def _table(rows: Sequence[Mapping[str, Any]], swept: Sequence[str]) -> Iterator[str]:
    columns = ["job", *swept, "outcome", "gb_per_s", "limit_fraction", "seconds", "bytes"]
    texts = {*swept, "outcome"}

    def cell(tag: str, column: str, text: str, kind: str = "") -> str:
        classes = " ".join(filter(None, ["text" if column in texts else "", kind]))
        return f"<{tag}{f' class={classes!r}' if classes else ''}>{escape(text)}</{tag}>"

    heads = "".join(cell("th", column, column) for column in columns)
    yield f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>'
    for row in rows:
        kind = "bad" if row["exit_code"] else ""
        yield f"<tr>{''.join(cell('td', c, _text(row.get(c)), kind) for c in columns)}</tr>"
    yield "</tbody></table></div>"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if value < 1e6 else f"{value:,.0f}"
    return "-" if value is None else str(value)
