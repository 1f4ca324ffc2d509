"""The same capture by transformers: for targets SGLang cannot hold, and as the measure of SGLang's."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from eagle3_core.engine.layers import check_outputs_of
from eagle3_core.engine.spool import CapturedSample

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TransformersCapture:
    """Holds the target in this process and captures one sample at a time."""

    def __init__(self, target: Path, dtype: str, aux_layers: Sequence[int], device: str = "cpu") -> None:
        """Load the target; `aux_layers` are the layers whose OUTPUT is taken, from 0.

        Raises:
            EngineArgsError: the layers do not exist.
        """
        model = AutoModelForCausalLM.from_pretrained(target, dtype=_DTYPES[dtype], local_files_only=True)
        # Of several callers one computes: transformers collects states in the model itself, and memory is for one.
        self._model, self._alone = model.to(device).eval(), threading.Lock()
        self._layers = check_outputs_of(aux_layers, int(model.config.get_text_config().num_hidden_layers))

    def capture(self, samples: Sequence[Sequence[int]]) -> Iterator[CapturedSample]:
        """Yield the hidden states of each sample, in order; see `EngineClient.capture`."""
        for index, sample in enumerate(samples):
            ids = torch.tensor([list(sample)], device=self._model.device)
            # The base model: no logits. Entry 0 is the embedding, the last one is taken after the final norm.
            with self._alone, torch.inference_mode():
                states = self._model.base_model(ids, output_hidden_states=True, use_cache=False).hidden_states
            aux = torch.cat([states[layer + 1][0] for layer in self._layers], dim=-1)
            yield CapturedSample(index, ids[0].cpu(), aux.cpu(), states[-1][0].cpu())
