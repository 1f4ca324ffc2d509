"""Trackers beside metrics.jsonl: TensorBoard, MLflow, W&B. Light: each library is imported when it is first written to.

A destination continues the one run that belongs to the training's output, and knows the last step it holds, so that an
attempt that resumes writes no step twice.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from eagle3_core.errors import ConfigError

PACKAGES = {"tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb"}
STEP = "step"


class Destination(Protocol):
    """Where figures of steps go."""

    last: int
    """The last step that is there already."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record the figures of a step."""

    def close(self, *, finished: bool) -> None:
        """End this attempt; `finished` says whether training is whole."""


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told about a training run; `output` is its key below the root, the same in every attempt."""

    name: str
    output: str
    directory: Path
    settings: Mapping[str, Any]

    @property
    def id(self) -> str:
        """Return an id of letters and digits."""
        return self.output.rpartition("/")[2]


class TensorBoard:
    """Event files; what an earlier attempt wrote after the step resumed from is hidden by TensorBoard itself."""

    def __init__(self, run: TrackedRun, resumed: int) -> None:
        """Continue after the step `resumed` from."""
        from torch.utils.tensorboard import SummaryWriter

        self.last = resumed
        self._writer = SummaryWriter(str(run.directory / "tensorboard"), purge_step=resumed + 1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record the figures of a step."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, *, finished: bool) -> None:
        """Flush."""
        del finished
        self._writer.close()


class MlFlow:
    """A run of the experiment named after the recipe, found again by its tag; MLFLOW_TRACKING_URI says where."""

    def __init__(self, run: TrackedRun, resumed: int) -> None:
        """Find or create the run; without a URI it is in `mlflow.db` of the work directory."""
        del resumed
        from mlflow.entities import Metric
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.directory}/mlflow.db"
        self._client = MlflowClient(tracking_uri=uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.name
        experiment = self._client.get_experiment_by_name(name)
        place = experiment.experiment_id if experiment else self._client.create_experiment(name)
        found = self._client.search_runs([place], f"tags.`eagle3.output` = '{run.output}'")
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            made = self._client.create_run(place, run_name=run.name, tags={"eagle3.output": run.output})
            self._id = made.info.run_id
            for key, value in run.settings.items():
                self._client.log_param(self._id, key, value)
        self.last = max((metric.step for metric in self._client.get_metric_history(self._id, STEP)), default=0)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record the figures of a step, all or none."""
        now = int(time.time() * 1000)
        figures = {STEP: float(step), **values}
        self._client.log_batch(self._id, [self._metric(name, value, now, step) for name, value in figures.items()])

    def close(self, *, finished: bool) -> None:
        """Tell whether the run is whole."""
        self._client.set_terminated(self._id, "FINISHED" if finished else "KILLED")


class Wandb:
    """A run with an id of its own; W&B's environment variables say where, WANDB_MODE=offline needs no account."""

    def __init__(self, run: TrackedRun, resumed: int) -> None:
        """Continue the run of this id; offline every attempt has a file, and `wandb sync` puts them together."""
        del resumed
        import wandb

        self.last = last_offline_step(run.directory, run.id)
        settings = wandb.Settings(console="off", disable_git=True, save_code=False, silent=True)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "eagle3", id=run.id, name=run.name, resume="allow",
            dir=str(run.directory), config=dict(run.settings), settings=settings,
        )  # fmt: skip
        self.last = max(self.last, self._run.step - 1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record the figures of a step."""
        self._run.log(dict(values), step=step)

    def close(self, *, finished: bool) -> None:
        """Flush; a run that is not whole is marked as failed until an attempt ends it."""
        self._run.finish(exit_code=0 if finished else 1)


def last_offline_step(directory: Path, run_id: str) -> int:
    """Return the last step in the offline files of a run, 0 where there is none.

    W&B writes them in blocks, and a killed attempt's last block is lost: only the files know what they hold.
    """
    from wandb.proto import wandb_internal_pb2

    last = 0
    for path in directory.glob(f"wandb/offline-run-*-{run_id}/run-{run_id}.wandb"):
        for content in log_records(path.read_bytes()[7:]):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(content)
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            last = max(last, int(items.get("_step", 0)))
    return last


def log_records(data: bytes) -> Iterable[bytes]:
    """Yield the whole records of a LevelDB log (blocks of 32 KiB, parts with a header of 7 bytes), without checksums.

    W&B's own 7 bytes before it count as part of the first block. What a killed writer left half is not yielded.
    """
    block, header, place, whole = 32768, 7, 7, b""
    while place - 7 + header <= len(data):
        if block - place % block < header:
            place += block - place % block
            continue
        start = place - 7 + header
        size, kind = int.from_bytes(data[start - 3 : start - 1], "little"), data[start - 1]
        if kind not in (1, 2, 3, 4) or start + size > len(data):
            return
        whole = data[start : start + size] if kind in (1, 2) else whole + data[start : start + size]
        place += header + size
        if kind in (1, 4):
            yield whole


KINDS: dict[str, Callable[[TrackedRun, int], Destination]] = {
    "tensorboard": TensorBoard, "mlflow": MlFlow, "wandb": Wandb,
}  # fmt: skip


def require_trackers(names: Iterable[str]) -> list[str]:
    """Return the trackers that were asked for, if each can be used here.

    Raises:
        ConfigError: a library is not installed, or W&B has no account and is not offline.
    """
    wanted = list(names)
    for name in wanted:
        if importlib.util.find_spec(PACKAGES[name]) is None:
            raise ConfigError(
                f"training.trackers: {name} is not installed in the engine's environment; install it there "
                f"(`.venvs/engine/bin/pip install {PACKAGES[name]}`) or take it out of the list"
            )
    if "wandb" in wanted and os.environ.get("WANDB_MODE") not in ("offline", "dryrun", "disabled"):
        import wandb

        if not wandb.api.api_key:
            raise ConfigError(
                "training.trackers: wandb has no account here; set WANDB_API_KEY, or WANDB_MODE=offline to keep the "
                "run in files, or take it out of the list"
            )
    return wanted
