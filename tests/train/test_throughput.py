"""What is timed as a step of an arm alone."""

from ablate.layers.deoscillation import Deoscillation
from ablate.recipes import RecipeSpec
from ablate.train.throughput import time_steps


def test_the_time_of_a_step_holds_its_de_oscillation(make_config, monkeypatch):
    taken = []
    own = Deoscillation.step
    monkeypatch.setattr(Deoscillation, "step", lambda self: taken.append(own(self)))
    config = make_config(RecipeSpec(gemms=["fprop"], deoscillate={"window": 2}), tokens=2048)
    time_steps(config, device="cpu", steps=2, warmup=1, repeats=2)
    assert len(taken) == 5
    assert [reset is not None for reset in taken] == [False, False, True, False, True]
