"""The trainer's side of the audit on tiny random models, against float64 loops over plain forward passes."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from app.audit.attribution.distance import distance
from app.audit.sides.condition import SamplingSupport, TrainerCondition
from app.audit.sides.trainer_side import TrainerSide
from app.audit.types import AuditRow, TokenScores
from app.errors import LockstepError
from app.policy.lora import LoraSettings, add_adapters
from app.policy.scoring import sampled_logprobs
from app.types import Decoding
from tests.audit.plants_trainer import (
    merged_weights,
    padded_scoring,
    scoring_at,
    spread_adapters,
    wrong_attention,
    wrong_router,
)
from tests.conftest import tiny_llama

VOCABULARY = 40
LENGTHS = [(9, 4), (2, 6), (5, 1), (1, 3), (12, 7), (3, 2)]  # (prompt, completion), not sorted
TOKENS = sum(completion for _, completion in LENGTHS)
DEFAULT = TrainerCondition()
ALONE = TrainerCondition(arrangement="single_rows")
CLOSE = 1e-5
"""Nats between two float32 arrangements of the same scores."""


def audit_rows(seed: int = 3) -> list[AuditRow]:
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(4, VOCABULARY, (count,), generator=generator).tolist())

    return [AuditRow(prompt_ids=ids(p), completion_ids=ids(c), finish_reason="stop") for p, c in LENGTHS]


def side(policy, rows=None, **settings) -> TrainerSide:
    settings = {"temperature": 1.0, "micro_batch_tokens": 30, "autocast": nullcontext} | settings
    return TrainerSide(policy.eval(), rows or audit_rows(), pad_token_id=0, device="cpu", **settings)


def llama() -> LlamaForCausalLM:
    return tiny_llama(VOCABULARY)


def experts(seed: int = 0) -> Qwen3MoeForCausalLM:
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=32,
            moe_intermediate_size=16,
            num_experts=6,
            num_experts_per_tok=2,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=64,
            initializer_range=0.3,
        )
    ).eval()


@torch.no_grad()
def plain_logits(policy, rows=None) -> list[torch.Tensor]:
    """Each row's completion logits, [T, V] float64, by the whole row's own forward."""
    found = []
    for row in rows or audit_rows():
        logits = policy(torch.tensor([[*row.prompt_ids, *row.completion_ids]])).logits[0].double()
        start = len(row.prompt_ids) - 1
        found.append(logits[start : start + len(row.completion_ids)])
    return found


def loop(policy, rows=None, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> torch.Tensor:
    """Each completion token's log-probability, token by token; a token outside the sampling support has -inf."""
    scores = []
    for row, logits in zip(rows or audit_rows(), plain_logits(policy, rows), strict=True):
        for token, values in zip(row.completion_ids, logits, strict=True):
            probabilities = (values / temperature).softmax(-1).tolist()
            ranked = sorted(range(len(probabilities)), key=lambda i: -probabilities[i])
            support, mass = ranked[: top_k or None], 0.0
            total = sum(probabilities[i] for i in support)
            nucleus = []
            for i in support:
                if mass < top_p:
                    nucleus.append(i)
                mass += probabilities[i] / total
            own = probabilities[token] / sum(probabilities[i] for i in nucleus) if token in nucleus else 0
            scores.append(math.log(own) if own else -math.inf)
    return torch.tensor(scores, dtype=torch.float64)


def agree(found: TokenScores, expected: torch.Tensor, atol: float = CLOSE) -> None:
    assert found.logprobs.dtype == torch.float64
    torch.testing.assert_close(found.logprobs, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    "condition",
    [
        DEFAULT,
        TrainerCondition(micro_batch_tokens=1),
        ALONE,
        TrainerCondition(arrangement="left_padded"),
        TrainerCondition(attention="eager"),
        TrainerCondition(attention="eager", arrangement="left_padded"),
        TrainerCondition(dtype="float32"),
    ],
    ids=str,
)
def test_every_arrangement_scores_the_same_tokens_in_the_order_of_the_rows(condition, temperature):
    policy = llama()
    found = side(policy, temperature=temperature).measure(condition)
    agree(found, loop(policy, temperature=temperature))


