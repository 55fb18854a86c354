import pytest
import torch
from transformers import AutoModelForCausalLM

from app.data.collate import collate
from app.policy.scoring import output_head, sampled_logprobs
from app.types import TrainRow
from tests.conftest import tiny_llama

LENGTHS = [(3, 2), (2, 5), (6, 1), (4, 6), (1, 1)]  # (prompt, completion)


def batch(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(3)
    rows = [
        TrainRow.of_completion(
            prompt_ids=tuple(torch.randint(4, 40, (p,), generator=generator).tolist()),
            completion_ids=tuple(torch.randint(4, 40, (c,), generator=generator).tolist()),
            rollout_logprobs=None,
            advantage=0.0,
            reward=0.0,
        )
        for p, c in lengths
    ]
    return collate(rows, pad_token_id=0), rows


def one_by_one(model, rows, temperature):
    """Each row alone through the model's own forward, token by token."""
    table = []
    for row in rows:
        logits = model(torch.tensor([row.token_ids])).logits[0].double() / temperature
        logprobs = logits.log_softmax(-1)
        start = len(row.prompt_ids)
        picked = [logprobs[start - 1 + t, token] for t, token in enumerate(row.completion_ids)]
        entropies = [-(logprobs[start - 1 + t].exp() * logprobs[start - 1 + t]).sum() for t in range(len(picked))]
        table.append((torch.stack(picked), torch.stack(entropies)))
    return table


@pytest.mark.parametrize("budget", [None, 16, 8, 1])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_equals_each_row_alone(budget, temperature):
    model = tiny_llama(42).eval()
    padded, rows = batch()
    logprobs, entropy = sampled_logprobs(model, padded, temperature=temperature, max_tokens=budget, with_entropy=True)
    assert logprobs.shape == entropy.shape == padded.mask.shape
    for i, (expected, expected_entropy) in enumerate(one_by_one(model, rows, temperature)):
        count = len(expected)
        torch.testing.assert_close(logprobs[i, :count].double(), expected, rtol=2e-6, atol=1e-6)
        torch.testing.assert_close(entropy[i, :count].double(), expected_entropy, rtol=0, atol=1e-5)
        assert not logprobs[i, count:].any()


@pytest.mark.parametrize("budget", [16, 1])
def test_gradients_do_not_depend_on_the_budget(budget):
    def gradients(limit):
        model = tiny_llama(42).eval()
        padded, _ = batch()
        logprobs, _ = sampled_logprobs(model, padded, temperature=1.0, max_tokens=limit)
        (logprobs * torch.linspace(-1, 1, logprobs.numel()).view_as(logprobs)).sum().backward()
        return {name: p.grad for name, p in model.named_parameters()}

    whole, cut = gradients(None), gradients(budget)
    for name, gradient in whole.items():
        torch.testing.assert_close(cut[name], gradient, rtol=1e-4, atol=1e-5, msg=name)
        assert gradient.abs().max() > 0


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("gemma2", dict(final_logit_softcapping=5.0)),
        ("cohere", dict(logit_scale=0.25)),
        ("granite", dict(logits_scaling=4.0)),
    ],
)
def test_heads_scale_and_cap_as_the_models_forward_does(family, config):
    from transformers import AutoConfig

    sizes = dict(vocab_size=40, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    settings = AutoConfig.for_model(family, **sizes, num_key_value_heads=1, head_dim=16, **config)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(settings).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(5)
        ids = torch.tensor([[5, 6, 7]])
        hidden = model.base_model(ids).last_hidden_state
        torch.testing.assert_close(output_head(model)(hidden), model(ids).logits)
