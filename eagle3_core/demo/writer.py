"""Sample SmolLM2's answers in batches of thousands: a static cache, one CUDA graph per cache length.

B rows, P prompt positions, T cache positions, V vocabulary, H query heads, K key/value heads, d head width.
Prompts are padded on the left so that all rows write the same cache position; rotary embeddings only see
differences of positions, so the padding does not change them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from eagle3_core.demo.smollm2 import SmolLM2

BUCKET = 64
"""Cache lengths of the graphs are multiples of this: short answers do not pay for a long cache."""


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn: temperature, the min-p cut, the longest answer, and when a batch is given up."""

    temperature: float = 0.6
    min_p: float = 0.08
    max_tokens: int = 224
    enough: float = 0.96


class Writer:
    """Answers a fixed number of prompts at a time.

    Args:
        model: Weights and tokenizer.
        rows: B.
        prompt_tokens: P; longer prompts are refused.
        sampling: How answers are drawn.
    """

    def __init__(self, model: SmolLM2, rows: int, prompt_tokens: int, sampling: Sampling) -> None:
        self.model, self.rows, self.prompt_tokens, self.sampling = model, rows, prompt_tokens, sampling
        embed = model.weights["embed"]
        self.device, self.head_dim = embed.device, embed.shape[1] // model.heads
        length = -(-(prompt_tokens + sampling.max_tokens) // BUCKET) * BUCKET
        shape = (model.layers, rows, model.kv_heads, length, self.head_dim)
        self.keys = torch.zeros(shape, dtype=embed.dtype, device=self.device)
        self.values = torch.zeros_like(self.keys)
        inverse = model.rope_theta ** -(torch.arange(0, self.head_dim, 2, device=self.device) / self.head_dim)
        angles = torch.outer(torch.arange(length, device=self.device), inverse).repeat(1, 2)
        self.cos, self.sin = angles.cos().to(embed.dtype), angles.sin().to(embed.dtype)
        self.start = torch.zeros(rows, dtype=torch.long, device=self.device)
        self.token = torch.zeros(rows, dtype=torch.long, device=self.device)
        self.position = torch.zeros(1, dtype=torch.long, device=self.device)
        self.steps: dict[int, Callable[[], None]] = {}

    def answer(self, prompts: Sequence[Sequence[int]]) -> list[list[int] | None]:
        """Sample one answer per prompt.

        Args:
            prompts: B lists of at most P token ids.

        Returns:
            Per prompt the answer's ids without <|im_end|>, or None where it had not ended in time.
        """
        with torch.inference_mode():
            rows = self.sample(prompts)
        return [row[: row.index(self.model.eos)] if self.model.eos in row else None for row in rows]

    def sample(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Ids drawn for each prompt, whatever follows its <|im_end|> included."""
        padded = [[self.model.eos] * (self.prompt_tokens - len(ids)) + list(ids) for ids in prompts]
        self.start.copy_(torch.tensor([self.prompt_tokens - len(ids) for ids in prompts]))
        self._prefill(torch.tensor(padded, device=self.device))
        drawn = [self.token.clone()]
        ended = self.token == self.model.eos
        for step in range(1, self.sampling.max_tokens):
            length = -(-(self.prompt_tokens + step) // BUCKET) * BUCKET
            self._step(length)()
            drawn.append(self.token.clone())
            ended |= self.token == self.model.eos
            if step % 16 == 0 and ended.float().mean() >= self.sampling.enough:
                break
        sampled: list[list[int]] = torch.stack(drawn, dim=1).tolist()
        return sampled

    def _step(self, length: int) -> Callable[[], None]:
        if length not in self.steps:
            self.steps[length] = self._capture(length) if self.device.type == "cuda" else lambda: self._decode(length)
        return self.steps[length]

    def _capture(self, length: int) -> Callable[[], None]:
        position, token = self.position.clone(), self.token.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._decode(length)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._decode(length)
        # The warm-up wrote one cache position, which the first replay writes again with the same values.
        self.position.copy_(position)
        self.token.copy_(token)
        replay: Callable[[], None] = graph.replay
        return replay

    def _prefill(self, ids: torch.Tensor) -> None:
        count = self.prompt_tokens
        at = torch.arange(count, device=self.device)
        seen = (at[None, None, :] >= self.start[:, None, None]) & (at[None, None, :] <= at[None, :, None])
        # A padding row that sees nothing would be NaN.
        seen = (seen | torch.eye(count, dtype=torch.bool, device=self.device))[:, None]
        group = self.model.heads // self.model.kv_heads
        chunk = 512
        for first in range(0, self.rows, chunk):
            part = slice(first, min(first + chunk, self.rows))
            mask = seen[part]

            def attend(
                layer: int,
                q: torch.Tensor,
                k: torch.Tensor,
                v: torch.Tensor,
                part: slice = part,
                mask: torch.Tensor = mask,
            ) -> torch.Tensor:
                self.keys[layer, part, :, :count], self.values[layer, part, :, :count] = k, v
                k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
                return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

            hidden = self._layers(ids[part], self.cos[:count], self.sin[:count], attend)
            self.token[part] = self._draw(hidden[:, -1])
        self.position.fill_(count)

    def _decode(self, length: int) -> None:
        at = torch.arange(length, device=self.device)
        seen = (at >= self.start[:, None]) & (at <= self.position)
        bias = torch.zeros(seen.shape, dtype=self.keys.dtype, device=self.device).masked_fill_(~seen, -1e4)
        group = self.model.heads // self.model.kv_heads
        bias = bias[:, None, None].expand(-1, self.model.kv_heads, group, -1).flatten(0, 1)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            self.keys[layer].index_copy_(2, self.position, k)
            self.values[layer].index_copy_(2, self.position, v)
            keys = self.keys[layer, :, :, :length].flatten(0, 1)
            values = self.values[layer, :, :, :length].flatten(0, 1)
            grouped = q.view(-1, group, self.head_dim) * self.head_dim**-0.5
            weights = torch.baddbmm(bias, grouped, keys.transpose(1, 2)).softmax(-1)
            return torch.bmm(weights, values).view(q.shape)

        cos, sin = self.cos[self.position], self.sin[self.position]
        self.token.copy_(self._draw(self._layers(self.token[:, None], cos, sin, attend)[:, -1]))
        self.position.add_(1)

    def _layers(
        self, ids: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        model, w = self.model, self.model.weights
        hidden = functional.embedding(ids, w["embed"])

        def split(x: torch.Tensor, heads: int) -> torch.Tensor:
            return x.view(*ids.shape, heads, self.head_dim).transpose(1, 2)

        def rotate(x: torch.Tensor) -> torch.Tensor:
            low, high = x.chunk(2, -1)
            return x * cos + torch.cat([-high, low], -1) * sin

        for i in range(model.layers):
            x = functional.rms_norm(hidden, hidden.shape[-1:], w[f"{i}.attn_norm"], model.norm_eps)
            q = rotate(split(x @ w[f"{i}.attn_q"].T, model.heads))
            k = rotate(split(x @ w[f"{i}.attn_k"].T, model.kv_heads))
            v = split(x @ w[f"{i}.attn_v"].T, model.kv_heads)
            mixed = attend(i, q, k, v).transpose(1, 2).flatten(2)
            hidden = hidden + mixed @ w[f"{i}.attn_output"].T
            x = functional.rms_norm(hidden, hidden.shape[-1:], w[f"{i}.ffn_norm"], model.norm_eps)
            gate = functional.silu(x @ w[f"{i}.ffn_gate"].T) * (x @ w[f"{i}.ffn_up"].T)
            hidden = hidden + gate @ w[f"{i}.ffn_down"].T
        return functional.rms_norm(hidden, hidden.shape[-1:], w["norm"], model.norm_eps)

    def _draw(self, hidden: torch.Tensor) -> torch.Tensor:
        """Min-p sampling [B, D] -> [B] by the Gumbel trick: no sort over the vocabulary."""
        logits = (hidden @ self.model.weights["embed"].T).float() / self.sampling.temperature
        top = logits.amax(-1, keepdim=True)
        floor = top + torch.log(torch.tensor(self.sampling.min_p)).item()
        noise = torch.empty_like(logits).exponential_().log_()
        return (logits - noise).masked_fill_(logits < floor, -torch.inf).argmax(-1)
