"""``ablate check recipe``, ``arm`` and ``function``: whether a quantiser is what it claims to be."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ablate.backends.device import chosen_device
from ablate.base.errors import UserError, likely
from ablate.cli.common import (
    deliver,
    device_option,
    json_option,
    out_option,
    seed_option,
    study_argument,
    table_of,
)
from ablate.run import backend_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from ablate.check.certificate import Claim, OperandCertificate
    from ablate.recipes import Recipe

_FIGURES = {
    "operand": "{name}", "data": "{kind}", "gain": "{of.gain.value:.5f} ± {of.gain.error:.5f}",
    "± from 1": "{off:+.1f}", "error": "{of.relative_error.value:.2%}",
    "bias": "{of.bias_share.value:.2%} ± {of.bias_share.error:.2%}", "unbiased": "{of.unbiased}",
}  # fmt: skip
_CAUSES = {
    "operand": "{name}", "cause": "{of.cause}", "values": "{of.count:,}", "first in": "{of.data}",
    "at": "{of.row}, {of.column}", "exact": "{of.exact:.6g}", "definition": "{of.expected:.6g}",
    "found": "{of.found:.6g}",
}  # fmt: skip


_draws_option = click.option(
    "--draws",
    type=click.IntRange(min=8),
    default=64,
    help="Number of tensors of each kind of data.",
)
_backend_option = click.option(
    "--backend",
    default="auto",
    type=click.Choice(backend_names()),
    help="Back end that quantises.",
)


@click.command(
    "recipe",
    short_help="Check the quantisers of a recipe.",
    epilog="\b\nExamples:\n"
    "  ablate check recipe tseng\n"
    '  ablate check recipe "{gemms: [wgrad], stabiliser: sr}" --backend torch',
)
@click.argument("text", metavar="RECIPE")
@_draws_option
@seed_option
@device_option
@_backend_option
@json_option
@out_option
def recipe(text: str, *, device: str | None, backend: str, **options: Any) -> int:
    """Check the quantisers of RECIPE: a recipe's name, or a mapping.

    On made-up data of four kinds the table shows the gain with its standard error, by operand and by place in
    the block; the relative error; and the share of it that is bias. On these data and on ties, clipping,
    subnormals, NaN, Inf and ±0, every difference from the definition is counted by its cause. A definition
    that is biased itself is no failure; the table shows it. `ablate diagnose` shows a recipe's products.

    Exit code 1 if a quantiser is not what it claims to be.
    """
    from ablate.diagnose.inputs import recipe_of

    return _certify_recipe(
        text, recipe_of(text, option="RECIPE"), backend, device, **options
    )


@click.command(
    "arm",
    short_help="Check the quantisers of a study's arm.",
    epilog='Example:  ablate check arm my-study.yaml "all three"',
)
@study_argument
@click.argument("name", metavar="ARM")
@_draws_option
@seed_option
@device_option
@_backend_option
@json_option
@out_option
def arm(
    study: str, name: str, *, device: str | None, backend: str, **options: Any
) -> int:
    """Check the quantisers of an arm of STUDY, as `ablate check recipe` does."""
    from ablate.study import load_study

    recipes = {arm.name: arm.recipe for arm in load_study(study).arms}
    if name not in recipes:
        hint = likely(name, recipes, f"arms: {', '.join(recipes)}")
        raise UserError(f"ARM: no arm '{name}' in {study} ({hint})")
    return _certify_recipe(
        f"{study}, arm '{name}'", recipes[name], backend, device, **options
    )


@click.command(
    "function",
    short_help="Check a function of yours that quantises.",
    epilog="\b\nExamples:\n"
    "  ablate check function quant.py:mxfp4 --as mxfp4\n"
    "  ablate check function quant.py:sr --as tseng:wgrad.dy      as one operand of a recipe",
)
@click.argument("place", metavar="FILE.py:FUNCTION")
@click.option(
    "--as",
    "claimed",
    required=True,
    metavar="RECIPE[:OPERAND]",
    help="What the function claims to be.",
)
@_draws_option
@seed_option
@json_option
@out_option
def function(place: str, *, claimed: str, **options: Any) -> int:
    """Check a function of yours against the quantiser that it claims to be.

    It takes a bf16 matrix [rows, k] with blocks along k, and seed=… if it has such a parameter, and returns
    the matrix dequantised. The table is that of `ablate check recipe`.
    """
    from ablate.base.user_functions import load_function
    from ablate.check.certificate import of_function, operand_of

    return _certify(
        of_function(place, load_function(place), operand_of(claimed)), **options
    )


def _certify_recipe(
    name: str, recipe: Recipe, backend: str, device: str | None, **options: Any
) -> int:
    from ablate.check.certificate import of_recipe

    torch_device, _ = chosen_device(device)
    claim = of_recipe(name, recipe, backend, torch_device)
    try:
        return _certify(claim, **options)
    except ValueError as error:  # a back end that cannot do this recipe here
        raise UserError(f"{name}: {error} (another --backend or --device?)") from None


def _certify(
    claim: Claim, *, draws: int, seed: int, as_json: bool, out: Path | None
) -> int:
    """Certify each operand of a claim and show the result; return the exit code."""
    from ablate.backends.testing.inputs import KINDS
    from ablate.check.certificate import certify

    length = len(KINDS) * len(claim.operands) * draws
    with click.progressbar(length=length, label="tensors", hidden=as_json) as bar:
        certificates = [
            certify(claim, operand, draws=draws, seed=seed, done=bar.update)
            for operand in claim.operands
        ]
    operands = []
    for certificate in certificates:
        figures = asdict(certificate)
        operand = figures.pop("operand")
        names = {
            "operands": operand["names"],
            "policy": operand["policy"],
            "holds": certificate.holds,
        }
        operands.append(names | figures)
    holds = all(certificate.holds for certificate in certificates)
    content = {
        "format": 1, "subject": claim.name, "backend": claim.backend, "device": claim.device,
        "draws": draws, "seed": seed, "holds": holds, "notes": claim.notes, "operands": operands,
    }  # fmt: skip
    deliver(
        content,
        _certificate_lines(claim, draws, certificates),
        as_json=as_json,
        out=out,
    )
    return int(not holds)


def _certificate_lines(
    claim: Claim, draws: int, certificates: Sequence[OperandCertificate]
) -> Iterator[str]:
    from ablate.check.certificate import SIDE
    from ablate.check.differences import HARMLESS
    from ablate.check.figures import BOUND

    yield (
        f"{claim.name}: {draws} tensors {SIDE}×{SIDE} in bf16 of each kind. ± is a standard "
        f"error; what lies within {BOUND:.0f} of them counts as equal."
    )
    yield from claim.notes
    figures_rows: list[dict[str, Any]] = []
    causes_rows: list[dict[str, Any]] = []
    remarks: list[str] = []
    for certificate in certificates:
        name = ", ".join(certificate.operand.names)
        for suffix, by_kind in (
            ("", certificate.figures),
            (", definition", certificate.definition),
        ):
            for kind, figures in by_kind.items():
                row = {
                    "name": name,
                    "kind": kind + suffix,
                    "of": figures,
                    "off": figures.gain.off(1.0),
                }
                figures_rows.append(row)
        causes_rows += [
            {"name": name, "of": differences} for differences in certificate.differences
        ]
        remarks += [f"{name}: {remark}" for remark in _remarks(certificate)]
    yield "\n" + table_of(_FIGURES, figures_rows)
    yield (
        "Gain: the slope on the exact value; ± from 1: standard errors from 1. Error: relative. Bias: the "
        "share of the error's energy that two draws have in common."
    )
    yield from remarks
    compared = sum(certificate.compared for certificate in certificates)
    yield f"\nCauses of differences from the definition in {compared:,} values: {len(causes_rows)}"
    if causes_rows:
        yield table_of(_CAUSES, causes_rows)
        yield f"{' and '.join(HARMLESS).capitalize()} do not count."
    holds = all(certificate.holds for certificate in certificates)
    yield f"{claim.name} is {'' if holds else 'NOT '}what it claims to be."


def _remarks(certificate: OperandCertificate) -> Iterator[str]:
    gaussian = certificate.figures["Gaussian"]
    if gaussian.scale_bias.value is not None:
        yield (
            f"of the error's energy scale bias {gaussian.scale_bias.value:.1%}, "
            f"dead zone {gaussian.dead_zone.value:.1%}, grid noise {gaussian.grid_noise.value:.1%}"
        )
    if gaussian.pattern:
        gains = " ".join(f"{gain:.4f}" for gain in gaussian.pattern)
        yield f"gain by place in the block, repeating: {gains}"
    if gaussian.largest_alike is not None:
        neighbours, correlation = gaussian.largest_alike
        yield (
            f"the noise of elements {neighbours} correlates by "
            f"{correlation.value:.4f} ± {correlation.error:.4f}"
        )
    if certificate.disagreements:
        yield f"not the definition's figures: {'; '.join(certificate.disagreements)}"
