"""Objectives by name: each is a table of defaults for the other keys of `objective:`. Defines the tables and their
order.

Priority, highest first: written values, the preset, the defaults of its loss and baseline, the schema. A default is
dropped if a written value makes it meaningless (the coefficient of a KL term that was switched off).
"""

from collections.abc import Iterator, Mapping
from typing import Any

Values = Mapping[str, Any]

# Bounds of the ratio have a different meaning in each loss, so their defaults belong to the loss.
LOSSES: dict[str, Values] = {
    "clip": {"clip_low": 0.2, "clip_high": 0.28, "clip_dual": 3.0},
    "sequence_clip": {"clip_low": 3e-4, "clip_high": 4e-4, "clip_dual": None},
    "sequence_band": {"clip_low": None, "clip_high": 4e-4, "clip_dual": None, "band_low": 3e-4, "band_high": 7e-4},
    "cispo": {"clip_low": None, "clip_high": 4.0, "clip_dual": None},
    "policy_gradient": {"clip_low": None, "clip_high": None, "clip_dual": None},
}

# Your own loss has its own arguments (objective.loss_arguments).
OWN_LOSS: Values = {"clip_low": None, "clip_high": None, "clip_dual": None}

# Your own advantages (objective.advantages) replace both.
OWN_ADVANTAGES: Values = {"baseline": "none", "normalize": "none"}

# Without a group baseline, groups with equal rewards have a gradient too.
BASELINES: dict[str, Values] = {"batch": {"drop_zero_variance": False}, "none": {"drop_zero_variance": False}}

PRESETS: dict[str, Values] = {
    "grpo": {"loss": "clip", "baseline": "group", "normalize": "group", "aggregation": "token_mean"},
    "dr_grpo": {"loss": "clip", "baseline": "group", "normalize": "none", "aggregation": "seq_mean_token_sum_norm"},
    "dapo": {
        "loss": "clip",
        "baseline": "group",
        "normalize": "group",
        "aggregation": "token_mean",
        "clip_dual": 10.0,
        "overlong": {"buffer_tokens": None},
        "dynamic_sampling": {"max_rounds": 10},
    },
    "duet": {
        "loss": "clip",
        "baseline": "leave_one_out",
        "normalize": "none",
        "aggregation": "fixed_mean_token_sum_norm",
    },
    "gspo": {
        "loss": "sequence_clip",
        "baseline": "group",
        "normalize": "group",
        "aggregation": "seq_mean_token_mean",
    },
    "tbpo": {
        "loss": "sequence_band",
        "baseline": "group",
        "normalize": "group",
        "aggregation": "seq_mean_token_mean",
        "sampler_correction": {"weights": "geometric"},
    },
    "cispo": {"loss": "cispo", "baseline": "group", "normalize": "group", "aggregation": "token_mean"},
    "rloo": {
        "loss": "policy_gradient",
        "baseline": "leave_one_out",
        "normalize": "none",
        "aggregation": "seq_mean_token_sum",
    },
    "reinforce": {
        "loss": "policy_gradient",
        "baseline": "batch",
        "normalize": "none",
        "aggregation": "seq_mean_token_sum",
    },
    "reinforce_pp": {
        "loss": "clip",
        "baseline": "none",
        "normalize": "whiten",
        "aggregation": "token_mean",
        "kl": "k1",
        "kl_in": "reward",
        "kl_coef": 0.01,
    },
    "reinforce_pp_baseline": {
        "loss": "clip",
        "baseline": "group",
        "normalize": "whiten",
        "aggregation": "token_mean",
        "kl": "k2",
        "kl_in": "loss",
        "kl_coef": 0.001,
    },
}

TRUNCATE = 2.0  # sampler_correction.truncate
WEIGHTS: dict[str, Values] = {  # sampler_correction.weights; only without a mask
    "token": {"truncate": TRUNCATE},
    "sequence": {"truncate": TRUNCATE},
    "geometric": {"truncate": TRUNCATE, "floor": 1 / TRUNCATE},
}
MASKS: dict[str, Values] = {  # sampler_correction.mask
    "token": {"low": 0.5, "high": 5.0},
    "sequence": {"low": 0.5, "high": 2.0},
    "geometric": {"low": 0.999, "high": 1.001},
}


def layers(written: Values) -> Iterator[tuple[str, Values]]:
    """Yield (source, defaults), highest priority first, without `written` itself. Unknown names yield nothing: the
    schema's validation reports them."""
    name = written.get("name", "grpo")
    preset = dict(PRESETS.get(name, {}) if isinstance(name, str) else {})
    loss = written.get("loss", preset.get("loss"))
    _drop(preset, written, "loss", {key for key in preset if key.startswith("clip_")})
    if written.get("kl") == "none":
        _drop(preset, written, "kl", {"kl_coef", "kl_in"})
    own = OWN_ADVANTAGES if written.get("advantages") is not None else {}
    for key in own:
        preset.pop(key, None)
    baseline = written.get("baseline", own.get("baseline", preset.get("baseline")))
    of_baseline = BASELINES.get(baseline, {}) if isinstance(baseline, str) else {}
    if {**of_baseline, **written}.get("drop_zero_variance") is False:
        preset.pop("dynamic_sampling", None)
    yield f"objective.name: {name}", preset
    own_loss = OWN_LOSS if isinstance(loss, str) and ":" in loss else {}
    yield f"objective.loss: {loss}", LOSSES.get(loss, own_loss) if isinstance(loss, str) else {}
    yield f"objective.advantages: {written.get('advantages')}", own
    yield f"objective.baseline: {baseline}", of_baseline


def filled(written: Values) -> dict[str, Any]:
    """Return the written values, completed by the defaults of the preset, its loss and its baseline."""
    values: dict[str, Any] = {}
    for defaults in (*reversed([layer for _, layer in layers(written)]), written):
        for key, value in defaults.items():
            both = isinstance(value, Mapping) and isinstance(values.get(key), Mapping)
            values[key] = {**values[key], **value} if both else value
    return values


def origin(written: Values, key: str) -> str | None:
    """Return the source of the default of a dotted key below `objective`; None: the schema."""
    for source, values in layers(written):
        found: Any = values
        for part in key.split("."):
            if not isinstance(found, Mapping) or part not in found:
                break
            found = found[part]
        else:
            return source
    return None


def _drop(preset: dict[str, Any], written: Values, key: str, dependent: set[str]) -> None:
    if key in written and written[key] != preset.get(key):
        for name in dependent:
            preset.pop(name, None)
