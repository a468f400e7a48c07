"""The sub-commands ``train``, ``eval``, ``generate``, ``quantize`` and ``serve``. transformers is imported only when one of them runs."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

from flashmhf import extras

from .arguments import positive_integer


def register(subparsers) -> None:
    """Adds the sub-commands; each parser's ``run`` default is a function of the parsed arguments that returns the exit status."""
    _add_train(subparsers)
    _add_eval(subparsers)
    _add_generate(subparsers)
    _add_quantize(subparsers)
    _add_serve(subparsers)


def _command(action: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """``action`` with errors as one line on stderr and status 2; after SIGINT 130, after SIGTERM 143."""

    def run(args: argparse.Namespace) -> int:
        try:
            return action(args)
        except ModuleNotFoundError as error:
            message = extras.advice("this command", error.name) if error.name else str(error)  # Python's own names the module
            if message is None:
                raise
        except (ValueError, OSError, NotImplementedError, KeyError) as error:
            message = _message(error)
        except RuntimeError as error:
            if type(error).__name__ not in ("TrainingError", "OutOfMemoryError"):
                raise
            message = _message(error)
        except KeyboardInterrupt as stopped:
            print(f"flashmhf: {str(stopped) or 'stopped'}{_continuation(args)}", file=sys.stderr)
            return 128 + getattr(stopped, "signum", signal.SIGINT)
        print(f"flashmhf: error: {message}", file=sys.stderr)
        return 2

    return run


def _message(error: Exception) -> str:
    """One line; options that the error names are written as flags."""
    if hasattr(error, "template"):
        text = error.message(_flag)
    else:
        text = str(error.args[0]) if isinstance(error, KeyError) else str(error)
    return " ".join(text.split())


def _flag(option: str) -> str:
    """The flag of an option of flashmhf_recipes.training.Options."""
    return {"arguments": "--set", "model": "--model-set"}.get(option, "--" + option.replace("_", "-"))


def _continuation(args: argparse.Namespace) -> str:
    """How to go on, where a run has begun."""
    output = getattr(args, "output", None)
    if output is None or not (Path(output) / "run.json").exists():
        return ""
    return f"; continue with: flashmhf train --resume --output {shlex.quote(output)}"


def _assignment(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


PRESETS_AND_EXAMPLES = """\
presets: FFN-SCALE, with FFN one of swiglu, mh_ffn, pkv, dense_moe, flashmhf; and flashmhf-SCALE-dh64, flashmhf-SCALE-dh256 of the paper's
scales with other head dimensions; and the official repository's configurations by the names of their files, such as
configure-2-mhffnmoe-TriDao-350M (flashmhf.models.presets.OFFICIAL). A scale sets the defaults:

  scale  d_model  vocabulary  length  batch    steps  learning rate
  128m       768      50,432   4,096     64  245,000         0.003
  370m     1,024      50,432   4,096     64  245,000        0.0015
  1.3b     2,048      50,432   4,096     64  409,000         0.001
  tiny        64         512     128      8      200         0.003

The paper's settings are the defaults but for two of ours (docs/quality.md): the initialisation and the learning rate of FlashMHF's
projections. --model-set ffn_init=official --no-param-groups restores the paper's.

examples:
  flashmhf train --output run --preset tiny --data corpus/ --device cpu
  flashmhf train --output run --preset flashmhf-128m --data corpus/ --eval-fraction 0.01 --compile
  flashmhf train --output run --resume                      # after SIGTERM, Ctrl-C or a crash
  flashmhf train --output run --resume --steps 300000       # longer; the schedule then ends there
  flashmhf train --output tuned --init-from run --data other/ --steps 1000 --learning-rate 1e-4
  flashmhf train --output second --preset swiglu-128m --tokens run --set report_to=wandb
  torchrun --nproc_per_node 8 -m flashmhf_recipes train --output run --preset flashmhf-1.3b --data corpus/ --compile
  torchrun --nproc_per_node 8 -m flashmhf_recipes train --output run --preset flashmhf-1.3b --data corpus/ --compile --tp 2 --dp-shard 4

exit status: 0; 2 for an error; 130 after SIGINT and 143 after SIGTERM, with the step finished and saved (a second signal ends at once).
"""


def _add_train(subparsers) -> None:
    parser = subparsers.add_parser(
        "train",
        help="train one of the paper's language models",
        description="Train one of the paper's language models on local text or a data set. Values left out are the preset's.",
        epilog=PRESETS_AND_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=_command(_train), command="train", takes=("device", "steps"))
    add = parser.add_argument
    add("--output", required=True, metavar="DIR", help="the run's directory: tokens, checkpoints, metrics, model")
    add("--resume", action="store_true", help="continue the run in DIR from its last checkpoint, with its own options")
    model = parser.add_argument_group("model").add_argument
    model("--preset", help="a preset below (flashmhf-128m), or a scale: 128m, 370m, 1.3b, tiny")
    model("--ffn", help="swiglu, mh_ffn, pkv, dense_moe or flashmhf, at the preset's scale")
    model("--init-from", metavar="DIR", help="start from a trained model instead: run, checkpoint, saved or official model, or a name")
    model("--model-set", dest="model", type=_assignment, action="append", metavar="NAME=VALUE", help="a FlashMHFConfig setting")
    text = parser.add_argument_group("data").add_argument
    text("--data", nargs="+", metavar="PATH", help="text, JSON-lines, CSV, Parquet and Arrow files, or directories of them")
    text("--dataset", metavar="NAME[:CONFIG]", help="a data set of the datasets library, streamed")
    text("--tokens", metavar="RUN", help="the tokens and the tokenizer of another run")
    text("--split", help="its split (train)")
    text("--text-field", help="field or column that holds the text (text)")
    text("--tokenizer", metavar="PATH", help="tokenizer directory, file or name; without it one is trained on the data")
    text("--chat-template", metavar="FILE", help="Jinja template that the tokenizer gets for chats, or 'plain' (none)")
    text("--vocab-size", type=int, help="size of the vocabulary (the preset's)")
    text("--length", type=int, help="tokens in a sequence (the preset's)")
    text("--eval-fraction", type=float, help="share of the tokens held out at the end (0)")
    optimiser = parser.add_argument_group("optimisation").add_argument
    optimiser("--batch", type=int, help="sequences a step over all devices (the preset's)")
    optimiser("--micro-batch", type=int, help="at most so many of them at once on a device (8); the rest is accumulated")
    optimiser("--steps", type=int, default=argparse.SUPPRESS, help="steps of the run (the preset's); with --resume a new length")
    optimiser("--learning-rate", type=float, help="the peak (the preset's)")
    optimiser("--min-learning-rate", type=float, help="where the cosine ends (1e-5)")
    optimiser("--warmup", type=float, help="share of the steps (0.015), or steps from 1 on")
    optimiser("--optimizer", choices=("adamw", "muon"), help="muon: Muon for the blocks' matrices, AdamW for the rest (adamw)")
    optimiser("--weight-decay", type=float, help="of the optimizer (0.1)")
    optimiser("--betas", type=float, nargs=2, metavar="BETA", help="of AdamW (0.9 0.95)")
    optimiser("--max-grad-norm", type=float, help="gradients are clipped to it (1.0)")
    optimiser(
        "--param-groups",
        action=argparse.BooleanOptionalAction,
        help="FlashMHF's projections learn at 0.3 of the learning rate (ours; --no-param-groups is the paper's)",
    )
    optimiser("--seed", type=int, help="of weights and batches (0)")
    machine = parser.add_argument_group("machine").add_argument
    machine("--precision", choices=("auto", "bf16", "fp32"), help="auto: bf16 autocast on GPUs")
    machine("--device", choices=("auto", "cpu", "cuda"), default=argparse.SUPPRESS, help="auto: a CUDA GPU where there is one")
    machine("--tp", type=positive_integer, metavar="N", help="processes that share the heads of a sequence (1)")
    machine("--dp-shard", type=positive_integer, metavar="N", help="processes that share the parameters: FSDP2 (1; with --tp all groups)")
    machine("--compile", action="store_true", default=None, help="torch.compile the model")
    machine("--checkpointing", action="store_true", default=None, help="recompute blocks in the backward pass")
    machine("--save-every", type=int, metavar="STEPS", help="steps between checkpoints (1000)")
    machine("--keep", type=int, metavar="N", help="checkpoints kept (2)")
    machine("--log-every", type=int, metavar="STEPS", help="steps between rows of metrics.jsonl (10)")
    machine("--eval-every", type=int, metavar="STEPS", help="steps between held-out losses (1000)")
    machine(
        "--set", dest="arguments", type=_assignment, action="append", metavar="NAME=VALUE", help="a transformers TrainingArguments setting"
    )


def _train(args: argparse.Namespace) -> int:
    from transformers.utils import logging

    from . import training

    logging.disable_progress_bar()
    given = {entry.name: getattr(args, entry.name) for entry in fields(training.Options) if getattr(args, entry.name, None) is not None}
    if args.resume:
        changeable = {name: given.pop(name) for name in ("steps", "tp", "dp_shard") if name in given}
        extra = sorted(set(given) - {"output"})
        if extra:
            raise ValueError(
                f"--resume takes the run's own options but --steps, --tp and --dp-shard; leave out: {', '.join(map(_flag, extra))}"
            )
        result = training.resume(args.output, **changeable)
    else:
        for name in ("model", "arguments"):
            if name in given:
                given[name] = dict(given[name])
        result = training.start(training.Options(**given))
    held_out = "" if result.eval_loss is None else f", held out {result.eval_loss:.4f}"
    if training.first_process():
        print(f"{result.steps} steps, loss {result.loss:.4f}{held_out} (nats a token); model and loss.png in {result.output}")
    return 0


def _add_location(parser) -> None:
    parser.add_argument("--model", required=True, metavar="DIR", help="training run, checkpoint, saved or official model, or a name")
    parser.add_argument("--tokenizer", metavar="PATH", help="where the model's directory has none")
    parser.add_argument("--device", default=argparse.SUPPRESS, help="auto (a CUDA GPU where there is one), cpu, cuda, cuda:1, …")


def _add_model(parser) -> None:
    _add_location(parser)
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    parser.add_argument("--fp8", action="store_true", help="FlashMHF networks in FP8; a model of flashmhf quantize has them so already")
    _add_keep_projections(parser)


def _add_keep_projections(parser) -> None:
    parser.add_argument("--keep-projections", action="store_true", help="of FP8 networks: W_in and W_out stay as they are")


def _load(args: argparse.Namespace, **settings):
    from transformers.utils import logging

    from . import evaluation

    logging.disable_progress_bar()
    settings = {"dtype": args.dtype, "fp8": getattr(args, "fp8", False), "projections": not args.keep_projections} | settings
    if args.keep_projections and not settings["fp8"]:
        raise ValueError("--keep-projections needs --fp8")
    return evaluation.load(args.model, tokenizer_name=args.tokenizer, device=getattr(args, "device", "auto"), **settings)


def _add_eval(subparsers) -> None:
    parser = subparsers.add_parser(
        "eval", help="held-out loss and benchmark tasks of a model", description="Held-out loss on local text, and tasks through lm-eval."
    )
    parser.set_defaults(run=_command(_evaluate), command="eval", takes=("device",))
    _add_model(parser)
    add = parser.add_argument
    add("--data", nargs="+", metavar="PATH", help="held-out text, JSON-lines, CSV, Parquet and Arrow files, or directories of them")
    add("--text-field", default="text")
    add("--window", type=positive_integer, help="tokens of a window (the model's positions)")
    add("--stride", type=positive_integer, help="tokens it advances by (half a window)")
    add("--tasks", nargs="+", metavar="TASK", help="lm-eval tasks; 'paper' stands for HellaSwag, SIQA, PIQA, OBQA, WinoGrande and RACE")
    add("--include-path", metavar="DIR", help="further tasks in lm-eval's format")
    add("--limit", type=positive_integer, help="examples of a task")
    add("--shots", type=int, help="examples in a prompt")
    add("--batch", type=positive_integer, default=4, help="windows or requests at once (4)")
    add("--json", metavar="FILE", help="write the figures there, too")


def _evaluate(args: argparse.Namespace) -> int:
    from . import evaluation

    if not (args.data or args.tasks):
        raise ValueError("give --data, --tasks or both")
    model, tokenizer = _load(args)
    figures: dict[str, object] = {"model": args.model, "fp8": getattr(model.config, "quantization_config", None) is not None}
    if args.data:
        found = evaluation.held_out_loss(
            model,
            tokenizer,
            args.data,
            window=args.window,
            stride=args.stride,
            batch=args.batch,
            text_field=args.text_field,
            bar=sys.stderr.isatty(),
        )
        print("\n".join(found.report.lines()))
        measures = f"{found.loss:.4f} nats a token, perplexity {found.perplexity:.3f}, {found.bits_per_byte:.4f} bits a byte"
        print(f"loss {measures}, {found.tokens:,} tokens")
        figures["held_out"] = {
            "loss": found.loss,
            "perplexity": found.perplexity,
            "bits_per_byte": found.bits_per_byte,
            "tokens": found.tokens,
            "skipped": dict(found.report.skipped),
        }
    if args.tasks:
        tasks = [name for task in args.tasks for name in (evaluation.PAPER_TASKS if task == "paper" else (task,))]
        scores = evaluation.task_scores(
            model, tokenizer, tasks, include_path=args.include_path, limit=args.limit, batch=args.batch, shots=args.shots
        )
        for task, values in scores.items():
            print(f"{task}: " + ", ".join(f"{name} {value:.4f}" for name, value in values.items()))
        accuracies = [values["acc"] for values in scores.values() if "acc" in values]
        if len(accuracies) > 1:
            print(f"average acc: {sum(accuracies) / len(accuracies):.4f}")
        figures["tasks"] = scores
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def _add_generate(subparsers) -> None:
    parser = subparsers.add_parser("generate", help="continue a prompt", description="Continue a prompt with a trained model.")
    parser.set_defaults(run=_command(_generate), command="generate", takes=("device",))
    _add_model(parser)
    add = parser.add_argument
    add("prompt", nargs="?", default="", help="'-' reads it from standard input")
    add("--max-new-tokens", type=positive_integer, default=100)
    add("--temperature", type=float, default=0.8, help="0 takes the likeliest token")
    add("--top-p", type=float, default=0.95)
    add("--seed", type=int)
    add("--stream", action=argparse.BooleanOptionalAction, help="print words as they come (where the output is a terminal)")


def _generate(args: argparse.Namespace) -> int:
    from flashmhf.models import generation

    model, tokenizer = _load(args)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    stream = sys.stdout.isatty() if args.stream is None else args.stream
    settings = {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature, "top_p": args.top_p, "seed": args.seed}
    if stream:
        print(prompt, end="", flush=True)
        generation.generate(model, tokenizer, prompt, streamer=generation.printer(tokenizer), **settings)
    else:
        print(prompt + generation.generate(model, tokenizer, prompt, **settings))
    return 0


def _add_quantize(subparsers) -> None:
    parser = subparsers.add_parser(
        "quantize",
        help="write a model with its FlashMHF networks in FP8",
        description="Write a model with its FlashMHF networks in FP8, without calibration: a directory that eval, generate, serve and "
        "transformers' from_pretrained load.",
    )
    parser.set_defaults(run=_command(_quantize), command="quantize", takes=("device",))
    add = parser.add_argument
    _add_location(parser)
    add("--output", required=True, metavar="DIR", help="the new directory")
    add("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"), help="of what is not quantised (bfloat16)")
    _add_keep_projections(parser)


def _quantize(args: argparse.Namespace) -> int:
    output = Path(args.output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"--output {output} is not empty; choose a new directory")
    from transformers.utils import logging

    from . import evaluation

    logging.disable_progress_bar()
    evaluation.save_fp8(
        args.model,
        output,
        tokenizer_name=args.tokenizer,
        device=getattr(args, "device", "auto"),
        dtype=args.dtype,
        projections=not args.keep_projections,
    )
    size = sum(path.stat().st_size for path in output.glob("*.safetensors"))
    print(f"{output}: {size / 1e6:,.1f} MB of weights")
    return 0


def _add_serve(subparsers) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="serve a model with the OpenAI interface",
        description="Serve a model with transformers' own server, from transformers[serving]; docs/serving.md has vLLM and SGLang.",
    )
    parser.set_defaults(run=_command(_serve), command="serve", takes=("device",))
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="training run, checkpoint or saved model, also of flashmhf quantize, or a name")
    add("--device", default=argparse.SUPPRESS, help="auto (a CUDA GPU where there is one), cpu, cuda, cuda:1, …")
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"), help="auto: the stored weights'")
    add("--fp8", action="store_true", help="FlashMHF networks in FP8; a model of flashmhf quantize has them so already")
    _add_keep_projections(parser)
    add("--host", default="localhost")
    add("--port", type=positive_integer, default=8000)
    add("--continuous-batching", action="store_true", help="requests together, with paged attention")


def _serve(args: argparse.Namespace) -> int:
    from flashmhf.integrations import transformers_server

    if args.keep_projections and not args.fp8:
        raise ValueError("--keep-projections needs --fp8")
    transformers_server.serve(
        args.model,
        device=getattr(args, "device", "auto"),
        dtype=args.dtype,
        host=args.host,
        port=args.port,
        continuous_batching=args.continuous_batching,
        fp8=args.fp8,
        projections=not args.keep_projections,
    )
    return 0
