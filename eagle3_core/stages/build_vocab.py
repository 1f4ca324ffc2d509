"""Count the answer tokens of the training split and choose the draft vocabulary."""

from __future__ import annotations

from collections import Counter

from eagle3_core.artifacts import Ref
from eagle3_core.config.drafter import DrafterConfig
from eagle3_core.context import StageContext
from eagle3_core.data.corpus import read_corpus
from eagle3_core.errors import ConfigError
from eagle3_core.vocab import VocabMap, check_draft_vocab_size, choose, sufficient_size

FILE = "vocab.safetensors"


def run(context: StageContext) -> Ref:
    """Write d2t and t2d.

    Raises:
        ConfigError: the vocabulary is larger than the target's, or covers too little of the held-out answers.
    """
    if done := context.done():
        return done
    drafter = context.run.drafter
    corpus = context.input("corpus")
    facts = corpus.manifest.facts
    target_size = int(facts["target"]["vocab_size"])
    size = drafter.vocab_size(target_size)
    check_draft_vocab_size(size, target_size)
    train: Counter[int] = Counter()
    held_out: Counter[int] = Counter()
    seen: set[int] = set()
    for number, answer in enumerate(read_corpus(corpus), start=1):
        (held_out if answer.held_out else train).update(answer.output_ids)
        seen.update(answer.input_ids)
        context.progress.update(number, facts["samples"], "answers")
    # A special token the drafter cannot propose ends every chain at that place.
    specials = {token for token in facts["special_ids"] if token in seen or token in train}
    required = specials | set(facts["stop_ids"])
    vocab = choose(train, required, size, target_size)
    coverage = _checked_coverage(vocab, train, held_out, required, drafter)
    _write(context, vocab)
    return context.commit(
        context.work / "out",
        facts={"distinct_train": len(train), "required": sorted(required)},
        ref_facts={
            "draft_vocab_size": len(vocab.target_ids),
            "target_vocab_size": target_size,
            "coverage_train": vocab.coverage(train),
            "coverage_held_out": coverage,
        },
    )


def _checked_coverage(
    vocab: VocabMap, train: Counter[int], held_out: Counter[int], required: set[int], drafter: DrafterConfig
) -> float:
    coverage = vocab.coverage(held_out)
    if coverage < drafter.min_coverage:
        size = sufficient_size(train, held_out, required, vocab.target_size, drafter.min_coverage)
        raise ConfigError(
            f"drafter.draft_vocab_size {len(vocab.target_ids)}: expected to cover {drafter.min_coverage:.1%} of the "
            f"held-out answer tokens, found {coverage:.1%}; {size} would suffice, or lower drafter.min_coverage"
        )
    return coverage


def _write(context: StageContext, vocab: VocabMap) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    tensors = {"d2t": np.array(vocab.d2t, dtype=np.int64), "t2d": np.array(vocab.t2d, dtype=np.bool_)}
    save_file(tensors, context.staged() / FILE)
