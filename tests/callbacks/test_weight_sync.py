from __future__ import annotations

from lightning.pytorch.loggers.logger import DummyLogger

from app.engine.transformers_engine import TransformersEngine
from callbacks.weight_sync import WeightSync
from tests.training.test_module import fit
from tests.training.test_module import prompts as prompts  # a fixture


class Recorder(DummyLogger):
    def __init__(self):
        super().__init__()
        self.seen = []

    def log_metrics(self, metrics, step):
        self.seen.append((step, {key for key in metrics if key.startswith("weight_sync/")}))


class Logged(WeightSync):
    def setup(self, trainer, pl_module, stage):
        self.recorder = Recorder()
        trainer.loggers.append(self.recorder)


def test_every_sync_is_logged_with_its_time_speed_and_memory(tiny_model, prompts):
    sync = Logged(canary_every=2)
    fit(tiny_model, prompts, max_steps=2, engine=TransformersEngine(device="cpu"), keeper=sync)
    always = {
        "weight_sync/seconds",
        "weight_sync/verify_seconds",
        "weight_sync/gigabytes_per_second",
        "weight_sync/peak_memory_growth_megabytes",
    }
    canary = {"weight_sync/canary_abs_diff_mean"}
    assert [seen for seen in sync.recorder.seen if seen[1]] == [(0, always | canary), (1, always), (2, always | canary)]


def test_a_callback_serves_one_run_after_another(tiny_model, prompts):
    """The second run's trainer counts from 0 again, and its module has other weights."""
    sync = WeightSync()
    for steps in (3, 1):
        engine = TransformersEngine(device="cpu")
        module, _ = fit(tiny_model, prompts, max_steps=steps, engine=engine, keeper=sync)
        assert engine.policy_version == steps
        sent = dict(engine._model.named_parameters())
        assert all(parameter.equal(sent[name]) for name, parameter in module.policy.named_parameters())
