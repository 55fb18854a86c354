"""Two processes train on the rows of one: whatever is taken over a batch, a rollout or a step is that of all ranks."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist

from app.engine.recovery import EngineRecovery
from app.guards.run_control import RunControl
from app.maths.correction import preset
from app.maths.objective import LossConfig
from app.rewards.weighted_sum import RewardSpec, RewardSum
from app.rollout.collector import Collector
from app.rollout.loader import RolloutLoader
from app.rollout.plan import RolloutPlan
from app.rollout.policy import Scores
from app.rollout.sampler import PromptStream
from app.training.step_correction import StepCorrection
from app.types import Prompt, SamplingConfig
from app.world import World
from tests.conftest import FakeEngine, tiny_tokenizer
from tests.ranks import free_port, on_ranks
from tests.rows import prompt_lengths

PROMPTS = [Prompt(row=i, prompt=f"{i}", token_ids=(4 + i, 5), columns={}) for i in range(9)]
PLAN = RolloutPlan(
    prompts_per_rollout=5,  # 3 for one rank, 2 for the other
    num_generations=3,
    mini_batches=1,
    num_iterations=2,
    accumulate=3,
    scale_rewards="batch",
    leave_one_out=False,
    multi_objective_aggregation="sum_then_normalize",
    resample_zero_std=2,
    mask_truncated_completions=True,
    top_entropy_quantile=0.5,
)
CASES = {
    "rows after rejection": (preset("verl/seq_is_rs"), LossConfig(loss_type="grpo", denominator="kept", beta=0.1)),
    "normalised row weights, tokens after rejection": (
        preset("verl/seq_is", batch_normalize=True),
        LossConfig(denominator="kept", beta=0.1, use_bias_correction_kl=True),
    ),
    "normalised token weights": (
        preset("swift/token_mask", batch_normalize=True),
        LossConfig(loss_type="dr_grpo", max_completion_length=6),
    ),
}


def length(completion_ids, **columns):
    return [float(len(ids)) for ids in completion_ids]


def parity(completion_ids, **columns):
    """Does not apply to every row."""
    return [None if ids[0] % 3 == 0 else float(ids[0] % 2) for ids in completion_ids]


class NoisyEngine(FakeEngine):
    """Log-probabilities that depend on the token, one of them missing; the longest completions were cut."""

    def _complete(self, request, sampling):
        done = super()._complete(request, sampling)
        logprobs = [value + 0.05 * (token % 5 - 2) for value, token in zip(done.logprobs, done.token_ids, strict=True)]
        if len(logprobs) > 2:
            logprobs[1] = math.nan
        finish = "length" if len(logprobs) == 6 else "stop"
        return dataclasses.replace(done, logprobs=tuple(logprobs), finish_reason=finish)


class ScoringPolicy:
    """Log-probabilities that are a function of the token."""

    global_step = 0
    has_reference = True
    bypass = False
    row_settings: ClassVar[dict] = {}

    def __init__(self, correction, loss):
        control = RunControl(correction, loss)
        self.step_correction = StepCorrection(control, loss, 0.3)
        self.needs_step_sums = control.needs_step_sums

    def step_sums(self, batch):
        return self.step_correction.step_sums(batch)

    def score(self, batch, *, old, entropy):
        values = torch.zeros(batch.mask.shape)
        for i, (p, c) in enumerate(zip(prompt_lengths(batch), batch.sampled_tokens, strict=True)):
            values[i, :c] = -3.5 - 0.02 * (batch.input_ids[i, p : p + c].float() - 20)
        return Scores(
            old=values if old else None,
            ref=values * 1.01,
            entropy=-values if entropy else None,
            reward_penalty=0.05 * values.sum(1),
        )


def first_pass(correction, loss) -> dict:
    """This rank's rows, totals and summed loss of the first optimiser step."""
    policy = ScoringPolicy(correction, loss)
    specs = [
        RewardSpec(function="tests.rollout.test_ranks.length"),
        RewardSpec(function="tests.rollout.test_ranks.parity", weight=0.5),
    ]
    collector = Collector(EngineRecovery(NoisyEngine(), World()), RewardSum(specs), tiny_tokenizer(), seed=1)
    loader = RolloutLoader(
        collector,
        PromptStream(PROMPTS, seed=1),
        PLAN,
        SamplingConfig(max_tokens=6),
        policy,
        pad_token_id=0,
        world=World(),
    )
    rows, total = [], 0.0
    for step in itertools.islice(loader, PLAN.accumulate):
        batch = step.batch
        new = batch.old_logprobs + 0.1
        _, parts = policy.step_correction.objective(batch, new)
        total += parts.loss.item()
        for i, (p, c) in enumerate(zip(prompt_lengths(batch), batch.sampled_tokens, strict=True)):
            ids, mask = tuple(batch.input_ids[i, : p + c].tolist()), tuple(batch.loss_mask[i, :c].tolist())
            rows.append((ids, round(batch.advantages[i].item(), 5), mask))
    return {"rows": rows, "loss": total, "totals": dataclasses.replace(batch.totals, micro_batches=0)}


