"""Rows whose sampled tokens come in two stretches, with a tool's answer between them, as agents will bring them."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from transformers import AutoModelForCausalLM

from app.data.collate import collate
from app.errors import LockstepError
from app.guards.rules import Rule
from app.maths.objective import LossConfig
from app.policy.scoring import sampled_logprobs
from app.training.module import GRPOModule
from app.training.optimiser import OptimConfig
from app.training.settings import CorrectionSettings
from app.types import TrainRow
from callbacks.mismatch_guard import MismatchGuard
from callbacks.off_policy_mask import OffPolicyMask
from tests.training.resume_run import Memory, Saver
from tests.training.test_module import NearEngine
from tests.training.tiny_runs import quiet_trainer, tiny_data, write_prompts

ANSWER = (11, 12)
"""What the tool said: foreign tokens after the first sampled one."""
DELTA = 0.05


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the rollout's rows such rows: the engine's log-probabilities stay those of the sampled tokens."""
    plain = TrainRow.of_completion.__func__  # type: ignore[attr-defined]

    def with_answer(cls: type[TrainRow], prompt_ids: Any, completion_ids: Any, **fields: Any) -> TrainRow:
        row = plain(cls, prompt_ids, completion_ids, **fields)
        first, *rest = completion_ids
        return TrainRow(
            token_ids=(*prompt_ids, first, *ANSWER, *rest),
            sampled=(*(False,) * len(prompt_ids), True, *(False,) * len(ANSWER), *(True,) * len(rest)),
            policy_versions=row.policy_versions,
            **{name: value for name, value in fields.items() if name != "policy_version"},
        )

    monkeypatch.setattr(TrainRow, "of_completion", classmethod(with_answer))


class Keeper(Callback):
    """Keeps the rows of the rollout, the gradient of each step and the weights before it."""

    def __init__(self) -> None:
        self.rows: list[TrainRow] = []
        self.gradients: list[dict[str, torch.Tensor]] = []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.rows = self.rows or list(trainer.train_dataloader._rows)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.gradients.append({name: p.grad.clone() for name, p in pl_module.policy.named_parameters()})


def fit(
    model: str,
    folder: Path,
    keeper: Callback,
    *callbacks: Callback,
    stops: dict[int, Path] | None = None,
    start: Path | None = None,
    mini_batches: int = 1,
    **settings: Any,
) -> dict[str, Any]:
    """Train on one rollout of 16 rows in `mini_batches` steps."""
    seed_everything(1)
    saver, memory = Saver(stops or {}), Memory()
    module = GRPOModule(model, optim=OptimConfig(learning_rate=1e-2), off_policy_sequence_mask_delta=DELTA, **settings)
    datamodule = tiny_data(model, write_prompts(folder), NearEngine(), prompts_per_rollout=4, mini_batches=mini_batches)
    trainer = quiet_trainer(
        default_root_dir=str(folder),
        max_steps=mini_batches,
        log_every_n_steps=1,
        logger=[memory],
        callbacks=[keeper, *callbacks, saver],
    )
    trainer.fit(module, datamodule=datamodule, ckpt_path=start)
    return {"weights": saver.weights, "logged": memory.values}


def test_the_gradient_is_that_of_a_float64_loop_over_the_sampled_tokens(
    tiny_model: str, tmp_path: Path, turns: None
) -> None:
    keeper = Keeper()
    found = fit(tiny_model, tmp_path, keeper, OffPolicyMask(every_n_steps=1))
    policy = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    total, tokens, k3, dropped = torch.zeros((), dtype=torch.float64), 0, 0.0, 0
    for row in keeper.rows:
        logprobs = policy(torch.tensor([row.token_ids])).logits[0].log_softmax(-1)
        new = [logprobs[place - 1, row.token_ids[place]] for place in range(len(row.token_ids)) if row.sampled[place]]
        assert len(new) == len(row.rollout_logprobs)
        gaps = [value.item() - rollout for value, rollout in zip(new, row.rollout_logprobs, strict=True)]
        tokens += len(new)
        k3 += sum(math.exp(gap) - 1 - gap for gap in gaps)
        if -sum(gaps) / len(gaps) > DELTA and row.advantage < 0:
            dropped += 1
            continue
        for value, gap in zip(new, gaps, strict=True):
            total = total - min(math.exp(gap), 2.0) * row.advantage * value
    assert 0 < dropped < len(keeper.rows)
    (total / tokens).backward()
    for name, parameter in policy.named_parameters():
        mine = keeper.gradients[0][name].double()
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-3, atol=1e-6, msg=name)
    logged = found["logged"][1]
    assert logged["rollout_correction/k3_kl"] == pytest.approx(k3 / tokens, rel=1e-4)
    assert logged["rollout_correction/off_policy_sequence_fraction"] == dropped / len(keeper.rows)
    assert logged["rollout_correction/policy_lag"] == 0


