import dataclasses
import itertools
import math
from typing import ClassVar

import pytest
import torch

from app.engine.recovery import EngineRecovery
from app.errors import LockstepError
from app.rewards.weighted_sum import RewardSpec, RewardSum
from app.rollout.collector import Collector, PolicyVersionError, row_seed
from app.rollout.loader import RolloutLoader
from app.rollout.plan import RolloutPlan
from app.rollout.policy import Scores
from app.rollout.sampler import PromptStream
from app.rollout.steps import TrainStep
from app.types import Prompt, SamplingConfig, StepSums, StepTotals
from app.world import World
from tests.conftest import FakeEngine, tiny_tokenizer
from tests.rows import prompt_lengths

PROMPTS = [Prompt(row=i, prompt=f"{i}", token_ids=(4 + i, 5), columns={"answer": str(i % 10)}) for i in range(6)]


def first_character(completions, answer, **columns):
    """Reward 1 where the completion begins with the answer; about one row in 36."""
    return [float(text[:1] == right) for text, right in zip(completions, answer, strict=True)]


def length_reward(completion_ids, **columns):
    return [float(len(ids)) for ids in completion_ids]


class FakePolicy:
    global_step = 0
    has_reference = False
    bypass = False
    needs_step_sums = False
    row_settings: ClassVar[dict] = {}

    def __init__(self):
        self.scored = 0

    def score(self, batch, *, old, entropy):
        self.scored += old
        # a value that says where it belongs: the token id
        ids = torch.zeros(batch.mask.shape)
        for i, (p, c) in enumerate(zip(prompt_lengths(batch), batch.sampled_tokens, strict=True)):
            ids[i, :c] = batch.input_ids[i, p : p + c].float()
        return Scores(old=ids if old else None, entropy=ids if entropy else None)


def some_rows(completion_ids, **columns):
    return [None if len(ids) == 3 else float(len(ids)) for ids in completion_ids]


def small_reward(completion_ids, **columns):
    return [0.01 * (ids[0] % 7) for ids in completion_ids]


def make(engine=None, policy=None, reward="length_reward", rewards=None, **plan):
    settings = dict(
        prompts_per_rollout=4,
        num_generations=3,
        mini_batches=2,
        num_iterations=1,
        accumulate=2,
        scale_rewards="group",
        leave_one_out=False,
        multi_objective_aggregation="sum_then_normalize",
        resample_zero_std=0,
        mask_truncated_completions=False,
        top_entropy_quantile=1.0,
    )
    rewards = RewardSum(rewards or [RewardSpec(function=f"tests.rollout.test_loader.{reward}")])
    tokenizer = tiny_tokenizer()
    return RolloutLoader(
        Collector(EngineRecovery(engine or FakeEngine(), World()), rewards, tokenizer, seed=1),
        PromptStream(PROMPTS, seed=1),
        RolloutPlan(**{**settings, **plan}),
        SamplingConfig(max_tokens=6),
        policy or FakePolicy(),
        pad_token_id=0,
        world=World(),
    )


def rows_of(steps):
    return [
        tuple(step.batch.input_ids[i, : p + c].tolist())
        for step in steps
        for i, (p, c) in enumerate(zip(prompt_lengths(step.batch), step.batch.sampled_tokens, strict=True))
    ]


def test_an_epoch_asks_every_prompt_and_has_the_promised_length():
    loader = make()
    steps = list(loader)
    assert len(steps) == len(loader) == 2 * 4  # 6 prompts in rollouts of 4: 2 rollouts of 2 steps x 2 micro-batches
    assert {row[0] for row in rows_of(steps)} == {4 + i for i in range(6)}
    assert len(rows_of(steps)) == 2 * 4 * 3  # the wrap-around is trained on, not dropped
    assert [step.batch.ends_rollout for step in steps] == [False, False, False, True] * 2
    assert [step.report is not None for step in steps] == [True, False, False, False] * 2


def test_totals_are_those_of_the_whole_optimiser_step():
    steps = list(make())
    for first, second in zip(steps[0::2], steps[1::2], strict=True):
        tokens = sum(first.batch.sampled_tokens) + sum(second.batch.sampled_tokens)
        rows = len(first.batch.sampled_tokens) + len(second.batch.sampled_tokens)
        assert first.batch.totals == second.batch.totals == StepTotals(tokens=tokens, rows=rows, micro_batches=2)


