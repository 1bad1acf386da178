"""The record as a page in Markdown: what was tested, the parts, the failures first, then every finding."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ablate.check.record import NO_WORK, OTHER_WORK

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ablate.check.record import Finding, ProofRecord

MEANING = {
    "device": "What the device is, what torch and Triton offer on it, and which back ends claim it.",
    "quantised bits": "Quantised values and scales, along both axes, equal to the CPU reference's to the "
    "bit.",
    "exact probe": "Products whose exact result is known: how many bits the sums keep, and how they are "
    "rounded.",
    "products": "Products of random operands against float64. The bound is the largest error of sums in "
    "fp32 and one rounding of the result.",
    "gain of SR": "Stochastic rounding keeps the mean: the gain is 1, with the standard error of the draws.",
    "Hadamard": "Both operands rotated give the product of none rotated, but for the format's own error.",
    "gradients": "Output and gradients of one linear layer against the reference's.",
    "training": "Ten steps of a small model. Each layer gets the reference's input and must give its "
    "bits. The reference trains beside it; the order of sums alone may tell the two runs apart.",
    "quantiser bandwidth": "Bytes read and written in a second, beside those of a plain copy.",
    "GEMM rates": "Speed of products by format and shape, over bf16's and FP8's, the time to quantise "
    "included.",
    "quantised bits of other policies": "As the second part, for all other roundings, scales and rotations.",
    "step times": "Whole training steps, eager and compiled; beside them how often bf16's time they take.",
    "FSDP2": "Training on all GPUs of the machine beside one.",
}
"""What each part tests, for a reader who has not seen the tool."""


def page(record: ProofRecord) -> str:
    """Return the page."""
    machine, device = record.machine, record.machine.device
    versions = ", ".join(f"{name} {found}" for name, found in machine.versions.items() if found is not None)
    day = datetime.fromtimestamp(record.measured_unix, UTC).strftime("%Y-%m-%d")
    processor = "" if device.kind == "cpu" else f" beside {machine.cpu}"
    lines = [
        f"# {machine.name}",
        "",
        f"`ablate check` on {device.arch}{processor} ({machine.cpu_capability}, threads: {machine.threads}),",
        f"{day}. {versions}. Code {record.code}.",
        "",
        in_words(record) + ".",
        "",
    ]
    beside = [
        f"{part.name}: {one.detail}"
        for part in record.parts
        for one in part.findings
        if one.check == OTHER_WORK and one.detail != NO_WORK
    ]
    if beside:
        lines += [f"Other work ({'; '.join(beside)}): times may be too long.", ""]
    rows: list[Sequence[str]] = []
    for part in record.parts:
        seconds = sum(one.seconds for one in part.findings)
        state = f"{part.state}: {part.why}" if part.why else part.state
        rows.append((part.name, state, str(len(part.findings)), f"{seconds:.1f}"))
    lines += _table(("part", "result", "checks", "seconds"), rows)
    if record.failed:
        lines += ["", "## Failures", ""]
    for part, one in record.failed:
        who = f"{one.check} ({one.backend})" if one.backend else one.check
        lines.append(f"- {part.name}, {who}: {one.detail}{_file(one)}")
    for part in record.parts:
        if part.findings:
            lines += ["", f"## {part.name[0].upper()}{part.name[1:]}", "", MEANING.get(part.name, ""), ""]
            steps = {one.check: one.figures["step_ms"] for one in part.findings if "step_ms" in one.figures}
            rows = [(one.check, one.backend, one.result, _detail(one, steps)) for one in part.findings]
            lines += _table(("check", "back end", "result", "detail"), rows)
    return "\n".join(lines) + "\n"


def in_words(record: ProofRecord) -> str:
    """Return the parts' states in a few words."""
    return ", ".join(f"{count} part{'s' * (count > 1)} {state}" for state, count in record.states().items())


def _file(one: Finding) -> str:
    return f" ([tensors]({one.tensors}))" if one.tensors else ""


def _detail(one: Finding, steps: Mapping[str, float]) -> str:
    """Return a finding in words; ``steps``: step times by check, to tell each beside bf16's of its model."""
    figures = ", ".join(f"{name} {value:.4g}" for name, value in one.figures.items())
    model, _, how = one.check.partition(", ")
    bf16 = steps.get(f"{model}, bf16, {how.rpartition(', ')[2]}")
    if one.check in steps and bf16 is not None:
        figures += f", {steps[one.check] / bf16:.2f} × bf16"
    return "; ".join(filter(None, (one.detail, figures))) + _file(one)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in cells]
