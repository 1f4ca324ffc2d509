"""`eagle3 repair`: verify a feature set by content, quarantine what is bad, recapture exactly that."""

from __future__ import annotations

from typing import Annotated

import typer

from eagle3_core.artifacts import Kind
from eagle3_core.cli.common import (
    DEFAULT_ROOT,
    GOES_ON,
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
from eagle3_core.cli.watch import ConsoleWatcher
from eagle3_core.errors import EXIT_CODES, Remedy
from eagle3_core.pipeline import STAGES
from eagle3_core.repair import quarantine_bad
from eagle3_core.runner import PipelineRun
from eagle3_core.storage import open_store


def repair(
    recipe: Recipe,
    overrides: Overrides = None,
    root: Root = DEFAULT_ROOT,
    check_only: Annotated[bool, typer.Option("--check-only", help="Report; change nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Verify every hidden-state shard of a run, quarantine bad ones, recapture exactly what is missing.

    With --check-only the exit code is 75 if anything is wrong.
    """
    with one_line_errors():
        pipeline = PipelineRun(open_store(root), configured(recipe, overrides), ConsoleWatcher(console), owner())
        for name in ("preflight", "prepare", "regenerate", "build_vocab", "plan_capture"):
            pipeline.recall(STAGES[name])
        findings = quarantine_bad(pipeline.store, pipeline.require(Kind.SHARD_PLAN), dry_run=check_only)
        bad = [finding for finding in findings if finding.state != "ok"]
        for finding in bad:
            console.print(f"shard {finding.index}: {finding.state}: {finding.reason}", soft_wrap=True)
        if not check_only:
            with told_to_stop(GOES_ON), pipeline.watcher:
                pipeline.execute(STAGES["capture"])
                pipeline.execute(STAGES["seal"])
        result = {"shards": len(findings), "bad": [finding.index for finding in bad], "recaptured": not check_only}
        if as_json:
            print_json(result)
        else:
            console.print(
                f"{len(findings)} shards, {len(bad)} bad or missing, {'only checked' if check_only else 'whole again'}"
            )
    if check_only and bad:
        raise typer.Exit(EXIT_CODES[Remedy.RETRY])
