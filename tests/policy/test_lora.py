"""LoRA from settings to a trained, synced and exported model."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
import torch
from lightning.pytorch import seed_everything
from peft import PeftModel
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from app.engine.transformers_engine import TransformersEngine
from app.errors import LockstepError
from app.maths.objective import LossConfig
from app.policy.loading import load_policy
from app.policy.lora import LoraSettings, adapters_off, add_adapters, merge_adapters, save_adapters
from app.policy.scoring import sampled_logprobs
from app.sync.synchroniser import WeightSynchroniser
from app.training.export import export_checkpoint
from app.training.module import GRPOModule
from app.weights.gather import named_full_parameters
from app.world import World
from callbacks.weight_sync import WeightSync
from tests.conftest import tiny_llama
from tests.training.test_module import Bookkeeper, NearEngine, fit
from tests.training.test_module import prompts as prompts  # a fixture

SETTINGS = LoraSettings(r=4, lora_alpha=8)
IDS = torch.arange(4, 16).reshape(2, 6)


def adapted(folder: str, seed: int = 3) -> LlamaForCausalLM:
    """The tiny model with adapters that change its answers."""
    policy = load_policy(folder, "float32", "sdpa")
    add_adapters(policy, SETTINGS)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1, generator=generator)
    return policy


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def test_only_adapters_train_and_at_first_they_change_nothing(tiny_model):
    plain, policy = load_policy(tiny_model, "float32", "sdpa"), load_policy(tiny_model, "float32", "sdpa")
    add_adapters(policy, SETTINGS)
    assert type(policy) is type(plain)
    assert torch.equal(logits(policy), logits(plain))
    trained = [name for name, parameter in policy.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 2 * 7  # A and B, layers, linear layers of a layer
    assert all(".lora_A." in name or ".lora_B." in name for name in trained)
    assert not any(module.training for module in policy.modules())


def test_adapters_are_float32_and_drawn_by_the_seed_not_by_the_state(tiny_model):
    drawn = []
    for draws, seed in ((0, 1), (3, 1), (0, 2)):
        torch.manual_seed(seed)
        torch.rand(draws)
        policy = load_policy(tiny_model, "bfloat16", "sdpa")
        state = torch.get_rng_state()
        add_adapters(policy, SETTINGS)
        assert torch.equal(torch.get_rng_state(), state)
        drawn.append(policy.model.layers[0].mlp.up_proj.lora_A.default.weight)
    assert drawn[0].dtype == torch.float32
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_adapters_off_is_the_model_before(tiny_model):
    policy = adapted(tiny_model)
    plain = logits(load_policy(tiny_model, "float32", "sdpa"))
    with_adapters = logits(policy)
    assert not torch.allclose(with_adapters, plain, atol=1e-2)
    with suppress(RuntimeError), adapters_off(policy):
        assert torch.equal(logits(policy), plain)
        raise RuntimeError
    assert torch.equal(logits(policy), with_adapters)
    assert sum(parameter.requires_grad for parameter in policy.parameters()) == 28
    with adapters_off(tiny_llama(40)):
        pass


@pytest.mark.parametrize(
    ("target_modules", "message"),
    [
        (["lm_head"], "lm_head shares its weight with another layer"),
        (["embed_tokens", "q_proj"], "model.embed_tokens is no linear layer"),
        (["q_prj"], "Target modules {'q_prj'} not found"),
        (["norm"], "LlamaRMSNorm"),
    ],
)
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
def test_layers_that_cannot_be_adapted_are_refused(tiny_model, target_modules, message):
    policy = load_policy(tiny_model, "float32", "sdpa")
    with pytest.raises(LockstepError, match=rf"model\.lora\.target_modules=.*{message}"):
        add_adapters(policy, LoraSettings(target_modules=target_modules))


def test_rank_and_alpha_must_be_positive():
    with pytest.raises(ValueError, match=r"model\.lora\.r=0: must be above 0"):
        LoraSettings(r=0)
    with pytest.raises(ValueError, match=r"model\.lora\.lora_alpha=-1: must be above 0"):
        LoraSettings(lora_alpha=-1)


def test_the_merged_model_is_what_the_engine_was_sent_and_loads_plainly(tiny_model, tmp_path):
    policy = adapted(tiny_model)
    expected = logits(policy)
    sent = {name: tensor.clone() for name, tensor in named_full_parameters(policy)}
    merge_adapters(policy)
    merge_adapters(policy)  # nothing left to merge
    assert {name: p for name, p in policy.named_parameters() if not torch.equal(p, sent[name])} == {}
    policy.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert sorted(dict(loaded.named_parameters())) == sorted(sent)
    torch.testing.assert_close(logits(loaded), expected, rtol=1e-4, atol=1e-4)


def test_saved_adapters_load_with_peft(tiny_model, tmp_path):
    policy = adapted(tiny_model)
    save_adapters(policy, tmp_path / "lora", tiny_model)
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), tmp_path / "lora")
    assert torch.equal(logits(loaded), logits(policy))
    assert json.loads((tmp_path / "lora" / "adapter_config.json").read_text())["base_model_name_or_path"] == tiny_model


def test_the_engine_samples_with_the_merged_weights(tiny_model):
    policy = adapted(tiny_model)
    engine = TransformersEngine(device="cpu")
    engine.start(tiny_model, seed=0)
    WeightSynchroniser(engine, World()).sync(policy, 1)
    torch.testing.assert_close(logits(engine._model), logits(policy), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits(engine._model), logits(load_policy(tiny_model, "float32", "sdpa")), atol=1e-2)


class Adapters(Bookkeeper):
    """Remembers the gradients of what trains."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.gradients.append({n: p.grad.clone() for n, p in pl_module.named_parameters() if p.grad is not None})
        self.optimised = sum(len(group["params"]) for group in optimizer.param_groups)


