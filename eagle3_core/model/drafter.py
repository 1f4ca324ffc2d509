"""Eagle3Drafter: fuse aux hidden states, one decoder layer over (embedding, carried state), draft-vocab head.

Letters: N token rows, D width, A aux layers, V target vocab, U draft vocab, H query heads, G key/value heads, d width
of a query or key head, e of a value head. The arithmetic is that of SGLang's `LlamaForCausalLMEagle3`, with MLA that of
its `Eagle3DeepseekV2ForCausalLM`; parameters are called as in `architecture.parameter_shapes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn import functional

from eagle3_core.model.architecture import DrafterArchitecture
from eagle3_core.model.heads import Attention, LatentAttention, RmsNorm, Rope
from eagle3_core.model.matrices import Matrices
from eagle3_core.model.pointwise import swiglu
from eagle3_core.model.rope import inverse_frequencies

NORMAL_STD = 0.02
ALL = slice(None)


class Mlp(nn.Module):
    """SwiGLU; gate and up lie side by side."""

    def __init__(self, sizes: DrafterArchitecture) -> None:
        """Allocate the three projections."""
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.up_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.down_proj = nn.Linear(sizes.intermediate_size, sizes.hidden_size, bias=False)


class Layer(nn.Module):
    """The one decoder layer."""

    def __init__(self, sizes: DrafterArchitecture) -> None:
        """Allocate norms, attention and MLP."""
        super().__init__()
        self.input_layernorm = RmsNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.hidden_norm = RmsNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.self_attn = Attention(sizes) if sizes.mla is None else LatentAttention(sizes, sizes.mla)
        self.post_attention_layernorm = RmsNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.mlp = Mlp(sizes)


class Eagle3Drafter(nn.Module):
    """The drafter. `embed_tokens` is the target's, frozen, and not part of the saved parameters.

    In training `matrices` multiplies and sums weight gradients; without it autograd does, in float32.
    """

    embed_tokens: torch.Tensor
    matrices: Matrices | None = None
    _frequencies: torch.Tensor

    def __init__(self, sizes: DrafterArchitecture, embed_tokens: torch.Tensor, *, train_lm_head: bool = True) -> None:
        """Allocate all parameters over the target's embedding [V, D]; see `start_from_target` for their values."""
        super().__init__()
        self.sizes = sizes
        self.fc = nn.Linear(len(sizes.aux_layers) * sizes.hidden_size, sizes.hidden_size, bias=False)
        self.layer = Layer(sizes)
        self.norm = RmsNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.lm_head = nn.Linear(sizes.hidden_size, sizes.draft_vocab_size, bias=False)
        self.lm_head.weight.requires_grad_(train_lm_head)
        self.register_buffer("embed_tokens", embed_tokens, persistent=False)
        frequencies, self._rope_factor = inverse_frequencies(sizes)
        self.register_buffer("_frequencies", frequencies, persistent=False)

    def start_from_target(self, head_rows: torch.Tensor, final_norm: torch.Tensor, seed: int) -> None:
        """Set starting values: head and norm [U, D], [D] are the target's, fc passes the highest aux layer on.

        The first carried state is then a state the target's head can nearly read. Everything else is small and normal.
        """
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.ndim > 1 and name != "lm_head.weight":
                    parameter.normal_(0.0, NORMAL_STD, generator=generator)
            self.fc.weight[:, -self.sizes.hidden_size :] += torch.eye(self.sizes.hidden_size)
            self.lm_head.weight.copy_(head_rows)
            self.norm.weight.copy_(final_norm)

    def multiply(self, states: torch.Tensor, names: Sequence[str], columns: slice = ALL) -> torch.Tensor:
        """Return `states` [N, columns] times the matrices of `names`, side by side: [N, sum of rows]."""
        if self.matrices is not None:
            return self.matrices.multiply(states, names, columns)
        products = [functional.linear(states, self.get_parameter(name)[:, columns]) for name in names]
        return products[0] if len(products) == 1 else torch.cat(products, dim=-1)

    def fuse(self, aux_hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the first carried state [N, D] from aux hidden states [N, A*D], low layer first."""
        return self.multiply(aux_hidden_states, ["fc.weight"])

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return normed embeddings [N, D] of target ids [N]."""
        out: torch.Tensor = self.layer.input_layernorm(functional.embedding(input_ids, self.embed_tokens))
        return out

    def rope(self, positions: torch.Tensor) -> Rope:
        """Return cos and signed sin in float32 for positions [N], as the attention takes them."""
        angles = positions[:, None].float() * self._frequencies
        return self.layer.self_attn.rope(angles.cos() * self._rope_factor, angles.sin() * self._rope_factor)

    def read(self, embedded: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the parts of the attention's first projections that the embedding [N, D] decides, at every TTT step.

        Keys are the attention's own: q, k and v, or q and the latent c with MLA. Each is [N, rows of its matrix].
        """
        return self._project("qkv", embedded, slice(0, self.sizes.hidden_size))

    def heads(
        self, wanted: str, read: Mapping[str, torch.Tensor], normed: torch.Tensor, rope: Rope
    ) -> dict[str, torch.Tensor]:
        """Return those of q [N, H, d], k [N, G, d] and v [N, G, e] that are `wanted`: "q", "kv" or "qkv".

        Args:
            wanted: Their letters.
            read: The embedding's part of each of `layer.self_attn.first(wanted)`.
            normed: Normed carried states [N, D].
            rope: Of the rows' positions.
        """
        own = self._project(wanted, normed, slice(self.sizes.hidden_size, None))
        return self.layer.self_attn.heads(read, own, rope, self.multiply)

    def _project(self, wanted: str, states: torch.Tensor, columns: slice) -> dict[str, torch.Tensor]:
        names = self.layer.self_attn.first(wanted)
        matrices = [f"layer.self_attn.{name}.weight" for name in names.values()]
        rows = [len(self.get_parameter(name)) for name in matrices]
        return dict(zip(names, self.multiply(states, matrices, columns).split(rows, dim=-1), strict=True))

    def finish(self, carried: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Return the next carried state [N, D], before the last norm, from attention's output [N, H*e].

        The residual is the carried state before its norm.
        """
        residual = carried + self.multiply(attended, ["layer.self_attn.o_proj.weight"])
        normed = self.layer.post_attention_layernorm(residual)
        gate_and_up = self.multiply(normed, ["layer.mlp.gate_proj.weight", "layer.mlp.up_proj.weight"])
        return residual + self.multiply(swiglu(gate_and_up), ["layer.mlp.down_proj.weight"])

    def logits(self, carried: torch.Tensor) -> torch.Tensor:
        """Return logits [N, U]; the norm always comes before the head."""
        return self.multiply(self.norm(carried), ["lm_head.weight"])
