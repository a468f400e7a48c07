"""``python -m benchmarks.plan``:

what it prints agrees with the planner, and the planner's times with what was measured.
"""

import sys

import pytest

import flashmhf
from benchmarks import plan

FLAGSHIP = ["16", "22", "384", "128"]


@pytest.fixture
def planner():
    return pytest.importorskip("flashmhf._plan")


def printed(arguments: list[str], capsys) -> dict[str, str]:
    """The rows of the output, by name; "" is the title, "compared" the ways to launch that the planner compared."""
    assert plan.main(arguments) == 0
    text, _, compared = capsys.readouterr().out.partition("what the planner compares; ")
    title, *lines = text.splitlines()
    rows = {line[2:].split("  ")[0]: line[2:].split("  ", 1)[1].strip() for line in lines if not line.startswith("   ")}
    return {"": title, "compared": compared} | rows


def taken_us(rows: dict[str, str]) -> float:
    """The planner's time of the way to launch that it takes."""
    line = next(line for line in rows["compared"].splitlines() if line.startswith("* "))
    return float(line.partition("|")[2].split()[4])


@pytest.mark.parametrize(
    ("fp8", "title", "bound"), [(False, "forward", "3.39 ms"), (True, "forward in FP8", "1.69 ms")]
)
def test_a_long_forward(planner, fp8, title, bound, capsys):
    rows = printed([*FLAGSHIP, "32256", *["--fp8"] * fp8], capsys)
    p = planner.plan_forward(1, 32256, 16, 128, 22, 384, fp8=fp8)
    assert rows[""].startswith(f"{title}: H = 16, E = 22, d_e = 384, d_h = 128, T = 32,256")
    assert rows["clusters"] == f"{p['clusters']} of {p['cluster_size']} CTAs"
    assert rows["waves"].startswith(f"{p['waves']} waves of whole items, then {p['rest']} items in {p['splits']} spans")
    assert rows["sums"] == "in the order of the clusters, by a second kernel"
    assert rows["workspace"] == f"{4 * p['workspace'] / 2**20:.1f} MiB" != "0.0 MiB"
    assert rows["bound"].startswith(f"tensor cores: {bound}")
    assert sum(line.startswith("* ") for line in rows["compared"].splitlines()) == 1


def test_few_tokens(planner, capsys):
    rows = printed([*FLAGSHIP, "16"], capsys)
    assert rows["waves"].startswith("1: every cluster has one item, whose inter tiles its 6 CTAs divide")
    assert rows["workspace"] == "0.0 MiB" and rows["bound"].startswith("memory: ")
    # half of the weights' bytes in bf16
    assert printed([*FLAGSHIP, "1", "--fp8"], capsys)["bound"].startswith("memory: 10.8 us")


@pytest.mark.parametrize(
    ("extra", "sums"), [([], "in no fixed order"), (["--deterministic"], "in the order of the items")]
)
def test_the_backward(planner, capsys, extra, sums):
    rows = printed([*FLAGSHIP, "32256", "--backward", *extra], capsys)
    assert rows["kernels"] == "one fused kernel: 8 products" and sums in rows["sums"]
    assert rows["launches"].startswith(
        f"{len(planner.plan_head_groups(1, 32256, 16, 128, 22, 384, deterministic=bool(extra))['heads'])}, "
    )
    assert "13 products" in printed(["8", "22", "704", "256", "4096", "--backward", *extra], capsys)["kernels"]


@pytest.mark.parametrize(("tokens", "forward_ms", "backward_ms"), [(32256, 4.33, 15.47), (129024, 17.52, 61.43)])
def test_the_planners_times_are_near_the_measured_ones(planner, tokens, forward_ms, backward_ms, capsys):
    """Measured on an H200; the backward there includes what the model leaves out."""
    assert taken_us(printed([*FLAGSHIP, str(tokens)], capsys)) / 1000 == pytest.approx(forward_ms, rel=0.05)
    assert planner.plan_head_groups(1, tokens, 16, 128, 22, 384)["time_us"] / 1000 == pytest.approx(
        backward_ms, rel=0.12
    )


