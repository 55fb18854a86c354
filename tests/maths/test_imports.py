"""The maths room needs torch alone: it is read, tested and reused without the trainer's heavy packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import app.maths

FORBIDDEN = ("lightning", "pytorch_lightning", "vllm", "deepspeed", "transformers", "torchmetrics")


def test_maths_imports_torch_only() -> None:
    root = Path(app.maths.__file__).parent
    paths = [path.relative_to(root.parents[1]).with_suffix("") for path in root.rglob("*.py")]
    modules = sorted(".".join(path.parts).removesuffix(".__init__") for path in paths)
    assert "app.maths.correction.compute" in modules
    lines = [f"import {module}" for module in modules]
    lines.append(f"import sys; print([name for name in {FORBIDDEN!r} if name in sys.modules])")
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