def test_another_temperature_and_sampling_supports():
    policy = llama()
    trainer = side(policy)
    for arrangement in ("micro_batches", "single_rows", "left_padded"):
        agree(
            trainer.measure(TrainerCondition(arrangement=arrangement, temperature=0.6)), loop(policy, temperature=0.6)
        )
        for support in (
            SamplingSupport(top_k=30),
            SamplingSupport(top_p=0.995),
            SamplingSupport(top_k=35, top_p=0.99),
            SamplingSupport(top_k=3),
        ):
            condition = TrainerCondition(arrangement=arrangement, temperature=1.5, support=support)
            expected = loop(policy, temperature=1.5, top_k=support.top_k, top_p=support.top_p)
            agree(trainer.measure(condition), expected)
    assert expected.isinf().any()
    assert not policy.get_output_embeddings()._forward_hooks


def test_the_likeliest_tokens_come_likeliest_first():
    policy = llama()
    found = side(policy, top_k=3).measure(ALONE)
    logprobs = torch.cat(plain_logits(policy)).log_softmax(-1)
    assert found.top_ids is not None
    assert found.top_logprobs is not None
    assert found.top_ids.shape == (TOKENS, 3)
    for t in range(TOKENS):
        ranked = sorted(range(VOCABULARY), key=lambda i: -float(logprobs[t, i]))[:3]
        assert found.top_ids[t].tolist() == ranked
        torch.testing.assert_close(found.top_logprobs[t], logprobs[t, ranked], rtol=0, atol=CLOSE)


def test_each_condition_is_scored_once_and_the_default_by_the_training_function():
    calls = []

    def counting(policy, batch, *, temperature, max_tokens):
        assert list(batch.lengths) == sorted(batch.lengths)
        calls.append((temperature, max_tokens))
        return sampled_logprobs(policy, batch, temperature=temperature, max_tokens=max_tokens)

    policy = llama()
    passes = []
    policy.register_forward_hook(lambda *_: passes.append(1))
    trainer = side(policy, temperature=0.9, scoring=counting)
    same = [
        DEFAULT,
        TrainerCondition(temperature=0.9),
        TrainerCondition(micro_batch_tokens=30),
        TrainerCondition(attention="sdpa", support=SamplingSupport()),
    ]
    assert len({id(trainer.measure(condition)) for condition in same}) == 1
    trainer.measure(TrainerCondition(micro_batch_tokens=15))
    assert calls == [(0.9, 30), (0.9, 15)]
    trainer.measure(ALONE)
    trainer.fit_temperature(trainer.measure(ALONE))
    trainer.fit_support()
    assert len(passes) == len(LENGTHS)
    assert len(calls) == 2


def test_attention_is_that_of_the_condition_and_then_its_own_again():
    policy = llama()
    with wrong_attention(policy, scale_error=0.3):
        trainer = side(policy)
        wrong = trainer.measure(DEFAULT)
        for kernel in ("sdpa", "eager"):
            agree(trainer.measure(TrainerCondition(attention=kernel)), loop_of("sdpa"))
            assert policy.config._attn_implementation == "planted"
        assert float((wrong.logprobs - loop_of("sdpa")).abs().max()) > 1e-2
        agree(trainer.measure(ALONE), wrong.logprobs)
    assert policy.config._attn_implementation == "sdpa"


def loop_of(kernel: str) -> torch.Tensor:
    policy = llama()
    policy.set_attn_implementation(kernel)
    return loop(policy)


