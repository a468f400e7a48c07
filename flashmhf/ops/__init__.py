"""The operators ``torch.ops.flashmhf.*`` and the functions in front of them."""

from . import fp8, layer  # noqa: F401  (which register theirs)
from .mix import flash_mhf, gated_flash_mhf

__all__ = ["flash_mhf", "gated_flash_mhf"]
