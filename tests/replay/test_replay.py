"""A skipped step's rows are computed again, and the cause is named."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from app.data.collate import collate
from app.guards.nonfinite import NonFiniteConfig, NonFiniteGuard
from app.guards.row_file import RecordedRow, RowFileHeader, read_rows, recorded_rows
from app.maths.objective import LossConfig
from app.policy.scoring import sampled_logprobs
from app.replay.probe import probe
from app.replay.replay import replay_rows
from app.replay.report import differences, report, table, verdict
from app.training.module import GRPOModule
from app.training.settings import CorrectionSettings
from app.types import StepTotals, TrainRow
from app.world import World
from tests.conftest import tiny_tokenizer


def module(folder: str, **settings) -> GRPOModule:
    made = GRPOModule(folder, **{"correction": CorrectionSettings(preset=None), **settings})
    made.setup("replay")
    return made


def recorded(*ids: int, new: float = -2.0, **fields) -> RecordedRow:
    row = TrainRow.of_completion(
        **{
            "prompt_ids": (5, 14, 6),
            "completion_ids": ids,
            "policy_version": 2,
            "rollout_logprobs": (-2.0,) * len(ids),
            "advantage": 1.0,
            "reward": 1.0,
            **fields,
        }
    )
    return RecordedRow(row=row, new_logprobs=(new,) * len(ids))


def header(**fields) -> RowFileHeader:
    return RowFileHeader(
        **{
            "step": 3,
            "rank": 0,
            "reason": "loss",
            "gradient_norm": math.nan,
            "correctable": True,
            "totals": StepTotals(tokens=10, rows=4, micro_batches=1),
            "rows_on_rank": 2,
            "settings": {},
            **fields,
        }
    )


ROWS = [recorded(7, 8, 9), recorded(10, 11, 12, advantage=-0.5)]


def test_loss_and_gradient_of_each_row_are_those_by_hand(tiny_model):
    """-A sum log pi / 10 tokens of the step, ratios 1, in float64."""
    found = replay_rows(module(tiny_model), header(), ROWS)
    assert found.finite
    whole = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
    for each, finding in zip(ROWS, found.rows, strict=True):
        policy = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64)
        for model in (policy, whole):
            logits = model(torch.tensor([each.row.token_ids])).logits[0].log_softmax(-1)
            new = torch.stack([logits[2 + t, token] for t, token in enumerate(each.row.completion_ids)])
            (-each.row.advantage * new.sum() / 10).backward()
        assert finding.gradient.norms.keys() == {name for name, _ in policy.named_parameters()}
        for name, parameter in policy.named_parameters():
            assert finding.gradient.norms[name] == pytest.approx(parameter.grad.norm().item(), rel=1e-4)
        assert finding.gradient.loss == pytest.approx(-each.row.advantage * 3 / 10, rel=1e-5)  # the ratio is 1
        assert finding.then_now == pytest.approx((new + 2).abs().max().item(), rel=1e-4)
    for name, parameter in whole.named_parameters():
        assert found.together.norms[name] == pytest.approx(parameter.grad.norm().item(), rel=1e-4)
    assert "all finite in float32" in verdict(found, tiny_tokenizer())


def test_a_planted_weight_names_its_module(tiny_model):
    trained = module(tiny_model)
    with torch.no_grad():
        trained.policy.model.layers[1].mlp.down_proj.weight[3, 5] = math.inf
    found = replay_rows(trained, header(), ROWS)
    assert found.bad_weights == {"model.layers.1.mlp.down_proj.weight": 1}
    for row in found.rows:
        assert row.first_bad_token == 0
        assert row.passage.fault.name == "model.layers.1.mlp.down_proj"
        assert row.passage.fault.input_finite
        assert row.passage.fault.bad_parameters == ("weight",)
        largest = row.passage.largest
        assert list(largest) == ["model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head"]
        assert [math.isfinite(value) for value in largest.values()] == [True, True, False, False]
        assert row.then_now is None
    text = report(found, trained.loss_settings, tiny_tokenizer())
    assert "not finite: model.layers.1.mlp.down_proj.weight (1)\n" in text
    assert "no log-probability is finite both" in text
    last = text.splitlines()[-1]
    assert last.startswith("verdict      NOT FINITE: weights, first model.layers.1.mlp.down_proj.weight; ")
    assert (
        "log-probabilities of rows 1, 2, row 1 first at model.layers.1.mlp.down_proj (its weight is not finite)" in last
    )


def test_a_planted_embedding_names_the_row_and_the_token_that_reads_it(tiny_model):
    trained = module(tiny_model)
    with torch.no_grad():
        trained.policy.lm_head.weight = torch.nn.Parameter(trained.policy.lm_head.weight.clone())  # no longer tied
        trained.policy.model.embed_tokens.weight[11] = math.nan
    found = replay_rows(trained, header(), ROWS)
    good, bad = found.rows
    assert good.finite
    assert bad.passage.fault.name == "model.embed_tokens"
    assert bad.passage.fault.column == 4  # 3 prompt tokens and one before it
    assert bad.first_bad_token == 0  # attention 0 x NaN spoils the positions before it too
    assert verdict(found, tiny_tokenizer()) == (
        "NOT FINITE: weights, first model.embed_tokens.weight; log-probabilities of row 2, row 2 first at "
        "model.embed_tokens (its weight is not finite) at position 4 '7'"
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"advantage": math.nan}, "advantage of row 2"),
        ({"old_logprobs": (-2.0, math.nan, -2.0)}, "old_logprobs of row 2"),
    ],
)
def test_a_planted_number_of_a_row_is_named(tiny_model, fields, said):
    rows = [
        recorded(7, 8, 9, old_logprobs=(-2.0,) * 3),
        recorded(10, 11, 12, **{"old_logprobs": (-2.0,) * 3, **fields}),
    ]
    found = replay_rows(module(tiny_model), header(), rows)
    assert [row.finite for row in found.rows] == [True, False]
    assert verdict(found, tiny_tokenizer()).startswith(f"NOT FINITE: {said}")


def test_a_loss_that_overflows_is_told_from_a_bad_log_probability(tiny_model):
    """Three tokens of advantage 3e38 and ratio 1: their sum is beyond float32's 3.4e38."""
    found = replay_rows(module(tiny_model), header(), [recorded(7, 8, 9, advantage=3e38)])
    (row,) = found.rows
    assert row.gradient.loss == -math.inf
    assert row.first_bad_token is None
    assert row.passage.fault is None
    assert "the loss of row 1, whose numbers are all finite" in verdict(found, tiny_tokenizer())


