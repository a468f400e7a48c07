"""The scripts of experiments/: a queue of small trainings on the CPU, resumption, the report."""

import dataclasses
import fcntl
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

import compare  # noqa: E402
import model  # noqa: E402
import report  # noqa: E402
import runs  # noqa: E402
import training  # noqa: E402

SMALL = {
    "size": "tiny", "non_embedding": 106_800, "d_model": 64, "layers": 2, "attention_heads": 2,
    "steps": 5, "batch": 4, "micro_batch": 2, "context": 16, "warmup": 2, "learning_rate": 2e-3,
}  # fmt: skip
FLASH = {"ffn": "flashmhf", "heads": 4, "subnets": 2, "width": 148}
QUEUE = {
    "defaults": SMALL,
    "runs": [
        {"name": "swiglu", "ffn": "swiglu", "width": 192},
        {"name": "swiglu-seed1", "ffn": "swiglu", "width": 192, "seed": 1},
        {"name": "flash", **FLASH, "projection_rate": 0.3},
        {"name": "flash-adamw", **FLASH, "optimizer": "adamw"},
    ],
}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """Token files: two pieces and validation text of two kinds, in which every tenth token says the next ones."""
    directory = tmp_path_factory.mktemp("tokens")
    first = np.random.default_rng(0).integers(0, 30, 2400)
    ids = (10 * first[:, None] + np.arange(10)).astype(np.uint16).flatten()
    ends = {
        "train-00": (0, 10_000), "train-01": (10_000, 20_000), "val-code": (20_000, 21_000),
        "val-prose": (21_000, 24_000),
    }  # fmt: skip
    for name, (begin, end) in ends.items():
        ids[begin:end].tofile(directory / f"{name}.bin")
    (directory / "tokens.json").write_text('{"tokenizer_sha256": "0", "vocabulary": 300}')
    return directory


def run_queue(tokens, out, *arguments, queue=QUEUE):
    out.with_suffix(".json").write_text(json.dumps(queue))
    settings = (out.with_suffix(".json"), "--tokens", tokens, "--out", out, "--device", "cpu", *arguments)
    return compare.main(list(map(str, settings)))


def finished(directory):
    return runs.finished_runs([directory / "runs.jsonl"])


def train(run, tokens, state, deadline=math.inf):
    return training.train(run, training.Tokens(tokens, "cpu"), "cpu", state, deadline, compiled=False)


def test_a_queue_is_trained_taken_up_again_and_reported(tokens, tmp_path, capsys):
    out, collected = tmp_path / "runs", tmp_path / "collected.jsonl"
    (out / "locks").mkdir(parents=True)
    with (out / "locks" / "flash").open("a") as stream:  # a run that another process holds is left to it
        fcntl.flock(stream, fcntl.LOCK_EX)
        assert run_queue(tokens, out, "--commit", "abc") == 0
    assert set(finished(out)) == {"swiglu", "swiglu-seed1", "flash-adamw"}
    assert run_queue(tokens, out, "--minutes", "0") == 0 and len(finished(out)) == 3  # one that comes late is not begun
    assert run_queue(tokens, out) == 0 and not list(out.glob("*.state"))
    assert capsys.readouterr().out.count("validation loss") == 4 and run_queue(tokens, out) == 0
    assert capsys.readouterr().out == ""
    assert report.collect([out / "runs.jsonl"], collected) == list(finished(out))
    assert runs.finished_runs([collected]) == finished(out)
    line = finished(out)["flash-adamw"]
    assert line["configuration"]["heads"] == 4 and line["commit"] == "abc" and line["corpus"]["pieces"] == 2
    assert line["corpus"]["tokens"] == 20_000 and len(line["corpus"]["validation_sha256"]) == 64
    assert line["versions"]["torch"] == torch.__version__ and set(line["validation"]) == {"prose", "code"}
    assert len(line["losses"]) == 1 and line["validation_loss"] < line["losses"][0] + 1
    assert sorted(len(row.losses) for row in report.rows([collected])) == [1, 1, 2]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_goes_on_where_its_minutes_were_over_with_the_same_losses(tokens, tmp_path, monkeypatch, optimizer):
    run = runs.Run(name="a", **FLASH, optimizer=optimizer, **SMALL | {"steps": 12})
    for name, value in {"CHECKED": 5, "EVALUATED": 3 * 4 * 16, "SAMPLE": 4, "SAVED": 0}.items():
        monkeypatch.setattr(training, name, value)
    state = tmp_path / "a.state"
    whole = train(run, tokens, state)
    assert [each["tokens"] for each in whole["evaluations"]] == [192, 384, 576] and state.exists()
    state.unlink()
    for _ in range(2):
        with pytest.raises(training.TimeUpError):
            train(run, tokens, state, deadline=0.0)
    assert torch.load(state)["progress"]["step"] == 10
    with pytest.raises(ValueError, match="other settings: seed"):
        train(dataclasses.replace(run, seed=1), tokens, state)
    parts = train(run, tokens, state)
    for name in ("losses", "norms", "evaluations", "validation_loss", "validation"):
        assert parts[name] == whole[name], name


