"""`eagle3 features`: list, verify, measure and clean up the captured hidden states of a root."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from eagle3_core.cli.common import (
    DEFAULT_ROOT,
    AsJson,
    Root,
    byte_bar,
    existing_store,
    human_bytes,
    one_line_errors,
    output,
    print_json,
)
from eagle3_core.data.catalog import Catalog, FeatureEntry, read_catalog
from eagle3_core.data.collect import Collection, remove, survey
from eagle3_core.data.lineage import DAY_S, Lineage, read_lineage
from eagle3_core.data.statistics import Share, Statistics, statistics
from eagle3_core.errors import EXIT_CODES, Eagle3Error, InputError, Remedy
from eagle3_core.repair import ShardFinding, check_set, quarantine_bad
from eagle3_core.storage import ObjectStore, claim_name, verify
from eagle3_core.storage.scan import OnBytes

features = typer.Typer(no_args_is_help=True, help="Captured hidden states: ls, verify, stats, gc.")

Key = Annotated[
    str | None,
    typer.Argument(
        metavar="KEY", help="A feature set (seal/...), a plan (plan_capture/...) or a beginning of its key; empty: all."
    ),
]


@features.command("ls")
def ls(root: Root = DEFAULT_ROOT, as_json: AsJson = False) -> None:
    """List the feature sets of a root: samples, tokens, bytes, state, who writes them now, age, who refers to them."""
    with one_line_errors():
        store = existing_store(root)
        catalog, lineage = read_catalog(store), read_lineage(store)
        claimed = store.claimed()
        rows = [_row(catalog, lineage, claimed, entry) for entry in catalog.entries]
        totals = _totals(catalog)
        if as_json:
            print_json({"root": store.root, "features": rows, "totals": totals, "damaged": catalog.damaged})
            return
        numbers = [Column(name, justify="right", no_wrap=True) for name in ("samples", "tokens", "bytes")]
        table = Table(Column("feature set or plan", no_wrap=True), *numbers, "state", Column("age", no_wrap=True),
                      "referred to by", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))  # fmt: skip
        for row in rows:
            table.add_row(_short(row["key"]), f"{row['samples']:,}", f"{row['tokens']:,}", human_bytes(row["bytes"]),
                          _state(row), _age(row["age_s"]), "\n".join(row["referred_to_by"]) or "-")  # fmt: skip
        size = human_bytes(totals["bytes"])
        table.caption = f"{totals['shards']:,} shards, {size} captured; each counted once, whoever shares it"
        output.print(table if rows else f"no feature sets below {store.root}")
        for text in catalog.damaged.values():
            output.print(f"[red]damaged[/] {text}", soft_wrap=True)


@features.command("verify")
def verify_features(
    key: Key = None,
    root: Root = DEFAULT_ROOT,
    aside: Annotated[bool, typer.Option("--quarantine", help="Move what is corrupt to quarantine/.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read every byte: checksums of files and tensors, shapes, rows, token ids, finite values; say what is wrong where.

    Exit code 75 if anything is wrong. What was put in quarantine is captured again by `eagle3 repair RECIPE`.
    """
    with one_line_errors():
        store = existing_store(root)
        catalog = read_catalog(store)
        entries = catalog.select(key)
        # Where one plan has several feature sets its shards are read once.
        plans = {entry.plan.ref.key: entry for entry in entries}
        total = sum(entry.shards.bytes_of(shard) for entry in plans.values()
                    for shard in entry.shards.shards if catalog.shards.get(shard.key))  # fmt: skip
        read, started = [0], time.monotonic()
        with byte_bar("verify", total) as advance:

            def on_bytes(count: int) -> None:
                read[0] += count
                advance(count)

            findings: dict[str, list[ShardFinding]] = {}
            results = [_verified(store, entry, on_bytes, aside, findings) for entry in entries]
        damaged = {} if key else catalog.damaged
        seconds = time.monotonic() - started
        bad = sum(len(result["problems"]) for result in results) + len(damaged)
        values = {"root": store.root, "sets": results, "damaged": damaged, "bad": bad, "bytes": read[0],
                  "seconds": seconds, "bytes_per_s": read[0] / max(seconds, 1e-9)}  # fmt: skip
        if as_json:
            print_json(values)
        else:
            _show_verified(values)
    if bad:
        raise typer.Exit(EXIT_CODES[Remedy.RETRY])


