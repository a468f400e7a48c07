"""Learning rates and weight decay of a model's parameters, for the optimizers of torch.optim."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from .. import checks
from ..checks import epsilon
from .flashmhf import FlashMHF
from .multihead import MultiHead
from .network import Network

# The share of the learning rate at which long trainings end lowest: with AdamW 0.3 ends 0.009 nats and more below the
# full rate (26M, three runs), with Muon the full rate ends 0.008 below 0.3 (26M, one pair).
ADAMW_PROJECTION_RATE, MUON_PROJECTION_RATE = 0.3, 1.0
_CONVOLUTION = nn.modules.conv._ConvNd
_MATRICES = (nn.Linear, nn.Bilinear, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)


def param_groups(
    model: nn.Module, lr: float, weight_decay: float, *, projection_rate: float | None = None, muon: bool = False,
    outputs: Iterable[nn.Module] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return ``model``'s parameter groups for AdamW and :class:`flashmhf.Muon`, with decoupled weight decay.

    in_proj and out_proj of FlashMHF learn at ``projection_rate`` of ``lr``: M = Q K^T and V W_out are products of two
    learned matrices, which change twice as fast as one. Their decay is divided by it; vectors and q_norm have none.

    Args:
        model: any module; every trainable parameter is in one group, shared ones once.
        lr, weight_decay: of all but the projections. A loop that sets rates itself uses ``lr * group["lr_share"]``.
        projection_rate: the share of ``lr`` that the projections get, above 0. None: 0.3, and 1.0 with ``muon``.
        muon: set "muon" in the groups: False for vectors, norms, embeddings, convolutions, output layers, and for
            parameters whose first dimension is 1, such as learned positions of a ViT.
        outputs: with ``muon``, the output layers, and embeddings that are no nn.Embedding. None: what
            ``get_output_embeddings()`` (transformers) or ``get_classifier()`` (timm) of ``model`` or of a part says;
            else linear layers tied to an embedding, or the one with as many outputs as the largest embedding has rows.

    Returns groups with "params", "lr", "lr_share", "weight_decay", and "muon" if asked for. Raises TypeError if
    ``model`` is not a module or a rate is not a number, ValueError for a negative rate, a projection_rate of 0, a model
    with FullyShardedDataParallel, with ``muon`` for DeepSpeed's ZeRO stage 3, and without ``outputs`` where the output
    layer cannot be told from others.
    """
    checks.instance("model", model, nn.Module, "a torch.nn.Module")
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        # flat: no rate for the projections, decay for all or none, no matrix for Muon
        supported = "fully_shard, or with AdamW and use_orig_params=True the groups of the model before it"
        raise ValueError(f"model has flat parameters (FullyShardedDataParallel); supported: {supported}")
    if checks.flag("muon", muon) and any(hasattr(parameter, "ds_shape") for parameter in model.parameters()):
        supported = "muon=False, or the model before it is partitioned, with fully_shard or DDP"
        raise ValueError(f"muon is True and model has partitioned parameters (ZeRO's stage 3); supported: {supported}")
    lr, weight_decay = epsilon("lr", lr), epsilon("weight_decay", weight_decay)
    if projection_rate is None:
        projection_rate = MUON_PROJECTION_RATE if muon else ADAMW_PROJECTION_RATE
    if not epsilon("projection_rate", projection_rate) > 0:
        raise ValueError(f"projection_rate is {projection_rate}; it must be above 0")
    shares = {"plain": 1.0, "projection": projection_rate, "undecayed": 1.0}
    decays = {"plain": weight_decay, "projection": weight_decay / projection_rate, "undecayed": 0.0}
    projections = _parameters_of(model, FlashMHF, "in_proj", "out_proj")
    norms = _parameters_of(model, MultiHead, "q_norm") | _parameters_of(model, (nn.LayerNorm, nn.RMSNorm))
    others = _adamw_weights(model, outputs) if muon else set()
    members: dict[tuple[str, bool], list[Tensor]] = {(kind, matrix): [] for kind in shares for matrix in (False, True)}
    for parameter in filter(lambda each: each.requires_grad, model.parameters()):
        kind = "projection" if parameter in projections else "plain"
        shape = getattr(parameter, "ds_shape", parameter.shape)  # a partitioned one is itself empty
        kind = "undecayed" if len(shape) < 2 or parameter in norms else kind
        members[kind, muon and kind != "undecayed" and parameter not in others].append(parameter)
    return [
        {"params": params, "lr": lr * shares[kind], "lr_share": shares[kind], "weight_decay": decays[kind]}
        | ({"muon": is_matrix} if muon else {})
        for (kind, is_matrix), params in members.items()
        if params
    ]


