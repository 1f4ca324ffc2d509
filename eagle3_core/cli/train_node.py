"""`eagle3 train-node`: this machine takes part in a training that another one leads."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from eagle3_core.jobs.spec import engine_python


def train_node(
    endpoint: Annotated[str, typer.Argument(metavar="HOST:PORT", help="training.rdzv_endpoint of the run.")],
) -> None:
    """Take part in a training over several machines (`training.nodes`), attempt after attempt, until it is whole."""
    python = str(engine_python())
    os.execv(python, [python, "-P", "-m", "eagle3_core.train.node", endpoint])
