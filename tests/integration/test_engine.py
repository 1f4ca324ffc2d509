"""Real SGLang on the CPU, on a tiny random target made here: tokens and hidden states must equal transformers'."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eagle3_core.config.evaluation import DraftShape
from eagle3_core.config.serving import ServingConfig
from eagle3_core.engine import processes
from eagle3_core.engine.client import Sampling
from eagle3_core.engine.effective import validate
from eagle3_core.engine.hf import TransformersCapture
from eagle3_core.engine.launch import LaunchPlan
from eagle3_core.engine.server import SglangServer
from eagle3_core.engine.spool import new_group
from eagle3_core.errors import EngineArgsError, EngineDiedError

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, WIDTH, MLP = 160, 64, 8, 4, 2, 16, 128
AUX = (1, 3, 4)
SERVING = ServingConfig(device="cpu", threads=1, max_running_requests=16)
SAMPLING = Sampling(max_new_tokens=48, ignore_eos=True)


def make_target(directory: Path) -> Path:
    """A random Llama with well-separated logits, and a word tokenizer SGLang accepts."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=MLP, num_hidden_layers=LAYERS, head_dim=WIDTH,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=256, initializer_range=0.2,
        bos_token_id=0, eos_token_id=1, pad_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).float().save_pretrained(directory)
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCAB)}, unk_token="w2"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w0", eos_token="w1", pad_token="w2").save_pretrained(
        directory
    )
    return directory


