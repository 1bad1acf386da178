"""Pages of records, and the records in docs/devices."""

import dataclasses
import re
from dataclasses import replace
from pathlib import Path

from ablate.backends.device import Device
from ablate.check.page import MEANING, page
from ablate.check.record import Finding, Machine, Part, ProofRecord, file_name, read_proof
from ablate.check.run import PARTS

DOCS = Path(__file__).resolve().parents[2] / "docs"


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


def test_the_records_of_the_docs_can_be_read():
    records = {path.stem: read_proof(path) for path in (DOCS / "devices").glob("*.json")}
    assert all(name == file_name(one.machine) for name, one in records.items())
    assert any(one.machine.device.kind == "cpu" and not one.failed for one in records.values())
