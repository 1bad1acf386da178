"""One engine for every search: each round asks a space for trials, runs them, and tells Optuna's studies.

``TrialRuns`` trains trials as ordinary runs of a run store: Optuna's storage has the trials, the store their
training. The plan in the store grows with the trials, so that all readers of a study can read a search.

Only one process writes: the driver. A trial is written to its study before it runs, in one operation,
and told when its round is over. A round depends only on the rounds before it: trials of the same round count
as open, however they ended. A killed search therefore resumes as if it had not been killed: it runs open
trials, fills the unfinished round, and repeats no told trial. All groups go through their rounds together,
so that their runs use a whole machine. Optuna is asked through a study in memory (``study_of``), filled with
the relevant trials and discarded after one answer.

How it fails: a round with missing results (an interruption, a failed run) ends the search, and none of its
trials is told. An exception of ``run`` does the same. A trial that failed by its own fault is told as failed.
A journal that cannot be opened is a ``UserError``. If a full disk has cut its last line, opening
removes that line, because the next line after it would make the whole journal unreadable; its content is
found again in the run store. A process killed while it writes leaves a lock that Optuna breaks after 30 s.
"""

from __future__ import annotations

import hashlib
import math
import os
import warnings
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ablate.base.errors import UserError, first_line
from ablate.execute.pending_runs import find_todo, requests_of
from ablate.execute.queue import ExecutionEnd
from ablate.run.schedule import divergence_bound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

    from ablate.data import TokenFiles
    from ablate.execute.pending_runs import RunRequest
    from ablate.plan import Plan, PlannedArm
    from ablate.store import RunDir, State, StudyStore

    Run = Callable[[Sequence["Asked"]], Sequence["TrialResult"]]
    """Runs trials; returns their results in order."""
    Unneeded = Callable[[], Mapping[str, str]]
    Execute = Callable[[list[RunRequest], Unneeded], ExecutionEnd]

JOURNAL = "optuna.log"
LOSS = "validation loss"
VIOLATION = "violation"
_TRIES = 12
_FEWEST_COMPLETE = 3
"""Complete trials of earlier rounds that are needed before a trial is called hopeless."""

Losses = dict[int, float]
"""Validation losses, by tokens."""


def quiet_optuna() -> Any:
    """Import Optuna, without its warnings about experimental features; its log has warnings only."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    return optuna


def open_storage(folder: Path) -> BaseStorage:
    """Open Optuna's storage, a journal in ``folder``.

    Raises:
        UserError: it cannot be opened.
    """
    storages = quiet_optuna().storages
    path = folder / JOURNAL
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if path.exists():
            whole_lines = path.read_bytes().rfind(b"\n") + 1
            os.truncate(path, whole_lines)
        storage: BaseStorage = storages.JournalStorage(
            storages.journal.JournalFileBackend(str(path))
        )
    except Exception as error:
        # a damaged line ends in whatever its reader stumbles over
        message = f"cannot open Optuna's storage {path}: {first_line(error)}"
        raise UserError(message, hint="expected Optuna's journal") from error
    return storage


def open_study(
    storage: BaseStorage, name: str, objectives: Sequence[str] = (LOSS,)
) -> Study:
    """Open or create a study of Optuna's, which serves as a list of trials.

    ``objectives``: what is minimised, as Optuna's pages show it.
    """
    study: Study = quiet_optuna().create_study(
        storage=storage,
        study_name=name,
        directions=["minimize"] * len(objectives),
        load_if_exists=True,
    )
    if study.metric_names != list(objectives):
        study.set_metric_names(list(objectives))
    return study


def violation(trial: FrozenTrial) -> float:
    """Return a trial's violation: greater than 0 means a miss."""
    return trial.constraints.get(VIOLATION, 0.0)


def is_feasible(trial: FrozenTrial) -> bool:
    """Whether a trial is complete and did not miss."""
    return trial.state.name == "COMPLETE" and not violation(trial)


def open_trial(
    params: dict[str, Any], distributions: Mapping[str, BaseDistribution], **attrs: Any
) -> FrozenTrial:
    """Make a trial without a result: its state is running."""
    optuna = quiet_optuna().trial
    trial: FrozenTrial = optuna.create_trial(
        state=optuna.TrialState.RUNNING,
        params=params,
        distributions={name: distributions[name] for name in params},
        user_attrs=attrs,
    )
    return trial


