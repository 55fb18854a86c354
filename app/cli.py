"""The command line: `python -m app fit --config my.yaml`, and validate, test, audit, export, replay."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import sys
import warnings
from pathlib import Path
from typing import Any, NoReturn, cast

# Before vllm or deepspeed is imported by whatever the configuration names:
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import lightning.pytorch as pl
import torch
from jsonargparse import set_parsing_settings
from jsonargparse.typing import PositiveInt
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException

from app.checkpoint.resolve import find_last
from app.checkpoint.torch_io import AtomicCheckpointIO
from app.dashboard.logger import DashboardLogger
from app.distributed.processes import bound_waiting, end_with_launcher, lost_peer, watch_launched
from app.distributed.stop_signals import Stopped, is_first_process, started_again
from app.distributed.strategies import (
    CPUZeroStrategy,
    ZeroStrategy,
    check_name,
    check_strategy,
    register_strategies,
)
from app.engine.transformers_engine import TransformersEngine
from app.engine.vllm.engine import VLLMEngine
from app.errors import LockstepError
from app.renamed import with_current_names
from app.rollout.datamodule import RolloutDataModule
from app.trainer import LockstepTrainer
from app.training.module import GRPOModule
from callbacks.adaptive_threshold import AdaptiveThreshold
from callbacks.mismatch_guard import DEFAULT_RULES, MismatchGuard
from callbacks.off_policy_mask import OffPolicyMask
from callbacks.preemption import Preemption
from callbacks.progress import StepProgress
from callbacks.rollout_checkpoint import RolloutCheckpoint
from callbacks.run_summary import RunSummary
from callbacks.sample_logger import SampleLogger
from callbacks.weight_sync import WeightSync


class OneLineParser(LightningArgumentParser):
    """Says what is wrong with an option in one line."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print usage and message, and exit with status 2."""
        super().error(shortened(message), ex)


