"""Whole models: training, prefill, generation, on one GPU."""

from __future__ import annotations

import functools

from flashmhf.models.presets import preset

from ..harness.markdown import table
from ..records import SCALES, Records, by, by_scale, fixed, gpu, machine, ratio, software
from .layers import FASTER

FFNS = ("flashmhf", "swiglu")
BOTH = set(FFNS)
GENERATION = "generate", "generate_7b"
SERVED_7B = {
    "bf16": "vllm_7b", "FP8": "vllm_7b_fp8", "bf16, 2 GPUs": "vllm_7b_tp2", "FP8, 2 GPUs": "vllm_7b_fp8_tp2",
}  # fmt: skip


def training_cells(record: dict) -> dict[tuple[str, bool], dict[tuple, dict[str, dict]]]:
    """(blocks, checkpointed) -> (scale, batch, length) -> network -> row, of whole models in training."""
    cells: dict[tuple[str, bool], dict[tuple, dict[str, dict]]] = {}
    for key, rows in by(record["rows"], "blocks", "checkpointing", "scale", "batch", "length").items():
        cells.setdefault(key[:2], {})[key[2:]] = rows
    return cells


def training(records: Records) -> str:
    """A line per setting of compiled models, both in it; a model that did not run has no figures."""
    record, lines = records["train"], []
    compiled = [row for row in record["rows"] if row["blocks"] == "compiled" and row["checkpointing"] in (False, True)]
    for (scale, checkpointing, batch, length), rows in by_scale(compiled, "checkpointing", "batch", "length"):
        pair = [rows.get(name, {}) for name in ("flashmhf", "swiglu")]
        speeds = [row.get("tokens_per_s") for row in pair]
        gib = [f"{row['memory_mib'] / 1024:.1f}" if row else "" for row in pair]
        setting = f"{scale.upper()}, {batch} x {length:,}" + ", checkpointed" * checkpointing
        figures = [*(fixed(rate, 0) for rate in speeds), fixed(ratio(*speeds), 2), *gib, fixed(pair[0].get("mfu"), 2)]
        lines.append([setting, *figures])
    header = ["model, batch", "FlashMHF, tokens/s", "SwiGLU, tokens/s", FASTER]
    header += ["FlashMHF, GiB", "SwiGLU, GiB", "FlashMHF's MFU"]
    what = machine("Compiled blocks, AdamW under bf16 autocast; memory is the peak", record)
    return f"{table(header, lines, words=(0,))}\n\n{what}"


WAYS = {False: "", "q": ", Q recomputed", "networks": ", networks checkpointed", True: ", blocks checkpointed"}


def contexts(records: Records) -> str:
    """A line per length and depth of FlashMHF: the fastest way of both networks that fits."""
    found, lines = records.parts("contexts"), []
    fastest: dict[tuple, dict[str, dict]] = {}
    for device, row in ((gpu(record), row) for record in found for row in record["rows"] if row["status"] == "ok"):
        size = fastest.setdefault((SCALES.index(row["scale"]), row["length"], row["batch"], device), {})
        if row["tokens_per_s"] > size.get(row["subject"], {}).get("tokens_per_s", 0):
            size[row["subject"]] = row
    for (scale, length, batch, device), networks in sorted(fastest.items(), key=lambda item: item[0]):
        for subject in sorted(networks.keys() - {"swiglu"}) if "swiglu" in networks else ():
            pair = [networks[name] for name in (subject, "swiglu")]
            depth = preset(f"flashmhf-{SCALES[scale]}").layers if subject == "flashmhf" else subject.split()[1]
            names = f"{depth} layers{WAYS[pair[0]['checkpointing']]}", f"SwiGLU{WAYS[pair[1]['checkpointing']]}"
            figures = [(fixed(row["tokens_per_s"], 0), fixed(row["memory_mib"] / 1024, 1)) for row in pair]
            cells = [names[0], *figures[0], names[1], *figures[1]]
            speed = fixed(ratio(*(row["tokens_per_s"] for row in pair)), 2)
            lines.append([f"{SCALES[scale].upper()}, {batch} x {length:,}, {device}", *cells, speed])
    header = ["model, batch, GPU", "FlashMHF", "tokens/s", "GiB", "SwiGLU", "tokens/s", "GiB", FASTER]
    what = "The fastest way that fits into an H100's 80 GB, compiled blocks, AdamW, a loss that never holds all logits"
    return f"{table(header, lines, words=(0, 1, 4))}\n\n{software(what, found)}"


def training_depth(records: Records) -> str:
    """A line per depth of the 1.3B model in training, against SwiGLU's 24 layers."""
    record, lines = records["train_depth"], []
    found = {(row["subject"], row["checkpointing"]): row for row in record["rows"]}
    titles = {("SwiGLU, 24", False): "swiglu", ("the same, its networks checkpointed", "networks"): "swiglu"}
    titles |= {("FlashMHF, 20", False): "flashmhf"}
    titles |= {(f"FlashMHF, {each}", False): f"flashmhf {each} layers" for each in (21, 22)}
    for (title, way), subject in titles.items():
        row = found[subject, way]
        speed = ratio(row["tokens_per_s"], found["swiglu", False]["tokens_per_s"])
        lines.append([title, fixed(row["tokens_per_s"], 0), fixed(speed, 2), fixed(row["memory_mib"] / 1024, 1)])
    header = ["layers", "tokens/s", FASTER, "GiB"]
    what = "1.3B, batches of 4 x 4,096 tokens, compiled blocks, AdamW under bf16 autocast"
    return f"{table(header, lines, words=(0,))}\n\n{machine(what, record)}"


