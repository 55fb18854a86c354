"""The README's Python examples run as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from app.metrics import diagnose

ROOT = Path(__file__).parent.parent


def example(words: str) -> str:
    """The one Python block of the README that has these words."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    (found,) = [block for block in blocks if words in block]
    return found


@pytest.mark.slow
def test_training_from_python_takes_thirty_lines_and_runs(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(example("GRPOModule("))
    assert len([line for line in script.read_text().splitlines() if line.strip()]) <= 34
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    printed = eval(done.stdout.strip().splitlines()[-1])
    assert 0 <= printed["rollout/reward_mean"] <= 1
    assert 0 <= printed["rollout_correction/k3_kl"] < 1e-8  # float32 on both sides, as proven


def test_the_metrics_in_somebody_elses_module_are_those_of_all_its_rows(tmp_path):
    names: dict = {}
    exec(example("class YourModule"), names)
    generator = torch.Generator().manual_seed(0)
    rows = [
        (
            torch.randint(32, (9,), generator=generator),
            -3.5 + 0.1 * torch.randn(8, generator=generator),
            torch.arange(8) < 3 + i % 5,
        )
        for i in range(12)
    ]
    pl.seed_everything(1)
    module = names["YourModule"]()
    with torch.no_grad():
        ids, rollout, mask = (torch.stack(each) for each in zip(*rows, strict=True))
        logprobs = module.policy(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.0)  # or the rows would be moved on
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        default_root_dir=str(tmp_path), precision="bf16-mixed",
    )  # fmt: skip
    trainer.fit(module, DataLoader(rows, batch_size=5))
    found = {key: value.item() for key, value in trainer.callback_metrics.items()}
    assert found["rollout_correction/k3_kl"] == pytest.approx(
        diagnose(logprobs, rollout, mask)["rollout_correction/k3_kl"], rel=1e-5
    )
    assert module.mismatch.members()[0].vector.dtype == torch.float64
