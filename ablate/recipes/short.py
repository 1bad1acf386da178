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
Stabiliser = Literal["none", "sr", "sr8", "rht", "dht", "sr+rht", "sr+dht", "sr8+rht", "sr8+dht"]
_ROUNDINGS = {"sr": "stochastic", "sr8": "stochastic_8bit"}

_CLOSED = ConfigDict(extra="forbid", defer_build=True)  # most are built as part of a study's model
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

    preset: PresetName | None = key(None, "start from this recipe (`ablate recipes` lists them)")
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

    layers: list[LayerSpec] | None = key(None, "layers that differ; default: the preset's, else none")
    phases: list[PhaseSpec] | None = key(None, "later parts of the run; default: the preset's, else none")
    deoscillate: Deoscillate | None = key(
        None, "reset weights that oscillate between two quantised values; default: the preset's, else none"
    )


AnyRecipe = Annotated[
    RecipeSpec, BeforeValidator(expand_word, json_schema_input_type=RecipeWord | RecipeSpec)
]
"""A recipe as a study writes it: one word, or a mapping."""


class SenselessRecipe(ValueError):  # noqa: N818  it reads as what it is
    """A recipe whose parts contradict each other.

    ``path`` leads from the recipe to the faulty part; ``hint`` says how to mend it, where that is known.
    """

    def __init__(self, what: str, *path: str | int, hint: str | None = None) -> None:
        super().__init__(what)
        self.path, self.hint = path, hint


@contextmanager
def _at(*path: str | int) -> Iterator[None]:
    """Put the path of a part before that of a contradiction in it, also of one that pydantic found."""
    try:
        yield
    except SenselessRecipe as fault:
        raise SenselessRecipe(str(fault), *path, *fault.path, hint=fault.hint) from None
    except ValidationError as error:
        first = error.errors()[0]
        raise SenselessRecipe(str(first.get("ctx", {}).get("error", first["msg"])), *path) from None


def read_recipe(given: Any) -> Recipe:
    """Read a recipe that Python or the command line gives as a word, a mapping, or the text of one.

    A mapping is as in a study file (``{gemms: [wgrad]}``), or has every operand, as ``Recipe.text`` has them.
    A study file's own recipes are read with the whole file, so that each fault has its line.

    Raises:
        ValueError: an unknown word or key, with the valid ones, or parts that contradict each other.
        TypeError: neither a word nor a mapping.
    """
    if not isinstance(given, str | dict):
        raise TypeError(f"a recipe cannot be {given!r} (expected {one_of([*SHORT_RECIPES, 'a mapping'])})")
    if isinstance(given, str) and given.lstrip().startswith("{"):
        from ruamel.yaml import YAML
        from ruamel.yaml.error import YAMLError

        try:
            given = YAML(typ="safe", pure=True).load(given)
        except YAMLError:
            raise ValueError(f"a recipe cannot be '{given}': not valid YAML") from None
    try:
        if "rules" in given:
            return TypeAdapter(Recipe).validate_python(given)
        found = resolve(TypeAdapter(AnyRecipe).validate_python(given))
    except ValidationError as error:
        fault = error.errors()[0]
        what, asked, known = fault["msg"], fault["input"], fault.get("ctx", {}).get("words", ())
        if fault["type"] == "unexpected_keyword_argument" and len(fault["loc"]) == 1:
            what, asked, known = "unknown key", fault["loc"][0], list(vars(RecipeSpec()))
        elif fault["type"] == "literal_error" and known:
            what = f"unknown recipe '{asked}'"
        hint = f" ({likely(str(asked), known, f'expected {one_of(list(known))}')})" if known else ""
        at = ".".join(map(str, fault["loc"]))
        raise ValueError(f"{at}: {what}{hint}" if at else f"{what}{hint}") from None
    # Not in ``resolve``: another cell of a study's grid may have a rotation.
    if "hadamard_size" in given and not any(policy.hadamard for *_, policy in found.operands()):
        hint = "write stabiliser: rht or dht beside it, or leave it out"
        raise ValueError(f"hadamard_size: expected a Hadamard of this size, got none ({hint})")
    return found


