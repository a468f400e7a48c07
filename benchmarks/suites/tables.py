"""Tables of the suites layer and decode: the paper's beside ours, the ratios between subjects, and README's."""

from __future__ import annotations

from ..harness.markdown import table
from .shapes import BATCH, PAPER_MS, SHAPES
from .subjects import SUBJECTS


def stack_ms(row: dict) -> float:
    """The median time of a layer times the model's number of layers."""
    return row["layers"] * row["ms"]["p50"]


class Rows:
    """The record's rows by group, subject, shape, tokens a sequence (decode: tokens) and direction."""

    def __init__(self, record: dict):
        self.all = record["rows"]
        self.ours = next((row["subject"] for row in self.all if row["subject"].startswith("flashmhf_")), None)

    def find(
        self, group: str, subject: str, length: int | None = None, shape: str = "paper", direction: str | None = None
    ) -> dict | None:
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
        return sorted(
            {row["batch"] if group == "decode" else row["length"] for row in self.all if row["group"] == group}
        )


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
            rows.value("stack_ms", "latency", subject, length)
            for subject in (rows.ours, "swiglu", "swiglu_compiled", "mhffn_naive")
        )
        times = [_cell(value) for value in (ours, compiled, eager, naive)]
        ratios = [_cell(ratio(other, ours)) for other in (compiled, eager, naive)]
        lines.append([str(length), *times, *ratios, _cell(_paper_ratio(length))])
    header = ["L", "FlashMHF", "SwiGLU, compiled", "SwiGLU, eager", "MH-FFN, naive"]
    return table(
        [*header, "compiled ÷ FlashMHF", "eager ÷ FlashMHF", "naive ÷ FlashMHF", "eager ÷ FlashMHF in the paper"], lines
    )


def memory_table(record: dict) -> str:
    """Peak memory of one layer's forward in MiB, beyond weights and input."""
    rows, lines = Rows(record), []
    for length in rows.sizes("latency"):
        ours, *others = (
            rows.value("beyond", "latency", name, length)
            for name in (rows.ours, "swiglu_compiled", "swiglu", "mhffn_naive")
        )
        ratios = [_cell(ratio(other, ours), 1) for other in others[:2]]
        lines.append([str(length), *(_cell(value, 0) for value in (ours, *others)), *ratios])
    header = [
        "L",
        "FlashMHF",
        "SwiGLU, compiled",
        "SwiGLU, eager",
        "MH-FFN, naive",
        "compiled ÷ FlashMHF",
        "eager ÷ FlashMHF",
    ]
    return table(header, lines)


def training_table(record: dict, group: str = "training") -> str:
    """Forward and backward: stack in ms and one layer's peak memory beyond weights and input, against FlashMHF."""
    rows, lines = Rows(record), []
    for row in rows.all:
        if row["group"] != group or row["direction"] != "training" or row["status"] == "missing":
            continue
        key = {"shape": row["shape"], "direction": "training"}
        ours, memory = (rows.value(what, group, rows.ours, row["length"], **key) for what in ("stack_ms", "beyond"))
        if row["status"] != "ok":
            lines.append(
                [row["shape"], SUBJECTS[row["subject"]].title, *["–"] * 4, f"{row['status']}: {row['reason']}"]
            )
            continue
        beyond = row.get("memory_mib", {}).get("beyond")
        numbers = [
            _cell(stack_ms(row)),
            _cell(ratio(ours, stack_ms(row))),
            _cell(beyond, 0),
            _cell(ratio(beyond, memory)),
        ]
        lines.append([row["shape"], SUBJECTS[row["subject"]].title, *numbers, ""])
    return table(["shape", "subject", "ms", "FlashMHF ÷ it", "MiB beyond", "it ÷ FlashMHF", "note"], lines)


def decode_table(record: dict) -> str:
    """For few tokens in a CUDA graph: µs a layer, the ratio of the stacks, and the bandwidth of reading the weights."""
    rows, lines = Rows(record), []
    copy = record["before"].get("copy_gb_per_s")
    for tokens in rows.sizes("decode"):
        found = [rows.find("decode", subject, tokens) for subject in (rows.ours, "swiglu", "swiglu_compiled")]
        micro = [None if row is None or row["status"] != "ok" else 1e3 * row["ms"]["p50"] for row in found]
        stacks = [
            rows.value("stack_ms", "decode", subject, tokens) for subject in (rows.ours, "swiglu", "swiglu_compiled")
        ]
        bandwidth = rows.value("gb_per_s", "decode", rows.ours, tokens)
        share = None if copy is None or bandwidth is None else 100 * bandwidth / copy
        ratios = [_cell(ratio(stacks[1], stacks[0])), _cell(ratio(stacks[2], stacks[0]))]
        lines.append([str(tokens), *(_cell(value, 1) for value in micro), *ratios, _cell(share, 0)])
    header = ["T", "FlashMHF µs", "SwiGLU µs", "compiled µs", "SwiGLU ÷ ours", "compiled ÷ ours", "% of copy bandwidth"]
    return table(header, lines)


