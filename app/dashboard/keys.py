"""The table of every logged key that is not a `rollout_correction/` one, and the look-up over both tables."""

from __future__ import annotations

import re
from dataclasses import replace

from app.metrics import table
from app.metrics.spec import Direction, Group, KeyInfo, Range, Unit, When

_LEGEND = (
    "l = old - rollout (nats, of a token), rho = exp(l), A = advantage. Where no weight is applied (level none), "
    "is_weight_* and ess* are of rho."
)
_WHEN: dict[When, str] = {
    "every step": "every step",
    "detailed": "in detailed steps, every `every_n_steps`",
    "rollout": "at each rollout",
    "report": "at each report of the off-policy mask",
    "sync": "at each weight sync",
    "canary": "at each canary after a weight sync",
    "validation": "at each validation",
}


def _keys(
    group: Group, when: When, unit: Unit, direction: Direction, denominator: str, **definitions: str | tuple[str, Range]
) -> list[KeyInfo]:
    """Keys that share all but key=definition or key=(definition, healthy); `__` stands for `/` in a key."""
    shared = {"group": group, "when": when, "unit": unit, "direction": direction, "denominator": denominator}
    infos = []
    for key, given in definitions.items():
        definition, healthy = given if isinstance(given, tuple) else (given, None)
        infos.append(KeyInfo(key=key.replace("__", "/"), definition=definition, healthy=healthy, **shared))  # type: ignore[arg-type]
    return infos


# fmt: off
KEYS: tuple[KeyInfo, ...] = (
    *_keys("dropped data", "every step", "fraction", "to 1", "valid tokens",
        policy__trained_token_fraction="reached the surrogate: not dropped, not filtered, with a weight other than 0",
    ),
    *_keys("dropped data", "rollout", "fraction", "to 0", "completion tokens",
        policy__low_entropy_fraction="kept out of the loss for their low entropy (top_entropy_quantile)",
    ),
    *_keys("dropped data", "rollout", "fraction", "to 0", "rows",
        policy__overlong_filtered_fraction="kept out of the loss for having been cut at max_tokens",
    ),
    *_keys("dropped data", "every step", "fraction", "to 0", "optimiser steps",
        policy__skipped_update_fraction=("nothing was left to train on", Range(high=0.0)),
        policy__non_finite_update_fraction=("loss or gradient was not finite, step left out", Range(high=0.0)),
    ),
    *_keys("dropped data", "rollout", "fraction", "to 0", "groups",
        rollout__frac_reward_zero_std="all rewards of the group are equal: no advantage, but for a KL penalty",
        rollout__resampled_group_fraction="replaced because all rewards were equal, by groups kept; repeats count",
    ),
    *_keys("dropped data", "report", "rows", "to 0", "-",
        off_policy_mask__dropped_rows="rows that the off-policy mask dropped since the last report",
        off_policy_mask__spared_rows="rows of as large a drift, kept because their advantage is not negative",
    ),
    *_keys("dropped data", "report", "nats", "to 0", "-",
        off_policy_mask__drift_max="largest mean of behaviour - new over the tokens of a row since the last report",
    ),
    *_keys("policy", "every step", "loss", "level", "optimiser steps",
        policy__loss="policy loss, without the KL penalty",
        policy__kl_loss="KL part of the loss, beta included",
    ),
    *_keys("policy", "every step", "nats", "to 0", "tokens",
        policy__approx_kl="k3 of KL(old ‖ new): the staleness, how far this rollout's updates moved the policy; under "
                          "bypass of KL(rollout ‖ new)",
        policy__ref_kl="estimate of KL(new ‖ reference), unweighted",
    ),
    *_keys("policy", "every step", "nats", "level", "tokens",
        policy__entropy="mean entropy of the policy at each token: falling to 0 means that exploration has ended",
    ),
    *_keys("policy", "every step", "fraction", "to 0", "tokens",
        policy__clip_fraction_low="acted on by the lower clip of the loss",
        policy__clip_fraction_high="acted on by the upper clip of the loss",
    ),
    *_keys("policy", "every step", "1", "level", "optimiser steps",
        policy__learning_rate="learning rate of the update",
    ),
    *_keys("policy", "every step", "norm", "level", "optimiser steps",
        policy__grad_norm="norm of the gradient before clipping",
    ),
    *_keys("reward", "rollout", "reward", "up", "rows",
        rollout__reward_mean="mean of the weighted sum of all reward functions",
    ),
    *_keys("reward", "rollout", "reward", "level", "rows",
        rollout__reward_std="standard deviation of the weighted sum of all reward functions",
    ),
    *_keys("reward", "rollout", "tokens", "level", "rows",
        rollout__length_mean="mean length of a completion",
        rollout__length_std="standard deviation of the length of a completion",
    ),
    *_keys("reward", "rollout", "tokens", "level", "-",
        rollout__length_max="longest completion",
    ),
    *_keys("reward", "rollout", "fraction", "to 0", "rows",
        rollout__truncated_fraction="cut at max_tokens",
    ),
    *_keys("reward", "rollout", "reward", "level", "rows",
        rollout__kl_penalty_mean="mean of what the KL penalty took from the reward",
        rollout__kl_penalty_std="standard deviation of what the KL penalty took from the reward",
    ),
    *_keys("reward", "validation", "reward", "up", "rows",
        val__reward="mean of the weighted sum of all reward functions, on the validation set",
    ),
    *_keys("reward", "validation", "tokens", "level", "rows",
        val__completion_length="mean length of a completion, on the validation set",
    ),
    *_keys("reward", "validation", "fraction", "to 0", "rows",
        val__truncated_fraction="cut at max_tokens, on the validation set",
    ),
    KeyInfo(key="rollout/reward/<name>_mean", definition="mean of one reward function, not weighted",
            group="reward", when="rollout", unit="reward", direction="up", denominator="rows that have one"),
    KeyInfo(key="rollout/reward/<name>_std", definition="standard deviation of one reward function, not weighted",
            group="reward", when="rollout", unit="reward", direction="level", denominator="rows that have one"),
    KeyInfo(key="val/<name>", definition="mean of one reward function, not weighted, on the validation set",
            group="reward", when="validation", unit="reward", direction="up", denominator="rows that have one"),
    *_keys("time", "every step", "seconds", "level", "-",
        time__rollout="seconds of the log interval spent sampling completions and scoring their rewards",
        time__scoring="seconds of the log interval spent on old and reference log-probabilities and on advantages",
        time__update="seconds of the log interval spent on forward, backward and optimiser",
        time__sync="seconds of the log interval spent bringing weights to the engine and verifying them",
    ),
    *_keys("time", "every step", "tokens per second", "up", "seconds",
        time__tokens_per_second="completion tokens of all ranks that were trained on, by the seconds of all phases",
    ),
    *_keys("time", "sync", "seconds", "level", "-",
        weight_sync__seconds="time to gather the weights, merge adapters, check and write them, on the slowest rank",
        weight_sync__verify_seconds="time of the engine's checksums and of the canary, on the slowest rank",
    ),
    *_keys("time", "sync", "gigabytes per second", "up", "-",
        weight_sync__gigabytes_per_second="bytes written into one rank's engine by weight_sync/seconds",
    ),
    *_keys("time", "sync", "megabytes", "to 0", "-",
        weight_sync__peak_memory_growth_megabytes="by how much the sync raised the most memory a process ever held (on "
                                                  "a GPU as torch allocates it, on a CPU resident), over ranks the "
                                                  "largest; 0: an earlier moment needed more",
    ),
    KeyInfo(key="mismatch_guard/<rule>", definition="a rule of the guard: 0 calm, 1 counting values beyond its "
            "threshold, 2 fired and not recovered", group="mismatch", unit="1", direction="to 0", denominator="-"),
    *_keys("correction", "every step", "ratio", "level", "-",
        adaptive_threshold__upper="upper bound of the correction in force, where it is steered",
        adaptive_threshold__lower="lower bound of the correction in force, where it is steered",
    ),
    *_keys("mismatch", "canary", "nats", "to 0", "canary tokens",
        weight_sync__canary_abs_diff_mean="mean |engine - trainer| of a few tokens sampled right after a weight sync",
    ),
)
# fmt: on
"""Every other key, in the order of the documentation."""

