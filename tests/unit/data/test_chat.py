"""A chat template under which the loss mask would be empty is refused before any work."""

import json

import pytest

from eagle3_core.data.chat import Chat, check_template
from eagle3_core.errors import TargetError


def template(directory, text):
    (directory / "chat_template.jinja").write_text(text)


def test_a_prompt_ends_where_the_answer_begins(tiny_target):
    chat = Chat(tiny_target)
    messages = [{"role": "user", "content": "Hi"}]
    assert chat.text(messages) == "<|user|>Hi<|assistant|>"
    ids = chat.prompt_ids(messages)
    assert ids[0] == 257
    assert ids[-1] == 258
    assert chat.decode([*chat.encode("Hello"), 256]) == "Hello"
    assert chat.stop_ids == [256]


def test_the_answer_of_the_probe_is_supervised(tiny_target):
    assert check_template(tiny_target, None) == len("A ripe banana is yellow.") + 1
    assert check_template(tiny_target, "Be brief.") == len("A ripe banana is yellow.") + 1


def test_a_template_without_generation_prompt_is_fine_if_the_answer_follows(tiny_target):
    template(tiny_target, "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    assert check_template(tiny_target, None) == len("[assistant]A ripe banana is yellow.")


def test_a_template_that_opens_a_thought_is_fine(tiny_target):
    template(
        tiny_target,
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}",
    )
    assert check_template(tiny_target, None) > 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}", "would be empty"),
        (
            "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
            "{% if add_generation_prompt %}[model]{% endif %}",
            "'model]' where an answered conversation has 'assistant]",
        ),
        ("{{ messages[-1].role }}", "expected the user's message in the prompt"),
        ("{{ raise_exception('no') }}", "the chat template fails on messages of roles user (no)"),
        ("{% for m in messages %}", "the chat template fails"),
    ],
)
def test_a_template_that_leaves_the_loss_mask_empty_is_refused_in_one_line(tiny_target, text, words):
    template(tiny_target, text)
    with pytest.raises(TargetError) as caught:
        check_template(tiny_target, None)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_target_without_chat_template_is_refused(tiny_target):
    (tiny_target / "chat_template.jinja").unlink()
    with pytest.raises(TargetError, match="expected a chat template"):
        Chat(tiny_target)


def test_a_target_whose_end_of_answer_is_unknown_is_refused(tiny_target):
    for name in ("config.json", "tokenizer_config.json"):
        values = json.loads((tiny_target / name).read_text())
        (tiny_target / name).write_text(json.dumps({k: v for k, v in values.items() if not k.startswith("eos")}))
    with pytest.raises(TargetError, match="expected eos_token_id"):
        Chat(tiny_target)


def test_every_stop_token_of_the_generation_config_counts(tiny_target):
    (tiny_target / "generation_config.json").write_text('{"eos_token_id": [256, 258]}')
    assert Chat(tiny_target).stop_ids == [256, 258]
