"""A feature set opens from its index alone, whatever the size of the data."""

import json

import numpy as np
import pytest
import safetensors

from eagle3_core.artifacts import Kind
from eagle3_core.data.encoding import Encoding
from eagle3_core.data.features import SAMPLES, FeatureSet, write_feature_set
from eagle3_core.errors import ArtifactError, CorruptArtifactError, Remedy, UnknownSchemaError
from eagle3_core.storage import commit, load, open_store


def test_opening_reads_no_shard_and_reading_one_sample_opens_one(sealed, monkeypatch):
    opened = []
    real = safetensors.safe_open
    monkeypatch.setattr(safetensors, "safe_open", lambda path, **more: opened.append(path) or real(path, **more))
    features = FeatureSet.open(sealed.store, sealed.refs[Kind.FEATURE_SET])
    assert opened == []
    features.read(0)
    features.read(1)
    assert len(opened) == 1
    features.read(len(features) - 1)
    assert len(opened) == 2


def test_a_shard_that_a_repair_has_moved_away_is_a_reason_to_try_again(sealed):
    features = FeatureSet.open(sealed.store, sealed.refs[Kind.FEATURE_SET])
    plan = json.loads(load(sealed.store, sealed.refs[Kind.FEATURE_SET]).path(SAMPLES).read_text())
    first = plan["shards"][0]["key"]
    (sealed.tmp_path / "root" / first).rename(sealed.tmp_path / "moved")
    with pytest.raises(
        CorruptArtifactError, match=rf"{first}: expected a shard of seal/\w+, found none: .* repair"
    ) as caught:
        features.read(0)
    assert caught.value.remedy is Remedy.RETRY


def test_two_readers_give_equal_rows_in_any_order(sealed):
    one, other = (FeatureSet.open(sealed.store, sealed.refs[Kind.FEATURE_SET]) for _ in range(2))
    forward = [one.read(sample) for sample in range(len(one))]
    for sample in reversed(range(len(other))):
        again = other.read(sample)
        assert again.aux_hidden_states.equal(forward[sample].aux_hidden_states)
        assert again.input_ids.equal(forward[sample].input_ids)


def test_37312_samples_open_without_any_shard_being_there(tmp_path):
    count, store = 37_312, open_store(str(tmp_path / "root"))
    lengths = np.full(count, 2353, dtype=np.int32)
    staged = tmp_path / "staged"
    staged.mkdir()
    columns = {name: [0] * count for name in ("shard", "domain", "held_out")}
    columns |= {"length": lengths, "supervised": lengths, "label_rows": lengths}
    columns |= {"checksums": np.zeros((count, 4), dtype=np.uint64)}
    values = {
        "aux_layers": [1, 29, 57], "target": {}, "domains": ["general"],
        "sample_ids": [f"{number:024x}" for number in range(count)],
        "shards": [{"key": "capture/x/00000", "manifest_sha256": "0" * 64}],
    }  # fmt: skip
    encoding = Encoding(dtype="bfloat16", fp8="none", last_rows="labels", num_aux=3, hidden_size=7168)
    write_feature_set(staged, encoding, columns, values)
    ref = commit(store, "seal/x", staged, Kind.FEATURE_SET)
    features = FeatureSet.open(store, ref)
    assert int(features.lengths.sum()) == 87_795_136
    with pytest.raises(ArtifactError):
        features.read(0)


def test_another_kind_of_artifact_is_refused(sealed):
    with pytest.raises(ArtifactError, match="expected a feature_set reference, found shard_plan"):
        FeatureSet.open(sealed.store, sealed.refs[Kind.SHARD_PLAN])


def test_a_feature_set_of_another_version_is_refused_with_what_to_do(sealed, tmp_path):
    artifact = load(sealed.store, sealed.refs[Kind.FEATURE_SET])
    staged = tmp_path / "staged"
    staged.mkdir()
    values = json.loads(artifact.path(SAMPLES).read_text())
    for version in (None, "eagle3/feature-set/4"):
        refused = f"expected eagle3/feature-set/3, found {version!r}; run seal again"
        (staged / SAMPLES).write_text(json.dumps(values | {"schema_version": version}))
        ref = commit(sealed.store, "seal/other", staged, Kind.FEATURE_SET, replace=True)
        with pytest.raises(UnknownSchemaError, match=refused):
            FeatureSet.open(sealed.store, ref)
