import dataclasses
import math
from pathlib import Path
from typing import ClassVar, get_args

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from transformers import AutoModelForCausalLM

from app.errors import LockstepError
from app.guards.nonfinite import NonFiniteConfig
from app.maths.correction import PRESETS
from app.maths.objective import LossConfig, policy_objective
from app.maths.objective.config import LossType
from app.metrics import MismatchMetrics
from app.policy.lora import LoraSettings
from app.training import step_correction
from app.training.module import GRPOModule
from app.training.optimiser import OptimConfig
from app.training.settings import CorrectionSettings, DiagnosticsSettings
from app.types import Completion
from tests.conftest import FakeEngine, tiny_llama, tiny_tokenizer
from tests.rows import prompt_lengths
from tests.training.tiny_runs import quiet_trainer, tiny_data, write_prompts


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


class NearEngine(FakeEngine):
    """Samples from the tiny model itself and reports its log-probabilities with a known error, as a real engine does.

    The weights stay those of the start: what counts is that the ratios are near 1 and differ.
    """

    def start(self, model_path, seed):
        self.model = AutoModelForCausalLM.from_pretrained(model_path).eval()

    @torch.no_grad()
    def _complete(self, request, sampling):
        generator = torch.Generator().manual_seed(request.seed)
        length = int(torch.randint(1, min(self.longest, sampling.max_tokens) + 1, (1,), generator=generator))
        ids, logprobs = list(request.token_ids), []
        for _ in range(length):
            logits = self.model(torch.tensor([ids])).logits[0, -1]
            logits = logits + 0.4 * torch.randn(logits.shape, generator=generator)
            probs = logits.softmax(-1)
            ids.append(int(torch.multinomial(probs, 1, generator=generator)))
            logprobs.append(probs[ids[-1]].log().item())
        return Completion(
            token_ids=tuple(ids[len(request.token_ids) :]), logprobs=tuple(logprobs), finish_reason="length"
        )


@pytest.fixture
def prompts(tmp_path):
    return write_prompts(tmp_path)


def fit(
    tiny_model,
    prompts,
    *,
    accumulate=1,
    max_steps=2,
    data=None,
    keeper=None,
    engine=None,
    limit_train_batches=None,
    ckpt_path=None,
    **module,
):
    seed_everything(1)
    keeper = keeper or Bookkeeper()
    grpo = GRPOModule(tiny_model, **{"optim": OptimConfig(learning_rate=1e-2), **module})
    cut = {"prompts_per_rollout": 4, **(data or {})}
    datamodule = tiny_data(tiny_model, prompts, engine or FakeEngine(), grpo.temperature, **cut)
    trainer = quiet_trainer(
        default_root_dir=str(Path(prompts).parent),
        max_steps=max_steps,
        log_every_n_steps=1,
        accumulate_grad_batches=accumulate,
        limit_train_batches=limit_train_batches,
        devices=1,
        callbacks=[keeper],
    )
    trainer.fit(grpo, datamodule=datamodule, ckpt_path=ckpt_path)
    return grpo, keeper


def assert_equal_gradients(a, b, tolerance=1e-6):
    assert len(a) == len(b) > 0
    for name, gradient in a[0].items():
        torch.testing.assert_close(b[0][name], gradient, rtol=1e-4, atol=tolerance, msg=name)
    assert max(g.abs().max() for g in a[0].values()) > 1e-3


INDEPENDENT_OF_THE_CUT = {
    "token mean": {"loss": LossConfig(loss_type="dapo")},
    "row mean": {"loss": LossConfig(loss_type="grpo")},
    "constant length": {"loss": LossConfig(loss_type="dr_grpo", max_completion_length=6)},
    "tokens after rejection": {
        "loss": LossConfig(loss_type="dapo", denominator="kept"),
        "correction": CorrectionSettings(preset="verl/seq_is_rs"),
    },
    "rows after rejection": {
        "loss": LossConfig(loss_type="grpo", denominator="kept"),
        "correction": CorrectionSettings(preset="verl/seq_is_rs"),
    },
    "normalised token weights": {"correction": CorrectionSettings(batch_normalize=True)},
    "normalised row weights": {"correction": CorrectionSettings(preset="verl/seq_is", batch_normalize=True)},
}


