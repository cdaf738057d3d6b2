"""What `--help` prints. Hydra's own help composes the config and lists the groups in a second; this takes none."""

from __future__ import annotations

import textwrap

from pipelines.config import CONF
from pipelines.schema import TASKS

# The groups of conf/ in the order of questions that people have; a group that is not here stands under the last one.
_QUESTIONS = {
    "What to do": ("task", "experiment"),
    "Whose weights": ("trainer", "launcher"),
    "Into which engines": ("backend", "engines"),
    "How they travel": ("transport", "quantize", "bucket"),
    "Inside the pipeline": ("recipe", "gather"),
}
_TEXT = """\
weightstream moves a policy's weights from a trainer into running inference engines.

  python run.py [group=option ...] [key=value ...]

{groups}

Some settings; all of them stand, commented, in conf/:

  updates=3                         how many        session.retries=1          of a whole update
  bucket.capacity=64MiB             of a slot       session.verify.minimum=..  what must be proved
  engines.urls=[http://host:8000]   running ones    report.timeline=FILE       for ui.perfetto.dev
  engines.count=2 engines.tp=2      of our own      report.metrics=FILE        for Prometheus

Examples:

  python run.py backend=lmdeploy transport=ipc
      three real updates of a small model into an engine that starts with the run
  python run.py trainer=checkpoint trainer.path=DIR engines=remote 'engines.urls=[http://host:8000]'
      a checkpoint folder into an engine that already runs
  python run.py task=plan trainer=checkpoint trainer.path=config.json backend=vllm engines.tp=8
      what an update of that model would move, and how much memory it takes; moves nothing
  python run.py task=doctor engines=remote 'engines.urls=[http://host:8000]'
      whether this machine and that engine are ready, and what to mend
  python run.py -m backend=lmdeploy,sglang,vllm transport=ipc,nccl
      a sweep: each job in a process of its own; one table, results.csv and results.html

  python run.py --cfg job          the whole composed config, with the overrides you add
  python run.py --hydra-help       Hydra's own flags

Keys of engines come from WEIGHTSTREAM_API_KEY and WEIGHTSTREAM_ADMIN_KEY, never from the config.
Exit codes: 0 every update committed and verified, 1 not so, 2 config refused, 130 interrupted."""


def text() -> str:
    """The help, with the groups that conf/ has now."""
    folders = (path for path in CONF.iterdir() if path.is_dir() and path.name not in ("hydra", "__pycache__"))
    options = {"task": [*TASKS]} | {
        folder.name: sorted(file.stem for file in folder.glob("*.yaml")) for folder in folders
    }
    asked = {group for groups in _QUESTIONS.values() for group in groups}
    *_, last = _QUESTIONS
    lines = []
    for question, groups in _QUESTIONS.items():
        more = sorted(options.keys() - asked) if question == last else []
        lines += [f"{question}:", *(_group(group, options[group]) for group in (*groups, *more)), ""]
    return _TEXT.format(groups="\n".join(lines).rstrip())


def _group(name: str, options: list[str]) -> str:
    """One group, within 80 columns."""
    return textwrap.fill(" | ".join(options), 80, initial_indent=f"  {name + '=':<12} ", subsequent_indent=" " * 15)
