"""What an Airflow installation decides once, by environment: the root, the retries, the engine's slots."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

ENGINE_POOL = "engine"
"""Airflow pool of the stages that need the engine's device: as many slots as may use it at once."""


def root() -> str:
    """Return EAGLE3_ROOT, or `.eagle3/store` in the checkout."""
    beside = Path(__file__).resolve().parents[1] / ".eagle3" / "store"
    return os.environ.get("EAGLE3_ROOT") or str(beside)


def retries() -> dict[str, Any]:
    """Return how tasks are retried: long enough to outlast a restart of Airflow's API server.

    EAGLE3_RETRY_DELAY_S replaces the first delay of 120 seconds.
    """
    return {
        "retries": 3,
        "retry_delay": timedelta(seconds=float(os.environ.get("EAGLE3_RETRY_DELAY_S", "120"))),
        "retry_exponential_backoff": True,
        "max_retry_delay": timedelta(minutes=30),
    }


def nightly_recipe() -> str:
    """Return EAGLE3_NIGHTLY_RECIPE, the recipe of every night, or `demo`."""
    return os.environ.get("EAGLE3_NIGHTLY_RECIPE") or "demo"


MAP_NAME = "{{ map_name | default(task.task_id ~ ' ' ~ task.index) }}"
"""Name of a mapped task: its index at first, what the operator says once it runs."""
