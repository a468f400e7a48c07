"""The scripts of experiments/: packages to tokens, a queue of small trainings on the CPU, resumption, the report."""

import dataclasses
import fcntl
import io
import itertools
import json
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import flashmhf

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
        {
            "name": "flash-muon",
            "ffn": "flashmhf",
            "heads": 4,
            "subnets": 2,
            "width": 148,
            "optimizer": "muon",
            "projections": "orthogonal",
        },
        {"name": "swiglu-best", "best_of": ["swiglu-lr0.001", "swiglu-lr0.002"], "grid": {"seed": [1, 2]}},
    ],
}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """train-00.bin and the validation text of two kinds, from one user's JSON lines."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    directory = tmp_path_factory.mktemp("tokens")
    lines = [
        json.dumps({"text": "\n\n".join(SENTENCE.format(10 * i + j) for j in range(10)), "meta": {}})
        for i in range(200)
    ]
    (directory / "pile.jsonl").write_text("\n".join(lines) + "\n")
    vocabulary = {corpus.EOS: 0} | {
        character: 1 + i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(directory / "tokenizer.json"))
    texts = [text for _, text in corpus.read_files([directory / "pile.jsonl"])]
    parts = {
        "val-prose": [texts[0][:400]],
        "val-code": [texts[1][:700]],
        "train-00": texts[3:100],
        "train-01": texts[100:],
    }
    corpus.tokenise(parts, directory / "tokenizer.json", directory / "bins", 1)
    return directory / "bins"


def test_optimizer_of_a_parameter():
    """Muon has the blocks' matrices, AdamW the embedding and the vectors;

    each parameter is in one group, with its rate.
    """
    run = compare.Run("muon", "flashmhf", 148, heads=4, subnets=2, optimizer="muon", rates={"projection": 0.5}, **SMALL)
    model = compare.Model(run, 300)
    groups = compare.make_optimizer(run, model, "cpu").param_groups
    chosen = {id(each): (group["muon"], group["lr"]) for group in groups for each in group["params"]}
    assert len(chosen) == sum(1 for _ in model.parameters())
    block = model.blocks[0]
    assert chosen[id(model.embedding.weight)] == (False, run.learning_rate) == chosen[id(block.norm1.weight)]
    assert chosen[id(block.ffn.k)] == (True, run.learning_rate) and chosen[id(block.ffn.in_proj.weight)] == (
        True,
        run.learning_rate / 2,
    )


def test_muon_by_heads_takes_a_heads_subnetworks_as_one_matrix():
    run = compare.Run("muon", "flashmhf", 148, heads=4, subnets=2, optimizer="muon", stacks="heads", **SMALL)
    model = compare.Model(run, 300)
    optimizer, k = compare.make_optimizer(run, model, "cpu"), model.blocks[0].ffn.k
    whole = torch.nn.Parameter(k.detach().flatten(1, 2).clone())
    reference = flashmhf.Muon(
        [{"params": [whole], "lr": run.learning_rate, "weight_decay": run.weight_decay, "muon": True}]
    )
    for _ in range(2):
        k.grad = torch.randn_like(k)
        whole.grad = k.grad.flatten(1, 2)
        optimizer.step()
        reference.step()
    assert torch.equal(k.flatten(1, 2), whole) and len(optimizer.state) == 1


def run_queue(tokens, out, *arguments):
    queue = out.with_suffix(".json")
    queue.write_text(json.dumps(QUEUE))
    return compare.main(
        list(map(str, (queue, "--tokens", tokens, "--out", out, "--device", "cpu", "--least", 0, *arguments)))
    )


def finished(directory):
    return compare.finished_runs([directory / "runs.jsonl"])


def train(run, tokens, state, pieces=2, **arguments):
    return compare.train(run, compare.Tokens(tokens, "cpu", pieces, **arguments), "cpu", False, state)


def test_prose_is_kept_and_tables_code_and_other_languages_are_not():
    page = (
        f"<head><title>{SENTENCE}</title></head><p>{SENTENCE.format(1)}\n   <b>More</b> of\nit.<pre>{SENTENCE.format(2)}</pre>"
        "<td>0x00 0x01 0x02 0x03 0x04 0x05 0x06 0x07 0x08 0x09 0x0a 0x0b 0x0c 0x0d 0x0e 0x0f 0x10 0x11 0x12 0x13</td>"
        "<p>Die Zahl ist eine von vielen, die ein Schreiber in das Buch dieses Hauses schreibt, und die letzte nicht.</p><p>Short.</p>"
    )
    assert list(corpus.paragraphs(page, True)) == [SENTENCE.format(1) + " More of it."]


SOURCE = "/* Computes the {0}th value of the sequence. */\nint value_{0}(int seed)\n{{\n    return seed * step_{0} + offset_{0};\n}}\n"


def test_source_code_is_kept_and_tables_minified_and_generated_files_are_not():
    code = "\n\n".join(SOURCE.format(name) for name in ("first", "second", "third"))
    assert "\n\n".join(corpus.blocks(code.encode())) == code.replace("\n\n\n", "\n\n").strip("\n")
    for other in (
        "/* DO NOT EDIT */\n" + code,
        code.replace("\n", " "),
        "".join(f"0x{i:04x}, 0x{i:02x},\n" for i in range(200)),
        code[:150],
    ):
        assert corpus.blocks(other.encode()) == []


def add(archive: tarfile.TarFile, name: str, raw: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(raw)
    archive.addfile(member, io.BytesIO(raw))


def test_the_source_archive_in_a_package_is_read():
    inner, outer = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(inner, "w") as archive:
        archive.writestr("b/c.java", "class C {}")
    with tarfile.open(fileobj=outer, mode="w:xz") as archive:
        for name, raw in (
            ("./a.py", b"pass"),
            ("usr/lib/src.zip", inner.getvalue()),
            ("test/other.zip", b"broken"),
            ("lib/a.bin", b"\0"),
        ):
            add(archive, name, raw)
    outer.seek(0)
    assert list(corpus.members("data.tar.xz", outer)) == [("a.py", b"pass"), ("b/c.java", b"class C {}")]


def test_packages_to_pieces_to_tokens(tmp_path, monkeypatch):
    """Any number of processes gives the same tokens, pieces can come one by one, and no paragraph is in the corpus
    twice.
    """
    manifest = tmp_path / "corpus.json"
    manifest.write_text(json.dumps({"packages": [{"name": "letters", "from": "sdist"}], "pieces": 3}))
    sizes = {"VOCABULARY": 300, "SAMPLE": 1, "ARCHIVE": 4000, "VALIDATION": {"prose": 10, "code": 10}}
    for name, value in {"MANIFEST": manifest, **sizes}.items():
        monkeypatch.setattr(corpus, name, value)
    words = [f"{a}{b}" for a in "abcdefghijk" for b in "lmnopqrstuv"]
    with tarfile.open(tmp_path / "letters-1.0.tar.gz", "w:gz") as archive:
        for i, word in enumerate(words):
            prose = f"{SENTENCE.format(word)}\n\n{SENTENCE.format(words[i // 2]).upper()}\n\n{SENTENCE.format(word)}"
            add(archive, f"letters-1.0/{word}.txt", prose.encode())
            for name in (f"{word}.c", "copy.h"):
                add(archive, f"letters-1.0/{word}/{name}", SOURCE.format(word).encode() * 2)
    text = tmp_path / "text"
    corpus.build(tmp_path, text, 1, True)
    built = json.loads(manifest.read_text())
    assert built["text"]["documents"] == 2 * len(words) and min(built["text"]["characters"].values()) > 10_000
    corpus.build(tmp_path, tmp_path / "again", 2, False)
    manifest.write_text(json.dumps(built | {"text": {}}))
    with pytest.raises(SystemExit, match="another corpus"):
        corpus.build(tmp_path, tmp_path / "other", 1, False)

    documents = {path.relative_to(text): list(corpus.read_piece([path])) for path in text.glob("*/*.bz2")}
    found = [
        paragraph.lower()
        for texts in documents.values()
        for each in texts
        for paragraph in each.split("\n\n")
        if "clerk" in each
    ]
    assert sorted(found) == sorted(SENTENCE.format(word).lower() for word in words)
    assert {path.parent.name for path in documents} == {"00", "01", "02"}
    first = tmp_path / "first"
    corpus.tokenise_pieces(text, first, 1, True)
    (tmp_path / "carried").mkdir()
    for piece in ("00", "01", "02"):  # pieces that come one by one, and go
        (text / piece).rename(tmp_path / "carried" / piece)
        result = corpus.tokenise_pieces(tmp_path / "carried", tmp_path / "second", 2, False)
        (tmp_path / "carried" / piece).rename(text / piece)
    recorded = json.loads(manifest.read_text())["tokens"]
    assert result["parts"] == recorded and set(recorded) == {
        "val-prose",
        "val-code",
        "train-00",
        "train-01",
        "train-02",
    }
    ids = np.fromfile(first / "train-01.bin", np.uint16)
    assert (ids == 0).sum() == sum(len(texts) for path, texts in documents.items() if path.parent.name == "01")
    manifest.write_text(json.dumps(built | {"tokens": recorded | {"train-02": {}}}))
    with pytest.raises(SystemExit, match="not the tokens of corpus.json: train-02"):
        corpus.tokenise_pieces(text, first, 1, False)


@pytest.mark.slow
def test_a_queue_is_trained_by_two_processes_taken_up_again_and_reported(tokens, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(EXPERIMENTS.parent))
    out, collected = tmp_path / "runs", tmp_path / "collected.jsonl"
    assert run_queue(tokens, out, "--commit", "abc", "--workers", "2") == 0
    trained = sorted(
        line.partition(":")[0] for line in capfd.readouterr().out.splitlines() if "validation_loss" in line
    )
    assert trained == [
        "flash",
        "flash-muon",
        "swiglu-best-seed1",
        "swiglu-best-seed2",
        "swiglu-lr0.001",
        "swiglu-lr0.002",
    ]
    assert set(finished(out)) == set(trained) and not list(out.glob("*.state"))
    assert run_queue(tokens, tmp_path / "other", "--done", out / "runs.jsonl") == 0 and capfd.readouterr().out == ""
    assert set(report.collect([out / "runs.jsonl"], collected)) == set(finished(out))
    assert compare.finished_runs([collected]) == finished(out)

    line = finished(out)["flash"]
    assert line["configuration"]["heads"] == 4 and line["backend"] == "eager" and line["commit"] == "abc"
    assert line["versions"]["torch"] == torch.__version__ and line["corpus"]["pieces"] == 2
    assert (
        len(line["losses"]) == 1
        and line["validation_loss"] < line["losses"][0] + 1
        and set(line["validation"]) == {"prose", "code"}
    )
    best = min(("swiglu-lr0.001", "swiglu-lr0.002"), key=lambda name: finished(out)[name]["validation_loss"])
    taken = finished(out)["swiglu-best-seed1"]["configuration"]
    assert taken["learning_rate"] == finished(out)[best]["configuration"]["learning_rate"] and taken["seed"] == 1
    rows = report.rows([collected])
    assert sorted(len(row.losses) for row in rows) == [1, 1, 1, 3]
    older = {key: value for key, value in line["configuration"].items() if key not in ("optimizer", "projections")} | {
        "seed": 7
    }
    # recorded before these fields were added
    compare.write_lines(collected, [line | {"run": "older", "configuration": older}])
    assert sorted(len(row.losses) for row in report.rows([collected])) == [1, 1, 2, 3]
    text = report.table(rows, None)
    assert all(text.count(f"| {row.name} | tiny |") == 1 for row in rows) and "Standard deviation between seeds" in text
    report.plot(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_a_held_run_is_left_to_its_process_and_a_late_one_is_not_begun(tokens, tmp_path, capsys):
    out = tmp_path / "runs"
    (out / "locks").mkdir(parents=True)
    with (out / "locks" / "flash").open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        assert run_queue(tokens, out) == 0
    assert len(finished(out)) == 5 and "flash" not in finished(out)
    assert run_queue(tokens, out, "--minutes", "0") == 0
    assert "flash: no time left" in capsys.readouterr().out and "flash" not in finished(out)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_goes_on_where_its_minutes_were_over_with_the_same_losses(tokens, tmp_path, monkeypatch, optimizer):
    run = compare.Run(
        name="a", ffn="flashmhf", heads=4, subnets=2, width=148, optimizer=optimizer, **SMALL | {"steps": 12}
    )
    for name, value in {"CHECKED": 5, "EVALUATED": 3 * 4 * 16, "SAMPLE": 4, "SAVED": 0}.items():
        monkeypatch.setattr(compare, name, value)
    state = tmp_path / "a.state"
    whole = train(run, tokens, state)
    assert [each["tokens"] for each in whole["evaluations"]] == [192, 384, 576] and state.exists()
    state.unlink()
    for deadline in (0.0, 0.0):
        with pytest.raises(compare.TimeUpError):
            train(run, tokens, state, deadline=deadline)
    assert torch.load(state)["progress"]["step"] == 10
    with pytest.raises(ValueError, match="other settings: seed"):
        train(dataclasses.replace(run, seed=1), tokens, state)
    parts = train(run, tokens, state)
    for name in ("losses", "norms", "evaluations", "validation_loss", "validation"):
        assert parts[name] == whole[name], name


def test_the_long_table_keeps_optimizers_apart_and_prefers_seeds():
    """One run of a setting may be lucky, so the setting with the most seeds stands first;

    AdamW's losses are no setting of Muon's.
    """

    def row(name: str, optimizer: str, rate: float, losses: dict[int, float]) -> report.Row:
        run = compare.Run(
            name=name,
            ffn="swiglu",
            width=192,
            optimizer=optimizer,
            **SMALL | {"learning_rate": rate, "weight_decay": 0.1},
        )
        record = {
            "evaluations": [],
            "tokens_per_second": 2_000_000,
            "device": "NVIDIA H100 80GB HBM3",
            "peak_memory": 2**30,
        }
        return report.Row(name, {**dataclasses.asdict(run), "min_rate": 0.0}, 1000, losses, [record])

    found = [
        row("one", "muon", 1e-3, {0: 1.0}),
        row("two", "muon", 2e-3, {0: 1.1, 1: 1.3}),
        row("three", "adamw", 3e-3, {0: 2.0}),
    ]
    lines = report.long_block(found).splitlines()[2:]
    assert ["AdamW" in line for line in lines] == [False, True] and "| 0.003 → 0 | 2.000 | – | 1 |" in lines[1]
    assert "| 0.002 → 0 | 1.200 | 0.001 → 0: 1.000 | 2 | 2.00 (H100) | 1.0 |" in lines[0]


def test_the_lines_of_the_chart_compare_equal_seeds():
    """Another seed has other batches, and its noise would be drawn as a difference of the networks."""

    def row(losses: dict[int, float]) -> report.Row:
        validation = {"validation_loss": 1.5, "validation": {"prose": 1.0, "code": 2.0}}
        records = [
            {
                "configuration": {"seed": seed},
                "evaluations": [{"tokens": 64, "prose": loss, "code": loss}],
                **validation,
            }
            for seed, loss in losses.items()
        ]
        return report.Row("a", {}, 1000, losses, records)

    ours, theirs = row({1: 2.0, 0: 1.25}), row({0: 1.0, 1: 1.5, 2: 7.0})
    assert report.differences_on_the_way(ours, theirs) == {64: 0.375}


def test_every_window_is_seen_once_a_pass(tmp_path):
    """A pass takes the pieces in their order, and another start takes the same batches from there on."""
    (tmp_path / "tokens.json").write_text("{}")
    for index, (low, high) in enumerate(((0, 1000), (1000, 2500))):
        np.arange(low, high, dtype=np.uint16).tofile(tmp_path / f"train-{index:02}.bin")
    loaded = compare.Tokens(tmp_path, "cpu", 2)
    run = compare.Run(name="a", ffn="swiglu", width=192, **SMALL | {"batch": 2, "context": 64})
    batches = list(itertools.islice(loaded.batches(run, 0), 30))
    firsts = [int(window[0]) for batch in batches for window in batch]
    assert all(
        torch.equal(window, torch.arange(start, start + 65))
        for window, start in zip(torch.cat(batches), firsts, strict=True)
    )
    passes = [sorted(firsts[:14]), sorted(firsts[14:36]), sorted(firsts[36:50])]  # 7 batches of piece 0, 11 of piece 1
    for each, low, high in zip(passes, (0, 1000, 0), (1000, 2500, 1000), strict=True):
        assert low <= each[0] and each[-1] < high and {b - a for a, b in itertools.pairwise(each)} <= {64, 128}
    assert passes[0][0] % 64 != passes[2][0] % 64 and firsts[:14] != passes[0]
    later = list(itertools.islice(loaded.batches(run, 9), 21))
    assert all(torch.equal(one, two) for one, two in zip(later, batches[9:], strict=True))


def test_a_missing_piece_is_waited_for_while_the_clock_of_a_run_stands(tokens, tmp_path, monkeypatch):
    with pytest.raises(compare.TimeUpError):
        compare.Tokens(tokens, "cpu", 3, deadline=0.0).piece(2)
    folder = shutil.copytree(tokens, tmp_path / "tokens")
    (folder / "train-01.bin").rename(folder / "later")
    now = [100.0]

    def sleep(seconds):
        now[0] += seconds
        (folder / "later").rename(folder / "train-01.bin")

    monkeypatch.setattr(compare, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: now[0]))
    some = compare.Tokens(folder, "cpu", 2)
    assert len(some.piece(1)) > 0 and now[0] > 100.0 and some.clock() == 100.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"non_embedding": 100_000}, "non-embedding parameters"),
        ({"rates": {"gate": 1.0}}, "unknown roles: gate"),
        ({"ffn": "mlp"}, "ffn is 'mlp'"),
        ({"optimizer": "sgd"}, "optimizer is 'sgd'"),
        (
            {"gates": "sigmoid"},
            "gates is 'sigmoid'; supported: normalised, sigmoid, the second for ffn 'flashmhf' only",
        ),
        ({"stacks": "heads"}, "stacks is 'heads'; supported: subnets, heads, the second for flashmhf with muon only"),
        ({"steps": 100_000}, "a: steps is 100000, .* at most 4"),
    ],
)
def test_unequal_sizes_and_unknown_settings_are_refused(tokens, tmp_path, change, message):
    run = compare.Run(**{"name": "a", "ffn": "swiglu", "width": 192, **SMALL, **change})
    with pytest.raises(ValueError, match=message):
        train(run, tokens, tmp_path / "a.state")


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


@torch.no_grad()
def test_sigmoid_gates():
    """With a router of zero they are the paper's gates; with any, R = 2 sigma(P) / E."""
    like = {"ffn": "flashmhf", "heads": 2, "width": 64, "subnets": 2, **SMALL}
    paper, ours = (
        compare.feed_forward(compare.Run("a", gates=gates, router_std=0.0, **like))
        for gates in ("normalised", "sigmoid")
    )
    ours.load_state_dict(paper.state_dict())
    x = torch.randn(5, 64)
    torch.testing.assert_close(ours(x), paper(x))
    ours.router.normal_()
    q = ours.split_heads(x)
    r = torch.einsum("thd,hde->the", q, ours.router).sigmoid()
    torch.testing.assert_close(ours(x), ours.join_heads(flashmhf.flash_mhf(q, ours.k, ours.u, ours.v, r)))


