"""Names of models that come with Lockstep."""

from __future__ import annotations

BUILT_IN_MODEL = "lockstep/addition-1m"


def resolve_model(model_name_or_path: str) -> str:
    """Return what Hugging Face and vLLM can load: the built-in model is made at first use, others pass through."""
    if model_name_or_path != BUILT_IN_MODEL:
        return model_name_or_path
    from app.builtin.addition_model import ensure_addition_model  # only then: it warms a model up

    return str(ensure_addition_model())


def no_such_model(model_name_or_path: str, key: str = "model.model_name_or_path") -> str:
    """Return the message for a model that cannot be found; `key` is the setting that named it."""
    return (
        f"{key}: cannot load {model_name_or_path!r}; give a local folder with config.json, a Hugging Face name, or "
        f"{BUILT_IN_MODEL!r}"
    )
