"""``load_study``: from a file's name to a validated study, or to all of its faults at once.

The order: syntax (source), the keys of the file (sections), inheritance, grid and the sections of each arm
(arms, parts), checks within an arm (checks), checks between arms (forks, searches). A stage continues past
the faults of earlier stages where it can, so that one reading of the file shows them all.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from ablate.base.errors import UserError, likely
from ablate.run.command import Command
from ablate.store.plan_file import Margin, Settled, StopRule, Target
from ablate.study.arms import Arms
from ablate.study.checks import Misfit
from ablate.study.faults import Faults
from ablate.study.forks import check_replays, resolve_forks
from ablate.study.searches import check_search, check_tune
from ablate.study.sections import SeedsSection, StudyFile
from ablate.study.source import parse, put_settings, read_content
from ablate.study.study import Study, again_name, shared_fields

if TYPE_CHECKING:
    from collections.abc import Collection

    from ablate.study.sections import TargetSection

MAX_RUNS = 1_000_000


def shipped_studies() -> dict[str, Path]:
    """Return the studies shipped with the package, by name: starters first, then findings."""
    folder = Path(str(files("ablate.studies")))
    paths = [*sorted(folder.glob("*.yaml")), *sorted(folder.glob("findings/*.yaml"))]
    return {path.stem: path for path in paths}


def find_file(path_or_name: str | Path) -> Path:
    """Find a study's file, given its path, with or without ``.yaml``, or the name of a shipped study.

    Raises:
        UserError: there is no such file; the hint is the likely name.
    """
    path = Path(path_or_name)
    shipped = shipped_studies()
    is_name = (
        isinstance(path_or_name, str) and path.name == path_or_name and not path.suffix
    )
    with_suffix = []
    try:
        if path.is_file() or path.is_fifo():
            return path
        if is_name and path.name in shipped:
            return shipped[path.name]
        if path.name:
            paths = [path.with_suffix(".yaml"), path.with_suffix(".yml")]
            with_suffix = [file for file in paths if file.is_file()]
        if is_name and with_suffix:
            return with_suffix[0]
        if path.is_dir():
            raise UserError("a folder, not a study file", file=path)
    except (OSError, ValueError) as error:  # the name is too long, or has a NUL in it
        message = f"cannot read the study {str(path_or_name)[:40]!r}: {error}"
        raise UserError(message) from None
    message = "no such file"
    if is_name:
        message += ", and no shipped study of that name"
    if with_suffix:
        hint = f"did you mean '{with_suffix[0]}'?"
    else:
        starters = [
            name for name, file in shipped.items() if file.parent.name != "findings"
        ]
        hint = likely(path.stem, starters, f"shipped studies: {', '.join(starters)}")
    raise UserError(message, file=path, hint=hint)


def load_study(path_or_name: str | Path, settings: tuple[str, ...] = ()) -> Study:
    """Read and validate a study, given its file or the name of a shipped study.

    ``settings``: ``KEY=VALUE`` each, as ``--set`` takes them; they win over the file.

    Raises:
        UserError: the file cannot be used; holds every fault found, in the order of the file.
    """
    path = find_file(path_or_name)
    return study_of(read_content(path), path, settings)


def study_of(content: bytes, path: Path, settings: tuple[str, ...] = ()) -> Study:
    """Parse and validate the content of a study; ``path``: its file, which need not exist yet.

    Raises:
        UserError: as ``load_study``.
    """
    source = parse(content, str(path))
    put_settings(source, settings)
    faults = Faults(source)
    file: StudyFile | None = None
    try:
        file = TypeAdapter(StudyFile).validate_python(source.data)
    except ValidationError as error:
        faults.add_validation(error, StudyFile)
    arms = Arms(faults, path.absolute().parent)
    names = dict.fromkeys(source.mapping("arms"))
    names |= dict.fromkeys(cell.name for cell, _ in arms.cells)
    baseline = _baseline(arms, names)
    if not ("grid" in source.data or names or faults.any_within("arms")):
        hint = "under 'arms', or through a 'grid'"
        faults.add(("arms",), "a study needs at least one arm", hint)
    if file is not None:
        _check_file(file, arms)
        again = again_name(baseline)
        if file.baseline_again and again in names:
            message = f"an arm of the name '{again}' is there already"
            hint = "the baseline's second arm takes that name"
            faults.add(("baseline_again",), message, hint)
    resolve_forks(arms, names, baseline)
    check_replays(arms, baseline)
    tune = None if file is None else check_tune(file, arms)
    search = check_search(file, arms)
    _check_settings(arms)
    if faults:
        raise UserError(*faults.problems())

    assert file is not None
    training = arms.sections.build("training", arms.base).value
    content_of_file = shared_fields(Study, file) | {
        "baseline": baseline,
        "target": None if file.target is None else _target(file.target),
        "seeds": tuple(file.every_seed) if search is None else (search.seed,),
        "waive": tuple(dict.fromkeys(file.waive)),
        "stop": _stop_rule(file),
        "tune": tune,
        "search": search,
        "training": training,
        "arms": tuple(arms.arms.values()),
    }
    return Study(
        **content_of_file,
        folded=arms.folded,
        dropped=tuple(arms.dropped),
        path=path.absolute(),
        source=source,
        settings=settings,
    )


def _target(section: TargetSection) -> Target:
    margin = None
    if section.within is not None:
        margin = Margin(**_with_unit(section.within, "cost", "loss"))
    value = _with_unit(section, "val_loss", "perplexity")
    return Target(**value, crossing=section.crossing, within=margin)


def _with_unit(section: Any, *units: str) -> dict[str, Any]:
    """Return which of the units a section gives, and its value."""
    (unit,) = [unit for unit in units if getattr(section, unit) is not None]
    return {"kind": unit, "value": getattr(section, unit)}


def _stop_rule(file: StudyFile) -> StopRule | None:
    diverged = None if file.stop is None else file.stop.diverged
    settled = None
    if isinstance(file.seeds, SeedsSection):
        # a look is taken after each seed from ``at_least`` on
        looks = tuple(range(file.seeds.at_least, file.seeds.at_most + 1))
        settled = Settled(looks=looks, narrower_than=file.seeds.narrower_than)
    if diverged is None and settled is None:
        return None
    return StopRule(diverged=diverged, settled=settled)


def _check_file(file: StudyFile, arms: Arms) -> None:
    """Check parts of the file against each other."""
    faults = arms.faults
    asking = None
    if isinstance(file.seeds, SeedsSection):
        asking = "seeds until settled"
    if file.search is not None:
        asking = "search"
    if file.target is None and asking is not None:
        hint = "write {val_loss: …} or {perplexity: …}"
        faults.add(("target",), f"{asking} needs a target", hint)
    seeds = len(file.every_seed)
    if len(arms.arms) * seeds > MAX_RUNS:
        message = f"{len(arms.arms)} arms × {seeds} seeds are too many runs"
        faults.add(("seeds",), message, f"at most {MAX_RUNS}")
    if file.stop is not None and file.stop.diverged >= seeds:
        message = f"with {seeds} seeds nothing is left to be stopped then"
        hint = f"at most {seeds - 1}" if seeds > 1 else "add seeds"
        faults.add(("stop", "diverged"), message, hint)
    for arm in arms.arms.values():
        if file.keep_weights and arm.trainer is not None:
            message = f"arm '{arm.name}' has a trainer of its own, whose weights ablate cannot know"
            faults.add(("keep_weights",), message, "let that trainer write them")
        if not isinstance(arm.trainer, Command):
            continue
        words = " ".join([*arm.trainer.words, *arm.trainer.env.values()])
        if arm.trainer.command and file.paired_seeds and "{seed}" not in words:
            hint = "pass it on, or say paired_seeds: false where its runs differ by themselves"
            misfit = Misfit("no {seed} in the command", hint, ("trainer.command",))
            arms.add_fault(arm.parts, misfit)
        if file.diagnostics is not None:
            faults.add(("diagnostics",), "nothing looks into a command", "leave it out")
        if file.tune is not None:
            hint = "make an arm of each in trainer.args"
            faults.add(("tune",), "its values do not reach a command", hint)


def _check_settings(arms: Arms) -> None:
    """Refuse a ``--set`` in the base that changes nothing, because every arm has a value of its own."""
    source = arms.faults.source
    for path, place in source.places.items():
        is_value = not isinstance(source.get(*path), dict | list)
        if place.line or path[:1] != ("base",) or not is_value:
            continue
        keys = set()
        for length in range(2, len(path) + 1):
            keys.add(".".join(map(str, path[1:length])))
        if arms.arms and all(keys & arm.factors.keys() for arm in arms.arms.values()):
            arms.faults.add(path, "changes nothing: every arm has a value of its own")


def _baseline(arms: Arms, names: Collection[str]) -> str:
    """Return the baseline's name; a folded cell gives the arm that it equals; empty if it is no text."""
    faults = arms.faults
    name = faults.source.get("baseline")
    if not isinstance(name, str):
        return ""
    name = arms.folded.get(name, name)
    reasons = {cell.name: cell.reason for cell in arms.dropped}
    if name in reasons and name not in arms.arms:
        faults.add(("baseline",), f"the baseline '{name}' was dropped", reasons[name])
    elif names and name not in names and not faults.any_within("grid"):
        hint = likely(name, names, f"arms: {', '.join(list(names)[:8])}")
        faults.add(("baseline",), f"no arm '{name}'", hint)
    return name