def finished_long_run(ffn, seed, change=0.0, **configuration):
    """A line of a training of 60 tokens per parameter whose loss falls by 1 in each third, plus ``change``."""
    ours = {"heads": 3, "subnets": 3, "layers": 7, "width": 768} if ffn == "flashmhf" else {"layers": 8, "width": 832}
    sizes = {"size": "12M, 744M tokens", "non_embedding": 12_400_000, "steps": 11_360, "learning_rate": 5.6e-3}
    run = runs.Run(name=f"{ffn}-{seed}-{len(configuration)}", ffn=ffn, seed=seed, **sizes | ours | configuration)
    points = {tokens: 5 - tokens / 248_000_000 + change for tokens in range(62_000_000, 744_000_000, 62_000_000)}
    return {
        "run": run.name, "configuration": dataclasses.asdict(run), "non_embedding": 12_400_000, "device": "NVIDIA H200",
        "evaluations": [{"tokens": tokens, "prose": loss + 1, "code": loss} for tokens, loss in points.items()],
        "validation_loss": 2.25 + change, "validation": {"prose": 3 + change, "code": 2 + change},
        "tokens_per_second": None, "peak_memory": 2**30,
    }  # fmt: skip


def test_a_long_training_is_told_by_tokens_per_parameter(tmp_path):
    """Losses at a third, two thirds and the end over the seeds that both have, with the interval of the difference."""
    lines = [finished_long_run("swiglu", seed, 0.01 * seed) for seed in range(2)]
    lines += [finished_long_run("flashmhf", seed, 0.01 * seed + change) for seed, change in ((0, -0.001), (1, -0.003))]
    lines.append(finished_long_run("flashmhf", 0, -1.0, learning_rate=8e-3))  # lower, of one seed alone
    lines += [finished_long_run(ffn, 0, size="12M, 249M tokens", steps=3_800) for ffn in ("swiglu", "flashmhf")]
    runs.write_lines(tmp_path / "runs.jsonl", lines)
    found = report.rows([tmp_path / "runs.jsonl"])
    assert report.longer_block(found).splitlines()[2:] == [
        "| 12M, 7 layers for 8 | 20 | 4.253 | 4.255 | -0.0020 ± 0.0127 | 2 |",
        "| 12M, 7 layers for 8 | 40 | 3.253 | 3.255 | -0.0020 ± 0.0127 | 2 |",
        "| 12M, 7 layers for 8 | 60 | 2.253 | 2.255 | -0.0020 ± 0.0127 | 2 |",
    ]
    assert report.pairs_block(found).splitlines()[-1].endswith("-0.0020 ± 0.0127 | – | 1.0 | 1.0 | 2 |")  # no speed


@pytest.mark.parametrize(("change", "message"), [
    ({"micro_batch": 3}, "batch is 4, micro_batch 3; supported: a batch that is a multiple"),
    ({"non_embedding": 100_000}, "non-embedding parameters; tiny is 100,000 within 1%"),
    ({"ffn": "mlp"}, "ffn is 'mlp'"),
    ({"optimizer": "sgd"}, "optimizer is 'sgd'"),
    ({"steps": 100_000}, "a: steps is 100000, .* at most 4"),
])  # fmt: skip
def test_unequal_sizes_and_unknown_settings_are_refused(tokens, tmp_path, change, message):
    run = runs.Run(**{"name": "a", "ffn": "swiglu", "width": 192, **SMALL, **change})
    with pytest.raises(ValueError, match=message):
        train(run, tokens, tmp_path / "a.state")


@pytest.mark.parametrize("ffn", ["swiglu", "flashmhf"])
def test_the_model_is_that_of_flashmhf_lm(ffn):
    """Equal loss with equal weights: the lean loop trains the network that flashmhf.models has."""
    pytest.importorskip("transformers")
    from flashmhf.models.configuration import FlashMHFConfig
    from flashmhf.models.modeling import FlashMHFForCausalLM

    sizes = {"heads": 4, "subnets": 2, "width": 148} if ffn == "flashmhf" else {"width": 192}
    run = runs.Run(name="a", ffn=ffn, **sizes, **SMALL)
    ours = model.Model(run, 100)
    config = FlashMHFConfig(
        ffn_type=ffn, vocab_size=100, hidden_size=64, intermediate_size=run.width, num_hidden_layers=2,
        num_attention_heads=2, ffn_num_heads=run.heads, ffn_num_subnets=run.subnets, rms_norm_eps=1e-5,
        tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )  # fmt: skip
    theirs = FlashMHFForCausalLM(config)
    state = {"norm": ours.head.norm.weight, "embed_tokens": ours.embedding.weight}
    for index, block in enumerate(ours.blocks):
        layer = {f"self_attn.{name}_proj": part for name, part in zip("qkv", block.qkv.weight.chunk(3), strict=True)}
        layer |= {"self_attn.o_proj": block.out.weight, "input_layernorm": block.norm1.weight}
        layer["post_attention_layernorm"] = block.norm2.weight
        state |= {f"layers.{index}.{name}": weight for name, weight in layer.items()}
        theirs.model.layers[index].mlp.load_state_dict(block.ffn.state_dict())
    left = theirs.model.load_state_dict({f"{name}.weight": weight for name, weight in state.items()}, strict=False)
    assert not left.unexpected_keys and all(".mlp." in name for name in left.missing_keys)
    tokens = torch.randint(100, (3, 17))
    logits = theirs(input_ids=tokens[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(ours(tokens), expected)
