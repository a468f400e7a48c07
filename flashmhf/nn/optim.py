"""Learning rates and weight decay of a model's parameters, for the optimizers of torch.optim."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor, nn

from .. import checks
from .arguments import epsilon
from .flashmhf import FlashMHF
from .multihead import MultiHead

PROJECTION_RATE = 0.3


def roles(model: nn.Module) -> dict[str, str]:
    """Return the role of each named parameter of ``model``; a shared parameter has one name.

    Roles: "projection" (in_proj and out_proj of a multi-head network), "k", "u", "v", "router", "undecayed" (fewer than
    two dimensions, or q_norm's weight) and "other".
    """
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
    model: nn.Module, lr: float, weight_decay: float, *, projection_rate: float = PROJECTION_RATE, muon: bool = False
) -> list[dict[str, Any]]:
    """Return ``model``'s parameter groups for an optimizer with decoupled weight decay: ``torch.optim.AdamW``,
    :class:`flashmhf.Muon`.

    in_proj and out_proj of :class:`FlashMHF` layers learn at ``projection_rate`` of ``lr``. M = Q K^T is a product of
    two learned matrices, W_in and K, and so is what a token receives, V W_out. If both matrices learn at Adam's full
    rate, their product changes about twice as fast as one SwiGLU matrix. AdamW decays by lr * weight_decay per step, so
    that group's weight decay is divided by the same factor and the decay per step stays equal. Vectors (norms, biases)
    and q_norm's weights are not decayed.

    Args:
        model: any module; every trainable parameter is in one group, shared ones once. Frozen parameters are left out.
        lr: the learning rate of all parameters but the projections.
        weight_decay: the weight decay of all matrices but the projections, whose own is chosen so that the decay per
            step is equal.
        projection_rate: the share of ``lr`` that the projections get, above 0.
        muon: mark the groups for :class:`flashmhf.Muon`: "muon" is True in those of matrices, False in those of
            vectors, q_norm's weights, embeddings and output layers. Output layers are the linear layers with as many
            output features as the largest embedding of ``model`` has rows, and one with as many as a smaller embedding
            has rows, if it is the only one.

    Returns groups with "params", "lr" and "weight_decay", and "muon" if asked for. Empty groups are left out.

    Raises TypeError if ``model`` is not a module or a rate is not a number, ValueError for a negative rate and a
    projection_rate of 0.
    """
    checks.instance("model", model, nn.Module, "a torch.nn.Module")
    lr, weight_decay = epsilon("lr", lr), epsilon("weight_decay", weight_decay)
    if not epsilon("projection_rate", projection_rate) > 0:
        raise ValueError(f"projection_rate is {projection_rate}; it must be above 0")
    flash = {
        id(parameter) for module in model.modules() if isinstance(module, FlashMHF) for parameter in module.parameters()
    }
    rates = {
        "plain": (lr, weight_decay),
        "projection": (lr * projection_rate, weight_decay / projection_rate),
        "undecayed": (lr, 0.0),
    }
    vocabulary = vocabulary_weights(model) if muon else set()
    groups: dict[tuple[str, bool], list[Tensor]] = {
        (kind, is_matrix): [] for kind in rates for is_matrix in (False, True)
    }
    parameters = dict(model.named_parameters())
    for name, role in roles(model).items():
        parameter = parameters[name]
        if role == "projection" and id(parameter) not in flash or role not in rates:
            role = "plain"
        is_matrix = role != "undecayed" and id(parameter) not in vocabulary
        if parameter.requires_grad:
            groups[role, muon and is_matrix].append(parameter)
    return [
        {"params": members, "lr": rates[kind][0], "weight_decay": rates[kind][1]}
        | ({"muon": is_matrix} if muon else {})
        for (kind, is_matrix), members in groups.items()
        if members
    ]


def vocabulary_weights(model: nn.Module) -> set[int]:
    """Return the ids of the weights of embeddings, and of linear layers with as many output features as the largest has
    rows.

    A layer with as many as a smaller embedding has rows counts only if there is no second one: learned positions are
    often as many as a model is wide, and then its projections have that size.
    """
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    widths, sizes = Counter(module.out_features for module in linears), {module.num_embeddings for module in embeddings}
    largest = max(sizes, default=0)
    outputs = [
        module for module in linears if (out := module.out_features) in sizes and (out == largest or widths[out] == 1)
    ]
    return {id(module.weight) for module in (*embeddings, *outputs)}
