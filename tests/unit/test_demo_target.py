"""The tiny chat target and the prompts that ship with the project, and the pure parts of the script that made them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from eagle3_core.demo import corpus, prompts, target_files, train_target
from eagle3_core.demo.smollm2 import SmolLM2
from eagle3_core.demo.writer import Sampling, Writer

TARGET = Path(prompts.__file__).with_name("target")
CHAT = [
    {"role": "user", "content": "Why do birds sing?"},
    {"role": "assistant", "content": "To find a friend."},
    {"role": "user", "content": "And cats?"},
    {"role": "assistant", "content": "They purr."},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TARGET)


def test_the_target_folder_is_below_eight_megabytes() -> None:
    assert sum(path.stat().st_size for path in TARGET.iterdir()) < 8_000_000


def test_the_target_has_two_to_four_million_bfloat16_parameters() -> None:
    tensors = load_file(TARGET / "model.safetensors")
    assert 2_000_000 <= sum(tensor.numel() for tensor in tensors.values()) <= 4_000_000
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_the_target_has_enough_layers_for_three_distinct_default_aux_layers() -> None:
    layers = AutoConfig.from_pretrained(TARGET).num_hidden_layers
    assert len({1, layers // 2 - 1, layers - 4}) == 3


def test_config_tokenizer_and_generation_config_agree_on_the_end_of_an_answer(tokenizer: Any) -> None:
    generation = json.loads((TARGET / "generation_config.json").read_text())
    config = AutoConfig.from_pretrained(TARGET)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.eos_token_id == config.eos_token_id == generation["eos_token_id"]
    assert len(tokenizer) == config.vocab_size


def test_the_assistant_mask_covers_exactly_the_answers_and_their_end(tokenizer: Any) -> None:
    encoded = tokenizer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    marked = [i for i, flag in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if flag]
    assert tokenizer.decode(marked) == "To find a friend.<|im_end|>They purr.<|im_end|>"


def test_the_generation_prompt_is_a_prefix_of_the_rendered_answer(tokenizer: Any) -> None:
    asked = tokenizer.apply_chat_template(CHAT[:1], tokenize=False, add_generation_prompt=True)
    answered = tokenizer.apply_chat_template(CHAT[:2], tokenize=False)
    assert answered == asked + "To find a friend.<|im_end|>\n"


def test_training_documents_are_what_the_chat_template_renders(tokenizer: Any) -> None:
    system = {"role": "system", "content": "Be brief."}
    rendered = tokenizer.apply_chat_template([system, *CHAT[:2]], tokenize=False)
    assert train_target.document("Why do birds sing?", "To find a friend.", "Be brief.") == rendered


def test_the_tokenizer_returns_any_text_unchanged(tokenizer: Any) -> None:
    text = "Caf\u00e9 12,345\n\n 1. Tea  and\ttoast \u2603"
    ids = tokenizer(text, add_special_tokens=True)["input_ids"]
    assert tokenizer.decode(ids) == text


def test_the_shipped_prompts_are_those_the_generator_makes() -> None:
    lines = prompts.DEMO_PROMPTS.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == prompts.demo_prompts()


def test_the_shipped_prompts_have_unique_ids_and_texts_and_one_user_message_each() -> None:
    records = [json.loads(line) for line in prompts.DEMO_PROMPTS.read_text(encoding="utf-8").splitlines()]
    assert len(records) == sum(prompts.DEMO_SHARES.values())
    assert len({record["id"] for record in records}) == len(records)
    assert len({record["messages"][0]["content"] for record in records}) == len(records)
    assert {message["role"] for record in records for message in record["messages"]} == {"user"}


def test_the_generator_makes_no_prompt_twice() -> None:
    made = [prompt for _, prompt in prompts.generate()]
    assert len(set(made)) == len(made) > 10_000


GOOD = "Rain falls from clouds. Small drops of water meet in the air and grow heavy. Then they fall down to the ground."


def test_a_plain_answer_is_kept_in_ascii() -> None:
    assert corpus.clean(GOOD.replace("Then", "\u201cThen\u201d"), "explain") == GOOD.replace("Then", '"Then"')


@pytest.mark.parametrize(
    "answer",
    [
        "Too short.",
        GOOD[:-1],
        GOOD + " Dear [Name].",
        GOOD + " I am an AI language model.",
        GOOD + " " + GOOD,
        GOOD + " \u96e8.",
    ],
)
def test_an_unfit_answer_is_dropped(answer: str) -> None:
    assert corpus.clean(answer, "explain") is None


def test_packing_keeps_every_document_that_fits_and_fills_no_row_beyond_its_length() -> None:
    lengths = [5, 9, 3, 11, 1, 6, 10, 2]
    rows = corpus.pack(lengths, 10)
    assert sorted(i for row in rows for i in row) == [0, 1, 2, 4, 5, 6, 7]
    assert all(sum(lengths[i] for i in row) <= 10 for row in rows)
    assert len(rows) == 4


def test_packed_rows_number_their_documents_and_mark_padding() -> None:
    chats = [(f"Say {i}.", "one two three") for i in range(60)]
    tokenizer = target_files.train_tokenizer(text for chat in chats for text in chat)
    packed = train_target.pack_chats(tokenizer, chats, seed=0)
    used = packed.documents >= 0
    assert (packed.tokens[~used] == 0).all()
    ends = packed.tokens == tokenizer.token_to_id(target_files.END)
    assert ends.sum().item() >= 2 * len(chats)
    assert packed.documents[0].max() == 0, "the first of five rows is one long chat"
    # The last <|im_end|> of a document is its last but one token: the number changes right after the newline.
    changes = (packed.documents[1, 1:] != packed.documents[1, :-1]).nonzero().flatten()
    assert len(changes) > 1
    assert ends[1, changes - 1].all()


def test_the_learning_rate_warms_up_and_ends_at_nothing() -> None:
    recipe = train_target.Recipe(steps=1000, warmup=100, learning_rate=1.0)
    rates = [train_target.learning_rate(step, recipe) for step in range(1001)]
    assert rates[99] == max(rates) == 1.0
    assert rates[1000] == pytest.approx(0.0)
    assert rates[100:] == sorted(rates[100:], reverse=True)


def test_the_writer_says_what_transformers_says_for_prompts_of_different_lengths() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.3,
        rope_theta=100.0,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    weights = {"embed": model.model.embed_tokens.weight.data, "norm": model.model.norm.weight.data}
    for i, layer in enumerate(model.model.layers):
        weights |= {f"{i}.{ours}": layer.get_submodule(theirs).weight.data for theirs, ours in names.items()}
    source = SmolLM2(weights, None, 2, 6, 2, 100.0, config.rms_norm_eps, eos=0)
    writer = Writer(source, rows=3, prompt_tokens=9, sampling=Sampling(temperature=1e-4, max_tokens=70, enough=2.0))
    prompts_ = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2, 1], [11, 12, 13, 14, 15]]
    for ids, drawn in zip(prompts_, writer.sample(prompts_), strict=True):
        said = model.generate(torch.tensor([ids]), max_new_tokens=70, do_sample=False)[0, len(ids) :].tolist()
        assert drawn == said
