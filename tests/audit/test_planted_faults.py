"""Audits with the real vLLM: each planted fault is named first, and a healthy pipeline is let off."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.audit.planted import FAULTS, Fault, audit, named_first, save_models

SIDES = ("temperature", "attention")
"""One factor a side, the engine's and the trainer's; the others are slow."""
FIRST = [faults[0] for faults in FAULTS.values()]
SAMPLED = [fault if fault.factor in SIDES else pytest.param(fault, marks=pytest.mark.slow) for fault in FIRST]
OTHERS = [fault for faults in FAULTS.values() for fault in faults[1:]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_models(folder)
    return folder


def label(fault: Fault) -> str:
    return f"{fault.factor}-{fault.name.replace(' ', '_')}"


def check(models: Path, fault: Fault, out: Path) -> None:
    found = audit(models, fault, out)
    assert found.verdict == "mismatch"
    assert named_first(found) == fault.factor, [(f.key, f.share) for f in found.rounds[0].factors]
    assert found.rounds[0].factors[0].share > 0.9
    assert found.rounds[0].factors[0].title in (out / "audit.txt").read_text()


@pytest.mark.parametrize("fault", SAMPLED, ids=label)
def test_a_planted_fault_is_named_first(models: Path, fault: Fault, tmp_path: Path) -> None:
    check(models, fault, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("fault", OTHERS, ids=label)
def test_at_other_strengths_too(models: Path, fault: Fault, tmp_path: Path) -> None:
    check(models, fault, tmp_path)


@pytest.mark.parametrize("experts", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["dense", "experts"])
def test_a_healthy_pipeline_is_let_off(models: Path, experts: bool, tmp_path: Path) -> None:
    found = audit(models, Fault(factor="", name="none", experts=experts), tmp_path)
    assert found.verdict == "match"
    assert not found.rounds
    assert all(check.passed is not False for check in found.checks)
    assert found.comparison.top1_agreement == 1
    assert found.comparison.distance.k3 < 1e-6


def test_equal_bfloat16_on_both_sides_is_noise(models: Path, tmp_path: Path) -> None:
    settings = {"model.dtype": "bfloat16"}
    found = audit(models, Fault(factor="", name="none", engine={"dtype": "bfloat16"}, settings=settings), tmp_path)
    assert found.verdict == "within noise"
    assert found.comparison.distance.mean_abs > 1e-3  # what float32 would call a mismatch
