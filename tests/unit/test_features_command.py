"""`eagle3 features` as a user types it, on what the real stages wrote."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eagle3_core.artifacts import Kind
from eagle3_core.cli import features as features_command
from eagle3_core.cli.common import console
from eagle3_core.cli.main import app
from eagle3_core.config import RunConfig
from eagle3_core.data import collect
from eagle3_core.data.catalog import read_catalog
from eagle3_core.data.features import FeatureSet
from eagle3_core.data.lineage import read_lineage
from eagle3_core.jobs.files import COMMAND, EXIT, RESULT, SUPERVISOR
from eagle3_core.jobs.processes import Identity
from eagle3_core.releases import Entry, point, read_release
from eagle3_core.runner import freeze
from eagle3_core.storage import PLANNING, commit, find, load


class Typed:
    """The command on one flow's root, and what a root gathers: releases, runs, jobs."""

    def __init__(self, flow):
        self.flow, self.store = flow, flow.store

    def __call__(self, *words, code=0):
        done = CliRunner().invoke(app, ["features", *words, "--root", self.store.root])
        assert done.exit_code == code, (done.stderr, done.exception)
        return done

    def json(self, *words, code=0):
        return json.loads(self(*words, "--json", code=code).stdout)

    def put(self, key, kind, **inputs):
        staged = self.flow.tmp_path / "staged"
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir()
        (staged / "name").write_text(key)
        return commit(self.store, key, staged, kind, inputs=inputs, replace=True)

    def release(self, name="demo", features=None):
        """Publish a drafter that was trained on a feature set; return its checkpoint."""
        features = features or self.flow.refs[Kind.FEATURE_SET]
        tag = features.key.rpartition("/")[2]
        checkpoint = self.put(f"train/{tag}", Kind.CHECKPOINT, feature_set=features)
        drafter = self.put(f"export/{tag}", Kind.DRAFTER, checkpoint=checkpoint)
        report = self.put(f"report/{tag}", Kind.EVAL_REPORT, drafter=drafter)
        entry = Entry(drafter=drafter.key, drafter_manifest_sha256=drafter.manifest_sha256, report=report.key,
                      report_manifest_sha256=report.manifest_sha256, summary="", at="", by="", why="")  # fmt: skip
        before = read_release(self.store, name)
        assert point(self.store, name, entry, before and before.current.drafter_manifest_sha256) is None
        return checkpoint

    def job(self, name, stage, inputs=None, state="succeeded", result=None, run="", age_s=0):
        """Leave the directory of a job behind, or of one that runs: this process stands for it."""
        directory = self.flow.tmp_path / "root" / "jobs" / name
        directory.mkdir(parents=True)
        passed = json.dumps({key: ref.model_dump(mode="json") for key, ref in (inputs or {}).items()})
        argv = ["python", "-m", "eagle3_core", stage, "--root", "r", "--run", run, "--inputs", passed]
        (directory / COMMAND).write_text(json.dumps({"argv": argv}))
        (directory / "log").write_text("")
        identity = Identity.of(os.getpid())
        dead = Identity(2**22 + 1, "0", identity.boot_id)
        (directory / SUPERVISOR).write_text(json.dumps(asdict(identity if state == "running" else dead)))
        if (code := {"succeeded": 0, "failed": 75, "stopped": 143}.get(state)) is not None:
            (directory / EXIT).write_text(json.dumps({"code": code}))
        if result is not None:
            (directory / RESULT).write_text(result.model_dump_json())
        for path in (directory / COMMAND, directory / "log"):
            os.utime(path, (time.time() - age_s,) * 2)


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setattr(console, "_width", 200)


@pytest.fixture
def typed(sealed):
    return Typed(sealed)


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


def grown(flow, prompts_file):
    """Add prompts and seal a second, larger feature set that shares shards with the first."""
    lines = [json.dumps({"prompt": f"A later question {number}?"}) + "\n" for number in range(20)]
    prompts_file.write_text(prompts_file.read_text() + "".join(lines))
    for name in ("prepare", "regenerate", "build_vocab", "plan_capture"):
        flow.run(name)
    flow.capture_all()
    return flow.run("seal")


