"""Which engine made an artifact: SGLang's version, the code of it that we hook, and our own hooks. Light."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal

from eagle3_core.engine.platform import Device, resolve_device
from eagle3_core.errors import EngineVersionError

_HERE = Path(__file__).parent
_OWN = ("plugin.py", "capture_hook.py", "spool.py", "layers.py")
_HOOKED = (
    ("srt/model_executor/model_runner.py", "ModelRunner.load_model"),
    ("srt/layers/logits_processor.py", "LogitsProcessor.forward"),
    ("srt/models/llama.py", "LlamaForCausalLM.set_eagle3_layers_to_capture"),
    ("srt/entrypoints/engine.py", "_set_envs_and_config"),
)
KNOWN_GOOD = {
    "0.5.23": "b4edefa0684232dfe9c85f6acdc8f20e19a436d884a487b0456d3e0229253d5a",
    # The newest for torch 2.11. Its layers return (hidden states, residual) and record their sum on entering a layer,
    # so boundaries mean the same; the arguments of LogitsProcessor.forward and the plugin group are those of 0.5.23.
    "0.5.17": "04d9abbfb749c0cd1e30cb15b46097fb7ab5c04d29793f4f6770713383080f08",
}
"""SGLang version -> digest of the functions we hook, recorded when a whole run passed with it."""
_GPU_ONLY = frozenset({"0.5.17"})
"""Versions without the platform override that keeps a plain CPU served."""
_PROVEN_ON_CPUS = ", ".join(sorted(set(KNOWN_GOOD) - _GPU_ONLY))


@cache
def fingerprint(device: Device | None = None) -> str:
    """Return the sha256 that identifies the engine: equal fingerprints capture equal hidden states.

    Args:
        device: where the engine runs, `auto` when None; on a CPU our stand-in kernels are part of the engine.

    Raises:
        EngineVersionError: SGLang is not installed, or a hooked function is gone.
    """
    digest = hashlib.sha256()
    digest.update(f"sglang {sglang_version()} {hooked_digest()}\n".encode())
    files = [_HERE / name for name in _OWN]
    if (device or resolve_device("auto")) == "cpu":
        files += sorted((_HERE / "cpu_site" / "sgl_kernel").glob("*.py"))
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def require_known_good(device: Device | None = None) -> str:
    """Return the fingerprint after checking that the hooks were proven with this SGLang.

    Raises:
        EngineVersionError: the version, or the code we hook in it, is not in the table, or not for this device.
    """
    version, found = sglang_version(), hooked_digest()
    expected = KNOWN_GOOD.get(version)
    if expected is None:
        raise EngineVersionError(
            f"SGLang {version} is installed, the capture plugin is proven with {', '.join(KNOWN_GOOD)}; install one of "
            "those, or run tests/integration/test_engine.py and add the version to engine/fingerprint.py"
        )
    if found != expected:
        raise EngineVersionError(
            f"SGLang {version}: the functions the capture plugin hooks have digest {found[:12]}, proven is "
            f"{expected[:12]}; the installed SGLang was modified: reinstall it (make setup)"
        )
    if version in _GPU_ONLY and (device or resolve_device("auto")) == "cpu":
        raise EngineVersionError(f"SGLang {version} is proven on GPUs alone; install {_PROVEN_ON_CPUS} for a CPU")
    return fingerprint(device)


def serving_engine(device: Literal["auto", "cpu", "cuda"]) -> dict[str, str]:
    """Return what tells SGLang on a run's device (`serving.device`) from others, as artifacts name it.

    Raises:
        EngineVersionError: see `require_known_good`.
    """
    resolved = resolve_device(device)
    return {"fingerprint": require_known_good(resolved), "device": resolved}


def sglang_version() -> str:
    """Return the installed version.

    Raises:
        EngineVersionError: SGLang is not installed here.
    """
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError as error:
        raise EngineVersionError("SGLang is not installed in this environment; run `make setup`") from error


@cache
def hooked_digest() -> str:
    """Return the sha256 over the source text of the hooked functions.

    Raises:
        EngineVersionError: a file or function is gone.
    """
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        raise EngineVersionError("SGLang is not installed in this environment; run `make setup`")
    return digest_of(Path(next(iter(found.submodule_search_locations))))


def digest_of(package: Path) -> str:
    """Return the digest for an unpacked `sglang` package."""
    digest = hashlib.sha256()
    for file, name in _HOOKED:
        path = package / file
        if not path.is_file():
            raise EngineVersionError(f"{path}: expected the file of {name}, which the capture plugin hooks; found none")
        text = path.read_text(encoding="utf-8")
        segment = next(_segments(text, name), None)
        if segment is None:
            raise EngineVersionError(f"{path}: expected {name}, which the capture plugin hooks; found none")
        digest.update(f"{name}\n{segment}\n".encode())
    return digest.hexdigest()


def _segments(text: str, name: str) -> Iterator[str]:
    """Yield the source text of a function, or of a method given as Class.method."""
    nodes: list[ast.stmt] = ast.parse(text).body
    *classes, function = name.split(".")
    for wanted in classes:
        nodes = next((node.body for node in nodes if isinstance(node, ast.ClassDef) and node.name == wanted), [])
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            yield ast.get_source_segment(text, node) or ""
