"""What a wrong target or prompt file says, and that content alone decides identity."""

import json
import os

import pytest

from eagle3_core import identity
from eagle3_core.errors import ConfigError, TargetError
from eagle3_core.identity import read_target, require_target, target_fingerprint


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_sizes_come_from_config_and_weights(tiny_target):
    shape = read_target(tiny_target)
    assert (shape.hidden_size, shape.num_layers, shape.vocab_size, shape.parameters) == (8, 8, 260, 260 * 8)
    assert shape.model_class == "LlamaForCausalLM"


def test_sizes_of_a_multimodal_target_come_from_its_text_part(tiny_target):
    values = json.loads((tiny_target / "config.json").read_text())
    text = {**values, "hidden_size": 24}
    (tiny_target / "config.json").write_text(json.dumps({"architectures": ["Kimi"], "text_config": text}))
    shape = read_target(tiny_target)
    assert (shape.model_class, shape.hidden_size) == ("Kimi", 24)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda d: (d / "config.json").unlink(), "config.json, found none"),
        (lambda d: (d / "config.json").write_text("{"), "not JSON"),
        (lambda d: (d / "config.json").write_text("[]"), "expected a JSON object"),
        (lambda d: edit(d / "config.json", hidden_size=None), "expected hidden_size"),
        (lambda d: edit(d / "config.json", architectures=[]), "expected architectures"),
        (lambda d: (d / "tokenizer.json").unlink(), "expected a tokenizer"),
        (lambda d: (d / "model.safetensors").unlink(), "expected *.safetensors weights, found none"),
        (lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"), "only pickled weights pytorch_model.bin"),
        (lambda d: (d / "model.safetensors").write_bytes(b"x" * 99), "expected a safetensors header"),
        (lambda d: os.truncate(d / "model.safetensors", 500), "expected 8"),
        (lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b"}}'), "b is missing"),
    ],
)
def test_a_target_that_cannot_be_used_is_refused_in_one_line(tiny_target, damage, words):
    damage(tiny_target)
    with pytest.raises(TargetError) as caught:
        read_target(tiny_target)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_target_directory_is_refused(tmp_path):
    with pytest.raises(TargetError, match="expected a directory"):
        read_target(tmp_path / "nowhere")


def test_every_part_of_the_target_is_in_its_fingerprint(tiny_target):
    before = target_fingerprint(tiny_target)
    assert target_fingerprint(tiny_target) == before
    (tiny_target / "README.md").write_text("not part of what it answers")
    assert target_fingerprint(tiny_target) == before
    changes = {
        "chat_template": lambda: (tiny_target / "chat_template.jinja").write_text("other"),
        "config": lambda: (tiny_target / "generation_config.json").write_text("{}"),
        "tokenizer": lambda: edit(tiny_target / "tokenizer_config.json", other=1),
    }
    for part, change in changes.items():
        change()
        after = target_fingerprint(tiny_target)
        assert after.difference(before.model_dump()) == [part]
        assert after.sha256 != before.sha256
        before = after


def test_a_changed_weight_of_equal_size_is_seen_in_spite_of_the_cache(tiny_target, monkeypatch):
    weights = tiny_target / "model.safetensors"
    # As if the file had been there for long: its digest is remembered.
    monkeypatch.setattr(identity.time, "time_ns", lambda: 1 << 62)
    before = target_fingerprint(tiny_target)
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    old = weights.stat()
    weights.write_bytes(data)
    os.utime(weights, ns=(old.st_atime_ns, old.st_mtime_ns))
    assert target_fingerprint(tiny_target).difference(before.model_dump()) == ["weights"]


def test_a_file_is_hashed_once(tiny_target, monkeypatch):
    monkeypatch.setattr(identity.time, "time_ns", lambda: 1 << 62)
    before = target_fingerprint(tiny_target)

    def refuse(*_):
        raise AssertionError("hashed again")

    monkeypatch.setattr(identity.hashlib, "file_digest", refuse)
    assert target_fingerprint(tiny_target) == before


def test_a_target_that_changed_under_a_run_is_named_with_the_part(config, tiny_target):
    begun = target_fingerprint(tiny_target).model_dump()
    assert require_target(config, begun) == tiny_target
    edit(tiny_target / "tokenizer_config.json", other=1)
    with pytest.raises(TargetError, match="found another tokenizer"):
        require_target(config, begun)


def test_samples_longer_than_the_targets_positions_are_refused(config, tiny_target):
    long = config.model_copy(update={"data": config.data.model_copy(update={"max_sample_tokens": 4096})})
    with pytest.raises(ConfigError, match="at most the target's 512 positions"):
        identity.check_sizes(long, read_target(tiny_target))
