# ruff: noqa: T201, TID253 - a program, and a heavy one
"""Time the training step on random data: `python benchmarks/train_step.py --setting demo`.

Prints ms per step, tokens per second (every token of a row counts, with a loss or without), useful FLOP/s against a
matmul measured in the same process, peak memory, and where the milliseconds of a step go (two more steps under
PyTorch's profiler; `--profile` adds its own table). The first epoch asks the target's whole head once per sample; later
ones remember. Under torchrun every rank has rows of its own and rank 0 prints the sum:

torchrun --standalone --nproc-per-node 2 benchmarks/train_step.py --setting S --device cuda --precision bfloat16
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from eagle3_core.config import DraftShape, EvaluationConfig, TrainingConfig
from eagle3_core.data.features import FeatureSample
from eagle3_core.model.architecture import DrafterArchitecture
from eagle3_core.model.latent_sizes import LatentSizes
from eagle3_core.model.target_weights import TargetWeights
from eagle3_core.train.distributed import Ranks
from eagle3_core.train.flops import matmul_flops_per_s, useful_flops
from eagle3_core.train.job import TrainJob
from eagle3_core.train.learner import Learner
from eagle3_core.train.loader import batches


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
    mla: LatentSizes | None = None


SETTINGS = {
    "demo": Setting(192, 6, 2, 32, 512, 2048, 1024, 10000.0, 230, 512, 1024, 2048),
    "S": Setting(4096, 32, 8, 128, 14336, 128256, 32000, 500000.0, 2350, 8192, 8192, 8192),
    "K": Setting(7168, 64, 8, 128, 18432, 163840, 32000, 50000.0, 2350, 8192, 8192, 8192),
    "L": Setting(
        7168,
        64,
        64,
        192,
        18432,
        163840,
        32000,
        50000.0,
        2350,
        8192,
        8192,
        8192,
        LatentSizes(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
    ),
}
PROMPT_SHARE = 0.35
DOCUMENTS = 512
WARM_UP, PROFILED = 4, 2
KINDS = {
    "collectives": ("nccl", "c10d::", "gloo:"),
    "attention": ("flash", "fmha", "attention"),
    "AdamW": ("adam",),
    "matrix products": ("gemm", "nvjet", "cutlass", "::mm", "addmm", "::bmm", "xmma"),
    "copies": ("memcpy", "memset", "copy", "zero_", "fill", "cat", "index"),
    "head and loss": ("diverge",),
    "between products": ("triton", "elementwise", "reduce", "softmax", "norm", "mul", "add"),
}
"""Words in the names of kernels and operators; the first kind that has one counts."""


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
        num_kv_heads=setting.kv_heads, head_dim=setting.head_dim, mla=setting.mla, rms_norm_eps=1e-5,
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


def measure(setting: Setting, arguments: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Run and time steps of one row a rank, through the loader training uses."""
    device = ranks.device
    job = make_job(setting, arguments.ttt_steps, arguments.precision, not arguments.freeze_head)
    learner = Learner.of(job, ranks)
    rows = [row for step in job.order.epoch(0) for row in step]
    mine = rows[ranks.rank :: ranks.world]
    warm_up, mine = mine[:WARM_UP], mine[WARM_UP : WARM_UP + arguments.steps]
    ahead = batches(job.features, itertools.chain(warm_up, mine * 3), device, job.dtype)
    norms: list[float] = []

    def timed(count: int) -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(count):
            learner.sums.clear()
            learner.accumulate(next(ahead))
            learner.update(1e-4)
            norms.append(learner.sums.read()["norm"])
        return time.perf_counter() - wall, time.process_time() - cpu

    compiling, _ = timed(WARM_UP)
    first, _ = timed(len(mine))
    wall, cpu = timed(len(mine))
    norm = norms[-1]
    with torch.profiler.profile() as profile:
        timed(PROFILED)
    if arguments.profile and ranks.leads:
        key = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
        print(profile.key_averages().table(sort_by=key, row_limit=60, max_name_column_width=70))
    lengths = list(job.features.lengths)
    sums = torch.tensor([sum(lengths[sample] for row in mine for sample in row),
                         sum(useful_flops(job, row) for row in mine), matmul_flops_per_s(device)],
                        dtype=torch.float64, device=device)  # fmt: skip
    ranks.sum(sums)
    tokens, work, peak = sums.tolist()
    on_cpu = {"mfu_percent": 100 * work / cpu / peak, "tokens_per_cpu_s": tokens / cpu, "peak_gib": resident_gib()}
    on_gpu = {"mfu_percent": 100 * work / wall / peak, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}
    return {"ranks": ranks.world, "ms_per_step": 1e3 * wall / len(mine), "tokens_per_s": tokens / wall,
            "first_epoch_tokens_per_s": tokens / first, "tokens_per_step": tokens / len(mine), "compile_s": compiling,
            "gflop_per_step": work / len(mine) / 1e9, "matmul_gflops": peak / 1e9,
            **(on_gpu if device.type == "cuda" else on_cpu), "last_norm": norm,
            "breakdown_ms": breakdown(profile, device, 1e3 * wall / len(mine))}  # fmt: skip


def resident_gib() -> float:
    """Return the most memory this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def breakdown(profile: torch.profiler.profile, device: torch.device, step_ms: float) -> dict[str, float]:
    """Return the milliseconds a step spends in each kind of kernel (on a CPU: operator), and on a GPU in none."""
    kind = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    found = dict.fromkeys((*KINDS, "other"), 0.0)
    for event in profile.key_averages():
        # Annotations of a GPU's time span kernels that are counted themselves.
        annotation = getattr(event, "is_user_annotation", False)
        if device.type == "cuda" and (annotation or event.device_type.name != "CUDA"):
            continue
        name = event.key.lower()
        found[next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "other")] += (
            getattr(event, kind) / 1e3 / PROFILED
        )
    if device.type == "cuda":
        # Collectives run beside the rest; what remains of the step no kernel filled.
        found["idle"] = max(0.0, step_ms - sum(found.values()))
    return {name: round(value, 2) for name, value in found.items()}


def step_arguments(described: str | None, *, ttt_steps: int, steps: int) -> argparse.ArgumentParser:
    """Return a parser of what every benchmark of steps is told."""
    parser = argparse.ArgumentParser(description=described, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=SETTINGS, default="demo")
    parser.add_argument("--ttt-steps", type=int, default=ttt_steps)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    return parser


def main() -> None:
    """Parse, measure, print one JSON object."""
    parser = step_arguments(__doc__, ttt_steps=7, steps=8)
    parser.add_argument("--document", type=int, help="let every document have so many tokens, and a row of its own")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--freeze-head", action="store_true")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    ranks = Ranks.join(arguments.device, 300.0) if "RANK" in os.environ else Ranks.alone(arguments.device)
    setting, size = SETTINGS[arguments.setting], arguments.document
    if size:
        setting = replace(setting, mean_tokens=size, longest=size, row_tokens=size, batch_tokens=size)
    figures = measure(setting, arguments, ranks)
    if ranks.leads:
        print(json.dumps({name: value if isinstance(value, dict) else round(value, 3 if name == "last_norm" else 1)
                          for name, value in figures.items()}))  # fmt: skip
    ranks.leave()


if __name__ == "__main__":
    main()
