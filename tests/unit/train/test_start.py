"""A warm start: whose weights, which rows of the head, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from eagle3_core.artifacts import Kind
from eagle3_core.config import RunConfig
from eagle3_core.config.champion import Champion
from eagle3_core.errors import ConfigError, CorruptArtifactError
from eagle3_core.releases import pinned
from eagle3_core.storage import commit, open_store
from eagle3_core.train import start as start_module
from eagle3_core.train.start import champion_weights, require_start
from eagle3_core.vocab import VocabMap

V = 40
KNOWN = VocabMap((*range(0, 36, 2), 37, 38, 39), V)
VOCAB_FILE = "vocab.safetensors"


@pytest.fixture
def sizes(make_job):
    return make_job().sizes.model_copy(update={"draft_vocab_size": len(KNOWN.target_ids)})


@pytest.fixture
def champion(tmp_path, sizes):
    """A root with a champion, and the run that starts from it; also the champion's weights."""
    store, staged = open_store(str(tmp_path / "root")), tmp_path / "staged"
    staged.mkdir()
    generator = torch.Generator().manual_seed(5)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in sizes.parameter_shapes().items()}
    save_file(weights, staged / "drafter.safetensors")
    save_file({"d2t": torch.tensor(KNOWN.d2t), "t2d": torch.tensor(KNOWN.t2d)}, staged / VOCAB_FILE)
    (staged / "drafter_config.json").write_text(sizes.model_dump_json())
    pin = pinned(commit(store, "train/champion", staged, Kind.CHECKPOINT))

    def run(start_from="champion", target=sizes.target_sha256, **drafter):
        values = {"target": {"model": "x"}, "data": {"prompts": "x"}, "training": {"start_from": start_from}}
        values |= {"drafter": drafter}
        frozen = Champion(drafter=pin, checkpoint=pin, report=pin, target_sha256=target)
        return RunConfig.parse({**values, "champion": frozen.model_dump()}, "test")

    run.store, run.weights, run.root = store, weights, tmp_path / "root"
    return run


def start(champion, run, sizes, vocab=KNOWN):
    head = torch.full((len(vocab.target_ids), sizes.hidden_size), 0.5)
    return champion_weights(run, champion.store, sizes, vocab, VOCAB_FILE, head)


def test_the_champions_weights_are_the_first_ones_of_the_challenger(champion, sizes, make_job):
    found = start(champion, champion(), sizes)
    assert {name: bool(torch.equal(found[name], tensor)) for name, tensor in champion.weights.items()} == dict.fromkeys(
        champion.weights, True
    )
    job = replace(make_job(), sizes=sizes, draft_to_target=KNOWN.target_ids, start=found)
    drafter, _ = job.build(torch.device("cpu"))
    for name, parameter in drafter.named_parameters():
        assert torch.equal(parameter, champion.weights[name]), name


def test_without_a_champion_or_its_wish_training_starts_from_scratch(champion, sizes):
    assert start(champion, champion("scratch"), sizes) is None
    none = champion().model_copy(update={"champion": None})
    assert start(champion, none, sizes) is None


def test_a_champion_of_another_target_is_no_start(champion, sizes):
    assert start(champion, champion(target="8" * 64), sizes) is None


def test_another_draft_vocabulary_takes_known_rows_and_fresh_ones_for_new_tokens(champion, sizes):
    wanted = VocabMap((0, 1, 2, 36, 39), V)
    found = start(champion, champion(), sizes.model_copy(update={"draft_vocab_size": 5}), wanted)["lm_head.weight"]
    before = champion.weights["lm_head.weight"]
    at = KNOWN.target_ids.index
    assert torch.equal(found[[0, 2, 4]], before[[at(0), at(2), at(39)]])
    assert bool((found[[1, 3]] == 0.5).all())


def test_a_frozen_head_is_the_targets_whatever_the_champions_was_trained_to(champion, sizes):
    found = start(champion, champion(train_lm_head=False), sizes)
    assert bool((found.pop("lm_head.weight") == 0.5).all())
    assert all(torch.equal(tensor, champion.weights[name]) for name, tensor in found.items())


def test_a_vocabulary_of_new_tokens_alone_takes_fresh_rows(champion, sizes):
    wanted = VocabMap((1, 3), V)
    found = start(champion, champion(), sizes.model_copy(update={"draft_vocab_size": 2}), wanted)
    assert bool((found["lm_head.weight"] == 0.5).all())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"intermediate_size": 32}, "intermediate_size, found intermediate_size 24 instead of 32"),
        ({"aux_layers": (0, 1, 3)}, r"aux_layers, found aux_layers \(0, 1, 2\) instead of \(0, 1, 3\)"),
        ({"num_heads": 4, "head_dim": 4}, "num_heads, head_dim, found num_heads 2 instead of 4"),
    ],
)
def test_a_champion_of_another_shape_is_refused_in_one_line(champion, sizes, changes, said):
    with pytest.raises(
        ConfigError, match=rf"training.start_from: expected a champion with this drafter's {said}"
    ) as caught:
        start(champion, champion(), sizes.model_copy(update=changes))
    assert str(caught.value).endswith("set the champion's, or scratch")


@pytest.mark.parametrize("same", [True, False])
def test_the_preflight_refuses_such_a_champion_of_this_target_and_no_other(champion, sizes, same, monkeypatch):
    now = SimpleNamespace(sha256=sizes.target_sha256 if same else "9" * 64)
    monkeypatch.setattr(start_module, "target_fingerprint", lambda _directory: now)
    assert require_start(champion(), champion.store, sizes) == {"started_from": "train/champion"}
    assert require_start(champion("scratch"), champion.store, sizes) == {"started_from": None}
    other = sizes.model_copy(update={"intermediate_size": 32, "target_sha256": ""})
    if same:
        with pytest.raises(ConfigError, match="intermediate_size 24 instead of 32 in train/champion"):
            require_start(champion(), champion.store, other)
    else:
        assert require_start(champion(), champion.store, other) == {"started_from": None}


def test_a_damaged_champion_is_refused(champion, sizes):
    path = champion.root / "train" / "champion" / "drafter.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(CorruptArtifactError):
        start(champion, champion(), sizes)


def test_another_start_is_another_training_and_a_scratch_one_keeps_its_name(champion):
    def named(**training):
        run = champion()
        return run.model_copy(update={"training": run.training.model_copy(update=training)}).slice(
            ("training", "start")
        )

    plain = named(start_from="scratch")
    assert plain == named(start_from="scratch", warm_learning_rate=1e-5)
    assert plain == champion().model_copy(update={"champion": None}).slice(("training", "start"))
    assert len({str(found) for found in (plain, named(), named(warm_learning_rate=1e-5))}) == 3


def test_the_warm_rate_is_that_of_a_warm_start_alone(champion):
    training = champion().training.model_copy(update={"warm_learning_rate": 1e-5})
    assert training.of_start(warm=True).learning_rate == 1e-5
    assert training.of_start(warm=False).learning_rate == training.learning_rate
    assert champion().training.of_start(warm=True).learning_rate == training.learning_rate
