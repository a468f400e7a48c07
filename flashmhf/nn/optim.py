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
        muon: set "muon" in the groups, False for vectors, q_norm's weights, embeddings and output layers.
        outputs: with ``muon``, the output layers. None: what ``get_output_embeddings()`` of ``model`` or of a part
            says; without it the linear layers with as many output features as the largest embedding has rows.

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
    rates = {"plain": (1.0, weight_decay), "projection": (projection_rate, weight_decay / projection_rate)}
    rates["undecayed"] = 1.0, 0.0
    projections = _parameters_of(model, FlashMHF, "in_proj", "out_proj")
    norms = _parameters_of(model, MultiHead, "q_norm")
    vocabulary = vocabulary_weights(model, outputs) if checks.flag("muon", muon) else set()
    groups: dict[tuple[str, bool], list[Tensor]] = {(kind, matrix): [] for kind in rates for matrix in (False, True)}
    for parameter in filter(lambda each: each.requires_grad, model.parameters()):
        matrix = "projection" if parameter in projections else "plain"
        kind = "undecayed" if parameter.dim() < 2 or parameter in norms else matrix
        groups[kind, muon and kind != "undecayed" and parameter not in vocabulary].append(parameter)
    made: list[dict[str, Any]] = []
    for (kind, is_matrix), members in ((key, members) for key, members in groups.items() if members):
        share, decay = rates[kind]
        made.append({"params": members, "lr": lr * share, "lr_share": share, "weight_decay": decay})
        made[-1] |= {"muon": is_matrix} if muon else {}
    return made


def _parameters_of(model: nn.Module, kind: type[nn.Module], *parts: str) -> set[Tensor]:
    """Return the parameters of these parts of all networks of a kind."""
    networks = (module for module in model.modules() if isinstance(module, kind))
    found = (getattr(network, part, None) for network in networks for part in parts)
    return {parameter for part in found if part is not None for parameter in part.parameters()}


def vocabulary_weights(model: nn.Module, outputs: Iterable[nn.Module] | None = None) -> set[Tensor]:
    """Return the weights of embeddings and output layers: see ``outputs`` of :func:`param_groups`."""
    modules = dict(model.named_modules())
    embeddings = [module for module in modules.values() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    found = {parameter for module in embeddings for parameter in module.parameters()}
    if outputs is None:
        ways = [getattr(module, "get_output_embeddings", None) for module in modules.values()]
        outputs = [module for module in (way() for way in ways if way) if module is not None]
        if not outputs and not hasattr(model, "get_output_embeddings"):
            sizes = {module.num_embeddings for module in embeddings}
            own = {part for module in modules.values() if isinstance(module, Network) for part in module.modules()}
            linears = {n: m for n, m in modules.items() if isinstance(m, nn.Linear) and m not in own}
            alike = {n: m for n, m in linears.items() if m.out_features in sizes and found.isdisjoint(m.parameters())}
            # learned positions are often as many as a model is wide
            unsure = [n for n, m in alike.items() if m.out_features != max(sizes) or m.out_features == m.in_features]
            if unsure:
                reason = f"{', '.join(unsure)} may be an output layer: an embedding has as many rows"
                raise ValueError(f"outputs is None, and {reason}; supported: a list of the output layers")
            outputs = alike.values()
    for module in checks.instance("outputs", outputs, Iterable, "a list of torch.nn.Modules"):
        found.update(checks.instance("outputs", module, nn.Module, "torch.nn.Modules").parameters())
    if not found.issubset(model.parameters()):
        raise ValueError("outputs has weights that model has not; supported: parts of model, not of a copy")
    adapted = [module for module in modules.values() if hasattr(module, "base_layer")]
    return found.union(*(each.parameters() for each in adapted if not found.isdisjoint(each.base_layer.parameters())))
