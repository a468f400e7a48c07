"""Several GPUs of one host: training, memory, one network."""

from __future__ import annotations

from ..harness.markdown import table
from ..records import SCALES, Records, by, fixed, gpu, software, span
from .layers import FASTER
from .models import BOTH, training_cells


def trained(record: dict) -> dict[str, dict[str, dict]]:
    """Layout -> network -> its row of training, in a record of `benchmarks.distributed`."""
    found = by([row for row in record["rows"] if row["part"] == "train"], "layout")
    return {layout: networks for (layout,), networks in found.items()}


def training(records: Records) -> str:
    """A line per layout, both networks in it."""
    found, lines = records.several_gpus("train"), []
    for ranks, record in found.items():
        for layout, networks in trained(record).items():
            if layout != "one" and networks.keys() >= BOTH:
                ours, theirs = networks["flashmhf"], networks["swiglu"]
                name = layout.replace("fsdp2", "FSDP2 over").replace("tp", "TP over").replace(" x ", " × ")
                speeds = [ours["x_one"], theirs["x_one"], ours["tokens_per_s"] / theirs["tokens_per_s"]]
                memory = [row["memory_mib"] / 1024 for row in (ours, theirs)]
                cells = [*(fixed(each, 2) for each in speeds), *(fixed(each, 1) for each in memory)]
                lines.append([f"{ranks} {gpu(record)}s, {name}", *cells])
    header = ["layout", "FlashMHF's scaling", "SwiGLU's", FASTER, "FlashMHF, GiB per GPU", "SwiGLU, GiB"]
    what = (
        "1.3B, compiled blocks, bf16, sequences of 4,096 tokens. Scaling: the speed ÷ that of as many single GPUs, "
        "which train at the same time, each its own copy"
    )
    return f"{table(header, lines, words=(0,))}\n\n{software(what, found.values())}"


def large(records: Records) -> str:
    """A line per network and depth, all under FSDP2 over four GPUs."""
    record = records["distributed_7b_x4"]
    rows, lines = {row["subject"]: row for row in record["rows"]}, []
    titles = {"swiglu": "SwiGLU, 32 layers", "swiglu:networks": "the same, its networks checkpointed"}
    titles |= {"flashmhf": "FlashMHF, 27 layers", "flashmhf 28 layers": "FlashMHF, 28 layers"}
    for subject, title in titles.items():
        row = rows[subject]
        faster = [
            fixed(row["tokens_per_s"] / rows[other]["tokens_per_s"], 2) for other in ("swiglu", "swiglu:networks")
        ]
        open_ms = fixed(row["open_communication_ms"], 0)
        lines.append([title, fixed(row["tokens_per_s"], 0), *faster, fixed(row["memory_mib"] / 1024, 1), open_ms])
    header = ["7B", "tokens/s", FASTER, "÷ checkpointed SwiGLU's", "GiB per GPU", "open communication, ms"]
    what = f"FSDP2 over four {gpu(record)}s, a sequence of 4,096 tokens each, compiled blocks, AdamW, bf16 autocast"
    return f"{table(header, lines, words=(0,))}\n\n{software(what, [record])}"


def memory(records: Records) -> str:
    """The largest model's memory per GPU with FSDP2 over all, measured or computed from that on one."""
    record = records["train"]
    sizes = training_cells(record)["compiled", False]
    scale, batch, length = max(sizes, key=lambda size: SCALES.index(size[0]))
    row = sizes[scale, batch, length]["flashmhf"]
    gib = {ranks: row["memory_mib"] / 1024 - 16 * row["parameters"] * (1 - 1 / ranks) / 2**30 for ranks in (1, 2, 4, 8)}
    places, more, cells = [f"one {gpu(record)}"], [], {1: f"{gib[1]:.0f} GiB"}
    for ranks, several in records.several_gpus("train").items():
        if sharded := trained(several).get(f"fsdp2 {ranks}", {}).get("flashmhf"):
            more.append(sharded["memory_mib"] / 1024 - gib[ranks])
            cells[ranks] = f"{sharded['memory_mib'] / 1024:.0f} GiB"
            places.append(f"{ranks} {gpu(several)}s")
    for ranks, each in gib.items():
        cells.setdefault(ranks, f"{span([each + over for over in more], 0)} GiB, estimated")
    note = (
        f"*FlashMHF-{scale.upper()} with AdamW, {batch} sequences of {length:,} tokens per GPU at once. Measured on "
        f"{', '.join(places)}; estimates are computed, with the {span(more, 0)} GiB added by which these exceeded it.*"
    )
    columns = [str(ranks) for ranks in sorted(cells)]
    return f"{table(['GPUs', *columns], [['memory per GPU', *(cells[int(n)] for n in columns)]])}\n\n{note}"


def module(records: Records) -> str:
    found, lines = records.several_gpus("module"), []
    for ranks, record in found.items():
        for row in record["rows"]:
            if row["status"] == "ok" and row["part"] in ("module", "compiled") and row["tp"] == ranks:
                what = row.get("direction") if row["part"] == "module" else f"forward, compiled, {row['subject']}"
                what = what.replace("sequence", "sequence parallel")
                lines.append([what, f"{ranks} {gpu(record)}s", f"{row['ms']['p50']:.2f}", f"{row['x_one']:.2f}"])
    what = "One FlashMHF network (d_model 2,048, 16 heads), 32,256 tokens, bf16"
    return f"{table(['what', 'GPUs', 'ms', 'times faster than one GPU'], lines)}\n\n{software(what, found.values())}"
