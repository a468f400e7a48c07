"""Import, train and infer with one of PyTorch's private names unknown to flashmhf, for each in turn: a process of its
own, which forks. The name is changed in the package's source as it is imported, so that PyTorch itself keeps it."""

import importlib.machinery
import os
import pathlib
import re
import sys
import warnings

import torch

PACKAGE = pathlib.Path(__file__).resolve().parents[2] / "flashmhf"
SOURCE = (PACKAGE / "torch_private.py").read_text()
PRIVATE = re.compile(
    r"\b(_[A-Za-z]\w+|DeviceContext|GenericTorchDispatchRuleHolder|ProxyTorchDispatchMode|simple_registry)"
)


def names() -> list[str]:
    """What follows a dot or a quote in the one module that names them, and is not the module's own."""
    own = set(re.findall(r"^(?:def |class )?(_\w+)", SOURCE, re.MULTILINE)) | {"_dynamo_marked_constant"}
    found = re.findall(rf"[.\"]{PRIVATE.pattern}", SOURCE) + ["DeviceContext"]
    return sorted(set(found) - own)


class Renaming(importlib.machinery.SourceFileLoader):
    name = ""

    def get_code(self, fullname):
        source = self.get_source(fullname) if PACKAGE in pathlib.Path(self.path).parents else ""
        if not re.search(rf"\b{self.name}\b", source):
            return super().get_code(fullname)
        renamed = re.sub(rf"\b{self.name}\b", f"{self.name}_renamed", source)
        return compile(renamed, self.path, "exec", dont_inherit=True)


def run(name: str) -> None:
    Renaming.name = name
    sys.path_hooks.insert(0, importlib.machinery.FileFinder.path_hook((Renaming, [".py"])))
    sys.path_importer_cache.clear()
    warnings.simplefilter("ignore")
    import flashmhf

    x = torch.randn(3, 64)
    network = flashmhf.FlashMHF(64, 2, 3, 16)
    expected = flashmhf.FlashMHF(64, 2, 3, 16, backend="reference")
    expected.load_state_dict(network.state_dict())
    for each in (network, expected):
        each(x).square().sum().backward()
    torch.testing.assert_close(network.k.grad, expected.k.grad)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        torch.testing.assert_close(network(x), expected(x))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        network(x)


def main() -> int:
    failed = []
    for name in names():
        if not (child := os.fork()):
            try:
                run(name)
            except BaseException as error:
                print(f"{name}: {type(error).__name__}: {error}", flush=True)
                os._exit(1)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            failed.append(name)
    print(f"{len(names())} names")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