def prefill(records: Records, name: str = "model") -> str:
    """Whole models over prompts, every block compiled; in FP8 where both networks were."""
    record, lines = records[name], []
    for (scale, batch, length), rows in by(record["rows"], "scale", "batch", "length").items():
        for way in (way for way in ("", " fp8") if f"flashmhf{way} compiled" in rows):
            ours, theirs = (rows.get(f"{each}{way} compiled", {}).get("ms", {}).get("p50") for each in FFNS)
            cells = [fixed(ours, 1), fixed(theirs, 1), fixed(ratio(theirs, ours), 2)]
            lines.append([scale.upper() + way.upper(), f"{batch} x {length:,}", *cells])
    header = ["model", "prompts", "FlashMHF, ms", "SwiGLU, ms", FASTER]
    what = "Compiled blocks, random weights, bf16, to the last token of each prompt"
    return f"{table(header, lines)}\n\n{machine(what, record)}"


prefill_7b = functools.partial(prefill, name="model_7b")


def generation_rates(record: dict) -> list[tuple[tuple, dict[str, dict[str, float]]]]:
    """(scale, batch, context) -> network -> cache -> tokens per second, where both networks have one."""
    found: dict[tuple, dict[str, dict[str, float]]] = {}
    for (*key, cache), rows in by_scale(record["rows"], "batch", "context", "cache"):
        for name in BOTH & rows.keys():
            found.setdefault(tuple(key), {}).setdefault(name, {})[cache] = rows[name]["tokens_per_s"]
    return [(key, networks) for key, networks in found.items() if networks.keys() == BOTH]


def generation_ratio(networks: dict[str, dict[str, float]]) -> float:
    """FlashMHF's faster cache over SwiGLU's."""
    return max(networks["flashmhf"].values()) / max(networks["swiglu"].values())


def generation(records: Records) -> str:
    """A line per size and batch with a static cache; where the GPU's part was measured, its ratio too."""
    found, lines = [records[name] for name in GENERATION], []
    for record in found:
        static = [row for row in record["rows"] if row.get("cache") == "static"]
        for (scale, batch), rows in by_scale(static, "batch"):
            ours, theirs = (rows[ffn] for ffn in FFNS)
            rates = [row["tokens_per_s"] for row in (ours, theirs)]
            on_gpu = fixed(ratio(theirs.get("gpu_ms"), ours.get("gpu_ms")), 2)
            figures = [*(fixed(rate, 0) for rate in rates), fixed(ratio(*rates), 2), on_gpu]
            lines.append([scale.upper(), str(batch), *figures])
    header = ["model", "sequences", "FlashMHF, tokens/s", "SwiGLU, tokens/s", FASTER, "on the GPU alone"]
    what = "Prompts of 512 tokens, included in the time; random weights, bf16, a static cache"
    return f"{table(header, lines)}\n\n{machine(what, found[0])}"


def vllm(records: Records) -> str:
    """Tokens per second of vLLM's engine."""
    record = records["vllm"]
    rates = {
        each["model"]: {(row["part"], row["prompt"], row["batch"]): row["tokens_s"] for row in each["rows"]}
        for each in record["models"]
    }
    llama, lines = rates["llama-24"], []
    for key, rate in llama.items():
        ours = [rates[f"flashmhf-{layers}"][key] for layers in (20, 21)]
        cells = [fixed(rate, 0), *(cell for each in ours for cell in (fixed(each, 0), f"{each / rate:.2f}"))]
        lines.append([key[0], f"{key[1]:,}", str(key[2]), *cells])
    header = ["Llama, 24 layers", "FlashMHF, 20", "speed ÷ Llama's", "FlashMHF, 21", "speed ÷ Llama's"]
    what = (
        f"Tokens per second of vLLM {record['environment']['packages']['vllm']}, 1.3B models of equal parameters with "
        "random weights, bf16, CUDA graphs"
    )
    first = f"{table(['part', 'prompt', 'batch', *header], lines, words=(0,))}\n\n{machine(what, record)}"
    return f"{first}\n\n{vllm_7b(records)}"


def vllm_7b(records: Records) -> str:
    """The same of 7B models: FlashMHF's rates by precision and number of GPUs, and over the Llama's."""
    lines: dict[tuple[str, int, int], list[str]] = {}
    for column, name in enumerate(SERVED_7B.values()):
        ours, theirs = (
            {(row["part"], row["batch"], row["prompt"]): row["tokens_s"] for row in model["rows"]}
            for model in sorted(records[name]["models"], key=lambda model: model["model"])
        )
        for key, rate in ours.items():
            line = lines.setdefault(key, ["–"] * 2 * len(SERVED_7B))
            line[2 * column : 2 * column + 2] = fixed(rate, 0), fixed(rate / theirs[key], 2)
    header = ["part", "prompt", "batch", *(cell for title in SERVED_7B for cell in (title, "÷ Llama's"))]
    what = "Tokens per second of FlashMHF at 7B, 27 layers, and ÷ those of the Llama, 32 layers, in the same precision"
    cells = [[part, f"{prompt:,}", str(batch), *line] for (part, batch, prompt), line in lines.items()]
    return f"{table(header, cells, words=(0,))}\n\n{machine(what, records['vllm_7b'])}"
