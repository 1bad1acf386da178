"""The page of a record, and the records in docs/devices."""

from pathlib import Path

from ablate.backends.device import Device
from ablate.check.record import Finding, Machine, Part, ProofRecord, page, read_proof

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_docs_have_a_record_of_a_cpu_that_failed_nothing():
    paths = sorted((DOCS / "devices").glob("*.json"))
    records = [read_proof(path) for path in paths]
    assert [path.stem for path in paths] == [record.machine.file_name for record in records]
    assert any(record.machine.device.kind == "cpu" and not record.failed for record in records)


def test_a_page_warns_at_its_top_of_times_beside_other_work():
    machine = Machine(
        device=Device(kind="cuda", arch="sm_90", name="NVIDIA H100"), cpu="a CPU", cpu_capability="AVX2",
        threads=1, versions={},
    )  # fmt: skip
    found = Finding(check="other work", result="told", detail="100 % busy")
    part = Part(name="step times", state="passed", findings=(found,))
    record = ProofRecord(machine=machine, code="c0de", measured_unix=1.7e9, parts=(part,))
    assert "\n\nOther work in step times: 100 % busy. Times may be too long.\n" in page(record)
