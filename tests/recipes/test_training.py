"""Training runs: every network learns, a killed run resumes to the same bits, refusals, metrics."""

import importlib.util
import json

import pytest
import torch
from lm_runs import At, environment, interrupt, noting, same_run, start, store_tokens
from processes import run_python
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM

import flashmhf
from flashmhf.models.presets import preset
from flashmhf_recipes import checkpoints, data, metrics, tokenizer, training
from flashmhf_recipes.errors import TrainingError
from flashmhf_recipes.settings import training_arguments
from flashmhf_recipes.training import Options

pytestmark = pytest.mark.usefixtures("one_thread")


def test_what_a_run_leaves(uninterrupted):
    result, seen = uninterrupted
    rows = metrics.read_rows(result.output)
    assert [row["step"] for row in rows if "loss" in row] == [1, 5, 10, 15, 20]
    assert [row["step"] for row in rows if "eval_loss" in row] == [10, 20]
    assert result.loss == rows[-2]["loss"] < rows[0]["loss"] - 1
    assert result.eval_loss == rows[-1]["eval_loss"]
    assert result.steps == 20
    assert rows[2]["tokens"] == 10 * 8 * 32 and rows[2]["tokens_per_second"] > 0
    assert "mfu" not in rows[2]  # no peak is known for a CPU
    assert [path.name for path in checkpoints.complete_checkpoints(result.output)] == ["checkpoint-10", "checkpoint-20"]
    weights = load_file(result.output / "model.safetensors")
    final = load_file(result.output / "checkpoint-20" / "model.safetensors")
    assert all(torch.equal(tensor, final[name]) for name, tensor in weights.items())
    if importlib.util.find_spec("tensorboard"):
        assert list(result.output.rglob("events.out.tfevents.*"))
    bpe = tokenizer.load(str(result.output))
    assert (bpe.eos_token_id, bpe.pad_token_id, bpe.model_max_length) == (0, 1, 128)
    assert json.loads((result.output / "config.json").read_text())["pad_token_id"] == 1
    # micro-batches of 4 in the order that the seed fixes, held-out tokens never among them
    tokens = data.load(result.output / "data")
    train_tokens, held_out = data.split(tokens, 0.1, 32, 0)
    assert len(held_out) / len(tokens) == pytest.approx(0.1, abs=0.02)
    blocks = data.Blocks(train_tokens, 32, 160, 0)
    trained = [x for x in seen if len(x) == 4][:40]
    expected = [torch.stack([blocks[i]["input_ids"] for i in range(j, j + 4)]) for j in range(0, 160, 4)]
    assert [x.tolist() for x in trained[:20]] == [x.tolist() for x in expected[:20]]


KILLED = """
import os, signal, sys
import torch
torch.set_num_threads(1)
from lm_runs import HELD_OUT, At, options
from transformers import Trainer
from flashmhf_recipes import data, training

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

def start():
    encode = data.encode

    def encode_some(*args):
        yield next(encode(*args))[:100]
        die()

    data.encode = encode_some
    training.start(options(output, text, **HELD_OUT), bar=False)

def step():
    training.resume(output, bar=False, callbacks=[At("on_step_end", 7, die)])

def save():
    Trainer._save_rng_state = die  # weights and optimiser are written by then
    training.resume(output, bar=False)

def again():
    training.resume(output, bar=False, callbacks=[At("on_step_end", 17, die)])

output, text = sys.argv[1:]
for death in (start, step, save, again):
    process = os.fork()  # the libraries are imported once
    if not process:
        death()
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    folders = filter(os.path.isdir, (output, output + "/data"))
    found = sorted(name for folder in folders for name in os.listdir(folder))
    print(death.__name__, status, *found, flush=True)  # or the next child writes the line again
"""


