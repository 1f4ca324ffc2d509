"""One of the two gloo ranks of test_ranks: `python -m tests.unit.train.two_ranks RANK FOLDER PRECISION`."""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path

import torch
from torch import distributed

from eagle3_core.data.batches import share
from eagle3_core.errors import WorkerDiedError
from eagle3_core.storage import open_store
from eagle3_core.train import distributed as place
from eagle3_core.train.checkpoint import Checkpoints
from eagle3_core.train.distributed import Ranks
from eagle3_core.train.learner import Learner
from eagle3_core.train.loader import batches
from eagle3_core.train.loop import train
from eagle3_core.train.rotation import newest_checkpoint
from eagle3_core.train.trackers import Trackers
from eagle3_core.train.validate import validate
from tests.unit.train.conftest import MemoryFeatures, tiny_job

STEPS = 3
CLIP = 0.05
"""A bound of the gradient's norm that every step meets."""
SMALL = 256
"""Values of a block, so that both ranks have some of a tiny drafter."""


def main() -> None:
    rank, folder, precision = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    place.BLOCK = SMALL
    distributed.init_process_group(
        "gloo", store=distributed.FileStore(str(folder / "meet"), 2), rank=rank, world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip
    ranks, job = (
        Ranks(rank, 2, torch.device("cpu"), rank == 0),
        tiny_job(MemoryFeatures(held_out=8), precision=precision, weight_decay=0.5, max_grad_norm=CLIP),
    )
    store, asked = open_store(str(folder)), iter([*[False] * (STEPS - 1), *[rank == 1] * 99])
    checkpoints = Checkpoints(store, "train/x", folder / "staging", job.training)
    state = train(job, ranks, checkpoints, Trackers(), lambda: next(asked))
    distributed.barrier()
    learner = Learner.of(job, ranks)
    found = Checkpoints(store, "train/x", folder / "staging", job.training, newest_checkpoint(store, "train/x"))
    assert found.resume(learner.optimizer) == state
    validation = validate(job, learner, ranks, lambda: False)
    learner.sums.clear()
    for batch in batches(job.features, share(job.order.rows(0), job.order.lengths, rank, 2), ranks.device, job.dtype):
        learner.accumulate(batch)
    learner.sums.finish(job.training.max_grad_norm)
    stopped = validate(job, learner, ranks, lambda: rank == 1)
    whole = torch.randn(4 * SMALL, generator=torch.Generator().manual_seed(rank))
    part, scattered = ranks.part(len(whole)), whole.clone()
    ranks.sum_parts(whole, part)
    place._reduce_scatter(part.of(scattered), scattered)  # as on GPUs, in place
    assert torch.equal(part.of(scattered), part.of(whole))
    try:
        ranks.agree(7 + rank, "a number")
    except WorkerDiedError as error:
        disagreed = str(error)
    values = {"disagreed": disagreed, "state": state.step, "part": len(learner.optimizer.parameters),
              "stopped": stopped is None, "norm": learner.sums.read()["norm"],
              "divisor": float(learner.sums.divisor), "report": validation.report(),
              "trained": validation.trained.greedy.valid}  # fmt: skip
    (folder / f"rank-{rank}.json").write_text(json.dumps(values))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
