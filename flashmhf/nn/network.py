"""The base classes of the networks: they draw their own weights, which stay contiguous. Constants of a module."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.types import Device

from ..checks import name_of, weight_dtype
from .init import OfficialInit, Scheme, draws_itself, projection, set_reset
from .weights import check_held, mark_drawn


def constant(name: str) -> property:
    """Return the property ``name`` of a module: a float, stored as text, which ``torch.compile`` takes for a constant.
    Under ``dynamic=True`` a float would become an input of the graph, and its guard makes a tensor in every call.
    """
    text = f"_{name}"
    return property(
        lambda module: float(getattr(module, text)), lambda module, value: setattr(module, text, repr(float(value)))
    )


class FixedDtypes(nn.Module):
    """A module whose tensors named in ``fixed`` keep their dtypes when it is converted."""

    fixed: Collection[str]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FixedDtypes:
        before = {name: getattr(self, name).detach() for name in self.fixed}
        super()._apply(fn, recurse)
        for name, tensor in before.items():
            if (now := getattr(self, name)).dtype != tensor.dtype:
                now.data = tensor.to(now.device)
        return self


class Contiguous(nn.Module):
    """A module whose own parameters and buffers stay contiguous, as the kernels need them."""

    def __prepare_scriptable__(self) -> None:
        """Refuse ``torch.jit.script``, which would fail at the first annotation that it does not know."""
        found = f"torch.jit.script cannot compile a {type(self).__name__}"
        raise NotImplementedError(f"{found}; supported: torch.jit.trace, torch.export, torch.compile")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Contiguous:
        # .to(memory_format=torch.channels_last), meant for images, changes the strides of tensors of four dimensions
        return super()._apply(lambda tensor: out.contiguous() if (out := fn(tensor)).dim() == 4 else out, recurse)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # the last of the hooks: those of the caller may convert what a file holds
        handle = self.register_load_state_dict_pre_hook(type(self)._adapt)
        try:
            super()._load_from_state_dict(state_dict, prefix, *args)
        finally:
            handle.remove()

    def _adapt(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Check and convert, in place, what is loaded: with assign=True it becomes the module's, strides included."""
        for name in (*self._parameters, *self._buffers):
            if isinstance(value := state_dict.get(prefix + name), Tensor):
                state_dict[prefix + name] = value.contiguous()


class Network(Contiguous):
    """A network that draws its own weights; ``_draw`` of a subclass draws those that no child holds."""

    scheme = Scheme()
    placed = False  # by replace_ffn in a model, whose configuration then records this network
    _drawn_projections: Mapping[str, tuple[str, float]] = {}  # role and fan-in of each projection

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        weight_dtype(dtype)

    def _add_projection(
        self, name: str, sizes: tuple[int, int], role: str, fan_in: float, bias: bool, device: Device,
        dtype: torch.dtype | None,
    ) -> None:  # fmt: skip
        """Make the child ``name`` a projection (in, out features) from ``fan_in`` inputs of unit variance."""
        drawn = {"role": role, "fan_in": fan_in, "scheme": self.scheme}
        setattr(self, name, projection(*sizes, **drawn, bias=bias, device=device, dtype=dtype))
        self._drawn_projections = {**self._drawn_projections, name: (role, fan_in)}

    def reset_parameters(
        self, init: str | None = None, initializer_range: float | None = None, num_layers: int | None = None,
        official: OfficialInit | None = None,
    ) -> None:  # fmt: skip
        """Draw the weights anew. An argument that is None keeps its last value.

        init: "balanced" (the first, but for ParametricKV), "official" or "normal" (flashmhf.nn.init).
        initializer_range: the deviation of "normal", and of the router under "balanced" (0.02). num_layers: how many
        networks the model has (1). official: the gains of "official". Raises TypeError and ValueError for other values,
        ValueError for a part that has been replaced, parametrised or offloaded; nothing is drawn then.
        """
        self._check_own()
        changes = {"init": init, "initializer_range": initializer_range, "num_layers": num_layers, "official": official}
        changes = {name: value for name, value in changes.items() if value is not None}
        self.set_scheme(dataclasses.replace(self.scheme, **changes))
        self._draw()
        for name, drawn in self._drawn_projections.items():
            if (linear := getattr(self, name)) is not None:
                self.scheme.draw_projection(linear, *drawn)

    def set_scheme(self, scheme: Scheme) -> None:
        """Set what ``reset_parameters`` of this network and of its projections draw, without drawing."""
        self.scheme = scheme
        for name, drawn in self._drawn_projections.items():
            linear = getattr(self, name)
            if linear is not None and draws_itself(linear):
                set_reset(linear, *drawn, scheme)

    def _parts(self) -> dict[str, type[nn.Module]]:
        """Return the classes of the parts that ``reset_parameters`` draws; any of them may be None."""
        return dict.fromkeys(self._drawn_projections, nn.Linear)

    def _check_own(self) -> None:
        """Raise ValueError that names a part which ``reset_parameters`` cannot draw, before it has drawn another."""
        check_held("", self, empty=True)
        for name, kind in self._parts().items():
            if (part := getattr(self, name)) is not None and not isinstance(part, kind):
                found = f"{name} is a {type(part).__name__}; supported: a {kind.__name__}, as the constructor made it"
                raise ValueError(f"{found}: call reset_parameters before it is replaced")
            if part is not None and not part.weight.is_floating_point():
                raise ValueError(f"{name}.weight has dtype {name_of(part.weight.dtype)}; supported: a floating one")

    def _draw(self) -> None:
        pass

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Network:
        empty = self.placed and any(parameter.is_meta for parameter in self.parameters())
        super()._apply(fn, recurse)
        if empty and not any(parameter.is_meta for parameter in self.parameters()):
            # to_empty: the init_weights of the model, which is called next, knows no K, U and V
            self.reset_parameters()
            mark_drawn(self)
        return self
