"""Recipes as a study file writes them, and their expansion to operand policies.

``recipe: tseng``, or ``recipe: {gemms: [fprop, wgrad], stabiliser: dht, hadamard_size: 16, rest: fp8}``. One
GEMM can differ (``wgrad: {stabiliser: dht}``), one operand of it (``wgrad: {dy: {rounding: stochastic}}``),
some layers (``layers: [{first: 2, recipe: bf16}]``) or some part of the run (``phases: [{from_fraction: 0.9,
recipe: bf16}]``). ``preset`` starts from a published recipe instead. A meaningless combination (a stabiliser
without an FP4 GEMM) raises ``SenselessRecipe``; otherwise an arm would run as another one under a wrong name.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    TypeAdapter,
    ValidationError,
    WrapSerializer,
)
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from ablate.base.config_base import Section, key, written_short
from ablate.base.errors import likely, one_of
from ablate.recipes.policy import (
    ADDED_BY,
    GEMMS,
    HIGH_FORMATS,
    NO_ROTATION,
    OPERANDS,
    STORED,
    Accumulate,
    Block,
    Deoscillate,
    Format,
    Gemm,
    GemmPolicy,
    Hadamard,
    HadamardSize,
    Later,
    LayerRecipe,
    LayerRule,
    OperandPolicy,
    Phase,
    Recipe,
    Rounding,
    Scale,
    Signs,
    SomeLayers,
    Source,
    Undo,
)
from ablate.recipes.scale_rules import SCALE_RULES, SCALES

if TYPE_CHECKING:
    from collections.abc import Iterator

GemmFormat = Literal[
    "bf16", "bf16-dequantised", "fp16", "fp8", "fp8-delayed", "fp8-rowwise", "fp8-blockwise", "mxfp8",
    "mxfp4", "nvfp4", "nvint4", "if4", "fp4_e2m1", "fp4_e3m0",
]  # fmt: skip
Stabiliser = Literal[
    "none", "sr", "sr8", "rht", "dht", "sr+rht", "sr+dht", "sr8+rht", "sr8+dht"
]
Prescale = Annotated[float, Field(gt=0, le=1, strict=True)]
_ROUNDINGS = {"sr": "stochastic", "sr8": "stochastic_8bit"}

# most are built as part of a study's model
_CLOSED = ConfigDict(extra="forbid", defer_build=True)
_FP8: dict[str, tuple[Scale, Scale, Format]] = {
    "fp8": ("tensor", "tensor", "fp8_e5m2"),
    "fp8-delayed": ("delayed", "delayed", "fp8_e5m2"),
    "fp8-rowwise": ("row", "row", "fp8_e4m3"),
    "fp8-blockwise": ("1x128", "128x128", "fp8_e4m3"),
}
"""The scales of x and dy, the scale of w, and the format of dy, as TransformerEngine and DeepSeek-V3 have
them; x and w are in E4M3."""

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("presets.json").read_text(encoding="utf-8")
)
"""The entries of the published recipes, as ``ablate.recipes.presets`` describes them."""
SHORT_RECIPES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"rest": "fp8"},
    "mxfp4": {"gemms": list(GEMMS)},
    **{name: {"preset": name} for name in PUBLISHED},
}
"""Recipes that a study can name by one word."""
if TYPE_CHECKING:
    RecipeWord = str
    PresetName = str
else:  # from the dict itself, so that the schema and the hints always agree
    RecipeWord = Literal[tuple(SHORT_RECIPES)]
    PresetName = Literal[tuple(PUBLISHED)]


def expand_word(value: Any) -> Any:
    """Replace a recipe's word by its mapping; an unknown word is an error, any other value stays."""
    if not isinstance(value, str):
        return value
    if value not in SHORT_RECIPES:
        raise PydanticCustomError(
            "literal_error", "unknown recipe", {"words": list(SHORT_RECIPES)}
        )
    return SHORT_RECIPES[value]


@dataclass(frozen=True, kw_only=True, config=_CLOSED)
class OperandSpec:
    """What differs for one operand of one GEMM, field by field of its policy."""

    format: Format | None = None
    scale: Scale | None = None
    block: Block | None = None
    rounding: Rounding | None = None
    prescale: Prescale | None = None
    undo: Undo | None = None
    hadamard: Hadamard | None = None
    signs: Signs | None = None
    permute: StrictBool | None = None
    rotated_bf16: StrictBool | None = None
    source: Source | None = None
    mask: StrictBool | None = None