def test_old_logprobs_stand_beside_their_tokens():
    for step in make():
        for i, (p, c) in enumerate(zip(prompt_lengths(step.batch), step.batch.sampled_tokens, strict=True)):
            assert step.batch.old_logprobs[i, :c].tolist() == step.batch.input_ids[i, p : p + c].tolist()


@pytest.mark.parametrize("accumulate", [1, 4])
def test_one_optimiser_step_a_rollout_needs_no_old_logprobs(accumulate):
    policy = FakePolicy()
    steps = list(make(policy=policy, mini_batches=1, accumulate=accumulate))
    assert policy.scored == 0
    assert all(step.batch.old_logprobs is None for step in steps)


def test_epochs_follow_each_other_as_lightning_takes_them():
    """Lightning takes exactly the promised number of batches and never asks the iterator for the end."""
    straight = make()
    everything = [step for _ in range(3) for step in straight]
    loader = make()
    taken = [step for _ in range(3) for step in itertools.islice(loader, len(loader))]
    assert rows_of(taken) == rows_of(everything)
    assert len(taken) == 3 * len(loader)


def test_a_prompt_that_is_asked_twice_is_sampled_anew():
    engine = FakeEngine()
    next(iter(make(engine, prompts_per_rollout=12, mini_batches=1, accumulate=1)))
    assert len({request.seed for request in engine.asked[0]}) == 12 * 3


def test_resume_inside_a_rollout_with_another_cut_is_refused():
    loader = make()
    next(iter(loader))
    with pytest.raises(LockstepError, match=r"data\.mini_batches \(then 2, now 1\)"):
        make(mini_batches=1).load_state_dict(loader.state_dict())


def test_resume_inside_a_rollout_with_rows_scored_for_other_settings_is_refused():
    class Bypassing(FakePolicy):
        bypass = True
        row_settings: ClassVar[dict] = {"model.correction.bypass": True}

    class Plain(FakePolicy):
        row_settings: ClassVar[dict] = {"model.correction.bypass": False}

    loader = make(policy=Bypassing())
    next(iter(loader))
    with pytest.raises(LockstepError, match=r"model\.correction\.bypass \(then True, now False\)"):
        make(policy=Plain()).load_state_dict(loader.state_dict())


def test_bypass_scores_old_only_where_the_rollouts_cannot_stand_in():
    class Bypassing(FakePolicy):
        bypass = True

    class Mute(FakeEngine):
        def _complete(self, request, sampling):
            return dataclasses.replace(super()._complete(request, sampling), logprobs=None)

    assert next(iter(make(policy=Bypassing()))).batch.old_logprobs is None
    assert next(iter(make(Mute(), policy=Bypassing()))).batch.old_logprobs is not None


def test_resume_inside_a_rollout_keeps_what_the_loss_may_use():
    settings = {"top_entropy_quantile": 0.4}
    straight = list(itertools.islice(make(**settings), 4))
    loader = make(**settings)
    next(iter(loader))
    resumed = make(**settings)
    resumed.load_state_dict(loader.state_dict())
    for expected, step in zip(straight, itertools.islice(resumed, 4), strict=True):
        assert torch.equal(step.batch.loss_mask, expected.batch.loss_mask)
        assert torch.equal(step.batch.advantages, expected.batch.advantages)
        assert step.batch.totals == expected.batch.totals
    assert any(not torch.equal(step.batch.loss_mask, step.batch.mask) for step in straight)


def test_a_row_that_no_function_scored_earns_and_loses_nothing():
    """Its group's mean stands in for its reward; a KL penalty is not counted against it either."""

    class Penalising(FakePolicy):
        has_reference = True

        def score(self, batch, *, old, entropy):
            return Scores(reward_penalty=torch.tensor(batch.sampled_tokens).float() * 0.1)

    loader = make(policy=Penalising(), reward="some_rows", mini_batches=1, accumulate=1)
    next(iter(loader))
    unscored = [row for row in loader._rows if math.isnan(row.reward)]
    assert 0 < len(unscored) < len(loader._rows)
    assert all(row.advantage == 0 for row in unscored)
    assert any(row.advantage != 0 for row in loader._rows)


