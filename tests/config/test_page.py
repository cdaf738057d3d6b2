"""results.html: one file with everything in it, the same numbers as the report, readable on a phone."""

import re
import shutil
import subprocess
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pipelines.cli import page
from pipelines.cli.job import Status
from pipelines.cli.sweep import result_row, summarize

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)


def status(number: int, transport: str, capacity: str, gb_per_s: float | None, **phases: float) -> Status:
    made = Status(number, ["experiment=e", f"transport={transport}", f"bucket.capacity={capacity}"], f"/runs/{number}")
    if gb_per_s is None:
        made.exit_code, made.error = 1, "<script>alert('no')</script> & more"
        return made
    warm = {
        "outcome": "committed",
        "version": "1",
        "bytes": 10**8,
        "gb_per_s": gb_per_s,
        "limit_fraction": gb_per_s / 4,
    }
    cold = warm | {"seconds": {"pack": 99.0, "total": 99.0}, "gb_per_s": 0.001}
    made.report = {"outcome": "committed", "updates": [cold, *[warm | {"seconds": {**phases, "total": 1.0}}] * 2]}
    return made


JOBS = [
    status(0, "ipc", "1MiB", 1.0, pause=0.01, pack=0.2, apply=0.3),
    status(1, "ipc", "4MiB", 2.0, pause=0.01, pack=0.1, apply=0.2),
    status(2, "ipc", "16MiB", 3.5, pause=0.01, pack=0.1, apply=0.1),
    status(3, "nccl", "1MiB", 0.5, pause=0.01, pack=0.2, wire=0.5, apply=0.1),
    status(4, "nccl", "4MiB", 0.8, pause=0.01, pack=0.2, wire=0.3, apply=0.1),
    status(5, "nccl", "16MiB", None),
]


def rendered(jobs: list[Status] = JOBS) -> str:
    return page.render([page.Job(result_row(job), page.phases_of(job.report)) for job in jobs], "sweep")


class Reader(HTMLParser):
    """Every tag must be closed, and none may fetch anything."""

    VOID = {"meta", "line", "circle", "polyline"}

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {"src", "href"} & {name for name, _ in attrs}
        assert not any(name.startswith("on") for name, _ in attrs)
        self.seen.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_whole_and_fetches_nothing() -> None:
    text = rendered()
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    assert not {"script", "link", "img", "iframe"} & set(reader.seen)
    assert not re.search(r"url\(|@import|https?://", text)
    assert 'name="viewport" content="width=device-width"' in text
    assert len(text) < 50_000


def test_its_numbers_are_those_of_the_warm_updates() -> None:
    reader = Reader()
    reader.feed(rendered())
    assert "Fastest: ipc, bucket.capacity 16MiB, 3.5 GB/s" in reader.text
    assert "Throughput over bucket.capacity" in reader.text
    for part in ("87.5%", "510.0 ms", "810.0 ms", "1 failed"):
        assert part in reader.text
    assert "99" not in reader.text, "the first update, which allocates, does not count"
    assert "<script>alert('no')</script> & more" in reader.text, "shown, not run"


def test_a_line_per_transport_in_the_order_of_sizes() -> None:
    lines = re.findall(r'<polyline points="([^"]*)"', rendered())
    points = [[tuple(map(float, p.split(","))) for p in line.split()] for line in lines]
    assert [len(line) for line in points] == [3, 2]
    for line in points:
        assert [x for x, _ in line] == sorted(x for x, _ in line)
        assert [y for _, y in line] == sorted((y for _, y in line), reverse=True), "faster is higher"
    first, second, third = (x for x, _ in points[0])
    assert second - first == pytest.approx(third - second, abs=0.2), "sizes are drawn on a logarithmic scale"


@pytest.mark.parametrize("jobs", [[JOBS[0]], [JOBS[5]], [JOBS[0], JOBS[3]], JOBS[:2]])
def test_any_sweep_has_a_page(jobs: list[Status]) -> None:
    reader = Reader()
    reader.feed(rendered(jobs))
    assert "All jobs" in reader.text
    assert "polyline" not in reader.seen, "two points are no line"


def test_the_sweep_writes_it_and_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summarize(JOBS, str(tmp_path))
    assert (tmp_path / "results.html").read_text().startswith("<!doctype html>")
    assert f"results: {tmp_path / 'results.html'} and results.csv" in capsys.readouterr().out


@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_it_without_scrolling_sideways(tmp_path: Path, width: int) -> None:
    if CHROMIUM is None:
        pytest.skip("NO BROWSER: install chromium to have results.html opened in one")
    measure = (
        "<script>const texts = [...document.querySelectorAll('svg text')].map(t => t.getBoundingClientRect());"
        "parent.document.title = [document.documentElement.scrollWidth, innerWidth, document.querySelectorAll('.bar').length,"
        "Math.min(...texts.map(t => t.height)), Math.max(...texts.map(t => t.right))].join()</script>"
    )
    inner = escape(rendered().replace("</body>", f"{measure}</body>"))
    file = tmp_path / "page.html"  # in a frame, since no window is as narrow as a phone
    file.write_text(f'<iframe width="{width}" height="2000" style="border:0" srcdoc="{inner}"></iframe>')
    command = [CHROMIUM, *FLAGS.split(), f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,2000"]
    result = subprocess.run([*command, "--dump-dom", f"file://{file}"], capture_output=True, text=True, timeout=120)
    found = re.search(r"<title>([\d.,]+)</title>", result.stdout)
    assert found, result.stderr[-2000:]
    needed, visible, bars, smallest, rightmost = map(float, found[1].split(","))
    assert needed <= visible == width
    assert bars == 15
    assert smallest >= 11, "text in the plot is large enough to read"
    assert rightmost <= width
