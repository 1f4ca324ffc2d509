"""SGLang's plugin (entry point group `sglang.srt.plugins`): keeps a plain CPU served, and reads hidden states out.

SGLang calls `register` in each of its processes. Without our environment variables it does nothing.
"""

from __future__ import annotations

import multiprocessing
import os

CPU_SITE = "EAGLE3_CPU_SITE"
"""Set to 1 by the launcher when SGLang runs on a CPU with our stand-in kernels."""
CAPTURE_DIR = "EAGLE3_CAPTURE_DIR"
"""Spool directory of a capture server."""
CAPTURE_LAYERS = "EAGLE3_CAPTURE_LAYERS"
"""Decoder layers whose outputs are captured: ids from 0, comma separated."""

LOAD_MODEL = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
LOGITS = "sglang.srt.layers.logits_processor.LogitsProcessor.forward"
SET_ENVIRONMENT = "sglang.srt.entrypoints.engine._set_envs_and_config"


def register() -> None:
    """Install what the environment asks for."""
    if os.environ.get(CPU_SITE) == "1":
        _keep_cpu_backend()
        _start_fast()
    if os.environ.get(CAPTURE_DIR):
        _install_capture()


def _keep_cpu_backend() -> None:
    """Let `--attention-backend intel_amx` stay selected without AMX: only its name is AMX, our kernels are not.

    EAGLE has no other CPU backend. SGLang asks its platform facts, which have an official override.
    """
    from sglang.srt.runtime_context import override_platform

    override_platform(has_amx=True).install()


def _start_fast() -> None:
    """Fork scheduler and detokenizer, do not spawn them: on a CPU a start is all imports, and no CUDA forbids it."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(SET_ENVIRONMENT, _fork_children, HookType.AFTER)


def _fork_children(result: object, *_args: object, **_kwargs: object) -> object:
    multiprocessing.set_start_method("fork", force=True)
    return result


def _install_capture() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from eagle3_core.engine.capture_hook import after_load_model, around_logits

    HookRegistry.register(LOAD_MODEL, after_load_model, HookType.AFTER)
    HookRegistry.register(LOGITS, around_logits, HookType.AROUND)
