"""Tables of the suites layer and decode: the paper's beside ours, the ratios between subjects, and README's."""

from __future__ import annotations

from ..harness.markdown import conditions, table
from .shapes import BATCH, PAPER_MB, PAPER_MS, SHAPES
from .subjects import SUBJECTS


def stack_ms(row: dict) -> float:
    """The median time of a layer times the model's number of layers."""
    return row["layers"] * row["ms"]["p50"]


class Rows:
    """The record's rows by group, subject, shape, tokens a sequence (decode: tokens) and direction."""

    def __init__(self, record: dict):
        self.all = record["rows"]
        self.ours = next((row["subject"] for row in self.all if row["subject"].startswith("flashmhf_")), None)

    def find(self, group: str, subject: str, length: int | None = None, shape: str = "paper", direction: str | None = None) -> dict | None:
        for row in self.all:
            size = row["batch"] if row["group"] == "decode" else row["length"]
            if (row["group"], row["subject"], row["shape"]) == (group, subject, shape) and length in (None, size):
                if direction in (None, row["direction"]):
                    return row
        return None

    def value(self, what: str, *key, **kwargs) -> float | None:
        """stack_ms, gb_per_s, or memory beyond or total (MiB) of a row that has a number, else None."""
        row = self.find(*key, **kwargs)
        if row is None or row["status"] != "ok":
            return None
        if what in ("beyond", "total"):
            return row.get("memory_mib", {}).get(what)
        return stack_ms(row) if what == "stack_ms" else row[what]

    def sizes(self, group: str) -> list[int]:
        return sorted({row["batch"] if group == "decode" else row["length"] for row in self.all if row["group"] == group})


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    return None if numerator is None or denominator is None else numerator / denominator


