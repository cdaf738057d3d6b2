"""The check of a composed config against the schema: names, types, values, paths, addresses."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import Field, fields
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipelines import schema
from pipelines.suggest import did_you_mean, dotted, explain, unknown_key
from pipelines.urls import normalize_actors, normalize_all
from stages.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance as Schema

# The words of a recipe, and the node of the config that each is built from.
STAGES = {"gather_params": "gather"} | {
    word: word for word in ("snapshot", "quantize", "bucket", "prefetch", "transport", "barrier", "notify_engines")
}


def check(tree: dict[str, Any], folder: str) -> dict[str, Any]:
    """Hold a resolved tree against the schema and return it typed, with absolute paths and normalized URLs."""
    names = [f.name for f in fields(schema.Config)]
    every = dotted(OmegaConf.create(tree))
    for key in tree:
        if key not in names:
            raise unknown_key(str(key), names, every)
    for name in names:
        if name not in tree:
            raise ConfigError(f"{name} is not in the config\n  a config is composed whole: start from conf/config.yaml")
    result: dict[str, Any] = {}
    for f in fields(schema.Config):
        value = tree[f.name]
        if f.name == "quantize" and (value is None or value == {"_target_": None}):
            result[f.name] = None
        elif isinstance(value, dict) or schema.nested(f) is not None:
            result[f.name] = _node(f.name, value, every, folder)
        elif f.metadata or f.type == "int":
            result[f.name] = _scalar(f, f.name, value, folder)
        else:
            options = schema.OPTIONS.get(f.name, {})
            raise ConfigError(f"{f.name}: {value!r} is not a component\n  {did_you_mean(value, options)}")
    _engines(result["engines"])
    _recipe(result["recipe"], result)
    return result


def none_missing(tree: Any) -> None:
    """Refuse a tree in which a value still is ???."""
    missing = sorted(key for key, value in _leaves(tree) if value == "???")
    if missing:
        raise ConfigError(f"{', '.join(missing)} must be set\n  add {' '.join(f'{key}=...' for key in missing)}")


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if isinstance(value, dict | list):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _node(key: str, value: Any, every: list[str], folder: str) -> Any:
    found = schema.schema_of(key, value) if isinstance(value, dict) else None
    if found is None:
        if isinstance(value, dict) and isinstance(value.get("_target_"), str) and key not in ("engines", "launcher"):
            return value  # a component of the user's own; build() checks its settings
        raise ConfigError(
            f"{key} is not a component\n  choose one: {key}={'|'.join(schema.OPTIONS.get(key, {'...': None}))}"
        )
    _no_unknown(found, key, value, every)
    try:
        typed = OmegaConf.merge(OmegaConf.structured(found), value)
        none_missing({key: OmegaConf.to_container(typed)})
        plain = OmegaConf.to_container(typed, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        error.full_key = f"{key}.{error.full_key}"
        raise explain(error) from error
    return _values(found, key, plain, folder)


def _no_unknown(found: type[Schema], path: str, value: dict[str, Any], every: list[str]) -> None:
    known = {f.name: f for f in fields(found)}
    for name, inner in value.items():
        if name not in known:
            raise unknown_key(f"{path}.{name}", known, every)
        deeper = schema.nested(known[name])
        if deeper is not None and isinstance(inner, dict):
            _no_unknown(deeper, f"{path}.{name}", inner, every)


def _values(found: type[Schema], path: str, plain: Any, folder: str) -> dict[str, Any]:
    for f in fields(found):
        deeper = schema.nested(f)
        if deeper is not None:
            plain[f.name] = _values(deeper, f"{path}.{f.name}", plain[f.name], folder)
        else:
            plain[f.name] = _scalar(f, f"{path}.{f.name}", plain[f.name], folder)
    return dict(plain)


def _scalar(f: Field[Any], path: str, value: Any, folder: str) -> Any:
    choices = f.metadata.get("choices")
    if choices:
        # YAML reads on/off as booleans, the command line reads them as words.
        word = {"true": "on", "false": "off"}.get(str(value).lower(), value) if "off" in choices else value
        if word not in choices:
            raise ConfigError(
                f"{path}: {value!r} is none of {', '.join(map(str, choices))}\n  {did_you_mean(value, choices)}"
            )
        return word
    if f.metadata.get("positive") and not (value > 0 and math.isfinite(value)):
        raise ConfigError(f"{path}: {value!r} must be a finite number above zero\n  write for instance {path}=1")
    low, high = f.metadata.get("range", (None, None))
    if low is not None and not low <= value <= high:
        raise ConfigError(f"{path}: {value} must lie between {low} and {high}\n  write for instance {path}={low}")
    if f.metadata.get("path") and value is not None:
        return os.path.normpath(os.path.join(folder, os.path.expanduser(value)))
    return value


def _engines(engines: dict[str, Any]) -> None:
    if "urls" in engines:
        engines["urls"] = normalize_all(engines["urls"])
    if "actors" in engines:
        engines["actors"] = normalize_actors(engines["actors"])
    listed = engines.get("urls", engines.get("actors"))
    count = engines["count"] if listed is None else len(listed)
    sizes = engines["tp"] if isinstance(engines["tp"], list) else [engines["tp"]] * count
    if not all(isinstance(tp, int) and not isinstance(tp, bool) and tp > 0 for tp in sizes):
        raise ConfigError(
            f"engines.tp: {engines['tp']!r} must be a whole number above zero\n  write engines.tp=1, or a list"
        )
    if len(sizes) != count:
        raise ConfigError(
            f"engines.tp lists {len(sizes)} engines, there are {count}\n  give one number for all, or one each"
        )
    required = engines["required"]
    most = math.inf if listed == [] else count  # actors may come later
    if required != "all" and not (isinstance(required, int) and 1 <= required <= most):
        raise ConfigError(
            f"engines.required: {required!r} must be all, or a number from 1 to {count}\n  write engines.required=all"
        )


def _recipe(recipe: dict[str, Any], tree: dict[str, Any]) -> None:
    if not recipe["stages"]:
        raise ConfigError("recipe.stages is empty\n  choose recipe=full, or list the stages")
    for item in recipe["stages"]:
        if isinstance(item, str):
            if item not in STAGES:
                raise ConfigError(
                    f"recipe.stages: there is no stage {item!r}\n  {did_you_mean(item, STAGES)} "
                    "A class of your own is written {_target_: module.Class}"
                )
        elif not (isinstance(item, dict) and isinstance(item.get("_target_"), str)):
            raise ConfigError(
                f"recipe.stages: {item!r} is no stage\n  write a word, or {{_target_: module.Class, setting: value}}"
            )
