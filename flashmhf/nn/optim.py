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
    with FullyShardedDataParallel, and without ``outputs`` where the output layer cannot be told from others.
    """
    checks.instance("model", model, nn.Module, "a torch.nn.Module")
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        # flat: no rate for the projections, decay for all or none, no matrix for Muon
        supported = "fully_shard, or with AdamW and use_orig_params=True the groups of the model before it"
        raise ValueError(f"model has flat parameters (FullyShardedDataParallel); supported: {supported}")
    lr, weight_decay = epsilon("lr", lr), epsilon("weight_decay", weight_decay)
    if projection_rate is None:
        projection_rate = MUON_PROJECTION_RATE if muon else ADAMW_PROJECTION_RATE
    if not epsilon("projection_rate", projection_rate) > 0:
        raise ValueError(f"projection_rate is {projection_rate}; it must be above 0")
    # the share of the rate, and the decay
    projection = projection_rate, weight_decay / projection_rate
    rates = {"plain": (1.0, weight_decay), "projection": projection, "undecayed": (1.0, 0.0)}
    projections = _parameters_of(model, FlashMHF, "in_proj", "out_proj")
    norms = _parameters_of(model, MultiHead, "q_norm") | _parameters_of(model, (nn.LayerNorm, nn.RMSNorm))
    others = _adamw_weights(model, outputs) if checks.flag("muon", muon) else set()
    groups: dict[tuple[str, bool], list[Tensor]] = {(kind, matrix): [] for kind in rates for matrix in (False, True)}
    for parameter in filter(lambda each: each.requires_grad, model.parameters()):
        matrix = "projection" if parameter in projections else "plain"
        kind = "undecayed" if parameter.dim() < 2 or parameter in norms else matrix
        groups[kind, muon and kind != "undecayed" and parameter not in others].append(parameter)
    return [
        {"params": members, "lr": lr * share, "lr_share": share, "weight_decay": decay}
        | ({"muon": is_matrix} if muon else {})
        for (kind, is_matrix), members in groups.items() if members for share, decay in [rates[kind]]
    ]  # fmt: skip


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
    """Return the output layers of ``model``. Raises ValueError where they cannot be told from others.

    Not asked about are parts that say what their output layers are, parameters that are ``known``, and adapters.
    """
    outputs, clear = [], set(known)
    for module in model.modules():
        for way in ("get_output_embeddings", "get_classifier"):
            if hasattr(module, way) and (output := getattr(module, way)()) is not None:
                outputs.append(output)
                clear.update(module.parameters())
        if hasattr(module, "base_layer"):
            clear.update({*module.parameters()}.difference(module.base_layer.parameters()))
    of_layers, rows = _parameters_of(model, _MATRICES), {len(weight) for weight in embeddings}
    taken: set[int] = set()  # the widths that later modules take
    sized, last, loose, tied = {}, {}, [], False
    for name, part in reversed([*model.named_modules()]):
        own = dict(part.named_parameters(recurse=False))
        if isinstance(part, nn.Linear):
            tied |= not embeddings.isdisjoint(part.parameters())
            if clear.isdisjoint(part.parameters()):
                sized |= {name or "model": part} if part.out_features in rows else {}
                last |= {name or "model": part} if part.out_features not in taken else {}
        elif own.keys() != {"weight", "bias"}:  # those of a linear layer of another class, such as GPT-2's
            matrices = [key for key, each in own.items() if each.dim() == 2 and each not in of_layers | clear]
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