def _parameters_of(model: nn.Module, kind: type | tuple[type, ...], *parts: str) -> set[Tensor]:
    """Return the parameters of all modules of a kind, or of these parts of them."""
    found = [module for module in model.modules() if isinstance(module, kind)]
    if parts:
        found = [part for module in found for name in parts if (part := getattr(module, name, None)) is not None]
    return {parameter for part in found for parameter in part.parameters()}


def _adamw_weights(model: nn.Module, outputs: Iterable[nn.Module | nn.Parameter] | None) -> set[Tensor]:
    """Return the parameters that Muon shall not move, though they have two dimensions: see :func:`param_groups`."""
    embeddings = _parameters_of(model, (nn.Embedding, nn.EmbeddingBag))
    found = embeddings | _parameters_of(model, _CONVOLUTION)
    own = _parameters_of(model, (Network, nn.MultiheadAttention))
    found |= {parameter for parameter in model.parameters() if parameter.shape[:1] == (1,) and parameter not in own}
    outputs = _outputs_of(model, embeddings, found | own) if outputs is None else outputs
    for each in checks.instance("outputs", outputs, Iterable, "a list of torch.nn.Modules"):
        checks.instance("outputs", each, nn.Module | nn.Parameter, "torch.nn.Modules")
        found.update(each.parameters() if isinstance(each, nn.Module) else [each])
    if not found.issubset(model.parameters()):
        raise ValueError("outputs has weights that model has not; supported: parts of model, not of a copy")
    adapted = [module for module in model.modules() if hasattr(module, "base_layer")]
    return found.union(*(each.parameters() for each in adapted if not found.isdisjoint(each.base_layer.parameters())))


def _outputs_of(model: nn.Module, embeddings: set[Tensor], known: set[Tensor]) -> list[nn.Module]:
    """Return the output layers of ``model``: those that parts name, or else the one that can be told from others by its
    size. Raises ValueError for layers that may be some. Parameters that are ``known`` are not, nor are adapters.
    """
    outputs, settled = _named_outputs(model)
    settled |= known
    of_layers, rows = _parameters_of(model, _MATRICES), {len(weight) for weight in embeddings}
    tied = False
    sized, last = {}, {}  # linear layers: as many outputs as an embedding has rows; outputs that no later module takes
    loose = []  # matrices of modules that are no layers of PyTorch
    taken: set[int] = set()
    for name, part in reversed([*model.named_modules()]):
        own = dict(part.named_parameters(recurse=False))
        if isinstance(part, nn.Linear):
            tied = tied or not embeddings.isdisjoint(part.parameters())
            if settled.isdisjoint(part.parameters()):
                if part.out_features in rows:
                    sized[name or "model"] = part
                if part.out_features not in taken:
                    last[name or "model"] = part
        elif own.keys() != {"weight", "bias"}:  # those of a linear layer of another class, such as GPT-2's
            matrices = (key for key, each in own.items() if each.dim() == 2 and each not in of_layers | settled)
            loose += [f"{name}.{key}".lstrip(".") for key in matrices]
        weights = (each for key, each in own.items() if key != "bias" and each.dim() and each not in embeddings)
        taken |= {getattr(part, "d_model", 0), *(weight.shape[-1] for weight in weights)}
    unsure = {name: last[name] for name in sized if name in last} if tied else sized | last
    if not (outputs or tied) and len(sized) == 1 and sized.items() <= last.items():
        (head,) = sized.values()
        if head.out_features == max(rows) != head.in_features:
            unsure, outputs = {}, [head]
    if names := [*reversed([*loose, *unsure])]:
        named = ", ".join(names[-4:]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        supported = "a list of the output layers, and of parameters that are embeddings; [] if there are none"
        raise ValueError(f"outputs is None, and {named} may be an output layer or embedding; supported: {supported}")
    return outputs


def _named_outputs(model: nn.Module) -> tuple[list[nn.Module], set[Tensor]]:
    """Return the output layers that parts of ``model`` name, and what is settled with it: their parameters, and those
    of adapters beside the layer that they adapt.
    """
    outputs, settled = [], set()
    for module in model.modules():
        for way in ("get_output_embeddings", "get_classifier"):
            if hasattr(module, way) and (output := getattr(module, way)()) is not None:
                outputs.append(output)
                settled.update(module.parameters())
        if hasattr(module, "base_layer"):
            settled.update({*module.parameters()}.difference(module.base_layer.parameters()))
    return outputs, settled
