"""Real engines for the tests of this folder: installed on first use, started on demand, shared between tests.

A test says by `@serve(...)` which engine it needs and takes the fixture `server`. Tests are grouped by it, so that each
engine starts once and no two run at the same time.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from . import provision
from .checkpoints import CheckpointCache
from .served import Served
from .servers import EngineServer
from .support import RESULTS, Results

FAILED = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[RESULTS] = Results()
    config.addinivalue_line(
        "markers", "support: a cell of the support table; its parameters are `server` and `transport`"
    )


@pytest.hookimpl(tryfirst=True, wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, None, None]:
    wanted = {name for name in str(config.getoption("--engines")).split(",") if name}
    if unknown := wanted - set(provision.ENGINES):
        known = ", ".join(provision.ENGINES)
        raise pytest.UsageError(f"--engines: unknown {sorted(unknown)}, expected some of {known}")
    left_out: list[pytest.Item] = []
    for item in items:
        served = _served(item)
        if served is None:
            continue
        if item.get_closest_marker("support"):
            config.stash[RESULTS].cells[item.nodeid] = served, item.callspec.params["transport"]  # type: ignore[attr-defined]
        item.add_marker(pytest.mark.timeout(900))  # the first test of an engine may install and start it
        if not config.getoption("--real-engines"):
            item.add_marker(pytest.mark.skip(reason="needs --real-engines"))
        elif served.name not in wanted:
            left_out.append(item)
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)
    yield
    # pytest itself groups by the position of a parameter in its list, not by what it is.
    first: dict[Served | None, int] = {}
    for item in items:
        first.setdefault(_served(item), len(first))
    items.sort(key=lambda item: (item.path.name == "test_support.py", first[_served(item)]))  # which looks back on all


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A silent skip reads like a pass."""
    here = f"{Path(__file__).parent.name}/"
    skipped = [r.longrepr for r in terminalreporter.stats.get("skipped", []) if here in r.nodeid]
    texts = (str(where[2]).removeprefix("Skipped: ") for where in skipped if isinstance(where, tuple))
    reasons = Counter(text.partition("\n")[0] for text in texts)
    if reasons:
        terminalreporter.section("conformance against real engines", yellow=True)
    for reason, count in reasons.items():
        terminalreporter.write_line(f"{count} tests did NOT run: {reason}", yellow=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[FAILED] = True
    results = item.config.stash[RESULTS]
    if item.nodeid in results.cells and (report.when == "call" or report.failed):
        results.passed[item.nodeid] = report.passed and results.passed.get(item.nodeid, True)
    return report


def _served(item: pytest.Item) -> Served | None:
    callspec = getattr(item, "callspec", None)
    served = callspec.params.get("server") if callspec else None
    return served if isinstance(served, Served) else None


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> CheckpointCache:
    return CheckpointCache(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Served:
    """How the fixture `server` was asked for."""
    found = _served(request.node)
    assert found is not None
    return found


@pytest.fixture(scope="session")
def server(
    request: pytest.FixtureRequest, checkpoints: CheckpointCache, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineServer]:
    """The engine that the test asked for, running and ready."""
    served: Served = request.param
    install(served.name)
    log = tmp_path_factory.mktemp(served.name) / f"{served.name}.log"
    engine = EngineServer(
        served.name,
        checkpoints(served.recipe),
        tp=served.tp,
        api_key=served.api_key,
        admin_key=served.admin_key,
        extra=served.extra,
        log=log,
    )
    with engine:
        yield engine


@pytest.fixture(autouse=True)
def _healthy(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test gets a live engine, whatever the one before did to it."""
    engine = request.getfixturevalue("server") if _served(request.node) else None
    if engine is not None and not engine.ready():
        engine.restart()
    yield
    if engine is not None and FAILED in request.node.stash:
        engine.kill()  # its weights or its session may be in any state


def install(name: str) -> None:
    """A failed install skips the tests of that engine, but never in CI, where nobody would notice."""
    try:
        provision.provision(name)
    except provision.ProvisionError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"{name} could not be installed: {error}")
