"""A Ray cluster of several nodes on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NODES, CPUS = 3, 4  # CPUs that Ray counts, not those of the machine


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """The address of a cluster; skipped, with the reason in the summary, where Ray is not installed."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'weightstream[ray]'")
    before = dict(os.environ)
    # Workers inherit the environment of their node.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), before.get("PYTHONPATH")]))
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    from ray.cluster_utils import Cluster

    options = {"num_cpus": CPUS, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=options | {"include_dashboard": False})
    try:
        for _ in range(NODES - 1):
            cluster.add_node(**options)
        cluster.wait_for_nodes()
        yield cluster.address
    finally:
        cluster.shutdown()
        os.environ.clear()
        os.environ |= before
