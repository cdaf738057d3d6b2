"""The report: what an update says about itself, and what a run says about its updates."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.fakes import Toy, engines_of, updater_for

from pipelines.report import PHASES, EngineReport, Report, UpdateReport, copy_limit, library_versions
from stages.errors import UpdateFailed


def report_of(*outcomes: str) -> Report:
    return Report(updates=[UpdateReport(str(i), outcome) for i, outcome in enumerate(outcomes)])


@pytest.mark.parametrize(
    "outcomes, worst",
    [
        ((), "refused"),
        (("committed",), "committed"),
        (("committed", "refused", "committed"), "refused"),
        (("refused", "aborted"), "aborted"),
        (("aborted", "tainted", "committed"), "tainted"),
    ],
)
def test_a_run_is_as_good_as_its_worst_update(outcomes: tuple[str, ...], worst: str) -> None:
    assert report_of(*outcomes).outcome == worst


def test_the_version_is_the_last_one_that_was_committed() -> None:
    assert report_of().version is None
    assert report_of("committed", "tainted").version == "0"
    assert report_of("committed", "committed", "refused").version == "1"


def test_an_update_is_true_when_it_was_committed() -> None:
    assert UpdateReport("1", "committed")
    assert not any(UpdateReport("1", o) for o in ("aborted", "tainted", "refused"))


def test_rates_are_bytes_over_the_transfer_and_only_of_what_was_committed() -> None:
    report = UpdateReport("1", "committed", bytes=2_000_000_000)
    report.seconds["transfer"] = 0.5
    report.measure()
    assert report.gb_per_s == 4.0
    assert report.limit_gb_per_s == copy_limit() > 0
    assert report.limit_fraction == pytest.approx(4.0 / copy_limit())
    for outcome, seconds in (("tainted", 0.5), ("committed", None), ("committed", 0.0)):
        other = UpdateReport("1", outcome, bytes=100)
        other.seconds["transfer"] = seconds
        other.measure()
        assert other.gb_per_s is other.limit_fraction is None


def test_a_real_update_fills_it_in() -> None:
    with updater_for(["http://a:1", "http://b:1"]) as updater:
        report = updater.update(Toy(1.0), "v7")
    assert (report.version, report.outcome, report.tensors, report.buckets) == ("v7", "committed", 5, 3)
    assert report.bytes == sum(len(b) for b in Toy().bytes().values())
    assert set(report.seconds) == set(PHASES)
    happened = {p for p, s in report.seconds.items() if s is not None}
    assert happened == set(PHASES) - {"quantize"}
    assert all(s >= 0 for s in report.seconds.values() if s is not None)
    assert [e.url for e in report.engines] == ["http://a:1", "http://b:1"]


def test_it_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with updater_for() as updater:
        updater.update(Toy(1.0))
        (engine,) = engines_of(updater)
        engine.script("put", engine.refuse("put", "no"))
        with pytest.raises(UpdateFailed):
            updater.update(Toy(2.0))
        report = updater.report
    path = tmp_path / "report.json"
    report.write(path)
    written = json.loads(path.read_text())
    assert written == json.loads(json.dumps(report.to_json()))
    assert (written["outcome"], written["version"]) == ("tainted", "1")
    assert [u["outcome"] for u in written["updates"]] == ["committed", "tainted"]
    assert written["updates"][1]["engines"][0]["error"].endswith("put: no")
    assert written["config"]["bucket"]["capacity"] == 64
    assert "torch" in written["libraries"]
    monkeypatch.setattr(os, "replace", lambda a, b: (_ for _ in ()).throw(OSError("disk")))
    before = path.read_bytes()
    with pytest.raises(OSError, match="disk"):
        report.write(path)
    assert path.read_bytes() == before


def test_keys_do_not_get_into_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSTREAM_API_KEY", "sk-secret-123")
    updater = updater_for(["http://sk-secret-123:1"])
    assert "sk-secret-123" not in json.dumps(updater.report.to_json())


def test_an_engine_starts_out_as_aborted() -> None:
    assert EngineReport("http://a:1").outcome == "aborted"
    assert "torch" in library_versions()
