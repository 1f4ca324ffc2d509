# ruff: noqa: T201, TID253 - a program, and a heavy one
"""Time the training step on random data: `python benchmarks/train_step.py --setting demo`.

Prints ms per step, tokens per second (every token of a row counts, with a loss or without), model FLOP/s against a
matmul measured in the same process, and peak memory on a GPU. The first epoch asks the target's whole head once per
sample; later ones remember. `--profile` adds PyTorch's own table of operators.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from dataclasses import dataclass, replace

import torch

from eagle3_core.config import DraftShape, EvaluationConfig, TrainingConfig
from eagle3_core.data.features import FeatureSample
from eagle3_core.model.architecture import DrafterArchitecture
from eagle3_core.model.matrices import Matrices
from eagle3_core.model.target_weights import TargetWeights
from eagle3_core.train.distributed import Ranks
from eagle3_core.train.job import TrainJob
from eagle3_core.train.labels import Labels
from eagle3_core.train.loader import batches
from eagle3_core.train.loop import accumulate
from eagle3_core.train.optim import AdamW, StepSums


@dataclass(frozen=True)
class Setting:
    """Sizes of a target and its drafter, and of the samples; lengths are lognormal."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    draft_vocab: int
    rope_theta: float
    mean_tokens: int
    longest: int
    row_tokens: int
    batch_tokens: int


SETTINGS = {
    "demo": Setting(192, 6, 2, 32, 512, 2048, 1024, 10000.0, 230, 512, 1024, 2048),
    "S": Setting(4096, 32, 8, 128, 14336, 128256, 32000, 500000.0, 2350, 8192, 8192, 8192),
    "K": Setting(7168, 64, 8, 128, 18432, 163840, 32000, 50000.0, 2350, 8192, 8192, 8192),
}
PROMPT_SHARE = 0.35
DOCUMENTS = 512
WARM_UP = 4


class RandomFeatures:
    """Documents of random states, as stored: bfloat16. Lengths are lognormal, sigma 0.8, clipped, of the mean asked."""

    def __init__(self, setting: Setting, seed: int = 0) -> None:
        """Draw the lengths, and one pool of states that every document is cut from."""
        generator = torch.Generator().manual_seed(seed)
        self._setting, spread = setting, torch.randn(DOCUMENTS, generator=generator)
        low, high = 0.0, 12.0
        for _ in range(60):
            drawn = (((low + high) / 2) + 0.8 * spread).exp().clamp(32, setting.longest)
            low, high = ((low + high) / 2, high) if drawn.mean() < setting.mean_tokens else (low, (low + high) / 2)
        self.lengths = [int(length) for length in drawn]
        self.held_out, self.sample_ids = [False] * DOCUMENTS, [str(index) for index in range(DOCUMENTS)]
        self.supervised = [length - int(length * PROMPT_SHARE) for length in self.lengths]
        count = setting.longest + DOCUMENTS
        self._ids = torch.randint(0, setting.vocab, (count,), generator=generator)
        self._states = torch.randn(count, 4 * setting.hidden, generator=generator).bfloat16()

    def read(self, index: int) -> FeatureSample:
        """Return random states of the right shape."""
        length, rows = self.lengths[index], slice(index, index + self.lengths[index])
        mask = torch.arange(length) >= int(length * PROMPT_SHARE)
        states, width = self._states[rows], self._setting.hidden
        return FeatureSample(self._ids[rows], mask, states[:, width:], states[:, :width])


def make_job(setting: Setting, ttt_steps: int, precision: str, train_lm_head: bool, loss: str = "kl") -> TrainJob:
    """Return a job over random features and a random target."""
    sizes = DrafterArchitecture(
        hidden_size=setting.hidden, intermediate_size=setting.ffn, num_heads=setting.heads,
        num_kv_heads=setting.kv_heads, head_dim=setting.head_dim, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": setting.rope_theta},
        max_position_embeddings=setting.longest, vocab_size=setting.vocab, draft_vocab_size=setting.draft_vocab,
        aux_layers=(0, 1, 2), target_sha256="0" * 64, target_class="LlamaForCausalLM",
    )  # fmt: skip
    training = TrainingConfig(batch_tokens=setting.batch_tokens, row_tokens=setting.row_tokens, ttt_steps=ttt_steps,
                              precision=precision, loss=loss)  # fmt: skip
    torch.manual_seed(1)
    quick = "cuda" if torch.cuda.is_available() else "cpu"  # a large target is a matter of a minute on a CPU
    head = torch.randn(setting.vocab, setting.hidden, device=quick).cpu() * 0.05
    head[setting.draft_vocab :] *= 0.1  # so that nearly every greedy token is in the draft vocabulary
    head = head.bfloat16().float()  # as targets are stored
    target = TargetWeights(
        torch.randn(setting.vocab, setting.hidden, device=quick).cpu(), head, torch.ones(setting.hidden)
    )
    evaluation = EvaluationConfig(shapes=(DraftShape.from_name("7/1/8"),))
    ids = tuple(range(setting.draft_vocab))
    return TrainJob(training, evaluation, sizes, RandomFeatures(setting), target, ids, train_lm_head)


