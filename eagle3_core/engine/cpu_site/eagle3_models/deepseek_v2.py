"""SGLang's own classes, by the name its registry looks for; RoPE that is not scaled has no way of its own on a CPU."""

from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.models import deepseek_v2
from sglang.srt.models.deepseek_v2 import EntryClass

__all__ = ["EntryClass"]

_scaled = deepseek_v2.get_rope_wrapper


def _rope(*sizes, rope_scaling=None, device=None, **settings):
    """Take SGLang's general class where its CPU way, which knows DeepSeek's YaRN alone, would refuse."""
    if rope_scaling is None:
        return get_rope(*sizes, **settings)
    return _scaled(*sizes, rope_scaling=rope_scaling, device=device, **settings)


deepseek_v2.get_rope_wrapper = _rope
