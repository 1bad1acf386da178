"""What ``ablate check RECIPE`` prints of a quantiser: its figures, corners, products and differences."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ablate.cli.output import figure, format_table, terminal_width

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ablate.diagnose.certificate import Certificate, OperandCertificate
    from ablate.diagnose.ratios import Estimate
    from ablate.diagnose.rounding import RoundingFigures

_LONGEST_PATTERN = 8


def content_of(found: Certificate, seed: int) -> dict[str, Any]:
    """Return what ``--json`` prints."""
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


def lines_of(found: Certificate) -> Iterator[str]:
    """Yield the figures, corners, products and differences as text, then the verdict."""
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
