"""Held-out loss with a sliding window, the paper's six tasks through lm-eval, and loading a model for either."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoConfig, PreTrainedModel

from flashmhf.models import loading
from flashmhf.models.quantization import quantise

from . import checkpoints
from .documents import DataError, Piece, Report, find_files, read_documents
from .errors import OptionError
from .tokenizer import load as load_tokenizer

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# lm-eval's names of the paper's tasks: HellaSwag, SIQA, PIQA, OBQA, WinoGrande, RACE.
PAPER_TASKS = ("hellaswag", "social_iqa", "piqa", "openbookqa", "winogrande", "race")


def load(
    name: str,
    *,
    tokenizer_name: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    fp8: bool = False,
    projections: bool = True,
) -> tuple[PreTrainedModel, object]:
    """(model in eval mode, tokenizer) of a training run, one of its checkpoints, a saved model, an official checkpoint, or a name.

    An unfinished run gives its last complete checkpoint. ``fp8`` quantises the FlashMHF networks, ``projections`` their W_in and W_out,
    too; a stored FP8 model needs neither. Raises FileNotFoundError where a directory holds no model, ValueError for a device that this
    machine has not, for a tokenizer with more tokens than the model, and where ``fp8`` has nothing to quantise.
    """
    location = locate(name)
    chosen = _device(device)
    if dtype not in ("auto", *_DTYPES):
        raise ValueError(f"dtype is {dtype!r}; supported: auto, {', '.join(_DTYPES)}")
    wanted = (torch.bfloat16 if chosen.type == "cuda" else torch.float32) if dtype == "auto" else _DTYPES[dtype]
    model = loading.load(location, wanted)
    tokenizer = load_tokenizer(tokenizer_name or location)
    largest, rows = max(tokenizer.get_vocab().values()), model.get_input_embeddings().weight.shape[0]
    if largest >= rows:
        raise ValueError(
            f"the tokenizer {tokenizer_name or location!r} has token numbers up to {largest:,}; the vocabulary of {name!r} has {rows:,}"
        )
    model = model.to(chosen).eval()
    if fp8:
        quantise(model, projections=projections)
    return model, tokenizer


def save_fp8(
    name: str,
    output: Path,
    *,
    tokenizer_name: str | None = None,
    device: str = "auto",
    dtype: str = "bfloat16",
    projections: bool = True,
) -> None:
    """Writes the model and the tokenizer that :func:`load` finds, the FlashMHF networks in FP8, to a directory that from_pretrained loads.

    ``dtype`` is that of what is not quantised; auto: of the stored weights, float32 for an official checkpoint. Raises what
    :func:`load` raises.
    """
    # float32, so that packed weights are rounded once.
    model, tokenizer = load(name, tokenizer_name=tokenizer_name, device=device, dtype="float32", fp8=True, projections=projections)
    stored = None if loading.is_official(locate(name)) else AutoConfig.from_pretrained(locate(name)).dtype
    model.to((stored or torch.float32) if dtype == "auto" else _DTYPES[dtype]).save_pretrained(output)
    tokenizer.save_pretrained(output)


def locate(name: str) -> str:
    """The directory that holds the model of :func:`load`'s ``name``, or the name. Raises FileNotFoundError where there is none."""
    path = Path(name)
    if path.is_dir() and not (path / "config.json").exists():
        complete = checkpoints.complete_checkpoints(path)
        if not complete:
            raise FileNotFoundError(f"{path} holds no model: neither config.json nor a complete checkpoint")
        return str(complete[-1])
    if not path.exists() and (path.is_absolute() or name.startswith(".")):
        raise FileNotFoundError(f"{path} does not exist")
    return name


def positions(model: PreTrainedModel) -> int | None:
    """The longest sequence of the model, None where its configuration does not say."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def _device(name: str) -> torch.device:
    """Raises ValueError for a name that is no device of this machine."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device is {name!r}; supported: auto, cpu, cuda, cuda:N") from error
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {name!r}; supported: auto, cpu, cuda, cuda:N")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device is {name!r}; this PyTorch sees {torch.cuda.device_count() or 'no'} CUDA GPUs")
    return chosen


