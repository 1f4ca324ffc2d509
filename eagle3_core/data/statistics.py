"""Figures about a feature set: lengths, supervised share, bytes a token, tokens by domain. Light."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from eagle3_core.data.catalog import Catalog, FeatureEntry, stored_bytes
from eagle3_core.data.plan import PlannedSample, read_samples
from eagle3_core.storage import ObjectStore

_READERS = 8

Name = TypeVar("Name", str, int)


@dataclass(frozen=True)
class Share:
    """Some samples: how many, of how many tokens, of which `supervised` are answers."""

    samples: int
    tokens: int
    supervised: int

    @classmethod
    def of(cls, samples: Sequence[PlannedSample]) -> Share:
        """Count samples."""
        tokens = sum(sample.length for sample in samples)
        return cls(len(samples), tokens, sum(sample.supervised for sample in samples))


@dataclass(frozen=True)
class Statistics:
    """`histogram` counts samples of `low <= tokens < 2 * low`; `bytes_per_token` is of the shards that are there."""

    total: Share
    held_out: Share
    domains: dict[str, Share]
    histogram: dict[int, Share]
    shortest: int
    median: int
    p95: int
    longest: int
    stored_bytes: int
    bytes_per_token: float | None

    def values(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        return {**asdict(self), "supervised_share": self.total.supervised / self.total.tokens}


def statistics(store: ObjectStore, catalog: Catalog, entry: FeatureEntry) -> Statistics:
    """Read the plan's samples and the manifests of its captured shards."""
    samples = read_samples(entry.plan)
    lengths = sorted(sample.length for sample in samples)
    captured = set(catalog.captured(entry))
    with ThreadPoolExecutor(_READERS) as pool:
        stored = sum(pool.map(lambda key: stored_bytes(store, key), sorted(captured)))
    tokens = sum(shard.tokens for shard in entry.shards.shards if shard.key in captured)
    return Statistics(
        total=Share.of(samples),
        held_out=Share.of([sample for sample in samples if sample.held_out]),
        domains=_grouped(samples, [sample.domain for sample in samples]),
        histogram=_grouped(samples, [1 << (sample.length.bit_length() - 1) for sample in samples]),
        shortest=lengths[0],
        median=lengths[len(lengths) // 2],
        p95=lengths[min(len(lengths) - 1, len(lengths) * 95 // 100)],
        longest=lengths[-1],
        stored_bytes=stored,
        bytes_per_token=stored / tokens if tokens else None,
    )


def _grouped(samples: Sequence[PlannedSample], names: Sequence[Name]) -> dict[Name, Share]:
    groups: dict[Name, list[PlannedSample]] = {}
    for sample, name in zip(samples, names, strict=True):
        groups.setdefault(name, []).append(sample)
    return {name: Share.of(groups[name]) for name in sorted(groups)}
