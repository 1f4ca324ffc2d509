"""`eagle3 releases`: which drafter is the champion of a name, which were before it, and back to one of them."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from eagle3_core.cli.common import DEFAULT_ROOT, AsJson, Root, existing_store, one_line_errors, output, print_json
from eagle3_core.errors import InputError
from eagle3_core.releases import Release, all_releases, existing_release, roll_back

releases = typer.Typer(no_args_is_help=True, help="Released drafters: ls, show, rollback.")

Name = Annotated[str, typer.Argument(help="Name of the release, as `name` in its recipe.")]


@releases.command("ls")
def ls(root: Root = DEFAULT_ROOT, as_json: AsJson = False) -> None:
    """List the releases of a root: champion, since when, by whom."""
    with one_line_errors():
        found = all_releases(existing_store(root))
        if as_json:
            print_json({"releases": [release.model_dump(mode="json") for release in found]})
            return
        table = Table(Column("release", no_wrap=True), Column("champion", no_wrap=True), "since", "by", "before it",
                      box=SIMPLE_HEAD)  # fmt: skip
        for release in found:
            current = release.current
            table.add_row(release.name, _short(current.drafter), current.at, current.by, str(len(release.history)))
        output.print(table if found else f"no releases below {root}")


@releases.command("show")
def show(name: Name, root: Root = DEFAULT_ROOT, as_json: AsJson = False) -> None:
    """Show one release: the champion, those before it, and what was taken back, with who, when and why."""
    with one_line_errors():
        release = existing_release(existing_store(root), name)
        if as_json:
            print_json(release.model_dump(mode="json"))
            return
        _print(release)


@releases.command("rollback")
def rollback(
    name: Name,
    why: Annotated[str, typer.Option("--why", help="Reason, for the record.")],
    to: Annotated[
        str | None, typer.Option("--to", help="Beginning of a former champion's key or digest. Empty: the last one.")
    ] = None,
    by: Annotated[
        str | None, typer.Option("--by", help="Who, for the record. Empty: the user of this machine.")
    ] = None,
    root: Root = DEFAULT_ROOT,
    as_json: AsJson = False,
) -> None:
    """Make a former champion the champion again; no run publishes the one that was taken back a second time."""
    with one_line_errors():
        if not why.strip():
            raise InputError("--why: expected a reason, found none; say why, whoever looks later will ask")
        release = roll_back(existing_store(root), name, why, by=by, to=to)
        if as_json:
            print_json(release.model_dump(mode="json"))
            return
        _print(release)


def _print(release: Release) -> None:
    table = Table("", Column("drafter", no_wrap=True), "since", "by", "why", title=release.name, box=SIMPLE_HEAD)
    for number, entry in enumerate([release.current, *release.history]):
        taken = release.withdrawal(entry.drafter_manifest_sha256)
        word = "champion" if number == 0 else "taken back" if taken else "before"
        why: Any = entry.why if taken is None else f"{entry.why}\ntaken back by {taken.by}, {taken.at}: {taken.why}"
        table.add_row(word, _short(entry.drafter), entry.at, entry.by, why)
    output.print(table)


def _short(key: str) -> str:
    stage, _, digest = key.partition("/")
    return f"{stage}/{digest[:12]}"
