"""FlashMHF in training on a GPU: its loss curve against the eager back end's, bitwise repeats."""

import torch
from torch import nn

import flashmhf

STEPS = 200


def randomised(module: nn.Module, generator: torch.Generator) -> nn.Module:
    """Every weight from N(0, 1/fan_in): scores and gates far from the flat spots of their functions."""
    for name, weight in module.named_parameters():
        fan_in = weight.shape[-2] if name in ("v", "router") else weight.shape[-1]
        weight.data = (
            torch.randn(weight.shape, device=weight.device, generator=generator).to(weight.dtype) / fan_in**0.5
        )
    return module


class Residual(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(nn.functional.rms_norm(x, x.shape[-1:]))


def train(backend: str, deterministic: bool = False, device: str = "cuda") -> tuple[torch.Tensor, nn.Module]:
    """Losses of STEPS steps, and the model: fp32 weights, 16-bit computation, a function of another network to be
    learned."""
    generator, weights = (torch.Generator(device).manual_seed(seed) for seed in (3, 2))
    networks = (
        flashmhf.FlashMHF(128, 2, 3, 80, backend=backend, deterministic=deterministic, device=device) for _ in range(2)
    )
    model = nn.Sequential(*(Residual(randomised(network, weights)) for network in networks))
    teacher = randomised(flashmhf.SwiGLU(128, 256, device=device), generator).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    losses = torch.empty(STEPS, device=device)
    for step in range(STEPS):
        x = torch.randn(7, 73, 128, device=device, generator=generator)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(model(x).float(), x + 2 * teacher(x).float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses[step] = loss.detach()
    return losses, model


def test_loss_curve_is_that_of_the_eager_back_end(gpu_backend):
    """Step by step within 1 %, though rounding differs in every product of every step."""
    ours, _ = train(gpu_backend)
    eager, _ = train("eager")
    assert eager[-1] < 0.65 * eager[0]
    assert ((ours - eager).abs() / eager).max() < 0.01


def test_deterministic_training_repeats_bitwise(gpu_backend):
    (first, model), (second, again) = (train(gpu_backend, deterministic=True) for _ in range(2))
    assert torch.equal(first, second)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