@pytest.mark.slow
def test_killed_runs_resume_to_the_same_bits(uninterrupted, text, tmp_path):
    """SIGKILL while tokenising, before the first checkpoint, amid writing it and after it; then all is as without. What
    was trained after the last checkpoint is trained again, on the same batches; its rows are not doubled."""
    expected, seen = uninterrupted
    output = tmp_path / "run"
    lines = run_python("-c", KILLED, output, text, **environment()).splitlines()
    found = {line.split()[0]: line.split()[2:] for line in lines}
    assert [line.split()[:2] for line in lines] == [[death, "-9"] for death in ("start", "step", "save", "again")]
    assert "run.json" in found["start"] and "manifest.json" not in found["start"]
    assert "manifest.json" in found["step"] and "checkpoint-10" not in found["step"]
    assert "checkpoint-10" in found["save"] and (output / "incomplete-checkpoint-10" / "model.safetensors").exists()
    assert [path.name for path in checkpoints.complete_checkpoints(output)] == ["checkpoint-10"]
    assert metrics.read_rows(output)[-1]["step"] == 15
    with (output / "metrics.jsonl").open("a") as out:
        out.write('{"step": 16, "lo')  # torn by a kill
    batches = []
    result = training.resume(output, bar=False, callbacks=[noting(batches)])
    same_run(result.output, expected.output)
    assert [x.tolist() for x in batches] == [x.tolist() for x in seen[-len(batches) :]] and len(batches) < len(seen)
    again = training.resume(output, bar=False)  # a finished run: nothing left to do
    assert again.steps == 20 and again.loss == result.loss


def test_the_papers_settings(tmp_path):
    """Appendix "Training Hyperparameters" at every scale, as the Trainer gets them."""
    for scale, rate, steps in (("128m", 3e-3, 245_000), ("370m", 1.5e-3, 245_000), ("1.3b", 1e-3, 409_000)):
        resolved = Options(output=str(tmp_path), preset=scale, data=["x"]).resolve()
        arguments = training_arguments(resolved)
        assert resolved.length == 4096
        assert (arguments.learning_rate, arguments.max_steps) == (rate, steps)
        assert arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps == 64
        assert (arguments.lr_scheduler_type, arguments.lr_scheduler_kwargs) == ("cosine_with_min_lr", {"min_lr": 1e-5})
        assert (arguments.adam_beta1, arguments.adam_beta2, arguments.weight_decay) == (0.9, 0.95, 0.1)
        assert arguments.get_warmup_steps(steps) == pytest.approx(0.015 * steps, abs=1)


@pytest.mark.parametrize(("precision", "rel"), [("fp32", 1e-4), ("bf16", 1e-2)])
def test_compiled_training(precision, rel, text, tmp_path):
    """One graph, no break, near the float32 loss; bf16 is autocast over float32 weights, as on a GPU."""
    plain = start(tmp_path / "plain", text, steps=2)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    settings = dict(precision=precision, compile=True, arguments={"torch_compile_backend": "aot_eager"})
    result = start(tmp_path / "run", text, steps=2, **settings)
    assert result.loss == pytest.approx(plain.loss, rel=rel) and (precision == "fp32" or result.loss != plain.loss)
    assert load_file(result.output / "model.safetensors")["model.layers.0.mlp.k"].dtype == torch.float32
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.gpu
def test_compiled_training_on_a_gpu(text, tmp_path):
    """bf16 autocast, Inductor, fused kernels: one graph, and the loss of float32 without compilation."""
    sizes = dict(hidden_size=256, intermediate_size=512, num_attention_heads=4, ffn_num_heads=2, ffn_num_subnets=2)
    settings = dict(data=[], tokens=str(store_tokens(text, tmp_path)), device="auto", model=sizes, steps=20)
    plain = start(tmp_path / "plain", text, precision="fp32", **settings)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    result = start(tmp_path / "bf16", text, compile=True, **settings)
    assert result.loss == pytest.approx(plain.loss, rel=0.05)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert metrics.read_rows(result.output)[-1]["peak_memory_bytes"] > 0


