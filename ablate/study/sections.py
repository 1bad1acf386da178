"""What a study file may say: the shape of each of its parts, for validation and for the JSON Schema.

Only shape and type are checked here. The sections of base and arms are not: they are validated in ``parts``,
once for each arm, after what it inherits. What depends on several sections is checked in ``checks``.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_type_hints

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    StrictBool,
    Tag,
)
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from ablate.base.config_base import key, said
from ablate.modelled.hardware import PEAKS
from ablate.recipes import AnyRecipe, RecipeSpec
from ablate.run.architecture import Preset  # noqa: TC001  pydantic reads the annotation at run time
from ablate.run.command import Command
from ablate.run.config import (
    BackendName,
    DataConfig,
    ModelConfig,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ResourcesConfig,
    Setting,
    TrainingConfig,
)
from ablate.run.diagnostics import Diagnostics  # noqa: TC001  pydantic reads the annotation at run time

MAX_SEEDS = 10_000
MAX_LOOKS = 50
MAX_NAME = 80

# Built on first use: a verb that reads no study does not pay for it.
_CLOSED = ConfigDict(extra="forbid", defer_build=True)


if TYPE_CHECKING:
    _Kind = TypeVar("_Kind")
    Unchecked = Annotated[_Kind, "validated later"]
else:

    class Unchecked:
        """``Unchecked[KIND]``: a value of any kind, which the schema describes as ``KIND``."""

        def __class_getitem__(cls, kind: Any) -> Any:
            return Annotated[
                kind, PlainValidator(lambda value: value, json_schema_input_type=kind)
            ]


def _count_seeds(value: Any) -> Any:
    if type(value) is int and 0 < value <= MAX_SEEDS:
        return list(range(value))
    if isinstance(value, list) and 0 < len(value) <= MAX_SEEDS:
        return value
    raise PydanticCustomError("seeds", "not seeds")


def _different(seeds: list[int]) -> list[int]:
    if len(set(seeds)) < len(seeds):
        index = next(index for index, seed in enumerate(seeds) if seed in seeds[:index])
        raise said(f"seed {seeds[index]} given twice", None, index)
    return seeds


def name_rule(name: str) -> str | None:
    """Return the rule for names if this one breaks it, else None."""
    is_good = name.isprintable() and name == name.strip() and 0 < len(name) <= MAX_NAME
    if is_good:
        return None
    return f"1 to {MAX_NAME} printable characters, no space around"


def _folder_name(name: str) -> str:
    rule = name_rule(name)
    if (
        set(name) & set('/\\:*?"<>|')
        or name.startswith((".", "-"))
        or name.endswith(".")
        or ".." in name
    ):
        rule = (
            rule
            or "no / \\ : * ? \" < > |, no '..', no '.' or '-' in front, no '.' at the end"
        )
    elif name.lower() in ("tokens", "mlartifacts", "mlflow.db"):
        rule = "the storage uses this name itself"
    if rule:
        raise said(f"{name!r} cannot name a folder", rule)
    return name


def _fraction(value: Any) -> Any:
    """Read 5% as 0.05."""
    if isinstance(value, str) and value.endswith("%"):
        try:
            return float(value[:-1]) / 100
        except ValueError:
            pass
    return value


Fraction = Annotated[
    PositiveFloat,
    BeforeValidator(_fraction, json_schema_input_type=PositiveFloat | str),
]


@dataclass(frozen=True, kw_only=True, config=_CLOSED)
class SeedsSection:
    """As many seeds of each arm as it takes to settle it."""

    until: Literal["settled"] = key(
        ...,
        "settled: until an arm's interval leaves zero out, or, with target.within, the margin is decided",
    )
    at_most: Annotated[PositiveInt, Field(le=MAX_SEEDS)] = key(
        ..., "seeds of each arm at most"
    )
    at_least: PositiveInt = key(2, "seeds of each arm before the first look")
    narrower_than: Fraction | None = key(
        None,
        "settled, too: a token cost whose interval is narrower than this (0.1 or 10%)",
    )

    def __post_init__(self) -> None:
        if self.at_least < 2:
            raise said(
                f"a look needs 2 seeds for an interval, got {self.at_least}",
                None,
                "at_least",
            )
        if not self.at_least < self.at_most < self.at_least + MAX_LOOKS:
            message = f"expected {self.at_least + 1} to {self.at_least + MAX_LOOKS - 1} seeds, got {self.at_most}"
            raise said(
                message,
                f"a look is taken after each from {self.at_least} on",
                "at_most",
            )


def _kind(value: Any) -> str:
    if isinstance(value, dict | SeedsSection | RangeSection):
        return "[section]"
    return "[list]"


SeedList = Annotated[
    list[NonNegativeInt],
    BeforeValidator(
        _count_seeds, json_schema_input_type=PositiveInt | list[NonNegativeInt]
    ),
    AfterValidator(_different),
]
Seeds = Annotated[
    Annotated[SeedList, Tag("[list]")] | Annotated[SeedsSection, Tag("[section]")],
    Discriminator(_kind),
]
"""The tags appear in the paths of pydantic's errors; no key begins with a bracket."""