def test_a_gradient_alone_names_the_parameter_nearest_to_the_loss(tiny_model):
    """|x|^0.5 has value 0 and an infinite slope at 0: the forward pass is finite, the gradient is not."""
    trained = module(tiny_model)
    layer = trained.policy.model.layers[1].input_layernorm
    layer.register_forward_hook(lambda module, args, output: output + 0 * output.mul(0).abs().sqrt())
    found = replay_rows(trained, header(reason="gradient"), ROWS)
    (row, _) = found.rows
    assert math.isfinite(row.gradient.loss)
    assert row.first_bad_token is None
    assert row.passage.fault is None
    assert row.gradient.broken[-1] == "model.layers.1.input_layernorm.weight"
    assert "only the gradient of rows 1, 2" in verdict(found, tiny_tokenizer())


def test_a_value_that_arises_between_modules(tiny_model):
    policy = AutoModelForCausalLM.from_pretrained(tiny_model)

    def spoil(module, args):
        return (args[0] * math.inf,)

    policy.model.layers[0].mlp.down_proj.register_forward_pre_hook(spoil)
    ids = torch.tensor([[5, 6, 7]])
    with probe(policy, policy.get_input_embeddings(), policy.get_output_embeddings()) as passage:
        policy(ids)
    assert str(passage.fault) == "just before model.layers.0.mlp.down_proj"
    with probe(policy, policy.get_input_embeddings(), policy.get_output_embeddings()) as none:
        pass
    assert none.fault is None
    assert not none.largest


