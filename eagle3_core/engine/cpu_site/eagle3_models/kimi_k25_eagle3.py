"""SGLang's own classes, by the name its registry looks for."""

import torch
from sglang.srt.models.kimi_k25_eagle3 import EntryClass

__all__ = ["EntryClass"]

# The class waits for a GPU after it has taken the target's embedding; without one there is nothing to wait for.
torch.cuda.synchronize = lambda device=None: None
