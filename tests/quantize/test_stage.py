"""The stage between gather and bucket: groups, names, memory, refusals."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.errors import PlanMismatch, PreflightError
from stages.flow import Group, GroupSpec, TensorSpec
from stages.gather import GatherParams
from stages.quantize.base import NonFinite
from tests.support.chains import WIRES, Memory, expected_bytes, make_run, pack

from . import reference
from .golden import FORMATS
from .inputs import bell
from .made import FP8, WEIGHT, bytes_of, group_of, parts_of, quantize, stage_of, write_config

LAYER = "model.layers.0."


def qkv(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Group:
    shapes = {"q": (64, 128), "k": (32, 128), "v": (32, 128)}
    tensors = {
        f"{LAYER}self_attn.{n}_proj.weight": torch.from_numpy(bell(s, seed + i)).to(dtype)
        for i, (n, s) in enumerate(shapes.items())
    }
    biases = {f"{LAYER}self_attn.{n}_proj.bias": torch.ones(s[0], dtype=dtype) for n, s in shapes.items()}
    return group_of(tensors | biases)


class TestGroups:
    def test_a_weight_and_what_belongs_to_it_stay_in_one_group(self) -> None:
        [spec] = stage_of("fp8_block").plan([qkv().spec], make_run())
        assert [t.name.removeprefix(LAYER + "self_attn.") for t in spec.tensors] == [
            *("q_proj.weight", "q_proj.weight_scale_inv"),
            *("k_proj.weight", "k_proj.weight_scale_inv"),
            *("v_proj.weight", "v_proj.weight_scale_inv"),
            *("q_proj.bias", "k_proj.bias", "v_proj.bias"),
        ]

    @pytest.mark.parametrize("name", FORMATS)
    @pytest.mark.parametrize("wire", WIRES)
    @pytest.mark.parametrize("capacity", [200, 5000, 1 << 20])
    def test_packed_bytes_are_those_made_whatever_the_buckets(self, name: str, wire: str, capacity: int) -> None:
        """Buckets are filled while the stage uses its memory again: nothing may be read late."""
        format_, own, _, _ = FORMATS[name]
        groups = [
            qkv(),
            *(group_of({f"{LAYER}mlp.down_proj.weight": torch.randn(40, 128)}) for _ in (1,)),
            last_group(),
        ]
        stage = stage_of(format_, **own)
        alone = quantize(stage, groups)
        run = make_run(WIRES[wire])
        planned = list(stage.plan([g.spec for g in groups], run))
        idle = [Group(spec, tuple(torch.empty(t.shape, dtype=t.dtype) for t in spec.tensors)) for spec in planned]
        packing = pack(idle, WIRES[wire], capacity, run=run, streamed=stage(iter(groups), run))
        found = packing.decode()
        assert found == {name: bytes_of(tensor) for name, tensor in alone.items()}
        assert set(found) == set(expected_bytes(idle, WIRES[wire]))
        if wire in ("mixed", "folder"):
            homes = {e.spec.name: b.layout.seq for b in packing.buckets for e in b.layout.entries}
            for spec in planned:
                assert len({homes[t.name] for t in spec.tensors}) == 1, "a group was torn apart"

    def test_routers_norms_and_what_is_quantized_already_pass_untouched(self) -> None:
        tensors = {
            "model.embed_tokens.weight": torch.randn(16, 8),
            LAYER + "mlp.gate.weight": torch.randn(4, 8),
            LAYER + "mlp.gate.e_score_correction_bias": torch.randn(4),
            LAYER + "input_layernorm.weight": torch.randn(8),
            LAYER + "conv.weight": torch.randn(8, 1, 4),
            LAYER + "mlp.up_proj.bias": torch.randn(8),
            LAYER + "mlp.down_proj.weight": torch.randn(8, 8).to(torch.float8_e4m3fn),
            LAYER + "mlp.down_proj.weight_scale_inv": torch.ones(1, 1),
            "lm_head.weight": torch.randn(16, 8),
        }
        groups = [group_of({n: t}) for n, t in tensors.items()]
        stage = stage_of("fp8_block")
        run = make_run()
        assert list(stage.plan([g.spec for g in groups], run)) == [g.spec for g in groups]
        for before, after in zip(groups, stage(iter(groups), run), strict=True):
            assert after.tensors == before.tensors  # the very same objects: no copy

    def test_aliases_of_a_quantized_weight_become_aliases_of_all_its_parts(self) -> None:
        spec = GroupSpec(
            (TensorSpec("a.up_proj.weight", torch.float32, (8, 8)),), (("b.up_proj.weight", "a.up_proj.weight"),)
        )
        [out] = stage_of("fp8_block").plan([spec], make_run())
        assert out.aliases == (
            ("b.up_proj.weight", "a.up_proj.weight"),
            ("b.up_proj.weight_scale_inv", "a.up_proj.weight_scale_inv"),
        )

    def test_fused_experts_of_a_module_are_quantized_one_by_one(self, tmp_path: Path) -> None:
        class Experts(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.gate_up_proj = torch.nn.Parameter(torch.randn(3, 2 * 40, 24))
                self.down_proj = torch.nn.Parameter(torch.randn(3, 24, 40))

        model = torch.nn.Module()
        model.mlp = torch.nn.Module()
        model.mlp.experts = Experts()
        run = make_run(model=model)
        gather, stage = GatherParams(), stage_of("fp8_block", block=[16, 16])
        run.gathered = tuple(gather.plan((), run))
        stage.plan(run.gathered, run)
        made = {
            t.name: x.clone()
            for g in stage(gather(iter(()), run), run)
            for t, x in zip(g.spec.tensors, g.tensors, strict=True)
        }
        assert len(made) == 3 * 3 * 2
        for expert in range(3):
            up = model.mlp.experts.gate_up_proj.detach()[expert, 40:].double().numpy()
            expected = reference.fp8_block(up, (16, 16))
            assert bytes_of(made[f"mlp.experts.{expert}.up_proj.weight"]) == expected["weight"].tobytes()
            assert (
                bytes_of(made[f"mlp.experts.{expert}.up_proj.weight_scale_inv"])
                == expected["weight_scale_inv"].tobytes()
            )

    def test_what_was_not_planned_is_refused(self) -> None:
        stage, run = stage_of("fp8_block"), make_run()
        stage.plan([qkv().spec], run)
        with pytest.raises(PlanMismatch, match="was not planned"):
            next(stage(iter([last_group()]), run))
        wrong = Group(qkv().spec, tuple(t[:1] for t in qkv().tensors))
        with pytest.raises(PlanMismatch, match=r"planned shape \[64, 128\], streamed \[1, 128\]"):
            next(stage(iter([wrong]), run))


def last_group() -> Group:
    return group_of({"model.norm.weight": torch.randn(16), "model.layers.1.mlp.down_proj.weight": torch.randn(16, 128)})


class TestMasters:
    """fp32 masters: quantized as they are, or as bfloat16 where gather says that this is what would travel."""

    @pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
    def test_gather_decides_what_is_quantized(self, dtype: str) -> None:
        model = torch.nn.Module()
        model.up_proj = torch.nn.Linear(64, 48, bias=False)
        run = make_run(model=model)
        gather, stage = GatherParams(dtype), stage_of("fp8_block")
        run.gathered = tuple(gather.plan((), run))
        stage.plan(run.gathered, run)
        [group] = [Group(g.spec, tuple(t.clone() for t in g.tensors)) for g in stage(gather(iter(()), run), run)]
        weight = model.up_proj.weight.detach()
        if dtype == "bfloat16":
            weight = weight.bfloat16()
        expected = reference.fp8_block(weight.double().numpy())
        assert bytes_of(group.tensors[0]) == expected["weight"].tobytes()
        assert bytes_of(group.tensors[1]) == expected["weight_scale_inv"].tobytes()


class TestNonFinite:
    @pytest.mark.parametrize("name", FORMATS)
    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_the_error_names_tensor_index_and_value(self, name: str, value: float, dtype: torch.dtype) -> None:
        format_, own, _, _ = FORMATS[name]
        weight = torch.randn(150, 2560).to(dtype)
        weight[140, 7] = weight[141, 3] = weight[140, 2500] = value
        with pytest.raises(NonFinite, match=rf"model.layers.0.mlp.down_proj.weight\[140, 7\] is {value}") as caught:
            parts_of(stage_of(format_, **own), weight)
        assert (caught.value.name, caught.value.index) == (WEIGHT, (140, 7))

    def test_a_value_that_rounding_makes_infinite_counts(self) -> None:
        weight = torch.full((4, 4), 1e38)
        weight[2, 1] = 3.4e38
        parts_of(stage_of("fp8_block"), weight)
        with pytest.raises(NonFinite, match=r"\[2, 1\] is inf"):
            parts_of(stage_of("fp8_block"), weight, torch.bfloat16)

    @pytest.mark.parametrize("name", FORMATS)
    def test_a_switch_lets_them_through(self, name: str) -> None:
        format_, own, _, _ = FORMATS[name]
        weight = torch.randn(8, 256)
        weight[3, 5] = float("nan")
        assert parts_of(stage_of(format_, allow_nonfinite=True, **own), weight)

    def test_one_spoilt_block_leaves_the_others(self) -> None:
        weight = torch.randn(256, 256)
        expected = [*parts_of(stage_of("fp8_block"), weight).values()]
        weight[0, 0] = float("nan")
        codes, scales = parts_of(stage_of("fp8_block", allow_nonfinite=True), weight).values()
        assert codes[:128, :128].float().isnan().all()
        assert scales.isnan().sum() == 1
        assert bytes_of(codes[128:]) == bytes_of(expected[0][128:])

    def test_looking_ahead_finds_it_before_anything_is_sent(self) -> None:
        model = torch.nn.Module()
        model.up_proj = torch.nn.Linear(64, 48)
        model.norm = torch.nn.LayerNorm(8)
        with torch.no_grad():
            model.norm.weight[0] = float("inf")  # travels as it is: not our business
        run = make_run(model=model)
        for ahead in (True, False):
            stage = stage_of("fp8_block", look_ahead=ahead)
            stage.plan(GatherParams().plan((), run), run)
            stage.prepare(run)
            with torch.no_grad():
                model.up_proj.weight[47, 63] = float("nan")
            if ahead:
                with pytest.raises(NonFinite, match=r"up_proj.weight\[47, 63\] is nan"):
                    stage.prepare(run)
                with torch.no_grad():
                    model.up_proj.weight[47, 63] = 0.0
            else:
                stage.prepare(run)

    def test_auto_looks_ahead_too(self, tmp_path: Path) -> None:
        model = torch.nn.Module()
        model.up_proj = torch.nn.Linear(8, 8, bias=False)
        run = make_run(model=model, reference=write_config(tmp_path, FP8))
        stage = stage_of("auto")
        stage.plan(GatherParams().plan((), run), run)
        with torch.no_grad():
            model.up_proj.weight[1, 1] = float("nan")
        with pytest.raises(NonFinite):
            stage.prepare(run)


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
class TestMemory:
    def test_results_live_in_one_buffer_and_scratch_is_one_strip(self) -> None:
        groups = [group_of({f"model.layers.{i}.mlp.down_proj.weight": torch.randn(1024, 2048)}) for i in range(4)]
        stage, run = stage_of("fp8_block"), make_run()
        stage.plan([g.spec for g in groups], run)
        places = {tuple(t.data_ptr() for t in g.tensors) for g in stage(iter(groups), run)}
        assert len(places) == 1
        [buffer] = stage._buffers.values()
        assert buffer.nbytes < 1024 * 2048 + 1024
        strip = 128 * 2048 * 4
        assert stage.strips.nbytes < 2 * strip + 16_384
        stage.close()
        assert stage.strips.nbytes == 0
        assert not stage._buffers

    @pytest.mark.parametrize("name", FORMATS)
    def test_scratch_does_not_grow_with_the_weight(self, name: str) -> None:
        format_, own, _, _ = FORMATS[name]
        sizes = []
        for rows in (1024, 4096):
            stage = stage_of(format_, **own)
            parts_of(stage, torch.randn(rows, 1024).bfloat16())
            sizes.append(stage.strips.nbytes)
        # Largest magnitudes are kept for the whole weight: one float32 for each scale.
        scales = {"mxfp8": 32, "int4 groups of 32, zero points": 16}.get(name, 128)  # and one for each zero point
        assert sizes[1] - sizes[0] <= 3072 * 1024 // scales * 4

    def test_a_rank_without_bytes_does_no_work(self) -> None:
        class Elsewhere(Memory):
            def holds_bytes(self, run: Any) -> bool:
                return False

        stage, run = stage_of("fp8_block"), make_run(transport=Elsewhere())
        run.model = torch.nn.Module()  # whose own share of the weights is looked at, and is empty
        weight = torch.full((64, 64), float("nan"))
        group = group_of({WEIGHT: weight})
        [spec] = stage.plan([group.spec], run)
        stage.prepare(run)
        [out] = list(stage(iter([group]), run))
        assert out.spec == spec
        assert [tuple(t.shape) for t in out.tensors] == [t.shape for t in spec.tensors]

    def test_no_gradients_are_recorded(self) -> None:
        weight = torch.randn(8, 8, requires_grad=True)
        made = parts_of(stage_of("fp8_block"), weight)
        assert not any(t.requires_grad for t in made.values())
        del made
        gc.collect()


class TestThreads:
    def test_strips_are_shared_out_and_errors_come_back(self) -> None:
        from stages.quantize.strips import TILE, Scratch, Strips

        before, running = torch.get_num_threads(), set(threading.enumerate())
        torch.set_num_threads(3)
        strips = Strips()
        try:
            seen: dict[int, tuple[int, int]] = {}
            weight = torch.zeros(4096, TILE // 512)

            def note(number: int, rows: slice, scratch: Scratch) -> None:
                seen[number] = (rows.start, rows.stop)
                assert torch.get_num_threads() == 1

            strips.each(weight, 100, note)
            assert [seen[n] for n in sorted(seen)] == [(i, min(i + 100, 4096)) for i in range(0, 4096, 100)]

            def fail(number: int, rows: slice, scratch: Scratch) -> None:
                if number == 7:
                    raise ValueError("strip seven")

            with pytest.raises(ValueError, match="strip seven"):
                strips.each(weight, 100, fail)
            assert torch.get_num_threads() == 3
        finally:
            strips.close()
            torch.set_num_threads(before)
        assert set(threading.enumerate()) <= running


@settings(max_examples=25, deadline=None)
@given(order=st.permutations(range(4)), repeat=st.integers(1, 3))
def test_updates_are_independent_of_what_came_before(order: list[int], repeat: int) -> None:
    groups = [
        group_of({f"model.layers.{i}.mlp.down_proj.weight": torch.from_numpy(bell((16 + i, 128), i))}) for i in range(4)
    ]
    stage = stage_of("fp8_block")
    first = quantize(stage, groups)
    for _ in range(repeat):
        again = quantize(stage, [groups[i] for i in order])
        assert all(bytes_of(again[name]) == bytes_of(first[name]) for name in first)


class TestPreflight:
    """What is produced is what the engine's checkpoint holds, or nothing is sent."""

    @staticmethod
    def check(
        groups: list[Group], stage: Any, config: dict[str, Any] | None, expected: dict[str, TensorSpec], folder: Path
    ) -> None:
        from pipelines import preflight
        from stages.bucket import make_plan

        run = make_run(reference=write_config(folder, config), expected=expected)
        specs = [g.spec for g in groups]
        planned = tuple(specs if stage is None else stage.plan(specs, run))
        preflight.check(make_plan(planned, 1 << 20, run.wire), expected, {"quantization_config": config}, "engine")

    @staticmethod
    def served(
        scale: torch.dtype = torch.float32, codes: torch.dtype = torch.float8_e4m3fn, grid: tuple[int, ...] = (2, 1)
    ) -> dict[str, TensorSpec]:
        specs = [TensorSpec(WEIGHT, codes, (130, 96)), TensorSpec(WEIGHT + "_scale_inv", scale, grid)]
        return {s.name: s for s in [*specs, TensorSpec("model.norm.weight", torch.bfloat16, (96,))]}

    @staticmethod
    def groups(dtype: torch.dtype = torch.bfloat16) -> list[Group]:
        weight = torch.randn(130, 96).to(dtype)
        return [group_of({WEIGHT: weight}), group_of({"model.norm.weight": torch.ones(96, dtype=torch.bfloat16)})]

    @pytest.mark.parametrize("name", ["auto", "fp8_block"])
    def test_the_engines_own_names_dtypes_and_shapes_pass(self, name: str, tmp_path: Path) -> None:
        self.check(self.groups(), stage_of(name), FP8, self.served(), tmp_path)

    def test_scales_of_another_float_dtype_are_made_in_it(self, tmp_path: Path) -> None:
        self.check(self.groups(), stage_of("auto"), FP8, self.served(scale=torch.bfloat16), tmp_path)

    def test_bfloat16_into_a_quantized_engine_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(PreflightError) as caught:
            self.check(self.groups(), None, FP8, self.served(), tmp_path)
        text = str(caught.value)
        assert f"dtype: {WEIGHT} is bfloat16, the engine has float8_e4m3fn" in text
        assert f"missing: {WEIGHT}_scale_inv" in text
        assert "quantized with fp8; use quantize=auto" in text

    def test_fp8_into_an_engine_that_is_not_quantized_is_refused(self, tmp_path: Path) -> None:
        expected = {t.name: t for g in self.groups() for t in g.spec.tensors}
        with pytest.raises(PreflightError) as caught:
            self.check(self.groups(), stage_of("fp8_block"), None, expected, tmp_path)
        assert f"unknown name: {WEIGHT}_scale_inv" in str(caught.value)
        assert "is float8_e4m3fn, the engine has bfloat16" in str(caught.value)

    @pytest.mark.parametrize("codes", [torch.float8_e5m2, torch.int8, torch.uint8], ids=str)
    def test_fp8_against_anything_else_is_refused(self, codes: torch.dtype, tmp_path: Path) -> None:
        with pytest.raises(PreflightError, match="is float8_e4m3fn, the engine has"):
            self.check(self.groups(), stage_of("auto"), FP8, self.served(codes=codes), tmp_path)

    def test_another_grid_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(PreflightError, match=r"weight_scale_inv is \[2, 1\], the engine has \[3, 1\]"):
            self.check(self.groups(), stage_of("auto"), FP8, self.served(grid=(3, 1)), tmp_path)

    def test_a_module_that_the_engine_keeps_wide_against_its_own_lists_is_refused(self, tmp_path: Path) -> None:
        expected = self.served() | {WEIGHT: TensorSpec(WEIGHT, torch.bfloat16, (130, 96))}
        del expected[WEIGHT + "_scale_inv"]
        with pytest.raises(PreflightError, match="quantize.skip"):
            self.check(self.groups(), stage_of("auto"), FP8, expected, tmp_path)
        self.check(self.groups(), stage_of("auto", skip=["mlp.down_proj"]), FP8, expected, tmp_path)
