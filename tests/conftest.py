"""Options of the whole test suite."""

import pytest
from support.processes import child as child
from support.processes import pair as pair
from support.processes import victim as victim


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("weightstream")
    group.addoption("--real-engines", action="store_true", help="run tests/conformance against real engines on CPU")
    group.addoption(
        "--engines", default="vllm,sglang,lmdeploy", help="with --real-engines: which of them, separated by commas"
    )
