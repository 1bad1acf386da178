"""The content of the run store's files as types: single values, and all files except the plan.

A store may come from elsewhere, or be damaged; code that uses these types need not check a value's type
again. ``whole`` is a file's unchanged content, for code that only compares or shows it.

How it fails: content that does not fit is a ``ValueError`` of one line, which names the place.
"""

from __future__ import annotations

from dataclasses import field, replace
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, dataclass_transform

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from typing_extensions import TypedDict  # pydantic asks for it before Python 3.12

from ablate.backends.device import Device  # noqa: TC001  pydantic reads the annotation at run time

if TYPE_CHECKING:
    from collections.abc import Callable

# Built on first use: a module that imports these types reads one file or none.
PLAIN = ConfigDict(defer_build=True)

# Strict: a quoted number, or true in place of a number, is damage.
Text = Annotated[str, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Whole = Annotated[int, Field(strict=True)]
Number = Annotated[float, Field(allow_inf_nan=False, strict=True)]
# Sums of numbers below this bound stay exact.
Tokens = Annotated[Whole, Field(ge=0, lt=1 << 62)]
Seed = Annotated[Whole, Field(ge=0, lt=1 << 62)]
Time = Annotated[Number, Field(ge=0, lt=1e11)]
"""Unix seconds; no valid time is later than the year 5138."""
Count = Annotated[Whole, Field(ge=1, lt=1 << 31)]


T = TypeVar("T")
_adapter: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)


@dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(field,)
)
def stored(cls: type[T]) -> type[T]:
    """Make a class a frozen dataclass whose fields are checked: an object in a file of the store."""
    return dataclass(frozen=True, kw_only=True, config=PLAIN)(cls)  # type: ignore[return-value]


def checked(kind: type[T], content: object) -> T:
    """Validate a file's content as a dataclass.

    Raises:
        ValueError: the content does not fit; one line that names the place.
    """
    try:
        value: T = _adapter(kind).validate_python(content)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, fault["loc"])) or "the whole"
        raise ValueError(f"{place}: {fault['msg']}") from None
    return value


class _TrainingKeys(TypedDict, total=False):
    tokens: Tokens | None
    warmup_tokens: Tokens | None
    decay_tokens: Tokens | None
    schedule: Text | None


class _GemmKeys(TypedDict, total=False):
    left: dict[str, Any]
    right: dict[str, Any]


class _RecipeKeys(TypedDict, total=False):
    fprop: _GemmKeys
    dgrad: _GemmKeys
    wgrad: _GemmKeys


def _with(keys: type) -> AfterValidator:
    """Check these keys of a dictionary; other keys stay, unchecked."""

    def check(content: dict[str, Any]) -> dict[str, Any]:
        checked(keys, content)
        return content

    return AfterValidator(check)


Training = Annotated[dict[str, Any], _with(_TrainingKeys)]
"""A section ``training`` as the file holds it; of imported runs it has only what their logs tell."""


@stored
class RecordedConfig:
    """``config.json``: our own ``RunConfig``, or what the logs of an imported run tell."""

    model: dict[str, Any] | None = None
    data: dict[str, Any] | None = None
    training: Training | None = None
    recipe: Annotated[dict[str, Any], _with(_RecipeKeys)] | None = None
    whole: dict[str, Any] = field(default_factory=dict)

    def with_training(self, **values: Any) -> RecordedConfig:
        """Return a copy with these values of ``training``, also in ``whole``."""
        training = (self.training or {}) | values
        return replace(
            self, training=training, whole=self.whole | {"training": training}
        )


@stored
class ChosenBackend:
    """Which back end did one kind of GEMM, and how."""

    operands: Text
    backend: Text
    mode: Text
    detail: Text


@stored
class SelfTest:
    """A check of a back end before a run. ``figures``: bits that sums keep, of the accumulator's test."""

    passed: Flag = True
    detail: Text = ""
    figures: dict[str, Number] = field(default_factory=dict)


@stored
class Environment:
    """``environment.json``: what a run's last attempt ran on; only the keys that are used have a field."""

    ablate: Text | None = None
    git_commit: Text | None = None
    code: Text | None = None
    backend_mode: Text | None = None
    backend_choices: tuple[ChosenBackend, ...] | None = None
    self_tests: tuple[SelfTest, ...] | None = None
    gpu: Text | None = None
    world_size: Count | None = None
    fingerprints: tuple[Text, ...] = ()
    whole: dict[str, Any] = field(default_factory=dict)


@stored
class Speed:
    """An arm's speed: tokens/s of every repeat, their median, and their spread, (max − min) / median.

    ``run``: the id of the timed configuration's run, which shows when a record is out of date.
    ``timing_valid``: native arithmetic on an unshared device; ``why_not``: the reason if not.
    ``threads``: threads of the processor, as many as a run of the arm has.
    """

    arm: Text
    run: Text
    tokens_per_sec: Annotated[
        tuple[Annotated[Number, Field(gt=0, lt=1e300)], ...], Field(min_length=1)
    ]
    median: Number
    spread: Number
    over_baseline: Number | None = None
    peak_memory_bytes: Whole | None = None
    threads: Count = 1
    backend_mode: Text
    timing_valid: Flag
    why_not: Text | None


@stored
class SpeedSettings:
    """Timed steps of a repeat, untimed steps before the first repeat, and repeats in each turn of an arm."""

    steps: Count
    warmup: Whole = 0
    repeats: Count


@stored
class SpeedRecord:
    """``throughput.json``: what was timed, on what, with what, how, and when.

    ``clock_mhz``: of the device; ``other_work``: what else was on it.
    """

    format: Literal[1] = 1
    study: Text
    device: Device
    code: Text
    clock_mhz: Number | None = None
    other_work: Text | None = None
    versions: dict[str, Text | None]
    settings: SpeedSettings
    measured_unix: Time
    arms: tuple[Speed, ...]


def with_whole(kind: type[T], content: object) -> T:
    """Validate the content of ``config.json`` or ``environment.json`` and keep it in ``whole``.

    Raises:
        ValueError: the content does not fit; one line that names the place.
    """
    return checked(
        kind, {**content, "whole": content} if isinstance(content, dict) else content
    )
