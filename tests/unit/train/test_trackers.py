"""Trackers: one run over all attempts, no step twice, and nothing they do ends training."""

from __future__ import annotations

import json
import logging
import threading
import time
from functools import partial

import pytest
import torch

from eagle3_core.errors import ConfigError
from eagle3_core.progress import Progress
from eagle3_core.train import destinations, sender
from eagle3_core.train.checkpoint import TrainState
from eagle3_core.train.destinations import TensorBoard, TrackedRun, log_records, require_trackers
from eagle3_core.train.distributed import Ranks
from eagle3_core.train.flops import useful_flops
from eagle3_core.train.sender import Sender
from eagle3_core.train.trackers import StepReport, Trackers, finite, metrics_text, render, tracked_rows


@pytest.fixture
def tracked(tmp_path):
    return TrackedRun("demo", "train/abc123", tmp_path, {"training.learning_rate": 1e-4})


class Kept:
    """A tracker that fails when told to, and keeps what it took over attempts."""

    def __init__(self):
        self.rows, self.failing, self.ended, self.closed = {}, 0, [], threading.Event()
        self.last = 0

    def connect(self, resumed):
        if self.failing:
            self.failing -= 1
            raise ConnectionError("refused\nby the server")
        self.resumed = resumed
        return self

    def write(self, step, values):
        if self.failing:
            self.failing -= 1
            raise ConnectionError("lost")
        assert step not in self.rows, "a step twice"
        self.rows[step], self.last = dict(values), step

    def close(self, *, finished):
        self.ended.append(finished)
        self.closed.set()


def attempt(kept, steps, resumed=0, history=(), finished=False):
    one = Sender("kept", kept.connect)
    one.begin(resumed, dict(history))
    for step in steps:
        one.send(step, {"loss": 1 / step})
    one.close(finished=finished)
    return one


def test_a_resumed_attempt_sends_what_is_not_there_yet_and_nothing_twice():
    kept = Kept()
    attempt(kept, [1, 2, 3])
    attempt(kept, [2, 3, 4], resumed=1, history={1: {"loss": 1.0}}, finished=True)
    assert list(kept.rows) == [1, 2, 3, 4]
    assert kept.ended == [False, True]


def test_a_tracker_that_fails_is_said_once_and_gets_everything_later(caplog):
    kept = Kept()
    kept.failing = 3
    with caplog.at_level(logging.INFO):
        one = attempt(kept, [1, 2, 3, 4, 5])
    assert list(kept.rows) == [1, 2, 3, 4, 5]
    assert not one.behind
    said = [record.getMessage() for record in caplog.records]
    assert said == ["kept does not take figures: ConnectionError: refused by the server; training goes on, and they "
                    "are sent later", "kept takes figures again and has all"]  # fmt: skip


def test_a_tracker_that_stays_away_is_said_at_the_end_and_made_up_for_by_the_next_attempt(caplog):
    kept = Kept()
    kept.failing = 99
    assert attempt(kept, [1, 2]).behind
    assert "kept lacks the last 2 steps' figures: ConnectionError: refused" in caplog.text
    kept.failing = 0
    attempt(kept, [3], resumed=2, history={1: {"loss": 1.0}, 2: {"loss": 0.5}})
    assert list(kept.rows) == [1, 2, 3]


def test_a_tracker_that_hangs_holds_nobody_up(monkeypatch, caplog):
    monkeypatch.setattr(sender, "CLOSING_S", 0.2)
    forever, began = threading.Event(), time.monotonic()
    one = Sender("slow", lambda _resumed: forever.wait())
    one.begin(0, {})
    one.send(1, {"loss": 1.0})
    one.close(finished=True)
    assert time.monotonic() - began < 5
    assert "slow lacks" in caplog.text and "no answer within 0.2 s" in caplog.text
    forever.set()


