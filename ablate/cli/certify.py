"""``ablate certify``: whether a recipe or a user's quantiser is what it claims to be, and how it errs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ablate.backends.device import chosen_device
from ablate.base.errors import UserError, safe_text
from ablate.cli.common import device_option, json_option, known_backend, out_option
from ablate.cli.output import deliver, figure, format_table, terminal_width

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ablate.diagnose.certificate import Certificate, OperandCertificate
    from ablate.diagnose.ratios import Estimate
    from ablate.diagnose.rounding import RoundingFigures

_EXAMPLES = """\b
Examples:
  ablate certify tseng                               a published recipe, as this machine quantises it
  ablate certify "{gemms: [wgrad], stabiliser: sr}"  a recipe as a study writes it
  ablate certify my-study.yaml --arm "all three"     an arm
  ablate certify quant.py:mxfp4 --as mxfp4           a function of yours
  ablate certify quant.py:sr --as tseng:wgrad.dy     one that claims to be one operand's quantiser
  ablate certify quartet2 --draws 1024 --json        smaller standard errors, for scripts
"""
_LONGEST_PATTERN = 8


@click.command("certify", epilog=_EXAMPLES)
@click.argument("subject")
@click.option("--as", "held_against", metavar="RECIPE[:OPERAND]", help="What a function claims to be.")
@click.option("--arm", metavar="NAME", help="The arm of SUBJECT, which is a study then.")
@click.option(
    "--draws", type=click.IntRange(min=8), default=64, show_default=True, help="Tensors of each kind of data."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--backend", default="auto", show_default=True, help="The back end that quantises a recipe.")
@device_option
@json_option
@out_option
@click.pass_context
def command(
    context: click.Context,
    subject: str,
    held_against: str | None,
    arm: str | None,
    draws: int,
    seed: int,
    backend: str,
    device: str | None,
    as_json: bool,
    out: Path | None,
) -> None:
    """Test whether a quantiser is what it claims to be, and measure how it errs.

    SUBJECT is a recipe (a word or a mapping), a study with --arm, or a function of yours
    (file.py:function): it takes a bf16 matrix [rows, k] with blocks along k, and seed=… if it has such a
    parameter, and returns the matrix dequantised. --as says what the function claims to be.

    On made-up data of four kinds: gain with its standard error, by operand and by place in the block; the
    relative error; the share of it that is bias; what becomes of ties, clipping, subnormals, NaN, Inf and ±0;
    and of a recipe gain, error and bias of each GEMM's product. Every difference from the definition is
    counted by its cause. Exit code 1 if the quantiser is not what it claims to be. That the definition
    itself is biased is no failure; the table says it.
    """
    from ablate.diagnose.claims import claim_of

    known_backend(backend)
    where, _ = chosen_device(device)
    claim = claim_of(subject, arm=arm, held_against=held_against, backend=backend, device=where)
    from ablate.diagnose.certificate import certify, work

    try:
        with click.progressbar(length=work(claim, draws), label="tensors", hidden=as_json) as bar:
            found = certify(claim, draws=draws, seed=seed, done=bar.update)
    except ValueError as error:  # a back end that cannot do this recipe here
        raise UserError(f"{subject}: {error} (another --backend or --device?)") from None
    content = _content(found, seed)
    if not deliver(content, out, as_json=as_json):
        click.echo(safe_text("\n".join(_lines(found)), keep="\n"))
    context.exit(0 if found.holds else 1)


def _content(found: Certificate, seed: int) -> dict[str, Any]:
    claim = found.claim
    operands = [
        {
            "operands": list(one.operand.names), "policy": asdict(one.operand.policy), "holds": one.holds,
            "figures": {kind: _figures(figures) for kind, figures in one.figures.items()},
            "definition": {kind: _figures(figures) for kind, figures in one.definition.items()},
            "disagreements": list(one.disagreements),
            "clipped": {kind: shares[0] for kind, shares in one.shares.items()},
            "zeroed": {kind: shares[1] for kind, shares in one.shares.items()},
            "corners": [asdict(corner) for corner in one.corners],
            "compared": one.compared, "differences": [asdict(each) for each in one.differences],
        }
        for one in found.operands
    ]  # fmt: skip
    products = [asdict(one) | {"unbiased": one.unbiased} for one in found.products]
    return {
        "format": 1, "subject": claim.name, "backend": claim.backend if claim.recipe else None,
        "device": claim.device if claim.recipe else None, "draws": found.draws, "seed": seed,
        "holds": found.holds, "notes": list(claim.notes), "operands": operands, "products": products,
    }  # fmt: skip


def _figures(figures: RoundingFigures) -> dict[str, Any]:
    return asdict(figures) | {"unbiased": figures.unbiased}


def _lines(found: Certificate) -> Iterator[str]:
    from ablate.diagnose.certificate import PRODUCT_SIDE, SIDE
    from ablate.diagnose.ratios import BOUND

    width = terminal_width(110)
    yield (
        f"{found.claim.name}: {found.draws} tensors {SIDE}×{SIDE} in bf16 of each kind. ± is a standard "
        f"error; what lies within {BOUND:.0f} of them counts as equal."
    )
    yield from found.claim.notes
    header = ("operand", "data", "gain", "± from 1", "error", "bias", "clipped", "zeroed", "unbiased")
    rows = [row for one in found.operands for row in _operand_rows(one)]
    yield f"\n{format_table(header, rows, width=width)}"
    yield (
        "Gain: the slope on the exact value; ± from 1: standard errors from 1. Error: relative. Bias: the "
        "share of the error's energy that two draws have in common."
    )
    for one in found.operands:
        yield from _patterns(one)
    yield f"\n{_corner_table(found, width)}"
    if found.products:
        yield f"\nProducts, M = N = K = {PRODUCT_SIDE}:\n{_product_table(found, width)}"
    yield ""
    yield from _verdict(found, width)


def _operand_rows(one: OperandCertificate) -> Iterator[tuple[str, ...]]:
    for index, (kind, ours) in enumerate(one.figures.items()):
        clipped, zeroed = (figure(share, ".2%") for share in one.shares[kind])
        name = _named(one) if not index else ""
        yield (name, kind, *_cells(ours), clipped, zeroed, "yes" if ours.unbiased else "no")
        if (theirs := one.definition.get(kind)) is not None:
            yield ("", "  definition", *_cells(theirs), "", "", "yes" if theirs.unbiased else "no")


def _cells(figures: RoundingFigures) -> tuple[str, str, str, str]:
    gain = figures.gain
    off, error = figure(gain.off(1.0), "+.1f"), figure(figures.relative_error.value, ".2%")
    return _with_error(gain, ".5f"), off, error, _share(figures.bias_share)


def _share(bias: Estimate) -> str:
    return "all" if bias.value == 1.0 else _with_error(bias, ".2%")


def _with_error(one: Estimate, form: str) -> str:
    return f"{figure(one.value, form)} ± {figure(one.error, form)}"


def _named(one: OperandCertificate) -> str:
    """Return the operands' names: ``Dgrad w; Wgrad dy, x``."""
    gemms: dict[str, list[str]] = {}
    for name in one.operand.names:
        gemm, _, operand = name.partition(".")
        gemms.setdefault(gemm.capitalize() if operand else gemm, []).append(operand)
    return "; ".join(f"{gemm} {', '.join(names)}".strip() for gemm, names in gemms.items())