@pytest.mark.parametrize("length", [1, 64, 512, 3072, 12288, 32256])
@pytest.mark.parametrize(
    ("heads", "head_dim", "subnets", "subnet_dim"), [(16, 128, 22, 384), (6, 96, 8, 256), (8, 256, 22, 704)]
)
def test_no_time_below_the_bound(planner, length, heads, head_dim, subnets, subnet_dim, capsys):
    for fp8, tflops in ((False, plan.MATRIX_TFLOPS), (True, plan.FP8_TFLOPS)):
        problem = plan.Problem(1, length, heads, head_dim, subnets, subnet_dim, heads, fp8)
        products, _ = plan.least_us(3 * problem.product_flops, 0, tflops)
        sizes = (heads, subnets, subnet_dim, head_dim, length)
        assert taken_us(printed([*map(str, sizes), *["--fp8"] * fp8], capsys)) > products


def test_heads_that_share_weights(planner, capsys):
    rows = printed([*FLAGSHIP, "1", "--kv-heads", "4"], capsys)
    assert "H = 16, H_kv = 4, E = 22" in rows[""] and rows["clusters"] == "4 of 16 CTAs"
    assert (
        rows["items"]
        == "4: 4 heads of K, U, V x 1 block of up to 64 rows, the tokens of 4 heads of Q, 4 heads in a row tile"
    )
    assert rows["bound"].startswith("memory: 5.4 us")  # a quarter of the weights' bytes

    rows = printed([*FLAGSHIP, "32256", "--kv-heads", "4", "--backward"], capsys)
    p = planner.plan_head_groups(1, 32256, 16, 128, 22, 384, router=True, group=4)
    assert rows["launches"].startswith(f"{len(p['heads'])}, of heads 0-") and rows["token tiles"] == "2,016 of 64"
    sequences = printed([*FLAGSHIP, "16128", "--batch", "2", "--kv-heads", "4", "--backward"], capsys)
    assert {**rows, "": ""} == {**sequences, "": ""}, "copied into one"


HUGE = str(10**20)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["16", "22", "384", "80", "1"], "d_h is 80"),
        (["16", "22", "40", "64", "1"], "d_e is 40"),
        ([*FLAGSHIP, "1000000000"], "Q, K, U, V and the output take 8.19e+03 GB; supported: 141 GB"),
        ([HUGE, "22", "384", "128", "1"], "supported: 141 GB"),
        (["16", HUGE, "384", "128", "1", "--backward"], "supported: 141 GB"),
        ([*FLAGSHIP, "1", "--batch", HUGE], "supported: 141 GB"),
        ([*FLAGSHIP, "12", "--kv-heads", "5"], "H_kv is 5; supported: divisors of H = 16"),
        ([*FLAGSHIP, "12", "--kv-heads", "32"], "H_kv is 32; supported: divisors of H = 16"),
        ([*FLAGSHIP, "12", "--deterministic"], "--deterministic needs --backward"),
    ],
)
def test_a_shape_without_kernels_is_one_line(arguments, message, capsys):
    assert plan.main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err and len(captured.err.splitlines()) == 1 and not captured.out


def test_a_missing_planner_is_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "flashmhf._plan", None)
    monkeypatch.delattr(flashmhf, "_plan", raising=False)
    assert plan.main([*FLAGSHIP, "1"]) == 2
    error = capsys.readouterr().err
    assert (
        "flashmhf._plan is not installed" in error and "install from source" in error and len(error.splitlines()) == 1
    )


@pytest.mark.parametrize(("text", "message"), [("1e3", "'1e3' is not an integer"), ("0", "0 is not positive")])
def test_numbers_that_are_none_are_named(text, message, capsys):
    with pytest.raises(SystemExit) as ended:
        plan.main([*FLAGSHIP, text])
    assert ended.value.code == 2 and f"argument T: {message}" in capsys.readouterr().err
