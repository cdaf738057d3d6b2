"""One function composes or takes a config, inside and outside of Hydra, and returns plain data with absolute paths."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from pipelines import config
from pipelines.config import CONF, load
from stages.errors import ConfigError


def test_what_load_returns_loads_to_itself() -> None:
    settings = load(["backend=vllm", "transport=nccl"])
    assert load(settings) == settings
    assert load(OmegaConf.create(settings)) == settings


def test_overrides_in_one_text_are_refused_and_not_read_by_character() -> None:
    with pytest.raises(ConfigError, match="a list of texts"):
        load("backend=vllm")


def test_load_leaves_hydra_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("a: 1\n")
    with initialize_config_dir(str(tmp_path), version_base="1.2", job_name="mine"):
        assert load(["backend=vllm"])["backend"]["pause"] == "keep"
        assert compose("mine") == {"a": 1}
    assert not GlobalHydra.instance().is_initialized()
    load([])
    assert not GlobalHydra.instance().is_initialized()


def test_a_part_of_another_apps_config_is_resolved_against_its_root() -> None:
    root = OmegaConf.create({"lr": 0.5, "stream": config.compose_config(["backend=sglang"])})
    OmegaConf.set_struct(root, False)
    root.stream.trainer.lr = "${lr}"
    assert load(root.stream)["trainer"]["lr"] == 0.5


def test_a_hydra_app_of_ones_own_can_take_the_groups(tmp_path: Path) -> None:
    (tmp_path / "app.yaml").write_text(
        f"hydra:\n  searchpath: [file://{CONF}]\ndefaults:\n  - weightstream@weights\n"
        "  - override backend@weights.backend: vllm\n  - _self_\nsteps: 3\n"
    )
    config.register()
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        composed = compose("app", ["transport@weights.transport=nccl", "weights.transport.port=5000"])
    assert composed.steps == 3
    settings = load(composed.weights)
    assert (settings["backend"]["pause"], settings["transport"]["port"]) == ("keep", 5000)


def test_a_pickled_result_is_small_and_needs_no_resolver() -> None:
    data = pickle.dumps(load(["backend=vllm"]))
    assert len(data) < 5000
    read = "pickle.loads(sys.stdin.buffer.read())['backend']['pause']"
    code = f"import pickle, sys; print({read}, 'omegaconf' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, check=True)
    assert result.stdout.split() == [b"keep", b"False"]


def test_relative_paths_count_from_where_the_process_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = load(
        [
            "trainer=checkpoint",
            "trainer.path=a/../model",
            "transport=disk",
            "transport.path=weights",
            "session.reference=./ref",
            "engines.model=served",
        ]
    )
    assert settings["trainer"]["path"] == str(tmp_path / "model")
    assert settings["transport"]["path"] == str(tmp_path / "weights")
    assert settings["session"]["reference"] == str(tmp_path / "ref")
    assert settings["engines"]["model"] == str(tmp_path / "served")
    monkeypatch.chdir("/")
    assert load(settings) == settings, "resolved once, not again"


def test_home_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert load(["trainer=checkpoint", "trainer.path='~/model'"])["trainer"]["path"] == "/home/someone/model"


@pytest.mark.parametrize("chdir", ["true", "false"])
def test_relative_paths_under_a_hydra_main_of_ones_own(tmp_path: Path, chdir: str) -> None:
    (tmp_path / "app.py").write_text(
        "import hydra, json\n"
        "from pipelines.config import load, register, CONF\n"
        "register()\n"
        "@hydra.main(config_path=str(CONF), config_name='config', version_base='1.3')\n"
        "def main(cfg):\n"
        "    s = load(cfg)\n"
        "    t = load(['trainer=checkpoint', 'trainer.path=model'])\n"
        "    print(json.dumps([s['trainer']['path'], t['trainer']['path'], s['transport']['path']]))\n"
        "main()\n"
    )
    arguments = [
        "trainer=checkpoint",
        "trainer.path=model",
        "transport=disk",
        "hydra/launcher=basic",
        f"hydra.job.chdir={chdir}",
        f"hydra.run.dir={tmp_path}/out",
    ]
    environment = os.environ | {"PYTHONPATH": str(CONF.parent)}
    result = subprocess.run(
        [sys.executable, "app.py", *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    model = str(tmp_path / "model")
    assert json.loads(result.stdout.splitlines()[-1]) == [model, model, str(tmp_path / "out" / "weights")]


def test_a_run_folder_is_needed_where_nothing_gives_one() -> None:
    with pytest.raises(ConfigError, match=r"transport.path: there is no run folder.*\n.*transport.path="):
        load(["transport=disk"])


def test_interpolation_to_a_missing_value_and_to_nothing_are_refused() -> None:
    for bad in ("trainer.seed=${nothing.here}", "trainer.seed=${oc.env:WEIGHTSTREAM_NO_SUCH_VARIABLE}"):
        with pytest.raises(ConfigError, match=r"trainer.seed"):
            load([bad])


def test_an_incomplete_dict_is_refused_by_name() -> None:
    settings = load([])
    del settings["bucket"]["slots"]
    with pytest.raises(ConfigError, match="bucket.slots must be set"):
        load(settings)
    del settings["bucket"]
    with pytest.raises(ConfigError, match="bucket is not in the config"):
        load(settings)


def test_a_dict_with_an_unknown_or_mistyped_entry_is_refused() -> None:
    settings = load([])
    with pytest.raises(ConfigError, match="did you mean bucket.slots"):
        load(settings | {"bucket": settings["bucket"] | {"slot": 1}})
    with pytest.raises(ConfigError, match="bucket.slots: 'two' is not a whole number"):
        load(settings | {"bucket": settings["bucket"] | {"slots": "two"}})


def test_no_omegaconf_type_leaves() -> None:
    def walk(value: object) -> None:
        assert not isinstance(value, DictConfig)
        assert type(value) in (dict, list, str, int, float, bool, type(None))
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            walk(inner)

    walk(load(["experiment=bucket_size"]))


def test_keys_of_engines_that_got_in_are_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTSTREAM_API_KEY", "s3cret")
    tree = {"a": ["x-s3cret-y", 1], "b": {"s3cret": None}}
    assert config.redacted(tree) == {"a": ["x-***-y", 1], "b": {"***": None}}
    monkeypatch.delenv("WEIGHTSTREAM_API_KEY")
    assert config.redacted(tree) == tree
