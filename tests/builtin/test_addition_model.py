import dataclasses
import hashlib

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from app.builtin.addition_model import Recipe, build_tokenizer, encode, ensure_addition_model, exact_match, fingerprint

QUICK = Recipe(
    hidden_size=64, intermediate_size=64, layers=1, heads=2, min_steps=3, exact_match_low=0.0, exact_match_high=1.0
)


def digest(folder):
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_is_made_once_reproducibly_and_leaves_the_random_state_alone(tmp_path):
    state = torch.get_rng_state()
    first = ensure_addition_model(tmp_path / "a", QUICK)
    assert torch.equal(state, torch.get_rng_state())
    made = first.stat().st_mtime_ns
    assert ensure_addition_model(tmp_path / "a", QUICK) == first
    assert first.stat().st_mtime_ns == made
    assert digest(ensure_addition_model(tmp_path / "b", QUICK)) == digest(first)
    assert not list(tmp_path.glob("*/*.unfinished"))


def test_the_cache_is_by_content():
    assert fingerprint(QUICK) != fingerprint(dataclasses.replace(QUICK, seed=1))


def test_a_folder_that_transformers_loads_with_a_tied_head_and_a_chat_template(tmp_path):
    folder = ensure_addition_model(tmp_path, QUICK)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "12+39="}], return_dict=True)["input_ids"]
    assert tokenizer.decode(ids) == "<bos>12+39="
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_a_warm_up_that_misses_its_range_says_so(tmp_path):
    hopeless = dataclasses.replace(QUICK, exact_match_low=0.99, max_steps=4)
    with pytest.raises(RuntimeError, match="after 4 supervised steps"):
        ensure_addition_model(tmp_path, hopeless)
    assert not [path for path in tmp_path.iterdir() if path.suffix == ""]


def test_exact_match_counts_whole_answers():
    tokenizer = build_tokenizer()
    ids, labels = encode([(12, 39, 51), (50, 60, 110)], tokenizer)

    class Oracle:
        """Likeliest next token: the right one, but for the last digit of the second sum."""

        def __call__(self, input_ids):
            right = torch.where(labels == -100, 0, labels)[:, 1:].clone()
            right[1, (labels[1, 1:] != -100).nonzero()[2]] = 0
            logits = torch.nn.functional.one_hot(right, len(tokenizer)).float()
            return type("Output", (), {"logits": logits})

    assert exact_match(Oracle(), ids, labels) == 0.5
