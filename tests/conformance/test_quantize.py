"""bfloat16 weights on their way into engines that serve block-fp8 checkpoints: they end up with the bytes that they
would have loaded from the quantized checkpoint of the same weights."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stages.errors import PreflightError
from tests.quantize.inputs import bell, spread_out
from tests.quantize.made import parts_of, stage_of

from . import probes, provision
from .checkpoints import BLOCK, CheckpointCache, Recipe, State, write_checkpoint
from .proofs import SAME_ENGINE_TOLERANCE, assert_serves, fill_prefix_cache, learn
from .served import PLUGIN, Served, serve
from .servers import EngineServer
from .test_matrix import HAS_AMX
from .updates import updater

FP8 = Recipe(fp8=True)
SGLANG = (Served("sglang", FP8), Served("sglang", FP8, tp=2))
VLLM = (Served("vllm", FP8, extra=PLUGIN),) if HAS_AMX else ()
LMDEPLOY = (Served("lmdeploy", FP8), Served("lmdeploy", FP8, tp=2))
# Of log-probabilities: the engines multiply in bfloat16, vLLM with activations in fp8, the reference in float32.
DEQUANTIZED_TOLERANCE = 0.15


def exercise(server: EngineServer, transport: str, checkpoints: CheckpointCache, workspace: Path) -> None:
    """Two versions pushed as bfloat16; after each the engine is as if it had loaded the fp8 twin by its own route."""
    twins = {seed: checkpoints(replace(FP8, seed=seed)) for seed in (1, 0)}
    learned = {seed: learn(server, twin) for seed, twin in twins.items()}
    settings = ("quantize=auto", f"session.reference={server.model_dir}", "bucket.capacity=256KiB")
    with updater(server, transport, workspace, *settings) as weights:
        for seed, twin in twins.items():
            fill_prefix_cache(server)
            report = weights.update(checkpoints(Recipe(seed=seed)), version=f"{transport}-{seed}")
            assert [engine.outcome for engine in report.engines] == ["committed"]
            assert report.tensors == len(load_file(twin / "model.safetensors"))
            assert_serves(server, twin, learned[seed])


@pytest.mark.support
@serve(*SGLANG, *VLLM)
@pytest.mark.parametrize("transport", ["ipc", "nccl", "disk"])
def test_update(server: EngineServer, transport: str, checkpoints: CheckpointCache, tmp_path: Path) -> None:
    exercise(server, transport, checkpoints, tmp_path)


@pytest.mark.support
@serve(*LMDEPLOY)
@pytest.mark.parametrize("transport", ["ipc"])
def test_update_of_lmdeploy(server: EngineServer, transport: str, checkpoints: CheckpointCache, tmp_path: Path) -> None:
    """Not over nccl: on CPU that is gloo, which cannot broadcast LMDeploy's fp8 tensors ("Invalid scalar type")."""
    exercise(server, transport, checkpoints, tmp_path)


@serve(SGLANG[0], *VLLM)
def test_tokens_are_those_of_the_dequantized_weights(
    server: EngineServer, checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    twin = load_file(checkpoints(replace(FP8, seed=1)) / "model.safetensors")

    def dequantize(state: State) -> None:
        for name in state:
            weight = twin[name].float()
            if name + "_scale_inv" in twin:
                scale = twin[name + "_scale_inv"].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
                weight *= scale[: weight.shape[0], : weight.shape[1]]
            state[name] = weight

    plain = write_checkpoint(tmp_path / "dequantized", Recipe(dtype="float32", seed=1), dequantize)
    settings = ("quantize=fp8_block", f"session.reference={server.model_dir}")
    with updater(server, "ipc", tmp_path, *settings) as weights:
        weights.update(checkpoints(Recipe(seed=1)))
    spoken, expected = probes.speak(server), probes.expected_speech(plain)
    assert spoken.close_to(expected, DEQUANTIZED_TOLERANCE), f"{spoken} is not {expected}"


@serve(SGLANG[0], *VLLM, LMDEPLOY[0])
def test_bfloat16_into_a_quantized_engine_is_refused(
    server: EngineServer, checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    before = probes.fingerprint(server)
    with (
        updater(server, "ipc", tmp_path, f"session.reference={server.model_dir}") as weights,
        pytest.raises(PreflightError, match="use quantize=auto"),
    ):
        weights.update(checkpoints(Recipe(seed=1)))
    after = probes.fingerprint(server)
    assert after == before or after.close_to(before, SAME_ENGINE_TOLERANCE)


# ------------------------------------------------------------------------------------------ the engines' own quantizers

# Run by the engine's interpreter on each `weight`; they leave `codes` and `scales`.
QUANTIZERS = {
    "lmdeploy fp8_block": """
from lmdeploy.lite.quantization.weight.quant_utils import quant_blocked_fp8
quantize = lambda weight: quant_blocked_fp8(weight, torch.float8_e4m3fn, 128)
""",
    "lmdeploy fp8_block_ue8m0": """
from lmdeploy.lite.quantization.weight.quant_utils import quant_blocked_fp8
quantize = lambda weight: quant_blocked_fp8(weight, torch.float8_e4m3fn, 128, "ue8m0")
""",
    "sglang fp8_block_ue8m0": """
from sglang.srt.layers.quantization.fp8_utils import per_block_cast_to_fp8 as quantize
""",
    "vllm mxfp8": """
from vllm.model_executor.layers.quantization.utils.mxfp8_utils import _mxfp8_e4m3_quantize_torch as quantize
""",
}
RUN = """
import sys, torch
from safetensors.torch import load_file, save_file
{imports}
parts = {{}}
for name, weight in load_file(sys.argv[1]).items():
    codes, scales = quantize(weight)
    parts[name + " codes"], parts[name + " scales"] = codes.contiguous().view(torch.uint8), scales.contiguous()
save_file(parts, sys.argv[2])
"""


@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_the_engines_own_quantizers_make_the_same_bytes(
    quantizer: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """LMDeploy's floor of a block's largest magnitude is 1e-6 and SGLang's 1e-4: all blocks here are above."""
    engine, _, name = quantizer.partition(" ")
    python = _python(engine, request)
    given, made = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    weights = {
        f"{i} {dtype}": w.to(dtype) for i, w in enumerate(_weights()) for dtype in (torch.bfloat16, torch.float32)
    }
    save_file(weights, given)
    _run([python, "-c", RUN.format(imports=QUANTIZERS[quantizer]), str(given), str(made)])
    theirs = load_file(made)
    for key, weight in weights.items():
        codes, scales = parts_of(stage_of(name), weight).values()
        assert torch.equal(scales.view(torch.uint8), theirs[f"{key} scales"].reshape(scales.shape).view(torch.uint8)), (
            key
        )
        assert torch.equal(codes.view(torch.uint8), theirs[f"{key} codes"]), key


def _weights() -> list[torch.Tensor]:
    return [torch.from_numpy(w) for w in (bell((256, 512), 1), bell((384, 128), 2, 3.0), spread_out((256, 256), 3))]


def _python(engine: str, request: pytest.FixtureRequest) -> str:
    if not request.config.getoption("--real-engines"):
        pytest.skip("needs --real-engines")
    if engine not in str(request.config.getoption("--engines")).split(","):
        pytest.skip(f"--engines leaves {engine} out")
    return str(provision.provision(engine))


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
