"""Timing, memory and the environment of a record."""

import pytest
import torch

from benchmarks.harness import environment, timing


class FakeTimer:
    """Passes of a set length; remembers the order of the windows."""

    def __init__(self, seconds: dict):
        self.seconds, self.windows = seconds, []

    def window(self, run, passes):
        self.windows.append((run, passes))
        return [self.seconds[run]] * passes


def test_every_round_begins_with_another_subject():
    timer = FakeTimer({"a": 0.5, "b": 0.25, "c": 2.0})
    samples = timing.interleave({name: name for name in "abc"}, timer, rounds=3, window_seconds=1.0)
    assert timer.windows[:3] == [("a", 2), ("b", 2), ("c", 2)]  # how long a pass takes
    assert [name for name, _ in timer.windows[3:]] == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert {name: len(values) for name, values in samples.items()} == {"a": 6, "b": 12, "c": 3}


def test_warm_up_lasts_until_two_windows_agree(monkeypatch):
    clock, lengths = [0.0], iter([0.1, 0.1, 0.10, 0.12, 0.14, 0.15, 0.1505, 9.0])

    class Drifting:
        def window(self, run, passes):
            seconds = next(lengths)
            clock[0] += seconds * passes
            return [seconds] * passes

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    timing.warm_up(None, Drifting(), seconds=0.3)
    assert next(lengths) == 9.0  # stopped after 0.15 and 0.1505


def test_peak_memory_sees_what_a_call_holds():
    def run():
        a, b = torch.ones(1 << 20), torch.ones(1 << 20)
        del a, b
        torch.ones(1 << 20)

    assert 8 << 20 <= timing.peak_tensor_bytes(run) < 9 << 20
    assert timing.peak_memory(run, torch.device("cpu")) is None


@pytest.mark.parametrize(("arguments", "command"), [
    (["/x/benchmarks/run.py", "--suite", "host", "--out", "/x/out"], "python -m benchmarks.run --suite host --out out"),
    (["tools/build.py", "--out", "a b"], "python tools/build.py --out 'a b'"),
    (["/x/bin/flashmhf", "check"], "flashmhf check"),
    (["/x/pytest/__main__.py", "-m", "gpu"], "pytest -m gpu"),
])  # fmt: skip
def test_command_has_no_folder_of_this_machine(arguments, command):
    assert environment.command(arguments) == command
    assert environment.brief(OSError("lost /a/b/c.so: no")) == "OSError: lost c.so: no"


def test_commit_without_a_repository_comes_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setattr(environment.flashmhf, "__file__", str(tmp_path / "flashmhf" / "__init__.py"))
    monkeypatch.delenv("FLASHMHF_COMMIT", raising=False)
    assert environment.commit() is None
    monkeypatch.setenv("FLASHMHF_COMMIT", "abc1234")
    assert environment.commit() == "abc1234"


@pytest.mark.gpu
def test_a_graph_keeps_what_it_reads():
    def make():
        x = torch.full((1000,), 2.0, device="cuda")
        total = torch.zeros((), device="cuda")
        return timing.graphed(lambda: total.add_(x.sum())), total

    replay, total = make()
    junk = [torch.full((1000,), float("nan"), device="cuda") for _ in range(50)]
    total.zero_()
    replay()
    assert total.item() == 2000 and junk
