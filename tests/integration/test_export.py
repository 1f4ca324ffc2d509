"""An exported drafter, served by SGLang, accepts exactly what the parity reference says it will.

Target and drafter are built by hand: token = 8 * a + b, and the next token is (STEP[a], b). The target knows this by
its embedding and head; layer 3 writes 3 * STEP[b] into the residual stream and layer 4 takes it out again, so that the
output of layer 3 is like no other. The drafter reads b from there, and a from the token it is given. Some tokens are
left out of the draft vocabulary, so that chains break at known places.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3_core.config import DraftShape, ServingConfig
from eagle3_core.engine.client import Sampling
from eagle3_core.engine.launch import LaunchPlan
from eagle3_core.engine.server import SglangServer
from eagle3_core.evaluate.measurement import ServedAnswer, pool
from eagle3_core.evaluate.parity import HeldOut, compare, require, trained_logits
from eagle3_core.evaluate.reference import Reference, TargetEnds
from eagle3_core.export.own import export_drafter
from eagle3_core.export.plan import TargetFacts
from eagle3_core.export.remap import remap
from eagle3_core.identity import read_config
from eagle3_core.model.architecture import DrafterArchitecture
from eagle3_core.model.drafter import Eagle3Drafter
from tests.unit.export import tiny

CODES = 8
WIDTH = 2 * CODES
VOCAB = CODES * CODES + 8
STEP = torch.tensor([3, 0, 4, 6, 7, 2, 1, 5])
LEFT_OUT = (8 * 3 + 1, 8 * 7 + 1, 8 * 5 + 2, 8 * 6 + 4)
AUX_LAYERS = (1, 3, 4)  # EAGLE's own code has no others for 8 layers
SHAPE = DraftShape(num_steps=5, topk=1, num_draft_tokens=6)
TOKENS = 40


def one_hot(codes: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(codes, CODES).float()


def write_target(directory) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=16, num_hidden_layers=8, num_attention_heads=2,
        num_key_value_heads=2, head_dim=CODES, max_position_embeddings=256, tie_word_embeddings=False,
        bos_token_id=64, eos_token_id=65, pad_token_id=66, dtype="float32",
    )  # fmt: skip
    target = LlamaForCausalLM(config)
    tokens = torch.arange(CODES * CODES)
    a, b = tokens // CODES, tokens % CODES
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        marker(target.model.layers[3].mlp, STEP, value=8**0.5, wanted=3.0)
        marker(target.model.layers[4].mlp, torch.arange(CODES), value=3 / (11 / WIDTH) ** 0.5, wanted=-3.0)
        for weight, code in ((target.model.embed_tokens.weight, a), (target.lm_head.weight, STEP.argsort()[a])):
            weight.zero_()
            weight[tokens] = torch.cat([one_hot(code), one_hot(b)], dim=1)
    target.save_pretrained(directory)
    words = Tokenizer(WordLevel({f"t{token}": token for token in range(VOCAB)}, unk_token="t66"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t65").save_pretrained(directory)


def marker(mlp, to: torch.Tensor, value: float, wanted: float) -> None:
    """Let an MLP answer a b that comes in as `value` by `wanted` at `to[b]`."""
    codes = torch.arange(CODES)
    for projection in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        projection.weight.zero_()
    mlp.gate_proj.weight[codes, CODES + codes] = 4.0
    mlp.up_proj.weight[codes, CODES + codes] = 1.0
    mlp.down_proj.weight[CODES + to, codes] = wanted / (4.0 * value * value)


def drafter(sizes: DrafterArchitecture, ends: TargetEnds) -> tuple[dict, dict]:
    own = {name: torch.zeros(shape) for name, shape in sizes.parameter_shapes().items()}
    for name in own:
        if "norm" in name:
            own[name] += 1
    eye = torch.eye(CODES)
    own["fc.weight"][CODES + torch.arange(CODES), WIDTH + CODES + STEP] = 1 / 3
    for name in ("q", "k"):
        own[f"layer.self_attn.{name}_proj.weight"][: CODES // 2, :CODES] = 4.3
    own["layer.self_attn.v_proj.weight"][:, :CODES] = eye / CODES**0.5
    own["layer.self_attn.v_proj.weight"][:, WIDTH : WIDTH + CODES] = -eye * ((1 + 1 + 1 / 9) / WIDTH) ** 0.5
    own["layer.self_attn.o_proj.weight"][:CODES, :CODES] = eye  # the second head says nothing
    flags = torch.ones(VOCAB, dtype=torch.bool)
    flags[list(LEFT_OUT)] = False
    kept = flags.nonzero().flatten()
    own["lm_head.weight"] = ends.head[kept]
    return own, {"d2t": kept - torch.arange(kept.numel()), "t2d": flags}


def continued(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(CODES * int(STEP[tokens[-1] // CODES]) + tokens[-1] % CODES)
    return tokens[len(prompt) :]


def held_out(target, prompt: list[int], output: list[int], ends: TargetEnds, name: str) -> HeldOut:
    tokens = torch.tensor([*prompt, *output])
    with torch.no_grad():
        states = target(tokens[None], output_hidden_states=True).hidden_states
    aux = torch.cat([states[layer + 1][0] for layer in AUX_LAYERS], dim=1)
    return HeldOut(name, tokens, aux, ends.argmax(states[-1][0]), len(prompt))


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    root = tmp_path_factory.mktemp("export")
    directory = root / "target"
    write_target(directory)
    ends = TargetEnds.load(directory)
    sizes = DrafterArchitecture(
        hidden_size=WIDTH, intermediate_size=8, num_heads=2, num_kv_heads=1, head_dim=CODES, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10.0}, max_position_embeddings=256, vocab_size=VOCAB,
        draft_vocab_size=VOCAB - len(LEFT_OUT), aux_layers=AUX_LAYERS, target_sha256="0" * 64,
        target_class="LlamaForCausalLM",
    )  # fmt: skip
    own, vocab = drafter(sizes, ends)
    target = TargetFacts(read_config(directory), str(directory), lambda: sizes.target_sha256)
    export_drafter(root / "drafter", own, vocab, sizes, target, "float32", "world")
    network = Eagle3Drafter(sizes, ends.embedding)
    network.load_state_dict(own)
    return directory, root / "drafter", ends, network


PROMPTS = [[8 * a + b, 8 * int(STEP[a]) + b] for b in range(6) for a in (0, 2, 5)]


def serve(target, drafter, log):
    serving = ServingConfig(device="cpu", max_running_requests=8, max_total_tokens=4096)
    plan = LaunchPlan.speculate(target, "float32", serving, drafter, SHAPE)
    with SglangServer(plan, log=log) as server, server.client() as client:
        return client.generate_all(PROMPTS, Sampling(TOKENS), concurrency=4)


@pytest.fixture(scope="module")
def generations(exported, tmp_path_factory):
    target, drafter, *_ = exported
    return serve(target, drafter, tmp_path_factory.mktemp("served") / "sglang.log")


def test_sglang_accepts_what_the_reference_predicts_and_changes_no_token(exported, generations):
    from transformers import LlamaForCausalLM

    directory, path, ends, network = exported
    for prompt, generation in zip(PROMPTS, generations, strict=True):
        assert generation.output_ids == continued(prompt, TOKENS)
    served = pool(
        [
            ServedAnswer(id=str(g.index), domain="x", repeat=0, prompt_tokens=2, output_ids=g.output_ids,
                         completion_tokens=g.completion_tokens, finish_reason=g.finish_reason, latency_s=1.0,
                         verify_passes=g.spec_verify_ct, accept_histogram=g.spec_accept_histogram)
            for g in generations
        ],
        speculating=True,
    )  # fmt: skip
    target = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    samples = [
        held_out(target, prompt, generation.output_ids, ends, str(generation.index))
        for prompt, generation in zip(PROMPTS, generations, strict=True)
    ]
    parity = compare(Reference.load(path, ends), trained_logits(network), samples, SHAPE.num_steps)
    require(parity)
    assert 2.5 < parity.tau_export < 6.0
    assert served.acceptance_length == pytest.approx(parity.tau_export, rel=1e-9)


def spelled(key, layer, root):
    if key.startswith("layer."):
        return layer + key.removeprefix("layer.")
    return key if key == "lm_head.weight" else root + key


def as_its_own_tool_writes_it(name, exported, directory):
    """Write the drafter with the parameter names of a peer, spelled out in `tiny`, and its config without our block."""
    target, drafter, _, network = exported
    made = remap(drafter, directory / "made", name).out
    config = made / ("drafter_config.json" if name == "own" else "config.json")
    values = json.loads(config.read_text())
    values.pop("eagle3", None)
    maps = {key: value for key, value in load_file(drafter / "model.safetensors").items() if key in ("d2t", "t2d")}
    tensors = {spelled(key, *tiny.PREFIXES[name]): value.contiguous() for key, value in network.state_dict().items()}
    source = directory / "peer"
    source.mkdir()
    if name == "own":
        save_file(tensors, source / "drafter.safetensors")
        save_file(maps, source / "vocab.safetensors")
    else:
        kept = {"d2t": maps["d2t"]} if name == "modelopt" else maps
        save_file({**tensors, **kept}, source / "model.safetensors")
    (source / config.name).write_text(json.dumps(values))
    return source, TargetFacts(read_config(target), str(target), lambda: "0" * 64)


@pytest.mark.parametrize("name", sorted(tiny.PREFIXES))
def test_a_peers_drafter_becomes_the_very_files_that_were_served(name, exported, tmp_path):
    """Equal files are served with equal acceptance: no server has to start for each dialect."""
    source, target = as_its_own_tool_writes_it(name, exported, tmp_path)
    after = remap(source, tmp_path / "after", "sglang", told=name, target=target).out
    before = exported[1]
    assert (after / "model.safetensors").read_bytes() == (before / "model.safetensors").read_bytes()
    configs = [json.loads((directory / "config.json").read_text()) for directory in (before, after)]
    for config in configs:
        config.pop("eagle3")
    assert configs[0] == configs[1]


def test_a_peers_drafter_that_sglang_reads_as_it_is_is_accepted_as_after_its_remap(exported, generations, tmp_path):
    source, _ = as_its_own_tool_writes_it("automodel", exported, tmp_path)
    before = serve(exported[0], source, tmp_path / "sglang.log")
    told = [[(one.output_ids, one.spec_verify_ct, one.spec_accept_histogram) for one in many]
            for many in (before, generations)]  # fmt: skip
    assert told[0] == told[1]


def test_transformers_reads_the_sizes_and_layers_the_server_will(exported):
    from transformers import AutoConfig

    _, path, _, _ = exported
    config = AutoConfig.from_pretrained(path)
    written = json.loads((path / "config.json").read_text())
    assert config.draft_vocab_size == VOCAB - len(LEFT_OUT)
    assert config.eagle_config["eagle_aux_hidden_state_layer_ids"] == list(AUX_LAYERS)
    assert config.rope_parameters["rope_theta"] == written["rope_theta"] == 10.0
    assert config.tie_word_embeddings is False
