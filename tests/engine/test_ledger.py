"""Whether the weights are those of one version, which no real engine keeps track of."""

from __future__ import annotations

import pytest

from pipelines.engine.ledger import Ledger
from pipelines.engine.loading.base import Outcome


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(frozenset("abc"))


def test_an_update_is_half_loaded_until_it_is_finished(ledger: Ledger) -> None:
    ledger.took(Outcome(["a"]))
    assert ledger.half_loaded == "1 of 3 tensors of an unfinished update are in"
    ledger.took(Outcome(["b", "c"]))
    assert ledger.commit() == []
    assert ledger.half_loaded is None
    assert (ledger.updates, ledger.errors, ledger.commits) == (2, 0, 1)


def test_finishing_without_all_tensors_is_reported_but_accepted(ledger: Ledger) -> None:
    ledger.took(Outcome(["a"]))
    assert ledger.commit() == ["2 of 3 tensors were not sent and keep their old values: b, c"]
    assert ledger.half_loaded is None


def test_a_failure_before_the_first_byte_spoils_nothing(ledger: Ledger) -> None:
    ledger.took(Outcome(error="bad"))
    assert ledger.half_loaded is None
    assert ledger.errors == 1


def test_after_a_failure_only_a_complete_update_makes_the_weights_whole(ledger: Ledger) -> None:
    ledger.took(Outcome(["a"]))
    ledger.took(Outcome(error="bad"))
    ledger.took(Outcome(["b", "c"]))
    ledger.commit()
    assert ledger.half_loaded == "an update failed: bad"
    ledger.took(Outcome(["a", "b", "c"]))
    ledger.commit()
    assert ledger.half_loaded is None
