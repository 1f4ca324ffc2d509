"""Recipes and sections: closed, bounded, readable from YAML as people write it."""

import pytest

from eagle3_core.config import DraftShape, RunConfig
from eagle3_core.config.recipes import load_recipe, parse_override, recipe_names
from eagle3_core.errors import ConfigError


@pytest.mark.parametrize("name", recipe_names())
def test_every_checked_in_recipe_loads(name):
    assert isinstance(load_recipe(name), RunConfig)


def test_an_unknown_key_names_the_nearest_known_one():
    with pytest.raises(ConfigError, match=r"training\.learning_rat: unknown key, did you mean 'learning_rate'"):
        load_recipe("demo", {"training.learning_rat": 1})


def test_an_unknown_section_is_refused():
    with pytest.raises(ConfigError, match="trainig: unknown key"):
        load_recipe("demo", {"trainig.learning_rate": 1})


def test_an_unknown_recipe_lists_the_known_ones():
    with pytest.raises(ConfigError, match="demo, own, production, smollm2"):
        load_recipe("nosuch")


@pytest.mark.parametrize("text", ["3e-5", "3.0e-5", "0.00003", "+3E-5"])
def test_a_learning_rate_reads_as_a_number_however_it_is_written(text):
    path, value = parse_override(f"training.learning_rate={text}")
    assert load_recipe("demo", {path: value}).training.learning_rate == pytest.approx(3e-5)


def test_where_things_lie_does_not_enter_content_names():
    one = load_recipe("demo", {"target.model": "/a", "data.prompts": "/b", "training.nproc": 1})
    two = load_recipe("demo", {"target.model": "/c", "data.prompts": "/d", "training.nproc": 2})
    names = ("target", "data", "training")
    assert one.slice(names) == two.slice(names)
    assert one.digest() != two.digest()


def test_what_things_are_does_enter_content_names():
    base, other = load_recipe("demo"), load_recipe("demo", {"training.learning_rate": 3e-5})
    assert base.slice(("training",)) != other.slice(("training",))


def test_sixteen_draft_tokens_on_a_chain_explain_what_to_ask_for():
    with pytest.raises(ValueError, match="15/1/16"):
        DraftShape.from_name("5/1/16")


def test_a_tree_larger_than_its_branches_is_refused():
    assert DraftShape.from_name("3/2/11").num_draft_tokens == 11
    with pytest.raises(ValueError, match="at most 11"):
        DraftShape.from_name("3/2/12")


def test_an_answer_as_long_as_the_whole_sample_is_refused():
    with pytest.raises(ConfigError, match="leaves no room for a prompt"):
        load_recipe("demo", {"data.max_sample_tokens": 192})