def flops(job: TrainJob, row: tuple[int, ...]) -> float:
    """Return the model FLOPs of one row after the first epoch: a token without a loss costs fc, a key, a value."""
    sizes, K = job.sizes, job.training.ttt_steps
    D, U, wide = sizes.hidden_size, sizes.draft_vocab_size, sizes.num_heads * sizes.head_dim
    narrow = sizes.num_kv_heads * sizes.head_dim
    lengths, supervised = (
        [values[sample] for sample in row] for values in (job.features.lengths, job.features.supervised)
    )
    tokens, chains = sum(lengths), sum(supervised)
    head = D * U * (1.0 if job.train_lm_head else 2 / 3)
    per_chain_step = D * (wide + 2 * narrow) + wide * D + 3 * D * sizes.intermediate_size + head
    once = tokens * (2 * D * D + D * (wide + 4 * narrow)) + chains * D * U / 3
    pairs = sum(s * (length - s / 2) for length, s in zip(lengths, supervised, strict=True))
    return 6.0 * (K * chains * per_chain_step + once) + 12.0 * wide * pairs * K


def measure(setting: Setting, arguments: argparse.Namespace) -> dict[str, float]:
    """Run and time steps of one row each, through the loader training uses."""
    device = torch.device(arguments.device)
    job = make_job(setting, arguments.ttt_steps, arguments.precision, not arguments.freeze_head)
    drafter, head = job.build(device)
    labels = Labels(head, job.dtype)
    optimizer, sums = AdamW(drafter, job.training), StepSums(drafter, arguments.ttt_steps, device)
    drafter.matrices = Matrices(drafter, optimizer.parameters, sums.gradients, job.dtype)
    rows = [row for step in job.order.epoch(0) for row in step]
    warm_up, rows = rows[:WARM_UP], rows[WARM_UP : WARM_UP + arguments.steps]
    ahead = batches(job.features, itertools.chain(warm_up, rows * 3), device, job.dtype)

    def step() -> None:
        sums.clear()
        accumulate(job, drafter, next(ahead), labels, sums)
        sums.finish(Ranks.alone(), 1.0)
        optimizer.step(sums, 1e-4)
        drafter.matrices.refresh()
        sums.read()

    def timed(count: int) -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(count):
            step()
        return time.perf_counter() - wall, time.process_time() - cpu

    compiling, _ = timed(WARM_UP)
    first, _ = timed(len(rows))
    wall, cpu = timed(len(rows))
    if arguments.profile:
        with torch.profiler.profile() as profile:
            timed(2)
        key = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
        print(profile.key_averages().table(sort_by=key, row_limit=60, max_name_column_width=70))
    tokens = sum(job.features.lengths[sample] for row in rows for sample in row)
    work, peak = sum(flops(job, row) for row in rows) / 1e9, matmul_gflops(device)
    on_cpu = {"tokens_per_cpu_s": tokens / cpu, "gflops_per_cpu_s": work / cpu}
    on_gpu = {"mfu_percent": 100 * work / wall / peak, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}
    return {"ms_per_step": 1e3 * wall / len(rows), "tokens_per_s": tokens / wall,
            "first_epoch_tokens_per_s": tokens / first, "tokens_per_step": tokens / len(rows),
            "compile_s": compiling, "gflop_per_step": work / len(rows), "matmul_gflops": peak,
            **(on_gpu if device.type == "cuda" else on_cpu)}  # fmt: skip


def matmul_gflops(device: torch.device) -> float:
    """Return what one large product reaches in this process; CPU seconds count on a CPU."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a = torch.randn(size, size, device=device, dtype=dtype)
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    best = math.inf
    for _ in range(6):
        began = clock()
        float((a @ a)[0, 0])
        best = min(best, clock() - began)
    return 2 * size**3 / best / 1e9


def main() -> None:
    """Parse, measure, print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=SETTINGS, default="demo")
    parser.add_argument("--ttt-steps", type=int, default=7)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--document", type=int, help="let every document have so many tokens, and a row of its own")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--freeze-head", action="store_true")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    setting, size = SETTINGS[arguments.setting], arguments.document
    if size:
        setting = replace(setting, mean_tokens=size, longest=size, row_tokens=size, batch_tokens=size)
    figures = measure(setting, arguments)
    print(json.dumps({name: round(value, 1) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
