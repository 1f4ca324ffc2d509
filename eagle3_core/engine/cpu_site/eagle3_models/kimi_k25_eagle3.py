"""SGLang's own classes, by the name its registry looks for."""

import torch
from sglang.srt.models.kimi_k25_eagle3 import EntryClass

import eagle3_models.deepseek_v2  # noqa: F401 - the attention this class is made of

__all__ = ["EntryClass"]

# The class waits for a GPU after it has taken the target's embedding; without one there is nothing to wait for.
torch.cuda.synchronize = lambda device=None: None
