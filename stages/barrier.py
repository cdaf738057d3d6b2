"""barrier: all trainer ranks ready before a bucket goes out, all agreed on its outcome before the next one."""

from __future__ import annotations

from collections.abc import Iterator

from stages.base import Stage
from stages.flow import Shipment
from stages.run import Run


class Barrier(Stage):
    """Keeps the ranks in lockstep, bucket by bucket.

    A rank whose stream fails says so here and every rank raises the same root cause; a failed delivery is raised on all ranks
    after the bucket's outcome was exchanged. Ranks follow one plan, so their streams have the same length.
    """

    consumes = Shipment
    produces = Shipment

    def __call__(self, items: Iterator[Shipment], run: Run) -> Iterator[Shipment]:
        comm = run.comm
        while True:
            shipment, failure = None, None
            try:
                shipment = next(items, None)
            except Exception as error:
                failure = error
            seqs = comm.meet("bucket ready", -1 if shipment is None else shipment.bucket.layout.seq, failure)
            if len(set(seqs)) > 1:
                raise RuntimeError(f"trainer ranks are at different buckets: {seqs} (-1: at the end)")
            if shipment is None:
                return
            yield shipment
            comm.meet("bucket delivered", error=shipment.failure)
