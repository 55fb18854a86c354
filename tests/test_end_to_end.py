"""Whole runs through the command line with the real vLLM: what the README promises."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
import torch

from tests.runs import QUICKSTART, ROOT, quickstart, run, scalars


def checkpoint(folder: Path) -> dict:
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True, map_location="cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The quickstart, whole."""
    folder = tmp_path_factory.mktemp("quickstart")
    quickstart(folder)
    run("export", "--config", QUICKSTART, "--trainer.default_root_dir", str(folder))
    return folder


@pytest.mark.slow
def test_quickstart_learns(trained):
    summary = json.loads((trained / "summary.json").read_text())
    assert summary["before"]["val/exact_match"] <= 0.60
    assert summary["after"]["val/exact_match"] >= 0.90
    assert {"rollout", "scoring", "update", "sync"} <= set(summary["seconds"])
    assert summary["seed"] == 1


@pytest.mark.slow
def test_float32_rollouts_match_the_trainer_through_the_whole_run(trained):
    values = scalars(trained, "rollout_correction/logprob_abs_diff_mean")
    assert len(values) == json.loads((trained / "summary.json").read_text())["steps"]
    assert max(values) < 1e-4
    assert set(scalars(trained, "rollout_correction/policy_lag")) == {0.0}


@pytest.mark.slow
def test_the_export_loads_in_transformers_and_is_what_was_trained(trained):
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(trained / "export")
    tokenizer = AutoTokenizer.from_pretrained(trained / "export")
    state = checkpoint(trained)["state_dict"]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, state[f"policy.{name}"]), name
    assert GenerationConfig.from_pretrained(trained / "export").eos_token_id == tokenizer.eos_token_id
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "37+85="}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )["input_ids"]
    answers = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert tokenizer.decode(answers[0, ids.shape[1] :], skip_special_tokens=True).isdigit()


@pytest.mark.slow
def test_the_export_trains_on_in_vllm(trained, tmp_path):
    run(
        *("fit", "--config", QUICKSTART, "--model.model_name_or_path", str(trained / "export")),
        *("--trainer.max_steps", "1", "--trainer.default_root_dir", str(tmp_path), "--weight_sync.verify", "logprobs"),
    )
    before = json.loads((tmp_path / "summary.json").read_text())["before"]["val/exact_match"]
    after = json.loads((trained / "summary.json").read_text())["after"]["val/exact_match"]
    assert before == pytest.approx(after, abs=1e-9)


@pytest.mark.parametrize(
    "inside", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["between rollouts", "inside a rollout"]
)
def test_resume_equals_the_straight_run_bit_for_bit(tmp_path, inside):
    """6 steps against 3 + 3 in a new process; with 2 steps a rollout, step 3 is inside one."""
    extra = ["--data.val", "null", "--data.mini_batches", "2" if inside else "1"]
    quickstart(tmp_path / "straight", "--trainer.max_steps", "6", *extra)
    quickstart(tmp_path / "parts", "--trainer.max_steps", "3", *extra)
    assert checkpoint(tmp_path / "parts")["global_step"] == 3
    assert (
        bool(checkpoint(tmp_path / "parts")["loops"]["fit_loop"]["state_dict"]["combined_loader"][0]["rows"]) == inside
    )
    quickstart(tmp_path / "parts", "--trainer.max_steps", "6", "--ckpt_path", "last", *extra)
    straight, parts = checkpoint(tmp_path / "straight"), checkpoint(tmp_path / "parts")
    assert straight["global_step"] == parts["global_step"] == 6
    for name, value in straight["state_dict"].items():
        assert torch.equal(value, parts["state_dict"][name]), name


