"""A drafter built by hand that knows its world, so that every mistake can be seen to cost tau.

The world: token = 8 * a + b. The next token has a' = STEP[a] and a b that only the middle aux layer tells. One in six
tokens is a surprise. The drafter carries b in the second half of its state and looks up a in the token it reads.
"""

import json
import shutil
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3_core.evaluate.parity import HeldOut
from eagle3_core.evaluate.reference import Reference, TargetEnds
from eagle3_core.export.own import export_drafter
from eagle3_core.export.plan import TargetFacts
from eagle3_core.model.architecture import DrafterArchitecture
from eagle3_core.model.drafter import Eagle3Drafter

CODES = 8
WIDTH = 2 * CODES
VOCAB = CODES * CODES
STEP = torch.tensor([3, 0, 4, 6, 7, 2, 1, 5])
SIZES = DrafterArchitecture(
    hidden_size=WIDTH, intermediate_size=8, num_heads=1, num_kv_heads=1, head_dim=CODES, rms_norm_eps=1e-6,
    rope_parameters={"rope_type": "default", "rope_theta": 10.0}, max_position_embeddings=512, vocab_size=VOCAB,
    draft_vocab_size=56, aux_layers=(1, 3, 4), target_sha256="0" * 64, target_class="LlamaForCausalLM",
)  # fmt: skip


@dataclass
class World:
    own: dict[str, torch.Tensor]
    vocab: dict[str, torch.Tensor]
    ends: TargetEnds
    samples: list[HeldOut]
    directory: object
    sizes: DrafterArchitecture = SIZES

    def reference(self, **changes: torch.Tensor) -> Reference:
        """Export, with some tensors changed on the way, and load as SGLang does."""
        config = {
            "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 8, "max_position_embeddings": 512,
            "hidden_size": self.sizes.hidden_size, "vocab_size": self.sizes.vocab_size,
        }  # fmt: skip
        target = TargetFacts(config, "target", lambda: self.sizes.target_sha256)
        shutil.rmtree(self.directory)
        export_drafter(self.directory, self.own, self.vocab, self.sizes, target, "float32", "world")
        if changes:
            path = self.directory / "model.safetensors"
            save_file({**load_file(path), **changes}, path)
        return Reference.load(self.directory, self.ends)

    def edit_config(self, **changes: object) -> None:
        path = self.directory / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    def network(self) -> Eagle3Drafter:
        network = Eagle3Drafter(self.sizes, self.ends.embedding)
        network.load_state_dict(self.own)
        return network


def one_hot(codes: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.one_hot(codes, CODES).float()


def weights() -> dict[str, torch.Tensor]:
    tensors = {name: torch.zeros(shape) for name, shape in SIZES.parameter_shapes().items()}
    for name in tensors:
        if "norm" in name:
            tensors[name] += 1
    eye = torch.eye(CODES)
    tensors["fc.weight"][CODES:, WIDTH + CODES : 2 * WIDTH] = eye
    # Equal queries and keys everywhere: RoPE alone makes a slot attend to itself.
    for name in ("q", "k"):
        tensors[f"layer.self_attn.{name}_proj.weight"][: CODES // 2, :CODES] = 3.0
    # A state of length 1 in two one-hot halves has entries sqrt(D / 2) after its norm, one half alone sqrt(D).
    value = tensors["layer.self_attn.v_proj.weight"]
    value[:, :CODES] = eye / WIDTH**0.5
    value[:, WIDTH : WIDTH + CODES] = -eye / (WIDTH / 2) ** 0.5
    tensors["layer.self_attn.o_proj.weight"][:CODES] = eye
    return tensors


def sample(seed: int, length: int = 60) -> HeldOut:
    generator = torch.Generator().manual_seed(seed)
    mode = int(torch.randint(CODES, (1,), generator=generator))
    first = int(torch.randint(CODES, (1,), generator=generator))
    ids = [CODES * first + mode]
    for surprise in (torch.rand(length, generator=generator) < 1 / 6).tolist():
        guess = CODES * int(STEP[ids[-1] // CODES]) + mode
        ids.append(int(torch.randint(VOCAB, (1,), generator=generator)) if surprise else guess)
    noise = torch.randint(CODES, (2, length), generator=generator)
    told = one_hot(torch.full((length,), mode))
    zeros = torch.zeros(length, CODES)
    aux = torch.cat([zeros, one_hot(noise[0]), zeros, told, zeros, one_hot(noise[1])], dim=1)
    tokens = torch.tensor(ids)
    return HeldOut(str(seed), tokens[:-1], aux, tokens[1:], first=5)


@pytest.fixture
def world(tmp_path) -> World:
    kept = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[: SIZES.draft_vocab_size].sort().values
    flags = torch.zeros(VOCAB, dtype=torch.bool)
    flags[kept] = True
    a, b = torch.arange(VOCAB) // CODES, torch.arange(VOCAB) % CODES
    head = torch.cat([one_hot(STEP.argsort()[a]), one_hot(b)], dim=1)
    embedding = torch.cat([one_hot(a), torch.zeros(VOCAB, CODES)], dim=1)
    own = weights()
    own["lm_head.weight"] = head[kept]
    vocab = {"d2t": kept - torch.arange(kept.numel()), "t2d": flags}
    return World(own, vocab, TargetEnds(embedding, head), [sample(seed) for seed in range(12)], tmp_path)


LATENT = {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7}
YARN = {"rope_type": "yarn", "rope_theta": 10.0, "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.7,
        "mscale_all_dim": 1.0}  # fmt: skip


@pytest.fixture
def latent_world(world) -> World:
    """The same world with a drafter that has MLA and knows nothing."""
    heads = {"num_heads": 3, "num_kv_heads": 3, "head_dim": 10, "mla": LATENT, "rope_parameters": YARN}
    world.sizes = DrafterArchitecture.parse({**SIZES.model_dump(), **heads}, "latent world")
    generator = torch.Generator().manual_seed(3)
    world.own = {
        name: torch.randn(shape, generator=generator) / 2 for name, shape in world.sizes.parameter_shapes().items()
    }
    return world
