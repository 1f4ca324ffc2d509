# ruff: noqa: T201, TID253 - a program, and a heavy one
"""Compare the store with one file a sample, on the same disk: `python benchmarks/store.py --root DIRECTORY`.

Random states in bfloat16 go through the capture stage (with an engine that only hands them over), seal, the feature
set, which compares every sample with its checksums, and a verification of every byte; and beside that into one
safetensors file a sample with an fsync each, indexed by opening every file, compared with nothing. Files are dropped
from the page cache before they are read. Prints one JSON line; GB is 1e9 bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from synthetic import Pipeline, answers

from eagle3_core.artifacts import Kind
from eagle3_core.data.corpus import Answer
from eagle3_core.data.encoding import Encoding
from eagle3_core.data.features import FeatureSet, write_feature_set
from eagle3_core.engine.spool import CapturedSample
from eagle3_core.repair import inspect
from eagle3_core.storage import commit, open_store

LAYERS = 3
Figures = dict[str, float]


class Memory:
    """Stands where SglangServer stands and hands over states that are in memory already."""

    def __init__(self, hidden_size: int, longest: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.aux = torch.randn(longest, LAYERS * hidden_size, generator=generator).bfloat16()
        self.last = torch.randn(longest, hidden_size, generator=generator).bfloat16()

    def of_stage(self, *_arguments: Any) -> Memory:
        """Return this one."""
        return self

    def client(self) -> Memory:
        """Return this one."""
        return self

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *_error: object) -> None:
        return None

    def capture(self, samples: Sequence[Sequence[int]]) -> Iterator[CapturedSample]:
        """Yield the same rows for the same length."""
        for index, ids in enumerate(samples):
            yield CapturedSample(index, torch.tensor(ids), self.aux[: len(ids)], self.last[: len(ids)])


def forget(directory: Path) -> None:
    """Drop the files below a directory from the page cache."""
    for path in directory.rglob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def ours(root: Path, memory: Memory, corpus: list[Answer], arguments: argparse.Namespace) -> Figures:
    """Write, read in order, read at random through the store."""
    overrides = {
        "target.dtype": "bfloat16", "capture.dtype": "bfloat16", "capture.fp8": arguments.fp8,
        "capture.last_rows": arguments.last_rows, "capture.shard_tokens": arguments.shard_tokens,
        "data.max_sample_tokens": 65536,
    }  # fmt: skip
    pipeline = Pipeline.with_corpus(root, overrides, corpus, hidden_size=arguments.hidden_size)
    pipeline.stage("plan_capture")
    with (
        mock.patch("eagle3_core.engine.server.SglangServer", memory),
        mock.patch("eagle3_core.identity.require_target", lambda run, _expected: run.target.model),
        mock.patch("eagle3_core.engine.launch.LaunchPlan.capture", lambda *_arguments: None),
        mock.patch("eagle3_core.engine.backend.spool_on_disk", lambda *_arguments: 0),
    ):
        began = time.perf_counter()
        pipeline.stage("capture", 0)
        written = time.perf_counter() - began
    features = FeatureSet.open(pipeline.store, pipeline.stage("seal"))
    forget(root)
    began = time.perf_counter()
    for sample in range(len(features)):
        touch(vars_of(features.read(sample)))
    read = time.perf_counter() - began
    forget(root)
    began = time.perf_counter()
    for sample in random.Random(0).sample(range(len(features)), len(features)):
        touch(vars_of(features.read(sample)))
    at_random = time.perf_counter() - began
    forget(root)
    began = time.perf_counter()
    findings = inspect(pipeline.store, pipeline.refs[Kind.SHARD_PLAN], lambda _bytes: None)
    verified = time.perf_counter() - began
    if {finding.state for finding in findings} != {"ok"}:
        raise SystemExit(f"expected good shards, found {findings}")
    size, tokens = (
        sum(path.stat().st_size for path in root.glob("capture/*/*/*.safetensors")),
        int(features.lengths.sum()),
    )
    return {
        "write_gb_per_s": size / written / 1e9, "read_gb_per_s": size / read / 1e9,
        "verify_gb_per_s": size / verified / 1e9, "random_samples_per_s": len(features) / at_random,
        "bytes_per_token": size / tokens, "write_tokens_per_s": tokens / written,
    }  # fmt: skip


def vars_of(sample: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a sample."""
    return {name: getattr(sample, name) for name in ("aux_hidden_states", "last_hidden_state", "input_ids")}


def touch(tensors: dict[str, torch.Tensor]) -> None:
    """Read every page of what may only be mapped."""
    for tensor in tensors.values():
        tensor.view(torch.uint8).flatten()[::4096].sum()


