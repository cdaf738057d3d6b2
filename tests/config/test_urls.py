"""Engine addresses come to one form, or are refused with the reason."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.config import load
from pipelines.urls import normalize, normalize_all
from stages.errors import ConfigError


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("http://127.0.0.1:30000", "http://127.0.0.1:30000"),
        ("http://127.0.0.1:30000/", "http://127.0.0.1:30000"),
        ("http://127.0.0.1:30000///", "http://127.0.0.1:30000"),
        ("127.0.0.1:30000", "http://127.0.0.1:30000"),
        ("localhost:30000/", "http://localhost:30000"),
        (" HTTP://Host:8000 ", "http://host:8000"),
        ("https://host", "https://host"),
        ("host", "http://host"),
        ("http://host:8000/engine/a/", "http://host:8000/engine/a"),
        ("http://[::1]:30000", "http://[::1]:30000"),
        ("[::1]:30000", "http://[::1]:30000"),
        ("http://[2001:DB8:0:0::1]:8080/", "http://[2001:db8::1]:8080"),
        ("http://[fe80::1%eth0]:8080", "http://[fe80::1%eth0]:8080"),
    ],
)
def test_one_form(written: str, meant: str) -> None:
    assert normalize(written) == meant
    assert normalize(meant) == meant


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("http://::1:30000", r"brackets\n  write http://\[::1\]:30000"),
        ("2001:db8::1:8080", r"brackets\n  write http://\[2001:db8::1\]:8080"),
        ("http://fe80::1", "brackets"),
        ("http://[::1", "write http://"),
        ("http://[zz]:80", "write http://"),
        ("http://[::1]x:80", "write http://"),
        ("http://user:hunter2@host:80", "user name or password"),
        ("user:hunter2@host:80", "user name or password"),
        ("http://hunter2@host:80", "user name or password"),
        ("ftp://host:80", "not http or https"),
        ("", "empty"),
        ("  ", "empty"),
        ("http://", "is not a URL"),
        ("http:///path", "is not a URL"),
        ("http://:80", "names no host"),
        ("http://host:0", "names no port"),
        ("http://host:65536", "write http://"),
        ("http://host:80a", "write http://"),
        ("http://host:80?x=1", "query"),
        ("http://host:80#x", "query or fragment"),
        ("http://ho st:80", "is not a URL"),
        ("http://host:80\\x", "is not a URL"),
    ],
)
def test_refused_with_the_reason(written: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        normalize(written)
    assert "hunter2" not in str(caught.value)


@given(st.text(max_size=40))
def test_any_text_is_normalized_or_refused(text: str) -> None:
    try:
        once = normalize(text)
    except ConfigError:
        return
    assert normalize(once) == once
    assert "@" not in once.partition("://")[2].partition("/")[0]


def test_lists_of_urls() -> None:
    assert normalize_all(["a:1", "http://b:2/"]) == ["http://a:1", "http://b:2"]
    with pytest.raises(ConfigError, match="twice"):
        normalize_all(["a:1", "http://A:1/"])
    with pytest.raises(ConfigError, match="empty"):
        normalize_all([])
    with pytest.raises(ConfigError, match=r"write '\[http://a:1\]'"):
        normalize_all("http://a:1")
    with pytest.raises(ConfigError, match="not text"):
        normalize_all([8000])  # type: ignore[list-item]


def test_urls_on_the_command_line() -> None:
    remote = ["engines=remote"]
    assert load([*remote, "engines.urls=[127.0.0.1:8000,http://b:2/]"])["engines"]["urls"] == [
        "http://127.0.0.1:8000",
        "http://b:2",
    ]
    assert load([*remote, 'engines.urls=["http://[::1]:80"]'])["engines"]["urls"] == ["http://[::1]:80"]
    for single in ("engines.urls=http://a:1", "engines.urls='http://a:1,http://b:2'"):
        with pytest.raises(ConfigError, match="takes a list"):
            load([*remote, single])
    with pytest.raises(ConfigError, match="several values are a sweep"):
        load([*remote, "engines.urls=http://a:1,http://b:2"])
    with pytest.raises(ConfigError, match="quote"):
        load([*remote, "engines.urls=[http://[::1]:80]"])
