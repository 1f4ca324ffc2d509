"""Which files a run reads its prompts from: one, a directory, the days of a window; and what is wrong with them."""

import datetime
import json

import pytest

from eagle3_core.config import RunConfig
from eagle3_core.data.prompts import conversation, named, split_position
from eagle3_core.errors import ConfigError, InputError
from eagle3_core.prompt_files import checked_prompts, prompt_files, prompts_sha256
from eagle3_core.prompts import parse_prompt, read_prompts


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "Expecting property name"),
        ("[1]", "expected an object, found list"),
        ('{"text": "a"}', "exactly one of prompt, messages, turns, found ['text']"),
        ('{"prompt": "a", "turns": ["b"]}', "exactly one"),
        ('{"prompt": "  "}', "non-empty text in prompt"),
        ('{"prompt": 3}', "non-empty text in prompt"),
        ('{"turns": ["a", ""]}', "non-empty text in turns"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "last message of role user"),
        ('{"messages": [{"role": "user", "content": [1]}]}', "messages of role and text"),
        ('{"messages": "a"}', "list of messages"),
    ],
)
def test_a_line_that_is_no_prompt_is_named_by_its_number(tmp_path, line, words):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n\n' + line + "\n")
    with pytest.raises(InputError) as caught:
        checked_prompts([path])
    assert f"{path}:3: " in str(caught.value)
    assert words in str(caught.value)


def test_prompts_are_counted_and_an_empty_file_is_refused(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"turns": ["a", "b"], "question_id": 81, "category": "writing"}\n')
    assert checked_prompts([path]) == 2
    path.write_text("\n")
    with pytest.raises(InputError, match="empty file"):
        checked_prompts([path])


def test_a_missing_prompt_file_is_refused(config):
    elsewhere = config.model_copy(update={"data": config.data.model_copy(update={"prompts": "/nowhere.jsonl"})})
    with pytest.raises(InputError, match="expected a JSONL file, found none"):
        prompt_files(elsewhere)


@pytest.fixture
def days(tmp_path):
    """A directory with a file of prompts for each of some days, and the run that reads it."""
    directory = tmp_path / "days"
    directory.mkdir()
    for day in ("2026-11-01", "2026-11-27", "2026-11-29", "2026-12-01"):
        lines = [json.dumps({"prompt": f"question {number} of {day}"}) for number in range(20)]
        (directory / f"traffic-{day}.jsonl").write_text("\n".join(lines))

    def run(**data):
        return RunConfig.parse({"target": {"model": "x"}, "data": {"prompts": str(directory), **data}}, "test")

    run.directory = directory
    return run


def names(run):
    return [path.stem.removeprefix("traffic-") for path in prompt_files(run)]


def test_a_directory_is_all_its_files(days):
    assert names(days()) == ["2026-11-01", "2026-11-27", "2026-11-29", "2026-12-01"]
    assert checked_prompts(prompt_files(days())) == 80


def test_a_window_is_the_days_that_end_with_its_last_one(days):
    assert names(days(window_days=3, until="2026-11-29")) == ["2026-11-27", "2026-11-29"]
    assert names(days(window_days=2, until="2026-11-29")) == ["2026-11-29"]


def test_the_compact_spelling_of_a_date_is_one_too_and_the_files_come_by_day(days):
    (days.directory / "a20261128b.jsonl").write_text('{"prompt": "x"}')
    assert names(days(window_days=3, until="2026-11-29")) == ["2026-11-27", "a20261128b", "2026-11-29"]


def test_an_open_window_ends_yesterday_and_is_fixed_when_the_run_begins(days):
    data = days(window_days=3).data.at(datetime.date(2026, 11, 30))
    assert data.days == (datetime.date(2026, 11, 27), datetime.date(2026, 11, 29))
    assert data.at(datetime.date(2027, 1, 1)) == data


def test_a_window_without_a_file_is_refused_with_its_days(days):
    with pytest.raises(InputError, match="of 2026-11-10 to 2026-11-12 among 4, found none"):
        prompt_files(days(window_days=3, until="2026-11-12"))


def test_a_file_without_a_date_is_refused_where_dates_decide(days):
    (days.directory / "notes-20269999.jsonl").write_text('{"prompt": "x"}')
    assert len(prompt_files(days())) == 5
    with pytest.raises(InputError, match=r"notes-20269999\.jsonl: data\.window_days needs a date"):
        prompt_files(days(window_days=3, until="2026-11-29"))


def test_a_window_of_a_single_file_is_refused(days, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "x"}')
    with pytest.raises(InputError, match=r"expected a directory in data\.prompts"):
        prompt_files(days(prompts=str(file), window_days=3, until="2026-11-29"))


def test_an_end_without_a_window_is_refused(days):
    with pytest.raises(ConfigError, match="expected window_days too"):
        days(until="2026-11-29")


def test_an_empty_day_is_no_fault_and_an_empty_window_is(days):
    (days.directory / "traffic-2026-11-28.jsonl").write_text("")
    assert checked_prompts(prompt_files(days(window_days=3, until="2026-11-29"))) == 40
    with pytest.raises(InputError, match="found an empty file"):
        checked_prompts(prompt_files(days(window_days=1, until="2026-11-28")))


def test_content_names_the_prompts_and_no_name_or_place_of_a_file_does(days, tmp_path):
    window = prompt_files(days(window_days=3, until="2026-11-29"))
    before = prompts_sha256(window)
    moved = [path.rename(tmp_path / f"{number}.jsonl") for number, path in enumerate(window)]
    assert prompts_sha256(moved) == before
    moved[0].write_text('{"prompt": "another"}')
    assert prompts_sha256(moved) != before


def test_a_prompt_that_was_held_out_one_night_is_held_out_every_night(days):
    def held_out(until):
        files = prompt_files(days(window_days=40, until=until))
        given = [named(prompt, None) for path in files for prompt in read_prompts(path)]
        return {one.id: split_position(one) < 0.2 for one in given}

    first, second = held_out("2026-11-28"), held_out("2026-12-01")
    assert 0 < sum(first.values()) < len(first) < len(second)
    assert {name: second[name] for name in first if name in second} == first


def test_a_conversation_is_known_again_whatever_the_system_says_and_however_it_is_spaced():
    def told(**values):
        prompt = named(parse_prompt(values), None)
        return conversation(prompt.messages, prompt.prompt.later_turns)

    plain = told(prompt="Add two  and\nthree")
    system = {"role": "system", "content": "Be brief."}
    assert told(messages=[system, {"role": "user", "content": "add two and three"}]) == plain
    assert told(prompt="Add two and four") != plain
    assert told(turns=["Add two and three", "And four?"]) != plain