class LockstepCLI(LightningCLI):
    """LightningCLI with Lockstep's callbacks always present, each configurable under its own key."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Lightning's subcommands that make sense here, and ours."""
        known = LightningCLI.subcommands()
        own = {name: {"model", "datamodule"} for name in ("audit", "export", "replay")}
        # checkpoints hold plain values, so weights_only has no use; without it every command takes fit's config.yaml
        return {name: known[name] | {"weights_only"} for name in ("fit", "validate", "test")} | own

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the callbacks and every link between settings."""
        parser.add_argument(
            "--threads",
            type=PositiveInt | None,
            default=None,
            help="CPU threads of each process; null: torch's choice. Small models are fastest with 1, and on a busy "
            "machine more threads wait for each other.",
        )
        parser.add_argument(
            "--process_group_timeout",
            type=PositiveInt | None,
            default=None,
            help="Seconds that processes wait for each other, at the start and in collectives, before they end with an "
            "error; null: the strategy's own, half an hour. It must be longer than one may lag behind in a rollout.",
        )
        parser.add_lightning_class_args(WeightSync, "weight_sync")
        parser.add_lightning_class_args(SampleLogger, "sample_logger")
        parser.add_lightning_class_args(OffPolicyMask, "off_policy_mask")
        parser.add_lightning_class_args(MismatchGuard, "mismatch_guard")
        # as plain values, which are shown and saved: jsonargparse cannot write a list of dataclasses that is a default
        parser.set_defaults({"mismatch_guard.rules": [dataclasses.asdict(rule) for rule in DEFAULT_RULES]})
        parser.add_lightning_class_args(AdaptiveThreshold, "adaptive_threshold")
        parser.add_lightning_class_args(StepProgress, "progress")
        parser.add_lightning_class_args(RunSummary, "run_summary")
        parser.add_lightning_class_args(Preemption, "preemption")
        parser.add_lightning_class_args(RolloutCheckpoint, "checkpoint")
        parser.link_arguments("model.model_name_or_path", "data.model_name_or_path")
        parser.link_arguments("data.sampling.temperature", "model.temperature")
        parser.link_arguments("data.sampling.max_tokens", "model.loss.max_completion_length")
        parser.link_arguments("seed_everything", "data.seed", compute_fn=_sampling_seed)
        parser.link_arguments("trainer.default_root_dir", "checkpoint.dirpath", compute_fn=_checkpoint_folder)

    def _run_subcommand(self, subcommand: str) -> None:
        """Run, end when asked to, and free the engine whatever happens."""
        preemption = self._get(self.config_init, "preemption")
        with preemption.attached(self.trainer, training=subcommand == "fit"):
            try:
                super()._run_subcommand(subcommand)
            except SIGTERMException:
                preemption.end(self.trainer)
            finally:
                self.datamodule.engine.close()

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        """Let a job that the scheduler runs again go on, or it would begin anew and replace what it saved."""
        kwargs = super()._prepare_subcommand_kwargs(subcommand)
        if (
            subcommand == "fit"
            and started_again()
            and find_last(cast(LockstepTrainer, self.trainer).checkpoint_folder) is not None
        ):
            kwargs["ckpt_path"] = "last"
        return kwargs

    def _parse_ckpt_path(self) -> None:
        """Keep the configuration as given: Lightning would overwrite it by the checkpoint's hyperparameters."""

    def before_instantiate_classes(self) -> None:
        """Set the number of threads before anything computes."""
        threads = self._get(self.config, "threads")
        if threads is not None:
            torch.set_num_threads(int(threads))

    def instantiate_classes(self) -> None:
        """Instantiate; a value that a class refuses becomes one clear line."""
        try:
            super().instantiate_classes()
            if self.subcommand in ("fit", "validate", "test"):
                self.datamodule.check()
        except (ValueError, MisconfigurationException) as error:
            self.parser.error(in_full(str(error)))

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[pl.Callback]) -> pl.Trainer:
        """Leave out what the configuration switches off or replaces by its own."""
        own = config.get("callbacks") or []
        unwanted: tuple[type, ...] = ()
        if config.get("enable_checkpointing") is False:
            unwanted += (RolloutCheckpoint,)
        if config.get("enable_progress_bar") is False or any(isinstance(callback, ProgressBar) for callback in own):
            unwanted += (StepProgress,)
        kept = [callback for callback in callbacks if not isinstance(callback, unwanted)]
        plugins = config.get("plugins") or []
        plugins = plugins if isinstance(plugins, list) else [plugins]
        if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
            config["plugins"] = [*plugins, AtomicCheckpointIO()]
        if config.get("logger") in (None, True):
            config["logger"] = DashboardLogger(config["default_root_dir"] or ".")
        if isinstance(config.get("strategy"), str):
            check_name(config["strategy"])
        trainer = super()._instantiate_trainer(config, kept)
        check_strategy(trainer.strategy, trainer.gradient_clip_val)
        watch_launched(trainer.strategy)
        if (seconds := self._get(self.config, "process_group_timeout")) is not None:
            bound_waiting(trainer.strategy, int(seconds))
        return trainer


_NOISE = re.compile(
    r"(- )?(Does not validate against any of|Subtypes:|Errors:$|Expected a <class 'NoneType'>|Given value type:|"
    r"Given value: NestedArg)"
)


def shortened(message: str) -> str:
    """Return a message of jsonargparse, which tells every type that a value might have had, as one line."""
    lines = [line.strip() for line in message.splitlines()]
    told = [line.removeprefix("- ") for line in lines if line and not _NOISE.match(line)]
    joined = "".join(line + (" " if line.endswith(":") else "; ") for line in told).rstrip("; ")
    return re.sub(r"<class '([\w.]+)'>", r"\1", joined).replace("a typing.Literal", "one of ")


def in_full(message: str) -> str:
    """Return a message of the maths, which knows its settings as loss.x and correction.x, with the keys of the YAML."""
    message = re.sub(r"(?<![\w.])(?=(?:loss|correction)\.[a-z_]+)", "model.", message)
    return re.sub(r"(?<![\w.])(?=sampling\.[a-z_]+)", "data.", message)


