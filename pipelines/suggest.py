"""Errors of Hydra and OmegaConf in our own words: what is wrong, and what to write instead."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import Container, DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, InterpolationResolutionError, MissingMandatoryValue, OmegaConfBaseException

from pipelines.schema import OPTIONS
from stages.errors import ConfigError


def did_you_mean(word: object, options: Iterable[object]) -> str:
    """`did you mean backend?`, or the list of what there is where nothing is near."""
    names = sorted({str(option) for option in options})
    near = difflib.get_close_matches(str(word), names, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]}?"
    return f"there is: {', '.join(names)}" if names else "it takes no settings"


def unknown_key(path: str, siblings: Iterable[str], every_key: Iterable[str] = ()) -> ConfigError:
    """The error for the setting `path`, which does not exist. `every_key` are all dotted keys of the config."""
    parent, _, leaf = path.rpartition(".")
    prefix = f"{parent}." if parent else ""
    names = [name for name in siblings if name not in ("_target_", "kind", "hydra")]
    owners = [o for o, node in OPTIONS.get(parent, {}).items() if leaf in {f.name for f in fields(node)}]
    elsewhere = [key for key in every_key if key.rpartition(".")[2] == leaf and key != path]
    if re.search(r"(api|admin|access)?_?(key|token|secret|password)s?$", leaf, re.I):
        hint = "keys of engines come from WEIGHTSTREAM_API_KEY and WEIGHTSTREAM_ADMIN_KEY, never from the config"
    elif owners:
        hint = f"it belongs to {' and '.join(f'{parent}={owner}' for owner in owners)}: choose that too"
    elif elsewhere and not difflib.get_close_matches(leaf, names, n=1, cutoff=0.75):
        hint = f"did you mean {' or '.join(elsewhere[:3])}?"
    else:
        hint = did_you_mean(prefix + leaf, [prefix + name for name in names])
    return ConfigError(f"there is no setting {path!r}{' here' if owners else ''}\n  {hint}")


def explain(error: Exception, root: DictConfig | None = None) -> ConfigError:
    """A ConfigError for what Hydra or OmegaConf refused. `root`, without overrides, is searched for names."""
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(error, MissingConfigException) and error.options is not None:
        return _unknown_option(error.missing_cfg_file or "", error.options)
    if isinstance(error, OverrideParseException):
        return _unparsable(error)
    if isinstance(cause, MissingMandatoryValue):
        return ConfigError(f"{cause.full_key} has no value\n  set it: {cause.full_key}=...")
    if isinstance(cause, InterpolationResolutionError):
        reason = str(cause).partition("\n")[0]
        found = re.search(r"raised while resolving interpolation: (.*)", reason)
        return ConfigError(
            f"{cause.full_key}: {found[1] if found else reason}\n  give the value yourself: {cause.full_key}=..."
        )
    if isinstance(cause, ConfigKeyError | AttributeError) and isinstance(cause, OmegaConfBaseException):
        return _unknown_node(cause, root)
    if isinstance(cause, OmegaConfBaseException):
        return _bad_value(cause)
    return ConfigError(_plain(str(error)))


def _unknown_option(missing: str, options: Sequence[str]) -> ConfigError:
    group, _, option = missing.rpartition("/")
    return ConfigError(
        f"{group} has no option {option!r}\n  {did_you_mean(option, options)} ({group}={'|'.join(sorted(options))})"
    )


def _unparsable(error: OverrideParseException) -> ConfigError:
    text = error.override or ""
    if "=" not in text:
        return ConfigError(f"cannot read {text!r}\n  write key=value, for instance backend=lmdeploy")
    key, _, value = text.partition("=")
    if value.startswith("~/"):
        return ConfigError(f"cannot read {text!r}: ~ is not expanded here\n  write {key}=$HOME/{value[2:]}")
    return ConfigError(
        f"cannot read {text!r}: {_first_reason(error.message)}\n"
        f'  quote what holds special characters, for the shell as well: \'{key}="..."\', \'{key}=["...","..."]\''
    )


def _first_reason(message: str) -> str:
    lines = [line for line in message.splitlines() if line and not line.startswith(("Error parsing", "See http"))]
    return lines[0] if lines else "not of the form key=value"


def _unknown_node(cause: OmegaConfBaseException, root: DictConfig | None) -> ConfigError:
    path = str(cause.full_key)
    parent = cause.parent_node
    siblings = [str(key) for key in parent] if isinstance(parent, DictConfig) else []
    if isinstance(parent, DictConfig) and OmegaConf.get_type(parent) is dict:
        owner = path.removesuffix(f".{cause.key}")
        return ConfigError(f"{owner} has no entry {cause.key!r} yet\n  to add one put a + in front: '+{owner}={{...}}'")
    every = dotted(root) if root is not None else []
    return unknown_key(path, siblings, every)


def _bad_value(cause: OmegaConfBaseException) -> ConfigError:
    first = (cause.msg or str(cause)).partition("\n")[0]
    key = str(cause.full_key)
    if "is not a ListConfig" in first:
        return ConfigError(
            f"{key} takes a list\n  write '{key}=[a,b]', with the quotes for the shell; one value: '{key}=[a]'"
        )
    number = re.match(r"Value '(.*)' of type '\w+' could not be converted to (\w+)", first, re.S)
    if number:
        kind = {"Integer": "a whole number", "Float": "a number"}.get(number[2], number[2])
        return ConfigError(f"{key}: {number[1]!r} is not {kind}\n  write for instance {key}=1")
    boolean = re.match(r"Value '(.*)' is not a valid bool", first, re.S)
    if boolean:
        return ConfigError(f"{key}: {boolean[1]!r} is neither true nor false\n  write {key}=true or {key}=false")
    return ConfigError(f"{key}: {first}\n  see the comment at this key in conf/")


def _plain(message: str) -> str:
    """Hydra's own message, without search paths and links; where it speaks of YAML, in terms of the command line."""
    comma = re.match(r"Ambiguous value for argument '(.*?)'|Sweep parameters '(.*?)' requires", message, re.S)
    if comma:
        text = comma[1] or comma[2]
        key, _, value = text.partition("=")
        return f"{text}: several values are a sweep\n  to run them all add -m; for a list write '{key}=[{value}]'"
    twice = re.match(r"Multiple values for ([\w/]+)\..*'override .*: (.*)'", message, re.S)
    if twice:
        return f"{twice[1]} is chosen already\n  leave out the +: {twice[1]}={twice[2]}"
    lines = [line.strip() for line in message.strip().splitlines()]
    lines = [line for line in lines if line and not line.startswith(("See http", "Config search path", "provider="))]
    return "\n  ".join(lines) or "the configuration cannot be composed"


def dotted(config: Container, prefix: str = "") -> list[str]:
    """Every key below, as `a.b.c`; without Hydra's own."""
    keys: list[str] = []
    if isinstance(config, DictConfig):
        for key in map(str, config):
            if prefix == "" and key in ("hydra", "_target_"):
                continue
            keys.append(f"{prefix}{key}")
            node = config._get_node(key)
            if isinstance(node, DictConfig) and not node._is_missing() and not node._is_none():
                keys += dotted(node, f"{prefix}{key}.")
    return keys
