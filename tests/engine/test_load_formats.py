"""The adapters' other ways in, against the embedded engines: afterwards each holds what it would hold from the start."""

from __future__ import annotations

import pytest

from pipelines import WeightUpdater
from stages.errors import ConfigError
from tests.engine.checkpoints import Folders
from tests.engine.client import LocalEngine
from tests.engine.conftest import Start


def overrides(backend: str, engine: LocalEngine, transport: str, *more: str) -> list[str]:
    port = ["transport.port=0"] if transport == "nccl" else []
    target = ["engines=remote", f"engines.urls=[{engine.url}]", "bucket.capacity=64KiB"]
    return [f"backend={backend}", f"transport={transport}", *port, *target, *more]


def digest(engine: LocalEngine) -> str:
    return str(engine.get("/weightstream/digest").json()["digest"])


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
@pytest.mark.parametrize("backend", ["sglang", "lmdeploy"])
def test_buckets_as_lists_of_tensors(start: Start, folders: Folders, backend: str, transport: str) -> None:
    engine, wanted = start(backend, model=folders.moe_a), start(backend, model=folders.moe_b)
    settings = overrides(backend, engine, transport, "backend.load_format=per_tensor")
    with WeightUpdater.from_config(settings, reference=folders.moe_a) as updater:
        report = updater.update(folders.moe_b)
        assert report.buckets > 1
        assert digest(engine) == digest(wanted)
        updater.update(folders.moe_a)
        updater.update(folders.moe_b)
        assert digest(engine) == digest(wanted)


@pytest.mark.parametrize("load_format", ["flattened_bucket", "per_tensor"])
def test_lmdeploy_quantizes_what_comes_wide(start: Start, folders: Folders, load_format: str) -> None:
    engine, wanted = start("lmdeploy", model=folders.fp8_a), start("lmdeploy", model=folders.fp8_b)
    more = ("quantize=engine", f"backend.load_format={load_format}")
    with WeightUpdater.from_config(overrides("lmdeploy", engine, "ipc", *more), reference=folders.fp8_a) as updater:
        updater.update(folders.qwen3_b)
    assert digest(engine) == digest(wanted)


def test_an_engine_that_would_keep_stale_scales_is_refused(start: Start, folders: Folders) -> None:
    engine = start("sglang", model=folders.fp8_a)
    before = digest(engine)
    with (
        WeightUpdater.from_config(
            overrides("sglang", engine, "ipc", "quantize=engine"), reference=folders.fp8_a
        ) as updater,
        pytest.raises(ConfigError, match="backend=sglang does not quantize fp8_block.*use quantize=auto"),
    ):
        updater.update(folders.qwen3_b)
    assert digest(engine) == before


def test_engines_that_are_not_quantized_take_it_too(start: Start, folders: Folders) -> None:
    engine, wanted = start("lmdeploy", model=folders.qwen3_a), start("lmdeploy", model=folders.qwen3_b)
    settings = overrides("lmdeploy", engine, "ipc", "quantize=engine")
    with WeightUpdater.from_config(settings, reference=folders.qwen3_a) as updater:
        updater.update(folders.qwen3_b)
    assert digest(engine) == digest(wanted)
