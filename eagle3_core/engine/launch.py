"""Launch arguments of SGLang as data: what to serve, in which mode, on which device -> a tuple of arguments.

Pure; `engine/effective.py` asks the installed SGLang what it makes of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from eagle3_core.config.evaluation import DraftShape
from eagle3_core.config.serving import ServingConfig
from eagle3_core.engine import plugin
from eagle3_core.engine.flags import override
from eagle3_core.engine.layers import check_outputs_of
from eagle3_core.engine.platform import Device, resolve_device
from eagle3_core.engine.prefills import most_samples
from eagle3_core.errors import EngineArgsError
from eagle3_core.estimate import feature_bytes_per_token

Mode = Literal["serve", "speculate", "capture"]

CPU_SITE = Path(__file__).parent / "cpu_site"

_DEVICE_ARGS: dict[Device, tuple[str, ...]] = {
    # Overlapping scheduler and device gains nothing where both are the same cores, and SGLang's EAGLE refuses it there.
    # An idle scheduler would otherwise spin, at the cost of whoever shares the machine.
    "cpu": (
        "--attention-backend", "intel_amx", "--sampling-backend", "pytorch", "--grammar-backend", "none",
        "--disable-cuda-graph", "--disable-overlap-schedule", "--sleep-on-idle",
        "--load-snapshot-publish-interval", "1000",
    ),
    "cuda": ("--sampling-backend", "pytorch"),
}  # fmt: skip
_GENERATE_ARGS: dict[Device, tuple[str, ...]] = {
    "cpu": (),
    "cuda": ("--cuda-graph-max-bs-decode", "{max_running_requests}"),
}
_CAPTURE_ARGS: dict[Device, tuple[str, ...]] = {
    "cpu": ("--disable-radix-cache",),
    "cuda": (
        "--disable-radix-cache",
        "--disable-overlap-schedule",
        "--disable-prefill-cuda-graph",
        "--disable-decode-cuda-graph",
    ),
}  # fmt: skip
EAGLE3_CLASSES = frozenset({"LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM"})
"""Draft classes that SGLang runs under the algorithm EAGLE3."""
# SGLang reserves a share of all memory on a CPU unless told a number.
_CPU_TOTAL_TOKENS = 16384
# A forward pass of a smaller target is all overhead: a second thread made it five times slower on two shared cores.
_SMALLEST_SHARED_WIDTH = 384
# SGLang keeps some positions of the context for itself and refuses longer prompts.
_CONTEXT_HEADROOM = 16


@dataclass(frozen=True)
class LaunchPlan:
    """Everything that decides how one server runs; make one by `serve`, `speculate` or `capture`."""

    mode: Mode
    target: Path
    dtype: str
    device: Device
    serving: ServingConfig
    drafter: Path | None = None
    shape: DraftShape | None = None
    aux_layers: tuple[int, ...] = ()
    max_sample_tokens: int | None = None
    prefill_tokens: int = 0
    model: Mapping[str, Any] = field(default_factory=dict)
    pretended_length: float | None = None

    @classmethod
    def serve(cls, target: Path, dtype: str, serving: ServingConfig) -> LaunchPlan:
        """Plan a server without speculation."""
        return cls("serve", target, dtype, _device(serving, dtype), serving, model=read_model_config(target))

    @classmethod
    def speculate(
        cls, target: Path, dtype: str, serving: ServingConfig, drafter: Path, shape: DraftShape
    ) -> LaunchPlan:
        """Plan a server that speculates with an EAGLE-3 drafter.

        Raises:
            EngineArgsError: the drafter's directory is not one SGLang would load.
        """
        for name in ("config.json", "model.safetensors"):
            if not (drafter / name).is_file():
                raise EngineArgsError(
                    f"{drafter}: expected {name} of an exported drafter, found none; run export first"
                )
        device, model = _device(serving, dtype), read_model_config(target)
        plan = cls("speculate", target, dtype, device, serving, drafter=drafter, shape=shape, model=model)
        check_drafter(drafter, plan.context_length)
        return plan

    @classmethod
    def capture(
        cls,
        target: Path,
        dtype: str,
        serving: ServingConfig,
        aux_layers: Sequence[int],
        max_sample_tokens: int,
        prefill_tokens: int,
    ) -> LaunchPlan:
        """Plan a server whose prefills are captured.

        `aux_layers` are the layers whose OUTPUT is taken, from 0. Samples share prefills of `prefill_tokens` (see
        `engine/prefills.py`); a longer sample comes in chunks of as many.
        """
        model = read_model_config(target)
        layers = check_outputs_of(aux_layers, int(model["num_hidden_layers"]))
        if serving.max_total_tokens is not None and serving.max_total_tokens < 2 * prefill_tokens:
            raise EngineArgsError(
                f"serving.max_total_tokens: expected at least {2 * prefill_tokens}, twice capture.prefill_tokens, "
                f"found {serving.max_total_tokens}; raise it, or lower capture.prefill_tokens"
            )
        return cls(
            "capture", target, dtype, _device(serving, dtype), serving, aux_layers=layers,
            max_sample_tokens=max_sample_tokens, prefill_tokens=prefill_tokens, model=model,
        )  # fmt: skip

    def argv(self, port: int = 30000) -> tuple[str, ...]:
        """Return the arguments after `python -m sglang.launch_server`; the user's `engine_args` come last and win."""
        arguments = [
            "--model-path", str(self.target), "--host", "127.0.0.1", "--port", str(port), "--device", self.device,
            "--dtype", self.dtype, "--max-running-requests", str(self._max_running_requests),
            "--random-seed", "0", "--skip-server-warmup", "--log-level-http", "warning",
        ]  # fmt: skip
        if self.serving.tensor_parallel > 1:
            arguments += ["--tp-size", str(self.serving.tensor_parallel)]
        total = self.max_total_tokens
        if total is not None:
            arguments += ["--max-total-tokens", str(total)]
        if self.mode == "capture":
            arguments += [*_CAPTURE_ARGS[self.device], "--context-length", str(self.context_length)]
            tokens = str(self.prefill_tokens)
            arguments += ["--chunked-prefill-size", tokens, "--max-prefill-tokens", tokens]
        else:
            requests = self.serving.max_running_requests
            arguments += [part.format(max_running_requests=requests) for part in _GENERATE_ARGS[self.device]]
        arguments += _DEVICE_ARGS[self.device]
        if self.shape is not None:
            arguments += speculative_arguments(self.drafter, self.shape)
        return tuple(override(arguments, self.serving.engine_args))

    @property
    def max_total_tokens(self) -> int | None:
        """KV cache size in tokens, None where SGLang decides by the GPU's memory."""
        if self.serving.max_total_tokens is not None or self.device == "cuda":
            return self.serving.max_total_tokens
        return max(_CPU_TOTAL_TOKENS, 2 * self.context_length, 2 * self.prefill_tokens)

    @property
    def _max_running_requests(self) -> int:
        return most_samples(self.prefill_tokens) if self.mode == "capture" else self.serving.max_running_requests

    @property
    def context_length(self) -> int:
        """Longest sequence the server takes; a capture server takes whole samples, up to the target's last position."""
        longest = int(self.serving.flags.get("context-length") or self.model.get("max_position_embeddings") or 2048)
        if self.mode == "capture" and self.max_sample_tokens is not None:
            return min(longest, self.max_sample_tokens) + _CONTEXT_HEADROOM
        return longest

    @property
    def gpus(self) -> tuple[int, int]:
        """Return how many GPUs the server takes, and the number of the first among the visible ones."""
        return self.serving.tensor_parallel, int(self.serving.flags.get("base-gpu-id") or 0)

    @property
    def _hidden_size(self) -> int:
        return int(self.model.get("hidden_size") or _SMALLEST_SHARED_WIDTH)

    @property
    def prefill_bytes(self) -> int:
        """Return the most bytes of states that one prefill of a capture server leaves, a whole long sample included."""
        tokens = max(self.prefill_tokens, self.max_sample_tokens or 0)
        return tokens * feature_bytes_per_token(self._hidden_size, len(self.aux_layers), self.dtype)

    def environment(self, threads: int, spool: Path | None = None) -> dict[str, str]:
        """Return the variables this plan needs beside the caller's own; `threads` is an upper bound on a CPU."""
        values = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        # SGLang renames its processes; their environment must stay readable for whoever looks for leftovers.
        values["SPT_NOENV"] = "1"
        if self.device == "cpu":
            values |= {
                "SGLANG_USE_CPU_ENGINE": "1",
                plugin.CPU_SITE: "1",
                "TORCHDYNAMO_DISABLE": "1",
                "OMP_NUM_THREADS": str(threads if self._hidden_size >= _SMALLEST_SHARED_WIDTH else 1),
                # SGLang then imports these models first, and all others only for a class that is not among them.
                "SGLANG_EXTERNAL_MODEL_PACKAGE": "eagle3_models",
                "CUDA_VISIBLE_DEVICES": "",
                "PYTHONPATH": os.pathsep.join(filter(None, (str(CPU_SITE), os.environ.get("PYTHONPATH")))),
            }
        if self.pretended_length is not None:
            # SGLang's own switch: drafts are made and verified, and so many tokens are taken whatever was right.
            values["SGLANG_SIMULATE_ACC_LEN"] = f"{self.pretended_length:g}"
        if spool is not None:
            values |= {
                plugin.CAPTURE_DIR: str(spool),
                plugin.CAPTURE_LAYERS: ",".join(map(str, self.aux_layers)),
                # A sample may fill the target's context to the last position.
                "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
            }
        return values