def smoothed(model, ids) -> float:
    """The mean over predicted tokens of 0.9 of the loss and 0.1 of the mean loss over the vocabulary."""
    with torch.no_grad():
        scores = -model(ids).logits[:, :-1].double().log_softmax(-1)
    return (0.9 * scores.gather(-1, ids[:, 1:, None])[..., 0] + 0.1 * scores.mean(-1)).mean().item()


def test_a_smoothed_loss_is_of_the_next_token(text, tmp_path):
    """By transformers' own Trainer.compute_loss; the held-out loss stays the plain one."""
    first = dict(steps=1, eval_fraction=0.1, eval_every=1, warmup=0, learning_rate=1e-9)
    run = start(tmp_path / "run", text, arguments={"label_smoothing_factor": 0.1}, **first)
    model = AutoModelForCausalLM.from_pretrained(run.output)
    tokens, held_out = data.split(data.load(run.output / "data"), 0.1, 32, 0)
    blocks = data.Blocks(tokens, 32, 8, 0)
    assert run.loss == pytest.approx(smoothed(model, torch.stack([blocks[i]["input_ids"] for i in range(8)])), rel=1e-4)
    held_out = data.Blocks(held_out, 32)
    rows = (held_out[i]["input_ids"][None] for i in range(len(held_out)))
    with torch.no_grad():
        losses = [model(ids, labels=ids).loss.item() for ids in rows]
    assert run.eval_loss == pytest.approx(sum(losses) / len(losses), rel=1e-4)


@pytest.mark.parametrize(("settings", "decays", "ratios"), [
    ({}, [0.3, 1.0, 0.0], [1, 0.3, 1]),
    ({"preset": "swiglu-tiny", "param_groups": False}, [0.3, 0.0], [1, 1]),
    ({"optimizer": "muon", "arguments": {"adam_epsilon": 1e-6}}, [0.3, 0.3, 0.3, 0.0], [1, 1, 1, 1]),
])  # fmt: skip
def test_groups_of_the_optimizer_and_its_resumption(settings, decays, ratios, text, tmp_path):
    """param_groups' rates, decays and schedule reach the optimizer; without them there are transformers' two groups. A
    run that was interrupted ends with the weights of one that was not."""
    seen = []

    def note(optimizer, **_):
        if "optimizer" in settings:  # in accelerate's wrapper
            assert isinstance(optimizer.optimizer, flashmhf.Muon)
            assert {(group["muon"], group["eps"]) for group in optimizer.param_groups} == {(True, 1e-6), (False, 1e-6)}
        seen.append([(group["lr"], group["weight_decay"]) for group in optimizer.param_groups])

    settings = settings | dict(steps=4, warmup=1, learning_rate=2e-3, weight_decay=0.3, save_every=2)
    output = start(tmp_path / "whole", text, callbacks=[At("on_step_end", None, note)], **settings).output
    for groups in seen:
        assert [decay for _, decay in groups] == pytest.approx(decays)
        assert [rate / groups[0][0] for rate, _ in groups] == pytest.approx(ratios)
    assert seen and json.loads((output / "run.json").read_text())["param_groups"] is settings.get("param_groups", True)
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path / "parts", text, callbacks=[At("on_step_end", 3, interrupt)], **settings)
    training.resume(tmp_path / "parts", bar=False)
    same_run(tmp_path / "parts", output)


def test_an_optimizer_with_groups_of_its_own_is_refused(text, tmp_path, monkeypatch):
    own = lambda self, *_: (torch.optim.AdamW, {"params": list(self.model.parameters())})  # noqa: E731 - as GaLore's
    monkeypatch.setattr(training.RunTrainer, "get_optimizer_cls_and_kwargs", own)
    with pytest.raises(ValueError, match="param_groups is True; optim=.* makes its own groups, turn it off"):
        start(tmp_path / "run", text, steps=1)


