"""What happens between two matrix products: a few element-wise functions, each one kernel on a GPU.

R rows, D width, F width of the MLP, h heads, d head width. On a CPU the functions run as written: a compiler costs
seconds that small runs spend better. On a GPU `torch.compile` fuses each, for any number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch.nn import functional

P = ParamSpec("P")
T = TypeVar("T")


def fused(*varying: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Compile a function for GPU tensors; `varying` says how many leading sizes of each argument change between calls.

    All other sizes are constants of the kernel: indices divided by a size read at run time cost it half its speed.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        compiled = lru_cache(maxsize=1)(lambda: torch.compile(function, dynamic=False))

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            first = args[0]
            assert isinstance(first, torch.Tensor)
            if not first.is_cuda:
                return function(*args, **kwargs)
            for tensor, sizes in zip(args, varying, strict=False):
                for size in range(sizes):
                    torch._dynamo.maybe_mark_dynamic(tensor, size)
            return compiled()(*args, **kwargs)

        return call

    return decorate


@fused(1)
def rms_norm(states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `states` [R, D], normed in float32, in their own dtype."""
    return functional.rms_norm(states.float(), weight.shape, weight, eps).to(states.dtype)


@fused(1)
def swiglu(gate_and_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up [R, F] of [R, 2F]."""
    gate, up = gate_and_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


@fused(1, 1, 1, 1)
def turn(read: torch.Tensor, own: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int) -> torch.Tensor:
    """Return the heads [R, h, d] of read + own [R, h*d], rotated.

    Halves are paired as in Llama (NeoX style): `cos` is [R, d], the same for both halves, `sin` too, negative in the
    first. A roll is one pass over memory where a concatenation of halves is three.
    """
    states = (read + own).unflatten(-1, (heads, -1))
    rolled = states.roll(states.shape[-1] // 2, dims=-1)
    turned: torch.Tensor = states * cos[:, None] + rolled * sin[:, None]
    return turned.to(states.dtype)


@fused(1, 1, 1)
def turn_tail(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, scale: float) -> torch.Tensor:
    """Return heads [R, h, d] times `scale`, the last r columns of each rotated.

    Neighbours are paired as in DeepSeek: `cos` [R, r] is the same for both, `sin` too, negative in the first.
    """
    plain, tail = heads.split([heads.shape[-1] - cos.shape[-1], cos.shape[-1]], dim=-1)
    turned = tail * cos[:, None] + tail.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) * sin[:, None]
    return (torch.cat((plain.to(turned.dtype), turned), dim=-1) * scale).to(heads.dtype)


@fused(1, 1, 1, 1)
def join_keys(keys: torch.Tensor, shared: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return keys [R, h, d - r] with `shared` [R, r], rotated as in `turn_tail`, behind each head: [R, h, d]."""
    turned = shared * cos + shared.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) * sin
    behind = turned.to(keys.dtype)[:, None].expand(-1, keys.shape[1], -1)
    return torch.cat((keys, behind), dim=-1)


def pick(states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return `states[rows]`; no two `rows` are the same, so its gradient is a copy and not a sum."""
    picked: Callable[..., torch.Tensor] = _Pick.apply
    return picked(states, rows)


class _Pick(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows)
        ctx.count = len(states)
        return states.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        (grad,), (rows,) = gradients, ctx.saved_tensors
        return grad.new_zeros((ctx.count, *grad.shape[1:])).index_copy_(0, rows, grad), None
