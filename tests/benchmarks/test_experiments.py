"""The scripts of experiments/: text to tokens, a queue of small trainings on the CPU, resumption, the report."""

import dataclasses
import fcntl
import json
import lzma
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
sys.path.insert(0, str(EXPERIMENTS))
pytest.importorskip("tokenizers")

import compare  # noqa: E402
import corpus  # noqa: E402
import report  # noqa: E402

SENTENCE = "The number {} is one of the many that a counting clerk writes into the ledger of this office, and it is not the last of them."
SMALL = {
    "size": "tiny", "non_embedding": 106_800, "d_model": 64, "layers": 2, "attention_heads": 2,
    "steps": 5, "batch": 4, "micro_batch": 2, "context": 16, "warmup": 2,
}  # fmt: skip
QUEUE = {
    "defaults": SMALL,
    "runs": [
        {"name": "swiglu", "ffn": "swiglu", "width": 192, "grid": {"learning_rate": [1e-3, 2e-3]}},
        {"name": "flash", "ffn": "flashmhf", "heads": 4, "subnets": 2, "width": 148, "rates": {"projection": 0.3}},
        {"name": "flash-muon", "ffn": "flashmhf", "heads": 4, "subnets": 2, "width": 148, "optimizer": "muon", "projections": "orthogonal"},
        {"name": "swiglu-best", "best_of": ["swiglu-lr0.001", "swiglu-lr0.002"], "grid": {"seed": [1, 2]}},
    ],
}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """train.bin and val.bin of a hundred documents of one user's JSON lines."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    directory = tmp_path_factory.mktemp("tokens")
    lines = [json.dumps({"text": "\n\n".join(SENTENCE.format(10 * i + j) for j in range(10)), "meta": {}}) for i in range(200)]
    (directory / "pile.jsonl").write_text("\n".join(lines) + "\n")
    vocabulary = {corpus.EOS: 0} | {character: 1 + i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(directory / "tokenizer.json"))
    corpus.tokenise(corpus.read_files([directory / "pile.jsonl"]), directory / "tokenizer.json", directory / "bins", 1)
    return directory / "bins"


@pytest.fixture
def queue(tmp_path):
    (tmp_path / "queue.json").write_text(json.dumps(QUEUE))
    return tmp_path / "queue.json"


def test_optimizer_of_a_parameter():
    """Muon has the blocks' matrices, AdamW the embedding and the vectors; each parameter is in one group, with its rate."""
    run = compare.Run("muon", "flashmhf", 148, heads=4, subnets=2, optimizer="muon", rates={"projection": 0.5}, **SMALL)
    model = compare.Model(run, 300)
    chosen = {
        id(each): (group["muon"], group["lr"])
        for group in compare.make_optimizer(run, model, "cpu").param_groups
        for each in group["params"]
    }
    assert len(chosen) == sum(1 for _ in model.parameters())
    block = model.blocks[0]
    assert chosen[id(model.embedding.weight)] == (False, run.learning_rate) == chosen[id(block.norm1.weight)]
    assert chosen[id(block.ffn.k)] == (True, run.learning_rate) and chosen[id(block.ffn.in_proj.weight)] == (True, run.learning_rate / 2)
    with pytest.raises(ValueError, match="optimizer is 'sgd'"):
        compare.make_optimizer(dataclasses.replace(run, optimizer="sgd"), model, "cpu")


def run_queue(queue, tokens, out, *arguments):
    return compare.main(list(map(str, (queue, "--tokens", tokens, "--out", out, "--device", "cpu", *arguments))))


def names(directory):
    return {path.stem for path in directory.glob("*.jsonl")}


def test_prose_is_kept_and_tables_code_and_other_languages_are_not():
    page = (
        f"<head><title>{SENTENCE}</title></head><p>{SENTENCE.format(1)}\n   <b>More</b> of\nit.<pre>{SENTENCE.format(2)}</pre>"
        "<td>0x00 0x01 0x02 0x03 0x04 0x05 0x06 0x07 0x08 0x09 0x0a 0x0b 0x0c 0x0d 0x0e 0x0f 0x10 0x11 0x12 0x13</td>"
        "<p>Die Zahl ist eine von vielen, die ein Schreiber in das Buch dieses Hauses schreibt, und die letzte nicht.</p><p>Short.</p>"
    )
    assert list(corpus.paragraphs(page, True)) == [SENTENCE.format(1) + " More of it."]


def test_a_dictionary_without_blank_lines_is_cut_at_its_entries():
    text = "\n".join(f"word{i}\n    {SENTENCE.format(i)}" for i in range(200))
    found = list(corpus.paragraphs(text, False))
    assert len(found) > 5 and max(map(len, found)) < 4000 and all(part.startswith("word") for part in found)


