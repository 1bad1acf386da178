"""``load_study``: from a file's name to a validated study, or to all of its faults at once.

The order: syntax (source), shape of each part (sections), inheritance, grid and checks within each arm
(arms), checks between arms (arms, searches). A stage continues past the faults of earlier stages where
it can, so that one reading of the file shows them all.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from ablate.base.errors import UserError, likely
from ablate.run.command import Command
from ablate.store.plan_file import Margin, Settled, StopRule, Target
from ablate.study.arms import Arms, check_replays, resolve_forks
from ablate.study.checks import Misfit
from ablate.study.faults import Faults
from ablate.study.searches import check_search, check_tune
from ablate.study.sections import SeedsSection, StudyFile
from ablate.study.source import parse, put_settings, read_content
from ablate.study.study import Study, again_name

if TYPE_CHECKING:
    from collections.abc import Collection

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
    path, shipped = Path(path_or_name), shipped_studies()
    is_name = isinstance(path_or_name, str) and path.name == path_or_name and not path.suffix
    try:
        if path.is_file() or path.is_fifo():
            return path
        if is_name and path.name in shipped:
            return shipped[path.name]
        suffixes = (".yaml", ".yml") if path.name else ()
        beside = [one for suffix in suffixes if (one := path.with_suffix(suffix)).is_file()]
        if is_name and beside:
            return beside[0]
        if path.is_dir():
            raise UserError("a folder, not a study file", file=path)
    except (OSError, ValueError) as error:  # the name is too long, or has a NUL in it
        raise UserError(f"cannot read the study {str(path_or_name)[:40]!r}: {error}") from None
    starters = [name for name, where in shipped.items() if where.parent.name != "findings"]
    hint = (
        f"did you mean '{beside[0]}'?"
        if beside
        else likely(path.stem, starters, f"shipped studies: {', '.join(starters)}")
    )
    what = "no such file, and no shipped study of that name" if is_name else "no such file"
    raise UserError(what, file=path, hint=hint)


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
        faults.add_validation(error, (), section=StudyFile)
    found = Arms(faults, path.absolute().parent)
    cells = (cell.name for cell, _ in found.cells)
    names = dict.fromkeys([*dict(source.items("arms")), *cells])
    baseline = _baseline(found, names)
    if not ("grid" in source.data or names or faults.any_within("arms")):
        faults.add(("arms",), "a study needs at least one arm", "under 'arms', or through a 'grid'")
    if file is not None:
        _check_file(file, found)
        if file.baseline_again and (again := again_name(baseline)) in names:
            what = f"an arm of the name '{again}' is there already"
            faults.add(("baseline_again",), what, "the baseline's second arm takes that name")
    resolve_forks(found, names, baseline)
    check_replays(found, baseline)
    tune = None if file is None else check_tune(file, found)
    search = check_search(file, found)
    for at, place in source.places.items():  # a --set in the base that every arm overrides
        if place.line or at[:1] != ("base",) or isinstance(source.get(*at), dict | list):
            continue
        above = {".".join(map(str, at[1:length])) for length in range(2, len(at) + 1)}
        if found.arms and all(above & arm.factors.keys() for arm in found.arms.values()):
            faults.add(at, "changes nothing: every arm has a value of its own")
    if faults:
        raise UserError(*faults.problems())

    assert file is not None
    target, seeds, settled = None, tuple(file.every_seed), None
    if (section := file.target) is not None:
        margin = None if section.within is None else Margin(**_one_of(section.within, "cost", "loss"))
        unit = _one_of(section, "val_loss", "perplexity")
        target = Target(**unit, crossing=section.crossing, within=margin)
    if isinstance(file.seeds, SeedsSection):  # a look is taken after each seed from ``at_least`` on
        looks = tuple(range(file.seeds.at_least, file.seeds.at_most + 1))
        settled = Settled(looks=looks, narrower_than=file.seeds.narrower_than)
    stop = StopRule(diverged=None if file.stop is None else file.stop.diverged, settled=settled)
    kept = ("name", "description", "paired_seeds", "intervals", "baseline_again", "diagnostics")
    return Study(
        **{name: getattr(file, name) for name in (*kept, "keep_weights")},
        baseline=baseline,
        target=target,
        seeds=seeds if search is None else (search.seed,),
        waive=tuple(dict.fromkeys(file.waive)),
        stop=stop if stop != StopRule() else None,
        training=found.sections.build("training", found.base)[0],
        arms=tuple(found.arms.values()),
        folded=found.folded,
        dropped=tuple(found.dropped),
        path=path.absolute(),
        source=source,
        settings=settings,
        tune=tune,
        search=search,
    )


def _one_of(section: Any, *units: str) -> dict[str, Any]:
    """Return which of the units a section gives, and its value."""
    return next({"kind": unit, "value": own} for unit in units if (own := getattr(section, unit)) is not None)


def _check_file(file: StudyFile, found: Arms) -> None:
    """Check parts of the file against each other."""
    faults = found.faults
    if file.target is None and (file.search is not None or isinstance(file.seeds, SeedsSection)):
        asks = "search" if file.search is not None else "seeds until settled"
        faults.add(("target",), f"{asks} needs a target", "write {val_loss: …} or {perplexity: …}")
    seeds = len(file.every_seed)
    if len(found.arms) * seeds > MAX_RUNS:
        what = f"{len(found.arms)} arms × {seeds} seeds are too many runs"
        faults.add(("seeds",), what, f"at most {MAX_RUNS}")
    if file.stop is not None and file.stop.diverged >= seeds:
        hint = f"at most {seeds - 1}" if seeds > 1 else "add seeds"
        faults.add(("stop", "diverged"), f"with {seeds} seeds nothing is left to be stopped then", hint)
    for arm in found.arms.values():
        if file.keep_weights and arm.trainer is not None:
            what = f"arm '{arm.name}' has a trainer of its own, whose weights ablate cannot know"
            faults.add(("keep_weights",), what, "let that trainer write them")
        if isinstance(arm.trainer, Command):
            words = (*arm.trainer.words, *arm.trainer.env.values())
            if arm.trainer.command and file.paired_seeds and not any("{seed}" in word for word in words):
                hint = "pass it on, or say paired_seeds: false where its runs differ by themselves"
                found.add_fault(
                    arm.name, arm.layers, Misfit("no {seed} in the command", hint, ("trainer.command",))
                )
            if file.diagnostics is not None:
                faults.add(("diagnostics",), "nothing looks into a command", "leave it out")
            if file.tune is not None:
                faults.add(
                    ("tune",), "its values do not reach a command", "make an arm of each in trainer.args"
                )


def _baseline(found: Arms, names: Collection[str]) -> str:
    """Return the baseline's name; a folded cell gives the arm that it equals; empty if it is no text."""
    faults = found.faults
    name = faults.source.get("baseline")
    if not isinstance(name, str):
        return ""
    name = found.folded.get(name, name)
    dropped = {cell.name: cell.reason for cell in found.dropped}
    if name in dropped and name not in found.arms:
        faults.add(("baseline",), f"the baseline '{name}' was dropped", dropped[name])
    elif names and name not in names and not faults.any_within("grid"):
        hint = likely(name, names, f"arms: {', '.join(list(names)[:8])}")
        faults.add(("baseline",), f"no arm '{name}'", hint)
    return name
