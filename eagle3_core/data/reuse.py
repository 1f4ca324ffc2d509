"""Which samples of a corpus are captured already, and how the others are cut: a feature set that grows. Light."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from eagle3_core.artifacts import Kind
from eagle3_core.data.corpus import Answer
from eagle3_core.data.plan import cut, shard_digest, shards_under
from eagle3_core.data.shards import ShardIndex
from eagle3_core.errors import ConfigError, CorruptArtifactError, NotCommittedError, UnknownSchemaError
from eagle3_core.storage import ObjectStore, committed_keys, load

_READERS = 8


@dataclass(frozen=True)
class Arrangement:
    """Positions in the corpus, shard by shard; `fresh` are the indexes of those that are not captured yet."""

    shards: tuple[tuple[int, ...], ...]
    fresh: tuple[int, ...]


def captured_shards(store: ObjectStore, identity: str) -> list[ShardIndex]:
    """Return what every committed shard of an identity holds, from manifests and indexes alone.

    Damaged ones are left out: whoever captures them anew or verifies them says so.
    """
    keys = committed_keys(store, shards_under(identity))
    with ThreadPoolExecutor(_READERS) as pool:
        return [index for index in pool.map(lambda key: _index(store, key), keys) if index is not None]


def arrange(
    answers: Sequence[Answer], identity: str, captured: Iterable[ShardIndex], shard_tokens: int, max_tasks: int
) -> Arrangement:
    """Take every captured shard whose samples are all in the corpus, unchanged, and cut the rest into new shards.

    Where there would be more than `max_tasks`, new shards first grow to twice their bound; then the smallest captured
    ones are given up, and their samples captured again in larger shards.
    """
    lengths = [answer.length for answer in answers]
    kept = list(_matching(answers, identity, captured))
    bound = max(shard_tokens, -(-sum(lengths) // max_tasks))
    missing = sum(lengths) - sum(lengths[position] for shard in kept for position in shard)
    while kept and (len(kept) > max_tasks or missing > 2 * bound * (max_tasks - len(kept))):
        missing += sum(lengths[position] for position in kept.pop())
    taken = {position for shard in kept for position in shard}
    rest = [position for position in range(len(answers)) if position not in taken]
    ranges = cut([lengths[position] for position in rest], shard_tokens, max_tasks - len(kept)) if rest else []
    fresh = {tuple(rest[place] for place in places) for places in ranges}
    shards = sorted([*kept, *fresh], key=lambda shard: shard[0])
    return Arrangement(tuple(shards), tuple(index for index, shard in enumerate(shards) if shard in fresh))


def _index(store: ObjectStore, key: str) -> ShardIndex | None:
    try:
        artifact = load(store, key)
        return ShardIndex.of(artifact) if artifact.ref.kind == Kind.SHARD else None
    # A store that does not answer says nothing about the shard.
    except (NotCommittedError, CorruptArtifactError, UnknownSchemaError, ConfigError):
        return None


def _matching(answers: Sequence[Answer], identity: str, captured: Iterable[ShardIndex]) -> Iterator[tuple[int, ...]]:
    """Yield the positions of every shard that can be used as it is, the largest first; no sample twice."""
    place = {answer.id: position for position, answer in enumerate(answers)}
    taken: set[int] = set()
    for index in sorted(captured, key=lambda item: (-sum(item.lengths), item.digest)):
        positions = tuple(place[name] for name in index.sample_ids if name in place)
        if not positions or len(positions) != len(index.sample_ids) or not taken.isdisjoint(positions):
            continue
        if shard_digest(identity, [answers[position] for position in positions]) == index.digest:
            taken.update(positions)
            yield positions
