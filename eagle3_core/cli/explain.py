"""`eagle3 train --explain`: what training a recipe would touch, printed before anything runs."""

from __future__ import annotations

from eagle3_core.checks import aux_layers
from eagle3_core.config import RunConfig
from eagle3_core.identity import read_config, read_target, resolve_target
from eagle3_core.model.architecture import DrafterArchitecture
from eagle3_core.train.explain import explain
from eagle3_core.vocab import check_draft_vocab_size

NOT_HASHED = "0" * 64
"""Stands for the target's fingerprint, which would cost a read of all its weights and is not shown."""


def explained(run: RunConfig) -> str:
    """Return the table of every tensor of the drafter: shape, trained or frozen, where its first values come from.

    Raises:
        TargetError: the target cannot be read or is of a kind that is not supported.
        ConfigError: the drafter's sizes do not fit the target's.
    """
    directory = resolve_target(run)
    shape = read_target(directory)
    draft_vocab_size = run.drafter.vocab_size(shape.vocab_size)
    check_draft_vocab_size(draft_vocab_size, shape.vocab_size)
    sizes = DrafterArchitecture.for_target(
        read_config(directory),
        run.drafter,
        aux_layers=aux_layers(run.target, shape),
        draft_vocab_size=draft_vocab_size,
        target_sha256=NOT_HASHED,
    )
    return explain(sizes, train_lm_head=run.drafter.train_lm_head)