def test_a_sync_that_skips_a_parameter_stops_the_run_by_name(tmp_path):
    done = run(
        *("fit", "--config", QUICKSTART, "--trainer.default_root_dir", str(tmp_path), "--trainer.max_steps", "3"),
        *("--data.val", "null", "--data.engine", "tests.faulty_engine.SkippingEngine"),
        *("--data.engine.dtype", "float32", "--data.engine.max_model_len", "64", "--model.optim.warmup_steps", "0"),
        *("--model.optim.lr_scheduler_type", "constant"),
        check=False,
    )
    assert done.returncode == 1
    assert "model.layers.1.self_attn.k_proj.weight" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert len(scalars(tmp_path, "policy/loss")) == 0  # caught in the step whose sync was broken, before it is logged


@pytest.mark.slow
def test_log_only_measures_and_leaves_the_weights_bit_for_bit(tmp_path):
    """With bfloat16 rollouts there is something to correct: with the correction the weights do differ."""
    extra = ["--trainer.max_steps", "3", "--data.val", "null", "--data.engine.dtype", "bfloat16"]
    settings = {
        "none": ["--model.correction.preset", "null"],
        "logged": ["--model.correction.preset", "verl/token_icepop", "--model.correction.log_only", "true"],
        "applied": ["--model.correction.preset", "verl/token_icepop"],
    }
    weights = {}
    for name, arguments in settings.items():
        quickstart(tmp_path / name, *extra, *arguments)
        weights[name] = checkpoint(tmp_path / name)["state_dict"]
    assert all(torch.equal(weights["none"][n], weights["logged"][n]) for n in weights["none"])
    assert not all(torch.equal(weights["none"][n], weights["applied"][n]) for n in weights["none"])
    assert scalars(tmp_path / "logged", "rollout_correction/clipped_frac")
    assert min(scalars(tmp_path / "logged", "rollout_correction/k3_kl")) > 1e-7


@pytest.mark.slow
def test_dropped_rows_are_counted_and_the_worst_are_written_with_their_tokens(tmp_path):
    quickstart(
        *(tmp_path, "--config", str(ROOT / "configs" / "off_policy.yaml"), "--data.val", "null"),
        *("--model.off_policy_sequence_mask_delta", "0.02", "--trainer.max_steps", "8"),
        *("--off_policy_mask.every_n_steps", "4"),
    )
    (table,) = (tmp_path / "lightning_logs").glob("*/off_policy_mask.csv")
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["step"] for row in rows} <= {str(step) for step in range(1, 9)}
    assert all(re.fullmatch(r"drift 0\.\d+ > 0\.02 and advantage -[\d.e-]+ < 0", row["why"]) for row in rows)
    dropped = scalars(tmp_path, "off_policy_mask/dropped_rows")
    assert len(dropped) == 2
    fractions = scalars(tmp_path, "rollout_correction/off_policy_sequence_fraction")
    assert sum(fractions) * 96 == pytest.approx(sum(dropped))  # 12 prompts x 8 completions in each of 8 steps
    assert sum(dropped) > 0


def readme_blocks() -> dict[str, str]:
    """The user example of the README: file name -> content."""
    section = (ROOT / "README.md").read_text().split("## Your own data and reward")[1].split("\n## ")[0]
    blocks = dict(re.findall(r"```(json|python|yaml)\n(.*?)```", section, flags=re.DOTALL))
    return {"prompts.jsonl": blocks["json"], "my_rewards.py": blocks["python"], "my.yaml": blocks["yaml"]}


def test_the_readmes_own_data_example_trains(tmp_path):
    for name, content in readme_blocks().items():
        (tmp_path / name).write_text(content)
    line = json.loads((tmp_path / "prompts.jsonl").read_text())
    rows = [{**line, "prompt": [{"role": "user", "content": f"{a}+{a}="}], "answer": str(2 * a)} for a in range(20, 60)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run("fit", "--config", "my.yaml", "--trainer.max_steps", "3", cwd=tmp_path)
    assert "summary" in done.stdout
    assert len(scalars(tmp_path / "runs" / "mine", "rollout/reward/closeness_mean")) == 3
