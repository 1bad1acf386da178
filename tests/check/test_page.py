"""docs/native.md says of each device what its record says."""

import dataclasses
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ablate.backends.device import KNOWN, Device
from ablate.check.page import MEANING, main, page, read_records, with_records
from ablate.check.record import Finding, Machine, Part, ProofRecord, file_name, write_proof
from ablate.check.run import PARTS

DOCS = Path(__file__).resolve().parents[2] / "docs"
TABLE = """\
| architecture | has it | MXFP4 | run on the device |
|---|---|---|---|
| `sm_90` | H100 | upcast | yes, once |
| `gfx950` | MI355X | native | **nobody yet** |

| what | command |
|---|---|
| `sm_90` | stays as it is |
"""


def record(*states, name="NVIDIA H100", arch="sm_90"):
    machine = Machine(
        device=Device(kind="cuda", arch=arch, name=name),
        cpu="a CPU",
        cpu_capability="AVX2",
        threads=1,
        versions={},
    )
    parts = tuple(Part(name=f"part {number}", state=state) for number, state in enumerate(states))
    return ProofRecord(machine=machine, code="c0de", measured_unix=1.7e9, parts=parts)


def test_the_docs_are_the_records():
    text, records = (DOCS / "native.md").read_text(encoding="utf-8"), read_records(DOCS / "devices")
    assert with_records(text, records) == text, "python -m ablate.check.page docs writes it"
    for name, one in records.items():
        assert name == file_name(one.machine)
        assert (DOCS / "devices" / f"{name}.md").read_text(encoding="utf-8") == page(one)


def test_a_page_warns_at_its_top_of_times_beside_other_work():
    found = [Finding(check="other work", result="told", detail=one) for one in ("none", "100 % busy")]
    alone, busy = (Part(name="step times", state="passed", findings=(one,)) for one in found)
    assert "Other work" not in page(replace(record(), parts=(alone,)))
    assert "1 part passed.\n\nOther work (step times: 100 % busy): times may be too long.\n" in page(
        replace(record(), parts=(busy,))
    )


def test_a_page_tells_a_step_beside_bf16s_of_the_same_model_and_kind():
    times = {"tiny, bf16, eager": 2.0, "tiny, mxfp4, eager": 3.0, "tiny, mxfp4, compiled": 5.0}
    found = [
        Finding(check=name, result="told", detail="", figures={"step_ms": ms}) for name, ms in times.items()
    ]
    text = page(replace(record(), parts=(Part(name="step times", state="passed", findings=tuple(found)),)))
    assert "| tiny, mxfp4, eager |  | told | step_ms 3, 1.50 × bf16 |" in text
    assert "| tiny, mxfp4, compiled |  | told | step_ms 5 |" in text


def test_the_docs_have_every_field_of_a_record():
    """Each field by name in the JSON of docs/native.md, and nothing that no record has."""
    (text,) = re.findall(r"```json\n(.*?)```", (DOCS / "native.md").read_text(encoding="utf-8"), re.DOTALL)
    classes = (ProofRecord, Machine, Device, Part, Finding)
    fields = {field.name for one in classes for field in dataclasses.fields(one)} | {"hash"}
    values = set(re.findall(r'[:|] "([^"]+)"', text))
    figure = set(re.findall(r'"figures": {"([^"]+)"', text))
    assert set(re.findall(r'"([^"]+)"', text)) - values - figure == fields


def test_every_part_is_explained():
    assert set(MEANING) == set(PARTS)


def test_every_known_architecture_has_its_row_and_the_cpu_its_record():
    text, records = (DOCS / "native.md").read_text(encoding="utf-8"), read_records(DOCS / "devices")
    one = record("passed")
    for arch in KNOWN:
        machine = replace(one.machine, device=replace(one.machine.device, arch=arch))
        assert "(devices/x.md): 1 part passed |" in with_records(text, {"x": replace(one, machine=machine)})
    assert any(one.machine.device.kind == "cpu" and not one.failed for one in records.values())


def test_a_row_says_what_passed_failed_and_was_not_run():
    records = {
        "a": record("passed", "passed", "failed", "not run"),
        "b": record("passed", name="NVIDIA H200"),
    }
    rows = with_records(TABLE, records).splitlines()
    first = "[NVIDIA H100](devices/a.md): 2 parts passed, 1 part failed, 1 part not run"
    assert rows[2] == f"| `sm_90` | H100 | upcast | {first}; [NVIDIA H200](devices/b.md): 1 part passed |"
    assert rows[3:] == TABLE.splitlines()[3:]
    assert with_records(TABLE, {}).splitlines()[2].endswith("| **nobody yet** |")


def test_a_record_without_a_row_is_no_silent_matter():
    with pytest.raises(ValueError, match="no row for sm_70"):
        with_records(TABLE, {"v100": record("passed", arch="sm_70")})


def test_the_command_writes_the_column_and_the_pages(tmp_path):
    (tmp_path / "native.md").write_text(TABLE)
    found = Finding(check="clock", result="told", detail="fast", figures={"clock_MHz": 1980.0})
    one = replace(record("passed"), parts=(Part(name="device", state="passed", findings=(found,)),))
    write_proof(tmp_path / "devices" / "h100.json", one)
    main(tmp_path)
    assert "[NVIDIA H100](devices/h100.md): 1 part passed" in (tmp_path / "native.md").read_text()
    assert "clock_MHz 1980" in (tmp_path / "devices" / "h100.md").read_text()
