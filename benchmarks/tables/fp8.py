"""FP8: the operator, whole networks, generation."""

from __future__ import annotations

from ..harness.markdown import table
from ..records import Records, by, conditions, fixed, machine


def generation(records: Records) -> str:
    record, lines = records["generate_fp8"], []
    for row in (row for row in record["rows"] if row["status"] == "ok"):
        ratios = [fixed(row.get(name), 2) for name in ("x_swiglu fp8", "x_swiglu")]
        lines.append([str(row["batch"]), f"{row['context']:,}", row["subject"], fixed(row["tokens_per_s"], 0), *ratios])
    header = ["batch", "prompt", "model", "tokens/s", "÷ SwiGLU in FP8", "÷ SwiGLU in 16 bits"]
    return f"{table(header, lines)}\n\n{conditions('`generate`', record)}"


def kernels(records: Records) -> str:
    record = records["fp8"]
    parts = {part: [row for row in record["rows"] if row["part"] == part] for part in ("operator", "decode")}
    lines, sizes = [], by(parts["operator"], "d_h", "T").items()
    for (d_h, tokens), rows in sorted(sizes, key=lambda item: (item[0][0], -item[0][1])):
        row = rows["fp8"]
        ratios = [fixed(row.get(name), 2) for name in ("x_16 bits", "x_product", "x_swiglu fp8")]
        lines.append([str(d_h), f"{tokens:,}", f"{row['tflops']:.0f}", *ratios, f"{row['error']:.3f}"])
    header = ["d_h", "T", "TFLOP/s", "÷ our bf16 kernel", "÷ bf16 8192³ product", "÷ SwiGLU in FP8", "relative error"]
    copy, few = record["before"]["copy_gb_per_s"], []
    for (tokens,), rows in by(parts["decode"], "T").items():
        micro = [f"{1e3 * rows[name]['ms']['p50']:.1f}" for name in ("fp8", "16 bits")]
        few.append([str(tokens), *micro, f"{rows['fp8']['gb_per_s'] / copy:.2f}"])
    few_header = ["T, d_h = 128", "µs", "bf16 kernel µs", "share of a copy's bandwidth"]
    return f"{table(header, lines)}\n\n{table(few_header, few)}\n\n{conditions('Operator', record)}"


def networks(records: Records) -> str:
    """Whole FP8 networks against an FP8 SwiGLU (layers of equal parameters) and against the same network in 16 bits."""
    record, lines = records["fp8_networks"], {}
    for (count, way), rows in by(record["rows"], "T", "way").items():
        own = rows["flashmhf in 16 bits"]["ms"]["p50"] / rows["flashmhf"]["ms"]["p50"]
        lines.setdefault(count, {})[way] = f"{own:.2f}", f"{rows['flashmhf']['x_swiglu']:.2f}"
    others, how = ("÷ bf16 FlashMHF's", "÷ FP8 SwiGLU's"), {"graph": "CUDA graph", "called": "no graph"}
    header = ["tokens", *(f"{other}, {name}" for other in others for name in how.values())]
    cells = [[f"{count:,}", *(ways[way][i] for i in (0, 1) for way in how)] for count, ways in lines.items()]
    what = (
        "The speed of whole FP8 networks, d_model 2,048. SwiGLU: 24 layers against 20, two compiled row-wise "
        "`torch._scaled_mm`"
    )
    return f"{table(header, cells)}\n\n{machine(what, record)}"