@pytest.mark.parametrize("settings", INDEPENDENT_OF_THE_CUT.values(), ids=INDEPENDENT_OF_THE_CUT.keys())
@pytest.mark.parametrize("accumulate", [2, 4])
def test_gradient_does_not_depend_on_accumulation(tiny_model, prompts, accumulate, settings):
    _, whole = fit(tiny_model, prompts, max_steps=1, engine=NearEngine(), **settings)
    _, cut = fit(tiny_model, prompts, max_steps=1, engine=NearEngine(), accumulate=accumulate, **settings)
    assert_equal_gradients(whole.gradients, cut.gradients)


def test_bnpo_does_depend_on_the_cut_as_in_trl(tiny_model, prompts):
    loss = LossConfig(loss_type="bnpo")
    _, whole = fit(tiny_model, prompts, loss=loss, max_steps=1)
    _, cut = fit(tiny_model, prompts, loss=loss, max_steps=1, accumulate=4)
    assert any(not torch.allclose(whole.gradients[0][n], cut.gradients[0][n], rtol=1e-2) for n in whole.gradients[0])


@pytest.mark.parametrize(
    ("denominator", "divisor"), [("all", "total"), ("kept", "kept")], ids=["before rejection", "after rejection"]
)
def test_the_denominator_counts_what_it_says(tiny_model, prompts, denominator, divisor):
    """By hand: -sum over kept rows of w A grad log pi, over all tokens or over those of the kept rows."""
    correction = CorrectionSettings(preset="verl/seq_is_rs")
    loss = LossConfig(denominator=denominator)
    _, keeper = fit(tiny_model, prompts, max_steps=1, correction=correction, loss=loss, engine=NearEngine())
    policy = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    sums, tokens = 0.0, {"total": 0, "kept": 0}
    for row in first_rows(tiny_model, prompts, NearEngine()):
        logits = policy(torch.tensor([row.token_ids])).logits[0].log_softmax(-1)
        first = len(row.prompt_ids) - 1
        new = torch.stack([logits[first + t, token] for t, token in enumerate(row.completion_ids)])
        ratio = math.exp(new.sum().item() - sum(row.rollout_logprobs))
        tokens["total"] += len(new)
        if 0.5 <= ratio <= 2:
            tokens["kept"] += len(new)
            sums = sums - ratio * row.advantage * new.sum()
    assert 0 < tokens["kept"] < tokens["total"]
    (sums / tokens[divisor]).backward()
    for name, parameter in policy.named_parameters():
        mine = keeper.gradients[0][f"policy.{name}"].double()
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-3, atol=1e-6, msg=name)


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
        logits = policy(torch.tensor([row.token_ids])).logits[0].log_softmax(-1)
        for t, token in enumerate(row.completion_ids):
            logprob = logits[len(row.prompt_ids) - 1 + t, token]
            weight = min(math.exp(logprob.item() - row.rollout_logprobs[t]), 2.0)
            total = total - weight * row.advantage * logprob
    (total / sum(len(row.completion_ids) for row in rows)).backward()
    for name, parameter in policy.named_parameters():
        mine = keeper.gradients[0][f"policy.{name}"].double()
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-3, atol=1e-6, msg=name)


def by_hand(folder, rows):
    """Float64 log-probabilities with gradient, and entropies, of each row's tokens; and the model they come from."""
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    logprobs, entropies = [], []
    for row in rows:
        logits = policy(torch.tensor([row.token_ids])).logits[0].log_softmax(-1)
        first = len(row.prompt_ids) - 1
        logprobs.append(torch.stack([logits[first + t, token] for t, token in enumerate(row.completion_ids)]))
        entropies.append(-(logits.exp() * logits).sum(-1)[first : first + len(row.completion_ids)].detach())
    return policy, logprobs, entropies


def assert_gradient(keeper, policy, loss):
    loss.backward()
    for name, parameter in policy.named_parameters():
        mine = keeper.gradients[0][f"policy.{name}"].double()
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-3, atol=1e-6, msg=name)


