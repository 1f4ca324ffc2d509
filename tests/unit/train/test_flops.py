"""The FLOPs that MFU counts as useful are those of the products that training makes."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from eagle3_core.train.distributed import Ranks
from eagle3_core.train.flops import attention_flops, matmul_flops_per_s, useful_flops
from eagle3_core.train.learner import Learner
from eagle3_core.train.loader import batches


def in_place(_total, left, right, **_):
    return 2 * left[0] * left[1] * right[1]


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("steps", [1, 5])
def test_useful_flops_are_those_of_the_products(make_job, features, steps, trained):
    job = make_job(ttt_steps=steps)
    job = type(job)(job.training, job.evaluation, job.sizes, features, job.target, job.draft_to_target, trained)
    learner, row = Learner.of(job, Ranks.alone()), job.order.rows(0)[0]
    batch = next(batches(job.features, [row], torch.device("cpu"), job.dtype))
    learner.labels.teach(batch)  # the target's whole head is asked once
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: in_place}) as counter:
        learner.accumulate(batch)
    # The formula counts every answer token as a chain; the last of an answer starts none.
    assert useful_flops(job, row) - attention_flops(job, row) == pytest.approx(counter.get_total_flops(), rel=0.12)
    assert 0 < attention_flops(job, row) < useful_flops(job, row)


def test_the_rate_of_a_product_is_measured():
    assert 1e8 < matmul_flops_per_s(torch.device("cpu")) < 1e14
