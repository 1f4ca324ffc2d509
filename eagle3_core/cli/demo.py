"""`eagle3 demo`: start Airflow here, trigger `train_drafter` as its UI would, follow it, print what came out."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from eagle3_core import jobs
from eagle3_core.artifacts import Kind, Ref
from eagle3_core.checks import check_inputs
from eagle3_core.cli.airflow_api import Api
from eagle3_core.cli.airflow_local import CHECKOUT, AirflowError, LocalAirflow
from eagle3_core.cli.common import NOT_PUBLISHED, one_line_errors, told_to_stop
from eagle3_core.cli.fetch import ensure_target
from eagle3_core.cli.follow import Follower, failure
from eagle3_core.cli.forecast import forecast, has_gpu
from eagle3_core.config.recipes import load_recipe, recipe_names
from eagle3_core.engine.processes import MEMORY, free_shared_memory
from eagle3_core.storage import open_store

DAG = "train_drafter"
POOL = "engine"
RESTARTS = 5
OWN = "own"
"""Recipe for a target that has none of its own."""
DATA = CHECKOUT / ".eagle3"
HALF_PRECISION = {"target.dtype": "bfloat16", "capture.dtype": "bfloat16", "training.precision": "bfloat16",
                  "gate.near_tie_gap": 0.25}  # fmt: skip
"""What the demo asks for beside the recipe on a GPU, whose kernels in SGLang know half precision alone."""


@dataclass(frozen=True)
class Request:
    """What the demo asks the DAG for: the form's fields."""

    recipe: str
    conf: dict[str, Any]


def demo(
    target: Annotated[str, typer.Option(help="demo, smollm2, or a directory of your own.", envvar="TARGET")] = "demo",
    prompts: Annotated[str | None, typer.Option(help="JSONL file of your own prompts.", envvar="PROMPTS")] = None,
    stop_after: Annotated[bool, typer.Option("--stop-after", help="Stop Airflow when the run has ended.")] = False,
    stop_now: Annotated[bool, typer.Option("--stop", help="Stop Airflow and its jobs; run nothing.")] = False,
) -> None:
    """Train and measure a drafter through a real Airflow on this machine; the last line printed is one JSON object.

    The exit code is 3 if the drafter was not published.
    """
    airflow = local_airflow()
    if stop_now:
        stop()
        return
    with one_line_errors():
        console = Console(highlight=False)
        started = time.monotonic()
        request = request_for(target, prompts)
        _check(console, request, airflow.root)
        with told_to_stop("The run goes on. Come back with the same command; stop it with `make stop`."):
            run_id = _follow(console, airflow, request)
        result = _result(airflow, run_id, time.monotonic() - started)
        if stop_after:
            airflow.stop()
    _print(console, airflow, result)
    if not result["published"]:
        raise typer.Exit(NOT_PUBLISHED)


def stop() -> None:
    """Stop the Airflow that `eagle3 demo` started, and every job of its runs."""
    with one_line_errors():
        local_airflow().stop()
        # Of tasks that ended in the middle; the next engine would do it, and there may be none for long.
        free_shared_memory(MEMORY)
        print("Airflow and its jobs are stopped; artifacts stay.")


def local_airflow() -> LocalAirflow:
    """Return the demo's Airflow, which lives below `.eagle3` in the checkout."""
    return LocalAirflow(DATA / "airflow", str(DATA / "store"))


def request_for(target: str, prompts: str | None) -> Request:
    """Return the form's fields for a target by name or directory and the user's prompts."""
    conf: dict[str, Any] = dict(HALF_PRECISION) if has_gpu() else {}
    recipe = target if target in recipe_names() else OWN
    if recipe != target:
        conf["target.model"] = str(Path(target).expanduser().resolve())
    if prompts:
        conf["data.prompts"] = str(Path(prompts).expanduser().resolve())
    return Request(recipe, {"recipe": recipe, **conf})


def _check(console: Console, request: Request, root: str) -> None:
    """Say how long it will take, fetch SmolLM2 if asked for, and refuse what is wrong before anything starts."""
    run = load_recipe(request.recipe, {key: value for key, value in request.conf.items() if key != "recipe"})
    console.print(forecast(run), soft_wrap=True)
    ensure_target(run, lambda text: console.print(text, soft_wrap=True))
    check_inputs(run, open_store(root))


