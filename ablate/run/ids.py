"""The identity of a run: a hash of everything that can change its result, and of nothing else.

In it: model, training, the six resolved operand policies, back end, seed, the data section, the digest of
the data's content, the size of its vocabulary, the digest of code that is not ours, and ``RESULT_VERSION``.
Fields of the model, data and training that have their default are left out, so that a field that a later
version adds gives no run another id; a default that changes raises ``RESULT_VERSION``.

Not in it: the names of study and arm, descriptions and resources; nor where files lie. ``data_digest`` stands
for the content of ``paths`` and ``validation_paths``, and of a tokenizer in a local file; ``code_digest`` for
that of a model's or trainer's file. So a study that is renamed, moved or extended finds its runs again, and
one whose text changed does not.

How it fails: two configurations that differ only in ways that cannot change a result (``kv_heads`` left out,
or given as the number of heads) get two ids; that costs a run, where the opposite would cost the truth.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ablate.run.config import ArmConfig, DataConfig, ModelConfig, TrainingConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ablate.base.section import Section
    from ablate.run.config import RunConfig

RESULT_VERSION = 1
"""Raised when the trainer changes its results by design: then no old run passes for a new one."""

_DEFAULTS: dict[type, dict[str, Any]] = {
    section: asdict(section()) for section in (ModelConfig, DataConfig, TrainingConfig)
}


def run_id(config: RunConfig) -> str:
    """Return the id of one run: 16 hexadecimal digits."""
    return RunIds().of_arm(config, [config.seed])[0]


class RunIds:
    """Makes the ids of many runs: each section that arms share is written out once."""

    def __init__(self) -> None:
        self._texts: dict[Section, str] = {}

    def of_arm(self, arm: ArmConfig, seeds: Sequence[int]) -> list[str]:
        """Return the ids of an arm's runs.

        What is hashed is the canonical JSON of ``[{field: value, …, "result_version": n}, seed]``, with the
        fields of ``ArmConfig`` that are not None.
        """
        values = {field.name: getattr(arm, field.name) for field in fields(ArmConfig)}
        texts = {name: self._text(_placeless(value)) for name, value in values.items() if value is not None}
        texts["result_version"] = str(RESULT_VERSION)
        pairs = ",".join(f'"{name}":{text}' for name, text in sorted(texts.items()))
        prefix = hashlib.sha256(f"[{{{pairs}}},".encode())
        ids = []
        for seed in seeds:
            digest = prefix.copy()
            digest.update(f"{seed}]".encode())
            ids.append(digest.hexdigest()[:16])
        return ids

    def _text(self, value: str | int | Section) -> str:
        if isinstance(value, str | int):
            return json.dumps(value)
        if value not in self._texts:
            self._texts[value] = _canonical(value)
        return self._texts[value]


def _canonical(section: Section) -> str:
    if not isinstance(section, (ModelConfig, DataConfig, TrainingConfig)):
        return section.text
    usual = _DEFAULTS[type(section)]
    content = {key: value for key, value in asdict(section).items() if value != usual[key]}
    if isinstance(section, DataConfig):
        content.pop("paths", None)
        content.pop("validation_paths", None)
        if section.tokenizer_path is not None and Path(section.tokenizer_path).is_absolute():
            del content["tokenizer_path"]
    if isinstance(section, ModelConfig):
        content |= {key: _placeless(content[key]) for key in ("hf", "function") if key in content}
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _placeless(value: Any) -> Any:
    """Leave of code or a model that lies in a file the function alone: the digest stands for its content."""
    if isinstance(value, str) and value.startswith("/"):
        return Path(value).name.partition(":")[2]
    return value