def resolve(spec: RecipeSpec) -> Recipe:
    """Expand a recipe from a study file to operand policies.

    Raises:
        SenselessRecipe: contradictory parts, such as a stabiliser without an FP4 GEMM.
    """
    layer = _layer(spec)
    preset = _published(spec.preset) if spec.preset else Recipe()
    later: dict[str, Any] = {"deoscillate": spec.deoscillate or preset.deoscillate}
    for name, field, kind in (("layers", "rules", LayerRule), ("phases", "phases", Phase)):
        parts, own = [], getattr(spec, name)
        for index, entry in enumerate(getattr(preset, field) if own is None else own):
            with _at(name, index, "recipe"):
                recipe = _adding(entry.recipe, spec.accumulate) if own is None else _layer(entry.recipe)
            with _at(name, index, "from_tokens"):
                parts.append(kind(**vars(entry) | {"recipe": recipe}))
        later[field] = tuple(parts)
    with _at("deoscillate"):
        found = Recipe(**vars(layer), **later)
    if found.deoscillate and not any(part.fprop.right.has_fixed_grid for part in found.parts):
        hint = "name fprop in gemms, or leave it out"
        raise SenselessRecipe("deoscillate with no quantised weight to act on", "deoscillate", hint=hint)
    return found


def as_written(recipe: LayerRecipe) -> dict[str, Any]:
    """Write a recipe as a study file may, in plain data: ``resolve`` makes the same of it."""
    found: dict[str, Any] = {}
    for gemm, operand, policy in recipe.operands():
        plain = vars(OperandPolicy(format=policy.format))
        if not policy.is_untouched:
            own = {name: value for name, value in vars(policy).items() if value != plain[name]}
            found.setdefault(gemm, {})[operand] = {"format": policy.format, **own}
        if recipe.gemm(gemm).accumulate != "fp32":
            found["accumulate"] = recipe.gemm(gemm).accumulate
    if isinstance(recipe, Recipe):
        for name, parts in (("layers", recipe.rules), ("phases", recipe.phases)):
            found[name] = [written_short(one) | {"recipe": as_written(one.recipe) or "bf16"} for one in parts]
        found["deoscillate"] = recipe.deoscillate and written_short(recipe.deoscillate)
    return {name: value for name, value in found.items() if value not in (None, [])}


@cache
def _published(name: str) -> Recipe:
    return resolve(RecipeSpec(**PUBLISHED[name]["recipe"]))


def _adding(layer: LayerRecipe, accumulate: Accumulate) -> LayerRecipe:
    """Let the NVFP4 GEMMs of a recipe sum as ``accumulate`` says."""
    gemms = {gemm: layer.gemm(gemm) for gemm in GEMMS}
    changed = {gemm: replace(one, accumulate=accumulate) for gemm, one in gemms.items() if one.is_nvfp4}
    return replace(layer, **changed)


def _layer(spec: LayerRecipeSpec) -> LayerRecipe:
    """Expand a recipe for one layer; refuse keys that no GEMM would use."""
    if len(set(spec.gemms)) != len(spec.gemms):
        raise SenselessRecipe(f"a GEMM is named twice in {spec.gemms}", "gemms")
    said = {
        name: getattr(spec, name)
        for name, usual in vars(LayerRecipeSpec()).items()
        if name not in ("preset", "accumulate", *GEMMS) and getattr(spec, name) != usual
    }
    for name in said if spec.preset else ():
        hint = "leave it out, or write under fprop, dgrad or wgrad what differs"
        raise SenselessRecipe(f"{name} beside preset '{spec.preset}', which says it already", name, hint=hint)
    if "format" in said and not spec.gemms:
        hint = "name the GEMMs in gemms, or the format in rest"
        raise SenselessRecipe(f"format '{spec.format}' without gemms, which it is for", "format", hint=hint)
    own = {gemm: _given(getattr(spec, gemm) or GemmSpec()) for gemm in GEMMS}
    whole: dict[Gemm, dict[str, Any]] = {
        gemm: {**vars(spec), "format": spec.format if gemm in spec.gemms else spec.rest, **own[gemm]}
        for gemm in GEMMS
    }
    policies: dict[str, GemmPolicy] = {}
    for gemm in GEMMS:
        with _at(gemm):
            policies[gemm] = _policy(spec, gemm, own[gemm], whole[gemm])
    low = {gemm: one for gemm, one in whole.items() if _is_low(one["format"])}
    needs = {"signs": ("rht", "a random Hadamard"), "prescale": ("sr", "stochastic rounding")}
    for name in [one for one in said if one not in ("gemms", "format", "rest", "hadamard_size")]:
        takes = [gemm for gemm in low if name not in own[gemm] and (name, gemm) != ("weight_block", "wgrad")]
        if not takes:
            hint = "name the GEMMs in gemms, or leave it out"
            raise SenselessRecipe(f"{name} '{said[name]}' with no FP4 GEMM to act on", name, hint=hint)
        word, what = needs.get(name, ("", ""))
        if not any(word in one["stabiliser"] for one in low.values()):
            raise SenselessRecipe(f"{name} '{said[name]}' without {what} (stabiliser {word})", name)
    try:
        with _at():
            layer = LayerRecipe(**policies)
    except SenselessRecipe as fault:
        at = next((gemm for gemm in GEMMS if f" on {gemm}." in str(fault)), "weight_block")
        raise SenselessRecipe(str(fault), at) from None
    if spec.accumulate != "fp32" and not any(layer.gemm(gemm).is_nvfp4 for gemm in GEMMS):
        what = f"accumulate '{spec.accumulate}' with no GEMM whose operands are both nvfp4"
        raise SenselessRecipe(what, "accumulate")
    return _adding(layer, spec.accumulate)