def test_packages_to_text_to_tokens(tmp_path, monkeypatch):
    """The archive gives the same tokens with any number of processes, and no paragraph is in it twice."""
    import tarfile

    manifest = tmp_path / "corpus.json"
    manifest.write_text(json.dumps({"packages": [{"name": "letters", "from": "pypi"}]}))
    monkeypatch.setattr(corpus, "MANIFEST", manifest)
    monkeypatch.setattr(corpus, "VOCABULARY", 300)
    with tarfile.open(tmp_path / "letters-1.0.tar.gz", "w:gz") as archive:
        for i in range(120):
            path = tmp_path / f"{i}.txt"
            path.write_text(f"{SENTENCE.format(i)}\n\n{SENTENCE.format(i // 2).upper()}\n\n{SENTENCE.format(i)}")
            archive.add(path, f"letters-1.0/{i}.txt")
    text = tmp_path / "text"
    corpus.build(tmp_path, text, 1, 1 << 30, True)
    assert json.loads(manifest.read_text())["text"]["documents"] == len(list(corpus.read_archive(text)))
    corpus.build(tmp_path, tmp_path / "again", 1, 1 << 30, False)
    with pytest.raises(SystemExit, match="another corpus"):
        corpus.build(tmp_path, tmp_path / "half", 1, 8000, False)
    half = list(corpus.read_archive(tmp_path / "half"))
    assert half and set(half) < set(corpus.read_archive(text))
    records = [json.loads(line) for path in text.glob("*.xz") for line in lzma.open(path)]
    found = [paragraph.lower() for record in records for paragraph in record["text"].split("\n\n")]
    assert sorted(found) == sorted(SENTENCE.format(i).lower() for i in range(120))
    one, two = (corpus.tokenise(corpus.read_archive(text), text / "tokenizer.json", tmp_path / f"bins{n}", n) for n in (1, 2))
    assert one == two and one["train"]["tokens"] > 10 * one["val"]["tokens"] > 0
    ids = np.fromfile(tmp_path / "bins1" / "val.bin", np.uint16)
    assert (ids == 0).sum() == sum(corpus.is_validation(record["name"]) for record in records)


@pytest.mark.slow
def test_a_queue_is_trained_resumed_and_reported(queue, tokens, tmp_path, capsys):
    out, together, collected = tmp_path / "runs", tmp_path / "all.jsonl", tmp_path / "collected"
    assert run_queue(queue, tokens, out, "--append", together, "--commit", "abc") == 0
    assert names(out) == {"swiglu-lr0.001", "swiglu-lr0.002", "flash", "flash-muon", "swiglu-best-seed1", "swiglu-best-seed2"}
    capsys.readouterr()
    assert run_queue(queue, tokens, tmp_path / "other", "--done", out) == 0 and capsys.readouterr().out == ""
    assert set(report.collect([together], collected)) == names(out)
    assert all((collected / path.name).read_text() == path.read_text() for path in out.glob("*.jsonl"))
    (out / "flash.jsonl").unlink()
    assert run_queue(queue, tokens, out) == 0 and capsys.readouterr().out.count("validation_loss") == 1

    head, *steps, last = compare.read_run(collected / "flash.jsonl")
    assert head["configuration"]["heads"] == 4 and head["backend"] == "eager" and head["commit"] == "abc"
    assert head["versions"]["torch"] == torch.__version__
    assert [step["step"] for step in steps] == [5] and last["validation_loss"] < steps[0]["loss"] + 1
    best = min(("swiglu-lr0.001", "swiglu-lr0.002"), key=lambda name: compare.read_run(out / f"{name}.jsonl")[-1]["validation_loss"])
    taken = compare.read_run(out / "swiglu-best-seed1.jsonl")[0]["configuration"]
    assert taken["learning_rate"] == compare.read_run(out / f"{best}.jsonl")[0]["configuration"]["learning_rate"] and taken["seed"] == 1
    rows = report.rows([collected])
    assert sorted(len(row.losses) for row in rows) == [1, 1, 1, 3]
    older = dict(
        head, configuration={key: value for key, value in head["configuration"].items() if key not in ("optimizer", "projections")}
    )
    older["configuration"]["seed"] = 7  # a run recorded before these fields were added joins its row
    (collected / "older.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (older, *steps, last)))
    assert sorted(len(row.losses) for row in report.rows([collected])) == [1, 1, 2, 3]
    text = report.table(rows, None)
    assert all(text.count(f"| {row.name} | tiny |") == 1 for row in rows) and "Standard deviation between seeds" in text
    report.plot(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


@pytest.mark.slow
def test_two_processes_share_a_queue(queue, tokens, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(EXPERIMENTS.parent))
    assert run_queue(queue, tokens, tmp_path / "runs", "--append", tmp_path / "all.jsonl", "--workers", "2") == 0
    trained = [line.partition(":")[0] for line in capfd.readouterr().out.splitlines() if "validation_loss" in line]
    assert set(trained) == names(tmp_path / "runs") >= {"swiglu-lr0.001", "swiglu-lr0.002", "flash"} and len(set(trained)) == len(trained)
    assert set(report.collect([tmp_path / "all.jsonl"], tmp_path / "collected")) == set(trained)


def test_a_held_run_is_left_to_its_process_and_a_late_one_is_not_begun(queue, tokens, tmp_path, capsys):
    out = tmp_path / "runs"
    (out / "locks").mkdir(parents=True)
    with (out / "locks" / "flash").open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        assert run_queue(queue, tokens, out) == 0
    assert len(names(out)) == 5 and "flash" not in names(out)
    assert run_queue(queue, tokens, out, "--minutes", "0") == 0
    assert "flash: no time left" in capsys.readouterr().out and "flash" not in names(out)


def test_a_run_past_the_minutes_is_dropped(tokens):
    run = compare.Run(name="a", ffn="swiglu", width=192, **SMALL)
    with pytest.raises(compare.TimeUpError):
        compare.train(run, compare.Tokens.load(tokens, "cpu"), "cpu", False, 0.0)


def test_the_same_seed_gives_the_same_run(tokens):
    entry = compare.Run(name="a", ffn="flashmhf", heads=4, subnets=2, width=148, **SMALL)
    loaded = compare.Tokens.load(tokens, "cpu")
    one, two = (compare.train(entry, loaded, "cpu", False, float("inf")) for _ in range(2))
    assert one["losses"] == two["losses"] and one["validation_loss"] == two["validation_loss"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"non_embedding": 100_000}, "non-embedding parameters"),
        ({"rates": {"gate": 1.0}}, "unknown roles: gate"),
        ({"ffn": "mlp"}, "ffn is 'mlp'"),
    ],
)
def test_unequal_sizes_and_unknown_settings_are_refused(tokens, change, message):
    run = compare.Run(**{"name": "a", "ffn": "swiglu", "width": 192, **SMALL, **change})
    with pytest.raises(ValueError, match=message):
        compare.train(run, compare.Tokens.load(tokens, "cpu"), "cpu", False, float("inf"))