@dataclass(frozen=True, kw_only=True, eq=False, config=_CLOSED)
class ModelSection(ModelConfig):
    """A model: a published one by name, or field by field; fields beside a preset change it."""

    preset: Preset | None = key(None, "a published model; fields beside it change it")


@dataclass(frozen=True, kw_only=True, config=_CLOSED)
class ForkSection:
    """A start from another arm's state in place of the beginning; costs are counted from there."""

    from_: str | None = key(
        None, "the arm whose runs of the same seeds are continued", alias="from"
    )
    at: PositiveInt | None = key(
        None, "after so many tokens, rounded to a whole optimizer step"
    )


Trainer = Annotated[
    Annotated[Command, Tag("[section]")] | Annotated[str, Tag("[word]")],
    Discriminator(
        lambda value: "[section]" if isinstance(value, dict | Command) else "[word]"
    ),
]


@dataclass(frozen=True, kw_only=True, config=_CLOSED)
class BaseSection:
    """What every arm starts from. Any field of it can be a factor of the grid."""

    # Of a known preset a run has the fields, of an unknown one there is a fault.
    model: Unchecked[ModelSection] = Field(default_factory=ModelConfig)  # type: ignore[assignment]
    data: Unchecked[DataConfig] = Field(default_factory=DataConfig)
    training: Unchecked[TrainingConfig] = Field(default_factory=TrainingConfig)
    recipe: Unchecked[AnyRecipe] = key(
        RecipeSpec,
        "one word, or which GEMMs run in FP4, how they are stabilised, and the rest's format",
    )
    backend: Unchecked[BackendName] = key(
        "auto", "who quantises and multiplies; auto: the fastest that this machine has"
    )
    trainer: Unchecked[Trainer | None] = key(
        None,
        "your own training function instead: package.module:function or file.py:function; or a command, as "
        "{command: [python, train.py, …], metrics: …}",
    )
    code: Unchecked[str | None] = key(
        None,
        "the folder whose code the arm tests, in place of trainer.cwd; relative to the study file",
    )
    resources: Unchecked[ResourcesConfig] = Field(default_factory=ResourcesConfig)
    fork: Unchecked[ForkSection | None] = key(
        None, "start from another arm's state; default: from the beginning"
    )


SECTIONS = tuple(BaseSection.__dataclass_fields__)


@cache
def type_of(section: str) -> Any:
    """Return the type that a section of an arm is validated as."""
    hints = get_type_hints(BaseSection, include_extras=True)
    return hints[section].__metadata__[-1].json_schema_input_type


@dataclass(frozen=True, kw_only=True, config=_CLOSED)
class ArmSection(BaseSection):
    """One arm: whatever it names is laid over what it inherits."""

    from_: str | None = key(
        None, "the arm to inherit from; default: the base", alias="from"
    )
    description: str | None = key(None, "free text, shown in the report")


@dataclass(frozen=True, kw_only=True, config=_CLOSED)
class MarginSection:
    """How far an arm may be from the baseline and still count as equal; exactly one of the two."""

    cost: Fraction | None = key(None, "in token cost: 0.05 or 5%")
    loss: PositiveFloat | None = key(None, "in final loss, nats per token")

    def __post_init__(self) -> None:
        if (self.cost is None) == (self.loss is None):
            raise said(
                "a margin needs one unit",
                "give cost, such as 5%, or loss, in nats per token",
            )