def _device(serving: ServingConfig, dtype: str) -> Device:
    """Return where the server runs.

    Raises:
        EngineArgsError: it cannot run there in this precision.
    """
    device = resolve_device(serving.device)
    if device == "cuda" and dtype == "float32":
        # Seen with 0.5.17: "rmsnorm ... failed to dispatch data type Float", a minute into the start.
        raise EngineArgsError(
            "target.dtype is float32, but SGLang's kernels for GPUs know bfloat16 and float16 alone; set "
            "target.dtype to bfloat16, or serving.device to cpu"
        )
    return device


def check_drafter(drafter: Path, context_length: int) -> None:
    """Refuse a drafter that SGLang would load and not use as meant.

    Raises:
        EngineArgsError: it is of another class than the algorithm EAGLE3 serves, or ends before the server's context.
    """
    config = read_model_config(drafter)
    classes = config["architectures"] or []
    if not set(classes) & EAGLE3_CLASSES:
        raise EngineArgsError(
            f"{drafter}/config.json: architectures: expected {' or '.join(sorted(EAGLE3_CLASSES))} for the algorithm "
            f"EAGLE3, found {list(classes)}: SGLang would skip a layer without a word where widths agree; rewrite it "
            "with eagle3 remap --to sglang"
        )
    positions = int(config.get("max_position_embeddings") or 2048)
    if positions < context_length:
        raise EngineArgsError(
            f"{drafter}/config.json: max_position_embeddings: expected the {context_length} positions the server "
            f"takes or more, found {positions}, beyond which drafting fails; rewrite it with eagle3 remap --target, or "
            f"set context-length to {positions} in serving.engine_args"
        )


def speculative_arguments(drafter: Path | None, shape: DraftShape) -> list[str]:
    """Return the five flags of EAGLE-3; the three numbers are always given together, as SGLang asserts."""
    return [
        "--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(drafter),
        "--speculative-num-steps", str(shape.num_steps), "--speculative-eagle-topk", str(shape.topk),
        "--speculative-num-draft-tokens", str(shape.num_draft_tokens),
    ]  # fmt: skip


def read_model_config(target: Path) -> Mapping[str, Any]:
    """Return the target's config.json, its text part for a multimodal one.

    Raises:
        EngineArgsError: no readable config.json.
    """
    path = target / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineArgsError(
            f"{path}: expected the target's configuration, found {error}; check target.model"
        ) from error
    text: Mapping[str, Any] = config.get("text_config") or config
    return {**text, "architectures": config.get("architectures", [])}