def _cell(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _paper_ratio(length: int) -> float | None:
    return ratio(PAPER_MS["SwiGLU"].get(length), PAPER_MS["FlashMHF"].get(length))


def latency_table(record: dict) -> str:
    """Forward latency of the whole stack in ms by length, the paper's H100 figures beside ours."""
    rows, lines = Rows(record), []
    for length in rows.sizes("latency"):
        ours, eager, compiled, naive = (
            rows.value("stack_ms", "latency", subject, length) for subject in (rows.ours, "swiglu", "swiglu_compiled", "mhffn_naive")
        )
        paper = [_cell(PAPER_MS[name].get(length)) for name in ("FlashMHF", "SwiGLU", "MH-FFN")]
        values = [str(length), _cell(ours), paper[0], _cell(eager), paper[1], _cell(compiled), _cell(naive), paper[2]]
        values += [_cell(ratio(eager, ours)), _cell(_paper_ratio(length)), _cell(ratio(compiled, ours)), _cell(ratio(naive, ours), 1)]
        lines.append(values)
    header = ["L", "FlashMHF", "paper", "SwiGLU", "paper", "compiled", "MH-FFN", "paper"]
    return table([*header, "SwiGLU ÷ ours", "paper", "compiled ÷ ours", "MH-FFN ÷ ours"], lines)


def memory_table(record: dict) -> str:
    """Peak memory of one layer's forward in MiB: total (weights and input included) beside the paper's MB, and beyond them."""
    rows, lines = Rows(record), []
    for length in rows.sizes("latency"):
        values, subjects = [str(length)], ((rows.ours, "FlashMHF"), ("swiglu", "SwiGLU"), ("mhffn_naive", "MH-FFN"))
        for subject, name in subjects:
            values += [_cell(rows.value("total", "latency", subject, length), 0), _cell(PAPER_MB[name].get(length), 0)]
        beyond = [rows.value("beyond", "latency", subject, length) for subject, _ in subjects[:2]]
        lines.append([*values, *(_cell(value, 0) for value in beyond), _cell(ratio(beyond[1], beyond[0]))])
    header = ["L", "FlashMHF", "paper", "SwiGLU", "paper", "MH-FFN", "paper"]
    return table([*header, "FlashMHF beyond", "SwiGLU beyond", "SwiGLU ÷ ours"], lines)


def training_table(record: dict, group: str = "training") -> str:
    """Forward and backward: stack in ms and one layer's peak memory beyond weights and input, against FlashMHF."""
    rows, lines = Rows(record), []
    for row in rows.all:
        if row["group"] != group or row["direction"] != "training":
            continue
        key = {"shape": row["shape"], "direction": "training"}
        ours, memory = (rows.value(what, group, rows.ours, row["length"], **key) for what in ("stack_ms", "beyond"))
        if row["status"] != "ok":
            lines.append([row["shape"], SUBJECTS[row["subject"]].title, *["–"] * 4, f"{row['status']}: {row['reason']}"])
            continue
        beyond = row.get("memory_mib", {}).get("beyond")
        numbers = [_cell(stack_ms(row)), _cell(ratio(ours, stack_ms(row))), _cell(beyond, 0), _cell(ratio(beyond, memory))]
        lines.append([row["shape"], SUBJECTS[row["subject"]].title, *numbers, ""])
    return table(["shape", "subject", "ms", "FlashMHF ÷ it", "MiB beyond", "it ÷ FlashMHF", "note"], lines)


def decode_table(record: dict) -> str:
    """For few tokens in a CUDA graph: µs a layer, the ratio of the stacks, and the bandwidth of reading the weights."""
    rows, lines = Rows(record), []
    copy = record["before"].get("copy_gb_per_s")
    for tokens in rows.sizes("decode"):
        found = [rows.find("decode", subject, tokens) for subject in (rows.ours, "swiglu", "swiglu_compiled")]
        micro = [None if row is None or row["status"] != "ok" else 1e3 * row["ms"]["p50"] for row in found]
        stacks = [rows.value("stack_ms", "decode", subject, tokens) for subject in (rows.ours, "swiglu", "swiglu_compiled")]
        bandwidth = rows.value("gb_per_s", "decode", rows.ours, tokens)
        share = None if copy is None or bandwidth is None else 100 * bandwidth / copy
        ratios = [_cell(ratio(stacks[1], stacks[0])), _cell(ratio(stacks[2], stacks[0]))]
        lines.append([str(tokens), *(_cell(value, 1) for value in micro), *ratios, _cell(share, 0)])
    header = ["T", "FlashMHF µs", "SwiGLU µs", "compiled µs", "SwiGLU ÷ ours", "compiled ÷ ours", "% of copy bandwidth"]
    return table(header, lines)


def everyone_table(record: dict) -> str:
    """Every forward row of the lengths at which every subject is measured, the missing ones with their reason."""
    rows = Rows(record)
    lengths = sorted({row["length"] for row in rows.all if row["group"] == "latency" and row["subject"] == "dense_moe"})
    lines = []
    for row in rows.all:
        if row["group"] != "latency" or row["length"] not in lengths:
            continue
        if row["status"] != "ok":
            lines.append([str(row["length"]), SUBJECTS[row["subject"]].title, "–", "–", "–", f"{row['status']}: {row['reason']}"])
            continue
        ours = rows.value("stack_ms", "latency", rows.ours, row["length"])
        numbers = [_cell(stack_ms(row)), _cell(row["tflops"], 0), _cell(ratio(stack_ms(row), ours))]
        lines.append([str(row["length"]), SUBJECTS[row["subject"]].title, *numbers, ""])
    return table(["L", "subject", "stack ms", "TFLOP/s", "÷ FlashMHF", "note"], lines)


def models_table(record: dict) -> str:
    """The paper's models: forward stacks; their training is in :func:`training_table`."""
    rows, lines = Rows(record), []
    for name in SHAPES:
        for length in rows.sizes("models"):
            stacks = [
                rows.value("stack_ms", "models", subject, length, shape=name, direction="forward")
                for subject in (rows.ours, "swiglu", "swiglu_compiled")
            ]
            if stacks[0] is not None:
                lines.append(
                    [name, str(length), *map(_cell, stacks), _cell(ratio(stacks[1], stacks[0])), _cell(ratio(stacks[2], stacks[0]))]
                )
    return table(["shape", "L", "FlashMHF ms", "SwiGLU ms", "compiled ms", "SwiGLU ÷ ours", "compiled ÷ ours"], lines)


def _extremes(pairs: list[float | None]) -> tuple[float | None, float | None]:
    known = [value for value in pairs if value is not None]
    return (min(known), max(known)) if known else (None, None)


def summary(record: dict) -> dict[str, float | None]:
    """Ratios between subjects over all lengths; None where a subject was not measured."""
    rows = Rows(record)

    def forward(subject: str, length: int) -> float | None:
        return ratio(rows.value("stack_ms", "latency", subject, length), rows.value("stack_ms", "latency", rows.ours, length))

    def training(what: str, subject: str) -> float | None:
        return ratio(rows.value(what, "training", subject), rows.value(what, "training", rows.ours))

    def inverse(value: float | None) -> float | None:
        return None if value is None else 1 / value

    lengths = rows.sizes("latency")
    decode = [
        ratio(rows.value("stack_ms", "decode", "swiglu", t), rows.value("stack_ms", "decode", rows.ours, t))
        for t in rows.sizes("decode")
        if t <= 64
    ]
    eager, compiled = (_extremes([forward(subject, length) for length in lengths]) for subject in ("swiglu", "swiglu_compiled"))
    longest = lengths[-1] if lengths else None
    memory = ratio(rows.value("beyond", "latency", "swiglu", longest), rows.value("beyond", "latency", rows.ours, longest))
    return {
        "SwiGLU ÷ FlashMHF, forward, worst length": eager[0],
        "SwiGLU ÷ FlashMHF, forward, best length": eager[1],
        "compiled SwiGLU ÷ FlashMHF, forward, worst length": compiled[0],
        "FlashMHF ÷ SwiGLU, forward and backward": inverse(training("stack_ms", "swiglu")),
        "FlashMHF ÷ checkpointed SwiGLU, forward and backward": inverse(training("stack_ms", "swiglu_checkpointed")),
        f"SwiGLU ÷ FlashMHF, inference memory beyond weights and input, L={longest}": memory,
        "SwiGLU ÷ FlashMHF, training memory beyond weights and input": training("beyond", "swiglu"),
        "naive MH-FFN ÷ FlashMHF, forward, L=4032": forward("mhffn_naive", 4032),
        "SwiGLU ÷ FlashMHF, decode, worst of T ≤ 64": _extremes(decode)[0],
    }


def summary_table(record: dict) -> str:
    return table(["what", "measured"], [[name, _cell(value)] for name, value in summary(record).items()])


def report(record: dict) -> str:
    """All tables of the record, as Markdown."""
    model = SHAPES["paper"]
    groups = {row["group"] for row in record["rows"]}
    parts = []
    if "latency" in groups:
        stacks = f"{model.layers} FlashMHF layers against {model.swiglu_layers} of SwiGLU"
        parts += [f"Forward, batch {BATCH}, ms: {stacks}", latency_table(record), "Peak memory of one layer, MiB", memory_table(record)]
        parts += ["All subjects, forward", everyone_table(record)]
    for group in ("training", "models"):
        if group in groups:
            parts += [f"Forward and backward ({group})", training_table(record, group)]
    if "models" in groups:
        parts += ["The paper's models, forward", models_table(record)]
    if "decode" in groups:
        parts += ["Decode, CUDA graph", decode_table(record)]
    return "\n\n".join([*parts, "Summary", summary_table(record)])


def headline(record: dict) -> str:
    """README's table: the paper's in short, what it compares, the training ratios, and the conditions."""
    rows, lines = Rows(record), []
    for length in rows.sizes("latency"):
        ours, eager, compiled = (rows.value("stack_ms", "latency", s, length) for s in (rows.ours, "swiglu", "swiglu_compiled"))
        memory = [rows.value("beyond", "latency", s, length) for s in (rows.ours, "swiglu")]
        speed = [_cell(ours), _cell(eager), _cell(compiled), _cell(ratio(eager, ours)), _cell(_paper_ratio(length))]
        lines.append([str(length), *speed, *(_cell(value, 0) for value in memory), _cell(ratio(memory[1], memory[0]), 1)])
    header = ["L", "FlashMHF ms", "SwiGLU ms", "compiled ms", "SwiGLU ÷ FlashMHF", "in the paper (H100)"]
    header += ["FlashMHF MiB", "SwiGLU MiB", "memory ratio"]
    model = SHAPES["paper"]
    backend = SUBJECTS[rows.ours].title if rows.ours else "FlashMHF"
    note = (
        f"{backend}, bf16, batch {BATCH}: {model.layers} layers of FlashMHF (d_model {model.d_model}, H = {model.heads}, "
        f"E = {model.subnets}, d_e = {model.subnet_dim}, projections and gate included) against {model.swiglu_layers} layers of SwiGLU "
        f"({model.swiglu_dim} wide), forward; peak memory of one layer beyond weights and input."
    )
    ratios = summary(record)
    time = ratios["FlashMHF ÷ SwiGLU, forward and backward"]
    if time is not None:
        checkpointed = ratios["FlashMHF ÷ checkpointed SwiGLU, forward and backward"]
        memory = ratios["SwiGLU ÷ FlashMHF, training memory beyond weights and input"]
        note += f" Forward and backward at L = {rows.sizes('training')[0]} take {_cell(time)} times as long as SwiGLU"
        note += f" ({_cell(checkpointed)} times as long as checkpointed SwiGLU) and 1/{_cell(memory, 1)} of its memory."
    return "\n\n".join([table(header, lines), f"{note} {conditions(record)}."])
