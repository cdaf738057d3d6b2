"""What a user sees: refusals in two lines before anything is written, help at once, a real run, Ctrl-C at any moment."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.config.command import ROOT, Command, run


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["backend=lmdeplyo"], "did you mean lmdeploy?"),
        (["+backend.slep_level=1"], "did you mean backend.sleep_level?"),
        (["trainer=checkpoint"], "trainer.path must be set"),
        (["hydra.ouput_subdir=x"], "did you mean hydra.output_subdir?"),
        (["--backend", "vllm"], "settings are written key=value"),
        (["+session.api_key=hunter2"], "WEIGHTSTREAM_API_KEY"),
        (["engines=remote", "engines.urls=[http://user:hunter2@host:80]"], "user name or password"),
        (["-m", "backend=vllm,slang"], "did you mean sglang?"),
        (["-m", "backend=vllm,sglang", "+session.api_key=hunter2"], "WEIGHTSTREAM_API_KEY"),
        (["-m", "backend=vllm,sglang", "backend.pause=abort,kep"], "did you mean keep?"),
        (["-m", "backend=vllm,sglang", "hydra/launcher=subproces"], "did you mean subprocess?"),
        (["experiment=bucket_size", "updates=0"], "above zero"),
    ],
)
def test_a_refusal_is_two_lines_and_exit_code_2(tmp_path: Path, arguments: list[str], said: str) -> None:
    command = run(tmp_path, *arguments)
    assert command.process.returncode == 2
    assert said in command.err
    assert len(command.err.splitlines()) == 2
    assert "hunter2" not in command.out + command.err
    saved = "".join(p.read_text() for p in tmp_path.rglob("*") if p.is_file())
    assert "hunter2" not in saved
    if "-m" not in arguments:
        assert not (tmp_path / "outputs").exists(), "nothing is written before the config is known to be good"


def test_help_lists_groups_and_examples(tmp_path: Path) -> None:
    command = run(tmp_path, "--help")
    assert command.process.returncode == 0
    assert "backend=     lmdeploy | sglang | vllm" in command.out
    assert "task=        run | plan | doctor | matrix" in command.out
    assert command.out.count("\n  python run.py ") >= 6
    assert max(map(len, command.out.splitlines())) <= 100
    assert not command.err


def test_another_package_of_our_name_is_named_and_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "pipelines").mkdir(parents=True)
    (tmp_path / "elsewhere" / "pipelines" / "__init__.py").write_text("")
    code = f"import sys; sys.path.append({str(ROOT)!r}); import run; run.main()"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "elsewhere", capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert "another package 'pipelines'" in result.stderr
    assert str(tmp_path / "elsewhere" / "pipelines") in result.stderr


def test_the_composed_config_can_be_looked_at(tmp_path: Path) -> None:
    command = run(tmp_path, "--cfg", "job", "backend=vllm")
    assert command.process.returncode == 0
    assert "pause: keep" in command.out


def test_a_run_updates_proves_and_reports(tmp_path: Path) -> None:
    command = run(
        tmp_path, "backend=lmdeploy", "transport=ipc", "trainer.layers=1", "updates=2", WEIGHTSTREAM_API_KEY="s3cr3t"
    )
    assert command.process.returncode == 0, command.err
    (folder,) = (tmp_path / "outputs").glob("*/*")
    report = json.loads((folder / "report.json").read_text())
    assert (report["outcome"], report["version"]) == ("committed", "2")
    assert [u["version"] for u in report["updates"]] == ["1", "2"]
    for update in report["updates"]:
        assert update["bytes"] > 0
        assert {"pause", "gather", "quantize", "pack", "wire", "apply", "resume", "total"} <= set(update["seconds"])
        assert update["limit_fraction"] == pytest.approx(update["gb_per_s"] / update["limit_gb_per_s"])
        (engine,) = update["engines"]
        assert (engine["outcome"], engine["version"], engine["verified"]) == ("committed", update["version"], "digest")
        assert engine["error"] is None
    assert report["config"]["backend"]["_target_"] == "stages.backends.lmdeploy.Lmdeploy"
    assert report["libraries"]["torch"]
    assert "committed" in command.out
    everything = command.out + command.err + "".join(p.read_text() for p in folder.rglob("*") if p.is_file())
    assert "s3cr3t" not in everything
    assert command.left_behind() == []


def test_an_unreachable_engine_is_one_message_and_exit_code_1(tmp_path: Path) -> None:
    remote = ["engines=remote", "engines.urls=[127.0.0.1:9]", "trainer.layers=1"]
    command = run(tmp_path, *remote, http_proxy="http://127.0.0.1:9", all_proxy="http://127.0.0.1:9")
    assert command.process.returncode == 1
    assert "http://127.0.0.1:9" in command.err
    assert "Traceback" not in command.err
    (log,) = (tmp_path / "outputs").glob("*/*/weightstream.log")
    assert "Traceback" in log.read_text(), "the log has what the terminal spares the user"
    assert command.left_behind() == []


def test_an_unexpected_error_keeps_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "from stages.base import Stage\nclass Broken(Stage):\n    def __init__(self):\n        raise ZeroDivisionError('oops')\n"
    )
    words = "gather_params,{_target_: broken.Broken},bucket,transport,barrier,notify_engines"
    command = run(tmp_path, f"recipe.stages=[{words}]", "trainer.layers=1")
    assert command.process.returncode == 1
    assert "ZeroDivisionError: oops" in command.err
    assert "broken.py" in command.err
    (log,) = (tmp_path / "outputs").glob("*/*/weightstream.log")
    assert "ZeroDivisionError: oops" in log.read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["at once", "while starting", "while updating"])
def test_interrupted_at_any_moment_nothing_is_left(tmp_path: Path, moment: str, number: int) -> None:
    command = Command(tmp_path, "backend=sglang", "updates=100000", "trainer.layers=1", "hydra.run.dir=out")
    deadline = time.monotonic() + 120
    if moment == "at once":
        time.sleep(0.15)
    elif moment == "while starting":
        while not command.descendants() and time.monotonic() < deadline:
            time.sleep(0.05)
    else:
        log = tmp_path / "out" / "weightstream.log"
        while "update 2:" not in (log.read_text() if log.is_file() else "") and time.monotonic() < deadline:
            time.sleep(0.05)
    command.interrupt(number)
    code = command.wait(60)
    assert "Traceback" not in command.err
    assert command.left_behind() == []
    if moment != "at once":  # before Python has run its first line, the signal does what it always does
        assert code == 128 + number
        assert "interrupted" in command.err
