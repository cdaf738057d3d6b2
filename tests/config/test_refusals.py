"""What cannot work is refused before anything starts, in a message that says what to write instead."""

import pytest

from pipelines.config import load
from stages.errors import ConfigError

MISSPELT = [
    ("bakend=vllm", "did you mean backend?"),
    ("+bakend=vllm", "did you mean backend?"),
    ("++bakend=vllm", "did you mean backend?"),
    ("backend=vlm", "did you mean vllm?"),
    ("backend.slep_level=1", "did you mean backend.sleep_level?"),
    ("+backend.slep_level=1", "did you mean backend.sleep_level?"),
    ("++backend.slep_level=1", "did you mean backend.sleep_level?"),
    ("session.timeout.put=1", "did you mean session.timeouts?"),
    ("session.timeouts.contol=1", "did you mean session.timeouts.control?"),
    ("+session.timeouts.contol=1", "did you mean session.timeouts.control?"),
    ("++session.verify.minimun=digest", "did you mean session.verify.minimum?"),
    ("capacity=1MiB", "did you mean bucket.capacity?"),
    ("+capacity=1MiB", "did you mean bucket.capacity?"),
    ("session.verify.minimum=digets", "did you mean digest?"),
    ("trainer.arch=qwen_3", "did you mean qwen3?"),
    ("experiment=bucket_sise", "did you mean bucket_size?"),
    ("recipe.stages=[gather_params,buckte]", "did you mean bucket?"),
    ("hydra.ouput_subdir=x", "did you mean hydra.output_subdir?"),
    ("hydra/launcher=subproces", "did you mean subprocess?"),
    ("hydra.launcher.n_job=2", "did you mean hydra.launcher.n_jobs?"),
    ("backend.pause=keep", "it belongs to backend=sglang and backend=vllm"),
    ("transport.port=1", "it belongs to transport=nccl"),
]


@pytest.mark.parametrize(("override", "hint"), MISSPELT)
def test_a_misspelt_word_is_refused_with_the_nearest_real_one(override: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load([override])
    assert hint in str(caught.value)
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["engines=remote"], "engines.urls must be set"),
        (["trainer=checkpoint"], "trainer.path must be set"),
        (["trainer=checkpoint", "engines=remote"], "engines.urls, trainer.path must be set"),
        (["updates=???"], "updates must be set"),
        (["~backend"], "backend must be set"),
    ],
)
def test_missing_values_are_all_named(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(overrides)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("updates=many", "'many' is not a whole number"),
        ("updates=1.5", "'1.5' is not a whole number"),
        ("updates=0", "above zero"),
        ("session.timeouts.put=0", "above zero"),
        ("session.timeouts.put=-3", "above zero"),
        ("session.timeouts.put=inf", "finite"),
        ("session.timeouts.put=nan", "finite"),
        ("session.preflight=maybe", "neither true nor false"),
        ("session.retries=-1", "between 0 and 100"),
        ("backend.sleep_level=3", "none of 1, 2"),
        ("engines.tp=0", "above zero"),
        ("engines.tp=[1,2]", "lists 2 engines, there are 1"),
        ("engines.required=2", "from 1 to 1"),
        ("engines.required=0", "from 1 to 1"),
        ("bucket.capacity=[1]", "bucket.capacity"),
        ("recipe.stages=[]", "empty"),
        ("recipe.stages=[{capacity: 1}]", "is no stage"),
        ("backend={pause: keep}", "there is no setting 'backend.pause'"),
        ("quantize=fp8", "quantize has no option 'fp8'"),
        ("transport=rdma", "transport has no option 'rdma'"),
        ("+backend=vllm", "leave out the \\+"),
        ("backend=lmdeploy,vllm", "several values are a sweep\n  to run them all add -m"),
        ("bucket.slots=range(1,3)", "add -m"),
        ("backend", "write key=value"),
        ("", "write key=value"),
        ("trainer.path=~/x", r"write trainer.path=\$HOME/x"),
        ("gather.keep_dtype={*norm.weight:float32}", "put a \\+ in front"),
    ],
)
def test_a_bad_value_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load([override])


@pytest.mark.parametrize("key", ["+session.api_key", "+engines.token", "api_key", "++backend.password", "+secret"])
def test_there_is_no_place_for_a_secret_and_the_refusal_does_not_repeat_it(key: str) -> None:
    with pytest.raises(ConfigError, match="WEIGHTSTREAM_API_KEY") as caught:
        load([f"{key}=hunter2"])
    assert "hunter2" not in str(caught.value)


def test_values_keep_the_type_of_the_schema() -> None:
    settings = load(["trainer.lr=1e-6", "trainer.seed=7", "progress=on"])
    assert settings["trainer"]["lr"] == 1e-6
    assert settings["progress"] == "on"
    assert load(["progress=true"])["progress"] == "on"
    assert load(["session.integrity=false"])["session"]["integrity"] == "off"


@pytest.mark.parametrize("word", ["1e234", "0777", "12:30", "on", "null_", "1_000"])
def test_a_folder_that_looks_like_a_number_stays_text(word: str) -> None:
    path = load(["trainer=checkpoint", f"trainer.path={word}"])["trainer"]["path"]
    assert isinstance(path, str)
    assert path.startswith("/")


def test_free_entries_are_added_with_a_plus() -> None:
    keep = load(["+gather.keep_dtype={*norm.weight:float32}"])["gather"]["keep_dtype"]
    assert keep == {"*e_score_correction_bias": "float32", "*norm.weight": "float32"}


def test_a_stage_of_ones_own_keeps_its_free_settings() -> None:
    item = {"_target_": "my.stages.Rename", "table": {"a": "b"}, "limit": 3}
    words = (
        "gather_params,{_target_: my.stages.Rename, table: {a: b}, limit: 3},bucket,transport,barrier,notify_engines"
    )
    assert load([f"recipe.stages=[{words}]"])["recipe"]["stages"][1] == item
