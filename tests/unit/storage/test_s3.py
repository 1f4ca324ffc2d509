"""The same artifacts and the same errors on S3, against a real server over TLS."""

import json
import os
import re
from pathlib import Path

import pytest

from eagle3_core.artifacts import Kind
from eagle3_core.errors import CorruptArtifactError, InputError, NotCommittedError, StoreUnreachableError
from eagle3_core.storage import commit, find, load, open_store, quarantine, verify
from eagle3_core.storage.manifest import file_sha256
from eagle3_core.storage.s3 import Bucket


def test_what_was_committed_is_found_and_verified(store, committed, tmp_path):
    assert find(store, "seal/abc") == committed
    assert verify(store, committed).path("deep/two.bin").read_bytes() == b"b" * 500
    two, one = file_sha256(tmp_path / "staged/deep/two.bin")[:16], file_sha256(tmp_path / "staged/one.bin")[:16]
    named = [f"seal/abc/deep/{two}/two.bin", "seal/abc/manifest.json", f"seal/abc/{one}/one.bin"]
    assert store.list_keys("seal") == sorted(named)
    assert store.exists("seal/abc/manifest.json")
    assert not store.exists("seal/abc/none")


def test_nothing_committed_is_not_an_error_of_the_store(store):
    assert find(store, "seal/abc") is None
    with pytest.raises(NotCommittedError):
        load(store, "seal/abc")
    assert store.list_keys("seal") == []


def test_a_download_is_cached_until_the_object_changes(store, committed, s3, server, object_of):
    artifact = load(store, committed)
    path = artifact.path("one.bin")
    server.requests.clear()
    assert artifact.path("one.bin") == path
    assert [request for request in server.requests if request.startswith("GET")] == []
    s3.put_object(Bucket="bucket", Key=object_of("some/prefix/seal/abc", "one.bin"), Body=b"c" * 1000)
    with pytest.raises(CorruptArtifactError, match="2 downloads; repair it"):
        artifact.path("one.bin")


@pytest.mark.parametrize("body", [b"c" * 1000, b"a" * 500, b""])
def test_changed_and_cut_off_objects_are_found_and_go_to_quarantine(store, committed, s3, object_of, body):
    s3.put_object(Bucket="bucket", Key=object_of("some/prefix/seal/abc", "one.bin"), Body=body)
    with pytest.raises(CorruptArtifactError):
        verify(store, committed)
    moved = quarantine(store, "seal/abc", "because")
    assert find(store, "seal/abc") is None
    assert store.list_keys("seal/abc") == []
    assert json.loads(store.read_bytes(f"{moved}/reason.json")) == {"key": "seal/abc", "reason": "because"}
    [name] = [key for key in store.list_keys(moved) if key.endswith("/one.bin")]
    assert store.read_bytes(name) == body


def test_a_file_larger_than_one_part_arrives_whole(store, tmp_path, server, monkeypatch):
    monkeypatch.setattr("eagle3_core.storage.s3.PART_BYTES", 5 << 20)
    server.requests.clear()
    staged = tmp_path / "staged"
    staged.mkdir()
    content = os.urandom(9 << 20)
    (staged / "large.bin").write_bytes(content)
    artifact = verify(store, commit(store, "seal/large", staged, Kind.FEATURE_SET))
    assert artifact.path("large.bin").read_bytes() == content
    assert sum("partNumber" in request and request.startswith("PUT") for request in server.requests) == 2


def test_a_bucket_that_is_not_there_is_one_line_about_the_root(s3):
    with pytest.raises(InputError, match=r"NoSuchBucket.*check bucket and rights"):
        open_store("s3://other/prefix").write_bytes("probe", b"")
    with pytest.raises(InputError, match="expected s3://bucket/prefix"):
        open_store("s3:///prefix")


