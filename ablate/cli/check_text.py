"""What ``ablate check RECIPE`` prints of a quantiser: its figures, corners, products and differences."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ablate.cli.output import figure, format_table, terminal_width

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ablate.check.certificate import Certificate, OperandCertificate, ProductCertificate
    from ablate.check.figures import Estimate, RoundingFigures

_LONGEST_PATTERN = 8


def content_of(found: Certificate, seed: int) -> dict[str, Any]:
    """Return what ``--json`` prints."""
    claim = found.claim
    operands = []
    for one in found.operands:
        own = asdict(one)
        operand = own.pop("operand")
        operands.append(
            {"operands": operand["names"], "policy": operand["policy"], "holds": one.holds, **own}
            | {"disagreements": one.disagreements, "corners": [corner._asdict() for corner in one.corners]}
        )
    return {
        "format": 1, "subject": claim.name, "backend": claim.backend if claim.recipe else None,
        "device": claim.device if claim.recipe else None, "draws": found.draws, "seed": seed,
        "holds": found.holds, "notes": claim.notes, "operands": operands,
        "products": [asdict(one) for one in found.products],
    }  # fmt: skip


def lines_of(found: Certificate) -> Iterator[str]:
    """Yield the figures, corners, products and differences as text, then the verdict."""
    from ablate.check.certificate import PRODUCT_SIDE, SIDE
    from ablate.check.differences import HARMLESS
    from ablate.check.figures import BOUND

    width, name = terminal_width(110), found.claim.name
    yield (
        f"{name}: {found.draws} tensors {SIDE}×{SIDE} in bf16 of each kind. ± is a standard "
        f"error; what lies within {BOUND:.0f} of them counts as equal."
    )
    yield from found.claim.notes
    header: tuple[str, ...] = (
        "operand",
        "data",
        "gain",
        "± from 1",
        "error",
        "bias",
        "clipped",
        "zeroed",
        "unbiased",
    )
    rows: list[tuple[str, ...]] = []
    for one in found.operands:
        for index, (kind, ours) in enumerate(one.figures.items()):
            lost = (figure(share[kind], ".2%") for share in (one.clipped, one.zeroed))
            rows.append((_named(one) if not index else "", kind, *_cells(ours), *lost, _yes(ours)))
            if (theirs := one.definition.get(kind)) is not None:
                rows.append(("", "  definition", *_cells(theirs), "", "", _yes(theirs)))
    yield f"\n{format_table(header, rows, width=width)}"
    yield (
        "Gain: the slope on the exact value; ± from 1: standard errors from 1. Error: relative. Bias: the "
        "share of the error's energy that two draws have in common."
    )
    for one in found.operands:
        pattern, alike = one.figures["Gaussian"].pattern, one.figures["Gaussian"].largest_alike
        if len(pattern) > 1:
            shown = " ".join(f"{gain:.4f}" for gain in pattern[:_LONGEST_PATTERN])
            rest = " …" if len(pattern) > _LONGEST_PATTERN else ""
            what = "the gain depends on the place in the block"
            yield f"{_named(one)}: {what}: {shown}{rest}, every {len(pattern)}."
        elif pattern:
            yield f"{_named(one)}: every place in the block has the same gain."
        if alike is not None:
            neighbours, by = alike
            yield f"{_named(one)}: the noise of elements {neighbours} correlates by {_with_error(by, '.4f')}."
    rows = [
        (_named(one) if not index else "", *corner)
        for one in found.operands
        for index, corner in enumerate(one.corners)
    ]
    yield f"\n{format_table(('operand', 'corner', 'what comes out', 'by definition'), rows, width=width)}"
    if found.products:
        rows = [(one.gemm.capitalize(), one.kind, *_cells(one), _yes(one)) for one in found.products]
        header = ("GEMM", "data", "gain", "± from 1", "error", "bias", "expectation is exact")
        yield f"\nProducts, M = N = K = {PRODUCT_SIDE}:\n{format_table(header, rows, width=width)}"
    yield ""
    compared = sum(one.compared for one in found.operands)
    rows = [
        (
            _named(one), each.cause, f"{each.count:,}", each.first.data,
            f"{each.first.row}, {each.first.column}",
            *(f"{value:.6g}" for value in (each.first.exact, each.first.expected, each.first.found)),
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
    yield f"{name} is {'' if found.holds else 'NOT '}what it claims to be."
    if found.holds and rows:
        yield f"Codes and scales are the definition's: {' and '.join(HARMLESS)} do not count."


def _yes(figures: RoundingFigures | ProductCertificate) -> str:
    return "yes" if figures.unbiased else "no"


def _cells(figures: RoundingFigures | ProductCertificate) -> tuple[str, ...]:
    gain, bias = figures.gain, figures.bias_share
    off, error = figure(gain.off(1.0), "+.1f"), figure(figures.relative_error.value, ".2%")
    share = "all" if bias.value == 1.0 else _with_error(bias, ".2%")
    return _with_error(gain, ".5f"), off, error, share


def _with_error(one: Estimate, form: str) -> str:
    return f"{figure(one.value, form)} ± {figure(one.error, form)}"


def _named(one: OperandCertificate) -> str:
    """Return the operands' names: ``Dgrad w; Wgrad dy, x``."""
    gemms: dict[str, list[str]] = {}
    for name in one.operand.names:
        gemm, _, operand = name.partition(".")
        gemms.setdefault(gemm.capitalize() if operand else gemm, []).append(operand)
    return "; ".join(f"{gemm} {', '.join(names)}".strip() for gemm, names in gemms.items())
