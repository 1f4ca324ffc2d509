"""Every class of targets: captured, trained on for a moment, exported, and served by SGLang on a CPU.

A random target of each class has its own norms, experts, rotations and rule for layer ids. The served drafter must
accept what the parity reference says it will, and change no token: then states, layers, names, RoPE and config fit.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from eagle3_core.config import DrafterConfig, DraftShape, EvaluationConfig, ServingConfig, TrainingConfig
from eagle3_core.data.features import FeatureSample
from eagle3_core.engine.client import Sampling
from eagle3_core.engine.hf import TransformersCapture
from eagle3_core.engine.launch import LaunchPlan
from eagle3_core.engine.layers import PART_OF_THE_OUTPUT
from eagle3_core.engine.server import SglangServer
from eagle3_core.engine.spool import CapturedSample
from eagle3_core.evaluate.measurement import ServedAnswer, pool
from eagle3_core.evaluate.parity import HeldOut, Parity, compare, require, trained_logits
from eagle3_core.evaluate.reference import Reference, TargetEnds
from eagle3_core.export.own import export_drafter
from eagle3_core.export.plan import TargetFacts
from eagle3_core.identity import read_config
from eagle3_core.model.architecture import DrafterArchitecture
from eagle3_core.model.drafter import Eagle3Drafter
from eagle3_core.model.target_weights import read_target_weights
from eagle3_core.storage import open_store
from eagle3_core.train.checkpoint import Checkpoints
from eagle3_core.train.distributed import Ranks
from eagle3_core.train.job import TrainJob
from eagle3_core.train.loop import train
from eagle3_core.train.rotation import checkpoint_steps
from eagle3_core.train.trackers import Trackers

VOCAB, DRAFT_VOCAB, HIDDEN, LAYERS = 160, 96, 64, 8
AUX = (1, 3, 4)
SHAPE = DraftShape.from_name("3/1/4")
TOKENS, PROMPT, SERVED = 48, 6, 12
SIZES = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 128, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "initializer_range": 0.2, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
TARGETS = {
    "LlamaForCausalLM": {"rope_parameters": LLAMA3},
    "Qwen2ForCausalLM": {"rope_parameters": {**YARN, "factor": 2.0}},
    "Qwen3ForCausalLM": {"rope_parameters": YARN},
    "Phi3ForCausalLM": {},
    # SGLang hands out other states than transformers: these are captured as they are served.
    "Gemma3ForCausalLM": {
        "sliding_window": 16,
        "query_pre_attn_scalar": 16,
        "tie_word_embeddings": True,
        "initializer_range": 0.05,
    },
    "Qwen3MoeForCausalLM": {**EXPERTS, "num_experts": 4},
    "Glm4MoeForCausalLM": {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "DeepseekV3ForCausalLM": {
        **EXPERTS,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        **LATENT,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        # What DeepSeek's own files say and transformers' class takes for granted.
        "moe_layer_freq": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
    "GptOssForCausalLM": {
        "num_experts_per_tok": 2,
        "num_local_experts": 4,
        "sliding_window": 16,
        "rope_parameters": {**YARN, "truncate": False},
    },
}
"""What differs from `SIZES`, by the class's name in transformers and in SGLang."""


def make_target(directory: Path, model_class: str) -> Path:
    import transformers
    from tokenizers import Tokenizer, models

    torch.manual_seed(0)
    kind = getattr(transformers, model_class)
    model = kind(kind.config_class(**{**SIZES, **TARGETS[model_class]})).float()
    if model.config.tie_word_embeddings:
        # A random model whose head is its embedding says what it reads; norms of both signs part the two.
        model.model.norm.weight.data = torch.randint(-1, 1, (HIDDEN,)).float() * 2
    model.save_pretrained(directory)
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCAB)}, unk_token="w2"))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="w0", eos_token="w1", pad_token="w2"
    ).save_pretrained(directory)
    return directory


