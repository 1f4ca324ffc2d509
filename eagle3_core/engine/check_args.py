"""Ask the installed SGLang about launch arguments: `python -m eagle3_core.engine.check_args REPORT ARGVS`.

ARGVS is a JSON list of argument lists; one process asks about all of them, because importing SGLang takes the time.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from pathlib import Path
from typing import Any


class _RefusedError(Exception):
    pass


def unknown_flags(argv: list[str], known: list[str]) -> str | None:
    """Return one line naming the first flag SGLang does not have, with the nearest it has; None if all are known."""
    for part in argv:
        if part.startswith("--") and part.split("=")[0] not in known:
            near = difflib.get_close_matches(part, known, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else ""
            return f"SGLang has no flag {part}{hint}"
    return None


def _actions() -> list[argparse.Action]:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser._actions


def resolve(argv: list[str]) -> dict[str, Any]:
    """Return every plain field of SGLang's resolved arguments."""
    from sglang.srt.server_args import prepare_server_args

    from eagle3_core.engine.plugin import register

    actions = _actions()
    wrong = unknown_flags(argv, [option for action in actions for option in action.option_strings])
    if wrong:
        raise _RefusedError(wrong)
    register()
    arguments = prepare_server_args(argv)
    if hasattr(arguments, "resolve_once"):
        arguments.resolve_once()
    elif hasattr(arguments, "check_server_args"):
        arguments.check_server_args()
    try:
        from sglang.srt.arg_groups.overrides import resolved_view

        view = resolved_view(arguments)
    except ImportError:
        view = arguments
    plain = (str, int, float, bool, type(None))
    values = {action.dest: getattr(view, action.dest, None) for action in actions}
    return {name: value for name, value in values.items() if isinstance(value, plain)}


def answer(argv: list[str]) -> dict[str, Any]:
    """Return `{"resolved": ...}` or `{"error": one line}`."""
    try:
        return {"resolved": resolve(argv)}
    except _RefusedError as error:
        return {"error": str(error)}
    except SystemExit:
        return {"error": f"SGLang's argument parser refused {' '.join(argv)}"}
    except Exception as error:  # noqa: BLE001 - whatever SGLang raises is its answer
        line = " ".join(str(error).split()) or "an assertion without a message"
        return {"error": f"SGLang refuses these arguments: {type(error).__name__}: {line}"}


if __name__ == "__main__":
    answers = [answer(argv) for argv in json.loads(sys.argv[2])]
    Path(sys.argv[1]).write_text(json.dumps(answers), encoding="utf-8")
