"""What `--help` prints. Hydra's own help composes the config and lists the groups in a second; this takes none."""

from __future__ import annotations

from pipelines.config import CONF

_TEXT = """\
weightstream moves a policy's weights from a trainer into running inference engines.

  python run.py [group=option ...] [key=value ...]

Groups and their options; the settings of each, with comments, stand in conf/:

{groups}

Examples:

  python run.py backend=lmdeploy transport=ipc
      three real updates of a small model into an embedded engine that starts with the run
  python run.py backend=vllm transport=nccl engines.count=2 trainer.arch=qwen3_moe updates=5
      two engines, a mixture of experts, over a process group
  python run.py trainer=checkpoint trainer.path=DIR engines=remote 'engines.urls=[http://host:8000]'
      a checkpoint folder into an engine that already runs
  python run.py launcher.ranks=4 transport=nccl
      four trainer ranks on this machine, the model sharded over them; or torchrun --nproc-per-node 4 run.py transport=nccl
  python run.py launcher=ray launcher.ranks=4 engines.count=2 transport=nccl
      ranks and engines as actors on a Ray cluster
  python run.py -m backend=lmdeploy,sglang,vllm transport=ipc,disk
      a sweep: every combination, each job in a process of its own, one table at the end
  python run.py experiment=bucket_size
      a sweep that is committed in conf/experiment/

  python run.py --cfg job          the whole composed config, with the overrides you add
  python run.py --hydra-help       Hydra's own flags

Keys of engines come from WEIGHTSTREAM_API_KEY and WEIGHTSTREAM_ADMIN_KEY, never from the config.
Exit codes: 0 every update committed and verified, 1 not so, 2 config refused, 130 interrupted."""


def text() -> str:
    """The help, with the groups that conf/ has now."""
    folders = sorted(path for path in CONF.iterdir() if path.is_dir() and path.name not in ("hydra", "__pycache__"))
    options = {folder.name: sorted(file.stem for file in folder.glob("*.yaml")) for folder in folders}
    return _TEXT.format(groups="\n".join(f"  {group + ':':<12} {', '.join(names)}" for group, names in options.items()))