def continued(directory: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Return transformers' own greedy answers to prompts of equal length."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    ids, cache, answers = torch.tensor(prompts), None, []
    for _ in range(TOKENS):
        with torch.inference_mode():
            step = model(ids, past_key_values=cache, use_cache=True)
        ids, cache = step.logits[:, -1].argmax(-1, keepdim=True), step.past_key_values
        answers.append(ids)
    return torch.cat(answers, dim=1).tolist()


@dataclass
class Captured:
    """Samples in memory; the last two are held out, and trained on all the same."""

    samples: list[FeatureSample]

    @property
    def lengths(self):
        return [len(sample.input_ids) for sample in self.samples]

    @property
    def supervised(self):
        return [int(sample.loss_mask.sum()) for sample in self.samples]

    @property
    def held_out(self):
        return [index >= len(self.samples) - 2 for index in range(len(self.samples))]

    @property
    def sample_ids(self):
        return [f"s{index}" for index in range(len(self.samples))]

    def read(self, index):
        return self.samples[index]


def trained(
    directory: Path, features: Captured, kept: tuple[int, ...], work: Path, drafter: DrafterConfig
) -> Eagle3Drafter:
    """Train through the loop itself, for seconds, and return the network."""
    target = read_target_weights(directory)
    sizes = DrafterArchitecture.for_target(read_config(directory), drafter, aux_layers=AUX,
                                           draft_vocab_size=len(kept), target_sha256="0" * 64)  # fmt: skip
    training = TrainingConfig(learning_rate=4e-3, epochs=60, batch_tokens=256, row_tokens=256, ttt_steps=3,
                              precision="float32", validations=1, nproc=1)  # fmt: skip
    evaluation = EvaluationConfig(shapes=(SHAPE,), primary=SHAPE.name)
    job = TrainJob(training, evaluation, sizes, features, target, kept)
    store = open_store(str(work))
    checkpoints = Checkpoints(store, "train/x", work / "staging", training)
    train(job, Ranks.alone(), checkpoints, Trackers(None), lambda: False)
    network, *_ = job.build(torch.device("cpu"))
    network.load_state_dict(checkpoints.parameters(checkpoint_steps(store, "train/x")[-1]))
    return network


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Made:
    """A target, what it says to some prompts, and a drafter trained on that and exported."""

    target: Path
    drafter: Path
    prompts: list[list[int]]
    answers: list[list[int]]
    parity: Parity


def states(target: Path, model_class: str, whole: list[list[int]], root: Path) -> list[CapturedSample]:
    if model_class not in PART_OF_THE_OUTPUT:
        return list(TransformersCapture(target, "float32", AUX).capture(whole))
    plan = LaunchPlan.capture(target, "float32", ServingConfig(device="cpu", threads=1), AUX, PROMPT + TOKENS, 256)
    with SglangServer(plan, log=root / "capture.log", threads=1) as server, server.client() as client:
        return list(client.capture(whole))


def make(root: Path, model_class: str, drafter: DrafterConfig | None = None) -> Made:
    target = make_target(root / "target", model_class)
    prompts = [[3 + (31 * index + 17 * at) % (VOCAB - 3) for at in range(PROMPT)] for index in range(24)]
    answers = continued(target, prompts)
    whole = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    captured = states(target, model_class, whole, root)
    features = Captured([
        FeatureSample(one.input_ids, torch.arange(len(one.input_ids)) >= PROMPT, one.aux_hidden_states.clone(),
                      one.last_hidden_state.clone())
        for one in captured
    ])  # fmt: skip
    counted = Counter(token for answer in answers for token in answer)
    kept = tuple(sorted(token for token, _ in counted.most_common(DRAFT_VOCAB)))
    network = trained(target, features, kept, root, drafter or DrafterConfig())
    flags = torch.zeros(VOCAB, dtype=torch.bool)
    flags[list(kept)] = True
    vocab = {"d2t": torch.tensor(kept) - torch.arange(len(kept)), "t2d": flags}
    facts = TargetFacts(read_config(target), "target", lambda: "0" * 64)
    export_drafter(root / "drafter", network.state_dict(), vocab, network.sizes, facts, "float32", "trained")
    ends = TargetEnds.load(target)
    samples = [
        HeldOut(str(one.index), one.input_ids, one.aux_hidden_states, ends.argmax(one.last_hidden_state), PROMPT)
        for one in captured[:SERVED]
    ]
    reference = Reference.load(root / "drafter", ends)
    parity = compare(reference, trained_logits(network), samples, SHAPE.num_steps)
    require(parity)
    return Made(target, root / "drafter", prompts[:SERVED], answers[:SERVED], parity)


@pytest.mark.parametrize(("model_class", "drafter"), [
    *((model_class, {}) for model_class in TARGETS),
    ("DeepseekV3ForCausalLM", {"attention": "mla"}), ("Qwen3MoeForCausalLM", {"attention": "mla", **LATENT}),
])  # fmt: skip
def test_a_drafter_of_each_class_is_served_as_the_reference_says(model_class, drafter, tmp_path):
    made = make(tmp_path, model_class, DrafterConfig.parse(drafter, "drafter"))
    serving = ServingConfig(device="cpu", threads=1, max_running_requests=SERVED)
    plan = LaunchPlan.speculate(made.target, "float32", serving, made.drafter, SHAPE)
    with SglangServer(plan, log=tmp_path / "log", threads=1) as server, server.client() as client:
        served = client.generate_all(made.prompts, Sampling(TOKENS, ignore_eos=True), concurrency=SERVED)
    assert [one.output_ids for one in served] == made.answers
    measured = pool(
        [ServedAnswer(id=str(one.index), domain="x", repeat=0, prompt_tokens=PROMPT, output_ids=one.output_ids,
                      completion_tokens=one.completion_tokens, finish_reason=one.finish_reason, latency_s=1.0,
                      verify_passes=one.spec_verify_ct, accept_histogram=one.spec_accept_histogram)
         for one in served],
        speculating=True,
    )  # fmt: skip
    assert measured.acceptance_length > 1.4
    assert measured.acceptance_length == pytest.approx(made.parity.tau_export, rel=0.01)