@dataclass(frozen=True, kw_only=True, config=_CLOSED)
class TargetSection:
    """The validation loss at which arms are compared; exactly one of the two units."""

    val_loss: PositiveFloat | None = key(
        None, "validation loss in nats per token, e.g. 3.3"
    )
    perplexity: float | None = key(
        None, "exp(val_loss), e.g. 27.1", gt=1, allow_inf_nan=False, strict=True
    )
    crossing: Literal["confirmed", "first_eval"] = key(
        "confirmed",
        "confirmed: the first crossing that the next evaluation confirms, interpolated; "
        "first_eval: the first evaluation at or under the target, as MLPerf scores",
    )
    within: MarginSection | None = key(
        None,
        "a margin: the report says of each arm whether it is shown to be within it or outside",
    )

    def __post_init__(self) -> None:
        if (self.val_loss is None) == (self.perplexity is None):
            raise said(
                "a target needs one unit",
                "give val_loss, in nats per token, or perplexity",
            )


@dataclass(frozen=True, kw_only=True, config=_CLOSED)
class GridSection:
    """Arms as the product of factors."""

    factors: dict[str, Any] = key(
        ...,
        "path of a field → its values, as a list or as {label: value}",
        min_length=1,
    )
    from_: str | None = key(
        None, "the named arm that every cell inherits from", alias="from"
    )
    zip: list[list[str]] = key(
        list, "groups of factors that step together, not crossed"
    )
    exclude: list[dict[str, Any]] = key(
        list, "cells to leave out: those that match every pair of a rule"
    )
    senseless: Literal["error", "drop"] = key(
        "error",
        "a cell whose recipe contradicts itself: an error, or dropped and listed",
    )


MAX_TRIALS = 1000
TUNABLE = (
    "learning_rate", "warmup_tokens", "decay_tokens", "final_lr_ratio", "weight_decay", "beta1", "beta2",
    "adam_eps", "grad_clip",
)  # fmt: skip
"""Fields of training that may be tuned: what the optimizer and its schedule use."""


@dataclass(frozen=True, kw_only=True, config=_CLOSED)
class RangeSection:
    """A range of numbers to tune a field over."""

    low: NonNegativeFloat = key(..., "the lowest value tried")
    high: NonNegativeFloat = key(..., "the highest value tried")
    log: StrictBool = key(False, "even on a logarithmic scale")

    def __post_init__(self) -> None:
        if self.low >= self.high:
            raise said(f"low {self.low:g} is not below high {self.high:g}", None, "low")
        if self.log and self.low <= 0:
            raise said(
                f"a logarithmic range begins above 0, got {self.low:g}", None, "low"
            )


TunedValues = Annotated[
    Annotated[RangeSection, Tag("[section]")]
    | Annotated[list[Any], Field(min_length=1), Tag("[list]")],
    Discriminator(_kind),
]
if TYPE_CHECKING:
    Tunable = str
    Hardware = str
else:  # from the lists themselves, so that the schema and the hints always agree
    Tunable, Hardware = Literal[TUNABLE], Literal[tuple(PEAKS)]


@dataclass(frozen=True, kw_only=True, config=_CLOSED)
class TuneSection:
    """A search over fields of training, of each arm or group of arms, before the seeds run."""

    fields: dict[Tunable, TunedValues] = key(
        ..., "field of training → {low, high, log} or a list of values", min_length=1
    )
    tokens: PositiveInt = key(..., "token budget of a trial's run")
    sampler: Literal["tpe", "grid"] = key(
        "tpe", "tpe: Optuna's; grid: every combination of the lists"
    )
    trials: Annotated[PositiveInt, Field(le=MAX_TRIALS)] | None = key(
        None, "trials of each group; a grid has one for each combination"
    )
    at_once: PositiveInt = key(2, "trials of a group that are asked before any is told")
    prune: StrictBool = key(
        True, "end a trial that is worse than the median of earlier ones"
    )
    seeds: Annotated[PositiveInt, Field(le=100)] = key(
        1, "runs of each arm in a trial, at seeds of their own"
    )
    groups: dict[str, Annotated[list[str], Field(min_length=1)]] = key(
        dict, "name → arms that share one search; default: each arm has its own"
    )

    def __post_init__(self) -> None:
        if self.sampler != "grid" and self.trials is None:
            raise said(
                "missing key 'trials'",
                "how many of each group; a grid may leave it out",
            )
        if self.sampler == "grid":
            if self.trials is not None:
                hint = "leave it out: it is every combination of the lists"
                raise said(
                    "a grid has as many trials as it has combinations", hint, "trials"
                )
            for name, values in self.fields.items():
                if isinstance(values, RangeSection):
                    hint = "or sampler: tpe, which takes ranges"
                    raise said("a grid needs a list of values", hint, "fields", name)


