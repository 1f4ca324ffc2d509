from __future__ import annotations

import pytest

from eagle3_core.errors import CorruptArtifactError, NonFiniteError, StorageFullError, TrainingError, WorkerDiedError
from eagle3_core.train.agent import torchrun_arguments
from eagle3_core.train.explain import explain, parts
from eagle3_core.train.launch import diagnose, environment

LOST = {"rank": 0, "type": "RuntimeError", "message": "[gloo] Connection closed by peer [127.0.0.1]:1234", "at": 2.0}
KILLED = "E1129 torch/distributed/elastic failed (exitcode: -9) local_rank: 1 (pid: 77) of binary: python"


def report(kind, message, at=1.0, rank=1):
    return {"rank": rank, "type": kind, "message": message, "at": at}


@pytest.mark.parametrize(("reports", "lines", "code", "expected", "words"), [
    ([report("NonFiniteError", "too many"), LOST], [], 1, NonFiniteError, "too many"),
    ([LOST, report("CorruptArtifactError", "shard 3")], [], 1, CorruptArtifactError, "shard 3"),
    ([report("OutOfMemoryError", "CUDA out of memory. Tried")], [], 1, TrainingError, "lower training.row_tokens"),
    ([report("OutOfResources", "out of resource: shared memory, Required: 163840, Hardware limit: 101376. Reducing "
                              "block sizes or `num_stages` may help.")], [], 1, TrainingError, "another kind"),
    ([report("OSError", "[Errno 28] No space left on device")], [], 1, StorageFullError, "free space"),
    ([LOST], [KILLED], 1, WorkerDiedError, "rank 1 was killed by signal 9 (SIGKILL)"),
    ([LOST], [], 1, WorkerDiedError, "Connection closed by peer"),
    ([], [], -9, WorkerDiedError, "torchrun was killed by signal 9"),
    ([], ["", "ImportError: no torch\n", "\n"], 1, WorkerDiedError, "ImportError: no torch"),
    ([report("KeyError", "'x'"), LOST], [], 1, TrainingError, "rank 1: KeyError: 'x'"),
])  # fmt: skip
def test_the_cause_is_named_in_one_line_with_what_helps(reports, lines, code, expected, words):
    error = diagnose(reports, lines, code)
    assert type(error) is expected
    assert words in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize(("reports", "expected", "words"), [
    ([], WorkerDiedError, "stopped by SIGTERM; run again to resume"),
    ([LOST], WorkerDiedError, "stopped by SIGTERM; run again to resume"),
    ([report("StorageFullError", "no space left writing x"), LOST], StorageFullError, "no space left"),
])  # fmt: skip
def test_a_checkpoint_that_failed_after_sigterm_is_not_called_saved(reports, expected, words):
    error = diagnose(reports, [KILLED], 1, stopped=True)
    assert type(error) is expected
    assert words in str(error)


def test_ranks_share_the_cores_out_and_the_rendezvous_stays_local(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert environment(100000)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert environment(100000)["OMP_NUM_THREADS"] == "3"
    arguments = torchrun_arguments(2, "request.json", 7)
    assert arguments[arguments.index("--local-addr") + 1] == "127.0.0.1"
    assert arguments[-2:] == ("7", "request.json")


def test_explain_counts_what_is_trained_and_what_is_frozen(make_job):
    sizes = make_job().sizes
    text = explain(sizes, train_lm_head=False)
    assert "lm_head.weight" in text and "frozen" in text
    frozen = sum(part.count for part in parts(sizes, train_lm_head=False) if not part.trained)
    assert frozen == 2 * sizes.vocab_size * sizes.hidden_size + sizes.draft_vocab_size * sizes.hidden_size
    drafter, _ = make_job().build("cpu")
    shapes = {name: tuple(parameter.shape) for name, parameter in drafter.named_parameters()}
    assert shapes == sizes.parameter_shapes()
