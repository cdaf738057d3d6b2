"""task=matrix: every backend x transport x quantization, each composed and planned for real, with the refusal of those that fail.

What is possible is not written down here: adapters, transports and formats say it themselves, as they would to a run.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from rich.table import Table
from rich.text import Text

from pipelines.config import CONF
from pipelines.executor import plan_chain
from pipelines.report_view import table_console
from pipelines.schema import OPTIONS, option_of
from pipelines.tasks.plan import prepare
from stages.errors import WeightstreamError

# What the engines' checkpoint says, for the options that ask it.
_SERVED = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}}
_ASKING = ("auto", "engine")


def run(settings: Mapping[str, Any]) -> int:
    """Print the matrix. Always 0: that something is impossible is an answer."""
    table = Table(title="what can be sent here, without a GPU")
    table.add_column("backend", no_wrap=True)
    table.add_column("transport", no_wrap=True)
    table.add_column("quantize=")
    table.add_column("not, and why")
    notes: list[str] = []
    for backend in OPTIONS["backend"]:
        for transport in OPTIONS["transport"]:
            able, unable = [], dict[str, list[str]]()
            for quantize, reason in formats(settings, backend, transport):
                if reason is None:
                    able.append(quantize)
                else:
                    unable.setdefault(reason, []).append(quantize)
            notes += [reason for reason in unable if reason not in notes]
            why = "\n".join(f"{_names(names)} [{notes.index(reason) + 1}]" for reason, names in unable.items())
            table.add_row(backend, transport, Text(_names(able), "green"), Text(why, "yellow"))
        table.add_section()
    console = table_console()
    console.print(table)
    for number, note in enumerate(notes, start=1):
        console.print(Text(f"[{number}] {note}"))
    console.print(Text("What real engines have taken stands in README.md; a GPU lifts what gloo lacks.", "dim"))
    return 0


def formats(settings: Mapping[str, Any], backend: str, transport: str) -> Iterator[tuple[str, str | None]]:
    """Every option of quantize, and why it cannot be sent; None where it can."""
    changed = {name: _node(settings, name, option) for name, option in (("backend", backend), ("transport", transport))}
    for quantize in ("none", *OPTIONS["quantize"]):
        node = None if quantize == "none" else _node(settings, "quantize", quantize)
        yield quantize, _refusal({**settings, **changed, "quantize": node}, served=quantize in _ASKING)


def _node(settings: Mapping[str, Any], group: str, option: str) -> dict[str, Any]:
    """The node of an option: as the run has it where it has chosen that one, else with the values of conf/."""
    if option_of(group, settings[group]) == option:
        return dict(settings[group])
    node = OmegaConf.to_container(OmegaConf.load(CONF / group / f"{option}.yaml"), resolve=False)
    assert isinstance(node, dict)
    return {str(k): "unused" if "${" in str(v) else v for k, v in node.items() if k != "defaults"}


def _refusal(settings: Mapping[str, Any], served: bool) -> str | None:
    try:
        stages, run = prepare(settings)
        with tempfile.TemporaryDirectory() as folder:
            if served:
                Path(folder, "config.json").write_text(json.dumps(_SERVED))
                run.reference = Path(folder)
            run.model = _model()
            try:
                plan_chain(stages, run)
                run.transport.check(run)
            finally:
                for stage in reversed(stages):
                    stage.close()
    except WeightstreamError as error:
        return " ".join(str(error).split())
    return None


def _model() -> torch.nn.Module:
    """A weight that every format takes, and one that none does."""
    with torch.device("meta"):
        layer = torch.nn.ModuleDict(
            {"down_proj": torch.nn.Linear(256, 256, bias=False), "norm": torch.nn.LayerNorm(256)}
        )
    return torch.nn.ModuleDict({"model": torch.nn.ModuleDict({"layers": torch.nn.ModuleList([layer])})}).to(
        torch.bfloat16
    )


def _names(options: list[str]) -> str:
    every = ["none", *OPTIONS["quantize"]]
    if options == every:
        return "all"
    left = [o for o in every if o not in options]
    return f"all but {', '.join(left)}" if 0 < len(left) <= 2 else ", ".join(options) or "-"
