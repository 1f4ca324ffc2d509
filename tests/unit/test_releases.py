"""The pointer of a release: who is the champion, who was, who took what back and why."""

import json

import pytest
from typer.testing import CliRunner

from eagle3_core import releases
from eagle3_core.artifacts import Kind
from eagle3_core.cli.main import app
from eagle3_core.errors import ArtifactError, CorruptArtifactError, InputError, UnknownSchemaError
from eagle3_core.releases import Entry, current_champion, point, read_release, roll_back
from eagle3_core.storage import open_store

TARGET = "7" * 64


@pytest.fixture
def root(tmp_path, put_in):
    """A store, and a way to release drafters a, b, c in turn."""
    store = open_store(str(tmp_path / "root"))
    put = put_in(store)

    def entry(letter):
        checkpoint = put(f"train/{letter}", Kind.CHECKPOINT, {"w": letter})
        drafter = put(f"export/{letter}", Kind.DRAFTER, {"w": letter}, target_sha256=TARGET)
        lineage = [{"artifact": "checkpoint", "key": checkpoint.key, "manifest_sha256": checkpoint.manifest_sha256}]
        report = put(f"report/{letter}", Kind.EVAL_REPORT, {"report.json": json.dumps({"lineage": lineage})})
        return Entry(drafter=drafter.key, drafter_manifest_sha256=drafter.manifest_sha256, report=report.key,
                     report_manifest_sha256=report.manifest_sha256, summary="Passed", at="then", by="me",
                     why="Passed")  # fmt: skip

    def release(*letters):
        for letter in letters:
            before = read_release(store, "demo")
            expected = before.current.drafter_manifest_sha256 if before else None
            assert point(store, "demo", entry(letter), expected) is None
        return read_release(store, "demo")

    release.store, release.entry, release.path = store, entry, tmp_path / "root"
    return release


def drafters(release):
    return [one.drafter for one in (release.current, *release.history)]


def test_a_new_champion_puts_the_one_before_it_first_in_the_history(root):
    assert drafters(root("a", "b", "c")) == ["export/c", "export/b", "export/a"]


def test_the_champion_is_frozen_with_its_checkpoint_and_its_target(root):
    assert current_champion(root.store, "demo") is None
    root("a")
    found = current_champion(root.store, "demo")
    assert (found.drafter.key, found.checkpoint.key, found.report.key) == ("export/a", "train/a", "report/a")
    assert found.target_sha256 == TARGET


def test_pointing_from_a_champion_that_is_gone_changes_nothing(root):
    first = root("a").current.drafter_manifest_sha256
    root("b")
    why = point(root.store, "demo", root.entry("c"), first)
    assert why == "export/b became the champion while this run was judged; run again to challenge it"
    assert "became the champion" in point(root.store, "demo", root.entry("c"), None)
    assert drafters(read_release(root.store, "demo")) == ["export/b", "export/a"]


def test_pointing_twice_is_pointing_once(root):
    root("a", "b")
    again = root.entry("b").model_copy(update={"at": "later"})
    assert point(root.store, "demo", again, "0" * 64) is None
    assert read_release(root.store, "demo").current.at == "then"


@pytest.mark.parametrize("stage", ["train", "export", "report"])
def test_a_champion_whose_artifacts_are_not_those_that_were_released_stops_the_run(root, stage):
    root("a")
    manifest = root.path / stage / "a" / "manifest.json"
    manifest.unlink()
    with pytest.raises(ArtifactError, match=f"champion of demo: .*{stage}/a.*eagle3 releases rollback demo"):
        current_champion(root.store, "demo")
    root.entry("a")
    assert current_champion(root.store, "demo") is not None
    manifest.write_text(manifest.read_text().replace('"kind"', '"kine"'))
    with pytest.raises(ArtifactError, match="eagle3 releases rollback demo"):
        current_champion(root.store, "demo")


def test_a_rollback_makes_the_one_before_champion_and_says_who_when_and_why(root):
    root("a", "b")
    found = roll_back(root.store, "demo", "slow on Fridays", by="ops")
    assert drafters(found) == ["export/a", "export/b"]
    assert (found.current.by, found.current.why) == ("ops", "rolled back: slow on Fridays")
    taken = found.withdrawal(found.history[0].drafter_manifest_sha256)
    assert (taken.by, taken.why) == ("ops", "slow on Fridays")
    assert read_release(root.store, "demo") == found


