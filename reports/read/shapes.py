"""What a run store's files must look like to be read: the part of them that the analysis relies on.

A store may come from elsewhere, or be damaged; past this point nothing has to ask again what type a value
has. Keys that are not named here are let through.
"""

from __future__ import annotations

import itertools
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator
from pydantic.types import StrictBool, StrictInt, StrictStr

from ablate.store.leases import LATEST_UNIX

_Number = Annotated[float, Field(allow_inf_nan=False, strict=True)]
_Seed = Annotated[StrictInt, Field(ge=0, lt=1 << 62)]
_Count = Annotated[StrictInt, Field(ge=1, lt=1 << 31)]


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow")


class _Run(_Open):
    id: StrictStr
    seed: _Seed


class _Arm(_Open):
    name: StrictStr
    runs: list[_Run]
    tokens: Annotated[StrictInt, Field(ge=0, lt=1 << 62)] | None = None
    description: StrictStr | None = None
    again: StrictBool = False
    recipe: StrictStr | None = None
    factors: dict[str, Any] = {}
    differs: dict[str, Any] = {}
    folded: list[StrictStr] = []


class _Target(_Open):
    kind: Literal["val_loss", "perplexity"]
    value: Annotated[_Number, Field(gt=0)]
    crossing: Literal["confirmed", "first_eval"] = "confirmed"


class _Cell(_Open):
    name: StrictStr
    reason: StrictStr


class _Training(_Open):
    tokens: Annotated[StrictInt, Field(ge=0, lt=1 << 62)] | None = None
    schedule: StrictStr | None = None


class _Trial(_Open):
    values: dict[str, Any]
    state: Literal["complete", "pruned"]
    loss: _Number | None
    diverged: Annotated[StrictInt, Field(ge=0)]
    tokens: Annotated[StrictInt, Field(ge=0, lt=1 << 62)]
    runs: list[StrictStr]


class _Group(_Open):
    name: StrictStr
    arms: list[StrictStr]
    shared: dict[str, Any]
    chosen: dict[str, Any] | None
    trials: list[_Trial]


class _Tuning(_Open):
    study: StrictStr
    done: StrictBool
    fields: dict[str, Any]
    sampler: StrictStr
    trials: _Count
    tokens: Annotated[StrictInt, Field(ge=1, lt=1 << 62)]
    seeds: list[_Seed]
    groups: list[_Group]
    tuned: dict[str, StrictStr]


class _Hopeless(_Open):
    cost_above: Annotated[_Number, Field(ge=0)]
    spending: Literal["obrien-fleming", "pocock"]
    looks: Annotated[list[Annotated[StrictInt, Field(ge=2, lt=1 << 31)]], Field(min_length=2, max_length=50)]

    @field_validator("looks")
    @classmethod
    def _rise(cls, looks: list[int]) -> list[int]:
        if any(later <= earlier for earlier, later in itertools.pairwise(looks)):
            raise ValueError("looks must rise")
        return looks


class _Stop(_Open):
    diverged: _Count | None = None
    hopeless: _Hopeless | None = None


class _Plan(_Open):
    study: StrictStr
    description: StrictStr | None = None
    baseline: StrictStr
    target: _Target
    paired_seeds: StrictBool = False
    waive: list[StrictStr] = []
    stop: _Stop | None = None
    training: _Training | None = None
    arms: Annotated[list[_Arm], Field(min_length=1)]
    dropped: list[_Cell] = []
    tuning: _Tuning | None = None


class _Gemm(_Open):
    left: dict[str, Any] = {}
    right: dict[str, Any] = {}


class _Recipe(_Open):
    fprop: _Gemm = _Gemm()
    dgrad: _Gemm = _Gemm()
    wgrad: _Gemm = _Gemm()


class _Config(_Open):
    model: dict[str, Any] | None = None
    data: dict[str, Any] | None = None
    training: _Training | None = None
    recipe: _Recipe | None = None


class _Choice(_Open):
    operands: StrictStr
    backend: StrictStr
    mode: StrictStr
    detail: StrictStr


class _Environment(_Open):
    backend_mode: StrictStr | None = None
    timing_valid: StrictBool = False
    timing_why_not: StrictStr | None = None
    gpu: StrictStr | None = None
    gpu_uuid: StrictStr | None = None
    threads: _Count | None = None
    cpus_visible: _Count | None = None
    code: StrictStr | None = None
    backend_choices: list[_Choice] | None = None
    self_tests: list[dict[str, Any]] | None = None


class _Device(_Open):
    name: StrictStr
    arch: StrictStr


class _Settings(_Open):
    steps: _Count
    repeats: _Count


class _Timed(_Open):
    arm: StrictStr
    run: StrictStr
    tokens_per_sec: Annotated[list[Annotated[_Number, Field(gt=0, lt=1e300)]], Field(min_length=1)]
    backend_mode: StrictStr
    timing_valid: StrictBool
    why_not: StrictStr | None


class _Throughput(_Open):
    format: Literal[1]
    device: _Device
    code: StrictStr
    versions: dict[StrictStr, StrictStr | None]
    settings: _Settings
    measured_unix: Annotated[_Number, Field(ge=0, lt=LATEST_UNIX)]
    arms: list[_Timed]


Kind = Literal["plan", "config", "environment", "throughput"]

_ADAPTERS: dict[str, TypeAdapter[Any]] = {
    "plan": TypeAdapter(_Plan), "config": TypeAdapter(_Config), "environment": TypeAdapter(_Environment),
    "throughput": TypeAdapter(_Throughput),
}  # fmt: skip


def fault_of(kind: Kind, content: object) -> str | None:
    """Return in one line what is wrong with a file's content, None where nothing is."""
    try:
        _ADAPTERS[kind].validate_python(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the whole"
        return f"{where}: {first['msg']}"
    return None