def test_a_kernel_that_the_machine_lacks_is_one_line():
    policy = llama()
    with pytest.raises(LockstepError, match=r"^attention flash_attention_2 cannot be tried: [^\n]*$"):
        side(policy).measure(TrainerCondition(attention="flash_attention_2"))
    assert policy.config._attn_implementation == "sdpa"


def test_dtype_is_that_of_a_copy_without_autocast():
    policy = llama()
    rounded = copy.deepcopy(policy)
    for parameter in rounded.parameters():
        parameter.data = parameter.data.bfloat16()  # as loading in bfloat16 does: rotary frequencies stay float32
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    trainer = side(policy, autocast=lambda: torch.autocast("cpu", torch.bfloat16))
    mixed = trainer.measure(ALONE)
    agree(trainer.measure(TrainerCondition(dtype="float32", arrangement="single_rows")), loop(policy))
    agree(trainer.measure(TrainerCondition(dtype="bfloat16", arrangement="single_rows")), loop(rounded), atol=0.02)
    assert 1e-4 < distance(mixed.logprobs, loop(policy)).mean_abs < 0.05
    for name, value in policy.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, before[name])


def test_a_float32_copy_of_a_bfloat16_policy():
    policy = llama().bfloat16()
    exact = copy.deepcopy(policy).float()
    found = side(policy).measure(TrainerCondition(dtype="float32"))
    agree(found, loop(exact))
    assert policy.dtype == torch.bfloat16
    assert float((side(policy).measure(DEFAULT).logprobs - found.logprobs).abs().max()) > 1e-3


def adapted() -> LlamaForCausalLM:
    policy = llama()
    add_adapters(policy, LoraSettings(r=4, lora_alpha=8))
    spread_adapters(policy, 0.1)
    return policy


