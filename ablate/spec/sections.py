"""What a study file may say: the shape of each of its parts, for validation and for the JSON Schema.

Only shape and type are checked here, each part in the place where it stands. What depends on several values
at once (a width that the heads must divide) is checked on the merged arms, in ``checks``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from ablate.config import (
    BackendName,
    DataConfig,
    ModelConfig,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ResourcesConfig,
    Setting,
    TrainingConfig,
)
from ablate.diagnose.settings import Diagnostics  # noqa: TC001  pydantic reads the annotation at run time
from ablate.presets import Preset  # noqa: TC001  pydantic reads the annotation at run time
from ablate.recipes import RecipeSpec, RecipeWord, expand_word

MAX_SEEDS = 10_000

# Built on first use: a verb that reads no study does not pay for it.
_CLOSED = ConfigDict(extra="forbid", defer_build=True)


def _count_seeds(value: Any) -> Any:
    if type(value) is int and 0 < value <= MAX_SEEDS:
        return list(range(value))
    if isinstance(value, list) and 0 < len(value) <= MAX_SEEDS:
        return value
    raise PydanticCustomError("seeds", "not seeds")


RecipeEntry = Annotated[
    RecipeSpec,
    BeforeValidator(expand_word, json_schema_input_type=RecipeWord | RecipeSpec),
    Field(description="one word, or which GEMMs run in FP4, how they are stabilised, and the rest's format"),
]
Backend = Annotated[
    BackendName,
    Field(description="who quantises and multiplies; auto: the fastest that this machine has"),
]
Description = Annotated[str, Field(description="free text, shown in the report")]
Crossing = Literal["confirmed", "first_eval"]


@dataclass(frozen=True, kw_only=True, config=_CLOSED)
class ModelSection(ModelConfig):
    """A model: a published one by name, or field by field; fields beside a preset change it."""

    preset: Annotated[Preset | None, Field(description="a published model; fields beside it change it")] = (
        None
    )


@dataclass(frozen=True, kw_only=True, config=_CLOSED)
class BaseSection:
    """What every arm starts from. Any field of it can be a factor of the grid."""

    model: ModelSection = Field(default_factory=ModelSection)
    data: DataConfig = Field(default_factory=DataConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    recipe: RecipeEntry = Field(default_factory=RecipeSpec)
    backend: Backend = "auto"
    trainer: Annotated[
        str | None,
        Field(description="your own training function instead: package.module:function or file.py:function"),
    ] = None
    resources: ResourcesConfig = Field(default_factory=ResourcesConfig)


SECTIONS = ("model", "data", "training", "recipe", "backend", "trainer", "resources")


@dataclass(frozen=True, kw_only=True, config=_CLOSED)
class ArmSection(BaseSection):
    """One arm: whatever it names is laid over what it inherits."""

    from_: Annotated[
        str | None, Field(alias="from", description="the arm to inherit from; default: the base")
    ] = None
    description: Description | None = None


@dataclass(frozen=True, kw_only=True, config=_CLOSED)
class TargetSection:
    """The validation loss at which arms are compared; exactly one of the two units."""

    val_loss: Annotated[
        PositiveFloat | None, Field(description="validation loss in nats per token, e.g. 3.3")
    ] = None
    perplexity: Annotated[PositiveFloat | None, Field(description="exp(val_loss), e.g. 27.1")] = None
    crossing: Annotated[
        Crossing,
        Field(
            description="confirmed: the first crossing that the next evaluation confirms, interpolated; "
            "first_eval: the first evaluation at or under the target, as MLPerf scores"
        ),
    ] = "confirmed"


@dataclass(frozen=True, kw_only=True, config=_CLOSED)
class GridSection:
    """Arms as the product of factors."""

    factors: Annotated[
        dict[str, Any],
        Field(description="path of a field → its values, as a list or as {label: value}", min_length=1),
    ]
    from_: Annotated[
        str | None, Field(alias="from", description="the named arm that every cell inherits from")
    ] = None
    zip: Annotated[
        list[list[str]], Field(description="groups of factors that step together, not crossed")
    ] = Field(default_factory=list)
    exclude: Annotated[
        list[dict[str, Any]], Field(description="cells to leave out: those that match every pair of a rule")
    ] = Field(default_factory=list)
    senseless: Annotated[
        Literal["error", "drop"],
        Field(description="a cell whose recipe contradicts itself: an error, or dropped and listed"),
    ] = "error"


@dataclass(frozen=True, kw_only=True, config=_CLOSED)
class StudyFile:
    """A study: arms to compare, each run with every seed."""

    name: Annotated[str, Field(description="names the study's folder in the storage")]
    baseline: Annotated[str, Field(description="the arm against which costs are stated")]
    target: TargetSection
    description: Description | None = None
    seeds: Annotated[
        list[NonNegativeInt],
        BeforeValidator(_count_seeds, json_schema_input_type=PositiveInt | list[NonNegativeInt]),
        Field(description="how many seeds (0, 1, …), or a list of them"),
    ] = Field(default_factory=lambda: [0, 1])
    paired_seeds: Annotated[
        bool, Field(strict=True, description="compare arms seed by seed (paired differences)")
    ] = False
    baseline_again: Annotated[
        bool,
        Field(
            strict=True,
            description="run the baseline once more with as many other seeds, as an arm of its own in which "
            "nothing should be found (A/A)",
        ),
    ] = False
    waive: Annotated[
        list[Setting],
        Field(description="compare runs although they differ in this; the report says so"),
    ] = Field(default_factory=list)
    diagnostics: Annotated[
        Diagnostics | None,
        Field(description="measure along each run how far its quantised GEMMs are from exact; default: not"),
    ] = None
    base: BaseSection = Field(default_factory=BaseSection)
    arms: Annotated[dict[str, ArmSection | None], Field(description="named arms")] = Field(
        default_factory=dict
    )
    grid: GridSection | None = None
