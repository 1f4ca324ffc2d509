"""Turn the form into a frozen run configuration, and list what the mapped stages map over. Light: run in the worker."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from airflow.sdk import BaseOperator

from eagle3_core.artifacts import Kind, Ref
from eagle3_core.checks import check_inputs
from eagle3_core.config import RunConfig
from eagle3_core.config.recipes import load_recipe
from eagle3_core.errors import Eagle3Error
from eagle3_core.pipeline import shape_names
from eagle3_core.runner import begin, freeze
from eagle3_core.storage import ObjectStore, load, open_store
from operators import settings
from operators.base import as_airflow
from operators.form import overrides_of


class ConfigureOperator(BaseOperator):
    """Build the run configuration from the DAG run's parameters, check it, freeze it; return its key below the root.

    What is frozen names the champion, so that a task cleared later still challenges the same one.
    """

    def execute(self, context: Any) -> str:
        """Return the key.

        Raises:
            AirflowFailException: one line about the parameter that is wrong.
        """
        params: Mapping[str, Any] = context["params"]
        try:
            store = open_store(settings.root())
            run = load_recipe(params["recipe"], overrides_of(params))
            run = begin(store, run, context["dag_run"].run_after.date())
            check_inputs(run, store)
            return freeze(store, run)
        except Eagle3Error as error:
            raise as_airflow(error) from None


class ListShardsOperator(BaseOperator):
    """Return the indexes of a plan's shards."""

    template_fields: Sequence[str] = ("plan",)

    def __init__(self, *, plan: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.plan = plan

    def execute(self, context: Any) -> list[int]:
        """Return 0 .. number of shards - 1."""
        ref = Ref.parse(self.plan, "shard plan").expect(Kind.SHARD_PLAN)
        return list(range(int(load(open_store(settings.root()), ref).manifest.facts["num_shards"])))


class ListShapesOperator(BaseOperator):
    """Return the indexes of what is measured: 0 is the baseline, then the draft shapes."""

    template_fields: Sequence[str] = ("run_key",)

    def __init__(self, *, run_key: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.run_key = run_key

    def execute(self, context: Any) -> list[int]:
        """Return 0 .. number of shapes."""
        return list(range(len(shape_names(frozen_run(open_store(settings.root()), self.run_key)))))


def frozen_run(store: ObjectStore, run_key: str) -> RunConfig:
    """Return the run configuration that was frozen at `run_key`.

    Raises:
        ConfigError: it was written by a version with other keys.
    """
    return RunConfig.parse(json.loads(store.read_bytes(run_key)), run_key)
