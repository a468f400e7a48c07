"""Muon for networks with stacked matrices: momentum whose singular values are made equal, matrix by matrix.

``torch.optim.Muon`` takes two-dimensional parameters only. K, U and V of FlashMHF [H, E, d_e, d_h] are H E matrices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from ..checks import epsilon, flag, floating
from ..torch_private import is_dtensor, never_compiled

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration, as in torch.optim.Muon
STEPS = 5
RMS = 0.2  # of an update's elements, about what AdamW's updates have: both share learning rates


def orthogonalise(matrices: Tensor) -> Tensor:
    """Return U V^T, approximately, of each matrix's singular value decomposition U S V^T, by Newton-Schulz steps.

    matrices: [..., rows, columns], at least three dimensions. The result has the same shape, in bf16, on a CPU in
    float32: without instructions for bf16 a CPU takes some 20 times as long.
    """
    a, b, c = COEFFICIENTS
    x = matrices.flatten(0, -3).to(_precision(matrices))
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + torch.baddbmm(b * gram, gram, gram, alpha=c) @ x
    return (x.mT if tall else x).reshape(matrices.shape)


def _precision(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.device.type == "cpu" else torch.bfloat16


def _local(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return the shard of a DTensor, placed as ``like`` is, or any other tensor as it is."""
    if not is_dtensor(tensor):
        return tensor
    if like is not None and tensor.placements != like.placements:
        tensor = tensor.redistribute(placements=like.placements)
    return tensor.to_local()