def _follow(console: Console, airflow: LocalAirflow, request: Request) -> str:
    """Return the id of the run that succeeded; starts Airflow again if it dies meanwhile, for its jobs live on."""
    airflow.ensure(console.print)
    api = Api(airflow)
    _prepare(api)
    run_id = _current_run(api, request.conf) or _trigger(api, request.conf)
    user, password = airflow.login
    page = f"{airflow.url}/dags/{DAG}/runs/{run_id}"
    console.print(f"run {run_id}: {page} (user {user}, password {password})", soft_wrap=True)
    directory = jobs.jobs_directory(airflow.root)
    for _ in range(RESTARTS):
        follower = Follower(api, console, DAG, run_id, directory)
        try:
            state = follower.follow()
            break
        except AirflowError as error:
            console.print(f"[yellow]{error}[/]", soft_wrap=True)
            airflow.ensure(console.print, again=True)
            api = Api(airflow)
    else:
        raise AirflowError(f"Airflow: went away {RESTARTS} times during one run; see {airflow.log}")
    if state != "success":
        airflow.raise_if_stopped()  # which fails tasks on its way
        why = failure(api, f"dags/{DAG}/dagRuns/{run_id}", follower.instances(), directory, airflow.home)
        console.print(f"[red]failed[/] {why.task}: {why.line}", soft_wrap=True)
        console.print(f"log: {why.log}", soft_wrap=True)
        raise typer.Exit(1)
    return run_id


def _prepare(api: Api) -> None:
    """Wait until the DAG is parsed, make the engine's pool, unpause."""
    end = time.monotonic() + 180
    while api.find(f"dags/{DAG}") is None:
        errors = api.get("importErrors")["import_errors"]
        if errors or time.monotonic() > end:
            shown = errors[0]["stack_trace"].strip().splitlines()[-1] if errors else "not parsed within 180 s"
            raise AirflowError(f"DAG {DAG}: {shown}")
        time.sleep(0.5)
    if api.find(f"pools/{POOL}") is None:
        api.post("pools", {"name": POOL, "slots": 1, "include_deferred": True,
                           "description": "Stages that use the engine's device, at once."})  # fmt: skip
    api.patch(f"dags/{DAG}", {"is_paused": False})


def _current_run(api: Api, conf: dict[str, Any]) -> str | None:
    """Return a run of the same request that has not ended, so that a second call follows the first's."""
    runs = api.get(f"dags/{DAG}/dagRuns", state=["running", "queued"], limit=50)["dag_runs"]
    same = [run for run in runs if conf == (run.get("conf") or {})]
    return str(same[0]["dag_run_id"]) if same else None


def _trigger(api: Api, conf: dict[str, Any]) -> str:
    """Create a run as the UI's form does."""
    return str(api.post(f"dags/{DAG}/dagRuns", {"logical_date": None, "conf": conf})["dag_run_id"])


def _result(airflow: LocalAirflow, run_id: str, seconds: float) -> dict[str, Any]:
    """Return the figures of the run's report, and what became of it."""
    ref = _output(airflow, run_id, "report").expect(Kind.EVAL_REPORT)
    release = _output(airflow, run_id, "publish").expect(Kind.RELEASE)
    return {
        "acceptance_length": ref.facts["acceptance_length"],
        "trainer_tau": ref.facts["trainer_tau"],
        "speedup": ref.facts["speedup"],
        "seconds": round(seconds, 1),
        "report": str(Path(airflow.root) / ref.key / "report.html"),
        "ui": airflow.url,
        "run": run_id,
        "shape": ref.facts["shape"],
        "passed": ref.facts["passed"],
        "summary": ref.facts["summary"],
        "published": release.facts["published"],
        "outcome": release.facts["said"],
    }


def _output(airflow: LocalAirflow, run_id: str, task: str) -> Ref:
    """Return the reference that a task left, be it skipped or not."""
    path = f"dags/{DAG}/dagRuns/{run_id}/taskInstances/{task}/xcomEntries/return_value"
    value = Api(airflow).get(path, stringify=False)["value"]
    return Ref.parse(json.loads(value) if isinstance(value, str) else value, f"the XCom of {task}")


def _print(console: Console, airflow: LocalAirflow, result: dict[str, Any]) -> None:
    user, password = airflow.login
    console.print()
    console.print(f"acceptance length  {result['acceptance_length']:.2f} at {result['shape']} "
                  f"(trainer's tau {result['trainer_tau']:.2f})")  # fmt: skip
    console.print(f"speed              {result['speedup']:.2f} times that without speculation")
    console.print(f"verdict            {result['outcome']}", soft_wrap=True)
    console.print(f"report             {result['report']}", soft_wrap=True)
    console.print(f"Airflow            {result['ui']} (user {user}, password {password}); stop it with `make stop`",
                  soft_wrap=True)  # fmt: skip
    print(json.dumps(result))
