"""What these engines answer with success and garbage, or with their death, is refused before a byte moves.

Each checkpoint here is one that some engine accepts silently or dies of. weightstream names
every mismatch, leaves the engine up with the weights it had, and the next good update goes through.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipelines import WeightUpdater
from stages.errors import CompositionError, ConfigError, EngineError, PreflightError, UpdateFailed, WeightstreamError

from . import probes
from .checkpoints import CheckpointCache, Recipe, State, write_checkpoint
from .proofs import assert_serves, learn
from .served import CONTROL, FP32, PLUGIN, READ, Served, serve
from .servers import EngineServer
from .updates import command_line, give_keys, overrides, updater

LAYER = "model.layers.1."

Edit = Callable[[State], None]


def wrong_shape(state: State) -> None:
    name = LAYER + "self_attn.o_proj.weight"
    state[name] = state[name][:-8].clone()


def transposed(state: State) -> None:
    name = LAYER + "mlp.down_proj.weight"
    state[name] = state[name].t().contiguous()


def unknown_name(state: State) -> None:
    state[LAYER + "self_attn.q_proj.weird"] = torch.zeros(4)


def missing_module(state: State) -> None:
    del state[LAYER + "self_attn.o_proj.weight"]


def half_a_fused_set(state: State) -> None:
    del state[LAYER + "self_attn.k_proj.weight"], state[LAYER + "self_attn.v_proj.weight"]


def half_of_gate_and_up(state: State) -> None:
    del state[LAYER + "mlp.up_proj.weight"]


def other_prefix(state: State) -> None:
    for name in list(state):
        state["policy." + name] = state.pop(name)


def no_tensor_at_all(state: State) -> None:
    state.clear()
    state["step"] = torch.zeros(1)


# edit -> what the message must name
BAD: dict[Edit, str] = {
    wrong_shape: "o_proj",
    transposed: "down_proj",
    unknown_name: "weird",
    missing_module: "o_proj",
    half_a_fused_set: "k_proj",
    half_of_gate_and_up: "up_proj",
    other_prefix: "policy",
    no_tensor_at_all: "step",
}
BASES = (Served("sglang", FP32), Served("vllm", FP32, extra=PLUGIN), Served("lmdeploy"))


def bad_checkpoint(served: Served, edit: Edit, tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / edit.__name__, replace(served.recipe, seed=7), edit)


@serve(*BASES)
@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_mismatches_are_refused_and_a_good_update_follows(
    server: EngineServer, served: Served, transport: str, checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    good = checkpoints(replace(served.recipe, seed=1))
    learned = learn(server, good)
    probes.stock_update(server, server.model_dir)
    before = probes.fingerprint(server)
    with updater(server, transport, tmp_path) as weights:
        for edit, named in BAD.items():
            with pytest.raises(PreflightError, match=named) as refused:
                weights.update(bad_checkpoint(served, edit, tmp_path))
            assert server.url in str(refused.value)
            assert weights.report.updates[-1].outcome == "refused"
            assert not weights.tainted
        assert server.ready()
        assert probes.fingerprint(server) == before
        assert weights.update(good)
    assert_serves(server, good, learned)


@serve(Served("sglang", FP32), Served("vllm", FP32, extra=PLUGIN))
def test_disk_publishes_nothing_that_the_engine_would_choke_on(
    server: EngineServer, served: Served, checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    before = probes.fingerprint(server)
    published = tmp_path / "published"
    with updater(server, "disk", published) as weights:
        for edit, named in BAD.items():
            with pytest.raises(PreflightError, match=named):
                weights.update(bad_checkpoint(served, edit, tmp_path))
    assert not [path for path in published.rglob("*") if path.is_file()]
    assert probes.fingerprint(server) == before


@serve(*BASES)
def test_command_line_refuses_them_too(server: EngineServer, served: Served, tmp_path: Path) -> None:
    """Where the trainer is a checkpoint, that checkpoint is not what says what the engine expects."""
    before = probes.fingerprint(server)
    bad = bad_checkpoint(served, wrong_shape, tmp_path)
    done = command_line(tmp_path, *overrides(server, "ipc", tmp_path, "trainer=checkpoint", f"trainer.path={bad}"))
    assert done.returncode != 0
    assert "o_proj" in done.stdout
    assert server.alive()
    assert probes.fingerprint(server) == before


@serve(Served("lmdeploy", Recipe(fp8=True), tp=2))
def test_fp8_over_gloo_is_refused_where_it_would_travel_as_fp8(
    server: EngineServer, checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    """gloo does not know the dtype: LMDeploy answers 400 in the middle of the update and is half loaded then."""
    before = probes.fingerprint(server)
    with updater(server, "nccl", tmp_path) as weights, pytest.raises(ConfigError, match="float8_e4m3fn.*transport=ipc"):
        weights.update(checkpoints(Recipe(fp8=True, seed=1)))
    assert probes.ask(server, "GET", "/is_sleeping") == {"is_sleeping": False}
    assert probes.fingerprint(server) == before


@serve(Served("sglang", Recipe(fp8=True)), Served("lmdeploy", Recipe(fp8=True), tp=2))
def test_bf16_for_a_block_fp8_engine_is_refused(
    server: EngineServer, checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    """SGLang casts it over stale scales and answers success; here the missing scales and the dtype are named."""
    before = probes.fingerprint(server)
    with updater(server, "ipc", tmp_path) as weights, pytest.raises(PreflightError, match="weight_scale_inv"):
        weights.update(checkpoints(Recipe(seed=1)))
    assert probes.fingerprint(server) == before


@serve(*BASES)
def test_another_float_dtype_is_cast_by_us_or_refused(
    server: EngineServer, served: Served, checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    """Engines cast silently, whatever that loses. gather.dtype=auto casts to what they hold; a fixed dtype is
    refused."""
    held = served.recipe.dtype
    other = "bfloat16" if held == "float32" else "float32"
    foreign = checkpoints(replace(served.recipe, dtype=other, seed=2))
    fixed = updater(server, "ipc", tmp_path, f"gather.dtype={other}")
    with fixed as weights, pytest.raises(PreflightError, match=f"{other}.*{held}"):
        weights.update(foreign)
    with updater(server, "ipc", tmp_path) as weights:
        assert weights.update(foreign)
    if held == "float32":
        assert probes.speak(server).close_to(probes.expected_speech(foreign), 1e-3)
    else:  # drawn in float32 and cast: the same bytes as the checkpoint in bfloat16
        probes.assert_lmdeploy_holds(server, checkpoints(replace(served.recipe, seed=2)))


@serve(Served("sglang", FP32), Served("vllm", FP32, extra=PLUGIN))
def test_a_wrong_number_of_ranks_is_refused(server: EngineServer, tmp_path: Path) -> None:
    """A payload list of the wrong length ends SGLang; a group of the wrong size hangs them all."""
    before = probes.fingerprint(server)
    with updater(server, "ipc", tmp_path, "engines.tp=2") as weights, pytest.raises(CompositionError, match="tp"):
        weights.update(server.model_dir)
    assert probes.fingerprint(server) == before


@serve(Served("lmdeploy", tp=2))
def test_a_wrong_number_of_ranks_fails_at_lmdeploy_and_a_right_update_heals_it(
    server: EngineServer, checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    """LMDeploy does not tell its size, so the first bucket is answered with 500. It stays asleep, and is not broken."""
    good = checkpoints(Recipe(seed=1))
    with updater(server, "ipc", tmp_path, "engines.tp=1") as weights:
        with pytest.raises(UpdateFailed, match="500") as failed:
            weights.update(good)
        assert failed.value.report.outcome == "tainted"  # type: ignore[attr-defined]
        assert server.url in weights.tainted
    assert probes.ask(server, "GET", "/is_sleeping") == {"is_sleeping": True}
    with updater(server, "ipc", tmp_path) as weights:
        assert weights.update(good)
    assert_serves(server, good, None)


@serve(Served("vllm", FP32))
@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_vllm_without_our_plugin_is_told_how_to_start(server: EngineServer, transport: str, tmp_path: Path) -> None:
    before = probes.fingerprint(server)
    with updater(server, transport, tmp_path) as weights, pytest.raises(EngineError, match="--weight-transfer-config"):
        weights.update(server.model_dir)
    assert probes.fingerprint(server) == before


@pytest.mark.support
@serve(Served("vllm", FP32))
@pytest.mark.parametrize("transport", ["disk"])
def test_vllm_takes_disk_updates_without_our_plugin(
    server: EngineServer, transport: str, checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    folder = checkpoints(replace(FP32, seed=1))
    with updater(server, transport, tmp_path) as weights:
        assert weights.update(folder)
    assert_serves(server, folder, None)


def test_lmdeploy_over_disk_is_refused_when_composed(tmp_path: Path) -> None:
    wanted = ["backend=lmdeploy", "transport=disk", f"transport.path={tmp_path}", "engines=remote"]
    with pytest.raises(CompositionError, match="no route that loads a checkpoint folder"):
        WeightUpdater.from_config([*wanted, "engines.urls=[http://127.0.0.1:9]"])


@serve(Served("sglang", FP32, api_key=READ, admin_key=CONTROL), Served("lmdeploy", api_key=READ))
def test_keys(
    server: EngineServer, served: Served, checkpoints: CheckpointCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without them nothing is touched; with them every call carries the one that it needs."""
    folder = checkpoints(replace(served.recipe, seed=1))
    before = probes.fingerprint(server)
    with updater(server, "ipc", tmp_path) as weights, pytest.raises(WeightstreamError, match="401"):
        weights.update(folder)
    assert probes.fingerprint(server) == before
    give_keys(server, monkeypatch)
    learned = learn(server, folder)
    probes.stock_update(server, server.model_dir)
    with updater(server, "ipc", tmp_path) as weights:
        assert weights.update(folder)
        said = str(weights.report.to_json())
        assert READ not in said
        assert CONTROL not in said
    assert_serves(server, folder, learned)
