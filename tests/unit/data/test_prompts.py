"""Prompts are named, deduplicated and split by what they say, and by nothing else."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3_core.data.prompts import named, normalise, selection_rank, split, split_position, unique
from eagle3_core.errors import InputError
from eagle3_core.prompts import parse_prompt, read_prompts


def prompt(text, system=None):
    return named(parse_prompt({"prompt": text}), system)


@given(st.text(min_size=1).filter(str.strip))
def test_normalising_twice_changes_nothing(text):
    assert normalise(normalise(text)) == normalise(text)


def test_normalising_keeps_the_blanks_of_code():
    assert normalise("  def f():\r\n    return 1\r\n") == "def f():\n    return 1"
    assert normalise("e\u0301") == "\u00e9"


def test_prompts_that_differ_in_case_and_blanks_alone_are_one():
    kept = list(unique([prompt("Say  hello"), prompt("say hello "), prompt("Say hello!")]))
    assert [item.messages[0]["content"] for item in kept] == ["Say  hello", "Say hello!"]


def test_a_system_prompt_is_another_id_but_the_same_split():
    bare, told = prompt("Hello"), prompt("Hello", "Be brief.")
    assert bare.id != told.id
    assert split_position(bare) == split_position(told)
    assert selection_rank(bare) == selection_rank(told)
    assert [message["role"] for message in told.messages] == ["system", "user"]


def test_a_prompt_with_a_system_message_keeps_its_own():
    values = {"messages": [{"role": "system", "content": "Mine."}, {"role": "user", "content": "Hello"}]}
    assert named(parse_prompt(values), "Yours.").messages[0]["content"] == "Mine."


def test_a_recorded_answer_is_not_part_of_the_prompt():
    values = {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]}
    assert named(parse_prompt(values), None) == prompt("Hello")


def test_selection_and_split_are_independent():
    prompts = [prompt(f"Prompt {number}") for number in range(2000)]
    chosen = sorted(prompts, key=selection_rank)[:500]
    held_out = sum(split_position(item) < 0.1 for item in chosen)
    assert 25 < held_out < 80


def lines(path, *values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return list(read_prompts(path))


def test_a_prompts_own_id_is_kept_and_names_nothing(tmp_path):
    one, other = lines(tmp_path / "p", {"prompt": "Hello", "id": 7}, {"prompt": "Hello", "id": "seven"})
    assert (one.given_id, other.given_id) == ("7", "seven")
    assert named(one, None).id == named(other, None).id == prompt("Hello").id


@pytest.mark.parametrize("value", ["", " ", True, 1.5, [1], {"a": 1}])
def test_an_id_that_is_none_is_refused_with_its_line(tmp_path, value):
    with pytest.raises(InputError, match=r"p:2: expected text or a whole number as id"):
        lines(tmp_path / "p", {"prompt": "Hello"}, {"prompt": "Hello", "id": value})


def test_an_id_of_two_prompts_is_refused_with_both_lines(tmp_path):
    with pytest.raises(InputError, match=r"p:3: expected an id of its own, found 'a' of line 1"):
        lines(tmp_path / "p", {"prompt": "1", "id": "a"}, {"prompt": "2"}, {"prompt": "3", "id": "a"})


@pytest.mark.parametrize("role", ["usr", "User", "human", 1])
def test_an_unknown_role_is_refused_with_its_line(tmp_path, role):
    messages = [{"role": role, "content": "Hi"}, {"role": "user", "content": "Hello"}]
    with pytest.raises(InputError, match=r"p:2: expected role system, user, assistant or tool, found"):
        lines(tmp_path / "p", {"prompt": "1"}, {"messages": messages})


def test_a_split_with_an_empty_side_names_a_fraction_that_fills_it():
    prompts = [prompt(f"Prompt {number}") for number in range(8)]
    found = split(prompts, 1e-9)
    assert (found.train, found.held_out) == (8, 0)
    with pytest.raises(InputError, match=r"set data\.held_out_fraction above"):
        found.check("p", 1e-9)
    assert split(prompts, found.least + 1e-6).held_out == 1
    with pytest.raises(InputError, match=r"lower data\.held_out_fraction"):
        split(prompts, 1.0).check("p", 1.0)
