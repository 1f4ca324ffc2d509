"""One rank of a training run; torchrun starts it. Run as `python -m eagle3_core.train.worker AGENT_PID REQUEST`."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path
from types import FrameType

from eagle3_core.errors import EXIT_CODES, Eagle3Error, Remedy
from eagle3_core.jobs.processes import die_with_parent
from eagle3_core.train.destinations import KINDS, TrackedRun
from eagle3_core.train.request import ERRORS, FINAL, OUTCOME, Outcome, TrainRequest
from eagle3_core.train.sender import Sender


class StopOnSignal:
    """Turns SIGTERM into a request to save and leave after the current step."""

    def __init__(self) -> None:
        """Listen from now on."""
        self._asked = False
        signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, _signal: int, _frame: FrameType | None) -> None:
        self._asked = True

    def __call__(self) -> bool:
        """Tell whether the request has come."""
        return self._asked


def main(argv: list[str]) -> int:
    """Train as one rank; what goes wrong is left as one JSON file for the launcher."""
    # torchrun puts ranks into sessions of their own: without this they would outlive a killed agent.
    die_with_parent(int(argv[0]))
    logging.basicConfig(level=logging.INFO, format="train: %(message)s", stream=sys.stdout)
    stop = StopOnSignal()
    request = TrainRequest.parse(json.loads(Path(argv[1]).read_text(encoding="utf-8")), argv[1])
    try:
        return _train(request, stop)
    except BaseException as error:
        _leave_error(request.work, error)
        raise


def _train(request: TrainRequest, stop: StopOnSignal) -> int:
    from eagle3_core.progress import Progress
    from eagle3_core.storage import open_store
    from eagle3_core.train.checkpoint import Checkpoints
    from eagle3_core.train.distributed import Ranks
    from eagle3_core.train.loop import over, train
    from eagle3_core.train.prepare import build_job, write_final
    from eagle3_core.train.trackers import METRICS_FILE, Trackers

    ranks = Ranks.join(request.device, request.run.training.rank_timeout_s, leads=request.leads)
    store = open_store(request.root, request.run.training.cache_bytes)
    job = build_job(request, store)
    checkpoints = Checkpoints(
        store, request.output, request.work / "checkpoint", request.run.training, request.checkpoint
    )
    trackers = Trackers()
    if ranks.leads:
        trackers = Trackers(Progress("train", request.progress), _senders(request), request.work / METRICS_FILE)
    state = train(job, ranks, checkpoints, trackers, stop)
    if ranks.leads and (best := state.best) is not None and over(job, state):
        final = request.work / FINAL
        shutil.rmtree(final, ignore_errors=True)
        final.mkdir()
        write_final(final, job.sizes, checkpoints.parameters(best.step), state)
        outcome = Outcome(step=state.step, total_steps=job.order.total_steps, tokens=state.tokens,
                          best_step=best.step, trainer_tau=best.score)  # fmt: skip
        (request.work / OUTCOME).write_text(outcome.model_dump_json(), encoding="utf-8")
    ranks.leave()
    # One rank says that there is more to do: torchrun would end the others, the writing one among them.
    return 0 if over(job, state) or not ranks.leads else EXIT_CODES[Remedy.RESUME]


def _senders(request: TrainRequest) -> list[Sender]:
    settings = {
        f"{section}.{name}": value
        for section in ("drafter", "training")
        for name, value in request.run.section(section).identity().items()
    }
    run = TrackedRun(request.run.name, request.output, request.work, settings)
    return [Sender(name, partial(KINDS[name], run)) for name in request.run.training.trackers]


def _leave_error(work: Path, error: BaseException) -> None:
    directory = work / ERRORS
    directory.mkdir(parents=True, exist_ok=True)
    remedy = error.remedy.value if isinstance(error, Eagle3Error) else ""
    text = " ".join(str(error).split())[:2000]
    values = {"rank": int(os.environ.get("RANK", "0")), "type": type(error).__name__, "remedy": remedy,
              "message": text, "at": time.time()}  # fmt: skip
    temp = directory / f".rank-{values['rank']}.tmp"
    temp.write_text(json.dumps(values), encoding="utf-8")
    temp.replace(directory / f"rank-{values['rank']}.json")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