@pytest.mark.parametrize(("preset", "settings", "warns"), [
    ("flashmhf-128m", dict(steps=100, warmup=99), True),
    ("flashmhf-128m", dict(steps=100, warmup=100), False),
    ("flashmhf-128m", dict(), False),  # 0.015 of 245,000
    ("flashmhf-128m", dict(steps=100, learning_rate=1e-3), False),
    ("tiny", dict(steps=100), False),
])  # fmt: skip
def test_a_short_warmup_at_the_papers_rate_is_warned_of(preset, settings, warns, caplog, monkeypatch, text, tmp_path):
    monkeypatch.setattr(training, "_train", lambda *_: None)
    given = dict(preset=preset, data=[str(text)], device="cpu") | settings
    training.start(Options(output=str(tmp_path / "run"), **given), bar=False)
    assert [record.message.startswith("the warm-up is ") for record in caplog.records] == [True] * warns


def test_token_numbers_that_are_not_all_taken(text, tmp_path):
    """A tokenizer of few tokens may have numbers beyond 16 bits."""
    words = {"<|endoftext|>": 0, "the": 70_000, "other": 7}
    made = Tokenizer(models.WordLevel(words, unk_token="other"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    run = start(tmp_path / "run", text, tokenizer=str(tmp_path / "tokenizer.json"), steps=1).output
    assert set(data.load(run / "data")[:].tolist()) == {7, 70_000}
    assert json.loads((run / "config.json").read_text())["vocab_size"] == 70_001


@pytest.mark.parametrize(("settings", "message", "kept"), [
    ({"log_every": 2}, "the loss is nan at step 4", []),
    ({"log_every": 20, "save_every": 1}, "the loss is nan at step 4", ["checkpoint-2", "checkpoint-3"]),
    ({"log_every": 20, "eval_fraction": 0.1, "eval_every": 5}, "the eval_loss is nan at step 5", []),
], ids=["log", "checkpoint", "evaluation"])  # fmt: skip
def test_a_diverging_run_stops_with_its_step(settings, message, kept, text, tmp_path):
    """It keeps its last good checkpoints; its metrics stay valid JSON."""

    def spoil(model, **_):
        model.lm_head.weight.data.fill_(float("nan"))

    with pytest.raises(TrainingError, match=f"{message}; try a lower learning_rate or a longer warmup"):
        start(tmp_path / "run", text, callbacks=[At("on_step_begin", 3, spoil)], **settings)
    assert [path.name for path in checkpoints.complete_checkpoints(tmp_path / "run")] == kept
    assert "NaN" not in (tmp_path / "run" / metrics.FILE).read_text()


def test_peaks_are_those_of_the_card(monkeypatch):
    peaks = {"H100 80GB HBM3": 989.4e12, "H200 NVL": 835e12, "GB200": 2500e12}
    for name, peak in (peaks | {"H100 80GB HBM3 MIG 1g.10gb": None, "RTX A6000": None}).items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: f"NVIDIA {name}")
        assert metrics.peak_flops(torch.device("cuda")) == peak and metrics.peak_flops(torch.device("cpu")) is None


def test_operations_a_token():
    """6 N and the causal half of attention; an untied input embedding is no product."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(preset("flashmhf-370m").config(ffn_num_kv_heads=1))
    layer = 4 * 1024**2 + 2 * 1024**2 + 3 * 1024 * 2688 + 1024 * 7
    assert metrics.training_flops_per_token(model, 4096) == 6 * (21 * layer + 50_432 * 1024) + 6 * 21 * 1024 * 4096


@pytest.mark.parametrize(
    "torn", [b'{"step": 2, "lo', b"\0\0\0", b"\xff\xfe", b"null", b'{"loss": 1}', b'{"step": null}']
)
def test_rows_end_at_a_line_that_was_not_written_whole(torn, tmp_path):
    (tmp_path / metrics.FILE).write_bytes(b'{"step": 1}\n' + torn)
    assert metrics.read_rows(tmp_path) == [{"step": 1}]
    metrics.keep_rows(tmp_path, 1)
    assert (tmp_path / metrics.FILE).read_bytes() == b'{"step": 1}\n'
