"""A timeline: who did what from when to when, as Chrome and Perfetto read it.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU, "complete" events in microseconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

from stages.flow import Delivery

MOST = 500_000  # spans that are kept; later ones are counted


class Trace:
    """Spans on rows, each row a thread of the timeline. Safe to use from several threads."""

    def __init__(self) -> None:
        self._origin = time.perf_counter()
        self._rows: dict[str, int] = {}
        self._spans: list[tuple[int, str, float, float]] = []
        self._dropped = 0
        self._lock = threading.Lock()

    def span(self, row: str, name: str, start: float, end: float) -> None:
        """`start` and `end` as time.perf_counter() gives them."""
        with self._lock:
            number = self._rows.setdefault(row, len(self._rows))
            if len(self._spans) < MOST:
                self._spans.append((number, name, start - self._origin, end - start))
            else:
                self._dropped += 1

    def row(self, name: str) -> None:
        """Rows stand in the order in which they are first named."""
        with self._lock:
            self._rows.setdefault(name, len(self._rows))

    def to_json(self) -> dict[str, Any]:
        """What Perfetto and chrome://tracing open."""
        with self._lock:
            rows, spans = dict(self._rows), list(self._spans)
        events: list[dict[str, Any]] = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "weightstream"}}]
        for name, number in rows.items():
            thread = {"ph": "M", "pid": 0, "tid": number}
            events.append(thread | {"name": "thread_name", "args": {"name": name}})
            events.append(thread | {"name": "thread_sort_index", "args": {"sort_index": number}})
        for number, name, start, seconds in spans:
            ts, dur = round(start * 1e6, 1), round(seconds * 1e6, 1)
            events.append({"ph": "X", "pid": 0, "tid": number, "name": name, "ts": ts, "dur": dur})
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"spans dropped": self._dropped}}


class TracedLink:
    """The iterator of one stage of a chain, which writes down when that stage itself was at work.

    A call contains those of the stages before it that run in the same thread: what lies between them is its own. A prefetch
    stage runs what comes before it in a thread of its own, so there its own time is waiting.
    """

    def __init__(self, items: Iterator[Any], row: str, trace: Trace, before: TracedLink | None) -> None:
        self._items, self._row, self._trace, self._before = items, row, trace, before
        self._calls: list[tuple[int, float, float]] = []  # (thread, start, end), for the stage behind
        self._number = 0
        self._put: tuple[int, float] = (-1, 0.0)  # the bucket that engines were told of last, and when
        self.seconds = 0.0
        trace.row(row)

    def __iter__(self) -> TracedLink:
        return self

    def __next__(self) -> Any:
        me, start = threading.get_ident(), time.perf_counter()
        if self._before is not None:
            self._before._calls = []
        ended = False
        try:
            item = next(self._items)
            if isinstance(item, Delivery):
                self._delivered(item, start)
            return item
        except StopIteration:
            ended = True
            raise
        finally:
            end = time.perf_counter()
            self.seconds += end - start
            self._calls.append((me, start, end))
            self._own(me, start, end, "end" if ended else str(self._number))
            self._number += 1

    def _own(self, me: int, start: float, end: float, name: str) -> None:
        inner = [] if self._before is None else [c for c in list(self._before._calls) if c[0] == me]
        for _, first, last in inner:
            self._trace.span(self._row, name, start, first)
            start = last
        self._trace.span(self._row, name, start, end)

    def _delivered(self, delivery: Delivery, start: float) -> None:
        """All engines are told at once, as soon as the bucket has come through the stages before."""
        if delivery.seq != self._put[0]:
            calls = self._before._calls if self._before is not None else []
            self._put = delivery.seq, calls[-1][2] if calls else start
        told = self._put[1]
        self._trace.span(delivery.engine, f"bucket {delivery.seq}", told, told + delivery.seconds)

    def close(self) -> None:
        close = getattr(self._items, "close", None)
        if close is not None:
            close()
