"""What can be refused in milliseconds, before any job starts. Light; the preflight stage goes on from here."""

from __future__ import annotations

from eagle3_core.config import RunConfig
from eagle3_core.config.target import TargetConfig
from eagle3_core.errors import ConfigError
from eagle3_core.identity import TargetShape, check_sizes, read_target, resolve_target
from eagle3_core.prompt_files import checked_prompts, prompt_files
from eagle3_core.storage import ObjectStore
from eagle3_core.vocab import check_draft_vocab_size


def aux_layers(target: TargetConfig, shape: TargetShape) -> tuple[int, ...]:
    """Return the layers whose outputs feed the drafter: the configured ones or [1, n/2-1, n-4].

    Raises:
        ConfigError: an id is out of range, repeated or out of order.
    """
    n = shape.num_layers
    layers = target.aux_layers or (1, n // 2 - 1, n - 4)
    if list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] > n - 2:
        source = "target.aux_layers" if target.aux_layers else "the default aux layers [1, n/2-1, n-4]"
        raise ConfigError(
            f"{source}: expected distinct rising outputs of layers 0..{n - 2} of {n}, found {list(layers)}; "
            "set target.aux_layers"
        )
    return layers


def check_inputs(run: RunConfig, store: ObjectStore) -> None:
    """Check the target's files, sizes and the prompts; cheap enough to run before every job.

    Raises:
        InputError: one line about the first thing that is wrong.
    """
    shape = read_target(resolve_target(run))
    aux_layers(run.target, shape)
    check_sizes(run, shape)
    check_draft_vocab_size(run.drafter.vocab_size(shape.vocab_size), shape.vocab_size)
    checked_prompts(prompt_files(run))
    store.write_bytes("write-probe", b"")