def make_drafter(directory: Path, draft_vocab: list[int]) -> Path:
    """A random EAGLE-3 drafter under SGLang's names; few draft tokens, all frequent, so that some guesses are right."""
    directory.mkdir()
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.2

    keep = torch.tensor(sorted(draft_vocab))
    inside = torch.zeros(VOCAB, dtype=torch.bool)
    inside[keep] = True
    layer = {
        "self_attn.q_proj": normal(HEADS * WIDTH, 2 * HIDDEN),
        "self_attn.k_proj": normal(KV_HEADS * WIDTH, 2 * HIDDEN),
        "self_attn.v_proj": normal(KV_HEADS * WIDTH, 2 * HIDDEN),
        "self_attn.o_proj": normal(HIDDEN, HEADS * WIDTH),
        "mlp.gate_proj": normal(MLP, HIDDEN),
        "mlp.up_proj": normal(MLP, HIDDEN),
        "mlp.down_proj": normal(HIDDEN, MLP),
        "input_layernorm": torch.ones(HIDDEN),
        "hidden_norm": torch.ones(HIDDEN),
        "post_attention_layernorm": torch.ones(HIDDEN),
    }
    tensors = {f"midlayer.{name}.weight": tensor for name, tensor in layer.items()}
    tensors |= {
        "fc.weight": normal(HIDDEN, len(AUX) * HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": normal(len(keep), HIDDEN),
        "d2t": keep - torch.arange(len(keep)),
        "t2d": inside,
    }
    save_file(tensors, directory / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": HIDDEN,
        "intermediate_size": MLP, "num_hidden_layers": 1, "num_attention_heads": HEADS, "head_dim": WIDTH,
        "num_key_value_heads": KV_HEADS, "vocab_size": VOCAB, "draft_vocab_size": len(keep),
        "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
        "rope_theta": 10000.0, "torch_dtype": "float32", "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(AUX)},
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def prompts(count: int = 20) -> list[list[int]]:
    return [[3 + (11 * index + 7 * at * at) % (VOCAB - 3) for at in range(2 + 5 * index)] for index in range(count)]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices gain nothing from threads, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def greedy(target: Path) -> list[list[int]]:
    """transformers' own greedy continuation of every prompt."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    answers = []
    for prompt in prompts():
        ids, cache, answer = torch.tensor([prompt]), None, []
        for _ in range(SAMPLING.max_new_tokens):
            with torch.inference_mode():
                step = model(ids, past_key_values=cache, use_cache=True)
            ids, cache = step.logits[:, -1].argmax(-1, keepdim=True), step.past_key_values
            answer.append(int(ids))
        answers.append(answer)
    return answers


@pytest.fixture(scope="module")
def drafter(greedy: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    counted = Counter(token for answer in greedy for token in answer)
    return make_drafter(tmp_path_factory.mktemp("drafter") / "model", [token for token, _ in counted.most_common(24)])


def test_greedy_answers_equal_transformers_alone_and_in_a_batch(target, greedy, tmp_path):
    plan = LaunchPlan.serve(target, "float32", SERVING)
    phases: list[str] = []
    with SglangServer(plan, log=tmp_path / "log", threads=1, on_phase=phases.append) as server:
        port = server.url.rpartition(":")[2]
        with server.client() as client:
            together = client.generate_all(prompts(), SAMPLING, concurrency=16)
            client.flush_cache()
            alone = client.generate_all(prompts()[:2], SAMPLING, concurrency=1)
            with pytest.raises(EngineArgsError, match="SGLang refuses"):
                client.generate_all([[3] * 300], SAMPLING)
            with pytest.raises(EngineArgsError, match=r"LaunchPlan\.capture"):
                next(client.capture([[3]]))
    assert [answer.output_ids for answer in together] == greedy
    assert [answer.output_ids for answer in alone] == greedy[:2]
    assert [answer.prompt_tokens for answer in together] == [len(prompt) for prompt in prompts()]
    assert {(answer.completion_tokens, answer.finish_reason) for answer in together} == {(48, "length")}
    assert {answer.spec_verify_ct for answer in together} == {None}
    assert {answer.spec_accept_histogram for answer in together} == {None}
    assert phases[0] == "engine: starting SGLang"
    assert not server.pids
    assert not processes.listening(int(port))


def test_captured_states_equal_transformers_row_by_row_and_each_other_bit_by_bit(target, tmp_path):
    """Prefills of 128 tokens: some hold several samples, and the longest samples come in parts."""
    samples = [*prompts(), *prompts()[3:6], [5] * 256, [7] * 200]
    plan = LaunchPlan.capture(target, "float32", SERVING, AUX, max_sample_tokens=256, prefill_tokens=128)
    with SglangServer(plan, log=tmp_path / "log", threads=1) as server, server.client() as client:
        captured = list(client.capture(samples))
        list(client.capture(prompts()[5:9]))
        again = list(client.capture(samples))
        slow = []
        for sample in client.capture(samples):
            # One who takes his time finds the same.
            time.sleep(0.02)
            slow.append(sample)
        with ThreadPoolExecutor(3) as pool:
            parts = (samples, prompts()[5:9] * 3, samples)
            one, _, other = pool.map(lambda part: list(client.capture(part)), parts)
    expected = list(TransformersCapture(target, "float32", AUX).capture(samples))
    assert [sample.index for sample in captured] == list(range(len(samples)))
    for found, wanted in zip(captured, expected, strict=True):
        assert found.input_ids.tolist() == samples[found.index]
        assert found.aux_hidden_states.shape == (len(samples[found.index]), len(AUX) * HIDDEN)
        torch.testing.assert_close(found.aux_hidden_states, wanted.aux_hidden_states, atol=1e-4, rtol=0)
        torch.testing.assert_close(found.last_hidden_state, wanted.last_hidden_state, atol=1e-4, rtol=0)
    for others in (again, slow, one, other):
        for found, other in zip(captured, others, strict=True):
            assert found.aux_hidden_states.equal(other.aux_hidden_states)
            assert found.last_hidden_state.equal(other.last_hidden_state)


def test_prefills_that_others_disturb_stop_the_capture_and_are_no_states(target, tmp_path):
    plan = LaunchPlan.capture(target, "float32", SERVING, AUX, max_sample_tokens=256, prefill_tokens=256)
    with (
        pytest.raises(EngineDiedError, match="expected a prefill of one group of 4 samples"),
        SglangServer(plan, log=tmp_path / "log", threads=1) as server,
        server.client() as client,
    ):
        members = new_group([2, 7, 12, 17])
        # Two of a group of four: as a scheduler that splits it would run them.
        client._prefill(members[:2], prompts()[:2], 0)


@pytest.mark.parametrize("name", ["3/1/4", "3/2/6"])
def test_speculation_changes_no_token_counts_its_passes_and_tells_its_death(target, drafter, greedy, tmp_path, name):
    shape = DraftShape.from_name(name)
    plan = LaunchPlan.speculate(target, "float32", SERVING, drafter, shape)
    with (
        pytest.raises(EngineDiedError, match="died"),
        SglangServer(plan, log=tmp_path / "log", threads=1) as server,
        server.client() as client,
    ):
        answers = client.generate_all(prompts(), SAMPLING, concurrency=16)
        assert [answer.output_ids for answer in answers] == greedy
        for answer in answers:
            assert answer.spec_verify_ct is not None
            assert answer.spec_accept_histogram is not None
            assert sum(answer.spec_accept_histogram) == answer.spec_verify_ct
            assert len(answer.spec_accept_histogram) <= shape.num_steps + 1
            drafted = sum(count * passes for count, passes in enumerate(answer.spec_accept_histogram))
            # The first token is the prefill's; the last pass may accept more than the answer had room for.
            assert 0 <= 1 + answer.spec_verify_ct + drafted - answer.completion_tokens <= shape.num_steps
        # Some drafts were right, or the walk beyond the root would be untested.
        assert sum(answer.spec_verify_ct or 0 for answer in answers) < 0.98 * 47 * len(answers)
        counted = client.counters().avg_spec_accept_length
        assert counted is not None
        assert counted > 1
        assert server.effective["speculative_num_draft_tokens"] == shape.num_draft_tokens
        victim = server.pids[-1]
        os.kill(victim, signal.SIGKILL)
        started = time.monotonic()
        client.generate_all(prompts(), Sampling(max_new_tokens=140, ignore_eos=True))
    assert time.monotonic() - started < 30
    assert not server.pids


def test_a_flag_sglang_does_not_have_is_refused_with_the_one_that_was_meant(target):
    serving = SERVING.model_copy(update={"engine_args": {"mem-fraction": 0.5}})
    with pytest.raises(EngineArgsError, match="did you mean --mem-fraction-static"):
        validate([LaunchPlan.serve(target, "float32", serving)])
