"""Every file under conf/ composes, and says the same as the schema and the constructor that it configures."""

import inspect
import json
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from pipelines import config, schema
from pipelines.config import CONF, STAGES, build, load

NEEDED = {
    "engines=remote": ["engines.urls=[http://127.0.0.1:1]"],
    "trainer=checkpoint": ["trainer.path=here"],
    "experiment=quantization": ["trainer.path=here", "engines.model=there"],
    "transport=disk": ["transport.path=here"],
}
CHOICES = sorted(
    f"{group}={file.stem}"
    for group in (
        "backend",
        "bucket",
        "engines",
        "experiment",
        "gather",
        "launcher",
        "quantize",
        "recipe",
        "trainer",
        "transport",
    )
    for file in (CONF / group).glob("*.yaml")
)
COMPONENTS = [c for c in CHOICES if c.partition("=")[0] in schema.OPTIONS and c != "quantize=none"]


def read(choice: str) -> dict:
    group, _, option = choice.partition("=")
    node = yaml.safe_load((CONF / group / f"{option}.yaml").read_text())
    node.pop("defaults", None)
    return node


def test_every_folder_of_conf_is_tested() -> None:
    folders = {p.name for p in CONF.iterdir() if p.is_dir()} - {"hydra", "__pycache__"}
    assert folders == {choice.partition("=")[0] for choice in CHOICES}


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_composes_to_plain_data(choice: str) -> None:
    settings = load([choice, *NEEDED.get(choice, [])])
    assert json.loads(json.dumps(settings)) == settings


@pytest.mark.parametrize("choice", COMPONENTS)
def test_a_file_sets_exactly_the_fields_of_its_schema(choice: str) -> None:
    group, _, option = choice.partition("=")
    assert [*read(choice)] == [f.name for f in fields(schema.OPTIONS[group][option])]


@pytest.mark.parametrize(
    ("name", "node"),
    [(choice, read(choice)) for choice in COMPONENTS if "_target_" in read(choice)]
    + [(key, load([])[key]) for key in ("prefetch", "barrier", "notify_engines")],
)
def test_settings_and_values_are_those_of_the_constructor(name: str, node: dict) -> None:
    found = config._locate(node["_target_"])
    parameters = inspect.signature(found).parameters
    settings = {key: value for key, value in node.items() if key != "_target_"}
    assert [*settings] == [*parameters]
    for key, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty:
            continue
        ours = settings[key]
        if parameter.default is None and isinstance(ours, dict):
            # The constructor makes the mapping itself, since a default must not be shared.
            assert ours == {} or ours == getattr(found(), key)
        else:
            assert ours == parameter.default, key


def test_timeouts_are_those_that_the_stages_default_to() -> None:
    from stages.run import Timeouts

    timeouts = Timeouts()
    assert load([])["session"]["timeouts"] == {f.name: getattr(timeouts, f.name) for f in fields(Timeouts)}


def test_proofs_are_those_of_the_adapters() -> None:
    from stages.backends.base import PROOFS

    assert schema.PROOFS == PROOFS


def test_every_option_of_the_schema_has_a_file_and_the_reverse() -> None:
    known = {f"{group}={option}" for group, options in schema.OPTIONS.items() for option in options}
    assert known == set(COMPONENTS)


def test_every_word_of_every_recipe_is_a_node() -> None:
    for file in (CONF / "recipe").glob("*.yaml"):
        settings = load([f"recipe={file.stem}"])
        for word in settings["recipe"]["stages"]:
            assert STAGES[word] in settings


@pytest.mark.parametrize("backend", ["lmdeploy", "sglang", "vllm"])
@pytest.mark.parametrize("transport", ["ipc", "nccl", "disk"])
@pytest.mark.parametrize("recipe", ["full", "minimal"])
def test_every_combination_builds_a_chain(backend: str, transport: str, recipe: str, tmp_path: Path) -> None:
    from pipelines.compose import compose_backend, compose_chain
    from stages.errors import CompositionError

    where = [f"transport.path={tmp_path}"] if transport == "disk" else []
    settings = load([f"backend={backend}", f"transport={transport}", f"recipe={recipe}", *where])
    try:
        stages = compose_chain(settings, compose_backend(settings))
    except CompositionError as refusal:
        assert (backend, transport) == ("lmdeploy", "disk"), refusal
    else:
        assert len(stages) == len(settings["recipe"]["stages"]) - 1  # quantize=none leaves no stage


def test_composition_imports_neither_torch_nor_transformers() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from pipelines.config import load; import pipelines, pipelines.cli.app; load([]);"
        "print([m for m in ('torch', 'transformers', 'ray') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=CONF.parent, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


class Base:
    """What `build` is told to accept."""


class Component(Base):
    def __init__(self, size: int, name: str = "a") -> None:
        self.size, self.name = size, name


class Stranger:
    called = False

    def __init__(self) -> None:
        Stranger.called = True


HERE = __name__


def test_build_calls_the_class_with_its_settings() -> None:
    made = build({"_target_": f"{HERE}.Component", "name": "b"}, Base, size=3)
    assert isinstance(made, Component)
    assert (made.size, made.name) == (3, "b")


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"_target_": "os.system", "command": "true"}, "os.system is not a Base"),
        ({"_target_": f"{HERE}.Stranger"}, "is not a Base"),
        ({"_target_": "logging.os.system"}, "there is no module logging.os"),
        ({"_target_": f"{HERE}.Componet"}, "did you mean Component?"),
        ({"_target_": "no_such_package.Thing"}, "there is no module no_such_package"),
        ({"_target_": f"{HERE}.Component", "size": 1, "nam": "b"}, "did you mean name?"),
        ({"_target_": f"{HERE}.Component"}, "needs size"),
        ({"_target_": "Component"}, "names no class"),
        ({}, "names no class"),
    ],
)
def test_build_refuses_what_is_not_a_component(node: dict, message: str) -> None:
    from stages.errors import ConfigError

    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        build(node, Base)
    assert not Stranger.called


def test_build_keeps_the_cause_of_a_component_that_fails_to_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stages.errors import ConfigError

    (tmp_path / "broken_stage.py").write_text("import no_such_dependency\nclass Stage: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="no_such_dependency") as caught:
        build({"_target_": "broken_stage.Stage"}, Base)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