@pytest.mark.parametrize("ffn", ["swiglu", "flashmhf"])
def test_the_model_is_that_of_flashmhf_lm(ffn):
    """Equal loss with equal weights: the lean loop trains the network that flashmhf.models has."""
    pytest.importorskip("transformers")
    from flashmhf.models.configuration import FlashMHFConfig
    from flashmhf.models.modeling import FlashMHFForCausalLM

    sizes = {"heads": 4, "subnets": 2, "width": 148} if ffn == "flashmhf" else {"width": 192}
    run = compare.Run(name="a", ffn=ffn, **sizes, **SMALL)
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
        state |= {
            f"{prefix}self_attn.{name}_proj.weight": part
            for name, part in zip("qkv", block.qkv.weight.chunk(3), strict=True)
        }
        state |= {
            f"{prefix}self_attn.o_proj.weight": block.out.weight,
            f"{prefix}input_layernorm.weight": block.norm1.weight,
        }
        state |= {f"{prefix}post_attention_layernorm.weight": block.norm2.weight}
        state |= {f"{prefix}mlp.{name}": part for name, part in block.ffn.state_dict().items()}
    theirs.load_state_dict(state)
    tokens = torch.randint(100, (3, 17))
    logits = theirs(input_ids=tokens[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(ours(tokens), expected)
