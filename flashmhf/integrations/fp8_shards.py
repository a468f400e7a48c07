"""FP8 weights of one tensor-parallel rank: the network as one operator ``flashmhf::fp8_layer``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..nn.arguments import divisor, epsilon, flag, positive
from ..nn.multihead import check_input
from ..quantize import LAYOUT
from ..quantize.packing import check_layout
from .shards import Rank, Shard, loadable


class Fp8FlashMHFShard(Shard):
    """:class:`flashmhf.quantize.Fp8FlashMHF` with H / size heads; one operator and one all-reduce.

    Arguments as in :class:`FlashMHFShard`, and ``projections``: whether they are in e4m3, too. The state dict is that of
    ``flashmhf.quantize.to_fp8``. A row of out_proj keeps the scale of the whole row on every rank. Where out_proj quantises its input (many
    tokens, :class:`flashmhf.quantize.Fp8Linear`), a rank quantises its part of S by itself. Raises ValueError for another layout of packed
    weights.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_subnets: int,
        subnet_dim: int,
        *,
        num_kv_heads: int | None = None,
        router_eps: float = 1e-20,
        q_norm: bool = False,
        q_norm_eps: float = 1e-5,
        projections: bool = True,
        bias: bool = False,
        backend: str = "auto",
        rank: Rank = Rank(),  # noqa: B008  frozen
        device=None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, num_heads, rank)
        self.router_eps, self.q_norm_eps, self.backend = epsilon("router_eps", router_eps), epsilon("q_norm_eps", q_norm_eps), backend
        heads, subnets, width = self.local_heads, positive("num_subnets", num_subnets), positive("subnet_dim", subnet_dim)
        kv_heads = rank.of("num_kv_heads", divisor("num_kv_heads", num_kv_heads, "num_heads", self.num_heads))
        inner, e4m3, projections = heads * self.head_dim, torch.float8_e4m3fn, flag("projections", projections)

        def weight(shape: tuple[int, ...], of: torch.dtype | None, dim: int | None) -> nn.Parameter:
            return loadable(nn.Parameter(torch.empty(shape, device=device, dtype=of), requires_grad=False), dim, rank)

        def projection(rows: int, columns: int, dim: int) -> nn.ParameterDict:
            split = dim if dim == 0 else None
            if projections:
                tensors = {"weight8": weight((rows, columns), e4m3, dim), "scale": weight((rows, 1), torch.float32, split)}
            else:
                tensors = {"weight": weight((rows, columns), dtype, dim)}
            return nn.ParameterDict(tensors | ({"bias": weight((rows,), dtype, split)} if bias else {}))

        self.in_proj, self.out_proj = projection(inner, self.d_model, 0), projection(self.d_model, inner, 1)
        self.k8, self.u8 = (weight((kv_heads, subnets, width, self.head_dim), e4m3, 0) for _ in range(2))
        self.v8 = weight((kv_heads, subnets, self.head_dim, width), e4m3, 0)
        self.scales = weight((3, kv_heads, subnets), torch.float32, 1)
        self.router = weight((heads, self.head_dim, subnets), dtype, 0)
        self.layout = weight((1,), torch.uint8, None)
        self.layout.fill_(LAYOUT)
        self.layout.weight_loader = lambda parameter, whole: check_layout(whole)
        self.q_norm = nn.ParameterDict({"weight": weight((heads, self.head_dim), dtype, 0)}) if q_norm else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., d_model] -> [..., d_model], equal on every rank."""
        check_input(x, self.d_model)
        in_proj, out_proj = dict(self.in_proj.items()), dict(self.out_proj.items())
        name = "weight8" if "weight8" in in_proj else "weight"
        y = torch.ops.flashmhf.fp8_layer(
            x,
            in_proj[name],
            in_proj.get("scale"),
            in_proj.get("bias"),
            self.k8,
            self.u8,
            self.v8,
            self.scales,
            self.router,
            self.router_eps,
            out_proj[name],
            out_proj.get("scale"),
            out_proj.get("bias") if self.rank.index == 0 else None,
            q_norm=None if self.q_norm is None else self.q_norm["weight"],
            q_norm_eps=self.q_norm_eps,
            backend=self.backend,
        )
        return self.reduce(y)
