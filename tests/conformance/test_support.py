"""Runs after everything else: README.md shows what the real engines took, no more and no less."""

from __future__ import annotations

import pytest

from . import support
from .provision import PROJECT


def test_readme_shows_what_the_real_engines_took(pytestconfig: pytest.Config) -> None:
    table = support.TABLE.read_text() if support.TABLE.exists() else ""
    if pytestconfig.getoption("--real-engines"):
        fresh = support.refresh(table, pytestconfig.stash[support.RESULTS])
        if fresh != table:
            support.TABLE.write_text(fresh)
        table = fresh
    assert support.shown(PROJECT / "README.md") == table, f"copy {support.TABLE} between README.md's support markers"
