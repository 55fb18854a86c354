import itertools

import pytest
import torch

from app.errors import LockstepError
from app.rewards.weighted_sum import RewardSpec, RewardSum
from app.rollout.collector import Collector, PolicyVersionError, row_seed
from app.rollout.loader import RolloutLoader
from app.rollout.plan import RolloutPlan
from app.rollout.stream import PromptStream
from app.types import Prompt, SamplingConfig
from app.world import World
from tests.conftest import FakeEngine, tiny_tokenizer

PROMPTS = [Prompt(row=i, prompt=f"{i}", token_ids=(4 + i, 5), columns={"answer": str(i % 10)}) for i in range(6)]


def first_character(completions, answer, **columns):
    """Reward 1 where the completion begins with the answer; about one row in 36."""
    return [float(text[:1] == right) for text, right in zip(completions, answer, strict=True)]


def length_reward(completion_ids, **columns):
    return [float(len(ids)) for ids in completion_ids]


class FakePolicy:
    global_step = 0
    has_reference = False

    def __init__(self):
        self.scored = 0

    def score(self, batch, old):
        self.scored += old
        # a value that says where it belongs: the token id
        ids = torch.zeros(batch.mask.shape)
        for i, (p, c) in enumerate(zip(batch.prompt_tokens, batch.completion_tokens, strict=True)):
            ids[i, :c] = batch.input_ids[i, p : p + c].float()
        return (ids if old else None), None


def make(engine=None, policy=None, reward="length_reward", **plan):
    settings = dict(
        prompts_per_rollout=4,
        num_generations=3,
        mini_batches=2,
        num_iterations=1,
        accumulate=2,
        scale_rewards="group",
        leave_one_out=False,
        resample_spreadless=0,
    )
    rewards = RewardSum([RewardSpec(function=f"tests.rollout.test_loader.{reward}")])
    tokenizer = tiny_tokenizer()
    return RolloutLoader(
        Collector(engine or FakeEngine(), rewards, tokenizer, seed=1),
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
        for i, (p, c) in enumerate(zip(step.batch.prompt_tokens, step.batch.completion_tokens, strict=True))
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
        tokens = sum(first.batch.completion_tokens) + sum(second.batch.completion_tokens)
        rows = len(first.batch.completion_tokens) + len(second.batch.completion_tokens)
        assert first.batch.total_tokens == second.batch.total_tokens == tokens
        assert first.batch.total_rows == second.batch.total_rows == rows


def test_old_logprobs_stand_beside_their_tokens():
    for step in make():
        for i, (p, c) in enumerate(zip(step.batch.prompt_tokens, step.batch.completion_tokens, strict=True)):
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
    with pytest.raises(LockstepError, match="mini_batches has changed"):
        make(mini_batches=1).load_state_dict(loader.state_dict())


def test_every_pass_sees_every_row_once():
    steps = list(make(num_iterations=2))[:8]
    assert sorted(rows_of(steps[:4])) == sorted(rows_of(steps[4:]))


@pytest.mark.parametrize("stop", range(1, 9))
def test_resume_goes_on_with_the_same_rows(stop):
    straight = rows_of(make())
    loader = make()
    iterator = iter(loader)
    head = [next(iterator) for _ in range(stop)]
    state = loader.state_dict()
    resumed = make()
    resumed.load_state_dict(state)
    tail = list(resumed) if stop < 8 else []
    assert rows_of(head) + rows_of(tail) == straight


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


def test_spreadless_groups_are_replaced_by_new_prompts():
    engine = FakeEngine()
    loader = make(engine, reward="first_character", resample_spreadless=3, mini_batches=1, accumulate=1)
    report = next(iter(loader)).report
    assert report.resampled_groups > 0
    assert len(engine.asked) > 1
    assert len(report.samples) == 12
    # 3 attempts may not be enough, but what is counted is what is left
    groups = [[s.reward for s in report.samples[i : i + 3]] for i in range(0, 12, 3)]
    assert report.spreadless_groups == sum(len(set(group)) == 1 for group in groups)


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
