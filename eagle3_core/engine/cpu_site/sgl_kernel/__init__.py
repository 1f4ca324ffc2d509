"""What SGLang 0.5.23 calls in its compiled CPU kernels, in plain PyTorch, for CPUs without AMX.

On PYTHONPATH only while SGLang runs on a CPU (`engine/launch.py` puts it there). SGLang's `intel_amx` attention backend
is the one CPU backend with EAGLE variants; it reaches its kernels by `torch.ops.sgl_kernel` and `import sgl_kernel`.
Exact for what it covers: paged attention (grouped heads, MLA, windows, sinks), draft trees, greedy verification. What
it does not cover raises, by name.
"""

import importlib.machinery
import sys
import types

import torch

from sgl_kernel.attention import decode_attention_cpu, extend_attention_cpu
from sgl_kernel.cache import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
)
from sgl_kernel.tree import build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu

__version__ = "0.0.0"

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "decode_attention_cpu",
    "extend_attention_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]

torch.ops.sgl_kernel.decode_attention_cpu = decode_attention_cpu
torch.ops.sgl_kernel.extend_attention_cpu = extend_attention_cpu


class _Missing:
    """A kernel that SGLang imports by name but does not call on this path."""

    def __init__(self, name):
        self.__name__ = self.__qualname__ = name
        self.__doc__ = None

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{self.__name__} has no plain PyTorch version in eagle3_core")


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Missing(name)


class _Submodules:
    """Finds any `sgl_kernel.<name>` that is not a file here: an empty module with the same rule."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, cls) if name.startswith("sgl_kernel.") else None

    @staticmethod
    def create_module(spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = __getattr__
        module.__path__ = []
        return module

    @staticmethod
    def exec_module(module):
        pass


sys.meta_path.append(_Submodules)
