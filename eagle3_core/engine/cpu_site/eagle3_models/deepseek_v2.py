"""SGLang's own classes, by the name its registry looks for."""

from sglang.srt.models.deepseek_v2 import EntryClass

__all__ = ["EntryClass"]