def test_every_pass_sees_every_row_once():
    steps = list(make(num_iterations=2))[:8]
    assert sorted(rows_of(steps[:4])) == sorted(rows_of(steps[4:]))


@pytest.mark.parametrize("stop", range(1, 9))
def test_resume_goes_on_with_the_same_rows(stop):
    """Two micro-batches are one optimiser step: what was taken of an unfinished one comes again."""
    straight = rows_of(make())
    loader = make()
    iterator = iter(loader)
    head = [next(iterator) for _ in range(stop)]
    state = loader.state_dict()
    resumed = make()
    resumed.load_state_dict(state)
    tail = list(resumed) if stop < 8 else []
    assert rows_of(head[: stop - stop % 2]) + rows_of(tail) == straight


def test_a_state_between_rollouts_carries_no_rows():
    loader = make()
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    assert loader.state_dict()["rows"] == []
    assert loader.state_dict()["index"] == 1


def test_a_stale_engine_is_refused():
    policy = FakePolicy()
    policy.global_step = 5
    with pytest.raises(PolicyVersionError, match=r"weights of step 5 .* step 0"):
        next(iter(make(policy=policy)))


def test_advantages_are_the_groups_standardised_rewards():
    step = next(iter(make(mini_batches=1, accumulate=1)))
    by_prompt = {}
    for i, row in enumerate(rows_of([step])):
        by_prompt.setdefault(row[0], []).append((step.batch.rewards[i], step.batch.advantages[i]))
    for group in by_prompt.values():
        rewards, advantages = (torch.stack(values).double() for values in zip(*group, strict=True))
        expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        if rewards.std() == 0:
            expected = torch.zeros(3, dtype=torch.float64)
        torch.testing.assert_close(advantages, expected, rtol=1e-6, atol=1e-7)


def test_zero_std_groups_are_replaced_by_new_prompts():
    engine = FakeEngine()
    loader = make(engine, reward="first_character", resample_zero_std=3, mini_batches=1, accumulate=1)
    report = next(iter(loader)).report
    assert report.resampled_groups > 0
    assert len(engine.asked) > 1
    assert len(report.samples) == 12
    # 3 attempts may not be enough, but what is counted is what is left
    groups = [[s.reward for s in report.samples[i : i + 3]] for i in range(0, 12, 3)]
    assert report.zero_std_groups == sum(len(set(group)) == 1 for group in groups)


def everything(loader):
    """The one batch of a rollout that is trained on in one piece, and its report."""
    step = next(iter(loader))
    return step.batch, step.report


def test_overlong_rows_stay_in_the_baseline_and_leave_the_loss():
    """The fake engine says "length" of every completion; here only those of 6 tokens are called so."""

    class Cut(FakeEngine):
        def _complete(self, request, sampling):
            done = super()._complete(request, sampling)
            return dataclasses.replace(done, finish_reason="length" if len(done.token_ids) == 6 else "stop")

    whole = {"mini_batches": 1, "accumulate": 1}
    plain, _ = everything(make(Cut(), **whole))
    batch, report = everything(make(Cut(), mask_truncated_completions=True, **whole))
    overlong = torch.tensor(batch.sampled_tokens) == 6
    assert 0 < overlong.sum() == report.overlong_rows < 12
    assert torch.equal(batch.loss_mask, batch.mask & ~overlong[:, None])
    assert torch.equal(batch.mask, plain.mask)
    assert torch.equal(batch.advantages, plain.advantages)
    assert batch.totals == plain.totals