def one_file_a_sample(root: Path, memory: Memory, corpus: list[Answer]) -> Figures:
    """Do the same with one file a sample."""
    root.mkdir()
    samples = [answer.input_ids + answer.output_ids for answer in corpus]
    began = time.perf_counter()
    for got in memory.capture(samples):
        path = root / f"{got.index:08d}.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in vars_of(got).items()}, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())
    written = time.perf_counter() - began
    paths = sorted(root.glob("*.safetensors"))
    forget(root)
    began = time.perf_counter()
    for path in paths:
        touch(load_file(path))
    read = time.perf_counter() - began
    forget(root)
    began = time.perf_counter()
    for path in random.Random(0).sample(paths, len(paths)):
        touch(load_file(path))
    at_random = time.perf_counter() - began
    size, tokens = sum(path.stat().st_size for path in paths), sum(map(len, samples))
    return {
        "write_gb_per_s": size / written / 1e9, "read_gb_per_s": size / read / 1e9,
        "random_samples_per_s": len(paths) / at_random, "bytes_per_token": size / tokens,
        "write_tokens_per_s": tokens / written,
    }  # fmt: skip


def open_index(root: Path, count: int) -> float:
    """Return the seconds to open a feature set of so many samples, its files not in the page cache."""
    store, staged, rng = open_store(str(root)), root / "staged", np.random.default_rng(0)
    staged.mkdir(parents=True)
    lengths, per_shard = rng.integers(64, 4096, count).astype(np.int32), 64
    columns: dict[str, Any] = {
        "length": lengths, "supervised": lengths // 2, "label_rows": lengths // 2,
        "shard": np.arange(count) // per_shard, "checksums": rng.integers(0, 1 << 63, (count, 4), dtype=np.uint64),
        "held_out": np.zeros(count, np.bool_), "domain": np.zeros(count, np.int32),
    }  # fmt: skip
    values = {
        "aux_layers": [1, 29, 57], "target": {}, "domains": ["general"],
        "sample_ids": [rng.bytes(12).hex() for _ in range(count)],
        "shards": [
            {"key": f"capture/{'0' * 24}/{number:024x}", "manifest_sha256": f"{number:064x}"}
            for number in range(-(-count // per_shard))
        ],
    }  # fmt: skip
    encoding = Encoding(dtype="bfloat16", fp8="none", last_rows="labels", num_aux=3, hidden_size=7168)
    write_feature_set(staged, encoding, columns, values)
    ref = commit(store, f"seal/{count}", staged, Kind.FEATURE_SET)
    forget(root)
    began = time.perf_counter()
    features = FeatureSet.open(store, ref)
    seconds = time.perf_counter() - began
    if len(features) != count:
        raise SystemExit(f"expected {count} samples, found {len(features)}")
    shutil.rmtree(root)
    return seconds


def open_files(root: Path, count: int) -> float:
    """Return the seconds to index so many files of a few bytes by opening each: nothing else knows their lengths."""
    root.mkdir()
    for number in range(count):
        save_file({"input_ids": torch.zeros(8, dtype=torch.int32)}, root / f"{number:08d}.safetensors")
    forget(root)
    began = time.perf_counter()
    lengths = []
    for path in sorted(root.glob("*.safetensors")):
        with safe_open(path, framework="pt") as tensors:
            lengths.append(tensors.get_slice("input_ids").get_shape()[0])
    seconds = time.perf_counter() - began
    shutil.rmtree(root)
    return seconds


def main() -> None:
    """Parse, measure, print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=160)
    parser.add_argument("--repeats", type=int, default=3, help="of writing and reading; the best of each counts")
    parser.add_argument("--mean-tokens", type=float, default=256.0)
    parser.add_argument("--hidden-size", type=int, default=4096)
    parser.add_argument("--shard-tokens", type=int, default=16384)
    parser.add_argument("--fp8", choices=("none", "aux", "all"), default="none")
    parser.add_argument("--last-rows", choices=("labels", "all"), default="labels")
    parser.add_argument("--index", type=int, nargs="*", default=[37_312, 1_000_000])
    parser.add_argument("--files", type=int, default=37_312, help="files that are made and opened one by one")
    parser.add_argument("--root", type=Path, help="a directory on the disk that is to be measured")
    arguments = parser.parse_args()
    corpus = answers(arguments.samples, arguments.mean_tokens, 16384, 2048)
    memory = Memory(arguments.hidden_size, max(answer.length for answer in corpus))
    with tempfile.TemporaryDirectory(dir=arguments.root) as scratch, contextlib.redirect_stdout(io.StringIO()):
        top = Path(scratch)
        store, files = Figures(), Figures()
        # In turn: a machine gives memory that nobody has touched yet more slowly, whoever asks for it.
        for _ in range(arguments.repeats):
            store = best(store, ours(top / "store", memory, corpus, arguments))
            shutil.rmtree(top / "store")
            files = best(files, one_file_a_sample(top / "files", memory, corpus))
            shutil.rmtree(top / "files")
        opened = {f"{count}": open_index(top / "index", count) for count in arguments.index}
        globbed = {f"{arguments.files}": open_files(top / "many", arguments.files)} if arguments.files else {}
    print(json.dumps({
        "store": rounded(store | {"open_s": opened}), "one_file_a_sample": rounded(files | {"open_s": globbed}),
    }))  # fmt: skip


def best(one: Figures, other: Figures) -> Figures:
    """Return the higher of every figure; bytes a token are the same each time."""
    return {name: max(one.get(name, 0.0), value) for name, value in other.items()}


def rounded(value: Any) -> Any:
    """Return figures of three digits."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    return float(f"{value:.3g}") if value < 1000 else round(value)


if __name__ == "__main__":
    main()
