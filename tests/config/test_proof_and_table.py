"""An engine that does not generate as the trainer would is a failed run; the table shows what the report holds."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from pipelines.main import _prove
from pipelines.report import EngineReport as Engine
from pipelines.report import Report, UpdateReport
from pipelines.report_view import render, show
from pipelines.trainers.base import Score, Trainer
from stages.comm import Comm
from stages.errors import WeightstreamError


class Trained(Trainer):
    tolerance = 0.01

    def step(self) -> None: ...

    def prompts(self) -> list[list[int]]:
        return [[1, 2]]

    def score(self, input_ids: object, output_ids: object) -> list[Score]:
        return [Score(-0.5, -0.5), Score(-0.7, -0.695)]


def prove(tokens: list[int], logprobs: list[float], outcome: str = "committed") -> UpdateReport:
    update = UpdateReport("1", outcome, engines=[Engine("http://a:1", outcome)])
    _prove(SimpleNamespace(comm=Comm(), generate=lambda url, prompt, n: (tokens, logprobs)), update, Trained())  # type: ignore[arg-type]
    return update


def test_the_same_logprobs_within_tolerance_are_a_proof() -> None:
    assert prove([5, 6], [-0.505, -0.7]).engines[0].error is None


@pytest.mark.parametrize("logprobs", [[-0.5, -0.72], [-0.4, -0.7], [0.0, 0.0]])
def test_other_logprobs_are_a_failure_that_names_engine_and_token(logprobs: list[float]) -> None:
    with pytest.raises(WeightstreamError, match=r"http://a:1 generates otherwise.*token [01] after \[1, 2\]"):
        prove([5, 6], logprobs)


def test_a_token_that_is_not_the_likeliest_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trained, "score", lambda *_: [Score(-3.0, -0.1)])
    with pytest.raises(WeightstreamError, match="-0.10000 to the likeliest"):
        prove([5], [-3.0])


def test_an_engine_that_did_not_commit_is_not_asked() -> None:
    assert prove([], [], "tainted").engines[0].error is None


def text_of(report: Report) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    show(report.to_json(), console)
    return console.export_text()


def test_the_table_has_phases_rates_and_outcomes() -> None:
    update = UpdateReport("7", "committed", bytes=2_000_000, tensors=3, buckets=1, gb_per_s=1.5, limit_fraction=0.25)
    update.seconds["pause"] = 0.012
    update.engines = [
        Engine("http://a:1", "committed", "7", "digest"),
        Engine("http://b:2", "committed", "7", "version"),
    ]
    text = text_of(Report(updates=[update]))
    for part in (
        "committed, version 7",
        "pause ms",
        "12.0",
        "2.00",
        "1.500",
        "25.0%",
        "http://a:1",
        "digest",
        "version",
    ):
        assert part in text
    assert "quantize" not in text, "no row for a phase that no update had"


def test_what_went_wrong_stands_below_the_table() -> None:
    good = UpdateReport("1", "committed", engines=[Engine("http://a:1", "committed", "1")])
    bad = UpdateReport(
        "2", "tainted", error="x", engines=[Engine("http://a:1", "tainted", error="[500] out of memory")]
    )
    text = text_of(Report(updates=[good, bad]))
    assert "tainted, version 1" in text
    assert "version 2, http://a:1: [500] out of memory" in text


def test_a_refusal_without_engines_is_shown() -> None:
    text = text_of(Report(updates=[UpdateReport("1", "refused", error="no engine")]))
    assert "refused" in text
    assert "version 1: no engine" in text


def test_many_updates_are_cut_to_the_first_and_the_last() -> None:
    updates = [
        UpdateReport(str(n), "committed", engines=[Engine("http://a:1", "committed", str(n))]) for n in range(1, 101)
    ]
    table = render(Report(updates=updates).to_json())
    assert [column.header for column in table.columns] == ["version", "1", "96", "97", "98", "99", "100"]
