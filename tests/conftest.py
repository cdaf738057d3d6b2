"""Options of the whole test suite."""

import os
from collections.abc import Iterator

import pytest
from support.cluster import ray_cluster as ray_cluster
from support.processes import child as child
from support.processes import pair as pair
from support.processes import victim as victim


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("weightstream")
    group.addoption("--real-engines", action="store_true", help="run tests/conformance against real engines on CPU")
    group.addoption(
        "--engines", default="vllm,sglang,lmdeploy", help="with --real-engines: which of them, separated by commas"
    )


@pytest.fixture(scope="session", autouse=True)
def _own_locks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Engines of one name in another test run are other engines."""
    before = os.environ.get("WEIGHTSTREAM_LOCKS")
    os.environ["WEIGHTSTREAM_LOCKS"] = str(tmp_path_factory.mktemp("locks"))
    yield
    if before is None:
        del os.environ["WEIGHTSTREAM_LOCKS"]
    else:
        os.environ["WEIGHTSTREAM_LOCKS"] = before
