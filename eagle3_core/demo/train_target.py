"""Train the tiny target from scratch on packed chat documents.

B rows, T positions of a row, V vocabulary.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from eagle3_core.demo import corpus
from eagle3_core.demo.target_files import CONFIG

_log = logging.getLogger(__name__)

ROW_TOKENS = 512
OPEN_CHATS = 5
"""One packed row in this many is read as one long chat, so that the target also knows later turns."""
SYSTEM_SHARE = 0.05
SYSTEM_TEXTS = ("You are a helpful assistant.", "You are a friendly helper.", "Answer in simple words.")


@dataclass(frozen=True)
class Recipe:
    """How the target is trained: optimiser steps, rows a step, the highest learning rate, the seed."""

    steps: int
    rows: int = 128
    learning_rate: float = 3e-3
    weight_decay: float = 0.1
    warmup: int = 200
    seed: int = 0


@dataclass(frozen=True)
class Packed:
    """Documents in rows: token ids and document numbers, both int32 [N, T]; padding has document -1."""

    tokens: torch.Tensor
    documents: torch.Tensor


def document(prompt: str, answer: str, system: str | None) -> str:
    """One chat as the chat template renders it."""
    head = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    return f"{head}<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"


def pack_chats(tokenizer: Tokenizer, chats: Sequence[tuple[str, str]], seed: int) -> Packed:
    """Tokenise and pack (prompt, answer) pairs in a shuffled order."""
    rng = random.Random(seed)
    order = list(chats)
    rng.shuffle(order)
    texts = [
        document(prompt, answer, rng.choice(SYSTEM_TEXTS) if rng.random() < SYSTEM_SHARE else None)
        for prompt, answer in order
    ]
    ids = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]
    rows = corpus.pack([len(one) for one in ids], ROW_TOKENS)
    tokens = torch.zeros(len(rows), ROW_TOKENS, dtype=torch.int32)
    documents = torch.full_like(tokens, -1)
    for row, members in enumerate(rows):
        flat = [token for member in members for token in ids[member]]
        tokens[row, : len(flat)] = torch.tensor(flat, dtype=torch.int32)
        numbers = [0 if row % OPEN_CHATS == 0 else n for n, member in enumerate(members) for _ in ids[member]]
        documents[row, : len(flat)] = torch.tensor(numbers, dtype=torch.int32)
    return Packed(tokens, documents)


def loss_of(model: LlamaForCausalLM, tokens: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the next token within each document, over int32 [B, T] inputs."""
    tokens = tokens.long()
    length = tokens.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
    seen = (documents[:, :, None] == documents[:, None, :]) & causal
    mask = torch.zeros(seen.shape, dtype=torch.bfloat16, device=tokens.device).masked_fill(~seen, -1e9)[:, None]
    with torch.autocast(tokens.device.type, torch.bfloat16):
        logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits[:, :-1]
    same = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] >= 0)
    labels = tokens[:, 1:].masked_fill(~same, -100)
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100)


def learning_rate(step: int, recipe: Recipe) -> float:
    """Linear warm-up, then a cosine down to nothing at the last step."""
    if step < recipe.warmup:
        return recipe.learning_rate * (step + 1) / recipe.warmup
    done = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    return recipe.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


def new_model(seed: int, device: str) -> LlamaForCausalLM:
    """A fresh target in float32."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**CONFIG)).to(device, torch.float32)


def train(model: LlamaForCausalLM, train_set: Packed, held_out: Packed, recipe: Recipe) -> float:
    """Train `model` in place.

    Returns:
        Its loss on the held-out documents, in nats a token.
    """
    device = model.device
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=device.type == "cuda")
    compute: Callable[..., torch.Tensor] = torch.compile(loss_of) if device.type == "cuda" else loss_of
    tokens, documents = train_set.tokens.to(device), train_set.documents.to(device)
    per_step = (train_set.documents >= 0).sum().item() / len(tokens) * recipe.rows
    began, order = time.monotonic(), torch.empty(0, dtype=torch.long, device=device)
    for step in range(recipe.steps):
        if len(order) < recipe.rows:
            order = torch.randperm(len(tokens), device=device)
        chosen, order = order[: recipe.rows], order[recipe.rows :]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, recipe)
        loss = compute(model, tokens[chosen], documents[chosen])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 200 == 0 or step == recipe.steps - 1:
            took = time.monotonic() - began
            speed, left = per_step * (step + 1) / took, took / (step + 1) * (recipe.steps - step - 1)
            _log.info("step %d loss %.4f %s tokens/s, %.0f s left", step, loss.item(), f"{speed:,.0f}", left)
    return evaluate(model, held_out, compute, recipe.rows)


def evaluate(model: LlamaForCausalLM, packed: Packed, compute: Callable[..., torch.Tensor], rows: int) -> float:
    """Mean loss over all full batches (or the one short batch) of `packed`."""
    device = model.device
    tokens, documents = packed.tokens.to(device), packed.documents.to(device)
    with torch.no_grad():
        losses: list[float] = [
            compute(model, tokens[i : i + rows], documents[i : i + rows]).item()
            for i in range(0, max(1, len(tokens) - rows + 1), rows)
        ]
    return sum(losses) / len(losses)