def test_tensorboard_continues_one_run(tracked):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    attempt_of = partial(Sender, "tensorboard", partial(TensorBoard, tracked))
    for resumed, steps in ((0, [1, 2, 3]), (2, [3, 4])):
        one = attempt_of()
        one.begin(resumed, {step: {"train/loss": float(step)} for step in range(1, resumed + 1)})
        for step in steps:
            one.send(step, {"train/loss": float(step)})
        one.close(finished=False)
        assert not one.behind
    events = EventAccumulator(str(tracked.directory / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4]


def test_a_library_that_is_not_there_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setattr(destinations.importlib.util, "find_spec", lambda name: None if name == "mlflow" else object())
    with pytest.raises(ConfigError, match=r"mlflow is not installed.*pip install mlflow") as found:
        require_trackers(["tensorboard", "mlflow"])
    assert "\n" not in str(found.value)
    assert require_trackers(["tensorboard"]) == ["tensorboard"]


def test_records_of_a_log_are_read_over_its_blocks_and_a_half_one_is_left_out():
    records, log = [b"a" * 10, b"b" * 40000, b"", b"c" * 32000, b"d" * 700], bytearray(7)
    for record in records:
        rest, first = record, True
        while True:
            if 32768 - len(log) % 32768 < 7:
                log += bytes(32768 - len(log) % 32768)
            size = min(len(rest), 32768 - len(log) % 32768 - 7)
            part, rest = rest[:size], rest[size:]
            kind = {(True, True): 1, (True, False): 2, (False, False): 3, (False, True): 4}[first, not rest]
            log += bytes(4) + size.to_bytes(2, "little") + bytes([kind]) + part
            first = False
            if not rest:
                break
    assert list(log_records(bytes(log[7:]))) == records
    assert list(log_records(bytes(log[7:-1]))) == records[:-1]
    assert list(log_records(b"")) == []


def test_rows_for_trackers_hold_everything_of_a_step_and_only_numbers():
    row = {"k": 1, "tau": 1.5, "cond_acc": None, "train_tau": 1.7}
    lines = [{"step": 10, "loss": None, "tau": 1.2}, {"step": 10, "held_out": [row]}, {"step": 20, "loss": 0.5}]
    assert tracked_rows(lines) == {
        10: {"train/tau": 1.2, "held_out_at_depth_1/tau": 1.5, "train_at_depth_1/tau": 1.7},
        20: {"train/loss": 0.5},
    }


def test_what_is_not_finite_is_null_and_never_nan():
    line = finite({"loss": float("nan"), "deep": [{"x": float("-inf"), "y": 1.0}]})
    assert json.loads(metrics_text([line])) == {"loss": None, "deep": [{"x": None, "y": 1.0}]}
    with pytest.raises(ValueError, match="not JSON compliant"):
        metrics_text([{"loss": float("nan")}])


def test_the_table_leaves_out_what_is_not_known():
    row = {"k": 1, "full_acc": 0.5, "cond_acc": None, "tau": 1.5, "tau_chain": 1.4, "cond_acceptance": 0.4, "valid": 7,
           "tau_sampling": 1.4, "tau_chain_sampling": 1.3, "train_tau": None, "train_tau_sampling": None,
           "loss": 0.1}  # fmt: skip
    head, columns, line = render([row], 10, improved=True).splitlines()
    assert head == "held-out at step 10 (best so far)"
    assert len(columns) == len(line)
    assert line.split() == ["1", "0.500", "--", "1.50", "1.40", "0.400", "1.40", "1.30", "--", "--", "0.10", "7"]


def test_progress_says_how_fast_it_goes_and_what_does_not_get_through(make_job, tmp_path):
    job, kept = make_job(), Kept()
    kept.failing = 99
    trackers = Trackers(Progress("train", tmp_path), [Sender("kept", kept.connect)], tmp_path / "metrics.jsonl")
    state, tokens = TrainState(), []
    trackers.start(job, Ranks.alone(), state)
    trackers._matmul = 1e9
    for seconds in (9.0, 0.5, 0.5):
        state.step += 1
        tokens.append(sum(job.order.lengths[s] for row in job.order.rows(state.step - 1) for s in row))
        state.tokens += tokens[-1]
        counts = torch.tensor([4.0, 2.0, 1.0])
        report = StepReport(1.5, 0.1, 1e-4, counts, counts / 2, seconds, seconds / 5, stop=False, save=False)
        trackers.progress._written = 0.0
        trackers.stepped(state, report)
    until = time.monotonic() + 5
    while not trackers.senders[0].behind and time.monotonic() < until:
        time.sleep(0.01)
    trackers.progress._written = 0.0
    trackers.stepped(state, report)
    detail = json.loads((tmp_path / "progress.json").read_text())["detail"]
    flops = [sum(useful_flops(job, row) for row in job.order.rows(step)) for step in (1, 2, 2)]
    smooth = 0.9 * (0.9 * flops[0] + 0.1 * flops[1]) + 0.1 * flops[2]
    assert detail["mfu"] == pytest.approx(smooth / 0.5 / 1e9)
    assert detail["tokens_per_s"] == pytest.approx((0.9 * (0.9 * tokens[1] + 0.1 * tokens[2])) / 0.5), "not the first"
    assert detail["waiting"] == pytest.approx(0.2)
    assert detail["not_reached"] == "kept"
    assert detail["tau"] == 2.5


class Wire:
    """Stands where a sender stands, and keeps what it was handed; a sender leaves out what its tracker has."""

    name, behind = "wire", False

    def begin(self, resumed, rows):
        self.resumed, self.before, self.sent = resumed, list(rows), []

    def send(self, step, values):
        self.sent.append(step)

    def close(self, *, finished):
        self.finished = finished


def test_a_step_is_handed_over_once_and_after_a_resume_those_before_it_as_a_whole_alone(
    make_job, tmp_path, monkeypatch
):
    monkeypatch.setattr("eagle3_core.train.trackers.LOG_EVERY_STEPS", 3)
    job, state = make_job(), TrainState()
    counts = torch.tensor([4.0, 2.0, 1.0])
    report = StepReport(1.5, 0.1, 1e-4, counts, counts / 2, 0.5, 0.1, stop=False, save=False)

    def attempt(until):
        trackers = Trackers(Progress("train", tmp_path), [Wire()], tmp_path / "metrics.jsonl")
        trackers.start(job, Ranks.alone(), state)
        while state.step < until:
            state.step += 1
            trackers.stepped(state, report)
        trackers.close(finished=False)
        return trackers.senders[0]

    wires = [attempt(4), attempt(8)]
    assert [(wire.before, wire.sent) for wire in wires] == [([], [1, 3]), ([1, 3], [6])]


def attempts(name, destination, apart_s=0.0):
    """Send steps 1 to 3, then resume after the first and send on to 4."""
    for resumed, steps in ((0, [1, 2, 3]), (1, [2, 3, 4])):
        one = Sender(name, destination)
        one.begin(resumed, {step: {"train/loss": float(step)} for step in range(1, resumed + 1)})
        for step in steps:
            one.send(step, {"train/loss": float(step)})
        one.close(finished=resumed > 0)
        assert not one.behind
        time.sleep(apart_s)


def steps_of_mlflow(tracked):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{tracked.directory}/mlflow.db")
    experiment = client.get_experiment_by_name("demo")
    (run,) = client.search_runs([experiment.experiment_id])
    return run, [metric.step for metric in client.get_metric_history(run.info.run_id, "train/loss")]


@pytest.mark.filterwarnings("default")
def test_mlflow_continues_one_run(tracked):
    pytest.importorskip("mlflow")
    attempts("mlflow", partial(destinations.MlFlow, tracked))
    run, steps = steps_of_mlflow(tracked)
    assert steps == [1, 2, 3, 4]
    assert run.info.status == "FINISHED"
    assert run.data.params == {"training.learning_rate": "0.0001"}


@pytest.mark.filterwarnings("default")
def test_wandb_without_an_account_continues_one_run_in_files(tracked, monkeypatch):
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    assert require_trackers(["wandb"]) == ["wandb"]
    attempts("wandb", partial(destinations.Wandb, tracked), apart_s=1.1)  # W&B names files by the second
    found = []
    for path in sorted(tracked.directory.glob("wandb/offline-run-*-abc123/*.wandb")):
        for content in log_records(path.read_bytes()[7:]):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(content)
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            found += [int(items["_step"])] if "_step" in items else []
    assert found == [1, 2, 3, 4]
    assert destinations.last_offline_step(tracked.directory, "abc123") == 4


def test_wandb_without_an_account_is_refused_online(monkeypatch, tmp_path):
    pytest.importorskip("wandb")
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="WANDB_MODE=offline"):
        require_trackers(["wandb"])