@pytest.mark.parametrize("entry", [{"name": "a", "wide": 1}, {"name": "a", "best_of": ["b"]}])
def test_a_queue_with_unknown_settings_or_names_is_refused(tmp_path, entry):
    (tmp_path / "queue.json").write_text(json.dumps({"runs": [entry]}))
    with pytest.raises(ValueError, match="wide|no run of the queue: b"):
        compare.read_queue(tmp_path / "queue.json")


@pytest.mark.parametrize("path", sorted(EXPERIMENTS.glob("queue_*.json")), ids=lambda path: path.stem)
def test_every_run_of_the_committed_queues_has_its_size(path):
    complete = {}
    for entry in compare.read_queue(path):
        settings = complete[entry.best_of[0]] | entry.settings if entry.best_of else entry.settings
        complete[entry.name] = settings
        run = compare.Run(**settings, name=entry.name)
        with torch.device("meta"):
            model = compare.Model(run, 16384)
        compare.check_size(run, model)
        compare.optimizer_groups(run, model)


@pytest.mark.parametrize("ffn", ["swiglu", "flashmhf"])
def test_the_model_is_that_of_flashmhf_lm(ffn):
    """Equal loss with equal weights: the lean loop trains the network that flashmhf.models has."""
    pytest.importorskip("transformers")
    from flashmhf.models.configuration import FlashMHFConfig
    from flashmhf.models.modeling import FlashMHFForCausalLM

    sizes = {"heads": 4, "subnets": 2, "width": 148} if ffn == "flashmhf" else {"width": 192}
    run = compare.Run(name="a", ffn=ffn, **sizes, **SMALL)
    torch.manual_seed(0)
    ours = compare.Model(run, 100)
    config = FlashMHFConfig(
        ffn_type=ffn, vocab_size=100, hidden_size=64, intermediate_size=run.width, num_hidden_layers=2, num_attention_heads=2,
        ffn_num_heads=run.heads, ffn_num_subnets=run.subnets, rms_norm_eps=1e-5, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )  # fmt: skip
    theirs = FlashMHFForCausalLM(config)
    state = {
        "model.embed_tokens.weight": ours.embedding.weight,
        "lm_head.weight": ours.embedding.weight,
        "model.norm.weight": ours.head.norm.weight,
    }
    for index, block in enumerate(ours.blocks):
        prefix = f"model.layers.{index}."
        state |= {f"{prefix}self_attn.{name}_proj.weight": part for name, part in zip("qkv", block.qkv.weight.chunk(3), strict=True)}
        state |= {f"{prefix}self_attn.o_proj.weight": block.out.weight, f"{prefix}input_layernorm.weight": block.norm1.weight}
        state |= {f"{prefix}post_attention_layernorm.weight": block.norm2.weight}
        state |= {f"{prefix}mlp.{name}": part for name, part in block.ffn.state_dict().items()}
    theirs.load_state_dict(state)
    tokens = torch.randint(100, (3, 17))
    logits = theirs(input_ids=tokens[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(ours(tokens), expected)
