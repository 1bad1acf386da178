"""A callback for Hugging Face's ``Trainer`` and what is built on it (TRL).

``Trainer(…, callbacks=[AblateCallback("nvidia-nvfp4")])``, or ``AblateCallback()`` in a script that a study
starts. The recipe's state is part of ``trainer_state.json``, which ``Trainer`` writes with each checkpoint.

How it fails: a resume from a checkpoint without the state is a ``RuntimeError`` before the first step.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from ablate.integrations import Stepper
from ablate.layers.apply import convert_conv1d
from ablate.run.log_rows import LogReader, LogSource

if TYPE_CHECKING:
    from torch import nn
    from transformers import TrainerControl, TrainerState, TrainingArguments

__all__ = ["AblateCallback", "convert_conv1d"]

_TENSORS = "ablate_state.pt"


class AblateCallback(TrainerCallback, ExportableState):
    """Makes the trainer's model follow a recipe; arguments as of ``Stepper``."""

    def __init__(self, recipe: Any = None, **options: Any) -> None:
        self._recipe = recipe
        self._options = options
        self.stepper: Stepper | None = None

    def state(self) -> dict[str, Any]:
        """Return what ``trainer_state.json`` keeps; tensors are in a file of their own."""
        saved = {} if self.stepper is None else self.stepper.state_dict()
        plain = {
            name: value for name, value in saved.items() if name != "deoscillation"
        }
        return {"args": {}, "attributes": {"saved": plain}}

    def on_init_end(self, *_: Any, model: nn.Module, **__: Any) -> None:
        """Apply the recipe, before the optimizer is made."""
        self.stepper = Stepper(model, self._recipe, **self._options)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any
    ) -> None:
        """Load the recipe's state if training goes on from a checkpoint."""
        stepper = self._own()
        stored: Any = (state.stateful_callbacks or {}).get(type(self).__name__, {})
        # a list, where a trainer has two callbacks of this class
        if not isinstance(stored, dict):
            stored = {}
        saved = dict(stored.get("attributes", {}).get("saved", {}))
        if state.global_step and saved.get("step") == state.global_step:
            if stepper.state.deoscillates:
                place = (
                    Path(args.output_dir) / f"checkpoint-{state.global_step}" / _TENSORS
                )
                if not place.exists():
                    raise RuntimeError(
                        f"no {place}, which holds what de-oscillation needs: resume in its folder"
                    )
                saved["deoscillation"] = torch.load(place, weights_only=True)
            stepper.load_state_dict(saved)
        stepper.check_resumed(state.global_step)

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Count the step."""
        self._own().step()

    def on_step_end(
        self, _args: Any, _state: Any, control: TrainerControl, **_: Any
    ) -> None:
        """Save and end where the study asks for it."""
        if self._own().should_stop:
            control.should_save = control.should_training_stop = True

    def on_save(
        self, args: TrainingArguments, state: TrainerState, *_: Any, **__: Any
    ) -> None:
        """Write what does not fit into ``trainer_state.json``."""
        follower = self._own().state_dict().get("deoscillation")
        if follower is not None:
            torch.save(
                follower,
                Path(args.output_dir) / f"checkpoint-{state.global_step}" / _TENSORS,
            )

    def on_log(
        self,
        _args: Any,
        state: TrainerState,
        *_: Any,
        logs: dict[str, Any] | None = None,
        **__: Any,
    ) -> None:
        """Pass losses to the study."""
        reader = LogReader(LogSource(preset="hf", file=""))
        for row in reader.rows_of({**(logs or {}), "step": state.global_step}):
            if state.is_world_process_zero:
                self._own().row(**row)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Check that the recipe moved."""
        self._own().check_ended()

    def _own(self) -> Stepper:
        if self.stepper is None:
            raise RuntimeError(
                "this callback was not there when the Trainer was made (pass it as callbacks=[…], and leave "
                "restore_callback_states_from_checkpoint off)"
            )
        return self.stepper