def study_of(trials: Sequence[FrozenTrial], **options: Any) -> Study:
    """Make a study in memory with these trials; ``options``: its sampler and pruner."""
    num_objectives = 1
    for trial in trials:
        if trial.values is not None:
            num_objectives = len(trial.values)
    study: Study = quiet_optuna().create_study(
        directions=["minimize"] * num_objectives, **options
    )
    study.add_trials(trials)
    return study


def suggestions(
    trials: Sequence[FrozenTrial],
    distributions: Mapping[str, BaseDistribution],
    seed: int,
    **options: Any,
) -> Iterator[dict[str, Any]]:
    """Yield some suggestions of Optuna's TPE after these trials; open ones count as poor (constant liar)."""
    optuna = quiet_optuna()
    sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True, **options)
    study = study_of(trials, sampler=sampler)
    for _ in range(_TRIES):
        trial = study.ask(dict(distributions))
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
        yield trial.params


def seed_of(*parts: object) -> int:
    """Hash the parts to a seed of 32 bits."""
    text = "|".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")


@dataclass(frozen=True, kw_only=True)
class TrialGroup:
    """A study of Optuna's, and how its next trial is chosen.

    ``propose``: makes an open trial from all trials before it and a seed. ``arms``: those whose runs a trial
    is. ``watched_from``: after how many tokens a trial can be called hopeless; None: never.
    """

    name: str
    study: Study
    propose: Callable[[Sequence[FrozenTrial], int], FrozenTrial]
    arms: Callable[[FrozenTrial], Sequence[PlannedArm]]
    num_trials: int
    watched_from: int | None = None

    def run_ids(self, trial: FrozenTrial) -> list[str]:
        """List the ids of a trial's runs in the run store."""
        return [run.id for arm in self.arms(trial) for run in arm.runs]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A trial to be run. ``earlier``: the trials of earlier rounds, all of them told."""

    group: TrialGroup
    trial: FrozenTrial
    earlier: Sequence[FrozenTrial]

    @cached_property
    def run_ids(self) -> list[str]:
        """The ids of its runs in the run store."""
        return self.group.run_ids(self.trial)

    def hopeless_at(self, curve: Losses) -> int | None:
        """Return after how many tokens the trial's best is first above earlier ones' median, or None."""
        watched_from = self.group.watched_from
        complete = [trial for trial in self.earlier if trial.state.name == "COMPLETE"]
        if watched_from is None or len(complete) < _FEWEST_COMPLETE:
            return None
        optuna = quiet_optuna()
        pruner = optuna.pruners.MedianPruner(
            n_startup_trials=_FEWEST_COMPLETE, n_warmup_steps=watched_from
        )
        trial = study_of(complete, pruner=pruner).ask()
        for tokens, loss in sorted(curve.items()):
            trial.report(loss, tokens)
            if trial.should_prune():
                return tokens
        return None


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """A trial's values, or why it failed; with neither, the trial has not ended.

    ``violation``: greater than 0 means a miss. ``curve``: decides whether the trial was hopeless; then
    ``values`` are ignored.
    """

    values: tuple[float, ...] | None = None
    violation: float | None = None
    failed: str | None = None
    curve: Losses = field(default_factory=dict)


def search(groups: Sequence[TrialGroup], at_once: int, run: Run) -> bool:
    """Run every group's trials; return whether all rounds are complete.

    ``at_once``: the number of a group's trials in a round.
    """
    num_trials = max(group.num_trials for group in groups)
    for round_ in range(math.ceil(num_trials / at_once)):
        asked: list[Asked] = []
        for group in groups:
            asked += _ask(group, at_once, round_)
        results = run(asked) if asked else ()
        ends = []
        for trial, result in zip(asked, results, strict=True):
            hopeless_at = trial.hopeless_at(result.curve)
            if hopeless_at is None and result.values is None and result.failed is None:
                return False
            ends.append((trial, result, hopeless_at))
        for end in ends:
            _tell(*end)
    return True


def _ask(group: TrialGroup, at_once: int, round_: int) -> list[Asked]:
    """Fill a group's round, and return its trials that have not been told."""
    first = round_ * at_once
    end = min(first + at_once, group.num_trials)
    trials = group.study.get_trials()
    for number in range(len(trials), end):
        # Trials of the same round count as open, however they ended.
        same_round = [
            open_trial(trial.params, trial.distributions, **trial.user_attrs)
            for trial in trials[first:]
        ]
        seed = seed_of(round_, number - first)
        group.study.add_trial(group.propose([*trials[:first], *same_round], seed))
        trials = group.study.get_trials()
    return [
        Asked(group=group, trial=trial, earlier=trials[:first])
        for trial in trials[first:end]
        if not trial.state.is_finished()
    ]


