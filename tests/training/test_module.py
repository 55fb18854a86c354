import dataclasses
import json
import math

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from transformers import AutoModelForCausalLM

from app.data.sources import PromptSource
from app.errors import LockstepError
from app.maths.objective import LossConfig
from app.rewards.weighted_sum import RewardSpec
from app.rollout.datamodule import RolloutDataModule
from app.training.module import GRPOModule
from app.training.optimiser import OptimConfig
from app.training.settings import CorrectionSettings
from app.types import SamplingConfig
from tests.conftest import FakeEngine


class Bookkeeper(Callback):
    """Tells the fake engine which version it holds, and remembers gradients and losses."""

    def __init__(self):
        self.gradients = []

    def on_train_start(self, trainer, pl_module):
        self.on_train_batch_end(trainer, pl_module)

    def on_train_batch_end(self, trainer, pl_module, *_):
        trainer.datamodule.engine.policy_version = trainer.global_step

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.gradients.append({n: p.grad.clone() for n, p in pl_module.named_parameters()})


def digits(completions, **columns):
    """Rewards digits: rows of one group differ."""
    return [sum(c.isdigit() for c in text) / 6 for text in completions]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}+{i}="}) + "\n" for i in range(8)))
    return str(path)


def fit(tiny_model, prompts, *, accumulate=1, max_steps=2, data=None, keeper=None, engine=None, **module):
    seed_everything(1)
    keeper = keeper or Bookkeeper()
    grpo = GRPOModule(tiny_model, optim=OptimConfig(learning_rate=1e-2), **module)
    datamodule = RolloutDataModule(
        rewards=[RewardSpec(function="tests.training.test_module.digits")],
        train=PromptSource(path=prompts),
        model_name_or_path=tiny_model,
        engine=engine or FakeEngine(),
        sampling=SamplingConfig(max_tokens=6, temperature=grpo.temperature),
        **{"prompts_per_rollout": 4, "num_generations": 4, **(data or {})},
    )
    trainer = Trainer(
        max_steps=max_steps,
        accumulate_grad_batches=accumulate,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[keeper],
    )
    trainer.fit(grpo, datamodule=datamodule)
    return grpo, keeper


def assert_equal_gradients(a, b, tolerance=1e-6):
    assert len(a) == len(b) > 0
    for name, gradient in a[0].items():
        torch.testing.assert_close(b[0][name], gradient, rtol=1e-4, atol=tolerance, msg=name)
    assert max(g.abs().max() for g in a[0].values()) > 1e-3


@pytest.mark.parametrize("aggregation", ["token_mean", "row_mean", "constant_length"])
@pytest.mark.parametrize("accumulate", [2, 4])
def test_gradient_does_not_depend_on_accumulation(tiny_model, prompts, accumulate, aggregation):
    loss = LossConfig(aggregation=aggregation, max_completion_length=6 if aggregation == "constant_length" else None)
    _, whole = fit(tiny_model, prompts, loss=loss, max_steps=1)
    _, cut = fit(tiny_model, prompts, loss=loss, max_steps=1, accumulate=accumulate)
    assert_equal_gradients(whole.gradients, cut.gradients)


def test_gradient_does_not_depend_on_the_token_budget(tiny_model, prompts):
    _, whole = fit(tiny_model, prompts, max_steps=1)
    _, cut = fit(tiny_model, prompts, max_steps=1, micro_batch_tokens=20)
    assert_equal_gradients(whole.gradients, cut.gradients)


def test_first_gradient_is_the_corrected_policy_gradient(tiny_model, prompts):
    """By hand: -sum(w A grad log pi) / tokens, w = min(exp(old - rollout), 2), rows scored one by one in float64."""
    _, keeper = fit(tiny_model, prompts, max_steps=1)
    policy = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    rows = first_rows(tiny_model, prompts)
    total = 0.0
    for row in rows:
        logits = policy(torch.tensor([row.prompt_ids + row.completion_ids])).logits[0].log_softmax(-1)
        for t, token in enumerate(row.completion_ids):
            logprob = logits[len(row.prompt_ids) - 1 + t, token]
            weight = min(math.exp(logprob.item() - row.rollout_logprobs[t]), 2.0)
            total = total - weight * row.advantage * logprob
    (total / sum(len(row.completion_ids) for row in rows)).backward()
    for name, parameter in policy.named_parameters():
        mine = keeper.gradients[0][f"policy.{name}"].double()
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-3, atol=1e-6, msg=name)


