"""One further machine of a training run: `python -m eagle3_core.train.node HOST:PORT`. Light: imports no torch.

It takes part in one attempt after the other until the training's output is committed: an attempt that fails ends its
ranks, and the leading machine's next one finds it waiting.
"""

from __future__ import annotations

import logging
import signal
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

from eagle3_core.errors import EXIT_CODES, Eagle3Error, Remedy, WorkerDiedError
from eagle3_core.storage import find, open_store, verify
from eagle3_core.train.launch import AGAIN, Torchrun, local_ranks, rank_reports
from eagle3_core.train.nodes import Line, Meeting, endpoint
from eagle3_core.train.request import TrainRequest

PATIENCE_S = 24 * 3600.0
"""How long it waits for an attempt to begin."""

GREETING_S = 60.0
"""How long it waits for the train stage to say what to train, which it does at once."""

LOG = logging.getLogger(__name__)


def take_part(where: str, work: Path) -> None:
    """Take part in training until it is whole.

    Raises:
        WorkerDiedError: nobody listened for a day, or SIGTERM ended the ranks here.
        Eagle3Error: what is needed here is not; the leading machine was told.
    """
    known: TrainRequest | None = None
    while (line := _connect(where, known)) is not None:
        try:
            known = _attempt(line, where, work) or known
        finally:
            line.close()


def _connect(where: str, known: TrainRequest | None) -> Line | None:
    """Return a line to the next attempt; None once the output of the training we know is committed."""
    end = time.monotonic() + PATIENCE_S
    LOG.info("waiting for the train stage at %s", where)
    while True:
        try:
            connection = socket.create_connection(endpoint(where), timeout=10)
            return Line(connection, connection.getpeername()[0])
        except OSError as error:
            if known is not None and find(open_store(known.root), known.output) is not None:
                return None
            if time.monotonic() > end:
                raise WorkerDiedError(f"{where}: no train stage within {PATIENCE_S:g} s: {error}") from None
            time.sleep(1.0)


def _attempt(line: Line, where: str, work: Path) -> TrainRequest | None:
    """Train as long as the leading machine does; return what was trained, None if it was not begun."""
    said = line.hear(GREETING_S)
    if said is None:
        LOG.warning("%s hung up or said nothing for %g s: is that the train stage? Trying again", where, GREETING_S)
        time.sleep(1.0)
        return None
    try:
        request = TrainRequest.parse(said.get("task"), where).model_copy(update={"work": work, "leads": False})
        store = open_store(request.root, request.run.training.cache_bytes)  # keeps what it downloads while it lives
        if request.checkpoint is not None:
            verify(store, request.checkpoint)
    except Eagle3Error as error:
        line.say(refused=str(error))
        raise
    line.say(ready=True)
    if (line.hear() or {}).get("go") is not True:
        return request
    host, port = endpoint(where)
    LOG.info("training with %d machines led by %s", request.run.training.nodes, line.there)
    _train(line, request, Meeting(request.run.training.nodes, host, port + 1, request.output, line.here, False))
    return request


def _train(line: Line, request: TrainRequest, meeting: Meeting) -> None:
    hung_up = threading.Event()

    def listen() -> None:
        line.hear()  # it says nothing more
        hung_up.set()
        torchrun.end()

    with Torchrun(request, local_ranks(request), meeting.arguments()) as torchrun:
        threading.Thread(target=listen, daemon=True).start()
        code = torchrun.wait()
    if torchrun.stopped:
        line.say(stopped=True)
        raise WorkerDiedError("stopped by SIGTERM; run it again to take part in the next attempt")
    if hung_up.is_set():
        LOG.warning("the train stage hung up")
    elif code:
        cause = str(torchrun.error(code)).removesuffix(AGAIN)
        LOG.warning("%s", cause)
        line.say(code=code, cause=cause, reports=rank_reports(request.work))
    else:
        line.say(code=0)
        hung_up.wait()


def main(argv: list[str]) -> int:
    """Take part until training is whole.

    Returns:
        0, or the exit code of the error's remedy.
    """
    logging.basicConfig(level=logging.INFO, format="train-node: %(message)s", stream=sys.stdout)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="eagle3-node-") as work:
            take_part(argv[0], Path(work))
    except Eagle3Error as error:
        print(f"error: [{type(error).__name__}] {' '.join(str(error).split())}", file=sys.stderr, flush=True)  # noqa: T201
        return EXIT_CODES[error.remedy]
    except KeyboardInterrupt:
        return EXIT_CODES[Remedy.RESUME]
    LOG.info("training is whole")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