ALL: tuple[KeyInfo, ...] = (*(replace(info, key=table.PREFIX + info.key) for info in table.DOCUMENTED), *KEYS)
"""Both tables, by full key."""


def pattern(key: str) -> str:
    """Return the regular expression of a key's tags, unanchored; a `<placeholder>` stands for one part of a tag."""
    return "".join("[^/]+" if part.startswith("<") else re.escape(part) for part in re.split("(<[^>]+>)", key))


def find(tag: str) -> KeyInfo | None:
    """Return what a tag means; exact keys come before families. None: no table knows it."""
    exact = (info for info in ALL if info.key == tag)
    families = (info for info in ALL if "<" in info.key and re.fullmatch(pattern(info.key), tag))
    return next(exact, None) or next(families, None)


def describe(info: KeyInfo) -> str:
    """Return the Markdown that TensorBoard shows on a key's card."""
    facts = ["**unit:** " + ("none, a pure number" if info.unit == "1" else info.unit)]
    if info.denominator != "-":
        facts.append(f"**mean over:** {info.denominator}")
    if info.direction != "level":
        facts.append(f"**better:** {info.direction}")
    if info.healthy is not None:
        facts.append(f"**healthy:** {info.healthy}")
    if info.tolerable is not None:
        facts.append(f"**alarm:** {info.tolerable.outside()}")
    facts.append(f"**measured:** {_WHEN[info.when]}")
    legend = f"\n\n{_LEGEND}" if info.key.startswith(table.PREFIX) else ""
    return f"{info.definition}\n\n{' · '.join(facts)}{legend}".replace("|", "\\|")
