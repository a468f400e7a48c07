"""metrics.jsonl: one JSON object a line, in the order of training.

Keys: step, loss (nats a token), learning_rate, grad_norm, tokens (so far), tokens_per_second, mfu (where the GPU's peak
is known), peak_memory_bytes (CUDA), eval_loss (nats a token).
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import torch
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from flashmhf.nn.multihead import GroupedHeads

from .checkpoints import write_whole
from .errors import ADVICE, TrainingError

FILE = "metrics.jsonl"
# Dense bf16 tensor-core peaks, FLOP/s, by the device's name; the first that the name contains.
PEAKS = {
    **{"H100 PCIe": 756e12, "H100 NVL": 835e12, "H200 NVL": 835e12, "H100": 989.4e12, "H200": 989.4e12},
    **{"A100": 312e12, "GB200": 2500e12, "B200": 2250e12},
}


def read_rows(output: Path) -> list[dict]:
    """Return the rows of a run's metrics.jsonl up to a line that is none, as a kill or a full disk leaves the last."""
    rows = []
    path = output / FILE
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            break
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            break
        rows.append(row)
    return rows


def keep_rows(output: Path, step: int) -> None:
    """Drop the rows after ``step``, which a resumed run records again."""
    write_whole(output / FILE, "".join(json.dumps(row) + "\n" for row in read_rows(output) if row["step"] <= step))


class MetricsCallback(TrainerCallback):
    """Add speed to what the Trainer logs, and write metrics.jsonl. Evaluation and saving take no time."""

    def __init__(self, output: Path, tokens_per_step: int, flops_per_token: float, peak: float | None):
        self.output, self.tokens_per_step = output, tokens_per_step
        self.flops_per_token, self.peak = flops_per_token, peak

    def _restart(self, args, state: TrainerState, control, **kwargs) -> None:
        self._step, self._time = state.global_step, time.perf_counter()

    on_train_begin = on_evaluate = on_save = _restart

    def on_step_end(self, args, state: TrainerState, control: TrainerControl, **kwargs):
        if state.global_step >= state.max_steps:
            control.should_log = True

    def on_log(self, args: TrainingArguments, state: TrainerState, control, logs: dict, **kwargs):
        if not ({"loss", "eval_loss"} & logs.keys()) or not state.is_world_process_zero:
            return
        step = state.global_step
        logged = ("loss", "learning_rate", "grad_norm", "eval_loss")
        row = {"step": step} | {name: logs[name] for name in logged if name in logs}
        for name, value in row.items():
            if not math.isfinite(value):
                raise TrainingError(f"the {name} is {value} at step {step}; {ADVICE}")
        if "loss" in logs:
            row |= self._speed(args, state)
        with (self.output / FILE).open("a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")

    def _speed(self, args: TrainingArguments, state: TrainerState) -> dict:
        seconds, steps = time.perf_counter() - self._time, state.global_step - self._step
        self._restart(args, state, None)
        row = {"tokens": state.global_step * self.tokens_per_step}
        if steps:
            row["tokens_per_second"] = steps * self.tokens_per_step / seconds
            if self.peak is not None:
                row["mfu"] = row["tokens_per_second"] * self.flops_per_token / (self.peak * args.world_size)
        if args.device.type == "cuda":
            row["peak_memory_bytes"] = torch.cuda.max_memory_allocated(args.device)
        return row


def training_flops_per_token(model: PreTrainedModel, length: int) -> float:
    """Return 6 a weight that a token meets, and attention over the causal half of ``length``; no recomputation."""
    config = model.config.get_text_config()
    weights = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    if not config.tie_word_embeddings:
        weights -= model.get_input_embeddings().weight.numel()
    for module in model.modules():
        if isinstance(module, GroupedHeads):  # every head of a group multiplies the weights that they share
            shared = module.num_heads // module.num_kv_heads - 1
            weights += shared * sum(weight.numel() for weight in (module.k, module.u, module.v))
    # Qwen2 and others have no head_dim
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = config.num_hidden_layers * config.num_attention_heads * head_dim * length
    return 6.0 * weights + 6.0 * attention


def peak_flops(device: torch.device) -> float | None:
    """Return the device's dense bf16 peak, or None where it is not known, as for a part (MIG) of a GPU."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return None if " MIG " in name else next((peak for part, peak in PEAKS.items() if part in name), None)
