"""Recipes as a study file writes them, and their expansion to operand policies.

``recipe: tseng``, or ``recipe: {gemms: [fprop, wgrad], stabiliser: dht, hadamard_size: 16, rest: fp8}``. One
GEMM can differ (``wgrad: {stabiliser: dht}``), one operand of it (``wgrad: {dy: {rounding: stochastic}}``),
some layers (``layers: [{first: 2, recipe: bf16}]``) or some part of the run (``phases: [{from_fraction: 0.9,
recipe: bf16}]``). ``preset`` starts from a published recipe instead. A meaningless combination (a stabiliser
without an FP4 GEMM) raises ``SenselessRecipe``; otherwise an arm would run as another one under a false name.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, StrictBool
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from ablate.base.config_base import Section, key
from ablate.recipes.build import (
    GemmFormat,
    SenselessRecipe,
    Stabiliser,
    build,
    gemm_policy,
    is_low_precision,
    layer_recipe,
)
from ablate.recipes.policy import (
    GEMMS,
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
    LayerRecipe,
    LayerRule,
    Phase,
    Recipe,
    Rounding,
    Scale,
    Signs,
    Source,
    Undo,
)
from ablate.recipes.presets import PRESETS

_CLOSED = ConfigDict(extra="forbid", defer_build=True)  # most are built as part of a study's model

SHORT_RECIPES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"rest": "fp8"},
    "mxfp4": {"gemms": list(GEMMS)},
    **{name: {"preset": name} for name in PRESETS},
}
"""Recipes that a study can name by one word."""
if TYPE_CHECKING:
    RecipeWord = str
    PresetName = str
else:  # from the dict itself, so that the schema and the hints always agree
    RecipeWord = Literal[tuple(SHORT_RECIPES)]
    PresetName = Literal[tuple(PRESETS)]


def expand_word(value: Any) -> Any:
    """Return the recipe that a word abbreviates; return any other value unchanged."""
    if not isinstance(value, str):
        return value
    if value not in SHORT_RECIPES:
        raise PydanticCustomError("literal_error", "unknown recipe", {"words": list(SHORT_RECIPES)})
    return SHORT_RECIPES[value]


@dataclass(frozen=True, kw_only=True, config=_CLOSED)
class OperandSpec:
    """What differs for one operand of one GEMM, field by field of its policy."""

    format: Format | None = None
    scale: Scale | None = None
    block: Block | None = None
    rounding: Rounding | None = None
    prescale: Annotated[float | None, Field(gt=0, le=1, strict=True)] = None
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
    prescale: Annotated[float | None, Field(gt=0, le=1, strict=True)] = None
    x: OperandSpec | None = None
    w: OperandSpec | None = None
    dy: OperandSpec | None = None


def _gemm_short_form(value: Any) -> Any:
    return {"format": value} if isinstance(value, str) else value


GemmEntry = Annotated[
    GemmSpec, BeforeValidator(_gemm_short_form, json_schema_input_type=GemmFormat | GemmSpec)
]


@dataclass(frozen=True, kw_only=True, config=_CLOSED)
class LayerRecipeSpec:
    """Which GEMMs run in FP4, how they are stabilised, and what the rest runs in."""

    preset: PresetName | None = key(None, "start from this recipe (`ablate recipes` lists them)")
    gemms: list[Gemm] = key(list, "GEMMs whose two operands are in FP4")
    format: GemmFormat = key("mxfp4", "the format of these GEMMs")
    rest: GemmFormat = key("bf16", "format of the other GEMMs")
    stabiliser: Stabiliser = key(
        "none",
        "of the FP4 GEMMs: sr = stochastic rounding (both operands, 3/4 prescale where the "
        "scale rule clips); rht = random Hadamard; dht = deterministic Hadamard; sr+rht, sr+dht = both",
    )
    hadamard_size: HadamardSize = key(16, "group of the Hadamard rotation")
    scale: Scale | None = key(None, "scale rule of the FP4 GEMMs; default: the format's")
    signs: Signs | None = key(None, "how often rht draws its signs; default: each step")
    prescale: float | None = key(None, "of sr; default: 3/4 where values can clip", gt=0, le=1, strict=True)
    weight_block: Block | None = key(
        None, "what shares a scale in w, e.g. 32x32: one tile for Fprop and Dgrad"
    )
    accumulate: Accumulate = key(
        "fp32",
        "how GEMMs of two NVFP4 operands add: blackwell = as a model of the device, emulated",
    )
    fprop: GemmEntry | None = None
    dgrad: GemmEntry | None = None
    wgrad: GemmEntry | None = None


LayerRecipeEntry = Annotated[
    LayerRecipeSpec, BeforeValidator(expand_word, json_schema_input_type=RecipeWord | LayerRecipeSpec)
]


def _count_or_share(value: Any) -> Any:
    if (type(value) is int and value >= 0) or (type(value) is float and 0 < value < 1):
        return value
    raise PydanticCustomError("count_or_share", "neither")


_CountOrShare = Annotated[int | float, BeforeValidator(_count_or_share, json_schema_input_type=int | float)]


@dataclass(frozen=True, kw_only=True, config=_CLOSED)
class LayerSpec:
    """Layers that follow a recipe of their own; the first entry that names a layer decides."""

    match: str | None = key(None, "shell pattern on the layer's name, e.g. '*.ffn.down'")
    first: int = key(0, "the first n blocks", ge=0, strict=True)
    last: _CountOrShare = key(0, "the last n blocks, or a share of them such as 0.15")
    head: StrictBool = key(False, "the output head")
    recipe: LayerRecipeEntry


@dataclass(frozen=True, kw_only=True, config=_CLOSED)
class LaterSpec:
    """From which point of the run on; one of the two."""

    from_tokens: int | None = key(None, "training tokens seen", gt=0, strict=True)
    from_fraction: float | None = key(None, "share of the token budget", gt=0, lt=1, strict=True)


@dataclass(frozen=True, kw_only=True, config=_CLOSED)
class PhaseSpec(LaterSpec):
    """What the layers without a rule follow from a point of the run on; give one of the two starts."""

    recipe: LayerRecipeEntry


@dataclass(frozen=True, kw_only=True, config=_CLOSED)
class DeoscillateSpec(LaterSpec):
    """Setting oscillating weights to their quantised value; without a start from the beginning on."""

    window: int = key(200, "optimizer steps between two resets", gt=0, strict=True)
    threshold: float = key(
        4.0,
        "resets weights whose quantised value moved this many times as far as they did",
        gt=0,
        strict=True,
    )


@dataclass(frozen=True, kw_only=True, eq=False, config=_CLOSED)
class RecipeSpec(Section, LayerRecipeSpec):
    """A whole recipe: the GEMMs of every linear layer, the layers that differ, and the phases of the run."""

    layers: list[LayerSpec] | None = key(None, "layers that differ; default: the preset's, else none")
    phases: list[PhaseSpec] | None = key(None, "later parts of the run; default: the preset's, else none")
    deoscillate: DeoscillateSpec | None = key(
        None, "reset weights that oscillate between two quantised values; default: the preset's, else none"
    )


def resolve(spec: RecipeSpec) -> Recipe:
    """Expand a recipe from a study file to operand policies.

    Raises:
        SenselessRecipe: contradictory parts, such as a stabiliser without an FP4 GEMM.
    """
    layer = _resolve(spec)
    preset = PRESETS[spec.preset].recipe if spec.preset else Recipe()
    deoscillate = preset.deoscillate
    rules = tuple(replace(one, recipe=_accumulating(spec, one.recipe)) for one in preset.rules)
    phases = tuple(replace(one, recipe=_accumulating(spec, one.recipe)) for one in preset.phases)
    if spec.layers is not None:
        rules = tuple(_rule(index, entry) for index, entry in enumerate(spec.layers))
    if spec.phases is not None:
        phases = tuple(_phase(index, entry) for index, entry in enumerate(spec.phases))
    if spec.deoscillate is not None:
        deoscillate = _deoscillate(spec.deoscillate)
    parts = {**vars(layer), "rules": rules, "phases": phases, "deoscillate": deoscillate}
    recipe: Recipe = build("deoscillate", Recipe, **parts)
    if deoscillate is not None and not any(part.fprop.right.has_fixed_grid for part in recipe.parts):
        what = "deoscillate with no quantised weight to act on"
        raise SenselessRecipe("deoscillate", what, hint="name fprop in gemms, or leave it out")
    return recipe


def _deoscillate(spec: DeoscillateSpec) -> Deoscillate:
    try:
        found: Deoscillate = build("from_tokens", Deoscillate, **vars(spec))
    except SenselessRecipe as fault:
        raise fault.within("deoscillate") from None
    return found


def _nested(spec: LayerRecipeSpec, *place: str | int) -> LayerRecipe:
    try:
        return _resolve(spec)
    except SenselessRecipe as fault:
        raise fault.within(*place, "recipe") from None


def _rule(index: int, entry: LayerSpec) -> LayerRule:
    if not (entry.match or entry.first or entry.last or entry.head):
        what = "an entry of layers names none: give match, first, last or head"
        raise SenselessRecipe("match", what, inside=("layers", index))
    return LayerRule(**{**vars(entry), "recipe": _nested(entry.recipe, "layers", index)})


def _phase(index: int, entry: PhaseSpec) -> Phase:
    recipe = _nested(entry.recipe, "phases", index)
    try:
        phase: Phase = build("from_tokens", Phase, **{**vars(entry), "recipe": recipe})
    except SenselessRecipe as fault:
        raise fault.within("phases", index) from None
    return phase


def _resolve(spec: LayerRecipeSpec) -> LayerRecipe:
    layer = _resolve_layer(spec)
    done = _accumulating(spec, layer)
    if spec.accumulate != "fp32" and done == layer:
        what = f"accumulate '{spec.accumulate}' with no GEMM whose operands are both nvfp4"
        raise SenselessRecipe("accumulate", what)
    return done


def _accumulating(spec: LayerRecipeSpec, layer: LayerRecipe) -> LayerRecipe:
    """Let the NVFP4 GEMMs of a recipe add as the study asks."""
    gemms = {gemm: layer.gemm(gemm) for gemm in GEMMS}
    changed = {gemm: replace(one, accumulate=spec.accumulate) for gemm, one in gemms.items() if one.is_nvfp4}
    return replace(layer, **changed)


_ON_FP4 = ("stabiliser", "scale", "signs", "prescale", "weight_block")


@cache
def _default(field: str) -> Any:
    return getattr(LayerRecipeSpec(), field)


def _resolve_layer(spec: LayerRecipeSpec) -> LayerRecipe:
    if len(set(spec.gemms)) != len(spec.gemms):
        raise SenselessRecipe("gemms", f"a GEMM is named twice in {spec.gemms}")
    if spec.preset is not None:
        return _from_preset(spec, spec.preset)
    resolved: dict[Gemm, GemmPolicy] = {}
    low = {gemm: is_low_precision(_format(spec, gemm)) for gemm in GEMMS}
    for gemm in GEMMS:
        own: GemmSpec = getattr(spec, gemm) or GemmSpec()
        if not low[gemm]:
            _refuse_on_high_precision(gemm, own)
            policy = gemm_policy(gemm, _format(spec, gemm))
        else:
            policy = gemm_policy(
                gemm,
                _format(spec, gemm),
                stabiliser=own.stabiliser or spec.stabiliser,
                hadamard_size=own.hadamard_size or spec.hadamard_size,
                scale=own.scale or spec.scale,
                signs=own.signs or spec.signs or "step",
                prescale=own.prescale if own.prescale is not None else spec.prescale,
                weight_block=spec.weight_block or "none",
            )
        resolved[gemm] = _with_operands(gemm, policy, own)
    _refuse_idle(spec, low)
    return layer_recipe(resolved)


def _format(spec: LayerRecipeSpec, gemm: Gemm) -> GemmFormat:
    own: GemmSpec | None = getattr(spec, gemm)
    if own is not None and own.format is not None:
        return own.format
    return spec.format if gemm in spec.gemms else spec.rest


def _refuse_on_high_precision(gemm: Gemm, own: GemmSpec) -> None:
    for name in ("stabiliser", "scale", "signs", "prescale"):
        if (value := getattr(own, name)) is not None and (name, value) != ("stabiliser", "none"):
            raise SenselessRecipe(gemm, f"{name} '{value}' on {gemm}, which is not in FP4")


def _refuse_idle(spec: LayerRecipeSpec, low: dict[Gemm, bool]) -> None:
    """Raise ``SenselessRecipe`` for FP4 settings that no FP4 GEMM would use."""
    for name in _ON_FP4:
        value = getattr(spec, name)
        if value == _default(name):
            continue
        own_word = {gemm: getattr(getattr(spec, gemm), name, None) for gemm in GEMMS}
        takes = [gemm for gemm in GEMMS if low[gemm] and own_word[gemm] is None]
        if name == "weight_block":
            takes = [gemm for gemm in takes if gemm != "wgrad"]
        if not takes:
            what = f"{name} '{value}' with no FP4 GEMM to act on"
            raise SenselessRecipe(name, what, hint="name the GEMMs in gemms, or leave it out")
    stabilisers = [getattr(getattr(spec, g), "stabiliser", None) or spec.stabiliser for g in GEMMS if low[g]]
    if spec.signs is not None and not any("rht" in word for word in stabilisers):
        raise SenselessRecipe("signs", f"signs '{spec.signs}' without a random Hadamard (stabiliser rht)")
    if spec.prescale is not None and not any("sr" in word for word in stabilisers):
        what = f"prescale {spec.prescale} without stochastic rounding (stabiliser sr)"
        raise SenselessRecipe("prescale", what)


def _from_preset(spec: LayerRecipeSpec, name: str) -> LayerRecipe:
    for field in ("gemms", "format", "rest", *_ON_FP4, "hadamard_size"):
        if getattr(spec, field) != _default(field):
            what = f"{field} beside preset '{name}', which says it already"
            hint = "leave it out, or write under fprop, dgrad or wgrad what differs"
            raise SenselessRecipe(field, what, hint=hint)
    start = PRESETS[name].recipe
    resolved: dict[Gemm, GemmPolicy] = {}
    for gemm in GEMMS:
        own: GemmSpec = getattr(spec, gemm) or GemmSpec()
        policy = start.gemm(gemm)
        anew = {key: value for key, value in _given(own).items() if key not in STORED}
        if anew:
            if "format" not in anew:
                what = f"{', '.join(anew)} on {gemm} of preset '{name}' without its format: say it too"
                raise SenselessRecipe(gemm, what)
            if not is_low_precision(anew["format"]):
                _refuse_on_high_precision(gemm, own)
            policy = gemm_policy(gemm, anew.pop("format"), **anew)
        resolved[gemm] = _with_operands(gemm, policy, own)
    return layer_recipe(resolved)


def _given(spec: GemmSpec | OperandSpec) -> dict[str, Any]:
    return {field.name: value for field in fields(spec) if (value := getattr(spec, field.name)) is not None}


def _with_operands(gemm: Gemm, policy: GemmPolicy, own: GemmSpec) -> GemmPolicy:
    """Apply the fields given for single operands to a GEMM's policy."""
    operands = dict(zip(OPERANDS[gemm], (policy.left, policy.right), strict=True))
    for name in STORED:
        override: OperandSpec | None = getattr(own, name)
        if override is None:
            continue
        if name not in operands:
            has = " and ".join(OPERANDS[gemm])
            raise SenselessRecipe(gemm, f"{gemm} has no operand {name} (it has {has})")
        given, before = _given(override), operands[name]
        if given.get("format", before.format) != before.format:
            given = {"scale": "none", "block": "none", **given}  # use the defaults of the new format
        if given.get("hadamard") == 0:  # what belongs to a rotation goes with it
            given = {"signs": "none", "permute": False, "rotated_bf16": False, **given}
        operands[name] = build(gemm, partial(replace, before), **given)
    left, right = OPERANDS[gemm]
    done: GemmPolicy = build(gemm, GemmPolicy, left=operands[left], right=operands[right])
    return done
