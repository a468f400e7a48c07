"""transformers' Trainer with complete checkpoints and a held-out loss that does not depend on the number of processes.

Everything that touches private attributes of the Trainer stands here.
"""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainerCallback
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.trainer_utils import EvalLoopOutput

from flashmhf.nn import Muon, param_groups
from flashmhf.nn.optim import PROJECTION_RATE

from . import checkpoints
from .callbacks import EvaluationStopped, StopCallback
from .errors import OptionError
from .layout import Layout, forget_accelerate, load_mapped, placed_like, whole
from .stopping import Stopped


class RunTrainer(Trainer):
    """Arguments beyond the Trainer's:

    keep: complete checkpoints that are kept.
    checkpoint: the one that training continues from, or None.
    stop: the callback that ends training on a signal.
    grouped: whether parameters are grouped by flashmhf.param_groups, or decayed and undecayed by transformers.
    muon: whether flashmhf.Muon trains the matrices; grouped by flashmhf.param_groups, at one rate where not ``grouped``.
    layout: how the run lies over the processes.
    compile_blocks: whether a sharded model's blocks are compiled.
    """

    def __init__(
        self,
        *,
        keep: int,
        checkpoint: Path | None,
        stop: StopCallback,
        grouped: bool,
        layout: Layout,
        muon: bool = False,
        compile_blocks: bool = False,
        **kwargs,
    ):
        self.layout, self.compile_blocks = layout, compile_blocks
        super().__init__(**kwargs)
        self.data_index = layout.data_index(self.args.process_index)
        self.keep, self.checkpoint, self.stop, self.grouped, self.muon = keep, checkpoint, stop, grouped, muon
        self.add_callback(stop)
        self.add_callback(_Restore(self))
        if self.model.config.tie_word_embeddings:
            # Checkpoints hold tied weights once. The Trainer would warn of them as missing; so named, it ties them again.
            self.model._keys_to_ignore_on_save = list(self.model.all_tied_weights_keys)

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        """As the Trainer's, with our groups. Raises OptionError for an optimizer that makes groups of its own."""
        model = self.model if model is None else model
        args = self.args
        if self.muon and self.optimizer is None:
            rate = PROJECTION_RATE if self.grouped else 1.0
            groups = param_groups(model, args.learning_rate, args.weight_decay, projection_rate=rate, muon=True)
            self.optimizer = Muon(groups, args.learning_rate, args.weight_decay, betas=(args.adam_beta1, args.adam_beta2))
        if self.grouped and self.optimizer is None:
            optimizer, settings = self.get_optimizer_cls_and_kwargs(self.args, model)
            if not isinstance(optimizer, type) or settings.keys() & {"params", "model", "optimizer_dict"}:
                raise OptionError("{param_groups} is True; optim={name} makes its own groups, turn it off", name=self.args.optim)
            groups = param_groups(model, self.args.learning_rate, self.args.weight_decay)
            self.optimizer_cls_and_kwargs = optimizer, {**settings, "params": groups}  # the Trainer takes "params" from there
        return super().create_optimizer(model)

    def create_accelerator_and_postprocess(self) -> None:
        """As the Trainer's. A sharded model gets accelerate's autocast but neither its DDP nor its FSDP."""
        if self.layout.sharded:
            forget_accelerate()
        super().create_accelerator_and_postprocess()
        if self.layout.sharded:
            self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)

    def _prepare_for_training(self, *args, **kwargs):
        """As the Trainer's, which has loaded the checkpoint's weights into the whole model before and makes the optimizer after."""
        if self.layout.sharded:
            self.layout.shard(self.model, self.args.device.type, self.compile_blocks)
        return super()._prepare_for_training(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not self.layout.sharded:
            return super().save_model(output_dir, _internal_call)
        state = whole(self.model.state_dict(), self.args.should_save)
        if self.args.should_save:
            self._save(self.args.output_dir if output_dir is None else output_dir, state_dict=state)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.layout.sharded:
            return super()._save_optimizer_and_scheduler(output_dir)
        state = whole(self.optimizer.state_dict(), self.args.should_save)
        if self.args.should_save:
            torch.save(state, os.path.join(output_dir, OPTIMIZER_NAME))
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not self.layout.sharded or checkpoint is None:
            return super()._load_optimizer_and_scheduler(checkpoint)
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        self.optimizer.load_state_dict(placed_like(parameters, load_mapped(os.path.join(checkpoint, OPTIMIZER_NAME))))
        self.lr_scheduler.load_state_dict(load_mapped(os.path.join(checkpoint, SCHEDULER_NAME)))

    def restore(self) -> None:
        """Puts back what the Trainer's own files leave out, and the learning rate where the schedule has changed."""
        if self.checkpoint is None:
            return
        if progress := checkpoints.progress(self.checkpoint):
            self._tr_loss.fill_(progress["loss_sum"])
            self._globalstep_last_logged = progress["logged_step"]
        scheduler = self.lr_scheduler
        if isinstance(scheduler, torch.optim.lr_scheduler.LambdaLR):
            rates = [base * rate(scheduler.last_epoch) for base, rate in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
            scheduler._last_lr = rates
            for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    def _save_checkpoint(self, model, trial) -> None:
        checkpoint = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        with checkpoints.writing(checkpoint):
            super()._save_checkpoint(model, trial)
            self._complete(checkpoint)
        if self.args.should_save:
            checkpoints.rotate(checkpoint.parent, self.keep, self.state.best_model_checkpoint)

    def _complete(self, checkpoint: Path) -> None:
        """Adds the loss since the last log, of which every process has a part, and the mark."""
        total = self._tr_loss.detach().clone()
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(total)  # waits until every process has written its files
            total /= self.args.world_size
        if self.args.should_save:
            progress = {
                "loss_sum": total.item(),
                "logged_step": self._globalstep_last_logged,
                "evaluation_due": self.stop.evaluation_due,
            }
            (checkpoint / checkpoints.PROGRESS).write_text(json.dumps(progress) + "\n")
            checkpoints.mark_complete(checkpoint)

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """As the Trainer's. A signal ends the evaluation; a resumed run makes it again."""
        try:
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        except EvaluationStopped:
            step = self.state.global_step
            if step == checkpoints.step_of(self.checkpoint):  # nothing to save: no step since the checkpoint
                raise Stopped(self.stop.signals.received, step) from None
            self.stop.stop(self.control, evaluation_due=True)
            return {f"{metric_key_prefix}_loss": math.nan}

    def get_train_dataloader(self) -> DataLoader:
        """As the Trainer's; under tensor parallelism the processes that share the heads of a sequence get the same batches."""
        loader = super().get_train_dataloader() if self.layout.tp == 1 else self._shared_dataloader()
        base = getattr(loader, "base_dataloader", loader)  # accelerate's loaders wrap the one that starts the workers
        base.worker_init_fn = partial(_keep_worker, base.worker_init_fn)
        return loader

    def _shared_dataloader(self) -> DataLoader:
        args = self.args
        loader = DataLoader(
            self.train_dataset,
            batch_size=args.per_device_train_batch_size,
            collate_fn=self.data_collator,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
        )
        return prepare_data_loader(
            loader, args.device, num_processes=self.layout.data_processes, process_index=self.data_index, put_on_device=True
        )

    def get_eval_dataloader(self, eval_dataset: Dataset | None = None) -> DataLoader:
        """Of n processes that see different sequences every n-th batch each: the last one is repeated where there are no more."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        size, args = self.args.per_device_eval_batch_size, self.args
        batches = [list(range(start, min(start + size, len(dataset)))) for start in range(0, len(dataset), size)]
        processes = self.layout.data_processes
        count = math.ceil(len(batches) / processes)
        own = [batches[min(turn * processes + self.data_index, len(batches) - 1)] for turn in range(count)]
        return DataLoader(
            dataset,
            batch_sampler=own,
            collate_fn=self.data_collator,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            worker_init_fn=partial(_keep_worker, None),
        )

    def evaluation_loop(
        self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix: str = "eval"
    ) -> EvalLoopOutput:
        """The mean loss over sequences. The sums of the batches are added in the batches' order, however many processes there are."""
        args, samples = self.args, len(dataloader.dataset)
        model = self._wrap_model(self.model, training=False)
        model.eval()
        sums = torch.zeros(math.ceil(samples / args.per_device_eval_batch_size), dtype=torch.float64, device=args.device)
        for turn, inputs in enumerate(dataloader):
            # The Trainer's prediction_step divides by the tokens of all processes' batches, of which some may be shorter.
            with torch.no_grad():
                loss = model(**self._prepare_inputs(inputs)).loss
            batch = turn * self.layout.data_processes + self.data_index
            if batch < len(sums) and args.process_index % self.layout.tp == 0:
                sums[batch] = loss.double() * len(inputs["input_ids"])
            self.control = self.callback_handler.on_prediction_step(args, self.state, self.control)
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(sums)  # every sum is zero on all processes but one: exact
        metrics = {f"{metric_key_prefix}_loss": (sums.sum() / samples).item()}
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=metrics, num_samples=samples)

    def write_model(self, output: Path) -> None:
        """The model's files in ``output``, config.json last: it says that there is a model."""
        partial = output / "model.partial"
        with checkpoints.writing(partial):
            self.save_model(str(partial))
        if self.args.should_save:
            for path in sorted(partial.iterdir(), key=lambda path: path.name == "config.json"):
                os.replace(path, output / path.name)
            partial.rmdir()


def _keep_worker(then: Callable[[int], None] | None, worker: int) -> None:
    """For a data loader's worker: a SIGTERM to the process group leaves it alive until the step is finished."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if then is not None:
        then(worker)


class _Restore(TrainerCallback):
    """Calls :meth:`RunTrainer.restore` after the Trainer has set its counters and before the first step."""

    def __init__(self, trainer: RunTrainer):
        self.trainer = trainer

    def on_train_begin(self, *args, **kwargs):
        self.trainer.restore()