def test_from_a_training_step_to_the_verdict(tiny_model, tmp_path):
    """The guard watches what training computes; its file, with the same weights, gives the same again."""
    trained = module(tiny_model)
    with torch.no_grad():
        trained.policy.lm_head.weight = torch.nn.Parameter(trained.policy.lm_head.weight.clone())
        trained.policy.model.embed_tokens.weight[11] = math.nan
    guard = NonFiniteGuard(NonFiniteConfig(), tmp_path, World(), lambda: trained.loss_settings, tiny_tokenizer().decode)
    batch = collate([each.row for each in ROWS], pad_token_id=0, totals=header().totals)
    new, _ = sampled_logprobs(trained.policy, batch, temperature=1.0, max_tokens=None)
    _, parts = trained.step_correction.objective(batch, new)
    parts.loss.backward()
    guard.watch(batch, new, parts.loss)
    norm = torch.nn.utils.get_total_norm([p.grad for p in trained.policy.parameters()])
    with pytest.warns(UserWarning, match="the loss is not finite"):
        assert guard.close_step(norm, 3)
    (path,) = (tmp_path / "non_finite").iterdir()
    found, rows = read_rows(path)
    assert [(each.row.completion_ids, each.completion) for each in rows] == [((10, 11, 12), "6 7 8")]
    again = replay_rows(trained, found, rows)
    assert differences(found.settings, trained.loss_settings) == []
    assert again.rows[0].passage.fault.column == 4
    mended = replay_rows(module(tiny_model), found, rows)
    assert mended.finite


def test_the_same_weights_give_the_same_log_probabilities(tiny_model):
    trained = module(tiny_model)
    batch = collate([each.row for each in ROWS], pad_token_id=0)
    with torch.no_grad():
        new, _ = sampled_logprobs(trained.policy, batch, temperature=1.0, max_tokens=None)
    found = replay_rows(trained, header(), recorded_rows(batch, new, [0, 1]))
    assert max(row.then_now for row in found.rows) < 1e-5


def test_a_setting_that_differs_is_said(tiny_model):
    then = json.loads(
        json.dumps(module(tiny_model, correction=CorrectionSettings(preset="verl/seq_is_rs")).loss_settings)
    )
    now = module(tiny_model, temperature=0.7, correction=CorrectionSettings(preset="verl/seq_is_rs")).loss_settings
    assert differences(then, then) == []
    assert differences(then, now) == ["model.temperature=0.7, in the step 1.0"]
    now["model.loss"] = dataclasses.asdict(LossConfig(beta=0.1))
    assert differences(then, now)[0] == "model.loss.beta=0.1, in the step 0.0"


def test_the_report_shows_each_row_with_its_text(tiny_model):
    trained = module(tiny_model)
    text = report(replay_rows(trained, header(), ROWS), trained.loss_settings, tiny_tokenizer())
    lines = text.splitlines()
    assert lines[0].startswith(
        "step         3, rank 0: the loss was not finite, gradient norm nan; 2 of the rank's 2 rows"
    )
    assert sum(line.endswith("'1 + 2'  '3 4 5'") for line in lines) == 1  # prompt 5 14 6, completion 7 8 9
    assert sum(line.endswith("'1 + 2'  '6 7 8'") for line in lines) == 1
    assert "first bad" not in text  # an empty column is left out
    assert lines[-1].startswith("verdict      all finite")


def test_columns_are_aligned():
    assert table([{"a": "1", "b": "", "c": "xyz"}, {"a": "22", "b": "", "c": "z"}]) == ["a   c", "1   xyz", "22  z"]