def _orthogonalise_shards(shards: Tensor, parameter: Tensor) -> Tensor:
    """Return :func:`orthogonalise` of N stacked shards [N, ...] of tensors that are placed as ``parameter`` is.

    Stacks that are sharded by whole matrices, such as K, U and V by heads, stay where they are.
    """
    if not is_dtensor(parameter):
        return orthogonalise(shards)
    from torch.distributed.device_mesh import DeviceMesh

    mesh, placements, rows = parameter.device_mesh, parameter.placements, parameter.dim() - 2
    dims = [dim for dim, at in enumerate(placements) if getattr(at, "dim", -1) >= rows and mesh.size(dim) > 1]
    # FSDP2's mesh dimension comes first, but it shards tensor parallelism's shards: its placement is a strided one
    dims.sort(key=lambda dim: (getattr(placements[dim], "split_factor", 1), dim))
    cuts, shape = [], [len(shards), *parameter.shape]
    for dim in dims:
        group = mesh if mesh.ndim == 1 else DeviceMesh.from_group(mesh.get_group(dim), mesh.device_type)
        at = placements[dim].dim + 1
        size = shape[at]
        cuts.append((group, at, size))
        part = -(-size // group.size())  # as torch.chunk does
        shape[at] = max(0, min(part, size - part * group.get_local_rank()))
    return _orthogonalise_cut(shards.to(_precision(shards)), cuts)


def _orthogonalise_cut(x: Tensor, cuts: list[tuple[DeviceMesh, int, int]]) -> Tensor:
    """Return :func:`orthogonalise` of shards [N, ...] of matrices that ``cuts`` divide, outermost first: each a mesh, a
    dimension of x, and its size before. One all-to-all gives each rank whole matrices of some tensors, one takes back.
    """
    if not cuts:
        return orthogonalise(x)
    from torch.distributed.tensor import DTensor, Shard

    *outer, (mesh, at, size) = cuts
    whole = torch.Size((*x.shape[:at], size, *x.shape[at + 1 :]))
    stride = torch.empty(whole, device="meta").stride()

    def exchange(local: Tensor, source: int, target: int) -> Tensor:
        tensor = DTensor.from_local(local, mesh, [Shard(source)], run_check=False, shape=whole, stride=stride)
        return tensor.redistribute(placements=[Shard(target)]).to_local()

    return exchange(_orthogonalise_cut(exchange(x, at, 0), outer), 0, at)


class Muon(torch.optim.Optimizer):
    """Muon (K. Jordan, 2024) for groups with ``muon=True``, AdamW, as in torch.optim, for those with ``muon=False``.

    :func:`flashmhf.param_groups` makes the groups: ``Muon(param_groups(model, lr, weight_decay, muon=True))``. The
    update of a matrix is its Nesterov momentum, orthogonalised, with elements of root mean square 0.2, so that rates
    and decay mean what they mean for AdamW. A parameter of more dimensions is a stack of matrices. Make the optimizer
    after ``parallelize`` and ``fully_shard``; every rank must step the same parameters. A step is never compiled.

    Args:
        params: groups with the key "muon". lr and weight_decay (decoupled) are for groups without their own; lr may be
            a tensor that a captured CUDA graph reads.
        momentum: of Muon, at least 0 and below 1. betas, eps: AdamW's. A group's "momentum" and betas[0] are one value:
            schedules may set either. capturable: whether a CUDA graph may capture a step.
        fused: whether AdamW's fused kernel runs; None runs it for groups whose parameters are all on a GPU.

    Raises ValueError for numbers out of range, a group without "muon", a vector in a Muon group, amsgrad,
    differentiable, maximize in a Muon group, and the state of another optimizer; TypeError for other types, and for
    integers or complex numbers in a Muon group. A step raises RuntimeError for a sparse gradient, for flat parameters,
    and where ZeRO has taken a group's matrices away, before it changes any parameter.
    """

    def __init__(
        self, params: Iterable[Tensor] | Iterable[dict[str, Any]], lr: float | Tensor = 1e-3, weight_decay: float = 0.1,
        *, momentum: float = 0.95, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8,
        fused: bool | None = None, capturable: bool = False,
    ):  # fmt: skip
        for name, value in {"lr": lr, "weight_decay": weight_decay, "eps": eps}.items():
            epsilon(name, float(value) if isinstance(value, Tensor) else value)
        if not isinstance(betas, Sequence) or len(betas) != 2:
            raise ValueError(f"betas is {betas!r}; supported: two numbers in [0, 1)")
        for name, value in {"momentum": momentum, "betas[0]": betas[0], "betas[1]": betas[1]}.items():
            if epsilon(name, value) >= 1:
                raise ValueError(f"{name} is {value}; it must be in [0, 1)")
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "betas": betas, "eps": eps}
        defaults |= {"fused": fused, "capturable": flag("capturable", capturable), "foreach": None, "maximize": False}
        self._with_matrices: list[dict[str, Any]] = []
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "muon" not in param_group:
            supported = "groups with the key, as of flashmhf.param_groups(model, lr, weight_decay, muon=True)"
            raise ValueError(f"params: a group has no key 'muon'; supported: {supported}")
        own = [key for key in _momentum_keys(param_group) if key in param_group]
        super().add_param_group(param_group)
        group = self.param_groups.pop()  # put back below, if it passes the checks
        _check_settings("params: a group", group)
        _join_momentum(group, (own or _momentum_keys(group))[0])
        for parameter in group["params"] if group["muon"] else ():
            if parameter.dim() < 2:
                shape = list(parameter.shape)
                raise ValueError(
                    f"params: a group with muon=True holds a parameter of shape {shape}; supported: matrices"
                )
            floating("params: a parameter in a group with muon=True", parameter)
        self.param_groups.append(group)
        self._with_matrices += [group] if group["muon"] and group["params"] else []
        if group["fused"] is None:
            group["fused"] = all(parameter.is_cuda for parameter in group["params"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of :meth:`state_dict`. Raises ValueError if its groups follow other rules."""
        last = self.register_load_state_dict_pre_hook(_check_state)  # sees what the caller's hooks return
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            if "last_momentum" not in group:  # of an earlier version
                _join_momentum(group, _momentum_keys(group)[0])
        self._with_matrices = [group for group in self.param_groups if group["muon"] and group["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Update every parameter that has a gradient, once."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        self._update()
        return loss

    # Muon's time is in matrix products and AdamW's in one fused kernel: a compiler has nothing to gain.
    @never_compiled
    def _update(self) -> None:
        for group in self.param_groups:  # all of them before any of them is stepped
            _check_settings("a group", group)
            _join_momentum(group)
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.is_sparse:
                    raise RuntimeError("flashmhf.Muon does not support sparse gradients; supported: sparse=False")
        self._check_matrices()
        for group in self.param_groups:
            step = self._step_matrices if group["muon"] else self._step_others
            for parameters in _alike(group):
                step(group, parameters)

    def _check_matrices(self) -> None:
        """Raise RuntimeError if matrices have been flattened, also those of groups that are not stepped now: ZeRO steps
        one group after another, and takes the others away (stages 1 and 2) or their parameters (stage 3): all that is
        left then is one vector, unlike where somebody has emptied a group to freeze it.
        """
        groups = (*self._with_matrices, *(group for group in self.param_groups if group["muon"]))
        flat = (parameter for group in groups for parameter in group["params"] if parameter.dim() < 2)
        found = [f"a matrix has become a vector of {parameter.numel()} elements" for parameter in flat]
        left = [parameter for group in self.param_groups for parameter in group["params"]]
        if len(left) == 1 and left[0].dim() < 2 and not all(group["params"] for group in self._with_matrices):
            found.append("a group has lost its matrices")
        if found:
            cause = "as under FullyShardedDataParallel and DeepSpeed's ZeRO"
            supported = "fully_shard, DDP and ZeRO's stage 0, which keep shapes"
            raise RuntimeError(f"{found[0]}, {cause}; supported: {supported}")

    def _step_matrices(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Update parameters of one shape and placement: all their matrices are one batch."""
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum"] = torch.zeros_like(parameter)
        momenta = [_local(self.state[parameter]["momentum"]) for parameter in parameters]
        gradients = [_local(parameter.grad, parameter) for parameter in parameters]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        directions = torch._foreach_lerp(gradients, momenta, group["momentum"])
        updates = _orthogonalise_shards(torch.stack(directions), parameters[0])
        weights, shape = [_local(parameter) for parameter in parameters], parameters[0].shape
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        updates, scale = updates.to(weights[0]), group["lr"] * RMS * max(shape[-2:]) ** 0.5
        if isinstance(scale, Tensor):  # alpha is a number
            updates, scale = updates * scale, 1.0
        torch._foreach_sub_(weights, list(updates.unbind()), alpha=scale)

    def _step_others(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Update parameters as torch.optim.AdamW does, by its function."""
        for parameter in parameters:
            if not (state := self.state[parameter]):
                on_device = group["capturable"] or group["fused"]
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device if on_device else "cpu")
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        moments = ([self.state[p][name] for p in parameters] for name in ("exp_avg", "exp_avg_sq"))
        settings = ("lr", "weight_decay", "eps", "maximize", "fused", "foreach", "capturable")
        adamw(
            parameters, [parameter.grad for parameter in parameters], *moments, [],
            [self.state[parameter]["step"] for parameter in parameters],
            has_complex=any(parameter.is_complex() for parameter in parameters), amsgrad=False,
            beta1=group["betas"][0], beta2=group["betas"][1], **{name: group[name] for name in settings},
        )  # fmt: skip


def _alike(group: dict[str, Any]) -> Iterable[list[Tensor]]:
    """Return the parameters with gradients by placement, since AdamW's kernels take no DTensors beside plain tensors;
    for Muon, which stacks them, also by shape, dtype and device.
    """
    found: dict[Hashable, list[Tensor]] = defaultdict(list)
    for parameter in group["params"]:
        if parameter.grad is not None:
            kind = (parameter.shape, parameter.dtype, parameter.device) if group["muon"] else ()
            layout = (parameter.device_mesh, parameter.placements) if is_dtensor(parameter) else ()
            found[kind, layout].append(parameter)
    return found.values()


def _momentum_keys(group: dict[str, Any]) -> list[str]:
    """Return where a group may have its momentum, the usual place first."""
    return ["momentum", "betas"] if group["muon"] else ["betas", "momentum"]


def _join_momentum(group: dict[str, Any], key: str | None = None) -> None:
    """Make "momentum" and betas[0] of a group one value: that of ``key``, or the one that has changed since last time.

    Schedules of PyTorch set betas wherever the optimizer has some, training loops with Muon set "momentum".
    """
    values = {"momentum": group["momentum"], "betas": group["betas"][0]}
    if key is None:
        changed = {name: value for name, value in values.items() if value != group["last_momentum"]}
        if len({*changed.values()}) > 1:
            found = f"momentum = {values['momentum']} and betas[0] = {values['betas']}"
            raise ValueError(f"a group got {found}; supported: one of them, they are the same value")
        key = next(iter(changed), "momentum")
    group["momentum"] = group["last_momentum"] = values[key]
    group["betas"] = (values[key], *group["betas"][1:])


def _check_state(optimizer: Muon, state_dict: dict[str, Any]) -> None:
    """Raise ValueError if ``state_dict`` is another optimizer's."""
    groups, states = state_dict["param_groups"], state_dict["state"]
    found, expected = ([group.get("muon") for group in each] for each in (groups, optimizer.param_groups))
    if found != expected:
        raise ValueError(f"state_dict has groups with muon = {found}; this optimizer's have {expected}")
    for group in groups:
        _check_settings("state_dict: a group", group)
        expected = {"momentum"} if group["muon"] else {"step", "exp_avg", "exp_avg_sq"}
        for index in group["params"]:
            # a parameter without a gradient so far has none
            if index in states and (lacking := sorted(expected - states[index].keys())):
                raise ValueError(f"state_dict lacks {', '.join(lacking)} of parameter {index}: another optimizer's")


def _check_settings(named: str, group: dict[str, Any]) -> None:
    """Refuse settings of torch.optim.AdamW that a step would pass over, and a "muon" that is no bool."""
    is_muon = flag(f"{named}'s muon", group["muon"])
    for name in ("amsgrad", "differentiable", *(["maximize"] if is_muon else [])):
        if group.get(name):
            raise ValueError(f"{named} with muon={is_muon} has {name}=True; supported: False")
