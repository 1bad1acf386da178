"""The records in docs/devices."""

from pathlib import Path

from ablate.check.record import read_proof

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_docs_have_a_record_of_a_cpu_that_failed_nothing():
    paths = sorted((DOCS / "devices").glob("*.json"))
    records = [read_proof(path) for path in paths]
    # of benchmarks/device.py
    names = [path.stem.removesuffix("-benchmark") for path in paths]
    assert names == [record.machine.file_name for record in records]
    assert any(
        record.machine.device.kind == "cpu" and "failed" not in str(record)
        for record in records
    )