@dataclass(frozen=True, kw_only=True, config=_CLOSED)
class StopSection:
    """When the other runs of an arm are not needed any more."""

    diverged: PositiveInt = key(..., "after so many of the arm's runs have diverged")


@dataclass(frozen=True, kw_only=True, config=_CLOSED)
class SearchSection:
    """A search over the recipes of the grid and the arms, which `ablate search` runs."""

    hardware: Hardware = key(..., "whose modelled step time is the second objective")
    budgets: tuple[PositiveInt, ...] = key(
        ...,
        "tokens of a run, rising; the better recipes of one go on to the next",
        min_length=1,
    )
    trials: PositiveInt = key(
        ..., "recipes tried at the first budget, baseline and arms among them"
    )
    objective: Literal["loss", "token_cost"] = key(
        "loss",
        "loss: validation loss at the end of the budget; token_cost: against the baseline",
    )
    shapes: Literal["study", "llama-8b"] = key(
        "study",
        "the shapes that the step time is modelled at: the study's, or of Llama 3.1 8B",
    )
    keep: float = key(
        0.33,
        "share of the recipes that goes on to the next budget",
        gt=0,
        le=1,
        strict=True,
    )
    at_once: PositiveInt = key(4, "recipes that are picked and run together")
    sampler: Literal["tpe", "random"] = key(
        "tpe", "tpe: Optuna's, learns from the results; random: does not"
    )
    seed: NonNegativeInt = key(
        1000, "seed of all runs; the study that confirms has others"
    )

    def __post_init__(self) -> None:
        for index, (before, after) in enumerate(pairwise(self.budgets), 1):
            if before >= after:
                raise said(
                    f"a budget of {after} after one of {before}",
                    "budgets rise",
                    "budgets",
                    index,
                )


@dataclass(frozen=True, kw_only=True, config=_CLOSED)
class StudyFile:
    """A study: arms to compare, each run with every seed."""

    name: Annotated[str, AfterValidator(_folder_name)] = key(
        ..., "names the study's folder in the storage"
    )
    baseline: str = key(..., "the arm against which costs are stated")
    target: TargetSection | None = key(
        ...,
        "the validation loss at which arms are compared; null: none yet, final losses are compared",
    )
    description: str | None = key(None, "free text, shown in the report")
    seeds: Seeds = Field(
        default_factory=lambda: [0, 1],
        description="how many seeds (0, 1, …), a list of them, or as many as it takes",
    )
    paired_seeds: StrictBool = key(
        True,
        "compare arms seed by seed: equal seeds share initial weights and data order",
    )
    intervals: Literal["moderated", "own"] = key(
        "moderated",
        "moderated: each arm's variance is drawn towards those of the others; own: from its own runs alone",
    )
    baseline_again: StrictBool = key(
        False,
        "run the baseline once more with as many other seeds, as an arm of its own in which "
        "nothing should be found (A/A)",
    )
    waive: list[Setting] = key(
        list, "compare runs although they differ in this; the report says so"
    )
    tune: TuneSection | None = key(
        None, "search each arm's own learning rate or the like, first"
    )
    stop: StopSection | None = key(None, "end runs that cannot matter any more")
    diagnostics: Diagnostics | None = key(
        None,
        "measure along each run how far its quantised GEMMs are from exact; default: not",
    )
    keep_weights: StrictBool = key(
        False,
        "leave each run's final weights beside its rows, as Hugging Face's libraries load them",
    )
    base: BaseSection = Field(default_factory=BaseSection)
    arms: dict[str, ArmSection | None] = key(dict, "named arms")
    grid: GridSection | None = None
    search: SearchSection | None = key(
        None, "search these recipes (`ablate search`) instead of running all"
    )

    @property
    def every_seed(self) -> list[int]:
        """All seeds that a run may have."""
        if isinstance(self.seeds, SeedsSection):
            return list(range(self.seeds.at_most))
        return self.seeds
