"""transformers' Trainer with complete checkpoints, a held-out loss for any number of processes, and all private use."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
from transformers import Trainer, TrainerCallback
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from flashmhf.nn import Muon, param_groups

from . import checkpoints, fused_loss
from .errors import ADVICE, OptionError, TrainingError
from .layout import WHOLE, load_optimizer, whole_optimizer
from .options import Options
from .stopping import Stopped, StopSignals

PROGRESS = "flashmhf"  # in trainer_state.json, among the states of callbacks


class RunTrainer(Trainer, TrainerCallback):
    """The Trainer, and the first callback of its own loop, with the resolved ``options`` of the run, the ``checkpoint``
    that it continues from, or None, and ``signals``, which end it after a step with a checkpoint."""

    def __init__(self, options: Options, checkpoint: Path | None, signals: StopSignals, *, args, callbacks, **kwargs):
        self.options, self.checkpoint, self.signals = options, checkpoint, signals
        self.layout = options.layout(args.world_size)
        self.stopped = self.evaluation_due = False
        self.loss_sum, self.logged_step = 0.0, 0  # of this process, since the last log: the Trainer's begins anew
        super().__init__(args=args, callbacks=[self, *callbacks], **kwargs)
        if options.fused_loss:
            fused_loss.apply(self.model)
        self.data_index = self.layout.data_index(args.process_index)
        if self.model.config.tie_word_embeddings:
            # Private: checkpoints hold tied weights once, and the Trainer would warn of the others as missing.
            self.model._keys_to_ignore_on_save = list(self.model.all_tied_weights_keys)

    def create_optimizer(self, model=None) -> torch.optim.Optimizer:
        """Shard the loaded model and make its optimizer. Raises OptionError for one that makes its own groups."""
        options, args = self.options, self.args
        if self.layout.sharded:
            self.layout.shard(self.model, args.device.type, options.compile)
        if options.optimizer == "muon":
            groups = param_groups(self.model, args.learning_rate, args.weight_decay, muon=True)
            betas = args.adam_beta1, args.adam_beta2
            self.optimizer = Muon(groups, args.learning_rate, args.weight_decay, betas=betas, eps=args.adam_epsilon)
        elif options.param_groups:
            optimizer, settings = self.get_optimizer_cls_and_kwargs(args, self.model)
            if not isinstance(optimizer, type) or settings.keys() & {"params", "model", "optimizer_dict"}:
                raise OptionError(f"param_groups is True; optim={args.optim} makes its own groups, turn it off")
            self.optimizer = optimizer(param_groups(self.model, args.learning_rate, args.weight_decay), **settings)
        return super().create_optimizer(model)

    def create_accelerator_and_postprocess(self) -> None:
        """As the Trainer's; a sharded model gets accelerate's autocast, but neither its DDP nor its FSDP."""
        super().create_accelerator_and_postprocess()
        if self.layout.sharded:
            self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the whole model and the tokenizer, for any layout."""
        directory = output_dir or self.args.output_dir
        state = get_model_state_dict(self.model, options=WHOLE) if self.layout.sharded else None
        if self.args.should_save:
            model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
            checkpoints.save_pretrained(directory, model, self.processing_class, state_dict=state)

    # Private: the Trainer asks the first process alone for the optimizer's state, and whole tensors need all of them.
    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.layout.sharded:
            return super()._save_optimizer_and_scheduler(output_dir)
        state = whole_optimizer(self.model, self.optimizer.optimizer)
        if self.args.should_save:
            torch.save(state, os.path.join(output_dir, OPTIMIZER_NAME))
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    # Private: the Trainer would load the whole state onto every GPU, and knows no sharded tensors.
    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not self.layout.sharded or checkpoint is None:
            return super()._load_optimizer_and_scheduler(checkpoint)
        load = partial(torch.load, map_location="cpu", weights_only=True, mmap=True)
        load_optimizer(self.model, self.optimizer.optimizer, load(os.path.join(checkpoint, OPTIMIZER_NAME)))
        self.lr_scheduler.load_state_dict(load(os.path.join(checkpoint, SCHEDULER_NAME)))

    def stop(self, evaluation_due: bool) -> None:
        """Make the Trainer save and leave its loop. An evaluation that is due stays for the resumed run."""
        self.stopped, self.evaluation_due = True, evaluation_due
        self.control.should_evaluate = False
        self.control.should_save = self.control.should_training_stop = True

    def on_train_begin(self, *args, **kwargs) -> None:
        """Put back what the Trainer leaves out, and the learning rate where the schedule has changed."""
        self.signals.begin_steps()
        progress = self.state.stateful_callbacks.get(PROGRESS, {})
        # The evaluation that a signal left out belongs to the checkpoint's step.
        due = progress.get("evaluation_due", self.args.eval_on_start)
        self.args.eval_on_start = due and self.eval_dataset is not None
        if self.checkpoint is None:
            return
        self.loss_sum, self.logged_step = progress["loss_sum"], progress["logged_step"]
        self.lr_scheduler.last_epoch -= 1
        self.lr_scheduler.step()

    def training_step(self, *args, **kwargs) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.loss_sum = self.loss_sum + loss
        return loss

    def mean_loss_sum(self) -> float:
        """Return the mean over processes, all of which call this, of the losses since the last log."""
        return self.accelerator.reduce(torch.as_tensor(self.loss_sum, device=self.args.device), "mean").item()

    def log(self, logs: dict[str, float], *args, **kwargs) -> None:
        """As the Trainer's, with the mean loss since the last log, which may have been before the run was resumed."""
        if "loss" in logs:
            logs["loss"] = self.mean_loss_sum() / (self.state.global_step - self.logged_step)
            self.loss_sum, self.logged_step = 0.0, self.state.global_step
        super().log(logs, *args, **kwargs)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.global_step < state.max_steps and self.signals.agreed():
            self.stop(control.should_evaluate)

    # Private: callbacks are called after a checkpoint alone, too late for its state and for what failed to be written.
    def _save_checkpoint(self, model, trial) -> None:
        """As the Trainer's, with the progress since the last log, and the mark in the end."""
        total = self.mean_loss_sum()
        if not math.isfinite(total):  # the checkpoints before this one are good, and would be rotated away
            raise TrainingError(f"the loss is {total} at step {self.state.global_step}; {ADVICE}")
        progress = {"loss_sum": total, "logged_step": self.logged_step}
        self.state.stateful_callbacks[PROGRESS] = progress | {"evaluation_due": self.evaluation_due}
        checkpoint = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        with checkpoints.writing(checkpoint):
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                checkpoints.mark_complete(checkpoint)
        if self.args.should_save:
            checkpoints.rotate(checkpoint.parent, self.options.keep)

    def _loader(self, dataset: Dataset, size: int) -> DataLoader:
        """Batches in the data set's order, dealt out to the processes that see different sequences."""
        turns = _Turns(len(dataset), size, self.layout.data_processes, self.data_index)
        return DataLoader(dataset, batch_sampler=turns, pin_memory=self.args.dataloader_pin_memory)

    def get_train_dataloader(self) -> DataLoader:
        return self._loader(self.train_dataset, self.args.per_device_train_batch_size)

    @torch.no_grad()
    def evaluate(self, *_, metric_key_prefix: str = "eval", **__) -> dict[str, float]:
        """Return the mean loss over sequences (nats a token), the same bits for any number of processes."""
        args, step = self.args, self.state.global_step
        loader, samples = self._loader(self.eval_dataset, args.per_device_eval_batch_size), len(self.eval_dataset)
        turns = math.ceil(samples / args.per_device_eval_batch_size)
        sums = torch.zeros(turns, dtype=torch.float64, device=args.device)
        settings = {"skip_logits": True} if self.options.fused_loss else {}
        self.model.eval()
        for turn, inputs in enumerate(loader):
            loss = self.model(**{name: x.to(args.device) for name, x in inputs.items()}, **settings).loss
            batch = turn * self.layout.data_processes + self.data_index
            if batch < len(sums) and args.process_index % self.layout.tp == 0:
                sums[batch] = loss.double() * len(inputs["input_ids"])
            self.control = self.callback_handler.on_prediction_step(args, self.state, self.control)
            if self.signals.agreed():
                if step == checkpoints.step_of(self.checkpoint):  # nothing to save: no step since the checkpoint
                    raise Stopped(self.signals.received, step)
                self.stop(evaluation_due=True)
                return {f"{metric_key_prefix}_loss": math.nan}
        sums = self.accelerator.reduce(sums)  # every sum is zero on all processes but one: exact
        metrics = {f"{metric_key_prefix}_loss": (sums.sum() / samples).item()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(args, self.state, self.control, metrics)
        return metrics

    def write_model(self, output: Path) -> None:
        """Write the model's files to ``output``, or raise TrainingError and leave it as it is."""
        unfinished = output / checkpoints.UNFINISHED
        with checkpoints.writing(unfinished):
            self.save_model(str(unfinished))
        if self.args.should_save:
            checkpoints.move_model(unfinished, output)


class _Turns(DistributedSampler):
    """Batches of ``size`` consecutive samples of process ``index``: all get as many, the first are repeated."""

    def __init__(self, samples: int, size: int, processes: int, index: int):
        super().__init__(range(math.ceil(samples / size)), processes, index, shuffle=False)
        self.samples, self.size = samples, size

    def __iter__(self) -> Iterator[list[int]]:
        for batch in super().__iter__():
            yield list(range(batch * self.size, min((batch + 1) * self.size, self.samples)))
