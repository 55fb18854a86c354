"""The command line: every configuration parses, and every mistake gives one clear line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from app.cli import main
from app.guards.rules import Rule
from app.rewards.load import RewardSpec

ROOT = Path(__file__).parent.parent
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))


def app(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a command line, run in this process."""
    with pytest.raises(SystemExit) as ended:
        main(list(args))
    captured = capsys.readouterr()
    code = ended.value.code
    if isinstance(code, str):  # sys.exit(message): the interpreter prints it and returns 1
        return 1, captured.out, captured.err + code
    return int(code or 0), captured.out, captured.err


def assert_holds(full: object, asked: object) -> None:
    """Check that a configuration is what was asked for, with more beside it; but a list is as long as it was given."""
    if isinstance(asked, dict):
        assert isinstance(full, dict)
        for key, value in asked.items():
            assert_holds(full[key], value)
    elif isinstance(asked, list):
        assert isinstance(full, list)
        for each, value in zip(full, asked, strict=True):
            assert_holds(each, value)
    else:
        assert full == asked


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_configuration_parses_and_survives_a_round_trip(path, tmp_path, capsys):
    asked = yaml.safe_load(path.read_text())
    base = {"multi_gpu_deepspeed.yaml": "single_gpu.yaml"}.get(path.name, "quickstart.yaml")
    fragment = "rewards" not in asked.get("data", {})
    below = ["--config", str(ROOT / "configs" / base)] if fragment else []
    code, printed, stderr = app(capsys, "fit", *below, "--config", str(path), "--print_config")
    assert code == 0, stderr
    assert_holds(yaml.safe_load(printed), asked)
    again = tmp_path / "full.yaml"
    again.write_text(printed)
    assert app(capsys, "fit", "--config", str(again), "--print_config")[1] == printed


