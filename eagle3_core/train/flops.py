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

    What reads the token's embedding, and keys and values of the history, is computed once a token. A frozen head has
    two products; fc, which passes no gradient on, too. The target's whole head is not counted.
    """
    sizes, K = job.sizes, job.training.ttt_steps
    D, U = sizes.hidden_size, sizes.draft_vocab_size
    lengths, supervised = ([counts[sample] for sample in row] for counts in (job.order.lengths, job.supervised))
    tokens, chains = sum(lengths), sum(supervised)
    shapes = {name.removeprefix("layer.self_attn."): shape for name, shape in sizes.parameter_shapes().items()
              if name.startswith("layer.self_attn.") and len(shape) == 2}  # fmt: skip
    embedded = {name: rows * D if columns == 2 * D and not name.startswith("o_") else 0
                for name, (rows, columns) in shapes.items()}  # fmt: skip
    carried = {name: rows * columns - embedded[name] for name, (rows, columns) in shapes.items()}
    history = sum(count for name, count in carried.items() if name[0] not in "qo")
    head = D * U * (1.0 if job.train_lm_head else 2 / 3)
    per_chain_step = sum(carried.values()) + 3 * D * sizes.intermediate_size + head
    once = tokens * (len(sizes.aux_layers) * D * D * 2 / 3 + sum(embedded.values()) + history) + chains * D * U / 3
    return 6.0 * (K * chains * per_chain_step + once) + attention_flops(job, row)


def attention_flops(job: TrainJob, row: Row) -> float:
    """Return what every chain's queries need to attend to the history before them, at every step, and its gradient."""
    sizes = job.sizes
    wide = sizes.num_heads * sizes.head_dim + sizes.parameter_shapes()["layer.self_attn.o_proj.weight"][1]
    pairs = sum(job.supervised[sample] * (job.order.lengths[sample] - job.supervised[sample] / 2) for sample in row)
    return 6.0 * wide * pairs * job.training.ttt_steps


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
