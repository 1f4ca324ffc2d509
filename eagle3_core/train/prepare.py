"""Build a TrainJob from artifacts, and write the final files from its best checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from eagle3_core.data.features import FeatureSet
from eagle3_core.errors import TargetError
from eagle3_core.identity import read_config, resolve_target, target_fingerprint
from eagle3_core.model.architecture import CONFIG_FILE, DrafterArchitecture
from eagle3_core.model.target_weights import read_target_weights
from eagle3_core.storage import ObjectStore, load
from eagle3_core.train.checkpoint import PARAMETERS, TrainState
from eagle3_core.train.job import TrainJob
from eagle3_core.train.request import TrainRequest
from eagle3_core.train.start import champion_weights
from eagle3_core.train.trackers import METRICS_FILE, metrics_text
from eagle3_core.vocab import VocabMap

VOCAB_FILE = "vocab.safetensors"
VALIDATION_FILE = "validation.json"


def build_job(request: TrainRequest, store: ObjectStore) -> TrainJob:
    """Open features, draft vocabulary and target.

    Raises:
        TargetError: the target is another one than the features were captured from.
    """
    features = FeatureSet.open(store, request.feature_set)
    directory = resolve_target(request.run)
    identity = target_fingerprint(directory)
    if features.target.get("sha256") != identity.sha256:
        parts = ", ".join(identity.difference(features.target)) or "all parts"
        raise TargetError(f"{directory}: not the target the features were captured from ({parts} differ); recapture")
    maps = load_file(load(store, request.vocab_map).verified_path(VOCAB_FILE))
    vocab = VocabMap.from_offsets(maps["d2t"].tolist(), maps["t2d"].tolist())
    sizes = DrafterArchitecture.for_target(
        read_config(directory), request.run.drafter, aux_layers=features.aux_layers,
        draft_vocab_size=len(vocab.target_ids), target_sha256=identity.sha256,
    )  # fmt: skip
    weights = read_target_weights(directory)
    if tuple(weights.embedding.shape) != (sizes.vocab_size, sizes.hidden_size):
        found = tuple(weights.embedding.shape)
        raise TargetError(f"{directory}: embedding {found} is not config.json's {sizes.vocab_size, sizes.hidden_size}")
    run = request.run
    head = weights.head[torch.tensor(vocab.target_ids)]
    start = champion_weights(run, store, sizes, vocab, VOCAB_FILE, head)
    return TrainJob(
        run.training.of_start(warm=start is not None), run.evaluation, sizes, features, weights, vocab.target_ids,
        run.drafter.train_lm_head, start,
    )  # fmt: skip


def write_final(
    directory: Path, sizes: DrafterArchitecture, parameters: Mapping[str, torch.Tensor], state: TrainState
) -> None:
    """Write drafter, sizes, metrics and validation of a finished run."""
    assert state.best is not None
    save_file(dict(parameters), directory / PARAMETERS)
    (directory / CONFIG_FILE).write_text(sizes.model_dump_json(indent=1), encoding="utf-8")
    (directory / METRICS_FILE).write_text(metrics_text(state.metrics), encoding="utf-8")
    report = {"step": state.best.step, **state.best.report}
    (directory / VALIDATION_FILE).write_text(json.dumps(report, indent=1, allow_nan=False), encoding="utf-8")