@dataclass
class HeldOut:
    """Sums over all scored tokens of some text."""

    nats: float = 0.0
    tokens: int = 0
    bytes: int = 0
    report: Report = field(default_factory=Report)

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 709 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Comparable across tokenizers."""
        return self.nats / (self.bytes * math.log(2))


def held_out_loss(
    model: PreTrainedModel,
    tokenizer,
    paths: Iterable[str | Path],
    *,
    window: int | None = None,
    stride: int | None = None,
    batch: int = 4,
    text_field: str = "text",
    bar: bool = False,
) -> HeldOut:
    """Loss over files' documents, each after an end-of-text token, every token scored once.

    Windows of ``window`` tokens (the model's maximum) advance by ``stride`` (half a window): a token sees at least window - stride
    tokens before it, unless the document begins later. Raises ValueError for sizes, DataError where there is no text.
    """
    limit = positions(model)
    window = limit if window is None else window
    if window is None:
        raise OptionError("give {window}: the model's configuration has no maximum")
    stride = max(1, window // 2) if stride is None else stride
    if window < 2 or (limit is not None and window > limit):
        most = "" if limit is None else f" and at most the model's {limit} positions"
        raise OptionError("{window} is {value}; it must be at least 2{most}", value=window, most=most)
    if not 1 <= stride < window:
        raise OptionError("{stride} is {value}; it must be at least 1 and below the {window} of {size}", value=stride, size=window)
    if batch < 1:
        raise OptionError("{batch} is {value}; it must be at least 1", value=batch)
    result = HeldOut()
    pieces = read_documents(find_files(paths, result.report), result.report, text_field)
    with tqdm(desc="evaluating", unit="token", unit_scale=True, disable=not bar) as progress:
        for ids, size in _documents(pieces, tokenizer):
            result.bytes += size
            for nats, count in window_losses(model, np.concatenate(([tokenizer.eos_token_id], ids)), window, stride, batch):
                result.nats += nats
                result.tokens += count
                progress.update(count)
    if not result.tokens:
        raise DataError("no text is left to evaluate on: " + "; ".join(result.report.lines()))
    return result


def _documents(pieces: Iterable[Piece], tokenizer) -> Iterator[tuple[np.ndarray, int]]:
    """Token ids and UTF-8 size of one document after the other."""
    parts, size = [], 0
    for piece in pieces:
        parts.append(np.asarray(tokenizer(piece.text, add_special_tokens=False, verbose=False)["input_ids"], np.int64))
        size += len(piece.text.encode())
        if piece.last:
            yield np.concatenate(parts), size
            parts, size = [], 0


@torch.no_grad()
def window_losses(model: PreTrainedModel, ids: np.ndarray, window: int, stride: int, batch: int) -> Iterator[tuple[float, int]]:
    """(sum of nats, number of tokens) of batches of windows over one sequence; all tokens but the first are scored, once."""
    spans = _spans(len(ids), window, stride)
    while spans:
        scored, length = spans[0][2], spans[0][1] - spans[0][0]
        group = [span for span in spans[:batch] if (span[1] - span[0], span[2]) == (length, scored)]
        spans = spans[len(group) :]
        inputs = torch.from_numpy(np.stack([ids[start:end] for start, end, _ in group])).to(model.device)
        logits = model(inputs, use_cache=False, logits_to_keep=scored + 1).logits[:, :-1].float()
        nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs[:, -scored:].flatten(), reduction="sum")
        yield nats.item(), scored * len(group)


def _spans(tokens: int, window: int, stride: int) -> list[tuple[int, int, int]]:
    """(start, end, tokens scored at the end) of the windows over a sequence."""
    end = min(window, tokens)
    spans = [(0, end, end - 1)] if end > 1 else []
    while end < tokens:
        new = min(stride, tokens - end)
        end += new
        spans.append((end - window, end, new))
    return spans


def task_scores(
    model: PreTrainedModel,
    tokenizer,
    tasks: Iterable[str] = PAPER_TASKS,
    *,
    include_path: str | None = None,
    limit: int | None = None,
    batch: int = 16,
    shots: int | None = None,
) -> dict[str, dict[str, float]]:
    """Metrics of tasks by lm-eval's names, and of local ones in its format below ``include_path``.

    Raises ImportError without the extra flashmhf[eval], ValueError for unknown tasks.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    tasks = list(tasks)
    manager = TaskManager(include_path=include_path)
    unknown = [task for task in tasks if task not in manager.all_tasks]
    if unknown:
        raise OptionError("lm-eval has no tasks {unknown}; local ones are found through {include_path}", unknown=unknown)
    wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch, max_length=positions(model), add_bos_token=False)
    found = simple_evaluate(model=wrapped, tasks=tasks, task_manager=manager, limit=limit, num_fewshot=shots, bootstrap_iters=0)
    return {
        task: {
            name.removesuffix(",none"): value
            for name, value in scores.items()
            if isinstance(value, int | float) and "stderr" not in name and name not in ("sample_len", "name")
        }
        for task, scores in found["results"].items()
    }