def first_rows(tiny_model, prompts):
    """The rows of the first rollout, sampled again: sampling depends on seed, rollout, row and member only."""
    rows = []

    class Catch(Bookkeeper):
        def on_train_batch_start(self, trainer, *_):
            rows.extend(trainer.train_dataloader._rows)

    fit(tiny_model, prompts, max_steps=1, keeper=Catch())
    return rows


def test_log_only_changes_no_weight(tiny_model, prompts):
    off, _ = fit(tiny_model, prompts, correction=CorrectionSettings(preset=None), max_steps=3)
    logged, _ = fit(tiny_model, prompts, correction=CorrectionSettings(log_only=True), max_steps=3)
    corrected, _ = fit(tiny_model, prompts, correction=CorrectionSettings(), max_steps=3)
    assert all(torch.equal(a, b) for a, b in zip(off.parameters(), logged.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(off.parameters(), corrected.parameters(), strict=True))


def test_kl_penalty_pulls_towards_the_reference(tiny_model, prompts):
    free, _ = fit(tiny_model, prompts, max_steps=6)
    held, _ = fit(tiny_model, prompts, loss=LossConfig(beta=10.0), max_steps=6)
    start = AutoModelForCausalLM.from_pretrained(tiny_model)

    def distance(module):
        pairs = zip(module.policy.parameters(), start.parameters(), strict=True)
        return sum((a - b).norm() ** 2 for a, b in pairs)

    assert distance(held) < distance(free)
    assert not [name for name, _ in held.named_parameters() if not name.startswith("policy.")]


def test_the_reference_is_loaded_also_when_fit_follows_validate(tiny_model):
    grpo = GRPOModule(tiny_model, loss=LossConfig(beta=0.1))
    grpo.setup("validate")
    policy = grpo.policy
    assert not grpo.has_reference
    grpo.setup("fit")
    assert grpo.policy is policy
    assert grpo.has_reference


def test_normalised_weights_refuse_a_step_cut_into_micro_batches(tiny_model, prompts):
    with pytest.raises(LockstepError, match="batch_normalize with"):
        fit(tiny_model, prompts, accumulate=2, correction=CorrectionSettings(batch_normalize=True))


def test_several_steps_of_a_rollout_use_the_first_steps_old_logprobs(tiny_model, prompts):
    """After the first update the ratio new / old must move away from 1: old is not taken anew."""
    seen = []

    class Watch(Bookkeeper):
        def on_train_batch_start(self, trainer, pl_module, step, batch_idx):
            new, _ = pl_module._logprobs(pl_module.policy, step.batch)
            drift = (new - step.batch.old_logprobs)[step.batch.mask].abs().max()
            seen.append((trainer.global_step, drift.item()))

    fit(tiny_model, prompts, max_steps=4, data={"mini_batches": 2}, keeper=Watch())
    assert [step for step, _ in seen] == [0, 1, 2, 3]
    assert seen[0][1] < 1e-5
    assert seen[1][1] > 1e-3
    assert seen[2][1] < 1e-5


def test_gradient_checkpointing_recomputes_and_changes_no_gradient(tiny_model, prompts):
    _, plain = fit(tiny_model, prompts, max_steps=1)
    calls = []

    class Count(Bookkeeper):
        def on_train_start(self, trainer, pl_module):
            super().on_train_start(trainer, pl_module)
            for layer in pl_module.policy.model.layers:
                layer.mlp.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))

    module, recomputed = fit(tiny_model, prompts, max_steps=1, gradient_checkpointing=True, keeper=Count())
    assert_equal_gradients(plain.gradients, recomputed.gradients)
    assert len(calls) == 2 * 2  # two layers, forward and again in backward
    assert not any(m.training for m in module.policy.model.layers[0].mlp.modules())


def test_missing_rollout_logprobs_train_uncorrected_and_loudly(tiny_model, prompts):
    class Silent(FakeEngine):
        def _complete(self, request, sampling):
            return dataclasses.replace(super()._complete(request, sampling), logprobs=None)

    with pytest.warns(UserWarning, match="UNCORRECTED"):
        silent, _ = fit(tiny_model, prompts, engine=Silent())
    plain, _ = fit(tiny_model, prompts, correction=CorrectionSettings(preset=None))
    assert all(torch.equal(a, b) for a, b in zip(silent.parameters(), plain.parameters(), strict=True))