def _patterns(one: OperandCertificate) -> Iterator[str]:
    """Say how the gain depends on the place in the block, and whether the noise does on its neighbours."""
    figures = one.figures["Gaussian"]
    pattern = figures.pattern
    if len(pattern) > 1:
        shown = " ".join(f"{gain:.4f}" for gain in pattern[:_LONGEST_PATTERN])
        rest = " …" if len(pattern) > _LONGEST_PATTERN else ""
        what = "the gain depends on the place in the block"
        yield f"{_named(one)}: {what}: {shown}{rest}, every {len(pattern)}."
    elif pattern:
        yield f"{_named(one)}: every place in the block has the same gain."
    if figures.largest_alike is not None:
        which, alike = figures.largest_alike
        yield f"{_named(one)}: the noise of elements {which} correlates by {_with_error(alike, '.4f')}."


def _corner_table(found: Certificate, width: int) -> str:
    rows = [
        (_named(one) if not index else "", corner.name, corner.found, corner.expected)
        for one in found.operands
        for index, corner in enumerate(one.corners)
    ]
    return format_table(("operand", "corner", "what comes out", "by definition"), rows, width=width)


def _product_table(found: Certificate, width: int) -> str:
    rows = [
        (
            one.gemm.capitalize(), one.kind, _with_error(one.gain, ".5f"),
            figure(one.gain.off(1.0), "+.1f"), figure(one.relative_error.value, ".2%"),
            _share(one.bias_share), "yes" if one.unbiased else "no",
        )
        for one in found.products
    ]  # fmt: skip
    header = ("GEMM", "data", "gain", "± from 1", "error", "bias", "expectation is exact")
    return format_table(header, rows, width=width)


def _verdict(found: Certificate, width: int) -> Iterator[str]:
    from ablate.diagnose.differences import HARMLESS

    compared = sum(one.compared for one in found.operands)
    rows = [
        (
            _named(one), each.cause, f"{each.count:,}", each.first.data,
            f"{each.first.row}, {each.first.column}", f"{each.first.exact:.6g}",
            f"{each.first.expected:.6g}", f"{each.first.found:.6g}",
        )
        for one in found.operands
        for each in one.differences
    ]  # fmt: skip
    if rows:
        header = ("operand", "cause", "values", "first in", "at", "exact", "definition", "found")
        yield f"Differences from the definition in {compared:,} values:"
        yield format_table(header, rows, width=width)
    else:
        yield f"No difference from the definition in {compared:,} values."
    for one in found.operands:
        if one.disagreements:
            yield f"{_named(one)}: not the definition's figures: {'; '.join(one.disagreements)}."
    if found.holds:
        yield f"{found.claim.name} is what it claims to be."
        if rows:
            yield f"Codes and scales are the definition's: {' and '.join(HARMLESS)} do not count."
    else:
        yield f"{found.claim.name} is NOT what it claims to be."
