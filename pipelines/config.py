"""Configuration: compose or take it, check it, hand on plain dicts and lists; build components from their nodes."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobRuntime
from hydra.errors import HydraException
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from pipelines import schema
from pipelines.checks import STAGES as STAGES
from pipelines.checks import check, none_missing
from pipelines.redact import redacted as redacted
from pipelines.redact import refuse_secrets
from pipelines.suggest import did_you_mean, explain
from stages.errors import ConfigError

CONF = Path(__file__).resolve().parent.parent / "conf"

T = TypeVar("T")


def load(source: Sequence[str] | Mapping[str, Any] | DictConfig | None = None) -> dict[str, Any]:
    """The settings of a run as a plain tree: composed, resolved, checked, without anything of OmegaConf's.

    `source` is a list of overrides as on the command line, or a config that is already composed (`cfg` of a Hydra app,
    a part of it, or what `load` returned). Relative paths count from the folder that the process started in. Raises
    ConfigError.
    """
    register()
    if isinstance(source, str):
        raise ConfigError(f"overrides are a list of texts, not the text {source!r}\n  write [{source!r}]")
    if source is None or not isinstance(source, Mapping | DictConfig):
        config = compose_config(list(source or []))
    else:
        config = source if isinstance(source, DictConfig) else OmegaConf.create(dict(source))
    return check(_resolved(config), start_folder())


def compose_config(overrides: list[str], *, with_hydra: bool = False) -> DictConfig:
    """conf/ with these overrides. Works inside and outside of a Hydra app, whose state it leaves as it was."""
    register()
    with _hydra_at(CONF):
        try:
            return compose("config", overrides, return_hydra_config=with_hydra)
        except (HydraException, OmegaConfBaseException) as error:
            raise explain(error, compose("config")) from error
        except IndexError:
            raise ConfigError("an override is empty\n  write key=value, for instance backend=lmdeploy") from None


def precheck(overrides: list[str], *, sweep: bool) -> dict[str, Any] | None:
    """Refuse what cannot work before Hydra creates or saves anything. Of a sweep, its first job is looked at.

    Returns the settings of the only job, None for a sweep.
    """
    refuse_secrets(overrides)
    if sweep:
        overrides = _first_of_each(overrides)
    config = compose_config(overrides, with_hydra=True)
    mode = config.hydra.mode
    if not sweep and mode is not None and mode.name == "MULTIRUN":
        params = [f"{key}={value}" for key, value in (config.hydra.sweeper.get("params") or {}).items()]
        return precheck([*overrides, *params], sweep=True)
    with open_dict(config):
        config.hydra.runtime.output_dir = os.path.abspath(config.hydra.run.dir)
    job = check_job(config)
    if sweep and job["task"] != "run":
        raise ConfigError(f"task={job['task']} is no sweep\n  leave out -m, or set task=run")
    return None if sweep else job


def check_job(config: DictConfig) -> dict[str, Any]:
    """The settings of `config`, which has its hydra node and run folder. Raises ConfigError unless it can be run."""
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(config)
    try:
        return load({str(key): value for key, value in config.items() if key != "hydra"})
    finally:
        HydraConfig.instance().cfg = before


def build(node: Mapping[str, Any], base: type[T], **extra: Any) -> T:
    """Make the component that `_target_` names from its settings.

    Only a class derived from `base` is ever called. `extra` are arguments that do not come from the config. Raises
    ConfigError for a class that cannot be imported or is of another kind, and for settings that it does not take.
    """
    target = node.get("_target_")
    if not isinstance(target, str) or "." not in target:
        raise ConfigError(
            f"_target_: {target!r} names no class\n  write module.Class, for instance stages.bucket.Bucket"
        )
    found = _locate(target)
    if not (inspect.isclass(found) and issubclass(found, base)):
        raise ConfigError(f"{target} is not a {base.__name__}\n  derive it from {base.__module__}.{base.__qualname__}")
    settings = {key: value for key, value in node.items() if key != "_target_"}
    parameters = inspect.signature(found).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for key in settings:
        if key not in named and not takes_any:
            raise ConfigError(
                f"{target} has no setting {key!r}\n  {did_you_mean(key, [n for n in named if n not in extra])}"
            )
    given = settings | extra
    needed = [n for n in named if parameters[n].default is inspect.Parameter.empty and n not in given]
    if needed:
        raise ConfigError(f"{target} needs {', '.join(needed)}\n  set it beside _target_")
    return found(**given)


def start_folder() -> str:
    """Where the caller started: under Hydra its original folder, whatever hydra.job.chdir says."""
    return str(HydraConfig.get().runtime.cwd) if HydraConfig.initialized() else os.getcwd()


def register() -> None:
    """Make schema and resolver known in this process; needed once per process and harmless more often."""
    schema.register()
    OmegaConf.register_new_resolver("run_dir", _in_run_folder, replace=True)


def _in_run_folder(name: str) -> str:
    if HydraConfig.initialized() and not OmegaConf.is_missing(HydraConfig.get().runtime, "output_dir"):
        return str(Path(HydraConfig.get().runtime.output_dir) / name)
    raise ConfigError("there is no run folder outside of the command line")


@contextmanager
def _hydra_at(folder: Path) -> Iterator[None]:
    before = GlobalHydra.instance().hydra
    version, runtime = VersionBase.instance(), JobRuntime.instance()
    base, name = version.getbase(), runtime.get("name")
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(folder), job_name="weightstream", version_base="1.3"):
            yield
    finally:
        GlobalHydra.instance().hydra = before
        if base is not None and type(base) is not object:  # Hydra's mark for: no app has chosen one yet
            version.setbase(base)
        runtime.set("name", name)


def _first_of_each(overrides: list[str]) -> list[str]:
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        raise explain(error) from error
    result = []
    for text, override in zip(overrides, parsed, strict=True):
        if override.is_sweep_override() and override.is_discrete_sweep():
            text = f"{override.get_key_element()}={next(iter(override.sweep_string_iterator()))}"
        result.append(text)
    return result


def _resolved(config: DictConfig) -> dict[str, Any]:
    none_missing(OmegaConf.to_container(config, resolve=False))
    try:
        tree = OmegaConf.to_container(config, resolve=True, throw_on_missing=True, enum_to_str=True)
    except OmegaConfBaseException as error:
        raise explain(error) from error
    if not isinstance(tree, dict):
        raise ConfigError("the config is not a mapping\n  pass what Hydra composed from conf/config.yaml")
    return {str(key): value for key, value in tree.items()}


def _locate(target: str) -> Any:
    """Import `package.module.Class`. Only the module is imported, nothing is called."""
    module_name, _, name = target.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise ConfigError(f"{target} cannot be imported: {error}\n  install what it needs") from error
        raise ConfigError(
            f"{target}: there is no module {error.name}\n  is it installed, or in the current folder?"
        ) from None
    if not hasattr(module, name):
        classes = [n for n, v in vars(module).items() if inspect.isclass(v) and v.__module__ == module_name]
        raise ConfigError(f"{module_name} has no class {name!r}\n  {did_you_mean(name, classes)}")
    return getattr(module, name)