def test_bypass_takes_the_ratio_to_the_rollout(tiny_model, prompts):
    """-min(r A, clip(r, 0.8, 1.28) A) with r = new / rollout."""
    correction = CorrectionSettings(preset="verl/bypass")
    _, keeper = fit(tiny_model, prompts, max_steps=1, correction=correction, engine=NearEngine())
    rows = first_rows(tiny_model, prompts, NearEngine())
    policy, logprobs, _ = by_hand(tiny_model, rows)
    total, clipped = 0.0, 0
    for row, new in zip(rows, logprobs, strict=True):
        ratio = (new - torch.tensor(row.rollout_logprobs, dtype=torch.float64)).exp()
        bounded = ratio.clamp(0.8, 1.28)
        total = total - torch.minimum(ratio * row.advantage, bounded * row.advantage).sum()
        clipped += int((bounded != ratio).sum())
    assert clipped > 0
    assert_gradient(keeper, policy, total / sum(map(len, logprobs)))


@pytest.mark.parametrize("denominator", ["all", "kept"])
def test_only_tokens_of_high_entropy_are_trained_on(tiny_model, prompts, denominator):
    settings = {"loss": LossConfig(denominator=denominator), "data": {"top_entropy_quantile": 0.5}}
    module, keeper = fit(tiny_model, prompts, max_steps=1, engine=NearEngine(), **settings)
    rows = first_rows(tiny_model, prompts, NearEngine())
    policy, logprobs, entropies = by_hand(tiny_model, rows)
    ordered = torch.cat(entropies).sort(descending=True).values
    threshold = ordered[(len(ordered) - 1) // 2]
    total, kept = 0.0, 0
    for row, new, entropy in zip(rows, logprobs, entropies, strict=True):
        weight = (new.detach() - torch.tensor(row.rollout_logprobs, dtype=torch.float64)).exp().clamp(max=2.0)
        high = entropy >= threshold - 1e-9
        total = total - (weight * row.advantage * new)[high].sum()
        kept += int(high.sum())
    assert_gradient(keeper, policy, total / (len(ordered) if denominator == "all" else kept))
    fraction = module.trainer.callback_metrics["policy/low_entropy_fraction"].item()
    assert fraction == pytest.approx(1 - kept / len(ordered))


@pytest.mark.parametrize("weight_kl", [True, False])
def test_the_weight_multiplies_the_kl_term_if_asked(tiny_model, prompts, tmp_path, weight_kl):
    """k3 of KL(new || teacher), times the importance weight or not."""
    path = teacher(tmp_path)
    settings = {
        "loss": LossConfig(beta=0.5),
        "correction": CorrectionSettings(weight_kl=weight_kl),
        "teacher_model_name_or_path": path,
    }
    _, keeper = fit(tiny_model, prompts, max_steps=1, engine=NearEngine(), **settings)
    rows = first_rows(tiny_model, prompts, NearEngine())
    policy, logprobs, _ = by_hand(tiny_model, rows)
    _, references, _ = by_hand(path, rows)
    total = 0.0
    for row, new, ref in zip(rows, logprobs, references, strict=True):
        weight = (new.detach() - torch.tensor(row.rollout_logprobs, dtype=torch.float64)).exp().clamp(max=2.0)
        kl = (ref.detach() - new).exp() - 1 - (ref.detach() - new)
        total = total + (-weight * row.advantage * new + 0.5 * (weight if weight_kl else 1.0) * kl).sum()
    assert_gradient(keeper, policy, total / sum(map(len, logprobs)))


def test_the_reward_penalty_is_beta_times_log_policy_over_reference(tiny_model, prompts, tmp_path):
    path = teacher(tmp_path)
    seen = []

    class Score(Bookkeeper):
        def on_train_batch_start(self, trainer, pl_module, step, batch_idx):
            scores = pl_module.scorer.score(step.batch, old=True, entropy=False)
            seen.append((trainer.train_dataloader._rows, step.batch, scores))

    loss = LossConfig(beta=0.5, kl_in_reward=True)
    fit(tiny_model, prompts, max_steps=1, loss=loss, teacher_model_name_or_path=path, keeper=Score())
    rows, batch, scores = seen[0]
    _, logprobs, _ = by_hand(tiny_model, rows)
    _, references, _ = by_hand(path, rows)
    expected = {
        row.token_ids: 0.5 * (new - ref).sum().item() for row, new, ref in zip(rows, logprobs, references, strict=True)
    }
    for i, (p, c) in enumerate(zip(prompt_lengths(batch), batch.sampled_tokens, strict=True)):
        ids = tuple(batch.input_ids[i, : p + c].tolist())
        assert scores.reward_penalty[i].item() == pytest.approx(expected[ids], rel=1e-4, abs=1e-5)
    assert max(map(abs, expected.values())) > 0.1


def test_rows_without_logprobs_anywhere_leave_the_whole_step_uncorrected(tiny_model, prompts):
    """Also the rows that have them; the off-policy mask then compares with old, which is new, and drops nothing."""

    class Forgetful(NearEngine):
        def _complete(self, request, sampling):
            done = super()._complete(request, sampling)
            return dataclasses.replace(done, logprobs=None) if request.seed % 2 else done

    with pytest.warns(UserWarning, match="UNCORRECTED"):
        mixed, _ = fit(tiny_model, prompts, engine=Forgetful(), off_policy_sequence_mask_delta=0.001)
    plain, _ = fit(tiny_model, prompts, engine=Forgetful(), correction=CorrectionSettings(preset=None))
    assert all(torch.equal(a, b) for a, b in zip(mixed.parameters(), plain.parameters(), strict=True))
    values = mixed.trainer.callback_metrics
    assert 0 < values["rollout_correction/missing_logprob_fraction"] < 1
    assert values["rollout_correction/off_policy_sequence_fraction"] == 0


def test_a_row_dropped_by_the_off_policy_mask_keeps_its_kl_term(tiny_model, prompts, tmp_path):
    path = teacher(tmp_path)
    settings = {
        "loss": LossConfig(beta=0.5),
        "correction": CorrectionSettings(preset=None),
        "off_policy_sequence_mask_delta": 0.02,
    }
    _, keeper = fit(tiny_model, prompts, max_steps=1, engine=NearEngine(), keeper=Reference(path), **settings)
    rows = first_rows(tiny_model, prompts, NearEngine())
    policy, logprobs, _ = by_hand(tiny_model, rows)
    _, references, _ = by_hand(path, rows)
    total, dropped = 0.0, 0
    for row, new, ref in zip(rows, logprobs, references, strict=True):
        drift = (torch.tensor(row.rollout_logprobs, dtype=torch.float64) - new).mean().item()
        drops = drift > 0.02 and row.advantage < 0
        dropped += drops
        kl = (ref.detach() - new).exp() - 1 - (ref.detach() - new)
        total = total + ((0.0 if drops else -row.advantage) * new + 0.5 * kl).sum()
    assert dropped
    assert_gradient(keeper, policy, total / sum(map(len, logprobs)))


class Reference(Bookkeeper):
    """Puts another model in the place of the reference, as a run far from its start would have."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def on_fit_start(self, trainer, pl_module):
        pl_module.scorer.attach_reference(AutoModelForCausalLM.from_pretrained(self.path))


def test_logged_values_do_not_depend_on_accumulation(tiny_model, prompts):
    whole, _ = fit(tiny_model, prompts, max_steps=1, engine=NearEngine())
    cut, _ = fit(tiny_model, prompts, max_steps=1, engine=NearEngine(), accumulate=4)
    for name, value in whole.trainer.callback_metrics.items():
        if not name.startswith(("time/", "tok/s")):
            assert cut.trainer.callback_metrics[name].item() == pytest.approx(value.item(), rel=1e-3, abs=1e-5), name


def test_the_lag_counts_the_steps_since_sampling(tiny_model, prompts):
    lags = []

    class Watch(Bookkeeper):
        def on_train_batch_start(self, trainer, *_):
            lags.append(trainer.callback_metrics.get("rollout_correction/policy_lag"))

    fit(tiny_model, prompts, max_steps=5, data={"mini_batches": 2}, keeper=Watch())
    assert [lag.item() for lag in lags[1:]] == [0, 1, 0, 1]


def first_rows(tiny_model, prompts, engine=None):
    """The rows of the first rollout, sampled again: sampling depends on seed, rollout, row and member only."""
    rows = []

    class Catch(Bookkeeper):
        def on_train_batch_start(self, trainer, *_):
            rows.extend(trainer.train_dataloader._rows)

    fit(tiny_model, prompts, max_steps=1, keeper=Catch(), engine=engine)
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
    assert not grpo.scorer.has_reference
    grpo.setup("fit")
    assert grpo.policy is policy
    assert grpo.scorer.has_reference


def test_a_step_in_which_everything_was_rejected_changes_nothing_and_says_so(tiny_model, prompts):
    """Also not by momentum or decay: two steps are trained, then the engine's log-probabilities become absurd."""

    class Broken(NearEngine):
        def _complete(self, request, sampling):
            done = super()._complete(request, sampling)
            if self.policy_version < 2:
                return done
            return dataclasses.replace(done, logprobs=tuple(value - 15 for value in done.logprobs))

    class Watch(Bookkeeper):
        weights: ClassVar[list] = []

        def on_train_batch_end(self, trainer, pl_module, *_):
            super().on_train_batch_end(trainer, pl_module)
            self.weights.append({n: p.detach().clone() for n, p in pl_module.named_parameters()})

    settings = {
        "correction": CorrectionSettings(preset="verl/seq_is_rs"),
        "optim": OptimConfig(learning_rate=1e-2, weight_decay=0.1),
    }
    with pytest.warns(UserWarning, match="optimiser step 3: every token was rejected"):
        module, keeper = fit(tiny_model, prompts, max_steps=3, keeper=Watch(), engine=Broken(), **settings)
    *_, before, trained, skipped = keeper.weights
    assert any(not torch.equal(trained[n], before[n]) for n in before)
    assert all(torch.equal(skipped[n], trained[n]) for n in trained)
    assert module.trainer.callback_metrics["policy/skipped_update_fraction"] == 1
    assert module.trainer.callback_metrics["policy/trained_token_fraction"] == 0


def test_the_off_policy_mask_drops_negative_rows_that_the_policy_has_left(tiny_model, prompts, tmp_path):
    """By hand: without rows whose mean drift is above delta and whose advantage is negative; the denominator stays."""
    delta = 0.02
    settings = {"correction": CorrectionSettings(preset=None), "engine": NearEngine()}
    module, keeper = fit(tiny_model, prompts, max_steps=1, off_policy_sequence_mask_delta=delta, **settings)
    policy = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    sums, tokens, dropped, negative = 0.0, 0, 0, 0
    for row in first_rows(tiny_model, prompts, NearEngine()):
        logits = policy(torch.tensor([row.token_ids])).logits[0].log_softmax(-1)
        first = len(row.prompt_ids) - 1
        new = torch.stack([logits[first + t, token] for t, token in enumerate(row.completion_ids)])
        drift = (torch.tensor(row.rollout_logprobs, dtype=torch.float64) - new).mean().item()
        tokens += len(new)
        negative += row.advantage < 0
        if drift > delta and row.advantage < 0:
            dropped += 1
        else:
            sums = sums - row.advantage * new.sum()
    (sums / tokens).backward()
    for name, parameter in policy.named_parameters():
        mine = keeper.gradients[0][f"policy.{name}"].double()
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-3, atol=1e-6, msg=name)
    values = module.trainer.callback_metrics
    assert 0 < dropped < negative
    assert values["rollout_correction/off_policy_sequence_fraction"] == pytest.approx(dropped / 16)
    assert values["rollout_correction/off_policy_sequence_fraction_negative"] == pytest.approx(dropped / negative)


