"""The record as a page in Markdown: what was tested, the parts, the failures first, then every finding."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ablate.prove.record import Finding, Part, ProofRecord


def page(record: ProofRecord) -> str:
    """Return the page."""
    machine, device = record.machine, record.machine.device
    versions = ", ".join(f"{name} {found}" for name, found in machine.versions.items() if found is not None)
    day = datetime.fromtimestamp(record.measured_unix, UTC).strftime("%Y-%m-%d")
    processor = "" if device.kind == "cpu" else f" beside {machine.cpu}"
    lines = [
        f"# {machine.name}",
        "",
        f"`ablate prove` on {device.arch}{processor} ({machine.cpu_capability}, threads: {machine.threads}),",
        f"{day}. {versions}. Code {record.code}.",
        "",
        in_words(record) + ".",
        "",
        *_table(("part", "result", "checks", "seconds"), [_summary(part) for part in record.parts]),
    ]
    if record.failed:
        lines += ["", "## Failures", ""]
        lines += [f"- {part.name}, {_who(one)}{one.detail}{_file(one)}" for part, one in record.failed]
    for part in record.parts:
        if part.findings:
            lines += ["", f"## {part.name[0].upper()}{part.name[1:]}", ""]
            rows = [(one.check, one.backend, one.result, _detail(one)) for one in part.findings]
            lines += _table(("check", "back end", "result", "detail"), rows)
    return "\n".join(lines) + "\n"


def in_words(record: ProofRecord) -> str:
    """Return the parts' states in a few words."""
    return ", ".join(f"{count} part{'s' * (count > 1)} {state}" for state, count in record.states().items())


def _summary(part: Part) -> tuple[str, ...]:
    why = f": {part.why}" if part.why else ""
    seconds = sum(one.seconds for one in part.findings)
    return part.name, f"{part.state}{why}", str(len(part.findings)), f"{seconds:.1f}"


def _who(one: Finding) -> str:
    return f"{one.check}{f' ({one.backend})' if one.backend else ''}: "


def _file(one: Finding) -> str:
    return f" ([tensors]({one.tensors}))" if one.tensors else ""


def _detail(one: Finding) -> str:
    figures = ", ".join(f"{name} {value:.4g}" for name, value in one.figures.items())
    return "; ".join(filter(None, (one.detail, figures))) + _file(one)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in cells]
