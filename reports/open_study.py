"""``ablate.open_study``: a study's runs, curves and costs as data frames for notebooks.

The figures are the report's own, with full precision.

How it fails: a ``UserError`` of one line if there is no study, or if its plan cannot be read. A damaged file
of a run is a line in ``faults``, and the rest is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ablate.base.files import default_storage
from ablate.reports.findings.analyse import analyse
from ablate.reports.pages.document import arm_frame, run_frame
from ablate.results.frames import load_frames, training_frame
from ablate.store.runs import study_at, study_named

if TYPE_CHECKING:
    import pandas as pd

    from ablate.reports.findings.results import Analysis
    from ablate.results.frames import StudyFrames
    from ablate.store import StudyStore


class OpenStudy:
    """One study as it was when it was opened. Each method returns a frame of its own, which you may change.

    ``analysis`` holds every number of the report, ``faults`` one line for each file that could not be read,
    ``loss_unit`` the unit of validation losses, such as ``nats/token``.
    """

    def __init__(
        self, store: StudyStore, frames: StudyFrames, analysis: Analysis
    ) -> None:
        self._store = store
        self._evals = frames.evals
        self.analysis = analysis
        self.faults = frames.faults
        self.loss_unit = frames.plan.unit

    def runs(self) -> pd.DataFrame:
        """Return one row a run of the plan, as ``tables/runs.csv`` has them.

        ``run_id``, ``arm``, ``seed``; ``state``, as ``ablate status`` shows it; ``end``: ``hit``,
        ``censored``, ``diverged``, ``missing``, ``unused`` where its arm was stopped early, or ``ended`` in a
        study of logs without a target; ``tokens``: trained; ``tokens_to_target``: tokens, NaN without a hit;
        ``left_bound``: whether the target was reached at or before the first evaluation; ``last_loss``;
        ``seconds``: from start to end; ``tokens_per_sec``: the median in training;
        ``backend_mode``: ``native``, ``upcast``, ``emulated``, ``reference`` or ``imported``; ``message``:
        why it ended so.
        """
        figures = ("tokens_to_target", "last_loss", "seconds", "tokens_per_sec")
        runs = run_frame(self.analysis).infer_objects()
        return runs.astype(dict.fromkeys(figures, float))

    def curves(self) -> pd.DataFrame:
        """Return one row an evaluation, ordered by run and tokens, as ``tables/evaluations.csv`` has them.

        ``run_id``, ``arm``, ``seed``; ``tokens``: trained before it; ``step``: optimizer steps done;
        ``val_loss``.
        """
        return self._evals.copy()

    def training(self) -> pd.DataFrame:
        """Return the training rows, ordered by run and tokens; each call reads them anew.

        ``run_id``, ``arm``, ``seed``; ``tokens``: trained so far; ``step``: optimizer steps done;
        ``loss_nats_per_token`` and ``tokens_per_sec``: means since the row before; ``learning_rate``;
        ``gradient_norm``: before clipping. Imported logs have ``tokens_per_sec`` only, or no rows. If
        validation losses are in another unit, the loss in training is ``loss``, in the log's own unit.
        """
        return training_frame(self._store)

    def costs(self) -> pd.DataFrame:
        """Return one row an arm, the baseline among them, as ``tables/arms.csv`` has them.

        ``arm``, ``recipe``; ``n``: results, and how many of them ``hit`` the target, were ``censored`` or
        ``diverged``; ``missing``: runs without a result. Four figures, each as ``…_estimate``, ``…_low`` and
        ``…_high`` (the ends of its interval), NaN where there is no honest figure: ``tokens_to_target`` in
        tokens; ``token_cost`` as a fraction of the baseline's tokens (0.1 is 10 % more); ``final_loss``;
        ``loss_difference`` to the baseline, after ``loss_difference_tokens``. ``token_cost_kind``:
        ``interval``, ``point``, ``bound``, ``none`` or ``baseline``. ``counted_from_tokens``: of the fork
        from which tokens and cost are counted, else 0. Of a study that tuned its arms: at the values found.
        """
        arms = arm_frame(self.analysis).infer_objects()
        figures = arms.filter(regex="_(estimate|low|high|tokens)$")
        return arms.astype(dict.fromkeys(figures, float))


def open_study(study: str | Path, *, storage: str | Path | None = None) -> OpenStudy:
    """Open a study that has run, is running or was imported.

    ``study``: its folder, or its name in ``storage`` (default: $ABLATE_STORAGE, else ./ablate-runs).

    >>> costs = ablate.open_study("quickstart").costs()  # doctest: +SKIP

    Raises:
        UserError: there is no such study, or its plan cannot be read.
    """
    store = study_at(Path(study))
    if store is None:
        place = default_storage() if storage is None else Path(storage)
        store = study_named(place, str(study))
    frames = load_frames(store)
    return OpenStudy(store, frames, analyse(frames))