# --------------------------------------------------------------------------------------------------------------- ls
def test_ls_says_how_far_each_feature_set_is_and_who_refers_to_it(typed, sealed):
    typed.release()
    [row] = typed.json("ls")["features"]
    facts = sealed.refs[Kind.FEATURE_SET].facts
    assert (row["key"], row["state"]) == (sealed.refs[Kind.FEATURE_SET].key, "sealed")
    assert (row["samples"], row["tokens"], row["shards"]) == (40, facts["tokens"], 5)
    assert row["bytes"] == row["bytes_captured"] == sealed.refs[Kind.SHARD_PLAN].facts["bytes"]
    assert 0 <= row["age_s"] < 600
    assert row["referred_to_by"] == ["release demo (current)"]
    assert "release demo (current)" in " ".join(typed("ls").stdout.split())


def test_ls_follows_a_capture_from_planned_to_sealed_to_incomplete(planned):
    typed = Typed(planned)
    states = []

    def look():
        [row] = typed.json("ls")["features"]
        states.append((row["state"], row["shards_captured"]))

    look()
    keys = [planned.shard_key(index) for index in range(5)]
    planned.capture_all()
    look()
    planned.store.remove(f"{keys[3]}/manifest.json")
    look()
    planned.capture_all()
    planned.run("seal")
    look()
    planned.store.remove(f"{keys[3]}/manifest.json")
    look()
    assert states == [("planned", 0), ("captured", 5), ("capturing", 4), ("sealed", 5), ("incomplete", 4)]
    assert "incomplete 4 of 5" in typed("ls").stdout


