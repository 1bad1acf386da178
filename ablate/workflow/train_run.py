"""``ablate.train_run``: one run from a notebook, described by the words of a study file.

Nothing is kept: no storage, no MLflow, no resuming. For several seeds, or to compare, write a study.

How it fails: ``UserError`` with the path of the key, as for a study file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ablate.base.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

    from ablate.run.config import RunConfig
    from ablate.train.loop import End


@dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """How a run ended, and its curves.

    ``tokens``: trained; ``message``: why it diverged. ``evaluations``: ``tokens``, ``step``, ``val_loss`` in
    nats per token. ``training``: as ``ablate.open_study(…).training()`` has them. ``config``: what was run,
    with every default.
    """

    state: End
    tokens: int
    message: str | None
    evaluations: pd.DataFrame
    training: pd.DataFrame
    config: RunConfig


def train_run(
    *,
    model: str | Mapping[str, Any] = "built-in",
    recipe: str | Mapping[str, Any] = "bf16",
    data: str | Path | Mapping[str, Any] | None = None,
    seed: int = 0,
    backend: str = "auto",
    device: str | None = None,
    progress: bool = True,
    **training: Any,
) -> TrainedRun:
    """Train one run in this process and return its curves.

    >>> run = ablate.train_run(recipe="mxfp4", data="corpus/", tokens=200_000)  # doctest: +SKIP
    >>> run.evaluations.plot(x="tokens", y="val_loss")  # doctest: +SKIP

    Args:
        model: a section ``model`` of a study file, or a word as ``ablate init --model`` takes it:
            ``built-in``, a preset, ``hf:FOLDER``, ``function:FILE.py:NAME``.
        recipe: a section ``recipe``, or the name of a recipe.
        data: a section ``data``, or a file, folder or glob of text or JSON lines; None: the source text of
            Python's standard library.
        seed: of initial weights, data order, stochastic rounding and Hadamard signs.
        backend: who quantises and multiplies.
        device: a torch device; None: the first GPU, else the CPU.
        progress: show a bar.
        training: keys of the section ``training``, such as ``tokens=200_000`` or ``learning_rate=1e-3``.

    Raises:
        UserError: what is described cannot be run.
    """
    import pandas as pd
    from rich.progress import Progress

    from ablate.backends.device import chosen_device
    from ablate.results.frames import TRAINING, training_row
    from ablate.study.template import model_section
    from ablate.train import train
    from ablate.workflow.init import data_section

    if isinstance(model, str):
        model = model_section(model)
    if data is None or isinstance(data, str | Path):
        data = data_section(None if data is None else str(data), Path())
    base = {
        "model": model,
        "data": data,
        "recipe": recipe,
        "backend": backend,
        "training": training,
    }
    config = _planned(base, seed)
    rows: list[dict[str, Any]] = []
    with Progress(disable=not progress) as bar:
        task = bar.add_task("training", total=config.training.tokens)

        def note(row: dict[str, Any]) -> None:
            rows.append(row)
            bar.update(task, completed=row["tokens"])
            if row["kind"] == "eval":
                bar.update(task, description=f"validation loss {row['val_loss']:.3f}")

        result = train(config, note, device=chosen_device(device)[0])
    evaluations = pd.DataFrame([row for row in rows if row["kind"] == "eval"])
    losses = [
        name for name in evaluations.columns.astype(str) if name.startswith("val_loss")
    ]
    columns = ["tokens", "step", *(losses or ["val_loss"])]
    training_rows = [training_row(row) for row in rows if row["kind"] == "train"]
    return TrainedRun(
        state=result.state,
        tokens=result.tokens,
        message=result.message,
        evaluations=evaluations.reindex(columns=columns),
        training=pd.DataFrame(training_rows, columns=list(TRAINING.values())),
        config=config,
    )


def _planned(base: Mapping[str, Any], seed: int) -> RunConfig:
    """Plan a study of one run, and return the run's configuration; problems name keys, and no lines."""
    from ablate.plan import build_plan
    from ablate.study.load import study_of

    study = {
        "name": "run",
        "baseline": "run",
        "target": None,
        "seeds": [seed],
        "base": base,
        "arms": {"run": None},
    }
    try:
        text = json.dumps(study, ensure_ascii=False, default=dict).encode()
    except (TypeError, ValueError) as error:
        raise UserError(
            f"train_run: {error}", hint="expected the plain values of a study file"
        ) from None
    try:
        arm = build_plan(study_of(text, Path("train_run"))).arms[0]
        return arm.config.with_seed(seed)
    except UserError as error:
        problems = [
            replace(problem, file=None, line=None, column=None)
            if problem.line
            else problem
            for problem in error.problems
        ]
        raise UserError(*problems) from None