@pytest.mark.parametrize("factor", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("dtype", [None, "float32"])
def test_adapters_off_and_doubled_equal_merged_weights(factor, dtype):
    policy = adapted()
    merged = llama()
    base = dict(llama().named_parameters())
    for name, parameter in merged.named_parameters():
        layer = dict(policy.named_modules()).get(name.removesuffix(".weight"))
        if layer is not None and hasattr(layer, "lora_A"):
            product = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
            parameter.data = base[name].data + factor * (8 / 4) * product.data
    expected = loop(merged)
    own = loop(policy)
    for name, weight in merged_weights(policy, factor).items():
        torch.testing.assert_close(weight, dict(merged.named_parameters())[name].data)
    scales = [dict(module.scaling) for module in policy.modules() if hasattr(module, "lora_A")]
    condition = TrainerCondition(adapters=factor, dtype=dtype)
    agree(side(policy).measure(condition), expected)
    assert [dict(module.scaling) for module in policy.modules() if hasattr(module, "lora_A")] == scales
    assert (factor == 1) == torch.allclose(expected, own, atol=1e-3)
    assert torch.equal(loop(policy), own)


def test_merging_in_bfloat16_rounds_the_adapted_weights_alone():
    exact, rounded = merged_weights(adapted()), merged_weights(adapted(), dtype=torch.bfloat16)
    changed = {name for name in exact if not torch.equal(exact[name], rounded[name])}
    assert changed == {name for name in exact if name.endswith("_proj.weight")}


def test_adapters_of_a_policy_without_any_are_one_line():
    with pytest.raises(LockstepError, match=r"^the trainer's policy has no LoRA adapters[^\n]*$"):
        side(llama()).measure(TrainerCondition(adapters=0))


def test_consumed_prompts_take_the_place_of_those_sent():
    policy, rows = llama(), audit_rows()
    prompts = [(4, *row.prompt_ids) for row in rows]
    consumed = [
        AuditRow(prompt_ids=prompt, completion_ids=row.completion_ids, finish_reason="stop")
        for prompt, row in zip(prompts, rows, strict=True)
    ]
    trainer = side(policy)
    condition = TrainerCondition(consumed_prompts=True)
    with pytest.raises(LockstepError, match="not known"):
        trainer.measure(condition)
    trainer.consumed(prompts)
    agree(trainer.measure(condition), loop(policy, consumed))
    agree(trainer.measure(DEFAULT), loop(policy))
    trainer.consumed([row.prompt_ids for row in rows])
    agree(trainer.measure(condition), loop(policy))


@pytest.mark.parametrize("true", [0.7, 1.0, 1.3])
def test_the_temperature_of_the_engine_is_found(true):
    policy = llama()
    engine = loop(policy, temperature=true)
    engine[::7] = math.nan
    trainer = side(policy)
    assert trainer.fit_temperature(TokenScores(logprobs=engine)) == pytest.approx(true, abs=1.1e-3)


def test_the_configured_temperature_stays_when_none_is_better():
    policy = llama()
    trainer = side(policy, temperature=0.83)
    assert trainer.fit_temperature(trainer.measure(DEFAULT)) == 0.83
    noise = 0.05 * torch.randn(TOKENS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    near = side(policy, temperature=1.0).fit_temperature(TokenScores(logprobs=loop(policy) + noise))
    assert near == pytest.approx(1.0, abs=0.05)
    nothing = TokenScores(logprobs=torch.full((TOKENS,), math.nan, dtype=torch.float64))
    assert trainer.fit_temperature(nothing) == 0.83


def test_few_different_values_fit_no_temperature():
    policy = llama()
    engine = loop(policy, temperature=1.3)
    engine[9:] = math.nan
    assert side(policy).fit_temperature(TokenScores(logprobs=engine)) == 1.0
    again = loop(policy, temperature=1.3)
    again[:] = again[0]  # one value, however often
    assert side(policy).fit_temperature(TokenScores(logprobs=again)) == 1.0


def test_scoring_at_another_temperature_shows_in_the_fit_to_the_own_scores():
    policy = llama()
    trainer = side(policy, scoring=scoring_at(1.25))
    own = trainer.measure(DEFAULT)
    agree(own, loop(policy, temperature=1.25))
    assert trainer.fit_temperature(own) == pytest.approx(1.25, abs=1.1e-3)
    agree(trainer.measure(TrainerCondition(temperature=0.8)), loop(policy))


def sampled(policy, top_k: int = VOCABULARY, mass: float = 1.0) -> list[AuditRow]:
    """Rows of tokens up to rank `top_k`, with less than `mass` before them; among them the last that is allowed."""
    rows = []
    for place, (prompt, count) in enumerate(LENGTHS):
        ids = list(range(4, 4 + prompt))
        for step in range(count):
            with torch.no_grad():
                probabilities = policy(torch.tensor([ids])).logits[0, -1].double().softmax(-1)
            ordered = probabilities.sort(descending=True)
            before = ordered.values.cumsum(0) - ordered.values
            allowed = int((before[:top_k] < mass).sum())
            ids.append(int(ordered.indices[allowed - 1 if step % 2 == 0 else place % allowed]))
        rows.append(
            AuditRow(prompt_ids=tuple(ids[:prompt]), completion_ids=tuple(ids[prompt:]), finish_reason="length")
        )
    return rows


def test_the_sampling_support_of_the_engine_is_found():
    policy = llama()
    found = side(policy, sampled(policy, top_k=5)).fit_support()
    assert found[0] == SamplingSupport(top_k=5)
    rows = sampled(policy, mass=0.9)
    (_, nucleus) = side(policy, rows).fit_support()
    assert 0.85 < nucleus.top_p <= 0.9
    assert round(nucleus.top_p, 2) == nucleus.top_p
    # all are in the support at it, not all are at a hundredth less
    assert loop(policy, rows, top_p=nucleus.top_p).isfinite().all()
    assert not loop(policy, rows, top_p=nucleus.top_p - 0.01).isfinite().all()


def test_a_support_that_excludes_nothing_is_none():
    policy = llama()
    least = [int(logits[0].argmin()) for logits in plain_logits(policy)]
    rows = [
        AuditRow(prompt_ids=row.prompt_ids, completion_ids=(token,), finish_reason="length")
        for row, token in zip(audit_rows(), least, strict=True)
    ]
    assert side(policy, rows).fit_support() == ()


@torch.no_grad()
def routing_of(policy, rows, noise: float = 0.0) -> list[Decoding]:
    """What an engine would record of its routers: these logits, plus noise."""
    decodings = []
    generator = torch.Generator().manual_seed(1)
    routers = {name: module for name, module in policy.named_modules() if type(module).__name__.endswith("Router")}
    for row in rows:
        found: dict[str, torch.Tensor] = {}
        hooks = [
            module.register_forward_hook(
                lambda module, args, output, name=name, found=found: found.update({name: output[0].float()})
            )
            for name, module in routers.items()
        ]
        policy(torch.tensor([[*row.prompt_ids, *row.completion_ids][:-1]]))
        for hook in hooks:
            hook.remove()
        noisy = {name: x + noise * torch.randn(x.shape, generator=generator) for name, x in found.items()}
        decodings.append(
            Decoding(prompt_ids=row.prompt_ids, logprobs=(), top_ids=(), top_logprobs=(), router_logits=noisy)
        )
    return decodings


ROUTED = TrainerCondition(arrangement="single_rows", engine_routing=True)


def test_the_own_router_logits_change_nothing():
    policy, rows = experts(), audit_rows()
    trainer = side(policy)
    trainer.routing(routing_of(policy, rows))
    agree(trainer.measure(ROUTED), loop(policy))
    assert not any(module._forward_hooks for module in policy.modules())


def test_other_router_logits_equal_a_model_patched_by_hand():
    policy, rows = experts(), audit_rows()
    decodings = routing_of(policy, rows, noise=1.0)
    trainer = side(policy)
    trainer.routing(decodings)
    found = trainer.measure(ROUTED)
    expected = []
    for row, decoding in zip(rows, decodings, strict=True):
        patched = copy.deepcopy(policy)
        for name, logits in decoding.router_logits.items():
            top = logits.softmax(-1).topk(2)  # Qwen3's rule without norm_topk_prob
            patched.get_submodule(name).forward = lambda x, out=(logits, top.values, top.indices): out
        ids = torch.tensor([[*row.prompt_ids, *row.completion_ids][:-1]])
        with torch.no_grad():
            logprobs = patched(ids).logits[0].double().log_softmax(-1)[-len(row.completion_ids) :]
        expected += [float(logprobs[t, token]) for t, token in enumerate(row.completion_ids)]
    agree(found, torch.tensor(expected, dtype=torch.float64))
    assert not torch.allclose(found.logprobs, loop(policy), atol=1e-2)


def test_the_engines_routing_cures_a_wrong_router():
    policy, rows = experts(), audit_rows()
    healthy, engine = loop(policy), routing_of(policy, rows)
    for fault in ({"noise": 0.5}, {"dtype": torch.float8_e4m3fn}):
        with wrong_router(policy, **fault):
            trainer = side(policy)
            trainer.routing(engine)
            assert distance(healthy, trainer.measure(DEFAULT).logprobs).max_abs > 1e-2
            agree(trainer.measure(ROUTED), healthy)
    agree(side(policy).measure(DEFAULT), healthy)


def test_routing_that_is_missing_or_does_not_fit_is_one_line():
    policy, rows = experts(), audit_rows()
    trainer = side(policy)
    with pytest.raises(LockstepError, match="not recorded"):
        trainer.measure(ROUTED)
    decodings = routing_of(policy, rows)
    trainer.routing(decodings)
    with pytest.raises(LockstepError, match="unpadded rows"):
        trainer.measure(TrainerCondition(engine_routing=True))
    name = "model.layers.0.mlp.gate"
    logits = decodings[2].router_logits[name]
    for changed, message in (
        ({name: logits[1:]}, r"row 2: the engine recorded the routing of 4 tokens in model.layers.0.mlp.gate"),
        ({name: logits[:, 1:]}, "cannot take the place"),
        ({"model.layers.9.mlp.gate": logits}, "no module"),
    ):
        broken = [*decodings]
        broken[2] = Decoding(prompt_ids=(), logprobs=(), top_ids=(), top_logprobs=(), router_logits=changed)
        trainer.routing(broken)
        with pytest.raises(LockstepError, match=message) as error:
            trainer.measure(ROUTED)
        assert "\n" not in str(error.value)
        assert not any(module._forward_hooks for module in policy.modules())


FAMILIES = {  # as many shapes of what a router returns, and of rules by which it decides
    "mixtral": dict(num_local_experts=6),
    "deepseek_v3": dict(n_routed_experts=6, n_group=2, topk_group=1, q_lora_rank=8, kv_lora_rank=8, v_head_dim=16)
    | dict(qk_rope_head_dim=8, qk_nope_head_dim=8, head_dim=8, first_k_dense_replace=0, moe_intermediate_size=16)
    | dict(num_key_value_heads=2),
    "gpt_oss": dict(num_local_experts=6, layer_types=["full_attention"] * 2),
    "granitemoe": dict(num_local_experts=6),
    "phimoe": dict(num_local_experts=6),
    "ernie4_5_moe": dict(moe_num_experts=6, moe_k=2, moe_intermediate_size=16, moe_layer_start_index=0),
}


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_decide_by_their_own_rules(family):
    sizes = dict(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=2, head_dim=16)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, num_experts_per_tok=2, initializer_range=0.3)
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(sizes | heads | FAMILIES[family]))
    policy = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    names = [name for name, module in policy.named_modules() if type(module).__name__.lower().endswith("router")]
    assert len(names) == 2
    for name in names:
        for parameter in policy.get_submodule(name).parameters():
            parameter.normal_(std=0.3)  # some are 0 at first
    rows = audit_rows()[:2]

    def forms(name, seen):
        """Note the logits that the router `name` forms."""
        module = policy.get_submodule(name)
        return module.register_forward_pre_hook(
            lambda module, args: seen.update({name: linear(args[0].flatten(0, -2).float(), module)})
        )

    def linear(hidden, module):
        weight = module.weight if hasattr(module, "weight") else module.layer.weight
        return torch.nn.functional.linear(hidden, weight, getattr(module, "bias", None))

    decodings = []
    for row in rows:
        seen: dict[str, torch.Tensor] = {}
        hooks = [forms(name, seen) for name in names]
        policy(torch.tensor([[*row.prompt_ids, *row.completion_ids][:-1]]))
        for hook in hooks:
            hook.remove()
        decodings.append(
            Decoding(prompt_ids=row.prompt_ids, logprobs=(), top_ids=(), top_logprobs=(), router_logits=seen)
        )
    own = loop(policy, rows)
    with wrong_router(policy, noise=1.0):
        trainer = side(policy, rows)
        trainer.routing(decodings)
        assert distance(own, trainer.measure(ALONE).logprobs).max_abs > 1e-2
        agree(trainer.measure(ROUTED), own)


@pytest.mark.parametrize("fault", [{"columns": 3}, {"completion_shift": 2}])
def test_single_rows_cure_wrong_padding(fault):
    policy = llama()
    agree(side(policy, scoring=padded_scoring()).measure(DEFAULT), loop(policy))
    trainer = side(policy, scoring=padded_scoring(**fault))
    assert distance(loop(policy), trainer.measure(DEFAULT).logprobs).max_abs > 1e-2
    agree(trainer.measure(ALONE), loop(policy))
    agree(trainer.measure(TrainerCondition(arrangement="left_padded")), loop(policy))