def test_what_was_taken_back_is_not_published_again_by_a_run(root):
    root("a", "b")
    found = roll_back(root.store, "demo", "slow", by="ops")
    why = point(root.store, "demo", root.entry("b"), found.current.drafter_manifest_sha256)
    assert why.startswith("it was taken back by ops at ")
    assert why.endswith(": slow")
    assert read_release(root.store, "demo") == found


def test_rollbacks_in_a_row_go_further_back_and_end(root):
    root("a", "b", "c")
    roll_back(root.store, "demo", "bad")
    assert read_release(root.store, "demo").current.drafter == "export/b"
    roll_back(root.store, "demo", "bad too")
    assert read_release(root.store, "demo").current.drafter == "export/a"
    with pytest.raises(InputError, match="a former champion that nobody took back among 2, found none"):
        roll_back(root.store, "demo", "worse")


def test_a_rollback_may_name_one_that_was_taken_back(root):
    root("a", "b")
    roll_back(root.store, "demo", "a mistake")
    found = roll_back(root.store, "demo", "it was fine", to="export/b")
    assert drafters(found) == ["export/b", "export/a"]
    assert found.withdrawal(found.current.drafter_manifest_sha256) is None
    with pytest.raises(InputError, match="a former champion export/z among 1"):
        roll_back(root.store, "demo", "why", to="export/z")


def test_a_rollback_to_what_could_be_several_is_refused_and_to_nothing_is_the_last(root):
    root("a", "b", "c")
    with pytest.raises(
        InputError, match=r"--to export/: expected .* found that of export/a, export/b; give more of it"
    ):
        roll_back(root.store, "demo", "why", to="export/")
    roll_back(root.store, "demo", "why")
    assert roll_back(root.store, "demo", "why", to="").current.drafter == "export/a"


def test_a_rollback_to_what_is_damaged_changes_nothing(root):
    before = root("a", "b")
    (root.path / "export" / "a" / "w").write_text("x")
    with pytest.raises(CorruptArtifactError):
        roll_back(root.store, "demo", "bad")
    assert read_release(root.store, "demo") == before


def test_a_rollback_of_nothing_is_refused(root):
    with pytest.raises(InputError, match="release demo: expected one below"):
        roll_back(root.store, "demo", "bad")
    root("a")
    with pytest.raises(InputError, match="among 0, found none"):
        roll_back(root.store, "demo", "bad")


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        ('{"schema_version": "eagle3/release/1"}', UnknownSchemaError, "expected eagle3/release/2.*move it away"),
        ("[]", ArtifactError, "expected a JSON object"),
        ('{"schema_version": "eagle3/release/2", "name": "demo"}', ArtifactError, "1 invalid fields"),
    ],
)
def test_a_pointer_that_cannot_be_read_is_one_line(root, text, kind, said):
    root.store.write_bytes("releases/demo.json", text.encode())
    with pytest.raises(kind, match=said):
        current_champion(root.store, "demo")


def eagle3(root, *words):
    return CliRunner().invoke(app, ["releases", *words, "--root", str(root.path)])


def test_the_command_lists_shows_and_rolls_back(root):
    root("a", "b")
    assert "export/b" in eagle3(root, "ls").stdout
    assert "export/a" in eagle3(root, "show", "demo").stdout
    done = eagle3(root, "rollback", "demo", "--why", "too slow", "--by", "me", "--json")
    assert (done.exit_code, json.loads(done.stdout)["current"]["drafter"]) == (0, "export/a")
    shown = eagle3(root, "show", "demo").stdout
    assert "taken back by me" in " ".join(shown.split())
    assert json.loads(eagle3(root, "ls", "--json").stdout)["releases"][0]["name"] == "demo"


def test_the_command_refuses_in_one_line(root, tmp_path):
    (tmp_path / "root").mkdir(exist_ok=True)
    assert "no releases below" in eagle3(root, "ls").stdout
    for words in (("show", "demo"), ("rollback", "demo", "--why", "x"), ("rollback", "demo", "--why", " ")):
        found = eagle3(root, *words)
        assert (found.exit_code, len(found.stderr.splitlines())) == (65, 1), found.stderr


def test_the_record_names_somebody_even_where_no_user_is_known(monkeypatch):
    monkeypatch.setattr(releases.getpass, "getuser", lambda: {}["nobody"])
    assert releases.whoami().startswith("unknown user@")