def test_old_and_reference_scores_are_those_of_the_sampled_tokens(tiny_model: str, tmp_path: Path, turns: None) -> None:
    keeper = Keeper()
    fit(tiny_model, tmp_path, keeper, mini_batches=2, loss=LossConfig(beta=0.1))
    policy = AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        for row in keeper.rows:
            logprobs = policy(torch.tensor([row.token_ids])).logits[0].log_softmax(-1)
            expected = [logprobs[place - 1, row.token_ids[place]].item() for place in row.positions]
            assert row.old_logprobs == pytest.approx(expected, abs=1e-5)
            assert row.ref_logprobs == pytest.approx(expected, abs=1e-5)


def test_whatever_the_foreign_tokens_are_their_own_log_probabilities_count_nowhere(tiny_model: str) -> None:
    """Scoring gives one value per sampled token, and the answer changes only what comes after it."""
    policy = AutoModelForCausalLM.from_pretrained(tiny_model)

    def scores(answer: tuple[int, ...]) -> torch.Tensor:
        row = TrainRow(
            token_ids=(5, 6, 20, *answer, 21),
            sampled=(False, False, True, *(False,) * len(answer), True),
            policy_versions=(0, 0),
            rollout_logprobs=None,
            advantage=0.0,
            reward=0.0,
        )
        return sampled_logprobs(policy, collate([row], pad_token_id=0), temperature=1.0, max_tokens=None)[0]

    first, second = scores((11, 12)), scores((30, 31, 32))
    assert first.shape == second.shape == (1, 2)
    torch.testing.assert_close(first[0, 0], second[0, 0])
    assert (first[0, 1] - second[0, 1]).abs() > 0.01


def test_such_rows_survive_a_checkpoint_inside_their_rollout(tiny_model: str, tmp_path: Path, turns: None) -> None:
    path = tmp_path / "inside.ckpt"
    guard = Rule(metric="k3_kl", above=0.0, patience=1, actions=["log_rows"], name="rows")
    whole = fit(tiny_model, tmp_path, Keeper(), MismatchGuard([guard]), mini_batches=2, stops={1: path})
    resumed = fit(tiny_model, tmp_path, Keeper(), MismatchGuard([guard]), mini_batches=2, start=path)
    assert all(torch.equal(resumed["weights"][name], tensor) for name, tensor in whole["weights"].items())
    assert resumed["logged"] == {step: whole["logged"][step] for step in resumed["logged"]}
    (rows,) = tmp_path.rglob("mismatch_guard_rows.csv")
    with rows.open() as file:
        shown = list(csv.DictReader(file))
    assert all("7 8" in row["completion"] for row in shown)  # the answer is shown in its place
    assert {row["tokens"] for row in shown} <= {str(count) for count in range(1, 7)}  # and not counted


def test_a_checkpoint_of_an_earlier_version_is_refused_in_one_line(tiny_model: str, tmp_path: Path) -> None:
    path, older = tmp_path / "now.ckpt", tmp_path / "older.ckpt"
    fit(tiny_model, tmp_path, Keeper(), mini_batches=2, stops={1: path}, correction=CorrectionSettings())
    checkpoint = torch.load(path, weights_only=True)
    del checkpoint["lockstep"]  # what format 1 did not have
    torch.save(checkpoint, older)
    with pytest.raises(
        LockstepError, match=r"another version of Lockstep \(format 1, this one goes on from 2\)"
    ) as error:
        fit(tiny_model, tmp_path, Keeper(), mini_batches=2, start=older)
    assert "\n" not in str(error.value)
