"""``load_study``: from a file's name to a validated study, or to all of its faults at once.

The order: syntax (source), shape of each part (sections), inheritance, grid and checks within each arm
(arms), checks between arms (arms, searches). A stage continues past the faults of earlier stages where
it can, so that one reading of the file shows them all.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import TypeAdapter, ValidationError

from ablate.base.errors import UserError, likely
from ablate.recipes import Recipe, SenselessRecipe, resolve
from ablate.store.plan_file import Margin, Settled, StopRule, Target
from ablate.study.arms import Arms, resolve_forks
from ablate.study.faults import Faults
from ablate.study.searches import check_search, check_tune
from ablate.study.sections import SeedsSection, StudyFile, TargetSection
from ablate.study.source import follow, parse, put_settings, read_source
from ablate.study.study import Study, again_name

if TYPE_CHECKING:
    from ablate.study.source import Source

MAX_RUNS = 1_000_000


def shipped_studies() -> dict[str, Path]:
    """Return the studies shipped with the package, by name: starters first, then findings."""
    folder = Path(str(files("ablate.studies")))
    paths = [*sorted(folder.glob("*.yaml")), *sorted(folder.glob("findings/*.yaml"))]
    return {path.stem: path for path in paths}


def find_file(path_or_name: str | Path) -> Path:
    """Find a study's file, given its path or the name of a shipped study.

    Raises:
        UserError: there is no such file; the hint is the likely name.
    """
    path, shipped = Path(path_or_name), shipped_studies()
    is_name = isinstance(path_or_name, str) and path.name == path_or_name and not path.suffix
    try:
        if path.is_file() or path.is_fifo():
            return path
        is_folder = path.is_dir()
    except (OSError, ValueError) as error:  # the name is too long, or has a NUL in it
        raise UserError(f"cannot read the study {str(path_or_name)[:40]!r}: {error}") from None
    if is_name and path.name in shipped:
        return shipped[path.name]
    if is_folder:
        raise UserError("a folder, not a study file", file=path)
    starters = [name for name, where in shipped.items() if where.parent.name != "findings"]
    names = [f"{str(path).removesuffix(path.suffix)}{suffix}" for suffix in (".yaml", ".yml")]
    beside = [f"did you mean '{name}'?" for name in names if Path(name).is_file()]
    close = likely(path.stem, starters, f"shipped studies: {', '.join(starters)}")
    what = "no such file, and no shipped study of that name" if is_name else "no such file"
    raise UserError(what, file=path, hint=next(iter(beside), close))


def load_study(path_or_name: str | Path, settings: tuple[str, ...] = ()) -> Study:
    """Read and validate a study, given its file or the name of a shipped study.

    ``settings``: ``KEY=VALUE`` each, as ``--set`` takes them; they win over the file.

    Raises:
        UserError: the file cannot be used; holds every fault found, in the order of the file.
    """
    path = find_file(path_or_name)
    source = read_source(path, str(path))
    put_settings(source, settings)
    return _study(path, source, settings)


def study_of(text: str, path: Path) -> Study:
    """Parse and validate the text of a study; ``path``: its file, which need not exist yet.

    Raises:
        UserError: as ``load_study``.
    """
    return _study(path, parse(text.encode(), str(path)), ())


def _study(path: Path, source: Source, settings: tuple[str, ...]) -> Study:
    """Validate what was parsed; ``settings`` are in ``source`` already."""
    faults = Faults(source)
    file: StudyFile | None = None
    try:
        file = TypeAdapter(StudyFile).validate_python(source.data)
    except ValidationError as error:
        faults.add_validation(error, (), section=StudyFile)
    found = Arms(faults, path.absolute().parent)
    cells = (cell.name for cell, _ in found.cells)
    names = list(dict.fromkeys([*dict(source.items("arms")), *cells]))
    baseline = _baseline(found, names)
    if not ("grid" in source.data or names or faults.any_within("arms")):
        faults.add(("arms",), "a study needs at least one arm", "under 'arms', or through a 'grid'")
    if file is not None:
        _check_file(file, found)
        if file.baseline_again and (again := again_name(baseline)) in names:
            what = f"an arm of the name '{again}' is there already"
            faults.add(("baseline_again",), what, "the baseline's second arm takes that name")
    resolve_forks(found, names, baseline)
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
    training, _ = found.sections.build("training", found.base)
    kept = (
        "name",
        "description",
        "paired_seeds",
        "intervals",
        "baseline_again",
        "diagnostics",
        "keep_weights",
    )
    return Study(
        **{name: getattr(file, name) for name in kept},
        baseline=baseline,
        target=None if file.target is None else _target(file.target),
        seeds=tuple(file.every_seed) if search is None else (search.seed,),
        waive=tuple(dict.fromkeys(file.waive)),
        stop=_stop_rule(file),
        training=training,
        arms=tuple(found.arms.values()),
        folded=tuple(found.folded),
        dropped=tuple(found.dropped),
        path=path.absolute(),
        source=source,
        settings=settings,
        tune=tune,
        search=search,
    )


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
    first: dict[Recipe, int] = {}
    for index, spec in enumerate(file.diagnostics.what_if if file.diagnostics is not None else ()):
        at = ("diagnostics", "what_if", index)
        try:
            recipe = resolve(spec)
        except SenselessRecipe as error:
            _, steps = follow(faults.source.get(*at), error.path)
            faults.add((*at, *error.path[:steps]), str(error), error.hint)
            continue
        if all(policy.is_untouched for part in recipe.parts for *_, policy in part.operands()):
            faults.add(at, "it quantises nothing, so that there is nothing to measure")
        elif first.setdefault(recipe, index) != index:
            faults.add(at, f"the same recipe as what_if[{first[recipe]}]")


def _stop_rule(file: StudyFile) -> StopRule | None:
    """None if the study has no rule. A look is taken after each seed from ``at_least`` on."""
    settled, seeds = None, file.seeds
    if isinstance(seeds, SeedsSection):
        looks = tuple(range(seeds.at_least, seeds.at_most + 1))
        settled = Settled(looks=looks, narrower_than=seeds.narrower_than)
    diverged = None if file.stop is None else file.stop.diverged
    return StopRule(diverged=diverged, settled=settled) if diverged or settled else None


def _target(section: TargetSection) -> Target:
    kind: Literal["val_loss", "perplexity"] = "perplexity" if section.val_loss is None else "val_loss"
    margin = None
    if (within := section.within) is not None:
        unit: Literal["cost", "loss"] = "loss" if within.cost is None else "cost"
        margin = Margin(kind=unit, value=getattr(within, unit))
    return Target(kind=kind, value=getattr(section, kind), crossing=section.crossing, within=margin)


def _baseline(found: Arms, names: list[str]) -> str:
    """Return the baseline's name; a folded cell gives the arm that it equals; empty if it is no text."""
    faults = found.faults
    name = faults.source.get("baseline")
    if not isinstance(name, str):
        return ""
    name = {cell.name: cell.into for cell in found.folded}.get(name, name)
    dropped = {cell.name: cell.reason for cell in found.dropped}
    if name in dropped and name not in found.arms:
        faults.add(("baseline",), f"the baseline '{name}' was dropped", dropped[name])
    elif names and name not in (*names, *found.arms) and not faults.any_within("grid"):
        hint = likely(name, names, f"arms: {', '.join(names[:8])}")
        faults.add(("baseline",), f"no arm '{name}'", hint)
    return name