@pytest.mark.parametrize("path", [path for path in CONFIGS if "gpu" not in path.name], ids=lambda path: path.name)
def test_every_configuration_for_a_cpu_is_accepted(path, capsys):
    nowhere = ["--trainer.default_root_dir", "/dev/null/run"]  # refused after everything else was taken
    code, _, stderr = app(capsys, "fit", "--config", QUICKSTART, "--config", str(path), *nowhere)
    assert code == 1
    assert "trainer.default_root_dir=/dev/null/run" in stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("group", "key", "item", "first", "then"),
    [
        (
            *("data", "rewards", RewardSpec),
            [{"function": "length", "weight": 0.5, "options": {"max_tokens": 6, "buffer_tokens": 2}}],
            [{"function": "exact_match"}],
        ),
        (
            *("mismatch_guard", "rules", Rule),  # three, as there are of its defaults
            [{"metric": "ess", "below": 0.3, "patience": 5}] * 3,
            [{"metric": "k3_kl", "above": 0.1}, {"metric": "ess", "below": 0.5}, {"metric": "kl", "above": 1.0}],
        ),
    ],
    ids=["rewards", "rules"],
)
def test_a_list_takes_the_place_of_an_earlier_one_whole(group, key, item, first, then, tmp_path, capsys):
    for name, value in (("first", first), ("then", then)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({group: {key: value}}))
    files = [QUICKSTART, str(tmp_path / "first.yaml"), str(tmp_path / "then.yaml")]
    configs = [argument for file in files for argument in ("--config", file)]
    found = yaml.safe_load(app(capsys, "fit", *configs, "--print_config")[1])[group][key]
    assert [item(**each) for each in found] == [item(**each) for each in then]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model.loss.loss_type", "pppo"], ["model.loss.loss_type", "dapo", "cispo"]),
        (["--model.optim.learning_rat", "1"], ["model.optim.learning_rat"]),
        (["--model.optim.learning_rate", "abc"], ["model.optim.learning_rate", "float"]),
        (["--model.correction.preset", "verl/tokn"], ["verl/tokn", "verl/token_is"]),
        (["--model.correction.upper", "-1"], ["correction.upper"]),
        (["--model.loss.delta", "3", "--model.loss.loss_type", "gspo"], ["loss.delta=3.0", "gspo"]),
        (["--model.loss.kl_in_reward", "true"], ["loss.kl_in_reward", "beta"]),
        (["--model.correction.bypass", "true"], ["model.correction.bypass", "token"]),
        (["--model.correction.rejection", "[{level: token}]"], ["model.correction.rejection[0]", "give a bound"]),
        (["--model.correction.rejection", "[{levl: token}]"], ["model.correction.rejection[0]", "levl", "statistic"]),
        (["--data.resample_zero_std", "-1"], ["data.resample_zero_std=-1"]),
        (["--data.sampling.max_tokens", "0"], ["data.sampling.max_tokens=0"]),
        (["--model.off_policy_sequence_mask_delta", "-1"], ["off_policy_sequence_mask_delta=-1"]),
        (["--model.teacher_model_name_or_path", "x"], ["teacher_model_name_or_path", "beta"]),
        (
            [
                *("--model.teacher_model_name_or_path", "x", "--model.loss.beta", "0.1"),
                *("--model.off_policy_sequence_mask_delta", "0.1"),
            ],
            ["off_policy_sequence_mask_delta with model.teacher_model_name_or_path"],
        ),
        (["--data.top_entropy_quantile", "0"], ["top_entropy_quantile=0"]),
        (
            ["--data.multi_objective_aggregation", "normalize_then_sum", "--data.scale_rewards", "none"],
            ["normalize_then_sum", "scale_rewards"],
        ),
        (["--data.sampling.top_p", "0.9"], ["sampling.top_p=0.9", "cannot reproduce"]),
        (["--data.num_generations", "1"], ["data.num_generations=1"]),
        (["--data.rewards", "[{function: nope}]"], ["nope", "exact_match"]),
        (["--data.rewards", "[{function: length, weight: a}]"], ["data.rewards", "weight", "float", "Given value"]),
        (["--threads", "0"], ["threads", "v>0", "Given value: 0"]),
        (["--model.correction.level", "tokn"], ["model.correction.level", "one of ['none', 'token'", "tokn"]),
        (["--data.engine.init_args.dtpe", "float32"], ["data.engine", "VLLMEngine", "dtpe"]),
        (["--data.rewards", "null"], ["data.rewards: no reward functions", "exact_match"]),
        (["--trainer.max_stps", "3"], ["trainer.max_stps"]),
        (["--config", "nofile.yaml"], ["nofile.yaml"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_a_mistake_is_named_in_one_line(arguments, named, capsys):
    code, _, stderr = app(capsys, "fit", "--config", QUICKSTART, *arguments)
    assert code == 2
    assert len(stderr[stderr.rindex("usage:") :].splitlines()) <= 6  # not the hundred lines of every option
    last = stderr[stderr.rindex("error:") :]
    assert len(last.strip().splitlines()) == 1
    for word in named:
        assert word in last


def test_a_fault_in_the_data_names_file_and_row_before_anything_slow(tmp_path, tiny_model, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n" + "{broken\n")
    source = json.dumps({"path": str(path)})
    code, _, stderr = app(
        *(capsys, "fit", "--config", QUICKSTART, "--data.train", source, "--data.val", "null"),
        *("--model.model_name_or_path", tiny_model, "--trainer.default_root_dir", str(tmp_path)),
    )
    assert code == 1
    assert f"{path} line 2" in stderr.splitlines()[-1]


def test_a_run_folder_that_cannot_be_written_is_refused_at_once(capsys):
    code, _, stderr = app(capsys, "fit", "--config", QUICKSTART, "--trainer.default_root_dir", "/dev/null/run")
    assert code == 1
    assert "trainer.default_root_dir=/dev/null/run: cannot write there (Not a directory)" in stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"data": {"engine": {"class_path": "VLLMEngine"}}}, "app.engine.vllm.engine.VLLMEngine"),
        (
            {"data": {"engine": {"class_path": "TransformersEngine"}}},
            "app.engine.transformers_engine.TransformersEngine",
        ),
        ({"data": {"engine": {"class_path": "app.rollout.vllm_engine.VLLMEngine"}}}, "VLLMEngine"),
        (
            {"data": {"engine": {"class_path": "app.rollout.transformers_engine.TransformersEngine"}}},
            "TransformersEngine",
        ),
        ({"trainer": {"strategy": {"class_path": "app.training.strategies.ZeroStrategy"}}}, "ZeroStrategy"),
        ({"trainer": {"strategy": {"class_path": "app.training.strategies.CPUZeroStrategy"}}}, "CPUZeroStrategy"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_classes_are_found_by_name_alone_and_where_they_were_in_earlier_versions(given, meant, tmp_path, capsys):
    path = tmp_path / "given.yaml"
    path.write_text(yaml.safe_dump(given))
    code, printed, stderr = app(capsys, "fit", "--config", QUICKSTART, "--config", str(path), "--print_config")
    assert code == 0, stderr
    found = yaml.safe_load(printed)
    (group,) = given
    (key,) = given[group]
    assert found[group][key]["class_path"].endswith(meant)


@pytest.mark.parametrize("nested", [False, True])
def test_a_setting_by_its_earlier_name_is_taken_and_said(nested, tmp_path, capsys):
    path = tmp_path / "earlier.yaml"
    settings = {"data": {"resample_spreadless": 3}}
    path.write_text(yaml.safe_dump({"fit": settings} if nested else settings))
    before = ["--config", str(path), "fit"] if nested else ["fit", "--config", str(path)]
    with pytest.warns(UserWarning, match=r"data\.resample_spreadless is called data\.resample_zero_std now"):
        code, printed, stderr = app(capsys, *before, "--config", QUICKSTART, "--print_config")
    assert code == 0, stderr
    assert yaml.safe_load(printed)["data"]["resample_zero_std"] == 3
    with pytest.warns(UserWarning, match="is called"):
        _, printed, _ = app(capsys, "fit", "--config", QUICKSTART, "--data.resample_spreadless=2", "--print_config")
    assert yaml.safe_load(printed)["data"]["resample_zero_std"] == 2
    assert yaml.safe_load(path.read_text()) == ({"fit": settings} if nested else settings)  # the file stays as it is
