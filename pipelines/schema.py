"""The typed schema of a run: one dataclass per node of conf/, known to Hydra under `<group>_<option>_schema`.

The dataclasses hold the types and the allowed values; the values themselves stand in conf/*.yaml, with a comment each,
and in the constructors that take them. A test keeps the three equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Union

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

if TYPE_CHECKING:
    from _typeshed import DataclassInstance as Schema

TASKS = ("run", "plan", "doctor", "matrix")
PROOFS = ("acknowledged", "version", "checksum", "probe", "digest")  # of an update, the weakest first


def choice(*values: str) -> Any:
    """A setting that takes one of these words."""
    return field(default=MISSING, metadata={"choices": values})


def positive() -> Any:
    """A number above zero."""
    return field(default=MISSING, metadata={"positive": True})


def path() -> Any:
    """A file or folder, relative to where the caller started."""
    return field(default=MISSING, metadata={"path": True})


# ---------------------------------------------------------------------------------------------------------- backend/


@dataclass
class LmdeployConf:
    _target_: str = "stages.backends.lmdeploy.Lmdeploy"
    sleep_level: int = field(default=MISSING, metadata={"choices": (1, 2)})
    load_format: str = choice("flattened_bucket", "per_tensor")


@dataclass
class SglangConf:
    _target_: str = "stages.backends.sglang.Sglang"
    pause: str = choice("retract", "abort", "in_place")
    load_format: str = choice("flattened_bucket", "per_tensor")


@dataclass
class VllmConf:
    _target_: str = "stages.backends.vllm.Vllm"
    pause: str = choice("keep", "wait", "abort")
    transfer: str = choice("plugin", "native")


# -------------------------------------------------------------------------------------------------------- transport/


@dataclass
class IpcConf:
    _target_: str = "stages.transport.ipc.Ipc"


@dataclass
class NcclConf:
    _target_: str = "stages.transport.nccl.Nccl"
    address: str = MISSING
    port: int = field(default=MISSING, metadata={"range": (0, 65535)})
    groups: str = choice("one", "per_engine")


@dataclass
class DiskConf:
    _target_: str = "stages.transport.disk.Disk"
    path: str = path()
    keep: int = positive()
    fsync: bool = MISSING
    path_map: dict[str, str] = MISSING


# ---------------------------------------------------------------------------------------------------------- trainer/


@dataclass
class ToyTrainerConf:
    _target_: str = "pipelines.trainers.toy.ToyTrainer"
    arch: str = choice("qwen3", "llama", "qwen3_moe")
    hidden_size: int = positive()
    layers: int = positive()
    vocab_size: int = positive()
    tied: bool = MISSING
    dtype: str = choice("float32", "bfloat16", "float16")
    lr: float = positive()
    seed: int = MISSING


@dataclass
class CheckpointTrainerConf:
    _target_: str = "pipelines.trainers.checkpoint.CheckpointTrainer"
    path: str = path()


# --------------------------------------------------------------------------------------------------------- quantize/


@dataclass
class AutoQuantizeConf:
    _target_: str = "stages.quantize.auto.Auto"
    skip: list[str] | None = MISSING
    allow_nonfinite: bool = MISSING
    look_ahead: bool = MISSING


@dataclass
class EngineQuantizeConf:
    _target_: str = "stages.quantize.engine.ByEngine"


@dataclass
class Fp8BlockConf:
    _target_: str = "stages.quantize.fp8_block.Fp8Block"
    block: list[int] | None = MISSING
    skip: list[str] | None = MISSING
    allow_nonfinite: bool = MISSING
    look_ahead: bool = MISSING


@dataclass
class Fp8BlockUe8m0Conf(Fp8BlockConf):
    _target_: str = "stages.quantize.fp8_block.Fp8BlockUe8m0"


@dataclass
class Fp8TensorConf(AutoQuantizeConf):
    _target_: str = "stages.quantize.fp8_tensor.Fp8Tensor"


@dataclass
class Fp8ChannelConf(AutoQuantizeConf):
    _target_: str = "stages.quantize.fp8_channel.Fp8Channel"


@dataclass
class Mxfp8Conf(AutoQuantizeConf):
    _target_: str = "stages.quantize.mxfp8.Mxfp8"


@dataclass
class Nvfp4Conf(AutoQuantizeConf):
    _target_: str = "stages.quantize.nvfp4.Nvfp4"


@dataclass
class Int4Conf:
    _target_: str = "stages.quantize.int4.Int4"
    group_size: int | None = MISSING
    symmetric: bool | None = MISSING
    skip: list[str] | None = MISSING
    allow_nonfinite: bool = MISSING
    look_ahead: bool = MISSING


# ------------------------------------------------------------------------------------------- the stages of a recipe


@dataclass
class GatherParamsConf:
    _target_: str = "stages.gather.GatherParams"
    dtype: str = MISSING
    keep_dtype: dict[str, str] = MISSING
    batch: Union[int, str] = MISSING  # noqa: UP007


@dataclass
class BucketConf:
    _target_: str = "stages.bucket.Bucket"
    capacity: Union[int, str] = MISSING  # noqa: UP007 (OmegaConf reads this spelling only)
    slots: int = positive()


@dataclass
class SnapshotConf:
    _target_: str = "stages.snapshot.Snapshot"
    keep: int = positive()


@dataclass
class PrefetchConf:
    _target_: str = "stages.prefetch.Prefetch"
    depth: int = positive()


@dataclass
class BarrierConf:
    _target_: str = "stages.barrier.Barrier"


@dataclass
class NotifyEnginesConf:
    _target_: str = "stages.notify.NotifyEngines"


@dataclass
class RecipeConf:
    stages: list[Any] = MISSING


# ---------------------------------------------------------------------------------------------- engines/, launcher/


@dataclass
class EmbeddedEnginesConf:
    kind: str = choice("embedded")
    count: int = positive()
    tp: Any = MISSING
    device: str = MISSING
    on_fatal: str = choice("answer", "exit")
    proof: str = choice(*PROOFS)
    model: str | None = path()
    required: Any = MISSING


@dataclass
class RemoteEnginesConf:
    kind: str = choice("remote")
    urls: list[str] = MISSING
    tp: Any = MISSING
    proof: str = choice(*PROOFS)
    required: Any = MISSING


@dataclass
class RayEnginesConf:
    kind: str = choice("ray")
    actors: list[str] = MISSING
    tp: Any = MISSING
    proof: str = choice(*PROOFS)
    required: Any = MISSING


@dataclass
class LocalLauncherConf:
    kind: str = choice("local")
    ranks: int = positive()


@dataclass
class RayLauncherConf:
    kind: str = choice("ray")
    ranks: int = positive()
    address: str | None = MISSING
    strategy: str = choice("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
    cpus: float = positive()
    gpus: float = field(default=MISSING, metadata={"range": (0, 1024)})
    wait: float = positive()


# ----------------------------------------------------------------------------------------------------------- session


@dataclass
class VerifyConf:
    minimum: str = choice(*PROOFS)
    probe: bool = MISSING


@dataclass
class TimeoutsConf:
    connect: float = positive()
    control: float = positive()
    put: float = positive()
    group: float = positive()
    agree: float = positive()


@dataclass
class SessionConf:
    integrity: str = choice("full", "off")
    preflight: bool = MISSING
    reference: str | None = path()
    retries: int = field(default=MISSING, metadata={"range": (0, 100)})
    release_between_updates: bool = MISSING
    verify: VerifyConf = field(default_factory=VerifyConf)
    timeouts: TimeoutsConf = field(default_factory=TimeoutsConf)


@dataclass
class ReportConf:
    timeline: str | None = path()
    metrics: str | None = path()
    callbacks: list[Any] = MISSING


@dataclass
class Config:
    """A whole run. Nodes typed `Any` are chosen from a group; their own class is found by `_target_` or `kind`."""

    task: str = choice(*TASKS)
    updates: int = positive()
    progress: str = choice("auto", "on", "off")
    recipe: RecipeConf = field(default_factory=RecipeConf)
    trainer: Any = MISSING
    gather: Any = MISSING
    quantize: Any = MISSING
    bucket: Any = MISSING
    snapshot: SnapshotConf = field(default_factory=SnapshotConf)
    prefetch: PrefetchConf = field(default_factory=PrefetchConf)
    backend: Any = MISSING
    transport: Any = MISSING
    barrier: BarrierConf = field(default_factory=BarrierConf)
    notify_engines: NotifyEnginesConf = field(default_factory=NotifyEnginesConf)
    engines: Any = MISSING
    session: SessionConf = field(default_factory=SessionConf)
    launcher: Any = MISSING
    report: ReportConf = field(default_factory=ReportConf)


@dataclass
class SubprocessLauncherConf:
    # Hydra takes launchers from modules called hydra_plugins.* only; see pipelines/hydra_launcher.py.
    _target_: str = "hydra_plugins.weightstream.SubprocessLauncher"
    n_jobs: int = 1


# The options of the groups, by the name of their file in conf/.
OPTIONS: Mapping[str, Mapping[str, type[Schema]]] = {
    "backend": {"lmdeploy": LmdeployConf, "sglang": SglangConf, "vllm": VllmConf},
    "transport": {"ipc": IpcConf, "nccl": NcclConf, "disk": DiskConf},
    "trainer": {"toy": ToyTrainerConf, "checkpoint": CheckpointTrainerConf},
    "gather": {"params": GatherParamsConf},
    "quantize": {
        "auto": AutoQuantizeConf,
        "engine": EngineQuantizeConf,
        "fp8_block": Fp8BlockConf,
        "fp8_block_ue8m0": Fp8BlockUe8m0Conf,
        "fp8_tensor": Fp8TensorConf,
        "fp8_channel": Fp8ChannelConf,
        "mxfp8": Mxfp8Conf,
        "nvfp4": Nvfp4Conf,
        "int4": Int4Conf,
    },
    "bucket": {"default": BucketConf},
    "engines": {"embedded": EmbeddedEnginesConf, "remote": RemoteEnginesConf, "ray": RayEnginesConf},
    "launcher": {"local": LocalLauncherConf, "ray": RayLauncherConf},
    "recipe": {"full": RecipeConf, "minimal": RecipeConf, "snapshot": RecipeConf},
}


def register() -> None:
    """Make the schema known to Hydra. Safe to call again."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    for group, options in OPTIONS.items():
        for option, schema in options.items():
            store.store(name=f"{group}_{option}_schema", node=schema)
    store.store(group="hydra/launcher", name="subprocess", node=SubprocessLauncherConf, provider="weightstream")


def schema_of(key: str, node: Any) -> type[Schema] | None:
    """The dataclass that describes `node` at top-level `key`, or None for a component that is not ours."""
    declared = {f.name: nested(f) for f in fields(Config)}
    for schema in OPTIONS.get(key, {key: declared.get(key)}).values():
        if schema is None:
            return None
        tags = {f.name: f for f in fields(schema) if f.name in ("_target_", "kind")}
        if "_target_" in tags and node.get("_target_") != tags["_target_"].default:
            continue
        if "kind" in tags and node.get("kind") not in tags["kind"].metadata["choices"]:
            continue
        return schema
    return None


def option_of(group: str, node: Mapping[str, Any] | None) -> str:
    """The option of a group that made this node: `none` where it is null, the class of a component that is not ours."""
    if node is None:
        return "none"
    targets = {f.default: option for option, s in OPTIONS[group].items() for f in fields(s) if f.name == "_target_"}
    return targets.get(node["_target_"], str(node["_target_"]))


def nested(f: Field[Any]) -> type[Schema] | None:
    """The dataclass that a field holds, or None for a plain value."""
    factory: Any = f.default_factory
    return factory if isinstance(factory, type) and is_dataclass(factory) else None
