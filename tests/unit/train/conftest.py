from __future__ import annotations

from functools import partial

import pytest
import torch

from eagle3_core.config import DraftShape, EvaluationConfig, TrainingConfig
from eagle3_core.data.features import FeatureSample
from eagle3_core.model.architecture import DrafterArchitecture
from eagle3_core.model.target_weights import TargetWeights
from eagle3_core.train.job import TrainJob

V, U, D = 40, 24, 16


class MemoryFeatures:
    """Samples whose next token follows from the last: a drafter can learn them."""

    def __init__(self, count=24, held_out=4, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.successor = torch.randperm(V, generator=generator)
        self.states = torch.randn(V, D, generator=generator)
        self.head = torch.randn(V, D, generator=generator)
        self.samples = []
        for index in range(count):
            ids = [index % V]
            for _ in range(9 + 3 * (index % 5)):
                ids.append(int(self.successor[ids[-1]]))
            tokens = torch.tensor(ids)
            aux = self.states[tokens].repeat(1, 3) + 0.1 * torch.randn(len(ids), 3 * D, generator=generator)
            last = self.head[self.successor[tokens]] * 2
            mask = torch.arange(len(ids)) >= 3
            self.samples.append(FeatureSample(tokens, mask, aux, last))
        self.lengths = [len(sample.input_ids) for sample in self.samples]
        self.supervised = [int(sample.loss_mask.sum()) for sample in self.samples]
        self.held_out = [index >= count - held_out for index in range(count)]
        self.sample_ids = [f"s{index}" for index in range(count)]

    def read(self, index):
        return self.samples[index]


def tiny_job(features, lengths=(64,), **changes):
    sizes = DrafterArchitecture(
        hidden_size=D, intermediate_size=24, num_heads=2, num_kv_heads=1, head_dim=8, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, max_position_embeddings=64, vocab_size=V,
        draft_vocab_size=U, aux_layers=(0, 1, 2), target_sha256="0" * 64, target_class="LlamaForCausalLM",
    )  # fmt: skip
    training = TrainingConfig(**{
        "learning_rate": 3e-3, "epochs": 3, "batch_tokens": 128, "row_tokens": 64, "ttt_steps": 3,
        "precision": "float32", "validations": 2, "checkpoint_every_s": 1e9, "nproc": 1, **changes,
    })  # fmt: skip
    evaluation = EvaluationConfig(shapes=(DraftShape.from_name("2/1/3"), DraftShape.from_name("5/1/6")),
                                  primary="5/1/6", max_new_tokens=lengths)  # fmt: skip
    ids = tuple(sorted({*range(0, V, 2), 1, 3, 5, 7}))[:U]
    target = TargetWeights(features.states, features.head, torch.ones(D))
    return TrainJob(training, evaluation, sizes, features, target, ids)


@pytest.fixture
def features():
    return MemoryFeatures()


@pytest.fixture
def make_job(features):
    return partial(tiny_job, features)
