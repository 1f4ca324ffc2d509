"""What becomes of a drafter: published, unchanged, kept, refused; and what the pointer says then."""

import json

import pytest

from eagle3_core.artifacts import Kind
from eagle3_core.config import RunConfig
from eagle3_core.context import StageContext
from eagle3_core.pipeline import STAGES
from eagle3_core.progress import Progress
from eagle3_core.releases import current_champion, read_release, roll_back
from eagle3_core.stages import publish
from eagle3_core.storage import find
from eagle3_core.storage.local import LocalStore

RUN = RunConfig.parse({"name": "tiny", "target": {"model": "x"}, "data": {"prompts": "x"}}, "test")


class Root:
    """A store into which runs publish drafters by name; a run freezes its champion as it begins."""

    def __init__(self, directory, put_in):
        self.directory, self.store = directory, LocalStore(directory / "root")
        self.put = put_in(self.store)

    def begin(self, letter, *, passed=True):
        """Return the publish stage of a run that has come so far; the champion is frozen now."""
        checkpoint = self.put(f"train/{letter}", Kind.CHECKPOINT, {"w": letter})
        drafter = self.put(f"export/{letter}", Kind.DRAFTER, {"w": letter}, target_sha256="7" * 64)
        champion = current_champion(self.store, "tiny")
        lineage = [{"artifact": "checkpoint", "key": checkpoint.key, "manifest_sha256": checkpoint.manifest_sha256}]
        verdict = {"passed": passed, "summary": f"{'Passed' if passed else 'Refused for speedup'}: {letter}."}
        against = champion.drafter.key.rpartition("/")[2] if champion else "none"
        report = self.put(f"report/{letter}-{against}-{passed}", Kind.EVAL_REPORT,
                          {"report.json": json.dumps({"verdict": verdict, "lineage": lineage})})  # fmt: skip
        run = RUN.model_copy(update={"champion": champion})
        work = self.directory / "work"
        work.mkdir(exist_ok=True)
        inputs = {"drafter": drafter, "eval_report": report}
        return StageContext(STAGES["publish"], run, self.store, inputs, None, work, Progress("publish", None))

    def publish(self, letter, *, passed=True):
        return publish.run(self.begin(letter, passed=passed))

    @property
    def champion(self):
        release = read_release(self.store, "tiny")
        return release and release.current.drafter


@pytest.fixture
def root(tmp_path, put_in):
    return Root(tmp_path, put_in)


def test_the_first_that_passes_is_published_and_the_next_takes_its_place(root):
    ref = root.publish("a")
    assert ref.facts == {"outcome": "published", "published": True, "said": "Published as tiny: Passed: a.",
                         "release": "releases/tiny.json"}  # fmt: skip
    root.publish("b")
    assert root.champion == "export/b"
    current = read_release(root.store, "tiny").current
    assert current.why == "Passed: b."
    assert "@" in current.by
    assert current.at.startswith("20")


def test_a_first_drafter_that_is_refused_is_no_release_and_a_result(root):
    ref = root.publish("a", passed=False)
    assert ref.facts["outcome"] == "refused"
    assert ref.facts["published"] is False
    assert ref.facts["said"] == "Not published as tiny: Refused for speedup: a."
    assert root.champion is None
    assert find(root.store, ref.key) == ref


def test_a_refused_challenger_keeps_the_champion_and_the_pointer_byte_for_byte(root):
    root.publish("a")
    before = root.store.read_bytes("releases/tiny.json")
    ref = root.publish("b", passed=False)
    assert (ref.facts["outcome"], ref.facts["published"]) == ("kept", False)
    assert ref.facts["said"] == "Kept the champion of tiny: Refused for speedup: b."
    assert root.store.read_bytes("releases/tiny.json") == before


def test_the_champion_itself_is_unchanged_and_not_published_a_second_time(root):
    root.publish("a")
    before = root.store.read_bytes("releases/tiny.json")
    ref = root.publish("a")
    assert (ref.facts["outcome"], ref.facts["published"]) == ("unchanged", True)
    assert ref.facts["said"].startswith("Nothing new, the champion of tiny stays")
    assert root.store.read_bytes("releases/tiny.json") == before


def test_of_two_runs_that_challenge_the_same_champion_the_second_is_kept_out(root):
    root.publish("a")
    slow = root.begin("b")
    root.publish("c")
    ref = publish.run(slow)
    assert ref.facts["outcome"] == "kept"
    assert "export/c became the champion while this run was judged; run again to challenge it" in ref.facts["said"]
    assert root.champion == "export/c"


def test_a_retry_after_a_kill_between_pointer_and_commit_is_harmless(root, monkeypatch):
    root.publish("a")
    context = root.begin("b")
    with monkeypatch.context() as patch:
        patch.setattr(StageContext, "commit", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            publish.run(context)
    assert root.champion == "export/b"
    assert publish.run(context).facts["outcome"] == "published"
    assert [entry.drafter for entry in read_release(root.store, "tiny").history] == ["export/a"]


def test_a_night_after_a_rollback_does_not_bring_back_what_was_taken_back(root):
    root.publish("a")
    context = root.begin("b")
    assert publish.run(context).facts["published"] is True
    roll_back(root.store, "tiny", "slow on Fridays", by="ops")
    ref = publish.run(context)
    assert (ref.facts["outcome"], ref.facts["published"]) == ("kept", False)
    assert "it was taken back by ops at " in ref.facts["said"]
    assert "slow on Fridays" in ref.facts["said"]
    assert root.champion == "export/a"


def test_a_pointer_that_was_moved_away_is_written_again_by_the_same_run(root):
    context = root.begin("a")
    publish.run(context)
    (root.directory / "root" / "releases" / "tiny.json").unlink()
    assert publish.run(context).facts["outcome"] == "published"
    assert root.champion == "export/a"


def test_a_champion_that_was_taken_back_while_nothing_new_was_found_is_not_said_to_stay(root):
    root.publish("a")
    root.publish("b")
    context = root.begin("b")
    roll_back(root.store, "tiny", "slow on Fridays", by="ops")
    ref = publish.run(context)
    assert (ref.facts["outcome"], ref.facts["published"]) == ("kept", False)
    assert "was the champion as the run began, and is not any more" in ref.facts["said"]
    assert root.champion == "export/a"
