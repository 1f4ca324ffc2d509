"""SGLang's own classes, by the name its registry looks for."""

from sglang.srt.models.llama_eagle3 import EntryClass

__all__ = ["EntryClass"]