def test_rows_dropped_from_the_surrogate_do_not_count_as_trained_for_their_kl_term(tiny_model, prompts, tmp_path):
    settings = {"off_policy_sequence_mask_delta": 0.02, "engine": NearEngine(), "max_steps": 1}
    without, _ = fit(tiny_model, prompts, **settings)
    with_kl, _ = fit(tiny_model, prompts, loss=LossConfig(beta=0.1), **{**settings, "engine": NearEngine()})
    fractions = [m.trainer.callback_metrics["policy/trained_token_fraction"].item() for m in (without, with_kl)]
    assert fractions[0] == fractions[1] < 1


def test_settings_that_contradict_each_other_are_refused(tiny_model):
    with pytest.raises(ValueError, match="off_policy_sequence_mask_delta with model"):
        GRPOModule(
            tiny_model, LossConfig(beta=0.1), off_policy_sequence_mask_delta=0.1, teacher_model_name_or_path=tiny_model
        )
    with pytest.raises(ValueError, match="teacher_model_name_or_path does nothing"):
        GRPOModule(tiny_model, teacher_model_name_or_path=tiny_model)
    with pytest.raises(ValueError, match=r"off_policy_sequence_mask_delta=-0\.1"):
        GRPOModule(tiny_model, off_policy_sequence_mask_delta=-0.1)
    with pytest.raises(ValueError, match="bypass with batch_normalize or"):
        GRPOModule(tiny_model, LossConfig(denominator="kept"), correction=CorrectionSettings(preset="verl/bypass"))
    with pytest.raises(ValueError, match=r"diagnostics\.every_n_steps=0"):
        DiagnosticsSettings(every_n_steps=0)