def test_a_fit_moves_adapters_alone_and_the_engine_holds_the_merged_weights(tiny_model, prompts):
    engine, sync = TransformersEngine(device="cpu"), WeightSync(verify="logprobs")
    module, _ = fit(tiny_model, prompts, max_steps=3, engine=engine, keeper=sync, lora=SETTINGS)
    assert sync.record["count"] == 4
    assert engine.policy_version == 3
    start = dict(load_policy(tiny_model, "float32", "sdpa").named_parameters())
    for name, parameter in module.policy.named_parameters():
        if "lora_" in name:
            assert parameter.abs().max() > 0, name
        else:
            assert torch.equal(parameter, start[name.replace(".base_layer", "")]), name
    held = dict(engine._model.named_parameters())
    for name, tensor in named_full_parameters(module.policy):
        assert torch.equal(held[name], tensor), name
        assert torch.equal(tensor, start[name]) == (".self_attn." not in name and ".mlp." not in name), name


def test_the_first_gradient_is_that_of_the_full_weight_times_the_other_adapter(tiny_model, prompts):
    """L(W + s B A): dL/dB = s G Aᵀ with G = dL/dW, and dL/dA = s Bᵀ G = 0 while B is 0."""
    _, full = fit(tiny_model, prompts, max_steps=1, engine=NearEngine())
    module = GRPOModule(tiny_model, lora=SETTINGS)
    seed_everything(1)
    module.setup("fit")
    start = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    _, low_rank = fit(tiny_model, prompts, max_steps=1, engine=NearEngine(), keeper=Adapters(), lora=SETTINGS)
    assert low_rank.optimised == len(low_rank.gradients[0]) == 28
    for name, gradient in low_rank.gradients[0].items():
        if ".lora_A." in name:
            assert gradient.abs().max() == 0
        else:
            a = start[name.replace("lora_B", "lora_A")]
            g = full.gradients[0][name.replace(".lora_B.default", "")]
            torch.testing.assert_close(gradient, 8 / 4 * g @ a.T, rtol=1e-3, atol=1e-6, msg=name)


