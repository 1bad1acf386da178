"""Make ready what training needs: devices, token files and the CPU quantiser; and make requests of runs.

Everything that can be refused is refused here, with a ``UserError``, before the first run starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ablate.base.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from ablate.data import TokenFiles
    from ablate.execute.driver import RunRequest
    from ablate.plan import Plan, PlannedArm
    from ablate.workflow.listener import Listener


def check_devices(plan: Plan) -> None:
    """Refuse arms that this machine cannot train; a cluster's workers check for themselves."""
    from ablate.execute.preflight import UnfitDeviceError, fit_choices

    problems = []
    for arm in plan.arms:
        try:
            fit_choices(arm.config.with_seed(0), arm.resources, "cuda" if arm.resources.gpus else "cpu")
        except UnfitDeviceError as error:
            problems.append(f"arm '{arm.name}': {error}")
    if problems:
        raise UserError(*problems)


def prepare_tokens(storage: Path, arms: Sequence[PlannedArm], listener: Listener) -> dict[str, TokenFiles]:
    """Make the token files of each corpus, once for all studies of the storage; return them by its digest.

    Raises:
        UserError: a corpus that cannot be used, or has too little text for one of the arms.
    """
    from ablate.data import prepare

    corpora: dict[str, TokenFiles] = {}
    with listener.preparing() as show:
        for arm in arms:
            digest = arm.config.data_digest
            if digest in corpora:
                continue

            def progress(fraction: float, what: str, digest: str = digest) -> None:
                show(digest, fraction, what)

            files = corpora[digest] = prepare(arm.config.data, storage / "tokens", progress=progress)
            listener.say(
                f"Corpus {arm.config.data.source}: {files.train_tokens:,} training and "
                f"{files.validation_tokens:,} validation tokens ({files.tokenizer})."
            )
    _check_tokens(corpora, arms, listener)
    return corpora


def _check_tokens(corpora: Mapping[str, TokenFiles], arms: Sequence[PlannedArm], listener: Listener) -> None:
    """Refuse a corpus with too little text, and say how often a run repeats one."""
    from ablate.data.batches import num_train_windows, num_validation_windows

    repeated: dict[str, None] = {}
    for arm in arms:
        files, training = corpora[arm.config.data_digest], arm.config.training
        num_validation_windows(files.validation_tokens, training.seq_len, training.eval_tokens)
        epoch = num_train_windows(files.train_tokens, training.seq_len) * training.seq_len
        times = f"{training.tokens / epoch:,.1f}"
        if training.tokens > epoch and times != "1.0":
            there = f"its {files.train_tokens:,} training tokens"
            repeated[f"A run of {training.tokens:,} tokens sees {there} {times} times."] = None
    for sentence in repeated:
        listener.say(sentence)


def prepare_kernel(plan: Plan, listener: Listener) -> None:
    """Compile the CPU quantiser once, before workers ask for it."""
    if all(arm.resources.gpus or arm.recipe_text == "bf16" for arm in plan.arms):
        return
    from ablate.backends.quantisers.cpu_kernel import availability

    kernel = availability()
    if not kernel.usable:
        listener.say(f"Emulating with plain torch, several times slower: {kernel.reason}.")


def requests_of(plan: Plan, chosen: Collection[str], corpora: Mapping[str, TokenFiles]) -> list[RunRequest]:
    """Order the chosen runs, given by their ids, seed by seed, so that early results can be compared."""
    from dataclasses import asdict

    from ablate.execute.driver import RunRequest

    order = sorted(((run.seed, n, arm, run) for n, (arm, run) in enumerate(plan.runs())), key=lambda t: t[:2])
    return [
        RunRequest(
            run_id=run.id,
            arm=arm.name,
            seed=run.seed,
            config=asdict(arm.config.with_seed(run.seed)),
            tokens_dir=str(corpora[arm.config.data_digest].folder.resolve()),
            resources=arm.resources,
            diagnostics=plan.diagnostics,
        )
        for _, _, arm, run in order
        if run.id in chosen
    ]
