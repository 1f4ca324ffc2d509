"""The preflight tells how the prompts will split, and refuses what `prepare` would refuse."""

import json

import pytest

from eagle3_core.config import RunConfig
from eagle3_core.errors import ConfigError, InputError
from eagle3_core.stages.preflight import _split


def changed(config, **values):
    dumped = config.model_dump(mode="json")
    dumped["data"] |= values
    return RunConfig.parse(dumped, "test")


@pytest.mark.parametrize("count", [None, 20])
def test_the_split_of_the_preflight_is_the_one_of_prepare(flow, prompts_file, count):
    extra = [{"prompt": "question  NUMBER 3?"}, {"prompt": "Question number 4? "}]
    prompts_file.write_text(prompts_file.read_text() + "".join(json.dumps(line) + "\n" for line in extra))
    flow.config = changed(flow.config, max_prompts=count)
    facts = flow.run("prepare").facts
    assert _split(flow.config) == {name: facts[name] for name in ("train", "held_out", "duplicates")}
    assert facts["duplicates"] == 2


def test_an_empty_side_is_refused_before_any_hour_is_spent(flow):
    with pytest.raises(InputError, match=r"set data\.held_out_fraction above 0\.\d+"):
        _split(changed(flow.config, held_out_fraction=1e-6))


def test_prepare_says_how_many_prompts_are_equal(flow, prompts_file, capsys):
    prompts_file.write_text(prompts_file.read_text() + json.dumps({"prompt": "question  NUMBER 3?"}) + "\n")
    flow.run("prepare")
    assert "1 of 41 prompts are another one but for case and blanks; each is used once" in capsys.readouterr().out


def test_a_sweep_that_the_held_out_prompts_cannot_fill_is_refused_before_anything_is_spent(flow):
    few = _split(flow.config)["held_out"]
    evaluation = flow.config.evaluation.model_copy(update={"concurrency": (1, few + 1)})
    with pytest.raises(ConfigError, match=f"concurrency {few + 1}: expected as many held-out prompts, found {few}"):
        _split(flow.config.model_copy(update={"evaluation": evaluation}))
