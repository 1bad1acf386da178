"""The identity of a run: a hash of everything that can change its result, and of nothing else.

Included: model, training, the six resolved operand policies, back end, seed, the data section, the digest of
the data's content, the vocabulary size, the digest of user code, the fork (how the run trained before it, and
where it is), the recipe of the run whose routes it replays, and ``RESULT_VERSION``. Default values of model,
data and training fields are left out: a changed default raises ``RESULT_VERSION``.
Of a command: its words and environment before templates are filled, its version; not how its log is read.
Excluded: names of study and arm, descriptions, resources, file locations and ``model.allow``, which only says
what the user knows. ``data_digest`` represents the content of ``paths`` and ``validation_paths``, and of a
tokenizer in a local file; ``code_digest`` represents the file of a model or trainer. So a renamed, moved or
extended study finds its runs again; a study whose text changed does not.

How it fails: two configurations with different fields but the same result (``kv_heads`` omitted, or equal to
the number of heads) get two ids. This costs a run; the opposite error would give a wrong result.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ablate.run.command import Command
from ablate.run.config import ArmConfig, DataConfig, Fork, ModelConfig, TrainingConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ablate.base.config_base import Section
    from ablate.run.config import RunConfig

RESULT_VERSION = 1
"""Raised when the trainer changes its results by design, so that no old run counts as a new one.

One more where a scale is delayed: those became TransformerEngine's to the bit.
"""

_DEFAULTS: dict[type, dict[str, Any]] = {
    section: asdict(section()) for section in (ModelConfig, DataConfig, TrainingConfig)
}


def run_id(config: RunConfig) -> str:
    """Return the id of one run: 16 hexadecimal digits."""
    return run_ids(config, [config.seed])[0]


def run_ids(arm: ArmConfig, seeds: Sequence[int]) -> list[str]:
    """Return the ids of an arm's runs, in the order of ``seeds``.

    The hashed text is the canonical JSON of ``[{field: value, …, "result_version": n}, seed]``, with the
    fields of ``ArmConfig`` that are not None.
    """
    values = {field.name: getattr(arm, field.name) for field in fields(ArmConfig)}
    texts = {
        name: _canonical(_placeless(value))
        for name, value in values.items()
        if value is not None
    }
    has_delayed = any('"scale":"delayed"' in text for text in texts.values())
    texts["result_version"] = str(RESULT_VERSION + has_delayed)
    pairs = ",".join(f'"{name}":{text}' for name, text in sorted(texts.items()))
    prefix = hashlib.sha256(f"[{{{pairs}}},".encode())
    ids = []
    for seed in seeds:
        digest = prefix.copy()
        digest.update(f"{seed}]".encode())
        ids.append(digest.hexdigest()[:16])
    return ids


@lru_cache(maxsize=4096)  # arms share sections
def _canonical(section: str | int | Section) -> str:
    if isinstance(section, str | int):
        return json.dumps(section)
    if isinstance(section, Fork):
        training = _canonical(section.training)
        return f'{{"recipe":{section.recipe.text},"tokens":{section.tokens},"training":{training}}}'
    if isinstance(section, Command):
        content = section.identity
    elif isinstance(section, ModelConfig | DataConfig | TrainingConfig):
        defaults = _DEFAULTS[type(section)]
        content = {
            key: value
            for key, value in asdict(section).items()
            if value != defaults[key]
        }
    else:
        return section.text
    if isinstance(section, DataConfig):
        content.pop("paths", None)
        content.pop("validation_paths", None)
        if (
            section.tokenizer_path is not None
            and Path(section.tokenizer_path).is_absolute()
        ):
            del content["tokenizer_path"]
    if isinstance(section, ModelConfig):
        content.pop("allow", None)
        content |= {
            key: _placeless(content[key])
            for key in ("hf", "function")
            if key in content
        }
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _placeless(value: Any) -> Any:
    """Drop the path from a reference to a local file and keep the function; the digest covers the content."""
    if isinstance(value, str) and value.startswith("/"):
        return Path(value).name.partition(":")[2]
    return value
