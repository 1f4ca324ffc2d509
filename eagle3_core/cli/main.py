"""The `eagle3` command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from eagle3_core.artifacts import Kind
from eagle3_core.checks import check_inputs
from eagle3_core.cli.bench import bench
from eagle3_core.cli.common import (
    DEFAULT_ROOT,
    GOES_ON,
    NOT_PUBLISHED,
    AsJson,
    Overrides,
    Recipe,
    Root,
    configured,
    console,
    one_line_errors,
    owner,
    print_json,
    told_to_stop,
)
from eagle3_core.cli.demo import demo, stop
from eagle3_core.cli.explain import explained
from eagle3_core.cli.features import features
from eagle3_core.cli.fetch import ensure_target
from eagle3_core.cli.plan import plan
from eagle3_core.cli.reference import reference
from eagle3_core.cli.releases import releases
from eagle3_core.cli.remap import remap
from eagle3_core.cli.repair import repair
from eagle3_core.cli.status import status
from eagle3_core.cli.train_node import train_node
from eagle3_core.cli.watch import ConsoleWatcher
from eagle3_core.pipeline import STAGES, Stage
from eagle3_core.runner import PipelineRun
from eagle3_core.storage import open_store

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Prompts in, a trained, parity-checked, benchmarked EAGLE-3 drafter for SGLang out.",
)


@app.command()
def run(
    recipe: Recipe,
    overrides: Overrides = None,
    root: Root = DEFAULT_ROOT,
    until: Annotated[str, typer.Option(help="Stop after this stage.")] = "publish",
    as_json: AsJson = False,
) -> None:
    """Run all stages in order; what is committed already is not computed again.

    The last line says whether the drafter was published; the exit code is 3 if it was not.
    """
    with one_line_errors():
        if until not in STAGES:
            raise typer.BadParameter(f"expected one of {', '.join(STAGES)}", param_hint="--until")
        pipeline = _open(recipe, overrides, root)
        with told_to_stop(GOES_ON), pipeline.watcher:
            for stage in STAGES.values():
                pipeline.execute(stage)
                if stage.name == until:
                    break
        _show(pipeline, as_json)
        if not _published(pipeline):
            raise typer.Exit(NOT_PUBLISHED)


@app.command()
def doctor(
    recipe: Annotated[str, typer.Argument(help="Recipe whose target, prompts and flags are checked.")] = "demo",
    overrides: Overrides = None,
    root: Root = DEFAULT_ROOT,
    as_json: AsJson = False,
) -> None:
    """Prove both environments and check a run's inputs: the preflight, in seconds."""
    with one_line_errors():
        pipeline = _open(recipe, overrides, root)
        with told_to_stop(GOES_ON), pipeline.watcher:
            pipeline.execute(STAGES["preflight"])
        _show(pipeline, as_json)


def _open(recipe: str, overrides: list[str] | None, root: str) -> PipelineRun:
    config = configured(recipe, overrides)
    ensure_target(config, lambda text: console.print(text, soft_wrap=True))
    store = open_store(root)
    check_inputs(config, store)
    return PipelineRun(store, config, ConsoleWatcher(console), owner())


def _show(pipeline: PipelineRun, as_json: bool) -> None:
    refs = {kind: ref.model_dump(mode="json") for kind, ref in pipeline.refs.items()}
    if as_json:
        print_json({"run": pipeline.run_key, "root": pipeline.store.root, "artifacts": refs})
        return
    if report := pipeline.refs.get(Kind.EVAL_REPORT):
        console.print(f"report: {pipeline.store.root}/{report.key}/report.html", soft_wrap=True)
    if release := pipeline.refs.get(Kind.RELEASE):
        print(release.facts["said"])


def _published(pipeline: PipelineRun) -> bool:
    """Tell whether the run's drafter is the champion now; true for a run that did not come that far."""
    release = pipeline.refs.get(Kind.RELEASE)
    return release is None or bool(release.facts["published"])


def _stage_command(stage: Stage) -> Callable[..., None]:
    def command(
        recipe: Recipe, overrides: Overrides = None, root: Root = DEFAULT_ROOT, as_json: AsJson = False
    ) -> None:
        with one_line_errors():
            pipeline = _open(recipe, overrides, root)
            for earlier in STAGES.values():
                if earlier.name == stage.name:
                    break
                pipeline.recall(earlier)
            with told_to_stop(GOES_ON), pipeline.watcher:
                pipeline.execute(stage)
            _show(pipeline, as_json)

    return command


def train(
    recipe: Recipe,
    overrides: Overrides = None,
    root: Root = DEFAULT_ROOT,
    as_json: AsJson = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Only print what is trained, what is frozen, shapes and counts.")
    ] = False,
) -> None:
    """Run the stage, or explain it."""
    if not explain:
        _stage_command(STAGES["train"])(recipe, overrides, root, as_json)
        return
    with one_line_errors():
        print(explained(configured(recipe, overrides)))


app.command(rich_help_panel="Planning and looking")(plan)
app.command(rich_help_panel="Planning and looking")(status)
app.command(rich_help_panel="Planning and looking")(repair)
app.add_typer(features, name="features", rich_help_panel="Planning and looking")
app.command(rich_help_panel="Single stages")(train_node)
app.add_typer(releases, name="releases", rich_help_panel="Drafters")
app.command(rich_help_panel="Drafters")(remap)
app.command(rich_help_panel="Drafters")(bench)
app.command(rich_help_panel="A local Airflow")(demo)
app.command(rich_help_panel="A local Airflow")(stop)
app.command(hidden=True)(reference)
for _stage in STAGES.values():
    _command = train if _stage.name == "train" else _stage_command(_stage)
    app.command(_stage.name, help=f"Stage: {_stage.summary}", rich_help_panel="Single stages")(_command)
