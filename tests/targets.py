"""Back ends on devices, and their operators called on the inputs of a problem."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch._ops import OpOverloadPacket
from torch.utils._python_dispatch import TorchDispatchMode

from flashmhf.testing import Problem, poisoned_memory

RESULTS = {
    # of the operators that Problem has references of, by the same names
    "forward": ("out",), "backward": ("dq", "dk", "du", "dv", "dr"), "gated_forward": ("out",),
    "gated_backward": ("dq", "dk", "du", "dv", "dw"),
}  # fmt: skip
VIEWS = {  # of a tensor of tokens [..., H, d]: the same values, or some of them, in other strides
    "split of a projection": lambda x: torch.stack(
        [torch.full_like(x, torch.nan), x, torch.full_like(x, torch.nan)], -3
    )[..., 1, :, :],
    "heads before length": lambda x: x.transpose(-3, -2).contiguous().transpose(-3, -2),
    "heads before all": lambda x: x.movedim(-2, 0).contiguous().movedim(0, -2),
    "leading dimensions reversed": lambda x: _reversed(_reversed(x).contiguous()),
    "padded columns": lambda x: torch.nn.functional.pad(x, (0, 2), value=torch.nan)[..., :-2],
    "stride 2 in the last dimension": lambda x: torch.stack([x, x], -1)[..., 0],
    "expanded everywhere": lambda x: x.flatten()[0].expand_as(x),
    "expanded over tokens": lambda x: x.flatten(0, -3)[0].expand_as(x),
    "expanded in the last dimension": lambda x: x[..., :1].expand_as(x),
}


def _reversed(x: Tensor) -> Tensor:
    return x.permute(*reversed(range(x.dim() - 2)), -2, -1)


def shifted(x: Tensor) -> Tensor:
    """The values behind one element in the memory: off alignment."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def arguments(name: str, p: Problem) -> tuple:
    """What the operator ``name`` takes of a problem, in its order."""
    upstream = (p.grad_out,) if "backward" in name else ()
    gate = (p.w, p.eps) if "gated" in name else (p.r,)
    return *upstream, *p.operands, *gate


def leaves(name: str, p: Problem) -> tuple:
    """:func:`arguments` whose tensors require a gradient."""
    return tuple(x.detach().requires_grad_() if isinstance(x, Tensor) else x for x in arguments(name, p))


def as_tuple(results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def assert_near(actual: Tensor | tuple[Tensor, ...], expected: Tensor | tuple[Tensor, ...], tolerance: float) -> None:
    """Relative to the largest element of each tensor."""
    for a, e in zip(as_tuple(actual), as_tuple(expected), strict=True):
        torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance * e.abs().max().item() if e.numel() else 0)


def call(name: str, p: Problem, **settings: object) -> tuple[Tensor, ...]:
    """The results of torch.ops.flashmhf.<name>."""
    return as_tuple(getattr(torch.ops.flashmhf, name)(*arguments(name, p), **settings))


def randomised(module: nn.Module, std: float | None = None) -> nn.Module:
    """The module with every parameter from N(0, std^2); None: from N(0, 1 / its last dimension)."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=std or parameter.shape[-1] ** -0.5)
    return module


def doubled(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass that computes twice what ``kind`` does."""
    return type("Doubled", (kind,), {"forward": lambda self, x: 2 * kind.forward(self, x)})


class Calls(TorchDispatchMode):
    """The operators that reach the dispatcher, with their arguments, in ``seen``."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append((function, args, kwargs or {}))
        return function(*args, **kwargs or {})

    def of(self, operator: OpOverloadPacket) -> list[tuple[tuple, dict]]:
        return [(args, kwargs) for function, args, kwargs in self.seen if function is operator.default]


@dataclass(frozen=True)
class Target:
    """A back end on a device, with the dtypes that it promises."""

    backend: str
    device: str

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return {
            "eager": (torch.float64, torch.float32, torch.bfloat16, torch.float16),
            "triton": (torch.float32, torch.bfloat16, torch.float16), "hopper": (torch.bfloat16, torch.float16),
        }[self.backend]  # fmt: skip

    @property
    def dtype(self) -> torch.dtype:
        """The one for tests that need no others."""
        return torch.float32 if self.device == "cpu" else torch.bfloat16

    @property
    def fixed_limits(self) -> bool:
        return self.backend != "eager"

    def call(self, name: str, p: Problem, deterministic: bool = False, **settings: object) -> tuple[Tensor, ...]:
        """:func:`call` on this back end with NaN-poisoned outputs."""
        settings |= {"backend": self.backend, "deterministic": deterministic, "activation": p.activation}
        with poisoned_memory():
            return call(name, p, **settings)


TARGETS = [
    pytest.param(Target("eager", "cpu"), id="eager-cpu"),
    pytest.param(Target("eager", "cuda"), id="eager-cuda", marks=pytest.mark.gpu),
    pytest.param(Target("triton", "cuda"), id="triton", marks=pytest.mark.gpu),
    pytest.param(Target("hopper", "cuda"), id="hopper", marks=pytest.mark.gpu),
]