SPLIT = dataclasses.replace(PLAN, mini_batches=2, accumulate=1, num_iterations=1)


def loader_of(plan: RolloutPlan) -> RolloutLoader:
    """A loader of this rank, whose rollouts are not corrected."""
    rewards = RewardSum([RewardSpec(function="tests.rollout.test_ranks.length")])
    collector = Collector(EngineRecovery(NoisyEngine(), World()), rewards, tiny_tokenizer(), seed=1)
    stream, sampling = PromptStream(PROMPTS, seed=1), SamplingConfig(max_tokens=6)
    return RolloutLoader(collector, stream, plan, sampling, ScoringPolicy(*CASES["rows after rejection"]), 0, World())


def step_rows(step) -> list:
    """What one optimiser step trains on, on this rank."""
    batch = step.batch
    rows = zip(prompt_lengths(batch), batch.sampled_tokens, strict=True)
    return [(tuple(batch.input_ids[i, : p + c].tolist()), batch.advantages[i].item()) for i, (p, c) in enumerate(rows)]


def halves(folder: str | None) -> dict:
    """The rows of two optimiser steps of a rollout; the second also after a resume from what `folder` holds."""
    iterator = iter(loader := loader_of(SPLIT))
    first = step_rows(next(iterator))
    found = {"first": first, "state": loader.state_dict(), "second": step_rows(next(iterator)), "resumed": None}
    if folder is not None:
        resumed = loader_of(SPLIT)
        resumed.load_state_dict(torch.load(f"{folder}/alone.pt", weights_only=True))
        found["resumed"] = step_rows(next(iter(resumed)))
    return found


def worker(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    found = {name: first_pass(*case) for name, case in CASES.items()} | {"halves": halves(folder)}
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("ranks")
    torch.save(halves(None)["state"], folder / "alone.pt")
    on_ranks(worker, free_port(), str(folder))
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_have_the_rows_totals_and_loss_of_one(two_ranks, name):
    alone = first_pass(*CASES[name])
    parts = [rank[name] for rank in two_ranks]
    assert sorted(row for part in parts for row in part["rows"]) == sorted(alone["rows"])
    assert all(len(part["rows"]) > 0 for part in parts)
    for part in parts:
        assert part["totals"].tokens == alone["totals"].tokens
        assert part["totals"].rows == alone["totals"].rows == 15
        assert (part["totals"].sums is None) == (alone["totals"].sums is None)
        if alone["totals"].sums is not None:
            for field in dataclasses.fields(alone["totals"].sums):
                expected = getattr(alone["totals"].sums, field.name)
                assert getattr(part["totals"].sums, field.name) == pytest.approx(expected, rel=1e-6)
    assert sum(part["loss"] for part in parts) == pytest.approx(alone["loss"], rel=1e-5)
    assert any(not all(mask) for _, _, mask in alone["rows"])


def test_each_step_of_a_rollout_has_the_same_rows_on_any_number_of_processes(two_ranks):
    alone = halves(None)
    for step in ("first", "second"):
        parts = [rank["halves"][step] for rank in two_ranks]
        assert sorted(parts[0] + parts[1]) == sorted(alone[step])
        assert all(parts)
    assert sorted(alone["first"]) != sorted(alone["second"])


def test_a_rollout_goes_on_with_another_number_of_processes(two_ranks):
    """From two to one, and from one to two."""
    alone = halves(None)
    resumed = loader_of(SPLIT)
    resumed.load_state_dict(two_ranks[0]["halves"]["state"])
    assert step_rows(next(iter(resumed))) == alone["second"]
    assert sorted(row for rank in two_ranks for row in rank["halves"]["resumed"]) == sorted(alone["second"])
