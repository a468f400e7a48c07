"""The operators ``torch.ops.flashmhf.*`` and the functions in front of them."""

from . import layer  # noqa: F401  (which registers its own)
from .networks import flash_mhf, gated_flash_mhf

__all__ = ["flash_mhf", "gated_flash_mhf"]
