"""`eagle3 remap`: rewrite a drafter for another engine or trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eagle3_core.cli.common import AsJson, byte_bar, console, human_bytes, one_line_errors, print_json
from eagle3_core.export.dialects import DIALECTS
from eagle3_core.export.plan import TargetFacts
from eagle3_core.export.remap import Remapped
from eagle3_core.export.remap import remap as rewrite
from eagle3_core.identity import named_target, read_config, target_fingerprint

NAMES = ", ".join(DIALECTS)


def remap(
    source: Annotated[Path, typer.Argument(metavar="IN", help="Directory of the drafter; it is only read.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New directory; other content there is never replaced.")],
    to: Annotated[str, typer.Option("--to", help=f"Dialect to write: {NAMES}.")],
    told: Annotated[
        str | None, typer.Option("--from", help="Dialect of IN, where its files do not tell.", metavar="DIALECT")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            help="Directory of the target, or demo: checks sizes, and tells what layer ids mean.",
            metavar="DIRECTORY",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Rewrite a drafter's parameter names and config for another engine; weights keep their very bytes.

    The dialect of IN is found from its keys and config. What is missing, unknown, there twice, of another shape or not
    finite is refused by name, and so is a drafter that the engine would compute otherwise than it was trained: SGLang
    drops unknown keys and leaves missing ones uninitialised without a word.

    * **sglang** `midlayer.*`, which every SGLang reads; **specforge**, **eagle** the same with their configs
    * **sglang-new** `layers.0.*`, which SGLang reads since it has more than one draft layer
    * **modelopt** the same without t2d; refused where SGLang would take other layers than ModelOpt by the same ids
    * **automodel** `model.layers.0.*`; the wrappers `_orig_mod.` and `module.` are taken off in every dialect
    * **vllm** `layers.0.*` with vLLM's layer ids; **speculators** with the nested config of that library
    * **own** the checkpoint of this project: `layer.*` and `drafter_config.json`
    """
    with one_line_errors():
        total = sum(path.stat().st_size for path in source.glob("*.safetensors"))
        with byte_bar(f"remap {source.name}", total) as on_bytes:
            known = _target(target) if target is not None else None
            result = rewrite(source, out, to, told=told, target=known, on_bytes=on_bytes)
        if as_json:
            print_json(result.summary())
        else:
            _show(result)


def _target(name: str) -> TargetFacts:
    directory = named_target(name)
    config = read_config(directory, "--target")
    return TargetFacts(config, str(directory), lambda: target_fingerprint(directory).sha256)


def _show(result: Remapped) -> None:
    plan = result.plan
    alike = " or ".join(plan.source.readable_as)
    console.print(f"{alike} -> {plan.to.name}: {len(plan.renamed)} keys renamed, "
                  f"{len(plan.source.canonical) - len(plan.renamed)} kept, {plan.parameters:,} parameters, "
                  f"{human_bytes(result.total_bytes)}")  # fmt: skip
    for note in plan.notes:
        console.print(f"  {note}")
    console.print(f"{result.out}: {'the same was there already' if result.already else 'written'}")