def _in_one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Say a warning of ours without the line of code that said it; others as Python does, but for that line."""
    ours = Path(filename).is_relative_to(Path(__file__).parent.parent) and category is UserWarning
    return f"warning: {message}\n" if ours else f"{filename}:{lineno}: {category.__name__}: {message}\n"


def _sampling_seed(seed_everything: bool | int) -> int:
    if isinstance(seed_everything, bool):
        raise ValueError("seed_everything: give a number; sampling is seeded by it too")
    return seed_everything


def _checkpoint_folder(default_root_dir: str | None) -> str:
    return str(Path(default_root_dir or ".") / "checkpoints")


BY_NAME = (VLLMEngine, TransformersEngine, ZeroStrategy, CPUZeroStrategy)
"""Classes whose name alone is a `class_path`: they must be imported before a configuration is read."""

AUDIT_SHORTHANDS = {
    "--model": "--model.model_name_or_path",
    "--prompts": "--data.train.path",
    "--fail-above": "--fail_above",
}
"""What `audit` takes beside the keys of a training configuration: it needs no configuration."""


def in_keys(args: list[str]) -> list[str]:
    """Return the arguments of `audit` with its shorthands as the keys of a configuration; others as they are."""
    if args[:1] != ["audit"]:
        return args
    split = [argument.partition("=") for argument in args]
    return [AUDIT_SHORTHANDS.get(name, name) + equals + value for name, equals, value in split]


USAGE = "[--config FILE] [--KEY VALUE ...]    (--help lists every key)"
AUDIT_USAGE = f"[--model PATH --prompts FILE] [--out DIR] [--fail-above KEY=BOUND,...] {USAGE}"
EXPECTED_WARNINGS = (
    "Found .* module.s. in eval mode",  # on purpose: dropout would part the trainer from the engine
    "It is recommended to use .* when logging on epoch level",  # what is logged is that of all ranks already
    "Total length of `list` across ranks is zero",  # a run without validation prompts
    ".*isinstance.treespec, LeafSpec.*",  # between Lightning and torch
    ".*torch.distributed.* is deprecated",  # between DeepSpeed or vLLM and torch
    "When saving the DeepSpeed Stage 3 checkpoint",  # advice to convert it, which export and resume do by themselves
    "Checkpoint directory .* exists and is not empty",  # a resumed or repeated run
)
"""Warnings that say nothing a user could act on."""


def main(args: list[str] | None = None) -> None:
    """Run the command line; a known fault ends in one line and exit status 1."""
    if "" not in sys.path:
        sys.path.insert(0, "")  # so that the installed script finds a user's reward functions, as `python -m` does
    for message in EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    warnings.formatwarning = _in_one_line
    if args is None:
        sys.argv[1:] = in_keys(with_current_names(sys.argv[1:]))
    else:
        args = in_keys(with_current_names(args))
    register_strategies()
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    end_with_launcher()
    try:
        LockstepCLI(
            GRPOModule,
            RolloutDataModule,
            trainer_class=LockstepTrainer,
            trainer_defaults={
                "use_distributed_sampler": False,  # the loaders shard by whole groups themselves
                "default_root_dir": "runs/default",
                "num_sanity_val_steps": 0,  # `fit` validates before the first step anyway
                "log_every_n_steps": 1,
                "enable_model_summary": False,
            },
            seed_everything_default=1,
            auto_configure_optimizers=False,
            parser_class=OneLineParser,
            save_config_kwargs={"overwrite": True},
            parser_kwargs={
                "allow_abbrev": False,  # or a misspelt key would set another one
                **{name: {"usage": f"python -m app {name} {USAGE}"} for name in LockstepCLI.subcommands()},
                "audit": {"usage": f"python -m app audit {AUDIT_USAGE}"},
            },
            args=args,
        )
    except LockstepError as error:
        sys.exit(f"error: {error}")
    except Stopped as stopped:
        if is_first_process() or not stopped.agreed:
            print(f"\n{stopped.line}", file=sys.stderr)
        raise
    except KeyboardInterrupt:  # before the handlers are in place
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        if (line := lost_peer(error)) is None:
            raise
        sys.exit(f"\nerror: {line}")  # on a line of its own, not on the progress bar's
