"""Counts of the values that reach the limit of e4m3: a slow check, in float32, of single calls and of the calls of a
model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from .. import checks
from ..backends.eager import fp8 as eager
from ..backends.fp8_layout import E4M3_MAX
from ..nn.weights import check_held
from ..ops.fp8 import check_operands
from .modules import Fp8FlashMHF
from .packing import PackedWeights, operands

Counts = dict[str, tuple[int, int]]  # "k", "u", "v", "a": (elements at the limit, all elements)


@torch.no_grad()
def count_saturated(q: Tensor, packed: PackedWeights) -> Counts:
    """Count the elements at e4m3's limit: {"k", "u", "v", "a": (at the limit, all)} for q [..., H, d_h]. Slow: it
    computes in float32.

    "a" is the intermediate of the operator; in the weights the elements at +-448 count. A few in a million do no harm.
    Q cannot saturate: the largest value of a token and head becomes 4 at most.

    Raises TypeError and ValueError as :func:`flashmhf.quantize.forward` does, NotImplementedError for tensors without
    values (meta).
    """
    checks.tensors(q=q)
    check_operands(q, *operands(packed))
    if q.is_meta:
        raise NotImplementedError("q is on meta; supported: devices whose tensors have values")
    return _of_weights(packed) | {"a": _of_call(q, packed)}


def _of_weights(packed: PackedWeights) -> Counts:
    weights = {"k": packed.k8, "u": packed.u8, "v": packed.v8}
    return {name: (int((tensor.float().abs() >= E4M3_MAX).sum()), tensor.numel()) for name, tensor in weights.items()}


def _of_call(q: Tensor, packed: PackedWeights) -> tuple[int, int]:
    return eager.saturated(q, *packed.tensors), q.numel() // q.shape[-1] * packed.k8.shape[1] * packed.k8.shape[2]


@contextmanager
def check_saturation(model: nn.Module) -> Iterator[dict[str, Counts]]:
    """Count what saturates in every call of every :class:`Fp8FlashMHF` of ``model`` while a ``with`` block runs.

    ::

        with quantize.check_saturation(model) as report:
            model(x)
        report["layers.0.mlp"]["a"]  # (elements of A beyond +-448, all elements of A), summed over the calls

    The report has a module's name in ``model`` (``""`` for ``model`` itself) and the keys of :func:`count_saturated`;
    "a" is (0, 0) for a module that is not called. Outputs do not change. Each call computes A a second time, in float32
    on its device, so that it takes many times as long. Compiled models run uncompiled in the block; calls replayed from
    a CUDA graph are not seen.

    Raises TypeError if ``model`` is not a module, ValueError if it holds no Fp8FlashMHF or one that is offloaded or on
    the meta device.
    """
    checks.instance("model", model, nn.Module, "a torch.nn.Module")
    modules = {name: module for name, module in model.named_modules() if isinstance(module, Fp8FlashMHF)}
    if not modules:
        raise ValueError("model holds no Fp8FlashMHF; supported: models after to_fp8 or quantize_")
    for name, module in modules.items():
        check_held(name, module)
    report = {name: _of_weights(module.packed) | {"a": (0, 0)} for name, module in modules.items()}
    hooks = [
        module.register_forward_hook(partial(_count, report[name]), with_kwargs=True)
        for name, module in modules.items()
    ]
    try:
        with torch.compiler.set_stance("force_eager"):
            yield report
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def _count(
    counts: Counts, module: Fp8FlashMHF, inputs: tuple[Tensor, ...], named: dict[str, Tensor], _: Tensor
) -> None:
    count, elements = _of_call(module.query(*inputs, **named), module.packed)
    counts["a"] = counts["a"][0] + count, counts["a"][1] + elements