@dataclass(frozen=True, kw_only=True, config=_CLOSED)
class GemmSpec:
    """What differs for one GEMM; a key left out is taken from the recipe."""

    format: GemmFormat | None = None
    stabiliser: Stabiliser | None = None
    hadamard_size: HadamardSize | None = None
    scale: Scale | None = None
    signs: Signs | None = None
    prescale: Prescale | None = None
    x: OperandSpec | None = None
    w: OperandSpec | None = None
    dy: OperandSpec | None = None


GemmEntry = Annotated[
    GemmSpec,
    BeforeValidator(
        lambda value: {"format": value} if isinstance(value, str) else value,
        json_schema_input_type=GemmFormat | GemmSpec,
    ),
]


@dataclass(frozen=True, kw_only=True, config=_CLOSED)
class LayerRecipeSpec:
    """Which GEMMs run in FP4, how they are stabilised, and what the rest runs in."""

    preset: PresetName | None = key(
        None, "start from this recipe (`ablate recipes` lists them)"
    )
    gemms: list[Gemm] = key(list, "GEMMs whose two operands are in FP4")
    format: GemmFormat = key("mxfp4", "the format of these GEMMs")
    rest: GemmFormat = key("bf16", "format of the other GEMMs")
    stabiliser: Stabiliser = key(
        "none",
        "of the FP4 GEMMs: sr = stochastic rounding (both operands, 3/4 prescale where the "
        "scale rule clips); sr8 = sr with 8 random bits; rht = random Hadamard; dht = deterministic "
        "Hadamard; sr+rht, sr+dht, sr8+rht, sr8+dht = both",
    )
    hadamard_size: HadamardSize = key(16, "group of the Hadamard rotation")
    scale: Scale | None = key(
        None, "scale rule of the FP4 GEMMs; default: the format's"
    )
    signs: Signs | None = key(None, "how often rht draws its signs; default: each step")
    prescale: Prescale | None = key(None, "of sr; default: 3/4 where values can clip")
    weight_block: Block | None = key(
        None, "what shares a scale in w, e.g. 32x32: one tile for Fprop and Dgrad"
    )
    accumulate: Accumulate = key(
        "fp32",
        "how GEMMs add, by an emulated model of a device: blackwell of NVFP4; hopper of FP8",
    )
    fprop: GemmEntry | None = None
    dgrad: GemmEntry | None = None
    wgrad: GemmEntry | None = None


LayerRecipeEntry = Annotated[
    LayerRecipeSpec,
    BeforeValidator(expand_word, json_schema_input_type=RecipeWord | LayerRecipeSpec),
    WrapSerializer(lambda spec, plain: plain(spec) or "bf16"),
]


@dataclass(frozen=True, kw_only=True, config=_CLOSED)
class LayerSpec(SomeLayers):
    """Layers that follow a recipe of their own; the first entry that names a layer decides."""

    recipe: LayerRecipeEntry


@dataclass(frozen=True, kw_only=True, config=_CLOSED)
class PhaseSpec(Later):
    """What the layers without a rule follow from a point of the run on; give one of the two starts."""

    recipe: LayerRecipeEntry


@dataclass(frozen=True, kw_only=True, eq=False, config=_CLOSED)
class RecipeSpec(Section, LayerRecipeSpec):
    """A whole recipe: the GEMMs of every linear layer, the layers that differ, and the phases of the run."""

    layers: list[LayerSpec] | None = key(
        None, "layers that differ; default: the preset's, else none"
    )
    phases: list[PhaseSpec] | None = key(
        None, "later parts of the run; default: the preset's, else none"
    )
    deoscillate: Deoscillate | None = key(
        None,
        "reset weights that oscillate between two quantised values; default: the preset's, else none",
    )


AnyRecipe = Annotated[
    RecipeSpec,
    BeforeValidator(expand_word, json_schema_input_type=RecipeWord | RecipeSpec),
]
"""A recipe as a study writes it: one word, or a mapping."""