def test_only_the_tokens_of_highest_entropy_are_trained_on():
    """The fake policy's entropy of a token is its id."""
    batch, report = everything(make(mini_batches=1, accumulate=1, top_entropy_quantile=0.25))
    ids = torch.cat([batch.input_ids[i, p : p + c] for i, (p, c) in enumerate(zip(*lengths(batch), strict=True))])
    threshold = ids.sort(descending=True).values[len(ids) // 4 - 1]
    assert torch.equal(batch.loss_mask[batch.mask], ids >= threshold)
    assert report.low_entropy_tokens == int((ids < threshold).sum())


def test_the_entropy_threshold_does_not_depend_on_how_a_rollout_is_cut():
    whole, _ = everything(make(mini_batches=1, accumulate=1, top_entropy_quantile=0.3))
    kept = {row: tuple(m.tolist()) for row, m in zip(rows_of([TrainStep(whole, None)]), whole.loss_mask, strict=True)}
    for step in itertools.islice(make(top_entropy_quantile=0.3), 4):
        for row, mask in zip(rows_of([step]), step.batch.loss_mask, strict=True):
            assert tuple(mask.tolist()) == kept[row][: len(mask)]


def lengths(batch):
    return prompt_lengths(batch), batch.sampled_tokens


def test_a_row_without_logprobs_anywhere_makes_the_whole_rollout_uncorrectable():
    class Forgetful(FakeEngine):
        def _complete(self, request, sampling):
            done = super()._complete(request, sampling)
            forgets = request.token_ids[0] == 5
            return dataclasses.replace(done, logprobs=None) if forgets else done

    steps = list(itertools.islice(make(Forgetful(), prompts_per_rollout=6), 4))
    assert not any(step.batch.correctable for step in steps)
    assert any(not step.batch.rollout_logprobs.isnan().any() for step in steps)  # what is known stays measured
    assert all(step.batch.correctable for step in itertools.islice(make(), 4))


def test_correction_sums_are_added_up_over_the_micro_batches_of_a_step():
    class Summing(FakePolicy):
        needs_step_sums = True

        def step_sums(self, batch):
            assert batch.old_logprobs is not None
            tokens, rows = int(batch.mask.sum()), len(batch.mask)
            return StepSums(weight_sum=2.0 * tokens, weight_count=tokens, kept_tokens=tokens, kept_rows=rows)

    for step in itertools.islice(make(policy=Summing(), mini_batches=1, accumulate=4), 4):
        totals = step.batch.totals
        assert totals.sums == StepSums(
            weight_sum=2.0 * totals.tokens,
            weight_count=totals.tokens,
            kept_tokens=totals.tokens,
            kept_rows=totals.rows,
        )


def test_a_kl_penalty_is_taken_from_the_rewards_before_the_advantages():
    class Penalising(FakePolicy):
        has_reference = True

        def score(self, batch, *, old, entropy):
            return Scores(reward_penalty=torch.tensor(batch.sampled_tokens).float())

    batch, report = everything(make(policy=Penalising(), mini_batches=1, accumulate=1))  # reward = length = penalty
    assert batch.rewards.tolist() == [float(n) for n in batch.sampled_tokens]  # shown as the functions gave it
    assert batch.advantages.tolist() == [0.0] * 12
    assert report.reward_penalty.tolist() == [len(s.completion.token_ids) for s in report.samples]


def test_each_reward_is_normalised_before_the_sum():
    """Two functions, one a hundred times the other: with equal weights both count alike (GDPO)."""
    specs = [RewardSpec(function=f"tests.rollout.test_loader.{name}") for name in ("length_reward", "small_reward")]
    loader = make(rewards=specs, mini_batches=1, accumulate=1, multi_objective_aggregation="normalize_then_sum")
    samples = next(iter(loader)).report.samples
    table = torch.tensor([list(s.rewards.values()) for s in samples], dtype=torch.float64).view(4, 3, 2)
    scaled = (table - table.mean(1, keepdim=True)) / (table.std(1, keepdim=True) + 1e-4)
    total = scaled.sum(2).flatten()
    expected = (total - total.mean()) / (total.std() + 1e-4)
    torch.testing.assert_close(torch.tensor([row.advantage for row in loader._rows]).double(), expected)


def test_seeds_depend_on_run_rollout_row_and_member():
    seeds = {row_seed(*parts) for parts in itertools.product((1, 2), (0, 1), (0, 1), (0, 1))}
    assert len(seeds) == 16
    assert row_seed(1, 23) != row_seed(12, 3)
    assert all(0 <= seed < 2**56 for seed in seeds)


def test_a_plan_without_rows_for_a_micro_batch_is_refused():
    plan = make(accumulate=7).plan
    with pytest.raises(LockstepError, match="accumulate_grad_batches=7"):
        plan.check(ranks=1)
    with pytest.raises(LockstepError, match="prompts_per_rollout=4 is too small"):
        plan.check(ranks=3)
