"""Timeline, metrics, callbacks: what an update leaves behind besides its report, and that nothing of it can harm one."""

from __future__ import annotations

import json
import logging
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.fakes import Toy, engines_of, settings_for

from pipelines.outlets import Callback, metrics
from pipelines.report import EngineReport, UpdateReport
from pipelines.updater import WeightUpdater
from stages import trace as tracing
from stages.errors import ConfigError, UpdateFailed
from stages.trace import Trace

FULL = ["gather_params", "bucket", "prefetch", "transport", "barrier", "notify_engines"]
URLS = ["http://one:1", "http://two:1"]


class Recorder(Callback):
    """Keeps what it gets; raises when asked to."""

    seen: list[tuple[str, str]] = []

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.seen.clear()

    def __call__(self, report: UpdateReport) -> None:
        self.seen.append((report.version, report.outcome))
        if self.fails:
            raise ZeroDivisionError("a callback of the user's")

    def close(self) -> None:
        self.seen.append(("", "closed"))


def updater(urls: list[str] = URLS, **report: Any) -> WeightUpdater:
    settings = settings_for(urls, stages=FULL)
    settings["report"] |= report
    return WeightUpdater(settings)


def spans_of(path: Path) -> dict[str, list[tuple[str, float, float]]]:
    """Row -> (name, start, end) in order of time, and rows in their order."""
    events = json.loads(path.read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans: dict[str, list[tuple[str, float, float]]] = {name: [] for name in rows.values()}
    for e in events:
        if e["ph"] == "X":
            spans[rows[e["tid"]]].append((e["name"], e["ts"], e["ts"] + e["dur"]))
    return {name: sorted(found, key=lambda s: s[1]) for name, found in spans.items()}


def test_a_row_for_the_session_each_stage_and_each_engine(tmp_path: Path) -> None:
    path = tmp_path / "new" / "timeline.json"
    with updater(timeline=str(path)) as made:
        made.update(Toy(1.0))
        made.update(Toy(2.0))
    spans = spans_of(path)
    stages = ["GatherParams", "Bucket", "Prefetch", "Memory", "Barrier", "NotifyEngines"]
    assert list(spans)[:7] == ["session", *stages]
    assert set(list(spans)[7:]) == set(URLS)
    assert [name for name, *_ in spans[URLS[0]]] == [f"bucket {n}" for n in (0, 1, 2)] * 2
    assert [n for n, *_ in spans["session"]] == ["pause", "begin", "transfer", "commit", "verify", "resume"] * 2
    for row, found in spans.items():
        for (_, _, end), (_, start, _) in pairwise(found):
            assert start >= end - 0.2, f"{row} does two things at a time"  # rounded to 0.1 us each
    transfer = [s for s in spans["session"] if s[0] == "transfer"]
    for _, start, end in spans[URLS[0]]:
        assert any(first - 0.2 <= start and end <= last + 0.2 for _, first, last in transfer)


def test_what_is_off_costs_no_span_and_no_file(tmp_path: Path) -> None:
    with updater() as made:
        made.update(Toy(1.0))
        assert made._run.clock.trace is None
    assert not list(tmp_path.iterdir())


def test_a_timeline_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MOST", 2)
    trace = Trace()
    for n in range(5):
        trace.span("row", str(n), 0.0, 1.0)
    found = trace.to_json()
    assert sum(e["ph"] == "X" for e in found["traceEvents"]) == 2
    assert found["otherData"] == {"spans dropped": 3}


def test_metrics_are_what_prometheus_reads_and_follow_every_update(tmp_path: Path) -> None:
    path = tmp_path / "weightstream.prom"
    with updater(metrics=str(path)) as made:
        made.update(Toy(1.0))
        engines_of(made)[1].script("put", OSError("gone"))
        with pytest.raises(UpdateFailed):
            made.update(Toy(2.0))
    text = path.read_text()
    sample = re.compile(r'weightstream_[a-z_]+(\{[a-z]+="[^"]*"\})? [0-9.e+-]+')
    lines = text.splitlines()
    assert text.endswith("\n")
    assert all(line.startswith(("# HELP ", "# TYPE ")) or sample.fullmatch(line) for line in lines)
    assert 'weightstream_updates_total{outcome="committed"} 1' in lines
    assert 'weightstream_updates_total{outcome="tainted"} 1' in lines
    assert 'weightstream_engine_tainted{engine="http://two:1"} 1' in lines
    assert "weightstream_update_committed 0" in lines
    assert [p.name for p in tmp_path.iterdir()] == ["weightstream.prom"]


def test_labels_are_escaped() -> None:
    report = UpdateReport("1", engines=[EngineReport('ray://a"b\\c\nd')])
    assert 'engine="ray://a\\"b\\\\c\\nd"' in "".join(metrics(report, {}))


@pytest.mark.parametrize("fails", [False, True])
def test_a_callback_gets_every_report_and_cannot_harm(fails: bool, caplog: pytest.LogCaptureFixture) -> None:
    node = {"_target_": f"{__name__}.Recorder", "fails": fails}
    with caplog.at_level(logging.ERROR, "weightstream"), updater(callbacks=[node]) as made:
        recorder = sys.modules[__name__].Recorder.seen
        made.update(Toy(1.0))
        engines_of(made)[0].script("put", OSError("gone"))
        with pytest.raises(UpdateFailed):
            made.update(Toy(2.0))
    assert recorder == [("1", "committed"), ("2", "tainted"), ("", "closed")]
    assert ("a callback of the user's" in caplog.text) is fails


def test_what_is_no_callback_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not a Callback"):
        updater(callbacks=[{"_target_": "os.system", "command": "true"}])


def test_a_folder_that_cannot_be_written_fails_no_update(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    nowhere = str(tmp_path / "file" / "x")
    with caplog.at_level(logging.WARNING, "weightstream"), updater(metrics=nowhere, timeline=nowhere) as made:
        assert made.update(Toy(1.0)).outcome == "committed"
    assert "cannot be written" in caplog.text
