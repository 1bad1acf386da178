import math

from ablate.run.loss_units import UNIT_NAMES, to_stored


def test_a_perplexity_is_kept_as_its_logarithm_and_no_other_loss_changes():
    assert to_stored(math.e**2, "perplexity") == 2.0
    assert {to_stored(3.0, unit) for unit in UNIT_NAMES} == {3.0}
