"""What bounds each kernel, counted from csrc/*/policy.h, and the tables of it in the READMEs of csrc/.

    python tools/roofline.py            writes the tables; --check: exit status 1 where one is another

For 64 tokens by 64 inter rows on an SM: clocks of the tensor cores, bytes through shared memory, special functions, and
bytes of fp32 that the L2 adds. An instruction m64 x N x 16 reads its 64 rows of A, unless they are in registers, and
its N columns of B; a tile that several warpgroups read is written once. Needs flashmhf._plan:
FLASHMHF_SKIP_CUDA_BUILD=1 python setup.py -q build_ext --inplace.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

CSRC = Path(__file__).resolve().parents[1] / "csrc"
TILE = 64  # tokens, and inter rows
FLOPS = {2: 4096, 1: 8192}  # dense, a clock of an SM, by the bytes of an element
SHARED, SPECIAL = 128, 16  # bytes of shared memory, and special functions, a clock


def square(depth: int, size: int = 2) -> int:
    """Bytes of 64 rows of `depth` elements."""
    return TILE * depth * size


def bounds(products: int, d_h: int, shared: int, special: int, l2: int = 0, size: int = 2) -> list[str]:
    clocks = [products * 2 * TILE * TILE * d_h // FLOPS[size], shared // SHARED, special * TILE * TILE // SPECIAL]
    most = max(clocks)
    tensor, memory, functions = (f"**{x:,}**" if x == most else f"{x:,}" for x in clocks)
    return [tensor, f"{shared // 1024} KB: {memory}", functions, f"{l2 // 1024} KB" if l2 else "–"]


def forward(p: dict) -> list[str]:
    d_h, fp8 = p["head_dim"], p["kernel"] == "forward_fp8"
    size = 1 if fp8 else 2
    weights = 3 * square(d_h, size)
    a = 0 if fp8 or p["q_in_registers"] else square(d_h)  # Q; A of the second product is in registers
    return bounds(3, d_h, a + weights + weights // p["consumers"], 1, size=size)


def inter(p: dict) -> list[str]:
    """Of an inter-stationary backward kernel."""
    rows, grads = p["row_tile_bytes"], square(TILE)
    score = 3 * rows + p["keys"] * 2 * rows  # [M|N]: Q, K and U; dA: dO and V
    stored = (2 * p["keys"] + p["values"]) * grads + p["reloaded_blocks"] * 2 * grads // 4
    each = p["w_warpgroups"]  # reads the gradients, and a part of the columns of Q or dO
    weights = (2 * p["keys"] + p["values"]) * (each * grads + rows)
    query = p["query"] * (2 * rows + 4 * rows)  # K and U; fp32 sums in and out of the staging
    products = 2 + p["keys"] + 2 * p["keys"] + p["values"] + 2 * p["query"]
    return bounds(products, p["head_dim"], score + stored + weights + query + 2 * rows, 2, p["query"] * 2 * rows)


def token(p: dict) -> list[str]:
    rows, parts = p["row_tile_bytes"], TILE // p["inter"]  # Q and dO are read for each part of the inter rows
    weights = 3 * rows
    return bounds(5, p["head_dim"], parts * 2 * rows + weights + 2 * rows + weights // p["consumers"], 2)


def table(head: str, lines: list[list[str]]) -> str:
    width = len(re.findall(r"(?<!\\)\|", head)) - 1
    assert all(len(line) == width for line in lines), (head, lines)
    return "\n".join([head, "|" + "---|" * width, *("| " + " | ".join(line) + " |" for line in lines)])


BOUNDS = " tensor, clk | shared memory, clk | special functions, clk | added in the L2 |"


def ring(p: dict) -> list[str]:
    router = f"{p['router_bytes']:,}" if p["router_bytes"] else "–"
    gate = p["gate_bytes"] * (p["consumers"] if p["kernel"] == "forward_fp8" else 1)
    rows = p["consumers"] * p["row_tile_bytes"]
    return [f"{p['slots']} × {p['slot_bytes']:,}", f"{rows:,}", f"{gate:,}", router, f"{p['shared_memory']:,}"]


def forward_tables(policies: list[dict]) -> str:
    plan, bound = [], []
    for p in (p for p in policies if p["kernel"] == "forward"):
        d_h, registers = p["head_dim"], f"{p['producer_registers']}/{p['consumer_registers']}"
        operands = [d_h // 2, TILE, TILE // 4] + p["q_in_registers"] * [d_h // 4]
        plan.append([str(d_h), *ring(p), registers, " + ".join(map(str, operands))])
        bound.append([str(d_h), *forward(p)[:3]])
    head = r"| d_h | ring | Q = output buffer | R | W | total | registers | O + [M\|N] + A + Q |"
    return table(head, plan) + "\n\n" + table("| d_h |" + BOUNDS.removesuffix(" added in the L2 |"), bound)


def fp8_tables(policies: list[dict]) -> str:
    plan, bound = [], []
    for p in (p for p in policies if p["kernel"] == "forward_fp8"):
        d_h, chunk = p["head_dim"], p["chunk_inter"]
        name, registers = f"{d_h}{', few rows' * p['few_rows']}", f"{p['producer_registers']}/{p['consumer_registers']}"
        operands = " + ".join(map(str, (d_h // 8, d_h // 4, d_h // 4, chunk, chunk // 4)))
        plan.append([name, *ring(p), str(p["consumers"]), registers, operands])
        bound.append([name, *forward(p)[:3]])
    head = r"| d_h | ring | Q = output buffer | R and factors | W | total | consumers | registers |"
    head += r" Q + O + sums + [M\|N] + A |"
    return table(head, plan) + "\n\n" + table("| d_h |" + BOUNDS.removesuffix(" added in the L2 |"), bound)


def backward_tables(policies: list[dict]) -> str:
    names = {7: "all", 6: "dK, dU, dV", 2: "dK, dU", 4: "dV"}
    lines = []
    for p in policies:
        if p["kernel"] == "backward_token":
            what, counted, stages = "dQ, dR", token(p), f"{p['stages']} of {p['inter']}"
            roles = f"{p['loader_registers']}/{p['consumers']}×{p['consumer_registers']}"
        elif p["kernel"] == "backward_inter":
            what, counted, stages = names[p["outputs"]], inter(p), f"Q {p['q_stages']}, dO {p['g_stages']}"
            several = [f"{p[f'{x}_warpgroups']}×" if p[f"{x}_warpgroups"] > 1 else "" for x in "sw"]
            roles = f"{p['loader_registers']}/{several[0]}{p['s_registers']}/{several[1]}{p['w_registers']}"
        else:
            continue
        lines.append([str(p["head_dim"]), what, roles, f"{p['shared_memory']:,}", stages, *counted])
    return table("| d_h | gives | registers | bytes | stages |" + BOUNDS, lines)


TABLES = {
    "forward/README.md": forward_tables, "forward/e4m3/README.md": fp8_tables, "backward/README.md": backward_tables,
}  # fmt: skip
BEGIN, END = "<!-- tools/roofline.py -->\n", "\n<!-- -->"


def pages(policies: list[dict]) -> dict[Path, tuple[str, str]]:
    """The READMEs with what they say, and what they should say."""
    found = {}
    for name, write in TABLES.items():
        text = (CSRC / name).read_text(encoding="utf-8")
        if text.count(BEGIN) != 1:
            raise ValueError(f"{name} has no place for the table, or two")
        before, rest = text.split(BEGIN)
        found[CSRC / name] = text, before + BEGIN + write(policies) + END + rest.partition(END)[2]
    return found


def main(arguments: list[str]) -> int:
    from flashmhf import _plan

    if arguments not in ([], ["--check"]):
        sys.exit(__doc__)
    wrong = [(path, text) for path, (was, text) in pages(_plan.policies()).items() if was != text]
    for path, text in wrong:
        print(f"{path}: {'another table' if arguments else 'written'}")
        if not arguments:
            path.write_text(text, encoding="utf-8")
    return int(bool(arguments and wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