def _tell(asked: Asked, result: TrialResult, hopeless_at: int | None) -> None:
    """Record the end of an open trial; keep what an earlier call recorded before it was killed.

    Raises:
        ValueError: a value that is not finite; Optuna would take an infinity for a result.
    """
    optuna = quiet_optuna()
    study = asked.group.study
    number = asked.trial.number
    if not all(map(math.isfinite, (*(result.values or ()), result.violation or 0.0))):
        raise ValueError(f"trial {number}: a value that is not finite: {result.values}")
    frozen = study.get_trials(deepcopy=False)[number]
    trial = optuna.trial.Trial(study, frozen._trial_id)  # noqa: SLF001  a number has no other way to it
    for tokens, loss in sorted(result.curve.items()):
        if hopeless_at is not None and tokens > hopeless_at:
            break
        if tokens not in frozen.intermediate_values:
            trial.report(loss, tokens)
    states = optuna.trial.TrialState
    if hopeless_at is not None:
        study.tell(number, state=states.PRUNED)
    elif result.failed is not None:
        trial.set_user_attr("failed", result.failed)
        study.tell(number, state=states.FAIL)
    else:
        if result.violation is not None and VIOLATION not in frozen.constraints:
            trial.set_constraint(VIOLATION, result.violation)
        study.tell(number, result.values)


@dataclass(kw_only=True)
class TrialRuns:
    """Trains trials in ``store``, to which nobody else may write.

    ``corpora``: token files by the digest of their data. ``execute``: runs some of the runs.
    """

    store: StudyStore
    corpora: Mapping[str, TokenFiles]
    execute: Execute
    retry_failed: bool = False
    outcome: ExecutionEnd = field(
        default_factory=lambda: ExecutionEnd(states={}, interrupted=False)
    )

    def train(self, asked: Sequence[Asked], plan: Plan) -> None:
        """Train the runs of these trials that have not ended. ``plan``: of all trials so far."""
        self.store.write_plan(plan)

        def unneeded() -> dict[str, str]:
            reasons: dict[str, str] = {}
            for trial in asked:
                if trial.hopeless_at(self.curve(trial)) is not None:
                    reason = f"trial {trial.trial.number} is worse than the median of earlier ones"
                    reasons |= dict.fromkeys(trial.run_ids, reason)
            return reasons

        run_ids = {run_id for trial in asked for run_id in trial.run_ids}
        requests = requests_of(plan, run_ids, self.corpora)
        todo = find_todo(self.store, requests, unneeded, retry_failed=self.retry_failed)
        if todo.runs:
            end = self.execute(list(todo.runs), unneeded)
            self.outcome = replace(end, states=self.outcome.states | end.states)

    def states(self, asked: Asked) -> list[State]:
        """Read the state of each run of a trial."""
        return [self.store.run(run_id).state() for run_id in asked.run_ids]

    def curve(self, asked: Asked) -> Losses:
        """Average the losses of a trial's runs at the token counts at which all of them were evaluated."""
        curves = [losses_of(self.store.run(run_id)) for run_id in asked.run_ids]
        common = set.intersection(*map(set, curves))
        means = {}
        for tokens in sorted(common):
            means[tokens] = fmean(curve[tokens] for curve in curves)
        return means


def losses_of(run: RunDir) -> Losses:
    """Read a run's validation losses; they are cached until its file changes."""
    if not run.metrics_path.exists():
        return {}
    stat = run.metrics_path.stat()
    return _losses(run, stat.st_ino, stat.st_size)


@lru_cache(maxsize=1024)
def _losses(run: RunDir, _inode: int, _size: int) -> Losses:
    return {row["tokens"]: row["val_loss"] for row in run.metrics("eval")}


def end_loss(run: RunDir) -> float:
    """Return a run's last validation loss; of a diverged run the loss at which it is called so."""
    if run.state() == "diverged":
        config = run.config()
        return divergence_bound(
            config["training"]["divergence_loss"], config["vocab_size"]
        )
    curve = losses_of(run)
    return curve[max(curve)]
