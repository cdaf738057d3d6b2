"""Trainer ranks for all tests of this folder."""

from collections.abc import Iterator

import pytest

from gather.world import World


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    found = World()
    yield found
    found.close()
