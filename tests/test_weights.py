"""Weights that a module does not hold itself: every function that reads or replaces a network's weights refuses them by
the name of the part, and changes nothing."""

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize, prune, weight_norm

import flashmhf
from flashmhf import distributed, quantize
from flashmhf.integrations.peft import stack_weights

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch has no distributed package")


def save(networks: nn.Module, mesh, folder) -> None:
    pytest.importorskip("transformers")
    from small_models import foreign

    model = foreign()
    for layer, network in zip(model.model.layers, networks, strict=True):
        layer.mlp = network
        for part in network.modules():
            part.placed = True  # as replace_ffn marks its networks
    try:
        model.save_pretrained(folder / "new")
    finally:
        assert not (folder / "new").exists()


DOORS = {  # what takes a model of two networks, and what takes the second of them
    "replace_ffn": lambda model, *_: flashmhf.replace_ffn(model),
    "quantize_": lambda model, *_: quantize.quantize_(model),
    "parallelize": lambda model, mesh, _: distributed.parallelize(model, mesh),
    "save_pretrained": save,
    "to_fp8 of one": lambda model, *_: quantize.to_fp8(model[1]),
    "parallelize of one": lambda model, mesh, _: distributed.parallelize(model[1], mesh),
    "shard of one": lambda model, *_: distributed.shard(model[1], distributed.Rank()),
    "stack_weights of one": lambda model, *_: stack_weights(model[1]),
}


def offloaded(model: nn.Module, part: str) -> None:
    pytest.importorskip("accelerate").cpu_offload(model, "cpu")


def adapted(model: nn.Module, part: str) -> None:
    peft = pytest.importorskip("peft")
    stack_weights(model[1])
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=[], target_parameters=["1.k"]), model)


def with_an_adapted_part(model: nn.Module, part: str) -> None:
    peft = pytest.importorskip("peft")
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=[part]), model[1])


def wrapped(model: nn.Module, part: str) -> None:
    model[1] = DistributedDataParallel(model[1])


def sharded(model: nn.Module, part: str) -> None:
    fsdp.fully_shard(model[1], mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (1,)))


def partitioned(model: nn.Module, part: str) -> None:
    """As deepspeed.zero.Init leaves them."""
    for parameter in model[1].parameters():
        parameter.ds_shape, parameter.data = parameter.shape, torch.empty(0)


NOT_FLASHMHF, OF_ONE = {"replace_ffn"}, {door for door in DOORS if "of one" in door}
WAYS = {  # what is done, the message after the network's name, and the functions that it does not concern
    "offloaded": (offloaded, r"\S+ is offloaded; supported: models loaded without offloading",
     {"save_pretrained"}),  # whose files transformers fills from elsewhere
    "empty": (lambda model, _: model[1].to("meta"), "{name} has no values.*not offloaded",
     DOORS.keys() - {"replace_ffn", "quantize_", "to_fp8 of one"}),
    "partitioned": (partitioned, r"\S+ is partitioned by DeepSpeed's ZeRO stage 3; supported: models loaded before",
     {"save_pretrained"}),  # which writes what ZeRO has gathered
    "parametrised": (lambda model, _: parametrize.register_parametrization(model[1], "k", nn.Identity()),
     "{name} has parametrised weights; .*remove_parametrizations", NOT_FLASHMHF),
    "with a parametrised part": (lambda model, part: parametrizations.weight_norm(model[1].get_submodule(part)),
     "{path} has parametrised weights; .*remove_parametrizations", set()),
    "pruned": (lambda model, _: prune.l1_unstructured(model[1], "k", 0.3),
     "{name} has parametrised weights; .*prune.remove", NOT_FLASHMHF),
    "with a pruned part": (lambda model, part: prune.l1_unstructured(model[1].get_submodule(part), "weight", 0.3),
     "{path} has parametrised weights; .*prune.remove", set()),
    "with an older norm": (lambda model, part: weight_norm(model[1].get_submodule(part)),
     "{path} has parametrised weights; .*remove_parametrizations", set()),
    "adapted": (adapted, r"{name}(\.base_layer)? is held by an adapter; .*merge_and_unload", NOT_FLASHMHF | OF_ONE),
    "wrapped": (wrapped, "1 is a DistributedDataParallel; supported: the model before it is wrapped",
     DOORS.keys() - {"replace_ffn", "parallelize"}),
    "sharded": (sharded, r"{name}{gate} is sharded \(DTensor\); supported: models before parallelize or fully_shard",
     {"save_pretrained", "quantize_", "to_fp8 of one"}),
    "with an adapted part": (with_an_adapted_part, "{path} is held by an adapter; .*merge_and_unload", set()),
}  # fmt: skip


@pytest.mark.parametrize(("way", "door"), [(way, door) for way in WAYS for door in DOORS if door not in WAYS[way][2]])
def test_weights_that_are_not_the_modules_own_are_refused_and_stay(way, door, mesh, tmp_path):
    change, message, _ = WAYS[way]
    gated = door == "replace_ffn"
    model = nn.Sequential(*(flashmhf.SwiGLU(128, 344) if gated else flashmhf.FlashMHF(128, 2, 3, 32) for _ in range(2)))
    part, gate = ("up_proj", ".gate_proj") if gated else ("in_proj", "")
    change(model, part)
    name = {"save_pretrained": "model.layers.1.mlp"}.get(door, r"\w*FlashMHF" if door in OF_ONE else "1")
    message = message.format(name=name, path=part if door in OF_ONE else f"{name}.{part}", gate=gate)
    before = str(model), [id(parameter) for parameter in model.parameters()]
    with pytest.raises(ValueError, match=f"^{message}"):
        DOORS[door](model, mesh, tmp_path)
    assert (str(model), [id(parameter) for parameter in model.parameters()]) == before
