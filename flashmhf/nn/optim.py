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


def roles(model: nn.Module) -> dict[str, str]:
    """Return the role of each named parameter: "projection", "k", "u", "v", "router", "undecayed" or "other"."""
    found = {name: "undecayed" if parameter.dim() < 2 else "other" for name, parameter in model.named_parameters()}
    for prefix, module in model.named_modules():
        if not isinstance(module, MultiHead):
            continue
        for part, parameter in module.named_parameters():
            name, (owner, _, _) = f"{prefix}.{part}" if prefix else part, part.partition(".")
            if name not in found:  # shared with a parameter named before
                continue
            if owner == "q_norm":
                found[name] = "undecayed"
            elif owner in ("in_proj", "out_proj") and parameter.dim() > 1:
                found[name] = "projection"
            elif owner in ("k", "u", "v", "router"):
                found[name] = owner
    return found


def param_groups(
    model: nn.Module, lr: float, weight_decay: float, *, projection_rate: float | None = None, muon: bool = False,
    outputs: Iterable[nn.Module] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return ``model``'s parameter groups for AdamW and :class:`flashmhf.Muon`, with decoupled weight decay.

    in_proj and out_proj of FlashMHF learn at ``projection_rate`` of ``lr``: M = Q K^T and V W_out are products of two
    learned matrices, which change about twice as fast as one. Their weight decay is divided by the same factor. Vectors
    (norms, biases) and q_norm's weights are not decayed.

    Args:
        model: any module; every trainable parameter is in one group, shared ones once.
        lr, weight_decay: of all but the projections. A loop that sets rates itself uses ``lr * group["lr_scale"]``.
        projection_rate: the share of ``lr`` that the projections get, above 0. None: 0.3, and 1.0 with ``muon``.
        muon: set "muon" in the groups, False for vectors, q_norm's weights, embeddings and output layers.
        outputs: with ``muon``, the output layers. None: what ``get_output_embeddings()`` of ``model`` or of a part
            says; without it the linear layers with as many output features as the largest embedding has rows.

    Returns groups with "params", "lr", "lr_scale", "weight_decay", and "muon" if asked for. Raises TypeError if
    ``model`` is not a module or a rate is not a number, ValueError for a negative rate, a projection_rate of 0, and
    where ``outputs`` must be given: a linear layer has as many output features as a smaller embedding has rows, or as
    the largest one has and as it has inputs.
    """
    checks.instance("model", model, nn.Module, "a torch.nn.Module")
    lr, weight_decay = epsilon("lr", lr), epsilon("weight_decay", weight_decay)
    if projection_rate is None:
        projection_rate = MUON_PROJECTION_RATE if muon else ADAMW_PROJECTION_RATE
    if not epsilon("projection_rate", projection_rate) > 0:
        raise ValueError(f"projection_rate is {projection_rate}; it must be above 0")
    networks = [module for module in model.modules() if isinstance(module, FlashMHF)]
    flash = {id(parameter) for module in networks for parameter in module.parameters()}
    rates = {"plain": (1.0, weight_decay), "undecayed": (1.0, 0.0)}  # the share of the rate, and the decay
    rates["projection"] = projection_rate, weight_decay / projection_rate
    vocabulary = vocabulary_weights(model, outputs) if muon else set()
    kinds = ("plain", "projection", "undecayed")
    groups: dict[tuple[str, bool], list[Tensor]] = {(kind, matrix): [] for kind in kinds for matrix in (False, True)}
    parameters = dict(model.named_parameters())
    for name, role in roles(model).items():
        parameter = parameters[name]
        if (role == "projection" and id(parameter) not in flash) or role not in rates:
            role = "plain"
        is_matrix = role != "undecayed" and id(parameter) not in vocabulary
        if parameter.requires_grad:
            groups[role, muon and is_matrix].append(parameter)
    marks = [{"muon": is_matrix} if muon else {} for _, is_matrix in groups]
    return [
        {"params": members, "lr": lr * rates[kind][0], "lr_scale": rates[kind][0], "weight_decay": rates[kind][1]}
        | mark
        for ((kind, _), members), mark in zip(groups.items(), marks, strict=True)
        if members
    ]


def vocabulary_weights(model: nn.Module, outputs: Iterable[nn.Module] | None = None) -> set[int]:
    """Return the ids of the weights of embeddings and output layers: see ``outputs`` of :func:`param_groups`."""
    modules = dict(model.named_modules())
    embeddings = [module for module in modules.values() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    found = {id(module.weight) for module in embeddings}
    if outputs is None:
        ways = [getattr(module, "get_output_embeddings", None) for module in modules.values()]
        outputs = [module for module in (way() for way in ways if way) if module is not None]
        if not outputs and not hasattr(model, "get_output_embeddings"):
            sizes = {module.num_embeddings for module in embeddings}
            own = {part for module in modules.values() if isinstance(module, Network) for part in module.modules()}
            linears = {name: module for name, module in modules.items() if isinstance(module, nn.Linear)}
            linears = {name: module for name, module in linears.items() if module not in own}
            alike = {n: m for n, m in linears.items() if m.out_features in sizes and id(m.weight) not in found}
            unsure = [
                name for name, m in alike.items() if m.out_features != max(sizes) or m.out_features == m.in_features
            ]
            if unsure:  # learned positions are often as many as a model is wide
                raise ValueError(
                    f"outputs is None, the model has no get_output_embeddings(), and {', '.join(unsure)} may be an "
                    "output layer: an embedding has as many rows; supported: a list of the output layers"
                )
            outputs = alike.values()
    for module in outputs:
        checks.instance("outputs", module, nn.Module, "torch.nn.Modules")
        found |= {id(parameter) for parameter in module.parameters()}
    return found
