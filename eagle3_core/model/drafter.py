"""Eagle3Drafter: fuse aux hidden states, one decoder layer over (embedding, carried state), draft-vocab head.

Letters: N token rows, D width, A aux layers, V target vocab, U draft vocab, H query heads, G key/value heads, d head
width. The arithmetic is that of SGLang's `LlamaForCausalLMEagle3`; parameters are called as in
`architecture.parameter_shapes`.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from eagle3_core.model.architecture import DrafterArchitecture
from eagle3_core.model.rope import inverse_frequencies, rotate

NORMAL_STD = 0.02

Rope = tuple[torch.Tensor, torch.Tensor]


class RmsNorm(nn.Module):
    """RMS norm, computed in float32 whatever the precision around it."""

    def __init__(self, width: int, eps: float) -> None:
        """Start as the plain norm."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._eps = eps

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return `states` [..., width], normed, in its own dtype."""
        return functional.rms_norm(states.float(), self.weight.shape, self.weight, self._eps).to(states.dtype)


class Attention(nn.Module):
    """The projections; who attends to whom is the unroll's business."""

    def __init__(self, sizes: DrafterArchitecture) -> None:
        """Allocate q, k, v over [embedding, carried state] and o."""
        super().__init__()
        D, width = sizes.hidden_size, sizes.head_dim
        self.q_proj = nn.Linear(2 * D, sizes.num_heads * width, bias=False)
        self.k_proj = nn.Linear(2 * D, sizes.num_kv_heads * width, bias=False)
        self.v_proj = nn.Linear(2 * D, sizes.num_kv_heads * width, bias=False)
        self.o_proj = nn.Linear(sizes.num_heads * width, D, bias=False)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, sizes: DrafterArchitecture) -> None:
        """Allocate the three projections."""
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.up_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.down_proj = nn.Linear(sizes.intermediate_size, sizes.hidden_size, bias=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Map [N, D] to [N, D]."""
        out: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(states)) * self.up_proj(states))
        return out


class Layer(nn.Module):
    """The one decoder layer."""

    def __init__(self, sizes: DrafterArchitecture) -> None:
        """Allocate norms, attention and MLP."""
        super().__init__()
        self.input_layernorm = RmsNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.hidden_norm = RmsNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.self_attn = Attention(sizes)
        self.post_attention_layernorm = RmsNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self.mlp = Mlp(sizes)


class Eagle3Drafter(nn.Module):
    """The drafter. `embed_tokens` is the target's, frozen, and not part of the saved parameters."""

    embed_tokens: torch.Tensor
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

    def fuse(self, aux_hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the first carried state [N, D] from aux hidden states [N, A*D], low layer first."""
        out: torch.Tensor = self.fc(aux_hidden_states)
        return out

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return normed embeddings [N, D] of target ids [N]."""
        out: torch.Tensor = self.layer.input_layernorm(functional.embedding(input_ids, self.embed_tokens))
        return out

    def rope(self, positions: torch.Tensor) -> Rope:
        """Return cos and sin [N, d/2] in float32 for positions [N]."""
        angles = positions[:, None].float() * self._frequencies
        return angles.cos() * self._rope_factor, angles.sin() * self._rope_factor

    def queries(self, read: torch.Tensor, normed: torch.Tensor, rope: Rope) -> torch.Tensor:
        """Return q [H, N, d] from the embedding's part of it and the normed carried state [N, D]."""
        return rotate(self._project("q", read, normed), *rope)

    def keys(self, read: torch.Tensor, normed: torch.Tensor, rope: Rope) -> torch.Tensor:
        """Return k, repeated to [H, N, d]."""
        return self._repeat(rotate(self._project("k", read, normed), *rope))

    def values(self, read: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """Return v, repeated to [H, N, d]."""
        return self._repeat(self._project("v", read, normed))

    def embedding_part(self, name: str, embedded: torch.Tensor) -> torch.Tensor:
        """Return the part of q, k or v that the token's embedding [N, D] decides, the same at every TTT step."""
        return functional.linear(embedded, self._projection(name)[:, : self.sizes.hidden_size])

    def _projection(self, name: str) -> torch.Tensor:
        weight: torch.Tensor = getattr(self.layer.self_attn, f"{name}_proj").weight
        return weight

    def _project(self, name: str, read: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        weight = self._projection(name)[:, self.sizes.hidden_size :]
        out = read + functional.linear(normed, weight)
        return out.view(len(out), -1, self.sizes.head_dim).transpose(0, 1)

    def _repeat(self, heads: torch.Tensor) -> torch.Tensor:
        """Let every query head have its own copy of the key or value head it shares."""
        return heads.repeat_interleave(self.sizes.num_heads // self.sizes.num_kv_heads, dim=0)

    def finish(self, carried: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Return the next carried state [N, D], before the last norm, from attention's output [N, H*d].

        The residual is the carried state before its norm.
        """
        residual = carried + self.layer.self_attn.o_proj(attended)
        out: torch.Tensor = residual + self.layer.mlp(self.layer.post_attention_layernorm(residual))
        return out

    def logits(self, carried: torch.Tensor) -> torch.Tensor:
        """Return logits [N, U]; the norm always comes before the head."""
        out: torch.Tensor = self.lm_head(self.norm(carried))
        return out