def test_a_store_that_does_not_answer_asks_for_a_retry(s3, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("eagle3_core.storage.s3.ATTEMPTS", 1)
    with pytest.raises(StoreUnreachableError, match="try again"):
        open_store("s3://bucket/prefix").read_bytes("a")


def test_missing_credentials_are_one_line(s3, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(InputError, match="set the AWS environment variables"):
        open_store("s3://bucket/prefix").read_bytes("a")


def test_the_data_stages_run_on_s3_too(s3, flow_on, object_of):
    from eagle3_core.data.features import FeatureSet
    from eagle3_core.repair import quarantine_bad

    flow = flow_on("s3://bucket/root")
    for name in ("prepare", "regenerate", "build_vocab", "plan_capture"):
        flow.run(name)
    flow.capture_all()
    sealed = flow.run("seal")
    features = FeatureSet.open(flow.store, sealed)
    assert features.read(0).aux_hidden_states.shape == (features.lengths[0], 24)
    key = flow.shard_key(2)
    s3.put_object(Bucket="bucket", Key=object_of(f"root/{key}", "features.safetensors"), Body=b"torn")
    findings = quarantine_bad(flow.store, flow.refs[Kind.SHARD_PLAN])
    assert [finding.state for finding in findings].count("corrupt") == 1
    flow.capture_all()
    assert flow.run("seal") == sealed


def test_features_are_listed_verified_measured_and_collected_on_s3_too(s3, tmp_path, flow_on, object_of, monkeypatch):
    from typer.testing import CliRunner

    from eagle3_core.cli.main import app

    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    flow = flow_on("s3://bucket/root")

    def typed(*words, code=0):
        done = CliRunner().invoke(app, ["features", *words, "--root", "s3://bucket/root", "--json"])
        assert done.exit_code == code, done.stderr
        return json.loads(done.stdout) if done.stdout else done.stderr

    for name in ("prepare", "regenerate", "build_vocab", "plan_capture"):
        flow.run(name)
    flow.capture_all()
    sealed = flow.run("seal")
    [row] = typed("ls")["features"]
    assert (row["key"], row["state"], row["samples"]) == (sealed.key, "sealed", 40)
    assert 0 <= row["age_s"] < 600
    assert typed("verify")["bad"] == 0
    assert typed("stats")["features"][sealed.key]["total"]["samples"] == 40
    torn = object_of(f"root/{flow.shard_key(2)}", "features.safetensors")
    s3.put_object(Bucket="bucket", Key=torn, Body=b"torn")
    [result] = typed("verify", "--quarantine", code=75)["sets"]
    assert list(result["problems"]) == ["shard 2"]
    assert flow.store.exists(f"{flow.shard_key(1)}/manifest.json")
    assert not flow.store.exists(f"{flow.shard_key(2)}/manifest.json")
    assert "add --alone" in typed("gc", "--yes", code=65)
    assert len(typed("gc", "--yes", "--alone")["record"]["remove"]) == 6
    assert flow.store.list_keys("capture") == []


def test_when_an_object_was_written_is_known(store):
    import time

    store.write_bytes("a", b"")
    assert abs(store.modified_at("a") - time.time()) < 60
    with pytest.raises(FileNotFoundError):
        store.modified_at("none")


def test_clients_of_s3_are_made_in_one_place():
    import eagle3_core

    package = Path(eagle3_core.__file__).parent
    sources = [*package.rglob("*.py"), *(package.parent / "operators").rglob("*.py")]
    makes = re.compile(r"^\s*import boto|client\(.s3", re.MULTILINE)
    found = [path for path in sources if makes.search(path.read_text(encoding="utf-8"))]
    assert found == [package / "storage" / "s3.py"]


def test_an_upload_that_ended_meanwhile_is_no_fault_to_give_up(s3):
    upload = s3.create_multipart_upload(Bucket="bucket", Key="capture/a")["UploadId"]
    for _ in range(2):
        Bucket("bucket").abort("capture/a", upload)
    assert Bucket("bucket").uploads("") == []
