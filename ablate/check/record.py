"""What ``ablate check`` leaves: the record, and the page in Markdown beside it, the failures first.

A record names the device, the versions and the code, but no host and no path. A later call with the same
device, versions and code continues it. ``benchmarks/device.py`` leaves one of the same form.

How it fails: ``read_proof`` raises ``ValueError`` for a file that is no such record, in one line.
"""

from __future__ import annotations

import re
from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from ablate.backends.device import Device  # noqa: TC001  pydantic reads the annotation at run time
from ablate.base.files import read_record
from ablate.store.records import PLAIN, Count, Number, Text, Time, checked

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

Result = Literal["passed", "failed", "told", "skipped"]
"""told: a fact or a measurement, which cannot fail."""
State = Literal["passed", "failed", "skipped", "not run"]

OTHER_WORK = "other work"
"""The check that looks for other work on the device."""
NO_WORK = "none"
"""What it tells of an idle device."""


@dataclass(frozen=True, kw_only=True, config=PLAIN)
class CheckFinding:
    """What one check found, in a line, and in figures whose names end with their units.

    ``backend`` is empty for what no back end does. ``tensors``: the file beside the record with the tensors
    that show a failure. ``seconds``: how long the check took.
    """

    backend: Text = ""
    check: Text
    result: Result
    detail: Text
    figures: dict[str, Number] = Field(default_factory=dict)
    tensors: Text | None = None
    seconds: Number = 0.0


@dataclass(frozen=True, kw_only=True, config=PLAIN)
class CheckedPart:
    """A part of the proof. ``why``: the reason of a part that was skipped or not run, or not to its end."""

    name: Text
    state: State
    why: Text | None = None
    findings: tuple[CheckFinding, ...] = ()


@dataclass(frozen=True, kw_only=True, config=PLAIN)
class TestedMachine:
    """What was tested, with what: the device, the processor beside it and its threads, versions."""

    device: Device
    cpu: Text
    cpu_capability: Text
    threads: Count
    versions: dict[str, Text | None]

    @property
    def name(self) -> str:
        """The device by name; a CPU by its model."""
        if self.device.kind == "cpu":
            return self.cpu
        return self.device.name

    @property
    def file_name(self) -> str:
        """The name of the device's record, without an ending: architecture and device."""
        words = re.findall(r"[a-z0-9]+", self.name.lower())
        return "-".join([self.device.arch, *words])


@dataclass(frozen=True, kw_only=True, config=PLAIN)
class ProofRecord:
    """The record.

    ``command``: what left it. ``code``: hash of the sources that were tested. ``begun``: the check (part,
    back end, name) that runs now; if it is there after the process has ended, the process ended within it.
    """

    format: Literal[1] = 1
    command: Text = "ablate check"
    machine: TestedMachine
    code: Text
    measured_unix: Time
    parts: tuple[CheckedPart, ...]
    begun: tuple[Text, Text, Text] | None = None

    def __str__(self) -> str:
        """Count the parts by state, in a few words."""
        states = Counter(part.state for part in self.parts)
        counts = [f"{count} {state}" for state, count in states.items()]
        return f"Parts: {', '.join(counts)}"


def read_proof(path: Path) -> ProofRecord:
    """Read a record.

    Raises:
        FileNotFoundError: there is none.
        ValueError: the file is damaged, or another version's.
    """
    return checked(ProofRecord, read_record(path))


def page(record: ProofRecord) -> str:
    """Render the page in Markdown: what was tested, the parts, then every finding, the failures first."""
    machine = record.machine
    versions = []
    for name, version in machine.versions.items():
        if version:
            versions.append(f"{name} {version}")
    day = datetime.fromtimestamp(record.measured_unix, UTC).strftime("%Y-%m-%d")
    remarks = []
    parts = []
    rows = []
    for part in record.parts:
        seconds = 0.0
        for finding in part.findings:
            seconds += finding.seconds
            detail = detail_of(finding)
            rows.append(
                (part.name, finding.check, finding.backend, finding.result, detail)
            )
            if finding.check == OTHER_WORK and finding.detail != NO_WORK:
                remark = f"{part.name}: {finding.detail}. Times may be too long."
                remarks.append(f"Other work in {remark}\n")
        state = part.state if part.why is None else f"{part.state}: {part.why}"
        parts.append((part.name, state, str(len(part.findings)), f"{seconds:.1f}"))
    rows.sort(key=lambda row: row[3] != "failed")
    lines = [
        f"# {machine.name}\n",
        f"`{record.command}` on {machine.device.arch}, {day}. CPU: {machine.cpu}, {machine.cpu_capability},",
        f"threads: {machine.threads}. {', '.join(versions)}. Code {record.code}.\n",
        f"{record}. What each part tests is in docs/native.md.\n",
        *remarks,
        *_table(("part", "result", "checks", "seconds"), parts),
        "",
        *_table(("part", "check", "back end", "result", "detail"), rows),
    ]
    return "\n".join(lines) + "\n"


def detail_of(finding: CheckFinding) -> str:
    """Join a finding's line, its figures and a link to its file."""
    figures = [f"{name} {value:.4g}" for name, value in finding.figures.items()]
    details = [finding.detail, ", ".join(figures)]
    if finding.tensors:
        details.append(f"[tensors]({finding.tensors})")
    return "; ".join(filter(None, details))


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = []
    for row in (header, ["---"] * len(header), *rows):
        cells = [cell.replace("|", "/") for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    return lines
