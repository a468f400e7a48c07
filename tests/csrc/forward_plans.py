"""Plans of the forward kernels for 2,000 calls: ``python tests/csrc/forward_plans.py`` writes forward_plans.csv.gz
beside it, which a test compares with what the planner says. A change of the file needs a measurement:
experiments/README.md says which."""

import csv
import gzip
import io
import random
import zlib
from pathlib import Path

FILE = Path(__file__).with_name("forward_plans.csv.gz")
# Clusters of 1, 2, ... 8 CTAs that run at once, and of 16: chips of 132, 114 and 78 SMs whose GPCs are populated in
# different ways.
DEVICES = {
    "132": ((132, 66, 39, 30, 22, 17, 15, 15), 7), "132b": ((132, 66, 44, 33, 26, 22, 18, 16), 8),
    "114": ((114, 57, 36, 28, 21, 18, 14, 13), 6), "78": ((78, 39, 24, 18, 13, 10, 9, 8), 4),
    "single": ((132, 0, 0, 0, 0, 0, 0, 0), 0),
}  # fmt: skip
CALL = ("kind", "device", "batch", "T", "H", "d_h", "E", "d_e", "group")
PLAN = (
    "row_ctas", "consumers", "slices", "abreast", "bundle", "clusters", "waves", "rest", "splits", "flags", "partials",
    "work",
)  # fmt: skip
# H, d_h, E, d_e of networks of some 25M to 1.3B parameters.
NETWORKS = [
    (16, 128, 22, 384), (8, 128, 7, 384), (6, 128, 8, 256), (12, 128, 15, 384), (32, 64, 22, 192), (21, 96, 22, 256),
    (8, 256, 22, 704),
]  # fmt: skip
LENGTHS = [1, 8, 16, 17, 32, 33, 64, 96, 128, 192, 256, 257, 320, 384, 448]
LENGTHS += [512, 576, 640, 768, 896, 1024, 1025, 1536, 2048, 3072, 4096, 8192]


def calls() -> list[tuple]:
    """The calls of CALL: every network and length on the first device, the rest drawn from fixed seeds."""
    sizes = [(length, *network, 1) for network in NETWORKS for length in LENGTHS]
    listed = [(kind, "132", 1, *size) for kind in ("f16", "fp8") for size in sizes]
    listed += [("f16", "132", 1, length, 16, 128, 22, 384, group) for group in (2, 4, 8) for length in LENGTHS]
    draw = random.Random(45)
    choice, between = draw.choice, draw.randint
    while len(listed) < 2000:
        group = choice((1, 1, 1, 2, 4, 6))
        length = choice((between(1, 300), between(1, 2500), between(1, 20000)))
        known = choice(NETWORKS)
        drawn = (between(1, 24), choice((64, 96, 128, 256)), between(1, 30), between(1, 64) * 16)
        network = choice((known, drawn))
        kind, device, batch = choice(("f16", "fp8")), choice(tuple(DEVICES)), choice((1, 1, 2, 5))
        listed.append((kind, device, batch, length, network[0] * group, *network[1:], group))
    return listed


def rows(plan) -> list[tuple[str, ...]]:
    """Each call with its plan by the module flashmhf._plan; `work` is a checksum of the work of every CTA."""
    found = []
    for call in calls():
        kind, device, *shape, group = call
        clusters, large = DEVICES[device]
        made = plan.plan_forward(*shape, fp8=kind == "fp8", clusters=clusters, group=group, large_clusters=large)
        made["work"] = f"{zlib.crc32(repr(made['work']).encode()):08x}"
        found.append(tuple(str(x) for x in (*call, *(made[name] for name in PLAN))))
    return found


def read() -> list[tuple[str, ...]]:
    """The rows of the file."""
    with gzip.open(FILE, "rt", newline="") as file:
        return [tuple(row) for row in csv.reader(file)][1:]


if __name__ == "__main__":
    from flashmhf import _plan

    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows([CALL + PLAN, *rows(_plan)])
    FILE.write_bytes(gzip.compress(text.getvalue().encode(), 9, mtime=0))