def test_correcting_without_logprobs_is_refused_at_the_start(tiny_model, prompts):
    class Mute(FakeEngine):
        returns_logprobs = False

    with pytest.raises(LockstepError, match="Mute gives no log-probabilities"):
        fit(tiny_model, prompts, engine=Mute())


def teacher(folder, seed=5) -> str:
    """Folder of another tiny model with the same tokenizer."""
    tokenizer = tiny_tokenizer()
    tiny_llama(len(tokenizer), seed=seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_teacher_must_share_the_vocabulary(tiny_model, tmp_path):
    path = teacher(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["new"])
    tokenizer.save_pretrained(path)
    grpo = GRPOModule(tiny_model, loss=LossConfig(beta=0.1), teacher_model_name_or_path=path)
    with pytest.raises(LockstepError, match="has another vocabulary"):
        grpo.setup("fit")


def test_a_teacher_pulls_the_policy_towards_itself(tiny_model, prompts, tmp_path):
    settings = {
        "loss": LossConfig(beta=10.0, kl_estimator="k2"),
        "optim": OptimConfig(learning_rate=5e-3),
        "teacher_model_name_or_path": teacher(tmp_path),
    }
    _, keeper = fit(tiny_model, prompts, max_steps=5, keeper=Kl(), engine=NearEngine(), **settings)
    assert keeper.values[-1] < 0.5 * keeper.values[0]


class Kl(Bookkeeper):
    """Remembers the estimated KL to the reference."""

    def __init__(self):
        super().__init__()
        self.values = []

    def on_train_batch_start(self, trainer, *_):
        if "policy/ref_kl" in trainer.callback_metrics:
            self.values.append(trainer.callback_metrics["policy/ref_kl"].item())


def test_kl_in_the_reward_shifts_the_advantages_and_not_the_loss(tiny_model, prompts):
    """At the first step policy and reference are equal: no penalty. Later rows far from the reference lose reward."""
    free, _ = fit(tiny_model, prompts, max_steps=6)
    held, _ = fit(tiny_model, prompts, max_steps=6, loss=LossConfig(beta=1.0, kl_in_reward=True))
    assert held.trainer.callback_metrics["policy/kl_loss"] == 0
    assert held.trainer.callback_metrics["rollout/kl_penalty_mean"] != 0
    assert any(not torch.equal(a, b) for a, b in zip(free.parameters(), held.parameters(), strict=True))


def test_the_full_diagnostics_come_every_n_steps_and_the_core_at_every_step(tiny_model, prompts):
    values = []

    class Logged(Bookkeeper):
        def on_train_start(self, trainer, pl_module):
            super().on_train_start(trainer, pl_module)
            original = pl_module.meters.compute_and_reset

            def compute():
                found = original()
                values.append(found)
                return found

            pl_module.meters.compute_and_reset = compute

    fit(tiny_model, prompts, max_steps=4, keeper=Logged(), diagnostics=DiagnosticsSettings(every_n_steps=2))
    assert ["rollout_correction/training_ppl" in found for found, _ in values] == [True, False, True, False]
    assert all("rollout_correction/k3_kl" in found for found, _ in values)
    assert [bool(histograms) for _, histograms in values] == [True, False, True, False]


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_trains_and_is_measured_as_it_was_used(tiny_model, prompts, name, monkeypatch):
    used, measured = [], []

    def objective(*args, **kwargs):
        used.append((kwargs["is_weights"], kwargs["kl_mask"]))
        return policy_objective(*args, **kwargs)

    def update(metrics, *args, correction, **kwargs):
        measured.append(correction)
        return original(metrics, *args, correction=correction, **kwargs)

    original = MismatchMetrics.update
    monkeypatch.setattr(step_correction, "policy_objective", objective)
    monkeypatch.setattr(MismatchMetrics, "update", update)
    loss = LossConfig(loss_type="reinforce" if "bypass_pg" in name else "dapo")
    settings = {"correction": CorrectionSettings(preset=name), "loss": loss, "data": {"mini_batches": 2}}
    module, _ = fit(tiny_model, prompts, max_steps=4, engine=NearEngine(), **settings)
    assert all(p.isfinite().all() for p in module.parameters())
    assert math.isfinite(module.trainer.callback_metrics["policy/loss"])
    assert len(used) == len(measured) == 4
    for (weights, usable), correction in zip(used, measured, strict=True):
        assert weights is correction.is_weights  # one tensor, computed once
        assert torch.equal(usable, correction.mask)
        assert correction.config == PRESETS[name]


@pytest.mark.parametrize("loss_type", get_args(LossType))
def test_every_loss_trains(tiny_model, prompts, loss_type):
    """With old and rollout apart, several steps a rollout, a KL term, and everything that filters tokens and rows."""
    loss = LossConfig(loss_type=loss_type, beta=0.01, max_completion_length=6)
    module, _ = fit(
        *(tiny_model, prompts),
        **{"max_steps": 4, "engine": NearEngine(), "loss": loss, "off_policy_sequence_mask_delta": 0.05},
        data={"mini_batches": 2, "top_entropy_quantile": 0.5},
    )
    assert all(p.isfinite().all() for p in module.parameters())
    assert 0 < module.trainer.callback_metrics["policy/trained_token_fraction"] < 1


def test_several_steps_of_a_rollout_use_the_first_steps_old_logprobs(tiny_model, prompts):
    """After the first update the ratio new / old must move away from 1: old is not taken anew."""
    seen = []

    class Watch(Bookkeeper):
        def on_train_batch_start(self, trainer, pl_module, step, batch_idx):
            new, _ = pl_module.scorer.logprobs(step.batch)
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


def test_an_epoch_that_ends_inside_an_optimiser_step_is_refused(tiny_model, prompts):
    with pytest.raises(LockstepError, match=r"limit_train_batches.* 3 micro-batches .*accumulate_grad_batches=2"):
        fit(tiny_model, prompts, accumulate=2, data={"mini_batches": 2}, limit_train_batches=3)


def test_a_checkpoint_of_another_model_is_refused_by_the_name_of_a_weight(tiny_model, prompts, tmp_path):
    module, _ = fit(tiny_model, prompts, max_steps=1)
    path = tmp_path / "one.ckpt"
    module.trainer.save_checkpoint(path)
    with pytest.raises(
        LockstepError, match=r"--ckpt_path: .*another model or other model\.lora settings: .*q_proj.base_layer"
    ):
        fit(tiny_model, prompts, lora=LoraSettings(r=2), ckpt_path=path)


def test_a_hopeless_run_is_saved_at_its_last_step_and_ends_in_a_line(tiny_model, prompts, tmp_path):
    class Spoiler(Bookkeeper):
        """Every advantage is NaN; notes whether a checkpoint would be written, as RolloutCheckpoint does."""

        saved_at: ClassVar[list[int]] = []

        def on_train_batch_start(self, trainer, pl_module, step, batch_idx):
            step.batch.advantages.fill_(math.nan)

        def on_train_batch_end(self, trainer, pl_module, *_):
            super().on_train_batch_end(trainer, pl_module)
            if trainer.should_stop:
                self.saved_at.append(trainer.global_step)

        def on_before_optimizer_step(self, *_):
            pass

    with pytest.raises(LockstepError, match=r"2 optimiser steps in a row .*model\.non_finite.*replay --config"):
        fit(tiny_model, prompts, max_steps=5, keeper=Spoiler(), non_finite=NonFiniteConfig(max_consecutive_steps=2))
    assert Spoiler.saved_at == [2]