class SenselessRecipe(ValueError):  # noqa: N818  it reads as what it is
    """A recipe whose parts contradict each other.

    ``path`` leads from the recipe to the faulty part; ``hint`` says how to mend it, where that is known.
    """

    def __init__(self, message: str, *path: str | int, hint: str | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.hint = hint


@contextmanager
def _at(*path: str | int) -> Iterator[None]:
    """Put the path of a part before that of a contradiction in it, also of one that pydantic found."""
    try:
        yield
    except SenselessRecipe as fault:
        raise SenselessRecipe(str(fault), *path, *fault.path, hint=fault.hint) from None
    except ValidationError as error:
        first = error.errors()[0]
        context = first.get("ctx", {})
        message = str(context.get("error", first["msg"]))
        raise SenselessRecipe(message, *path, *context.get("key", ())) from None


def read_recipe(written: Any) -> Recipe:
    """Read a recipe that Python or the command line gives as a word, a mapping, or the text of one.

    A mapping is as in a study file (``{gemms: [wgrad]}``), or has every operand, as ``Recipe.text`` has them.
    A study file's own recipes are read with the whole file, so that each fault has its line.

    Raises:
        ValueError: an unknown word or key, with the valid ones, or parts that contradict each other.
        TypeError: neither a word nor a mapping.
    """
    if not isinstance(written, str | dict):
        raise TypeError(
            f"a recipe cannot be {written!r} (expected {one_of([*SHORT_RECIPES, 'a mapping'])})"
        )
    if isinstance(written, str) and written.lstrip().startswith("{"):
        from ruamel.yaml import YAML
        from ruamel.yaml.error import YAMLError

        try:
            written = YAML(typ="safe", pure=True).load(written)
        except YAMLError:
            raise ValueError(
                f"a recipe cannot be '{written}': not valid YAML"
            ) from None
    try:
        if "rules" in written:
            return TypeAdapter(Recipe).validate_python(written)
        recipe = resolve(TypeAdapter(AnyRecipe).validate_python(written))
    except ValidationError as error:
        raise ValueError(_first_fault(error)) from None
    # Not in ``resolve``: another cell of a study's grid may have a rotation.
    if "hadamard_size" in written and not any(
        policy.hadamard for policy in recipe.policies
    ):
        hint = "write stabiliser: rht or dht beside it, or leave it out"
        raise ValueError(
            f"hadamard_size: expected a Hadamard of this size, got none ({hint})"
        )
    return recipe


def _first_fault(error: ValidationError) -> str:
    """Say in one line what pydantic found first, with the valid words."""
    fault = error.errors()[0]
    message = fault["msg"]
    unknown = fault["input"]
    known = fault.get("ctx", {}).get("words", ())
    if fault["type"] == "unexpected_keyword_argument" and len(fault["loc"]) == 1:
        message = "unknown key"
        unknown = fault["loc"][0]
        known = list(vars(RecipeSpec()))
    elif fault["type"] == "literal_error" and known:
        message = f"unknown recipe '{unknown}'"
    if known:
        message += (
            f" ({likely(str(unknown), known, f'expected {one_of(list(known))}')})"
        )
    path = ".".join(map(str, fault["loc"]))
    return f"{path}: {message}" if path else message


def resolve(spec: RecipeSpec) -> Recipe:
    """Expand a recipe from a study file to operand policies.

    Raises:
        SenselessRecipe: contradictory parts, such as a stabiliser without an FP4 GEMM.
    """
    layer = _layer(spec)
    preset = _published(spec.preset) if spec.preset else Recipe()
    rules = _parts("layers", spec, preset.rules, LayerRule)
    phases = _parts("phases", spec, preset.phases, Phase)
    resets = spec.deoscillate or preset.deoscillate
    with _at():
        recipe = Recipe(**vars(layer), rules=rules, phases=phases, deoscillate=resets)
    if resets and not any(part.fprop.right.has_fixed_grid for part in recipe.parts):
        hint = "name fprop in gemms, or leave it out"
        raise SenselessRecipe(
            "deoscillate with no quantised weight to act on", "deoscillate", hint=hint
        )
    return recipe


def _parts(
    key: str, spec: RecipeSpec, of_preset: tuple[Any, ...], kind: type
) -> tuple[Any, ...]:
    """Expand the layers or phases of a recipe, or take those of its preset."""
    parts = []
    written = getattr(spec, key)
    for index, entry in enumerate(of_preset if written is None else written):
        with _at(key, index, "recipe"):
            if written is None:
                recipe = _adding(entry.recipe, spec.accumulate)
            else:
                recipe = _layer(entry.recipe)
        with _at(key, index, "from_tokens"):
            parts.append(kind(**vars(entry) | {"recipe": recipe}))
    return tuple(parts)


def as_written(recipe: LayerRecipe) -> dict[str, Any]:
    """Write a recipe as a study file may, in plain data: ``resolve`` makes the same of it."""
    written: dict[str, Any] = {}
    for gemm, operand, policy in recipe.operands():
        if not policy.is_untouched:
            defaults = vars(OperandPolicy(format=policy.format))
            changed = {
                name: value
                for name, value in vars(policy).items()
                if value != defaults[name]
            }
            written.setdefault(gemm, {})[operand] = {"format": policy.format, **changed}
        if recipe.gemm(gemm).accumulate != "fp32":
            written["accumulate"] = recipe.gemm(gemm).accumulate
    if isinstance(recipe, Recipe):
        for name, parts in (("layers", recipe.rules), ("phases", recipe.phases)):
            if parts:
                written[name] = [
                    written_short(part) | {"recipe": as_written(part.recipe) or "bf16"}
                    for part in parts
                ]
        if recipe.deoscillate is not None:
            written["deoscillate"] = written_short(recipe.deoscillate)
    return written


@cache
def _published(name: str) -> Recipe:
    return resolve(RecipeSpec(**PUBLISHED[name]["written"]))


def _adding(layer: LayerRecipe, accumulate: Accumulate) -> LayerRecipe:
    """Let the GEMMs of a recipe sum as ``accumulate`` says, where it is of their formats."""
    changed = {}
    for gemm in GEMMS:
        policy = layer.gemm(gemm)
        if policy.can_add_as(accumulate):
            changed[gemm] = replace(policy, accumulate=accumulate)
    return replace(layer, **changed)


def _layer(spec: LayerRecipeSpec) -> LayerRecipe:
    """Expand a recipe for one layer; refuse keys that no GEMM would use."""
    if len(set(spec.gemms)) != len(spec.gemms):
        raise SenselessRecipe(f"a GEMM is named twice in {spec.gemms}", "gemms")
    written = {}
    for name, default in vars(LayerRecipeSpec()).items():
        value = getattr(spec, name)
        if name not in ("preset", "accumulate", *GEMMS) and value != default:
            written[name] = value
    if spec.preset and written:
        name = next(iter(written))
        message = f"{name} beside preset '{spec.preset}', which says it already"
        hint = "leave it out, or write under fprop, dgrad or wgrad what differs"
        raise SenselessRecipe(message, name, hint=hint)
    if "format" in written and not spec.gemms:
        message = f"format '{spec.format}' without gemms, which it is for"
        hint = "name the GEMMs in gemms, or the format in rest"
        raise SenselessRecipe(message, "format", hint=hint)
    own_keys: dict[Gemm, dict[str, Any]] = {}
    all_keys: dict[Gemm, dict[str, Any]] = {}
    policies: dict[str, GemmPolicy] = {}
    for gemm in GEMMS:
        own_keys[gemm] = _written(getattr(spec, gemm))
        fmt = spec.format if gemm in spec.gemms else spec.rest
        all_keys[gemm] = {**vars(spec), "format": fmt, **own_keys[gemm]}
        with _at(gemm):
            policies[gemm] = _policy(gemm, own_keys[gemm], all_keys[gemm])
    _refuse_idle_keys(written, own_keys, all_keys)
    with _at():
        layer = LayerRecipe(**policies)
    adding = _adding(layer, spec.accumulate)
    if spec.accumulate != "fp32" and adding == layer:
        formats = " or ".join(ADDED_BY[spec.accumulate])
        raise SenselessRecipe(
            f"accumulate '{spec.accumulate}' with no GEMM whose operands are both {formats} (with neither fp32 "
            "scales of rows or groups nor undo: operand)",
            "accumulate",
        )
    return adding


_NEEDS = {
    "signs": ("rht", "a random Hadamard"),
    "prescale": ("sr", "stochastic rounding"),
}
"""Keys that act only with a stabiliser."""


def _refuse_idle_keys(
    written: dict[str, Any],
    own_keys: dict[Gemm, dict[str, Any]],
    all_keys: dict[Gemm, dict[str, Any]],
) -> None:
    """Refuse keys of the whole recipe that act on no GEMM."""
    low = [gemm for gemm in GEMMS if _is_low(all_keys[gemm]["format"])]
    for name, value in written.items():
        if name in ("gemms", "format", "rest", "hadamard_size"):
            continue
        users = [gemm for gemm in low if name not in own_keys[gemm]]
        if name == "weight_block":
            users = [gemm for gemm in users if gemm != "wgrad"]
        if not users:
            hint = "name the GEMMs in gemms, or leave it out"
            raise SenselessRecipe(
                f"{name} '{value}' with no FP4 GEMM to act on", name, hint=hint
            )
        if name in _NEEDS:
            word, message = _NEEDS[name]
            if not any(word in all_keys[gemm]["stabiliser"] for gemm in low):
                raise SenselessRecipe(
                    f"{name} '{value}' without {message} (stabiliser {word})", name
                )


def _written(spec: GemmSpec | OperandSpec | None) -> dict[str, Any]:
    if spec is None:
        return {}
    return {name: value for name, value in vars(spec).items() if value is not None}


def _is_low(fmt: str) -> bool:
    """Whether a stabiliser can act on this format: FP4 or a format with block scales."""
    return fmt not in ("bf16-dequantised", *HIGH_FORMATS, *_FP8)


def _policy(gemm: Gemm, own_keys: dict[str, Any], keys: dict[str, Any]) -> GemmPolicy:
    """``own_keys``: the keys written for this GEMM; ``keys``: these and the recipe's."""
    preset = keys["preset"]
    anew = {name: value for name, value in own_keys.items() if name not in STORED}
    if preset and anew and "format" not in anew:
        raise SenselessRecipe(
            f"{', '.join(anew)} on {gemm} of preset '{preset}' without its format: say it too"
        )
    if not _is_low(keys["format"]):
        for name in ("stabiliser", "scale", "signs", "prescale"):
            value = anew.get(name, "none")
            if value != "none":
                raise SenselessRecipe(
                    f"{name} '{value}' on {gemm}, which is not in FP4"
                )
    operands = OPERANDS[gemm]
    for name in STORED:
        if name in own_keys and name not in operands:
            raise SenselessRecipe(
                f"{gemm} has no operand {name} (it has {' and '.join(operands)})"
            )
    sides: dict[str, Any] = {}
    for side, name in zip(("left", "right"), operands, strict=True):
        if preset and not anew:
            fields = vars(getattr(_published(preset).gemm(gemm), side))
        else:
            fields = _operand(name, keys)
        changes = _written(own_keys.get(name))
        if changes.get("format", fields["format"]) != fields["format"]:
            # use the defaults of the new format
            changes = {"scale": "none", "block": "none", **changes}
        if changes.get("hadamard") == 0:  # what belongs to a rotation goes with it
            changes = NO_ROTATION | changes
        sides[side] = OperandPolicy(**fields | changes)
    return GemmPolicy(**sides)


def _operand(name: str, keys: dict[str, Any]) -> dict[str, Any]:
    """Return a policy's fields by the keys of its GEMM.

    SR takes Tseng's 3/4 prescale if the MXFP4 scale rule can clip.
    """
    fmt = keys["format"]
    if fmt in HIGH_FORMATS:
        return {"format": fmt}
    if fmt == "bf16-dequantised":  # x and w as the forward GEMM multiplied them
        return {
            "format": "bf16",
            "source": "high_precision" if name == "dy" else "forward",
        }
    if fmt in _FP8:
        scale, scale_of_w, format_of_dy = _FP8[fmt]
        return {
            "format": format_of_dy if name == "dy" else "fp8_e4m3",
            "scale": scale_of_w if name == "w" else scale,
        }
    fields = {"format": fmt, "scale": keys["scale"] or "none"}
    if name == "w":
        fields["block"] = keys["weight_block"] or "none"
    stabilisers = keys["stabiliser"].split("+")
    if stabilisers[0] in _ROUNDINGS:
        rule = SCALE_RULES[keys["scale"] or SCALES[fmt][0]]
        clips = fmt == "mxfp4" and rule.can_clip
        fields["rounding"] = _ROUNDINGS[stabilisers[0]]
        fields["prescale"] = keys["prescale"] or (0.75 if clips else 1.0)
    if "rht" in stabilisers or "dht" in stabilisers:
        fields["hadamard"] = keys["hadamard_size"]
        fields["signs"] = (keys["signs"] or "step") if "rht" in stabilisers else "none"
    return fields
