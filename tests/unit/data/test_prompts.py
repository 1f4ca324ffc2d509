"""Prompts are named, deduplicated and split by what they say, and by nothing else."""

from hypothesis import given
from hypothesis import strategies as st

from eagle3_core.data.prompts import named, normalise, selection_rank, split_position, unique
from eagle3_core.prompts import parse_prompt


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
