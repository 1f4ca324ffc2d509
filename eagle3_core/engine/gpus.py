"""Who holds the GPUs a server would start on, as nvidia-smi tells it. Nobody is ended here."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle3_core.errors import EngineError, GpuBusyError

UNSEEN_MIB = 2048
"""What driver and contexts may take that no listed process accounts for; more is of somebody who cannot be seen."""
_AGAIN_S = 0.5


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi counts it."""

    index: int
    uuid: str
    used_mib: int
    total_mib: int


@dataclass(frozen=True)
class Holder:
    """A process with memory on a GPU; `used_mib` is None where the driver does not tell."""

    uuid: str
    pid: int
    used_mib: int | None
    name: str

    def __str__(self) -> str:
        """Return pid, user, command and memory, as far as /proc tells."""
        much = "an unknown amount" if self.used_mib is None else f"{self.used_mib:,} MiB"
        return f"pid {self.pid} of {_user(self.pid)} ({_command(self.pid) or self.name}) holds {much}"


def selected(count: int, first: int = 0) -> list[Gpu]:
    """Return the GPUs a server of `count` takes: of the visible ones, from number `first` on.

    Raises:
        EngineError: nvidia-smi fails, or CUDA_VISIBLE_DEVICES names what is not there.
    """
    found = [
        Gpu(int(index), uuid, int(used), int(total))
        for index, uuid, used, total in _ask("--query-gpu=index,uuid,memory.used,memory.total", 4)
    ]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        found = [_named(name.strip(), found) for name in visible.split(",") if name.strip()]
    return found[first : first + count]


def holders(gpus: Sequence[Gpu]) -> list[Holder]:
    """Return the processes that compute on these GPUs, this one left out."""
    wanted = {gpu.uuid for gpu in gpus}
    listed = [
        Holder(uuid, int(pid), int(used) if used.isdigit() else None, name)
        for uuid, pid, used, name in _ask("--query-compute-apps=gpu_uuid,pid,used_memory,process_name", 4)
    ]
    return [holder for holder in listed if holder.uuid in wanted and holder.pid != os.getpid()]


def require_free(count: int, first: int = 0, within_s: float = 10.0) -> bool:
    """Return once nobody else holds the GPUs; False where there is no nvidia-smi to ask.

    A server that has just ended gives its memory back a moment later, so a held GPU is looked at for `within_s`.

    Raises:
        GpuBusyError: names each holder with pid, user, command and memory.
    """
    if shutil.which("nvidia-smi") is None:
        return False
    deadline = time.monotonic() + within_s
    while found := _held(count, first):
        if time.monotonic() > deadline:
            raise GpuBusyError(
                f"expected free GPUs, found {'; '.join(found)}; end that yourself (nothing of others is ever ended "
                "here), choose other GPUs by CUDA_VISIBLE_DEVICES, or set serving.share_gpus"
            )
        time.sleep(_AGAIN_S)
    return True


def require_released(pids: Collection[int], count: int, first: int = 0, within_s: float = 10.0) -> str:
    """Return what the ended processes `pids` still hold after the given time, empty for nothing."""
    if shutil.which("nvidia-smi") is None:
        return ""
    deadline = time.monotonic() + within_s
    while left := [holder for holder in holders(selected(count, first)) if holder.pid in pids]:
        if time.monotonic() > deadline:
            return "; ".join(map(str, left))
        time.sleep(_AGAIN_S)
    return ""


def _held(count: int, first: int) -> list[str]:
    gpus = selected(count, first)
    found = holders(gpus)
    told = []
    for gpu in gpus:
        here = [holder for holder in found if holder.uuid == gpu.uuid]
        told += [f"GPU {gpu.index}: {holder}" for holder in here]
        unseen = gpu.used_mib - sum(holder.used_mib or 0 for holder in here)
        if not here and unseen > UNSEEN_MIB:
            told.append(f"GPU {gpu.index}: {unseen:,} of {gpu.total_mib:,} MiB held by a process that cannot be seen "
                        "from here, in another container perhaps")  # fmt: skip
    return told


def _ask(query: str, columns: int) -> list[list[str]]:
    """Return the rows of a query.

    Raises:
        EngineError: nvidia-smi fails or answers otherwise than asked.
    """
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=False)
    except subprocess.TimeoutExpired:
        raise EngineError("nvidia-smi: expected an answer within 60 s, found none; is a GPU lost? See dmesg") from None
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    rows = [[part.strip() for part in line.split(",", columns - 1)] for line in lines]
    if done.returncode != 0 or any(len(row) != columns for row in rows):
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
        raise EngineError(f"nvidia-smi {query}: expected {columns} columns, found exit {done.returncode}: {said}")
    return rows


def _named(name: str, found: Sequence[Gpu]) -> Gpu:
    for gpu in found:
        if name == str(gpu.index) or (name.startswith("GPU-") and gpu.uuid.startswith(name)):
            return gpu
    raise EngineError(
        f"CUDA_VISIBLE_DEVICES: expected indices or GPU-... of {len(found)} GPUs, found {name!r}; correct it"
    )


def _user(pid: int) -> str:
    try:
        return pwd.getpwuid(Path(f"/proc/{pid}").stat().st_uid).pw_name
    except KeyError:
        return f"user {Path(f'/proc/{pid}').stat().st_uid}"
    except OSError:
        return "an unknown user"


def _command(pid: int) -> str:
    try:
        text = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
    return text if len(text) <= 120 else f"{text[:117]}..."
