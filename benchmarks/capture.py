# ruff: noqa: T201, TID253 - a program, and a heavy one
"""Compare the capture stage with the engine's own prefills: `python benchmarks/capture.py`.

One server; pass by pass the same random samples go first through its plain prefills (all in one request, so that it
forms batches of `--prefill-tokens` itself; no states are taken), then through the whole stage: prefills, spool, shards,
checksums, fsync, manifests. Prints one JSON line with the medians of both and of their ratio.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from synthetic import Pipeline, answers

from eagle3_core.config.data import CaptureConfig
from eagle3_core.engine.client import EngineClient
from eagle3_core.engine.launch import LaunchPlan
from eagle3_core.engine.server import SglangServer
from eagle3_core.identity import resolve_target


class Kept:
    """A started server in the place of the one the stage would start; it works ahead for ever."""

    def __init__(self, server: SglangServer) -> None:
        self.client = server.client

    def of_stage(self, *_arguments: Any) -> Kept:
        """Return this one."""
        return self

    def __enter__(self) -> Kept:
        return self

    def __exit__(self, *_error: object) -> None:
        return None


def raw(client: EngineClient, samples: list[list[int]], name: str) -> float:
    """Return the tokens a second of the engine's prefills alone."""
    began = time.perf_counter()
    body = {
        "input_ids": samples,
        "rid": [f"{name}.{number}" for number in range(len(samples))],
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
    }
    client._post("/generate", body, name)
    return sum(map(len, samples)) / (time.perf_counter() - began)


def captured(pipeline: Pipeline) -> float:
    """Return the tokens a second of the stage, over all shards."""
    pipeline.stage("plan_capture")
    began = time.perf_counter()
    pipeline.stage("capture", 0)
    seconds = time.perf_counter() - began
    found = len(list((pipeline.root / "capture").glob("*/*/manifest.json")))
    if found != len(pipeline.plan.shards):
        raise SystemExit(f"expected {len(pipeline.plan.shards)} shards, found {found}")
    return sum(shard.tokens for shard in pipeline.plan.shards) / seconds


def main() -> None:
    """Parse, measure, print one JSON object."""
    defaults = CaptureConfig()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="demo")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--samples", type=int, default=1500)
    parser.add_argument("--mean-tokens", type=float, default=80.0)
    parser.add_argument("--longest", type=int, default=480)
    parser.add_argument("--shard-tokens", type=int, default=32768)
    parser.add_argument("--prefill-tokens", type=int, default=defaults.prefill_tokens)
    parser.add_argument("--fp8", choices=("none", "aux", "all"), default=defaults.fp8)
    parser.add_argument("--last-rows", choices=("labels", "all"), default=defaults.last_rows)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--engine-args", type=json.loads, default={}, help="further flags of the server, as JSON")
    parser.add_argument("--root", type=Path, help="where shards are written; a fresh directory below it is used")
    arguments = parser.parse_args()
    overrides = {
        "target.model": arguments.target, "target.dtype": arguments.dtype, "capture.dtype": arguments.dtype,
        "capture.shard_tokens": arguments.shard_tokens, "capture.prefill_tokens": arguments.prefill_tokens,
        "capture.fp8": arguments.fp8, "capture.last_rows": arguments.last_rows, "serving.threads": arguments.threads,
        "serving.max_total_tokens": max(24576, 2 * arguments.prefill_tokens),
        "serving.engine_args": arguments.engine_args, "data.max_sample_tokens": arguments.longest,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(dir=arguments.root) as scratch:
        print(json.dumps(measure(Path(scratch), overrides, arguments)))


def measure(scratch: Path, overrides: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the figures."""
    probe = Pipeline.with_corpus(scratch / "probe", overrides, [])
    target, run = resolve_target(probe.run), probe.run
    vocab = json.loads((target / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    corpus = answers(arguments.samples, arguments.mean_tokens, arguments.longest, vocab)
    samples = [answer.input_ids + answer.output_ids for answer in corpus]
    first = Pipeline.with_corpus(scratch / "first", overrides, corpus)
    first.stage("plan_capture")
    plan = first.plan
    launch = LaunchPlan.capture(
        target, plan.target_dtype, run.serving, plan.aux_layers, plan.max_sample_tokens, plan.prefill_tokens
    )
    plain, whole = [], []
    with (
        SglangServer(launch, log=scratch / "log", threads=arguments.threads) as server,
        server.client() as client,
        mock.patch("eagle3_core.engine.server.SglangServer", Kept(server)),
    ):
        raw(client, samples[:64], "warm")
        for number in range(arguments.passes):
            plain.append(raw(client, samples, f"raw-{number}"))
            with contextlib.redirect_stdout(io.StringIO()):
                root = scratch / f"pass-{number}"
                whole.append(captured(Pipeline.with_corpus(root, overrides, corpus)))
                shutil.rmtree(root)
            print(f"pass {number}: {plain[-1]:,.0f} plain, {whole[-1]:,.0f} captured", file=sys.stderr, flush=True)
    tokens = sum(map(len, samples))
    return {
        "raw_tokens_per_s": round(statistics.median(plain)),
        "capture_tokens_per_s": round(statistics.median(whole)),
        "ratio": round(statistics.median(b / a for a, b in zip(plain, whole, strict=True)), 3),
        "ratios": [round(b / a, 3) for a, b in zip(plain, whole, strict=True)],
        "tokens": tokens, "samples": len(samples), "shards": len(plan.shards),
        "bytes_per_token": round(plan.bytes / tokens, 1),
        "mb_per_s": round(statistics.median(whole) * plan.bytes / tokens / 1e6, 1),
        "device": launch.device, "torch": torch.__version__,
    }  # fmt: skip


if __name__ == "__main__":
    main()
