"""What the verbs that train do around the training: data, devices and the quantiser made ready, MLflow named.

Everything that can be refused is refused here, before the first run starts.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ablate.base.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from rich.console import Console
    from rich.progress import TaskID

    from ablate.data import TokenFiles
    from ablate.execute.driver import RunRequest
    from ablate.plan import Plan, PlannedArm
    from ablate.store import StudyStore
    from ablate.track import MirrorReport


def requests_of(plan: Plan, chosen: Collection[str], corpora: dict[str, TokenFiles]) -> list[RunRequest]:
    """Return the runs seed by seed: early results compare."""
    from dataclasses import asdict

    from ablate.execute.driver import RunRequest

    order = sorted(((run.seed, n, arm, run) for n, (arm, run) in enumerate(plan.runs())), key=lambda t: t[:2])
    return [
        RunRequest(
            run_id=run.id,
            arm=arm.name,
            seed=run.seed,
            config=asdict(arm.config(run.seed)),
            tokens_dir=str(corpora[arm.data_digest].folder.resolve()),
            resources=arm.resources,
            diagnostics=plan.diagnostics,
        )
        for _, _, arm, run in order
        if run.id in chosen
    ]


def prepare_tokens(console: Console, store: StudyStore, arms: list[PlannedArm]) -> dict[str, TokenFiles]:
    """Return the token files of each corpus, by its digest."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from ablate.data import prepare

    corpora: dict[str, TokenFiles] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        for arm in arms:
            if arm.data_digest in corpora:
                continue
            task = bar.add_task("tokens", total=1.0)

            def show(done: float, what: str, task: TaskID = task) -> None:
                bar.update(task, completed=done, description=what)

            files = prepare(arm.data, store.path.parent / "tokens", progress=show)
            corpora[arm.data_digest] = files
            console.print(
                f"Corpus {arm.data.source}: {files.train_tokens:,} training and {files.validation_tokens:,} "
                f"validation tokens ({files.tokenizer}).",
                markup=False,
                soft_wrap=True,
            )
    return corpora


def check_tokens(console: Console, corpora: dict[str, TokenFiles], arms: list[PlannedArm]) -> None:
    """Refuse a corpus with too little text before anything starts, and say how often a run repeats one."""
    from ablate.data.batches import num_train_windows, num_validation_windows

    repeated: dict[str, None] = {}
    for arm in arms:
        files, training = corpora[arm.data_digest], arm.training
        num_validation_windows(files.validation_tokens, training.seq_len, training.eval_tokens)
        epoch = num_train_windows(files.train_tokens, training.seq_len) * training.seq_len
        times = f"{training.tokens / epoch:,.1f}"
        if training.tokens > epoch and times != "1.0":
            there = f"its {files.train_tokens:,} training tokens"
            repeated[f"A run of {training.tokens:,} tokens sees {there} {times} times."] = None
    for sentence in repeated:
        console.print(sentence, markup=False, soft_wrap=True)


def check_devices(plan: Plan) -> None:
    """Refuse what this machine cannot do before anything starts; a cluster's workers check for themselves."""
    from ablate.execute.preflight import UnfitDeviceError, fit_choices

    problems = []
    for arm in plan.arms:
        try:
            fit_choices(arm.config(0), arm.resources, "cuda" if arm.resources.gpus else "cpu")
        except UnfitDeviceError as error:
            problems.append(f"arm '{arm.name}': {error}")
    if problems:
        raise UserError(*problems)


def prepare_kernel(console: Console, plan: Plan) -> None:
    """Compile the CPU quantiser once, before workers ask for it."""
    if all(arm.resources.gpus or arm.recipe_text == "bf16" for arm in plan.arms):
        return
    from ablate.backends.quantisers.cpu_kernel import availability

    kernel = availability()
    if not kernel.usable:
        console.print(f"Emulating with plain torch, several times slower: {kernel.reason}.", markup=False)


def taken_text(taken: Mapping[str, str]) -> str:
    """Say how many results come from which other studies of the storage. ``taken``: run id → study."""
    studies = Counter(taken.values())
    return ", ".join(f"{n} taken from {study}" for study, n in studies.items())


def say_mirror(console: Console, left: MirrorReport, uri: str, study: str) -> None:
    """Say where MLflow's pages are, and what they lack."""
    if not left.complete:
        why = left.problem or f"{len(left.unsent)} runs not sent"
        console.print(f"MLflow:  not up to date at {uri}: {why}", markup=False, soft_wrap=True)
    console.print(f"MLflow:  ablate dashboard {study}", markup=False, soft_wrap=True)