def everyone_table(record: dict) -> str:
    """Every forward row of the lengths at which every subject is measured;

    subjects that are not installed are left out.
    """
    rows = Rows(record)
    lengths = sorted({row["length"] for row in rows.all if row["group"] == "latency" and row["subject"] == "dense_moe"})
    lines = []
    for row in rows.all:
        if row["group"] != "latency" or row["length"] not in lengths or row["status"] == "missing":
            continue
        if row["status"] != "ok":
            lines.append(
                [str(row["length"]), SUBJECTS[row["subject"]].title, "–", "–", "–", f"{row['status']}: {row['reason']}"]
            )
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
                    [
                        name,
                        str(length),
                        *map(_cell, stacks),
                        _cell(ratio(stacks[1], stacks[0])),
                        _cell(ratio(stacks[2], stacks[0])),
                    ]
                )
    return table(["shape", "L", "FlashMHF ms", "SwiGLU ms", "compiled ms", "SwiGLU ÷ ours", "compiled ÷ ours"], lines)


def _extremes(pairs: list[float | None]) -> tuple[float | None, float | None]:
    known = [value for value in pairs if value is not None]
    return (min(known), max(known)) if known else (None, None)


def summary(record: dict) -> dict[str, float | None]:
    """Ratios between subjects over all lengths; None where a subject was not measured."""
    rows = Rows(record)

    def forward(subject: str, length: int) -> float | None:
        return ratio(
            rows.value("stack_ms", "latency", subject, length), rows.value("stack_ms", "latency", rows.ours, length)
        )

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
    eager, compiled = (
        _extremes([forward(subject, length) for length in lengths]) for subject in ("swiglu", "swiglu_compiled")
    )
    longest = lengths[-1] if lengths else None
    memory = ratio(
        rows.value("beyond", "latency", "swiglu", longest), rows.value("beyond", "latency", rows.ours, longest)
    )
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
    stacks = f"{model.layers} FlashMHF layers against {model.swiglu_layers} of SwiGLU"
    parts = []
    if "latency" in groups:
        parts += [f"## Forward\n\nMilliseconds for {stacks}, batch {BATCH}, sequence length L.", latency_table(record)]
        parts += ["### Memory\n\nOne layer's peak beyond weights and input, MiB.", memory_table(record)]
        parts += ["### Every implementation", everyone_table(record)]
    for group, title in (("training", "Training"), ("models", "Training of the paper's models")):
        if group in groups:
            parts += [
                f"## {title}\n\nForward and backward, {stacks}; memory of one layer.",
                training_table(record, group),
            ]
    if "models" in groups:
        parts += ["## The paper's models, forward", models_table(record)]
    if "decode" in groups:
        parts += [
            f"## Decode\n\nMicroseconds per layer from CUDA graphs for T tokens; ratios of {stacks}.",
            decode_table(record),
        ]
    return "\n\n".join(parts)


def headline(record: dict) -> str:
    """README's table: time and memory against compiled and eager SwiGLU, with a caption that says what is compared."""
    rows, lines, model = Rows(record), [], SHAPES["paper"]
    subjects = (rows.ours, "swiglu_compiled", "swiglu")
    for length in rows.sizes("latency"):
        ours, *others = (rows.value("stack_ms", "latency", name, length) for name in subjects)
        beyond, *memory = (rows.value("beyond", "latency", name, length) for name in subjects)
        speed = [_cell(ours), *map(_cell, others), *(_cell(ratio(other, ours)) for other in others)]
        lines.append(
            [f"{BATCH * length:,}", *speed, _cell(beyond, 0), *(_cell(ratio(other, beyond), 1) for other in memory)]
        )
    header = ["tokens", "flashmhf, ms", "SwiGLU compiled, ms", "SwiGLU eager, ms", "faster than compiled", "than eager"]
    header += ["flashmhf, MiB", "less than compiled", "than eager"]
    sizes = f"d_model {model.d_model:,}, {model.heads} heads, {model.subnets} sub-networks of {model.subnet_dim}"
    note = (
        f"*Inference on one {_gpu(record)}, bf16, equal parameters: {model.layers} FlashMHF layers ({sizes}) against "
        f"{model.swiglu_layers} SwiGLU layers ({model.swiglu_dim:,} wide). MiB: one layer's peak beyond weights and input.*"
    )
    trained = {name: rows.value("stack_ms", "training", name) for name in (*subjects, "swiglu_checkpointed")}
    if None not in trained.values():
        compiled, eager, checkpointed = (
            _cell(ratio(trained[rows.ours], trained[name])) for name in (*subjects[1:], "swiglu_checkpointed")
        )
        ours, *others = (rows.value("beyond", "training", name) for name in subjects)
        less = [_cell(ratio(other, ours), 1) for other in others]
        tokens = f"{BATCH * rows.sizes('training')[0]:,} tokens"
        note += (
            f"\n\nTraining, forward and backward of {tokens}: {compiled} times the time of compiled SwiGLU, {eager} of eager and "
            f"{checkpointed} of checkpointed (eager) SwiGLU. For activations and gradients a layer needs {less[0]} times less memory than "
            f"compiled and {less[1]} times less than eager SwiGLU."
        )
    return f"{table(header, lines)}\n\n{note}"


def _gpu(record: dict) -> str:
    return record["environment"]["device"].removeprefix("NVIDIA ").split()[0]