def test_ls_tells_who_writes_a_feature_set_and_only_while_he_does(planned, engine):
    typed, seen = Typed(planned), []
    code = (
        "import sys, time; from pathlib import Path; from eagle3_core.storage.local import LocalStore\n"
        "with LocalStore(Path(sys.argv[1])).claim(sys.argv[2]) as ours:\n"
        "    print(ours, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, planned.store.root, planned.shard_key(4)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "True\n"

        def look(_number, aux, last):
            # Several threads capture at once, and the command's runner knows one.
            catalog = read_catalog(planned.store)
            [entry] = catalog.entries
            claimed = planned.store.claimed()
            seen.append(features_command._row(catalog, read_lineage(planned.store), claimed, entry))
            return aux, last

        engine.disturb = look
        planned.run("capture", 0)
        assert "by process" in typed("ls").stdout
        other.kill()
    mine, theirs = f"process {os.getpid()}", f"process {other.pid}"
    assert all(row["writers"] == sorted([mine, theirs]) for row in seen)
    # The one shard that is claimed elsewhere is left alone.
    assert {row["shards_captured"] for row in seen} <= {0, 1, 2, 3}
    [row] = typed.json("ls")["features"]
    assert (row["state"], row["shards_captured"], row["writers"]) == ("capturing", 4, [])


def test_a_run_that_somebody_stopped_is_called_stopped_and_keeps_what_it_has(typed, sealed):
    run = freeze(sealed.store, sealed.config)
    reads = {"shard_plan": sealed.refs[Kind.SHARD_PLAN]}
    typed.job("seal-x", "seal", reads, state="stopped", run=run, age_s=2 * 86400)
    [row] = typed.json("ls")["features"]
    assert row["referred_to_by"] == [f"run drafter {Path(run).stem[:8]} (stopped)", "job seal-x (stopped)"]
    assert typed.json("gc")["plans"] == []
    assert typed.json("gc", "--abandoned-after", "0")["plans"] == [sealed.refs[Kind.SHARD_PLAN].key]


def test_shards_that_two_sets_share_are_counted_once(typed, sealed, prompts_file):
    grown(sealed, prompts_file)
    values = typed.json("ls")
    small, large = values["features"]
    assert (small["samples"], large["samples"]) == (40, 60)
    assert values["totals"]["bytes"] == large["bytes"]


def test_a_damaged_plan_is_named_and_hides_nothing_else(typed, sealed):
    plan = sealed.tmp_path / "root" / sealed.refs[Kind.SHARD_PLAN].key
    (plan / "plan.json").write_text("{")
    values = typed.json("ls")
    assert values["features"] == []
    assert sealed.refs[Kind.SHARD_PLAN].key in values["damaged"]
    assert typed("verify", code=75)


def test_an_empty_root_is_no_error(tmp_path):
    for words in (["ls"], ["stats"], ["verify"], ["gc"], ["gc", "--yes"]):
        done = CliRunner().invoke(app, ["features", *words, "--root", str(tmp_path)])
        assert done.exit_code == 0
        assert words[0] == "gc" or "no feature sets below" in done.stdout


# ----------------------------------------------------------------------------------------------------------- verify
def test_verify_reads_every_byte_of_every_shard(typed, sealed):
    sizes = [load(sealed.store, sealed.shard_key(i)).manifest.files["features.safetensors"].bytes for i in range(5)]
    values = typed.json("verify")
    assert (values["bytes"], values["bad"]) == (sum(sizes), 0)
    assert values["bytes_per_s"] > 0
    assert values["sets"][0]["ok"] == 5
    assert "5 of 5 shards good" in typed("verify", sealed.refs[Kind.FEATURE_SET].key).stdout


def test_verify_says_shard_by_shard_what_is_wrong_and_moves_it_only_if_asked(typed, sealed):
    root = sealed.tmp_path / "root"
    flip(root / sealed.shard_key(1) / "features.safetensors", 5000)
    (root / sealed.shard_key(2) / "features.safetensors").unlink()
    (root / sealed.shard_key(4) / "manifest.json").unlink()
    [result] = typed.json("verify", code=75)["sets"]
    assert list(result["problems"]) == ["shard 1", "shard 2", "shard 4"]
    assert re.search(r"damage in aux_hidden_states of \w+$", result["problems"]["shard 1"])
    assert result["problems"]["shard 4"].startswith("missing: ")
    assert sealed.store.list_keys("quarantine") == []
    typed("verify", "--quarantine", code=75)
    assert find(sealed.store, sealed.shard_key(1)) is None
    reasons = [key for key in sealed.store.list_keys("quarantine") if key.endswith("reason.json")]
    assert len(reasons) == 2
    sealed.capture_all()
    assert typed.json("verify")["bad"] == 0


@pytest.mark.parametrize(
    ("kind", "name"), [("seal", "index.safetensors"), ("plan_capture", "tokens/00002.safetensors")]
)
def test_verify_finds_damage_outside_the_shards(typed, sealed, kind, name):
    ref = sealed.refs[Kind.FEATURE_SET if kind == "seal" else Kind.SHARD_PLAN]
    flip(sealed.tmp_path / "root" / ref.key / name, -1)
    [result] = typed.json("verify", code=75)["sets"]
    assert f"{kind}/" in next(iter(result["problems"].values()))


def test_verify_tells_when_a_shard_is_whole_but_not_the_one_that_was_sealed(typed, sealed):
    old = load(sealed.store, sealed.shard_key(0))
    staged = sealed.tmp_path / "staged"
    staged.mkdir()
    for name in old.manifest.files:
        (staged / name).write_bytes(old.path(name).read_bytes())
    commit(sealed.store, old.ref.key, staged, Kind.SHARD, replace=True)
    [result] = typed.json("verify", code=75)["sets"]
    text = result["problems"]["feature set"]
    assert f"{sealed.refs[Kind.FEATURE_SET].key} is outdated: shard 0 captured again since it was sealed" in text
    assert "run `eagle3 seal RECIPE`" in text
    [row] = typed.json("ls")["features"]
    assert row["state"] == "outdated"
    sealed.run("seal")
    assert [row["state"] for row in typed.json("ls")["features"]] == ["outdated", "sealed"]


def test_the_list_is_readable_at_80_columns(typed, sealed, monkeypatch):
    from rich.console import Console

    typed.release()
    narrow = Console(width=80, highlight=False)
    monkeypatch.setattr("eagle3_core.cli.features.output", narrow)
    with narrow.capture() as shown:
        typed("ls")
    text, key = shown.get(), sealed.refs[Kind.FEATURE_SET].key
    assert key[:17] in text
    for word in ("samples", "tokens", "bytes", "sealed", "release demo", "(current)", "40", "1,0"):
        assert word in text
    assert "\u2026" not in text
    assert typed.json("verify", key[:17])["sets"][0]["key"] == key


def test_a_beginning_of_several_keys_is_refused_with_all_of_them(typed, sealed):
    old = load(sealed.store, sealed.refs[Kind.FEATURE_SET])
    staged = sealed.tmp_path / "staged"
    staged.mkdir()
    for name in old.manifest.files:
        (staged / name).write_bytes(old.path(name).read_bytes())
    commit(sealed.store, "seal/second", staged, Kind.FEATURE_SET, inputs={"shard_plan": sealed.refs[Kind.SHARD_PLAN]})
    done = typed("verify", "seal/", code=65)
    assert f"found {old.ref.key}, seal/second; add digits" in done.stderr
    assert [one["key"] for one in typed.json("verify", "plan_capture/")["sets"]] == [old.ref.key, "seal/second"]


def test_verify_looks_at_every_feature_set_of_a_plan_and_reads_its_shards_once(typed, sealed):
    old, root = load(sealed.store, sealed.refs[Kind.FEATURE_SET]), sealed.tmp_path / "root"
    staged = sealed.tmp_path / "staged"
    staged.mkdir()
    for name in old.manifest.files:
        (staged / name).write_bytes(old.path(name).read_bytes())
    commit(sealed.store, "seal/second", staged, Kind.FEATURE_SET, inputs={"shard_plan": sealed.refs[Kind.SHARD_PLAN]})
    os.utime(root / old.ref.key / "manifest.json", (time.time() - 100,) * 2)
    sizes = [load(sealed.store, sealed.shard_key(i)).manifest.files["features.safetensors"].bytes for i in range(5)]
    values = typed.json("verify")
    assert [result["key"] for result in values["sets"]] == [old.ref.key, "seal/second"]
    assert (values["bytes"], values["bad"]) == (sum(sizes), 0)
    flip(root / old.ref.key / "index.safetensors", -1)
    first, second = typed.json("verify", code=75)["sets"]
    assert (list(first["problems"]), second["problems"]) == (["feature set"], {})


def test_what_is_not_captured_yet_is_no_fault_of_a_plan(planned):
    [result] = Typed(planned).json("verify")["sets"]
    assert (result["missing"], result["problems"]) == (5, {})


def test_a_key_that_is_none_is_refused_with_those_there_are(typed, sealed):
    done = typed("verify", "seal/none", code=65)
    assert "expected a feature set or a plan at seal/none" in done.stderr
    assert sealed.refs[Kind.FEATURE_SET].key in done.stderr


# ------------------------------------------------------------------------------------------------------------ stats
def test_stats_add_up(typed, sealed):
    features = FeatureSet.open(sealed.store, sealed.refs[Kind.FEATURE_SET])
    [one] = typed.json("stats")["features"].values()
    tokens, supervised = int(features.lengths.sum()), int(features.supervised.sum())
    assert one["total"] == {"samples": 40, "tokens": tokens, "supervised": supervised}
    assert one["supervised_share"] == pytest.approx(supervised / tokens)
    for parts in (one["domains"], one["histogram"]):
        assert sum(share["samples"] for share in parts.values()) == 40
        assert sum(share["tokens"] for share in parts.values()) == tokens
    assert set(one["domains"]) == {"a", "b"}
    assert one["held_out"]["samples"] == int(features.held_out.sum())
    for low, share in one["histogram"].items():
        inside = (features.lengths >= int(low)) & (features.lengths < 2 * int(low))
        assert share["samples"] == int(inside.sum())
    assert (one["shortest"], one["longest"]) == (int(features.lengths.min()), int(features.lengths.max()))
    assert 3 * 8 * 4 + 5 < one["bytes_per_token"] < 4 * 8 * 4 + 5
    assert "bytes a token" in " ".join(typed("stats").stdout.split())


# --------------------------------------------------------------------------------------------------------------- gc
def everything(flow):
    return [key for prefix in ("plan_capture", "capture", "seal") for key in flow.store.list_keys(prefix)]


def test_gc_removes_nothing_unless_told_to(typed, sealed):
    before = everything(sealed)
    values = typed.json("gc")
    assert (values["dry_run"], len(values["shards"])) == (True, 5)
    assert values["bytes"] == sealed.refs[Kind.SHARD_PLAN].facts["bytes"]
    assert everything(sealed) == before
    assert "add --yes" in typed("gc").stdout


def test_gc_removes_what_nobody_refers_to_writes_it_down_and_touches_nothing_else(typed, sealed):
    keys = [sealed.refs[kind].key for kind in (Kind.CORPUS, Kind.VOCAB_MAP, Kind.PROMPT_SET)]
    before = everything(sealed)
    record = typed.json("gc", "--yes")["record"]
    assert everything(sealed) == []
    assert all(find(sealed.store, key) for key in keys)
    written = json.loads(sealed.store.read_bytes(record["record"]))
    assert (written["schema_version"], written["finished"]) == ("eagle3/gc/1", True)
    assert set(written["remove"]) == {key.rpartition("/")[0] for key in before if key.endswith("manifest.json")}
    assert written["bytes"] == sealed.refs[Kind.SHARD_PLAN].facts["bytes"]
    assert typed.json("gc", "--yes")["record"]["remove"] == []


def test_gc_keeps_what_a_release_refers_to_and_shares(typed, sealed, prompts_file):
    small = sealed.refs[Kind.FEATURE_SET]
    typed.release()
    large = grown(sealed, prompts_file)
    values = typed.json("gc", "--yes")
    assert values["kept"] == {small.key: "release demo (current)"}
    assert values["sets"] == [large.key]
    features = FeatureSet.open(sealed.store, small)
    assert [len(features.read(number).input_ids) for number in range(40)] == features.lengths.tolist()
    assert typed.json("verify")["bad"] == 0
    assert len(values["shards"]) >= 1
    assert find(sealed.store, large.key) is None


def test_an_earlier_release_keeps_its_features_unless_history_is_waived(typed, sealed, prompts_file):
    small = sealed.refs[Kind.FEATURE_SET]
    typed.release()
    large = grown(sealed, prompts_file)
    typed.release(features=large)
    assert typed.json("gc")["sets"] == []
    values = typed.json("gc", "--no-history", "--yes")
    assert values["sets"] == [small.key]
    assert typed.json("verify")["bad"] == 0
    assert len(FeatureSet.open(sealed.store, large)) == 60


@pytest.mark.parametrize("state", ["running", "failed", "lost"])
@pytest.mark.parametrize("reads", ["feature_set", "shard_plan"])
def test_gc_keeps_what_a_job_uses_that_runs_or_may_be_resumed(typed, sealed, state, reads):
    typed.job("train-1", "train" if reads == "feature_set" else "capture", {reads: sealed.refs[Kind(reads)]}, state)
    before = everything(sealed)
    values = typed.json("gc", "--yes")
    standing = "running" if state == "running" else "unfinished"
    assert list(values["kept"].values()) == [f"job train-1 ({standing})"]
    assert everything(sealed) == before


def test_a_job_that_succeeded_keeps_nothing_by_itself(typed, sealed):
    typed.job("train-1", "train", {"feature_set": sealed.refs[Kind.FEATURE_SET]})
    assert len(typed.json("gc")["sets"]) == 1


def test_gc_keeps_what_an_unfinished_run_has_made_until_it_is_through_or_abandoned(typed, sealed):
    run = freeze(sealed.store, sealed.config)
    plan, sets = sealed.refs[Kind.SHARD_PLAN], sealed.refs[Kind.FEATURE_SET]
    typed.job("plan_capture-1", "plan_capture", {"corpus": sealed.refs[Kind.CORPUS]}, result=plan, run=run, age_s=9e5)
    typed.job("seal-1", "seal", {"shard_plan": plan}, result=sets, run=run, age_s=9e5)
    os.utime(sealed.tmp_path / "root" / run, (time.time() - 9e5,) * 2)
    assert "(unfinished)" in typed.json("gc")["kept"][sets.key]
    assert "(unfinished)" in typed.json("gc", "--abandoned-after", "11")["kept"][sets.key]
    assert typed.json("gc", "--abandoned-after", "10")["sets"] == [sets.key]
    assert "(abandoned)" not in json.dumps(typed.json("ls")["features"])
    typed.job("publish-1", "publish", run=run)
    assert typed.json("gc")["sets"] == [sets.key]
    assert "(finished)" in json.dumps(typed.json("ls")["features"])


def test_a_run_that_began_again_after_its_release_goes_on(typed, sealed):
    run, sets = freeze(sealed.store, sealed.config), sealed.refs[Kind.FEATURE_SET]
    typed.job("seal-1", "seal", {"shard_plan": sealed.refs[Kind.SHARD_PLAN]}, result=sets, run=run, age_s=50)
    typed.job("publish-1", "publish", run=run, age_s=100)
    assert "(unfinished)" in typed.json("gc")["kept"][sets.key]
    typed.job("publish-2", "publish", run=run, age_s=10)
    assert typed.json("gc")["sets"] == [sets.key]


def test_a_failed_job_is_abandoned_after_the_days_given(typed, sealed):
    typed.job("train-1", "train", {"feature_set": sealed.refs[Kind.FEATURE_SET]}, "failed", age_s=9e5)
    assert typed.json("gc")["sets"] == []
    assert len(typed.json("gc", "--abandoned-after", "10")["sets"]) == 1


def test_a_run_without_jobs_of_its_own_keeps_what_it_would_find(typed, sealed, monkeypatch):
    """Another run has done its stages: what would be found done counts, though no job bears its name."""
    from eagle3_core import jobs

    values = sealed.config.model_dump(mode="json")
    values["training"]["learning_rate"] = 1e-5
    freeze(sealed.store, RunConfig.parse(values, "test"))
    for name in ("prepare", "regenerate", "build_vocab", "plan_capture", "seal"):
        context = sealed.context(name)
        spec = jobs.stage_job(sealed.store.root, freeze(sealed.store, sealed.config), name, context.inputs)
        ref = sealed.refs[context.stage.produces]
        typed.job(spec.directory.name, name, context.inputs, result=ref, run="runs/another.json")
    (sealed.tmp_path / "root" / freeze(sealed.store, sealed.config)).unlink()
    kept = typed.json("gc")["kept"][sealed.refs[Kind.FEATURE_SET].key]
    assert kept.startswith("run ") and kept.endswith("(unfinished)")


def test_gc_removes_nothing_while_it_cannot_tell_what_an_unfinished_run_would_find(typed, sealed, prompts_file):
    run, before = freeze(sealed.store, sealed.config), everything(sealed)
    prompts_file.unlink()
    said = " ".join(typed("gc", "--yes", code=75).stderr.split())
    assert "expected a JSONL file, found none" in said
    assert "--abandoned-after" in said
    assert "so nothing is removed" in said
    assert everything(sealed) == before
    os.utime(sealed.tmp_path / "root" / run, (time.time() - 9e5,) * 2)
    assert len(typed.json("gc", "--abandoned-after", "10")["sets"]) == 1
    typed.job("publish-1", "publish", run=run)
    assert len(typed.json("gc")["sets"]) == 1


def test_gc_waits_for_a_plan_that_is_being_made(typed, sealed):
    typed.job("plan_capture-1", "plan_capture", {"corpus": sealed.refs[Kind.CORPUS]}, "running")
    assert "may use any shard; wait for it" in typed("gc", "--yes", code=65).stderr
    assert len(everything(sealed)) > 5


def test_gc_does_not_begin_while_another_process_makes_a_plan(typed, sealed):
    with sealed.store.claim(PLANNING):
        assert "a plan is being made" in typed("gc", "--yes", code=65).stderr
    assert typed.json("gc", "--yes")["record"]["finished"]


def test_gc_leaves_a_shard_that_somebody_works_on(typed, sealed):
    key = sealed.shard_key(2)
    with sealed.store.claim(key):
        values = typed.json("gc", "--yes")
    assert values["record"]["busy"] == [key]
    assert find(sealed.store, key) is not None
    assert key not in values["shards"]
    assert len(values["shards"]) == 4
    assert values["bytes"] == values["record"]["bytes"]
    assert typed.json("gc", "--yes")["shards"].keys() == {key}
    assert everything(sealed) == []


def test_gc_looks_once_and_says_removed_only_of_what_went(typed, sealed, monkeypatch):
    looked, real, busy = [], features_command.survey, sealed.refs[Kind.FEATURE_SET].key
    monkeypatch.setattr(features_command, "survey", lambda *a, **more: looked.append(a) or real(*a, **more))
    with sealed.store.claim(busy):
        said = typed("gc", "--yes").stdout
    assert len(looked) == 1
    assert f"removed {busy}" not in said
    assert f"busy   {busy}" in said
    assert f"removed {sealed.refs[Kind.SHARD_PLAN].key}" in said


@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_gc_removes_nothing_where_the_way_from_a_release_is_interrupted(typed, sealed, damage):
    checkpoint = typed.release()
    manifest = sealed.tmp_path / "root" / checkpoint.key / "manifest.json"
    manifest.unlink() if damage == "missing" else flip(manifest, 60)
    before = everything(sealed)
    done = typed("gc", "--yes", code=75)
    assert "so nothing is removed" in done.stderr
    assert everything(sealed) == before


def test_gc_removes_nothing_while_any_manifest_is_damaged_since_it_may_have_referred_to_anything(typed, sealed):
    stray = typed.put("train/stray", Kind.CHECKPOINT, feature_set=sealed.refs[Kind.FEATURE_SET])
    assert len(typed.json("gc")["sets"]) == 1
    flip(sealed.tmp_path / "root" / stray.key / "manifest.json", 60)
    assert "so nothing is removed" in typed("gc", "--yes", code=75).stderr
    assert find(sealed.store, sealed.refs[Kind.FEATURE_SET].key) is not None


def test_a_gc_that_dies_on_its_way_leaves_nothing_that_counts_as_whole_and_a_record(typed, sealed, monkeypatch):
    real, calls = collect._remove, []

    def dies(store, key):
        calls.append(key)
        if len(calls) > 4:
            raise KeyboardInterrupt
        return real(store, key)

    monkeypatch.setattr(collect, "_remove", dies)
    CliRunner().invoke(app, ["features", "gc", "--yes", "--root", sealed.store.root])
    [record] = sealed.store.list_keys("gc")
    assert json.loads(sealed.store.read_bytes(record))["finished"] is False
    assert calls[:2] == [sealed.refs[Kind.FEATURE_SET].key, sealed.refs[Kind.SHARD_PLAN].key]
    monkeypatch.undo()
    assert find(sealed.store, calls[0]) is None
    assert len(typed.json("gc", "--yes")["shards"]) == 3
    assert everything(sealed) == []


def test_after_gc_a_run_makes_again_what_it_needs(typed, sealed, engine):
    typed("gc", "--yes")
    before = len(engine.captured)
    assert sealed.run("plan_capture").facts["captured_shards"] == 0
    sealed.capture_all()
    sealed.run("seal")
    assert len(engine.captured) - before == 40 + 3 * 5


@pytest.mark.parametrize("words", [("ls",), ("gc", "--yes")])
def test_a_release_that_cannot_be_read_is_named_in_one_line_and_nothing_is_removed(typed, sealed, words):
    typed.release()
    before = len(everything(sealed))
    sealed.store.write_bytes("releases/demo.json", b"{garbage")
    said = " ".join(typed(*words, code=65).stderr.split())
    assert "releases/demo.json: expected a JSON object, found other text; put a copy of it back" in said
    assert len(everything(sealed)) == before
