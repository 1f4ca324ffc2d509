"""How much arithmetic training needs, and how much a device does when it multiplies matrices and nothing else.

N tokens, R chains, K TTT steps, D width, U draft vocab, s supervised tokens of a sample.
"""

from __future__ import annotations

import math
import time

import torch

from eagle3_core.data.batches import Row
from eagle3_core.train.job import TrainJob


def useful_flops(job: TrainJob, row: Row) -> float:
    """Return what a packed row needs: three products per matrix and chain step, attention, the teacher's on U.

    A frozen head has two; fc, which passes no gradient on, too. The target's whole head is not counted.
    """
    sizes, K = job.sizes, job.training.ttt_steps
    D, U, wide = sizes.hidden_size, sizes.draft_vocab_size, sizes.num_heads * sizes.head_dim
    narrow = sizes.num_kv_heads * sizes.head_dim
    lengths, supervised = ([counts[sample] for sample in row] for counts in (job.order.lengths, job.supervised))
    tokens, chains = sum(lengths), sum(supervised)
    head = D * U * (1.0 if job.train_lm_head else 2 / 3)
    per_chain_step = D * (wide + 2 * narrow) + wide * D + 3 * D * sizes.intermediate_size + head
    fuse = len(sizes.aux_layers) * D * D * 2 / 3
    once = tokens * (fuse + D * (wide + 4 * narrow)) + chains * D * U / 3
    pairs = sum(s * (length - s / 2) for length, s in zip(lengths, supervised, strict=True))
    return 6.0 * (K * chains * per_chain_step + once) + 12.0 * wide * pairs * K


def matmul_flops_per_s(device: torch.device) -> float:
    """Return what one large product reaches on `device`: bfloat16 on a GPU, float32 and per CPU second on a CPU."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a = torch.randn(size, size, device=device, dtype=dtype)
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    best = math.inf
    for _ in range(6):
        began = clock()
        float((a @ a)[0, 0])
        best = min(best, clock() - began)
    return 2 * size**3 / best
