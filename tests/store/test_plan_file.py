import pytest

from ablate.store.plan_file import plan_from_json, plan_to_json

PLAN = {
    "format": 1,
    "study": "s",
    "baseline": "a",
    "target": None,
    "arms": [{"name": "a", "runs": []}],
}


def test_the_unit_of_losses_is_written_unless_they_are_in_nats_per_token():
    assert "loss_unit" not in plan_to_json(plan_from_json(PLAN))
    plan = plan_from_json(PLAN | {"loss_unit": "bits-per-byte"})
    assert plan_from_json(plan_to_json(plan)) == plan
    assert plan.unit == "bits/byte"
    for unknown in ("perplexity", "bpb"):
        with pytest.raises(ValueError, match="loss_unit"):
            plan_from_json(PLAN | {"loss_unit": unknown})
