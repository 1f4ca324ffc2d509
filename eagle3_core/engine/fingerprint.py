"""Which SGLang is installed, with which plugin of ours, and whether the two were proven together."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from importlib import metadata
from pathlib import Path

from eagle3_core.engine import plugin
from eagle3_core.errors import EngineVersionError

HOOKED = (plugin.LOAD_MODEL, plugin.LOGITS, plugin.SET_ENVIRONMENT)
PLUGIN_FILES = ("plugin.py", "capture_hook.py", "spool.py", "layers.py")

KNOWN_GOOD = {
    "0.5.23": "f648f40c9cd95ab8",
}
"""SGLang version to the digest of the functions the plugin hooks, as the integration tests proved them."""


def fingerprint() -> dict[str, str]:
    """Return the SGLang version, a digest of the plugin's source, and one of the SGLang functions it hooks.

    Raises:
        EngineVersionError: SGLang is not installed, or a hooked function is gone.
    """
    try:
        version = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        raise EngineVersionError("expected sglang in this environment, found none; run `make setup`") from None
    own = hashlib.sha256()
    for name in PLUGIN_FILES:
        own.update((Path(__file__).parent / name).read_bytes())
    hooked = hashlib.sha256("\n".join(_source(path) for path in HOOKED).encode()).hexdigest()
    return {"sglang": version, "plugin": own.hexdigest()[:16], "hooked": hooked[:16]}


def require_known_good() -> dict[str, str]:
    """Return the fingerprint if this SGLang is one the plugin was proven with.

    Raises:
        EngineVersionError: names what differs.
    """
    found = fingerprint()
    known = KNOWN_GOOD.get(found["sglang"])
    if known is None:
        raise EngineVersionError(
            f"sglang: expected one of {', '.join(KNOWN_GOOD)}, found {found['sglang']}; install a proven one, or run "
            "tests/integration/test_engine.py with yours and add it to eagle3_core/engine/fingerprint.py"
        )
    if known != found["hooked"]:
        raise EngineVersionError(
            f"sglang {found['sglang']}: expected hooked functions {known}, found {found['hooked']}: "
            "this copy is patched; reinstall it with `make setup`"
        )
    return found


def _source(path: str) -> str:
    """Return the source of `package.module.Class.function`, found without importing SGLang."""
    root = importlib.util.find_spec("sglang")
    if root is None or not root.submodule_search_locations:
        raise EngineVersionError("expected the package sglang, found none; run `make setup`")
    parts = path.split(".")[1:]
    folder = Path(root.submodule_search_locations[0])
    while parts and (folder / parts[0]).is_dir():
        folder = folder / parts.pop(0)
    file = folder / f"{parts[0]}.py"
    if not file.is_file():
        raise EngineVersionError(f"sglang: expected {file} for {path}, found no such module; install a proven version")
    text = file.read_text(encoding="utf-8")
    node: ast.AST = ast.parse(text)
    for name in parts[1:]:
        found = [item for item in ast.iter_child_nodes(node) if getattr(item, "name", None) == name]
        if not found:
            raise EngineVersionError(f"sglang: expected {path}, found no {name} in {file}; install a proven version")
        node = found[0]
    return ast.get_source_segment(text, node) or ""
