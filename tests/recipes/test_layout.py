"""Training runs on several processes over gloo: by heads, sharded, both; failing, killed, resumed."""

import shutil
from pathlib import Path

import pytest
import torch
from lm_runs import launch, options, same_run, start, store_tokens, torchrun

from flashmhf_recipes import data, metrics, training
from flashmhf_recipes.errors import OptionError
from flashmhf_recipes.layout import Layout, layout_of

SETTINGS = dict(micro_batch=2, steps=12, log_every=1, save_every=4, eval_fraction=0.08, eval_every=6)
FLAGS = "train --preset tiny --vocab-size 300 --length 32 --batch 8 --device cpu --set eval_on_start=true".split()
FLAGS += [part for name, value in SETTINGS.items() for part in ("--" + name.replace("_", "-"), str(value))]


@pytest.mark.parametrize(("sizes", "processes", "expected"), [
    ((None, None), 4, (4, 1, 1)),
    ((2, None), 4, (1, 2, 2)),
    ((None, 2), 4, (2, 2, 1)),
    ((2, 2), 8, (2, 2, 2)),
    ((4, 1), 4, (1, 1, 4)),
    ((3, None), 4, "tp is 3; it must divide the 4 processes"),
    ((2, 3), 4, "dp_shard is 3; it must divide the 2 groups of tp processes"),
    ((2, 1), 4, "dp_shard is 1 with tp = 2 on 4 processes"),
])  # fmt: skip
def test_layouts(sizes, processes, expected):
    if isinstance(expected, str):
        with pytest.raises(OptionError, match=expected):
            layout_of(*sizes, processes)
    else:
        layout = layout_of(*sizes, processes)
        assert layout == Layout(*expected)
        assert list(map(layout.data_index, range(processes))) == [rank // expected[2] for rank in range(processes)]


@pytest.mark.parametrize(("ffn", "model", "message"), [
    ("flashmhf", {"ffn_num_heads": 1},
     r"tp is 2: model.layers.0.mlp has H = 1 heads .* size 2; supported: sizes that divide H"),
    ("flashmhf", {"num_key_value_heads": 1}, "tp is 2: model.layers.0.self_attn.k_proj has 1 heads"),
])  # fmt: skip
def test_models_that_heads_do_not_shard_are_refused_before_anything_is_written(
    text, tmp_path, monkeypatch, ffn, model, message
):
    chosen = options(tmp_path / "run", text, tp=2, preset=f"{ffn}-tiny", model=model)
    monkeypatch.setattr(type(chosen), "layout", lambda self, processes: layout_of(self.tp, self.dp_shard, 2))
    with pytest.raises(OptionError, match=message):
        training.start(chosen, bar=False)
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def one_process(text, tmp_path_factory) -> Path:
    return start(tmp_path_factory.mktemp("one") / "run", text, arguments={"eval_on_start": True}, **SETTINGS).output


@pytest.mark.slow
def test_two_processes_train_as_one(one_process, text, tmp_path):
    """Data parallel over gloo: the same batches in total, so the same losses to rounding; one process writes. The
    held-out loss of the same weights has the same bits. Two processes have five held-out batches, the last one
    shorter."""
    run = tmp_path / "run"
    done = torchrun(2, *FLAGS, "--data", text, "--output", run)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("12 steps, loss") == 1
    same_run(run, one_process, rel=1e-5)
    first, expected = (metrics.read_rows(output)[0] for output in (run, one_process))
    assert first == expected and first.keys() == {"step", "eval_loss"} and first["step"] == 0
    assert len(data.split(data.load(run / "data"), 0.08, 32, 0)[1]) == 9 * 32


@pytest.mark.slow
def test_a_killed_process_of_four_ends_the_job_and_the_run_resumes_on_two_and_on_one(one_process, tmp_path):
    """Heads over two processes and FSDP2 over two; killed amid step 6. Then FSDP2 on two to step 12; then one process,
    step 8 to 12."""
    run = tmp_path / "run"
    done = launch(4, *FLAGS, "--tokens", one_process, "--output", run, "--tp", 2, DIE_AT="5")
    assert done.returncode  # of the killed process or of a neighbour that lost it, whichever the launcher sees first
    assert [path.name for path in sorted(run.glob("checkpoint-*"))] == ["checkpoint-4"]
    done = launch(2, "train", "--resume", "--output", run, "--dp-shard", 2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("12 steps, loss") == 1
    same_run(run, one_process, rel=1e-5)
    shutil.rmtree(run / "checkpoint-12")
    training.resume(run, tp=1, bar=False)
    same_run(run, one_process, rel=1e-5)


@pytest.mark.gpu
def test_two_gpus_train_as_one_and_resume(text, tmp_path):
    """Data parallel over NCCL, killed amid step 6 and resumed."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    settings = SETTINGS | {"data": [], "tokens": str(store_tokens(text, tmp_path)), "device": "cuda"}
    expected = start(tmp_path / "one", text, precision="fp32", arguments={"eval_on_start": True}, **settings).output
    flags = [{"cpu": "cuda"}.get(flag, flag) for flag in FLAGS]
    run = tmp_path / "run"
    killed = launch(2, *flags, "--precision", "fp32", "--tokens", tmp_path, "--output", run, DIE_AT="5")
    assert killed.returncode and [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-4"]
    done = torchrun(2, "train", "--resume", "--output", run)
    assert done.returncode == 0, done.stderr[-3000:]
    same_run(run, expected, rel=1e-3)


@pytest.mark.slow
def test_a_failing_process_of_two_ends_the_job_with_its_message(one_process, tmp_path):
    arguments = *FLAGS, "--tokens", one_process, "--output", tmp_path / "run", "--tp", 2
    done = launch(2, *arguments, FAIL_AT="3")
    # which of them the launcher sees first is a race: the other one loses its neighbour
    assert done.returncode and "flashmhf: error: this process has a fault of its own" in done.stderr
