"""A warm start: the champion's weights as the first ones of a challenger. Letters: U draft tokens, D width."""

from __future__ import annotations

import logging

import torch
from safetensors.torch import load_file

from eagle3_core.artifacts import Kind
from eagle3_core.config import RunConfig
from eagle3_core.errors import ConfigError
from eagle3_core.identity import resolve_target, target_fingerprint
from eagle3_core.model.architecture import CONFIG_FILE, DrafterArchitecture
from eagle3_core.releases import opened
from eagle3_core.storage import Artifact, ObjectStore, load
from eagle3_core.train.checkpoint import PARAMETERS
from eagle3_core.vocab import VocabMap

log = logging.getLogger(__name__)
HEAD = "lm_head.weight"


def champion_weights(
    run: RunConfig, store: ObjectStore, sizes: DrafterArchitecture, vocab: VocabMap, vocab_file: str, head: torch.Tensor
) -> dict[str, torch.Tensor] | None:
    """Return the champion's parameters for a drafter of `sizes`; None: training starts from scratch.

    The draft vocabulary is this run's own: the head's rows of tokens that both know are the champion's, those of new
    tokens the target's, as in a fresh drafter. A head that is not trained is the target's, whatever the champion's
    is: it would stay as some earlier training left it for ever.

    Args:
        run: The run, with its champion.
        store: The root.
        sizes: Of the drafter to be trained.
        vocab: Its draft vocabulary.
        vocab_file: Name of the file in which a checkpoint keeps its own.
        head: The target's rows of that vocabulary [U, D].

    Raises:
        ConfigError: the champion is a drafter of other sizes or layers.
    """
    champion = run.start
    if champion is None:
        return None
    if champion.target_sha256 != sizes.target_sha256:
        log.info("no champion for this target (%s drafts for another): from scratch", champion.drafter.key)
        return None
    checkpoint = load(store, opened(Kind.CHECKPOINT, champion.checkpoint))
    require_same_sizes(checkpoint, sizes)
    weights = load_file(checkpoint.verified_path(PARAMETERS))
    if not run.drafter.train_lm_head:
        log.info("from the champion %s, with the target's rows as its frozen head", checkpoint.ref.key)
        return {**weights, HEAD: head.to(weights[HEAD].dtype)}
    maps = load_file(checkpoint.verified_path(vocab_file))
    known = VocabMap.from_offsets(maps["d2t"].tolist(), maps["t2d"].tolist())
    weights[HEAD], kept = remapped(weights[HEAD], known, vocab, head)
    log.info("from the champion %s: %d of %d draft tokens known", checkpoint.ref.key, kept, len(vocab.target_ids))
    return weights


def require_start(run: RunConfig, store: ObjectStore, sizes: DrafterArchitecture) -> dict[str, str | None]:
    """Refuse a warm start that training would refuse, before anything is captured; `sizes` need no fingerprint.

    Raises:
        ConfigError: the champion, of this target, is a drafter of other sizes or layers.
    """
    champion = run.start
    if champion is None:
        return {"started_from": None}
    try:
        require_same_sizes(load(store, opened(Kind.CHECKPOINT, champion.checkpoint)), sizes)
    except ConfigError:
        # Looked up only where it matters: naming the target by content can take minutes the first time.
        if champion.target_sha256 == target_fingerprint(resolve_target(run)).sha256:
            raise
        return {"started_from": None}
    return {"started_from": champion.checkpoint.key}


def require_same_sizes(checkpoint: Artifact, sizes: DrafterArchitecture) -> None:
    """Refuse a champion whose weights do not fit; the draft vocabulary may differ.

    Raises:
        ConfigError: names what differs.
    """
    key = checkpoint.ref.key
    theirs = DrafterArchitecture.parse(checkpoint.json(CONFIG_FILE), f"champion {key}")
    free = {"draft_vocab_size", "target_sha256"}
    wanted, found = sizes.model_dump(exclude=free), theirs.model_dump(exclude=free)
    if differing := [name for name, value in wanted.items() if found[name] != value]:
        name = differing[0]
        raise ConfigError(
            f"training.start_from: expected a champion with this drafter's {', '.join(differing)}, found {name} "
            f"{found[name]} instead of {wanted[name]} in {key}; set the champion's, or scratch"
        )


def remapped(rows: torch.Tensor, known: VocabMap, wanted: VocabMap, fresh: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return head rows [U, D] for `wanted`: those of `known` where it has the token, else `fresh`; and how many."""
    at = {target: draft for draft, target in enumerate(known.target_ids)}
    pairs = [(draft, at[target]) for draft, target in enumerate(wanted.target_ids) if target in at]
    out = fresh.to(rows.dtype).clone()
    if pairs:
        mine, theirs = torch.tensor(pairs).T
        out[mine] = rows[theirs]
    return out, len(pairs)
