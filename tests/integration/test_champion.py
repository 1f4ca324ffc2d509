"""Three runs on real SGLang: the first publishes, a weaker one is refused, a better one takes its place."""

from __future__ import annotations

import pytest

from eagle3_core import jobs
from eagle3_core.artifacts import Kind
from eagle3_core.config.recipes import load_recipe
from eagle3_core.pipeline import STAGES
from eagle3_core.releases import read_release, roll_back
from eagle3_core.runner import PipelineRun
from eagle3_core.storage import load, open_store

SETTINGS = {
    "name": "tiny", "data.max_prompts": 200, "data.held_out_fraction": 0.15, "data.max_new_tokens": 64,
    "data.max_sample_tokens": 256, "drafter.min_coverage": 0.5, "evaluation.shapes": ["3/1/4"],
    "evaluation.primary": "3/1/4", "evaluation.max_prompts": 16, "evaluation.max_new_tokens": 64,
    "training.ttt_steps": 3, "training.nproc": 1, "gate.min_acceptance_length": 1.0,
}  # fmt: skip


class Quiet:
    """A watcher that keeps the titles of what ran."""

    def __init__(self):
        self.ran = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def started(self, title):
        pass

    def progress(self, title, state):
        pass

    def ended(self, title, ref, seconds):
        self.ran.append(title)

    def retrying(self, title, error, attempt):
        pass


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Run the pipeline, all but the preflight, with some settings changed."""
    store = open_store(str(tmp_path_factory.mktemp("champion") / "root"))

    def run(**changes):
        watcher = Quiet()
        config = load_recipe("demo", {**SETTINGS, **{key.replace("__", "."): value for key, value in changes.items()}})
        pipeline = PipelineRun(store, config, watcher, "test")
        for stage in list(STAGES.values())[1:]:
            pipeline.execute(stage)
        report = load(store, pipeline.refs[Kind.EVAL_REPORT]).json("report.json")
        return pipeline.refs[Kind.RELEASE].facts, report, watcher.ran, pipeline.refs[Kind.DRAFTER].key

    run.store = store
    yield run
    for directory in jobs.jobs_directory(store.root).glob("*"):
        jobs.end_processes(directory, grace_s=0)


def champion(root):
    return read_release(root.store, "tiny").current.drafter


@pytest.fixture(scope="module")
def first(root):
    return root(training__epochs=1.5)


def test_the_first_run_has_no_champion_and_publishes(root, first):
    facts, report, _, drafter = first
    assert facts["outcome"] == "published"
    assert report["challenge"]["state"] == "no champion"
    assert champion(root) == drafter


def test_the_same_run_again_computes_nothing_and_says_so(root, first):
    facts, report, ran, drafter = root(training__epochs=1.5)
    assert ran == ["challenge", "report", "publish"]
    assert (facts["outcome"], drafter) == ("unchanged", first[3])
    assert report["challenge"]["said"] == "nothing new: this drafter is the champion of tiny"


def test_a_warm_start_of_a_champion_that_learnt_all_of_it_trains_nothing(root, first):
    facts, _, ran, drafter = root(training__epochs=1.5, training__start_from="champion")
    assert ran == ["train", "report", "publish"]
    assert (facts["outcome"], drafter) == ("unchanged", first[3])


def test_a_weaker_drafter_is_refused_and_leaves_the_pointer(root, first):
    before = root.store.read_bytes("releases/tiny.json")
    facts, report, _, drafter = root(training__epochs=0.6)
    assert drafter != first[3]
    against = report["challenge"]["against"]
    assert (facts["outcome"], report["verdict"]["standing"]) == ("kept", "worse"), facts["said"]
    assert against["acceptance"]["high"] < 1
    assert root.store.read_bytes("releases/tiny.json") == before
    assert "against the champion worse" in facts["said"]


def test_a_better_drafter_is_promoted_and_can_be_taken_back(root, first):
    facts, report, ran, drafter = root(training__epochs=4)
    against = report["challenge"]["against"]
    assert (facts["outcome"], report["verdict"]["standing"]) == ("published", "better"), facts["said"]
    assert against["acceptance"]["low"] > 1
    assert champion(root) == drafter != first[3]
    assert not [title for title in ran if title.startswith(("regenerate", "capture"))]
    release = roll_back(root.store, "tiny", "to see it work", by="test")
    assert release.current.drafter == champion(root) == first[3]