@features.command("stats")
def stats(key: Key = None, root: Root = DEFAULT_ROOT, as_json: AsJson = False) -> None:
    """Show lengths, supervised share, bytes a token and tokens by domain."""
    with one_line_errors():
        store = existing_store(root)
        catalog = read_catalog(store)
        found = {entry.key: statistics(store, catalog, entry) for entry in catalog.select(key)}
        if as_json:
            print_json({"root": store.root, "features": {name: one.values() for name, one in found.items()}})
            return
        for name, one in found.items():
            output.print(_figures(name, one))
        if not found:
            output.print(f"no feature sets below {store.root}")


@features.command("gc")
def gc(
    root: Root = DEFAULT_ROOT,
    yes: Annotated[bool, typer.Option("--yes", help="Remove; without it, only say what would go.")] = False,
    history: Annotated[bool, typer.Option(help="Earlier releases of a name keep their features too.")] = True,
    abandoned_after: Annotated[
        float | None,
        typer.Option(
            help="Days without any job after which an unfinished run or failed job counts as abandoned.", min=0
        ),
    ] = None,
    alone: Annotated[
        bool,
        typer.Option("--alone", help="Needed for a bucket: no other machine works on it, whose jobs cannot be seen."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove hidden states that no release, no unfinished run and no unfinished job refers to. Dry run by default.

    On a bucket --yes needs --alone. Only plans, shards and feature sets go, and what killed writers left more than a
    day ago: temporary files and unfinished uploads. What was removed is written to gc/ in the root, before it happens.
    """
    with one_line_errors():
        store = existing_store(root)
        if yes and not alone and store.root.startswith("s3://"):
            raise InputError(f"{store.root}: jobs of other machines cannot be seen; if there are none, add --alone")

        def find() -> Collection:
            return survey(store, history=history, abandoned_after_days=abandoned_after)

        found, record = remove(store, find) if yes else (find(), None)
        left = store.leftovers(DAY_S, remove=yes)
        values = {"root": store.root, "dry_run": not yes, "sets": list(found.sets), "plans": list(found.plans),
                  "shards": found.shards, "bytes": found.bytes, "kept": found.kept, "record": record,
                  "leftovers": left}  # fmt: skip
        if as_json:
            print_json(values)
        else:
            _show_collection(found, record)
            if left:
                output.print(f"{len(left)} leftovers of killed writers, older than a day{'' if yes else '; add --yes'}")


def _row(catalog: Catalog, lineage: Lineage, claimed: Mapping[str, str], entry: FeatureEntry) -> dict[str, Any]:
    digests = [artifact.ref.manifest_sha256 for artifact in (entry.plan, entry.sealed) if artifact is not None]
    captured, names = set(catalog.captured(entry)), [claim_name(shard.key) for shard in entry.shards.shards]
    held = sum(entry.shards.bytes_of(shard) for shard in entry.shards.shards if shard.key in captured)
    return {
        "key": entry.key, "plan": entry.plan.ref.key, "samples": entry.samples, "tokens": entry.tokens,
        "bytes": entry.bytes, "bytes_captured": held, "state": entry.state,
        "shards": len(entry.shards.shards), "shards_captured": entry.committed,
        "writers": sorted({claimed[name] for name in names if name in claimed}),
        "made_at": entry.made_at, "age_s": time.time() - entry.made_at,
        "referred_to_by": [str(reference) for reference in lineage.of(*digests)],
    }  # fmt: skip


def _totals(catalog: Catalog) -> dict[str, int]:
    sizes = {shard.key: entry.shards.bytes_of(shard) for entry in catalog.entries
             for shard in entry.shards.shards}  # fmt: skip
    committed = [key for key, whole in catalog.shards.items() if whole]
    return {"sets": len(catalog.entries), "shards": len(committed),
            "bytes": sum(sizes.get(key, 0) for key in committed)}  # fmt: skip


def _verified(
    store: ObjectStore, entry: FeatureEntry, on_bytes: OnBytes, aside: bool, known: dict[str, list[ShardFinding]]
) -> dict[str, Any]:
    """Check a plan, its shards and its feature set; a shard that was never captured is a fault only once sealed.

    `known` keeps what was found in the shards of each plan.
    """
    problems: dict[str, str] = {}
    for what, artifact in (("plan", entry.plan), ("feature set", entry.sealed)):
        if artifact is not None:
            try:
                verify(store, artifact.ref)
            except Eagle3Error as error:
                problems[what] = str(error)
    if problems:
        # Without the plan's token ids and names nothing can be said about its shards.
        return {"key": entry.key, "shards": len(entry.shards.shards), "ok": 0, "missing": 0, "problems": problems}
    key = entry.plan.ref.key
    if key not in known:
        known[key] = quarantine_bad(store, entry.plan.ref, dry_run=not aside, deep=on_bytes)
    findings = known[key]
    bad = [finding for finding in findings if finding.state == "corrupt" or (entry.sealed and finding.state != "ok")]
    problems |= {f"shard {finding.index}": f"{finding.state}: {finding.reason}" for finding in bad}
    if entry.sealed is not None and (text := check_set(entry.sealed, findings)):
        problems["feature set"] = text
    states = [finding.state for finding in findings]
    return {"key": entry.key, "shards": len(findings), "ok": states.count("ok"), "missing": states.count("missing"),
            "problems": problems}  # fmt: skip


def _show_verified(values: dict[str, Any]) -> None:
    for result in values["sets"]:
        for place, text in result["problems"].items():
            output.print(f"[red]{place}[/]: {text}", soft_wrap=True)
        missing = f", {result['missing']} not captured" if result["missing"] else ""
        output.print(f"{result['key']}: {result['ok']} of {result['shards']} shards good{missing}")
    for text in values["damaged"].values():
        output.print(f"[red]damaged[/] {text}", soft_wrap=True)
    if not values["sets"]:
        output.print(f"no feature sets below {values['root']}")
    output.print(f"{human_bytes(values['bytes'])} read in {values['seconds']:.1f} s, "
                  f"{human_bytes(values['bytes_per_s'])}/s, {values['bad']} problems")  # fmt: skip


def _figures(name: str, one: Statistics) -> Table:
    table = Table("", "samples", "tokens", "supervised", "share of tokens", title=name)

    def add(label: str, share: Share) -> None:
        part = share.tokens / one.total.tokens
        table.add_row(label, f"{share.samples:,}", f"{share.tokens:,}", f"{share.supervised / share.tokens:.1%}",
                      f"{part:6.1%} {'#' * round(24 * part)}")  # fmt: skip

    add("all", one.total)
    if one.held_out.samples:
        add("held out", one.held_out)
    table.add_section()
    for domain, share in one.domains.items():
        add(f"domain {domain}", share)
    table.add_section()
    for low, share in one.histogram.items():
        add(f"{low:,} to {2 * low - 1:,} tokens", share)
    width = "nothing captured" if one.bytes_per_token is None else f"{one.bytes_per_token:,.1f} bytes a token"
    table.caption = (
        f"lengths {one.shortest:,} / {one.median:,} / {one.p95:,} / {one.longest:,} (least, median, 95 %, most); "
        f"{human_bytes(one.stored_bytes)} stored, {width}"
    )
    return table


def _show_collection(found: Collection, record: dict[str, Any] | None) -> None:
    for key, who in found.kept.items():
        output.print(f"keep   {key}: {who}", soft_wrap=True)
    for key in (*found.sets, *found.plans):
        output.print(f"{'remove' if record is None else 'removed'} {key}")
    for key in record["busy"] if record is not None else ():
        output.print(f"busy   {key}")
    size, count = human_bytes(found.bytes), len(found.shards)
    if record is None:
        more = "; nothing was removed, add --yes" if found.keys else ""
        output.print(f"{count} shards, {size} would be freed{more}")
        return
    busy = f", {len(record['busy'])} left because somebody works on them" if record["busy"] else ""
    where = f"; written to {record['record']}" if "record" in record else ""
    output.print(f"{count} shards, {human_bytes(record['bytes'])} freed{busy}{where}", soft_wrap=True)


def _short(key: str) -> str:
    """Return the beginning of a key: all commands take it for the whole."""
    stage, _, digest = key.partition("/")
    return f"{stage}/{digest[:12]}"


def _state(row: dict[str, Any]) -> str:
    said = str(row["state"])
    if row["state"] in ("capturing", "incomplete"):
        said += f" {row['shards_captured']} of {row['shards']}"
    return "\n".join([said, *(f"by {writer}" for writer in row["writers"])])


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
