"""The self-test that stands before native training."""

from ablate.backends.preflight import quick_self_test
from ablate.backends.select import load_backend
from ablate.backends.testing.suite import POLICIES, label, policies_of


def test_the_short_form_passes_and_is_run_once():
    first = quick_self_test("emulated", "cpu")
    assert all(result.passed for result in first)
    assert {"exact probe: mxfp4", "accumulator: mxfp4"} <= {result.check for result in first}
    assert quick_self_test("emulated", "cpu") is first


def test_a_driver_error_is_a_failed_check_in_one_line(monkeypatch):
    def broken(*_args, **_options):
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore lines")

    monkeypatch.setattr(load_backend("emulated"), "multiply", broken)
    results = quick_self_test.__wrapped__("emulated", "cpu")
    failed = [result for result in results if not result.passed]
    assert failed
    assert failed[0].detail == "RuntimeError: CUDA error: an illegal memory access was encountered"


def test_a_label_says_all_of_a_policy():
    assert policies_of("\n".join(map(label, POLICIES))) == POLICIES
    assert len(set(map(label, POLICIES))) == len(POLICIES) == 74
