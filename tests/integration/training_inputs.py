"""A root with all that the train stage reads: a tiny target, features of a text that can be learnt, a draft vocab."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save_file

from eagle3_core.artifacts import Kind, Ref
from eagle3_core.config import RunConfig
from eagle3_core.data.encoding import Encoding, num_label_rows
from eagle3_core.data.features import write_feature_set
from eagle3_core.data.shards import FEATURES, ShardWriter
from eagle3_core.identity import target_fingerprint
from eagle3_core.storage import commit, open_store
from eagle3_core.vocab import choose

V, U, D, LAYERS = 48, 32, 16, 8
AUX = (1, 3, 4)
ENCODING = Encoding(dtype="float32", fp8="none", last_rows="labels", num_aux=3, hidden_size=D)


@dataclass(frozen=True)
class TrainingInputs:
    """A root, and what `python -m eagle3_core train` is called with."""

    root: Path
    run_key: str
    inputs: dict[str, Ref]

    def arguments(self) -> list[str]:
        inputs = {name: ref.model_dump(mode="json") for name, ref in self.inputs.items()}
        return ["train", "--root", str(self.root), "--run", self.run_key, "--inputs", json.dumps(inputs)]


def write_target(directory: Path) -> torch.Tensor:
    """Write a target of which only the ends are real; return its head [V, D]."""
    generator = torch.Generator().manual_seed(1)
    head = torch.randn(V, D, generator=generator)
    directory.mkdir(parents=True)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": D, "intermediate_size": 24,
              "num_hidden_layers": LAYERS, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
              "vocab_size": V, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
              "tie_word_embeddings": False, "eos_token_id": 2}  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{}")
    save_file({"model.embed_tokens.weight": torch.randn(V, D, generator=generator), "lm_head.weight": head,
               "model.norm.weight": torch.ones(D)}, directory / "model.safetensors")  # fmt: skip
    return head


def make_inputs(base: Path, *, nproc: int = 2, **training: object) -> TrainingInputs:
    """Write target, run configuration, shard, feature set and draft vocabulary below `base`."""
    head = write_target(base / "target")
    identity = target_fingerprint(base / "target")
    store = open_store(str(base / "root"))
    settings = {"learning_rate": 3e-3, "epochs": 30, "batch_tokens": 192, "row_tokens": 96, "ttt_steps": 3,
                "precision": "float32", "validations": 3, "checkpoint_every_s": 0.2, "nproc": nproc,
                **training}  # fmt: skip
    run = RunConfig.parse(
        {
            "target": {"model": str(base / "target"), "dtype": "float32"},
            "data": {"prompts": "demo"},
            "drafter": {"draft_vocab_size": U},
            "training": settings,
            "evaluation": {"shapes": [{"num_steps": 4, "topk": 1, "num_draft_tokens": 5}], "primary": "4/1/5"},
            "serving": {"device": "cpu"},
        },
        "test",
    )
    store.write_bytes("runs/test.json", run.model_dump_json().encode())
    staging = base / "staging"
    samples = _samples(head)
    shard, checksums = _commit_shard(store, staging, samples)
    columns = {
        "length": [len(ids) for ids, *_ in samples],
        "shard": [0 for _ in samples],
        "supervised": [len(ids) - 3 for ids, *_ in samples],
        "label_rows": [num_label_rows(len(ids), len(ids) - 3) for ids, *_ in samples],
        "held_out": [number % 8 == 0 for number in range(len(samples))],
        "domain": [0 for _ in samples],
        "checksums": checksums,
    }
    staging.mkdir(exist_ok=True)
    values = {"aux_layers": list(AUX), "target": identity.model_dump(),
              "engine": {}, "domains": ["test"], "sample_ids": [f"s{number}" for number in range(len(samples))],
              "shards": [{"key": shard.key, "manifest_sha256": shard.manifest_sha256}]}  # fmt: skip
    write_feature_set(staging, ENCODING, columns, values)
    features = commit(store, "seal/test", staging, Kind.FEATURE_SET)
    vocab = choose({token: V - token for token in range(V)}, [2], U, V)
    save_arrays({"d2t": np.array(vocab.d2t), "t2d": np.array(vocab.t2d)}, staging / "vocab.safetensors")
    maps = commit(store, "build_vocab/test", staging, Kind.VOCAB_MAP)
    return TrainingInputs(base / "root", "runs/test.json", {"feature_set": features, "vocab_map": maps})


def _samples(head: torch.Tensor) -> list[tuple[list[int], torch.Tensor, torch.Tensor]]:
    """Return ids, aux and last hidden states of sequences in which every token has one successor."""
    generator = torch.Generator().manual_seed(2)
    successor, states = torch.randperm(V, generator=generator), torch.randn(V, D, generator=generator)
    samples = []
    for number in range(48):
        ids = [number]
        for _ in range(12 + 5 * (number % 4)):
            ids.append(int(successor[ids[-1]]))
        aux = states[torch.tensor(ids)].repeat(1, 3) + 0.1 * torch.randn(len(ids), 3 * D, generator=generator)
        samples.append((ids, aux, 2 * head[successor[torch.tensor(ids)]]))
    return samples


def _commit_shard(store, staging: Path, samples) -> tuple[Ref, list[list[int]]]:
    staging.mkdir()
    lengths = [len(ids) for ids, *_ in samples]
    labels = sum(num_label_rows(length, length - 3) for length in lengths)
    with ShardWriter(staging / FEATURES, ENCODING, sum(lengths), labels) as writer:
        for ids, aux, last in samples:
            writer.append(ids, len(ids) - 3, aux, last)
        sums = [column for _, column in sorted(writer.checksums().items())]
    checksums = [[int(value, 16) for value in row] for row in zip(*sums, strict=True)]
    return commit(store, "capture/test/00000", staging, Kind.SHARD), checksums