def _given(spec: GemmSpec | OperandSpec) -> dict[str, Any]:
    return {name: value for name, value in vars(spec).items() if value is not None}


def _is_low(fmt: str) -> bool:
    """Whether a stabiliser can act on this format: FP4 or a format with block scales."""
    return fmt not in ("bf16-dequantised", *HIGH_FORMATS, *_FP8)


def _policy(spec: LayerRecipeSpec, gemm: Gemm, own: dict[str, Any], whole: dict[str, Any]) -> GemmPolicy:
    """``own``: the keys written for this GEMM; ``whole``: these and the recipe's."""
    start = _published(spec.preset).gemm(gemm) if spec.preset else None
    anew = {name: value for name, value in own.items() if name not in STORED}
    if start is not None and anew and "format" not in anew:
        what = f"{', '.join(anew)} on {gemm} of preset '{spec.preset}' without its format: say it too"
        raise SenselessRecipe(what)
    for name in ("stabiliser", "scale", "signs", "prescale") if not _is_low(whole["format"]) else ():
        if anew.get(name, "none") != "none":
            raise SenselessRecipe(f"{name} '{anew[name]}' on {gemm}, which is not in FP4")
    for name in [one for one in STORED if one in own and one not in OPERANDS[gemm]]:
        raise SenselessRecipe(f"{gemm} has no operand {name} (it has {' and '.join(OPERANDS[gemm])})")
    sides: dict[str, Any] = {}
    for side, name in zip(("left", "right"), OPERANDS[gemm], strict=True):
        keep = start is not None and not anew
        before = vars(getattr(start, side)) if keep else _operand(name, whole)
        given = _given(own[name]) if name in own else {}
        if given.get("format", before["format"]) != before["format"]:
            given = {"scale": "none", "block": "none", **given}  # use the defaults of the new format
        if given.get("hadamard") == 0:  # what belongs to a rotation goes with it
            given = NO_ROTATION | given
        sides[side] = OperandPolicy(**before | given)
    return GemmPolicy(**sides)


def _operand(name: str, whole: dict[str, Any]) -> dict[str, Any]:
    """``whole``: the keys of its GEMM. SR takes Tseng's 3/4 prescale if the MXFP4 scale rule can clip."""
    fmt, scale, parts = whole["format"], whole["scale"], whole["stabiliser"].split("+")
    if fmt in HIGH_FORMATS:
        return {"format": fmt}
    if fmt == "bf16-dequantised":  # x and w as the forward GEMM multiplied them
        return {"format": "bf16", "source": "high_precision" if name == "dy" else "forward"}
    if fmt in _FP8:
        usual, of_w, of_dy = _FP8[fmt]
        return {"format": of_dy if name == "dy" else "fp8_e4m3", "scale": of_w if name == "w" else usual}
    fields = {"format": fmt, "scale": scale or "none"}
    if name == "w":
        fields["block"] = whole["weight_block"] or "none"
    if parts[0] in _ROUNDINGS:
        rule = SCALE_RULES[scale or SCALES[fmt][0]]
        clips = fmt == "mxfp4" and rule.can_clip
        fields |= {
            "rounding": _ROUNDINGS[parts[0]],
            "prescale": whole["prescale"] or (0.75 if clips else 1.0),
        }
    if {"rht", "dht"} & set(parts):
        signs = (whole["signs"] or "step") if "rht" in parts else "none"
        fields |= {"hadamard": whole["hadamard_size"], "signs": signs}
    return fields