def test_gradient_checkpointing_changes_no_gradient_of_an_adapter(tiny_model, prompts):
    calls = []

    class Count(Adapters):
        def on_train_start(self, trainer, pl_module):
            super().on_train_start(trainer, pl_module)
            for layer in pl_module.policy.model.layers:
                layer.mlp.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))

    settings = {"engine": NearEngine(), "lora": SETTINGS, "max_steps": 2}
    _, plain = fit(tiny_model, prompts, keeper=Adapters(), **settings)
    _, recomputed = fit(tiny_model, prompts, keeper=Count(), gradient_checkpointing=True, **settings)
    assert len([enabled for enabled in calls if enabled]) == 2 * 2 * 2  # steps, layers, forward and in backward again
    for first, second in zip(plain.gradients, recomputed.gradients, strict=True):
        for name, gradient in first.items():
            torch.testing.assert_close(second[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    assert all(gradient.abs().max() > 0 for gradient in plain.gradients[1].values())


def test_the_reference_is_the_policy_with_its_adapters_off(tiny_model, prompts):
    """The same numbers as a second copy of the starting model, also once the adapters have moved."""
    seen = []

    class Compare(Adapters):
        def on_train_batch_start(self, trainer, pl_module, step, batch_idx):
            scores = pl_module.scorer.score(step.batch, old=True, entropy=False)
            copy = load_policy(tiny_model, "float32", "sdpa")
            reference, _ = sampled_logprobs(copy, step.batch, temperature=1.0, max_tokens=None)
            assert torch.equal(scores.ref, reference)
            seen.append((scores.old - scores.ref).abs().max().item())

    settings = {"engine": NearEngine(), "loss": LossConfig(beta=0.1), "lora": SETTINGS}
    module, _ = fit(tiny_model, prompts, keeper=Compare(), max_steps=3, **settings)
    assert module.scorer.reference is module.policy
    assert seen[0] == 0
    assert seen[2] > 1e-3


def test_a_checkpoint_brings_the_adapters_back_unmerged(tiny_model, prompts, tmp_path):
    """Merged weights in the checkpoint's base would count twice after the next sync."""
    module, _ = fit(tiny_model, prompts, max_steps=2, engine=NearEngine(), keeper=Adapters(), lora=SETTINGS)
    module.trainer.save_checkpoint(tmp_path / "a.ckpt")
    sent = {name: tensor.clone() for name, tensor in named_full_parameters(module.policy)}
    resumed = GRPOModule(tiny_model, lora=SETTINGS)
    resumed.setup("fit")
    resumed.load_state_dict(torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"])
    assert any(parameter.abs().max() > 0 for name, parameter in resumed.named_parameters() if "lora_B" in name)
    assert all(torch.equal(tensor, sent[name]) for name, tensor in named_full_parameters(resumed.policy))
    assert {name for name, p in module.named_parameters() if not torch.equal(p, resumed.get_parameter(name))} == set()


def test_export_writes_the_merged_model_and_the_adapters_beside_it(tiny_model, prompts, tmp_path):
    module, _ = fit(tiny_model, prompts, max_steps=2, engine=NearEngine(), keeper=Adapters(), lora=SETTINGS)
    module.trainer.save_checkpoint(tmp_path / "a.ckpt")
    out = export_checkpoint(GRPOModule(tiny_model, lora=SETTINGS), tmp_path / "a.ckpt", tmp_path / "out")
    merged = AutoModelForCausalLM.from_pretrained(out)
    sent = {name: tensor.clone() for name, tensor in named_full_parameters(module.policy)}
    assert [name for name, p in merged.named_parameters() if not torch.equal(p, sent[name])] == []
    adapters = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), out / "lora")
    assert torch.equal(logits(adapters), logits(module.policy))
    with pytest.raises(LockstepError, match="does not fit"):
        export_checkpoint(GRPOModule(tiny_model), tmp_path / "a.ckpt", tmp_path / "out")
