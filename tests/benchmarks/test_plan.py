"""``python -m benchmarks.plan``: the planner's fields as it gives them, its times near the measured ones."""

import pytest

from benchmarks import plan

FLAGSHIP = ["16", "22", "384", "128"]


@pytest.fixture
def planner():
    return pytest.importorskip("flashmhf._plan")


def printed(arguments: list[str], capsys) -> dict[str, str]:
    """The rows of the output by name, and "compared", the ways to launch that the planner compared."""
    assert plan.main(arguments) == 0
    text, _, compared = capsys.readouterr().out.partition("compared (us")
    return dict(line.split("  ", 1) for line in text.splitlines()) | {"compared": compared}


def taken_us(rows: dict[str, str]) -> float:
    """The planner's time of the way to launch that it takes."""
    (line,) = (line for line in rows["compared"].splitlines() if line.startswith("* "))
    return float(line.partition("|")[2].split()[4])


@pytest.mark.parametrize(("tokens", "forward_ms", "backward_ms"), [(32256, 4.33, 15.47), (129024, 17.52, 61.43)])
def test_the_planners_times_are_near_the_measured_ones(planner, tokens, forward_ms, backward_ms, capsys):
    """Measured on an H200; the backward there includes what the model leaves out."""
    rows, p = printed([*FLAGSHIP, str(tokens)], capsys), planner.plan_forward(1, tokens, 16, 128, 22, 384)
    assert all(int(rows[name]) == p[name] for name in ("clusters", "waves", "rest", "splits", "workspace"))
    assert taken_us(rows) / 1000 == pytest.approx(forward_ms, rel=0.05)
    back = printed([*FLAGSHIP, str(tokens), "--backward"], capsys)
    assert float(back["time_us"]) / 1000 == pytest.approx(backward_ms, rel=0.12)
    ordered = printed([*FLAGSHIP, str(tokens), "--backward", "--deterministic"], capsys)
    assert ordered["kernels"].strip() == "ordered"


@pytest.mark.parametrize("length", ["1", "512", "32256"])
@pytest.mark.parametrize("sizes", [FLAGSHIP, ["6", "8", "256", "96"], ["8", "22", "704", "256"]])
def test_no_time_below_the_bound(planner, length, sizes, capsys):
    for way in ([], ["--fp8"]):
        rows = printed([*sizes, length, *way], capsys)
        assert taken_us(rows) > float(rows["bound"].partition("products ")[2].split()[0])
        assert rows["bound"].strip().startswith("memory" if length == "1" else "tensor cores")


@pytest.mark.parametrize(("arguments", "message"), [
    (["16", "22", "384", "80", "1"], "d_h is 80"),
    (["16", "22", "40", "64", "1"], "d_e is 40"),
    ([*FLAGSHIP, "0"], "T is 0; it must be at least 1"),
    ([*FLAGSHIP, "1000000000"], "Q, K, U, V and the output take 8.19e+03 GB; supported: 141 GB"),
    ([*FLAGSHIP, "1", "--batch", str(10**20)], "supported: 141 GB"),
    ([*FLAGSHIP, "12", "--kv-heads", "5"], "H_kv is 5; supported: divisors of H = 16"),
    ([*FLAGSHIP, "12", "--deterministic"], "--deterministic needs --backward"),
])  # fmt: skip
def test_a_shape_without_kernels_is_one_line(planner, arguments, message, capsys):
    assert plan.main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err and len(captured.err.splitlines()) == 1 and not captured.out
