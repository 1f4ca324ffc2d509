"""A corpus of random token ids in a root of its own, and the stages that lead from there to shards."""

from __future__ import annotations

import importlib
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3_core.artifacts import Kind, Ref
from eagle3_core.config import RunConfig
from eagle3_core.config.recipes import load_recipe
from eagle3_core.context import StageContext
from eagle3_core.data.corpus import CORPUS, Answer, write_corpus
from eagle3_core.data.plan import ShardPlan, read_plan
from eagle3_core.identity import resolve_target, target_fingerprint
from eagle3_core.pipeline import STAGES
from eagle3_core.progress import Progress
from eagle3_core.runner import freeze
from eagle3_core.storage import ObjectStore, commit, load, open_store

PROMPT_SHARE = 0.35


def answers(samples: int, mean_tokens: float, longest: int, vocab: int, seed: int = 0) -> list[Answer]:
    """Draw samples of lognormal lengths."""
    chance = random.Random(seed)
    mu = math.log(mean_tokens) - 0.6**2 / 2
    found = []
    for number in range(samples):
        length = min(longest, max(8, round(chance.lognormvariate(mu, 0.6))))
        ids, prompt = [chance.randrange(3, vocab) for _ in range(length)], round(length * PROMPT_SHARE)
        held_out = number % 20 == 0
        found.append(Answer(f"{number:08x}", "random", held_out, ids[:prompt], ids[prompt:], "stop"))
    return found


@dataclass
class Pipeline:
    """The stages of a recipe in one root, run in this process; `refs` are what they wrote."""

    root: Path
    run: RunConfig
    store: ObjectStore = field(init=False)
    refs: dict[Kind, Ref] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.store = open_store(str(self.root))

    @classmethod
    def with_corpus(cls, root: Path, overrides: Mapping[str, Any], corpus: list[Answer], **pretended: int) -> Pipeline:
        """Begin where the target of the demo has answered; `pretended` replaces sizes of it."""
        made = cls(root, load_recipe("demo", overrides))
        target = target_fingerprint(resolve_target(made.run)).model_dump(mode="json") | pretended
        staged = root / "staged"
        staged.mkdir(parents=True)
        write_corpus(staged / CORPUS, corpus)
        made.refs[Kind.CORPUS] = commit(
            made.store, "regenerate/synthetic", staged, Kind.CORPUS, facts={"target": target}
        )
        return made

    @property
    def key(self) -> str:
        """Return where the run's configuration is."""
        return freeze(self.store, self.run)

    @property
    def plan(self) -> ShardPlan:
        """Return the shard plan."""
        return read_plan(load(self.store, self.refs[Kind.SHARD_PLAN]))

    def stage(self, name: str, index: int | None = None) -> Ref:
        """Run one stage here."""
        stage, work = STAGES[name], self.root / "jobs" / f"{self.run.digest()[:12]}-{name}-{index}" / "work"
        work.mkdir(parents=True, exist_ok=True)
        inputs = {key: self.refs[kind] for key, kind in stage.inputs}
        context = StageContext(stage, self.run, self.store, inputs, index, work, Progress(name, work.parent))
        ref: Ref = importlib.import_module(f"eagle3_core.stages.{name}").run(context)
        self.refs[stage.produces] = ref
        return ref
