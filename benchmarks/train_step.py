# ruff: noqa: T201, TID253 - a program, and a heavy one
"""Time the training step on random data: `python benchmarks/train_step.py --setting demo`.

Prints ms per step, tokens per second (wall and per CPU second), model FLOP/s against a matmul measured in the same
process, and peak memory on a GPU. `--profile` adds PyTorch's own table of operators.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass

import torch

from eagle3_core.config import DraftShape, EvaluationConfig, TrainingConfig
from eagle3_core.data.batches import Packing, pack, read_batch
from eagle3_core.data.features import FeatureSample
from eagle3_core.model.architecture import DrafterArchitecture
from eagle3_core.model.target_weights import TargetWeights
from eagle3_core.train.distributed import Ranks
from eagle3_core.train.job import TrainJob
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
}
PROMPT_SHARE = 0.35


class RandomFeatures:
    """Enough random samples for a step."""

    def __init__(self, setting: Setting, seed: int = 0) -> None:
        """Draw lengths until a step is full."""
        generator = torch.Generator().manual_seed(seed)
        mu = math.log(setting.mean_tokens) - 0.8**2 / 2
        self._setting, self._generator = setting, generator
        self.lengths: list[int] = []
        while sum(self.lengths) < setting.batch_tokens:
            drawn = math.exp(mu + 0.8 * float(torch.randn((), generator=generator)))
            self.lengths.append(int(min(max(drawn, 32), setting.longest)))
        self.held_out, self.sample_ids = [False] * len(self.lengths), [str(i) for i in range(len(self.lengths))]
        self.supervised = [length - int(length * PROMPT_SHARE) for length in self.lengths]

    def read(self, index: int) -> FeatureSample:
        """Return random states of the right shape."""
        length, setting = self.lengths[index], self._setting
        ids = torch.randint(0, setting.vocab, (length,), generator=self._generator)
        states = torch.randn(length, 4 * setting.hidden, generator=self._generator)
        mask = torch.arange(length) >= int(length * PROMPT_SHARE)
        return FeatureSample(ids, mask, states[:, setting.hidden :], states[:, : setting.hidden])


def make_job(setting: Setting, ttt_steps: int, precision: str, train_lm_head: bool) -> TrainJob:
    """Return a job over random features and a random target."""
    sizes = DrafterArchitecture(
        hidden_size=setting.hidden, intermediate_size=setting.ffn, num_heads=setting.heads,
        num_kv_heads=setting.kv_heads, head_dim=setting.head_dim, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": setting.rope_theta},
        max_position_embeddings=setting.longest, vocab_size=setting.vocab, draft_vocab_size=setting.draft_vocab,
        aux_layers=(0, 1, 2), target_sha256="0" * 64, target_class="LlamaForCausalLM",
    )  # fmt: skip
    training = TrainingConfig(batch_tokens=setting.batch_tokens, row_tokens=setting.row_tokens, ttt_steps=ttt_steps,
                              precision=precision)  # fmt: skip
    head = torch.randn(setting.vocab, setting.hidden) * 0.05
    head[setting.draft_vocab :] *= 0.1  # so that nearly every greedy token is in the draft vocabulary
    head = head.bfloat16().float()  # as targets are stored
    target = TargetWeights(torch.randn(setting.vocab, setting.hidden), head, torch.ones(setting.hidden))
    evaluation = EvaluationConfig(shapes=(DraftShape.from_name("7/1/8"),))
    ids = tuple(range(setting.draft_vocab))
    return TrainJob(training, evaluation, sizes, RandomFeatures(setting), target, ids, train_lm_head)


def flops(job: TrainJob) -> float:
    """Return the model FLOPs of one step as done here: a row without a loss costs only fc, a key and a value."""
    sizes, K = job.sizes, job.training.ttt_steps
    D, U, wide = sizes.hidden_size, sizes.draft_vocab_size, sizes.num_heads * sizes.head_dim
    narrow = sizes.num_kv_heads * sizes.head_dim
    rows, chains = sum(job.features.lengths), sum(job.features.supervised)
    per_chain_step = D * (wide + 2 * narrow) + wide * D + 3 * D * sizes.intermediate_size + D * U
    once = rows * (3 * D * D + D * (wide + 2 * narrow)) + chains * D * sizes.vocab_size / 3
    pairs = sum(s * (length - s / 2) for length, s in zip(job.features.lengths, job.features.supervised, strict=True))
    return 6.0 * (K * chains * per_chain_step + once) + 12.0 * wide * pairs * K


def measure(setting: Setting, arguments: argparse.Namespace) -> dict[str, float | str]:
    """Run and time the steps."""
    device = torch.device(arguments.device)
    job = make_job(setting, arguments.ttt_steps, arguments.precision, not arguments.freeze_head)
    drafter, head, draft_to_target = job.build(device)
    optimizer, sums = AdamW(drafter, job.training), StepSums(drafter, arguments.ttt_steps, device)
    packing = Packing(setting.row_tokens, setting.batch_tokens)
    rows = pack(job.features.lengths, range(len(job.features.lengths)), packing.row_tokens)
    batches = [read_batch(job.features, row, device) for row in rows]

    def step() -> None:
        sums.clear()
        for batch in batches:
            accumulate(job, drafter, batch, head, draft_to_target, sums)
        sums.finish(Ranks.alone(), 1.0)
        optimizer.step(sums.gradients, 1e-4)

    for _ in range(2):
        step()
    times = []
    for _ in range(arguments.steps):
        wall, cpu = time.perf_counter(), time.process_time()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - wall, time.process_time() - cpu))
    if arguments.profile:
        with torch.profiler.profile() as profile:
            step()
        key = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
        print(profile.key_averages().table(sort_by=key, row_limit=25, max_name_column_width=45))
    wall, cpu = sorted(times)[len(times) // 2]
    tokens = sum(job.features.lengths)
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    return {"ms_per_step": 1e3 * wall, "tokens_per_s": tokens / wall, "tokens_per_cpu_s": tokens / cpu,
            "gflop_per_step": flops(job) / 1e9, "gflops_per_cpu_s": flops(job) / cpu / 1e9,
            "matmul_gflops": matmul_gflops(device), "peak_gib": memory}  # fmt: skip


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
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--freeze-head", action="store_true")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    figures = measure(SETTINGS[arguments.setting], arguments)
    print(json.dumps({name: round(value, 1) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
