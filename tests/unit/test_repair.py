"""Every byte class of a shard that is damaged is found, put aside, and exactly that is captured again."""

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict

import numpy as np
import pytest
import xxhash
from typer.testing import CliRunner

from eagle3_core import jobs
from eagle3_core.artifacts import Kind
from eagle3_core.cli.main import app
from eagle3_core.data.features import FeatureSet
from eagle3_core.data.plan import read_plan
from eagle3_core.data.reuse import captured_shards
from eagle3_core.data.shards import ShardIndex
from eagle3_core.errors import CorruptArtifactError, NotCommittedError
from eagle3_core.jobs.files import COMMAND, EXIT, RESULT, SUPERVISOR
from eagle3_core.jobs.processes import Identity
from eagle3_core.pipeline import STAGES
from eagle3_core.repair import inspect, main, quarantine_bad
from eagle3_core.runner import freeze
from eagle3_core.storage import commit, find, load, verify
from eagle3_core.storage.local import LocalStore
from eagle3_core.storage.tensors import read_header


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def zero_half(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    path.write_bytes(data)


DAMAGES = {
    "header": lambda shard: flip(shard / "features.safetensors", 40),
    "header length": lambda shard: flip(shard / "features.safetensors", 1),
    "tensor": lambda shard: flip(shard / "features.safetensors", 5000),
    "last byte": lambda shard: flip(shard / "features.safetensors", -1),
    "index": lambda shard: flip(shard / "index.json", 30),
    "manifest": lambda shard: flip(shard / "manifest.json", 60),
    "truncated": lambda shard: truncate(shard / "features.safetensors"),
    "truncated manifest": lambda shard: truncate(shard / "manifest.json"),
    "zeroed half": lambda shard: zero_half(shard / "features.safetensors"),
    "zeroed half of the manifest": lambda shard: zero_half(shard / "manifest.json"),
    "file missing": lambda shard: (shard / "features.safetensors").unlink(),
}


def shard_directory(flow, index):
    return flow.tmp_path / "root" / flow.shard_key(index)


def test_good_shards_are_ok(sealed):
    findings = inspect(sealed.store, sealed.refs[Kind.SHARD_PLAN])
    assert [finding.state for finding in findings] == ["ok"] * 5
    assert [finding.index for finding in findings] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_of_any_kind_is_found_put_aside_and_captured_again_alone(sealed, engine, damage):
    plan, before = sealed.refs[Kind.SHARD_PLAN], verify(sealed.store, sealed.refs[Kind.FEATURE_SET])
    DAMAGES[damage](shard_directory(sealed, 2))
    looked = quarantine_bad(sealed.store, plan, dry_run=True)
    assert [finding.state for finding in looked] == ["ok", "ok", "corrupt", "ok", "ok"]
    assert sealed.store.list_keys("quarantine") == []
    found = quarantine_bad(sealed.store, plan)
    assert found == looked
    assert find(sealed.store, sealed.shard_key(2)) is None
    [reason] = [key for key in sealed.store.list_keys("quarantine") if key.endswith("reason.json")]
    assert json.loads(sealed.store.read_bytes(reason))["reason"] == found[2].reason
    assert [finding.state for finding in inspect(sealed.store, plan)] == ["ok", "ok", "missing", "ok", "ok"]
    captured = len(engine.captured)
    sealed.capture_all()
    answers = json.loads((shard_directory(sealed, 2) / "index.json").read_text())["sample_ids"]
    assert len(engine.captured) - captured == len(answers) + 3
    again = sealed.run("seal")
    assert again.manifest_sha256 == before.ref.manifest_sha256


@pytest.mark.parametrize("damage", sorted(set(DAMAGES) - {"tensor", "last byte", "zeroed half"}))
def test_seal_names_the_shards_to_capture_again_and_puts_bad_ones_aside(planned, damage):
    planned.capture_all()
    DAMAGES[damage](shard_directory(planned, 3))
    with pytest.raises(CorruptArtifactError, match=r"found 1 missing or corrupt: 3 \(first: "):
        planned.run("seal")
    with pytest.raises(NotCommittedError, match=r"found 1 missing or corrupt: 3 "):
        planned.run("seal")
    planned.capture_all()
    planned.run("seal")


class CountingStore(LocalStore):
    """Counts the bytes of features that are read by range, and how often the file itself is asked for."""

    read, files = 0, 0

    def read_range(self, key, sha256, start, size):
        self.read += size
        return super().read_range(key, sha256, start, size)

    def local_path(self, key, sha256):
        self.files += key.endswith("features.safetensors")
        return super().local_path(key, sha256)


def test_f6_sealing_reads_no_states_and_a_few_hundred_bytes_a_shard(planned):
    planned.capture_all()
    planned.store = store = CountingStore(planned.tmp_path / "root")
    planned.run("seal")
    assert 0 < store.read < 5 * 1024
    # Of each for its size, and twice for its header.
    assert store.files == 5 * 3


def test_damaged_states_that_were_sealed_are_refused_by_who_reads_them_and_mended_by_repair(planned):
    planned.capture_all()
    features = shard_directory(planned, 2) / "features.safetensors"
    whole = features.read_bytes()
    flip(features, read_header(features)["aux_hidden_states"].start)
    sealed = planned.run("seal")
    opened = FeatureSet.open(planned.store, sealed)
    opened.read(0)
    with pytest.raises(CorruptArtifactError, match=r"aux_hidden_states of .*; repair it"):
        opened.read(int(opened._shard_of.searchsorted(2)))
    assert [finding.state for finding in quarantine_bad(planned.store, planned.refs[Kind.SHARD_PLAN])][2] == "corrupt"
    planned.capture_all()
    assert planned.run("seal") == sealed
    assert features.read_bytes() == whole


def test_a_sealed_set_whose_shard_was_damaged_later_is_sealed_anew_only_after_repair(sealed):
    (shard_directory(sealed, 1) / "manifest.json").unlink()
    with pytest.raises(NotCommittedError):
        sealed.run("seal")


def test_a_whole_shard_of_another_plan_is_corrupt_here(sealed, tmp_path):
    plan, directory = sealed.refs[Kind.SHARD_PLAN], shard_directory(sealed, 0)
    staged = tmp_path / "staged"
    staged.mkdir()
    for name in ("features.safetensors", "index.json"):
        (staged / name).write_bytes((directory / name).read_bytes())
    commit(sealed.store, sealed.shard_key(1), staged, Kind.SHARD, replace=True)
    finding = inspect(sealed.store, plan)[1]
    assert finding.state == "corrupt"
    assert "planned samples" in finding.reason


@pytest.mark.parametrize("change", ["token", "width"])
def test_a_shard_that_agrees_with_its_own_manifest_but_not_with_the_plan_is_corrupt(sealed, tmp_path, change):
    from safetensors.torch import load_file, save_file

    plan, directory = sealed.refs[Kind.SHARD_PLAN], shard_directory(sealed, 0)
    staged = tmp_path / "staged"
    staged.mkdir()
    tensors = load_file(directory / "features.safetensors")
    if change == "token":
        tensors["input_ids"][0] += 1
    else:
        tensors["last_hidden_state"] = tensors["last_hidden_state"][:, :-1].contiguous()
    save_file(tensors, staged / "features.safetensors")
    (staged / "index.json").write_bytes((directory / "index.json").read_bytes())
    commit(sealed.store, sealed.shard_key(0), staged, Kind.SHARD, replace=True)
    assert inspect(sealed.store, plan)[0].state == "corrupt"


def replace_shard(flow, index, change, honest=False):
    """Commit a shard whose manifest agrees with what `change` made of its tensors, and its index too if `honest`."""
    from safetensors.torch import load_file, save_file

    old, staged = load(flow.store, flow.shard_key(index)), flow.tmp_path / "staged"
    staged.mkdir()
    tensors = load_file(old.path("features.safetensors"))
    change(tensors)
    save_file(tensors, staged / "features.safetensors")
    described = ShardIndex.parse(old.json("index.json"), "index")
    if honest:
        described = described.model_copy(update={"checksums": checksums_of(tensors, described)})
    (staged / "index.json").write_text(described.model_dump_json())
    commit(flow.store, old.ref.key, staged, Kind.SHARD, replace=True)


def checksums_of(tensors, index):
    """Return the checksum of every sample's rows, cut out of whole tensors."""
    found = {}
    for name, values in tensors.items():
        ends = np.cumsum(index.label_rows if name.startswith("last_") else index.lengths)
        parts = np.split(values.numpy(), ends[:-1])
        found[name] = tuple(xxhash.xxh3_64_hexdigest(part.tobytes()) for part in parts)
    return found


def test_an_index_holds_the_checksum_of_every_samples_rows(sealed):
    from safetensors.torch import load_file

    shard = load(sealed.store, sealed.shard_key(0))
    index = ShardIndex.parse(shard.json("index.json"), "index")
    assert index.checksums == checksums_of(load_file(shard.path("features.safetensors")), index)
    assert len(set(index.checksums["aux_hidden_states"])) == len(index.sample_ids) > 1
    assert shard.manifest.facts["engine"] == {
        "backend": "sglang", "fingerprint": {"sglang": "test"}, "device": "cpu", "tensor_parallel": "1",
        "engine_args": "{}",
    }  # fmt: skip


def test_damage_is_said_tensor_by_tensor_and_sample_by_sample(sealed):
    first = shard_directory(sealed, 2) / "features.safetensors"
    flip(first, read_header(first)["aux_hidden_states"].start)
    flip(shard_directory(sealed, 3) / "features.safetensors", -1)
    found = inspect(sealed.store, sealed.refs[Kind.SHARD_PLAN])
    ids = read_plan(load(sealed.store, sealed.refs[Kind.SHARD_PLAN])).shards
    assert found[2].reason.endswith(f"damage in aux_hidden_states of {ids[2].sample_ids[0]}")
    assert found[3].reason.endswith(f"damage in loss_mask of {ids[3].sample_ids[-1]}")


def test_what_the_disk_never_got_right_is_found_by_the_checksums_of_rows_alone(sealed):
    replace_shard(sealed, 1, lambda tensors: tensors["last_hidden_state"].add_(1))
    plan = sealed.refs[Kind.SHARD_PLAN]
    assert inspect(sealed.store, plan)[1].state == "ok"
    finding = inspect(sealed.store, plan, deep=lambda _: None)[1]
    assert finding.state == "corrupt"
    assert re.search(r"last_hidden_state of \w+ and \d+ more samples: not what the capture handed", finding.reason)


def test_more_rows_than_the_samples_have_are_a_finding_and_no_crash(sealed):
    replace_shard(sealed, 1, lambda tensors: tensors.update(aux_hidden_states=tensors["aux_hidden_states"].view(-1, 8)))
    finding = inspect(sealed.store, sealed.refs[Kind.SHARD_PLAN], deep=lambda _: None)[1]
    assert finding.state == "corrupt"
    assert "aux_hidden_states of" in finding.reason


def test_a_value_that_is_not_finite_is_found_with_its_row(sealed):
    replace_shard(sealed, 1, lambda tensors: tensors["aux_hidden_states"][7, 3].fill_(float("nan")), honest=True)
    plan = sealed.refs[Kind.SHARD_PLAN]
    finding = inspect(sealed.store, plan, deep=lambda _: None)[1]
    assert finding.state == "corrupt"
    assert finding.reason.endswith("aux_hidden_states: a value in row 7 is not finite")


def test_a_reader_hands_out_no_row_that_is_not_what_was_captured(sealed):
    features = FeatureSet.open(sealed.store, sealed.refs[Kind.FEATURE_SET])
    path = shard_directory(sealed, 0) / "features.safetensors"
    name, ends = features.sample_ids[0], read_header(path)
    for tensor in ("aux_hidden_states", "last_hidden_state", "input_ids", "loss_mask"):
        flip(path, ends[tensor].start)
        with pytest.raises(CorruptArtifactError, match=rf"{tensor} of {name}: expected xxh3 \w+, found \w+ 3 times"):
            FeatureSet.open(sealed.store, sealed.refs[Kind.FEATURE_SET]).read(0)
        flip(path, ends[tensor].start)
    assert features.read(0).aux_hidden_states.isfinite().all()


@pytest.mark.parametrize("version", [None, "eagle3/shard-index/3"])
def test_a_shard_of_another_version_is_called_that_and_not_used_again(sealed, version):
    old, staged = load(sealed.store, sealed.shard_key(1)), sealed.tmp_path / "staged"
    staged.mkdir()
    (staged / "features.safetensors").write_bytes(old.path("features.safetensors").read_bytes())
    (staged / "index.json").write_text(json.dumps(old.json("index.json") | {"schema_version": version}))
    commit(sealed.store, old.ref.key, staged, Kind.SHARD, replace=True)
    finding = inspect(sealed.store, sealed.refs[Kind.SHARD_PLAN])[1]
    assert re.search(rf"expected eagle3/shard-index/2, found {version!r}; run plan_capture again", finding.reason)
    assert len(captured_shards(sealed.store, old.ref.key.split("/")[1])) == 4


def test_a_deep_look_hears_of_every_byte(sealed):
    heard = []
    inspect(sealed.store, sealed.refs[Kind.SHARD_PLAN], deep=heard.append)
    sizes = [(shard_directory(sealed, index) / "features.safetensors").stat().st_size for index in range(5)]
    assert sum(heard) == sum(sizes)


def test_a_reader_refuses_a_shard_that_is_not_the_one_that_was_sealed(sealed):
    features = FeatureSet.open(sealed.store, sealed.refs[Kind.FEATURE_SET])
    artifact = load(sealed.store, sealed.shard_key(0))
    staged = sealed.tmp_path / "staged"
    staged.mkdir()
    for name in artifact.manifest.files:
        (staged / name).write_bytes(artifact.path(name).read_bytes())
    (staged / "more").write_text("x")
    commit(sealed.store, artifact.ref.key, staged, Kind.SHARD, replace=True)
    with pytest.raises(CorruptArtifactError, match="expected manifest"):
        features.read(0)


def test_a_reader_refuses_a_shard_that_is_cut_off(sealed):
    truncate(shard_directory(sealed, 0) / "features.safetensors")
    features = FeatureSet.open(sealed.store, sealed.refs[Kind.FEATURE_SET])
    with pytest.raises(CorruptArtifactError, match="repair it"):
        features.read(0)


def test_the_command_prints_the_indexes_to_capture_again(sealed, capsys):
    DAMAGES["tensor"](shard_directory(sealed, 1))
    (shard_directory(sealed, 4) / "manifest.json").unlink()
    plan = sealed.refs[Kind.SHARD_PLAN].model_dump_json()
    assert main(["--root", sealed.store.root, "--plan", plan, "--check-only"]) == 0
    assert capsys.readouterr().out == "[1, 4]\n"
    assert main(["--root", sealed.store.root, "--plan", plan]) == 0
    assert capsys.readouterr().out == "[1, 4]\n"
    assert main(["--root", sealed.store.root, "--plan", '{"kind": "shard_plan"}']) == 65
    assert capsys.readouterr().err.startswith("error: [ConfigError] --plan: ")


def leave_jobs(flow, run):
    """Leave the directories of the jobs that made what the flow has, as a run without a scheduler does."""
    here = Identity.of(os.getpid())
    for name in ("prepare", "regenerate", "build_vocab", "plan_capture"):
        stage = STAGES[name]
        inputs = {key: flow.refs[kind] for key, kind in stage.inputs}
        spec = jobs.stage_job(flow.store.root, run, name, inputs)
        spec.directory.mkdir(parents=True)
        gone = Identity(2**22 + 1, "0", here.boot_id)
        for file, values in (
            (COMMAND, {"argv": list(spec.argv)}), (SUPERVISOR, asdict(gone)), (EXIT, {"code": 0}),
            (RESULT, flow.refs[stage.produces].model_dump(mode="json")),
        ):  # fmt: skip
            (spec.directory / file).write_text(json.dumps(values))


def test_repair_that_only_checks_answers_75_where_a_shard_is_bad_and_moves_nothing(sealed):
    recipe = sealed.tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(sealed.config.model_dump(mode="json")))
    command = ["repair", str(recipe), "--check-only", "--json", "--root", sealed.store.root]
    leave_jobs(sealed, freeze(sealed.store, sealed.config))
    well = CliRunner().invoke(app, command)
    assert (well.exit_code, json.loads(well.stdout)["bad"]) == (0, [])
    DAMAGES["tensor"](shard_directory(sealed, 1))
    DAMAGES["file missing"](shard_directory(sealed, 4))
    found = CliRunner().invoke(app, command)
    assert (found.exit_code, json.loads(found.stdout)) == (75, {"shards": 5, "bad": [1, 4], "recaptured": False})
    assert [line.split(":")[0] for line in found.stderr.splitlines() if "corrupt" in line] == ["shard 1", "shard 4"]
    assert sealed.store.list_keys("quarantine") == []


def test_looking_at_shards_needs_no_heavy_library():
    code = (
        "import sys, eagle3_core.repair, eagle3_core.identity, eagle3_core.vocab, eagle3_core.stages.capture\n"
        "print({'torch', 'numpy', 'transformers', 'safetensors', 'sglang', 'boto3'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
