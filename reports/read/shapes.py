"""What a run store's files must look like to be read: the part of them that the analysis relies on.

A store may come from elsewhere, or be damaged; past this point nothing has to ask again what type a value
has. Keys that are not named here are let through.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.types import StrictBool, StrictInt, StrictStr

from ablate.store.leases import LATEST_UNIX

_Number = Annotated[float, Field(allow_inf_nan=False, strict=True)]
_Count = Annotated[StrictInt, Field(ge=1, lt=1 << 31)]


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow")


class _Training(_Open):
    tokens: Annotated[StrictInt, Field(ge=0, lt=1 << 62)] | None = None
    schedule: StrictStr | None = None


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


Kind = Literal["config", "environment", "throughput"]

_ADAPTERS: dict[str, TypeAdapter[Any]] = {
    "config": TypeAdapter(_Config), "environment": TypeAdapter(_Environment),
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
