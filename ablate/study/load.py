"""``load_study``: from a file's name to a validated study, or to all of its faults at once.

The order: syntax (parse), shape of each part (sections), inheritance and grid (drafts, grid), checks within
an arm (checks) and between arms (fold). A stage continues past the faults of earlier stages where it can, so
that one reading of the file shows them all.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from ablate.base.errors import Problem, UserError
from ablate.run.config import TrainingConfig
from ablate.store.plan_file import Margin, Target
from ablate.study.build_arms import ArmCollector, name_rule
from ablate.study.diagnosed import check_what_if, lines_of
from ablate.study.forks import resolve_forks
from ablate.study.inheritance import Drafts
from ablate.study.messages import Faults, did_you_mean, got_text
from ablate.study.parse import parse, read_tree
from ablate.study.search_section import check_search, with_first_budget
from ablate.study.sections import StudyFile, TargetSection
from ablate.study.settings import check_settings, with_settings
from ablate.study.stops import check_stop, stop_rule
from ablate.study.study import Study, again_name
from ablate.study.tree import Mapping, Scalar, Sequence, entries, get, plain, plain_at
from ablate.study.tuning import check_tune

MAX_RUNS = 1_000_000
_RESERVED = ("tokens", "mlartifacts", "mlflow.db")  # other names in the storage folder


def shipped_studies() -> dict[str, Path]:
    """Return the studies shipped with the package, by name: starters first, then findings."""
    folder = Path(str(files("ablate.studies")))
    paths = [*sorted(folder.glob("*.yaml")), *sorted(folder.glob("findings/*.yaml"))]
    return {path.stem: path for path in paths}


def find_file(path_or_name: str | Path) -> Path:
    """Return a study's file. Raises ``UserError`` with the likely name if there is no such file."""
    path = Path(path_or_name)
    is_name = isinstance(path_or_name, str) and path.name == path_or_name and not path.suffix
    try:
        if path.is_file() or path.is_fifo():
            return path
        is_folder = path.is_dir()
    except (OSError, ValueError) as error:  # the name is too long, or has a NUL in it
        raise UserError(f"cannot read the study {str(path_or_name)[:40]!r}: {error}") from None
    shipped = shipped_studies()
    if is_name and path.name in shipped:
        return shipped[path.name]
    if is_folder:
        raise UserError("a folder, not a study file", file=path)
    starters = [name for name, where in shipped.items() if where.parent.name != "findings"]
    beside = [str(path.with_suffix(suffix)) for suffix in (".yaml", ".yml")]
    there = next((f"did you mean '{name}'?" for name in beside if Path(name).is_file()), None)
    close = there or did_you_mean(path.stem, starters) or f"shipped studies: {', '.join(starters)}"
    what = "no such file, and no shipped study of that name" if is_name else "no such file"
    raise UserError(what, file=path, hint=close)


def load_study(path_or_name: str | Path, settings: tuple[str, ...] = ()) -> Study:
    """Read and validate a study, given its file or the name of a shipped study.

    ``settings``: ``KEY=VALUE`` each, as ``--set`` takes them; they win over the file.

    Raises:
        UserError: the file cannot be used; holds every fault found, in the order of the file.
    """
    path = find_file(path_or_name)
    root, syntax_faults = read_tree(path, str(path))
    return _study(path, with_settings(root, settings), syntax_faults, settings)


def study_of(text: str, path: Path) -> Study:
    """Read and validate the text of a study; ``path``: the file that it is to have, which need not be there.

    Raises:
        UserError: as ``load_study``.
    """
    return _study(path, *parse(text.encode(), str(path)))


def _study(path: Path, root: Mapping, syntax_faults: list[Problem], settings: tuple[str, ...] = ()) -> Study:
    """Validate what was parsed; ``settings`` are in ``root`` already."""
    faults = Faults(str(path), syntax_faults)
    file = _check_shape(root, faults)
    _check_name(root, faults)
    _check_seeds(root, faults)
    _check_target(root, faults)
    check_stop(root, file, faults)
    check_what_if(root, file, faults)

    drafts = Drafts(with_first_budget(root), faults)
    named = drafts.named()
    cells = drafts.cells(named)
    drop_senseless = plain_at(get(root, "grid"), "senseless") == "drop"
    collector = ArmCollector(path.absolute().parent, faults, drop_senseless=drop_senseless)
    for draft in named.values():
        collector.add_named(draft)
    arms_of_cells = [(cell, collector.add_cell(cell, draft)) for cell, draft in cells]
    collector.refuse_idle_sizes()
    _check_has_arms(root, faults)
    names = list(dict.fromkeys([*entries(get(root, "arms")), *(cell.name for cell, _ in cells)]))
    baseline = _baseline(root, collector, names, faults)
    if file is not None and file.baseline_again and again_name(baseline) in names:
        what = f"an arm of the name '{again_name(baseline)}' is there already"
        faults.add(get(root, "baseline_again") or root, what, "the baseline's second arm takes that name")
    if file is not None and len(collector.arms) * len(file.every_seed) > MAX_RUNS:
        what = f"{len(collector.arms)} arms × {len(file.every_seed)} seeds are too many runs"
        faults.add(get(root, "seeds") or root, what, f"at most {MAX_RUNS}")
    written = [*named.values(), *(draft for _, draft in cells)]
    resolve_forks(root, collector, written, names, baseline, faults)
    tune = check_tune(root, collector, written, _used_seeds(file), faults)
    search = check_search(root, file, arms_of_cells, faults)
    for arm in collector.arms.values():
        if file is not None and file.keep_weights and arm.trainer is not None:
            what = f"arm '{arm.name}' has a trainer of its own, whose weights ablate cannot know"
            faults.add(get(root, "keep_weights") or root, what, "let that trainer write them")
    check_settings(root, collector.arms.values(), faults)
    if faults:
        raise UserError(*faults.problems())

    assert file is not None
    training = collector.builder.build("training", drafts.base.sections.get("training"))
    assert isinstance(training, TrainingConfig)
    return Study(
        name=file.name,
        description=file.description,
        baseline=baseline,
        target=None if file.target is None else _target(file.target),
        target_line=_line_of_target(root),
        seeds=tuple(file.every_seed) if search is None else (search.seed,),
        paired_seeds=file.paired_seeds,
        intervals=file.intervals,
        baseline_again=file.baseline_again,
        waive=tuple(dict.fromkeys(file.waive)),
        stop=stop_rule(file),
        training=training,
        arms=tuple(collector.arms.values()),
        folded=tuple(collector.folded),
        dropped=tuple(collector.dropped),
        diagnostics=file.diagnostics,
        layer_lines=lines_of(root, "layers"),
        what_if_lines=lines_of(root, "what_if"),
        path=path.absolute(),
        settings=settings,
        keep_weights=file.keep_weights,
        tune=tune,
        search=search,
    )


def _used_seeds(file: StudyFile | None) -> set[int]:
    """Return the seeds of the arms and of the repeated baseline."""
    if file is None:
        return set()
    first = max(file.every_seed) + 1
    return {*file.every_seed, *(range(first, first + len(file.every_seed)) if file.baseline_again else ())}


def _check_shape(root: Mapping, faults: Faults) -> StudyFile | None:
    try:
        file: StudyFile = TypeAdapter(StudyFile).validate_python(plain(root))
    except ValidationError as error:
        faults.add_validation(error, root, section=StudyFile)
        return None
    return file


def _check_name(root: Mapping, faults: Faults) -> None:
    node = get(root, "name")
    if not (isinstance(node, Scalar) and isinstance(node.value, str)):
        return
    name = node.value
    rule = name_rule(name)
    if set(name) & set('/\\:*?"<>|') or name.startswith((".", "-")) or name.endswith(".") or ".." in name:
        rule = rule or "no / \\ : * ? \" < > |, no '..', no '.' or '-' in front, no '.' at the end"
    elif name.lower() in _RESERVED:
        rule = "the storage uses this name itself"
    if rule:
        faults.add(node, f"{got_text(node)} cannot name a folder", rule)


def _check_seeds(root: Mapping, faults: Faults) -> None:
    node = get(root, "seeds")
    seen: set[object] = set()
    for item in node.items if isinstance(node, Sequence) else ():
        if isinstance(item, Scalar):
            if item.value in seen:
                faults.add(item, f"seed {item.text} given twice")
            seen.add(item.value)


def _check_target(root: Mapping, faults: Faults) -> None:
    node = get(root, "target")
    if isinstance(node, Scalar) and node.value is None:
        asked = {"search": "search" in root.entries}
        asked["seeds until settled"] = isinstance(get(root, "seeds"), Mapping)
        for name in (name for name, is_asked in asked.items() if is_asked):
            faults.add(node, f"{name} needs a target", "write {val_loss: …} or {perplexity: …}")
    if not isinstance(node, Mapping):
        return
    units = [key for key in ("val_loss", "perplexity") if plain_at(node, key) is not None]
    if len(units) == 2:
        faults.add(node.keys[units[1]], "a second unit for the target", "give val_loss or perplexity")
    elif not units and node.entries.keys() <= {"val_loss", "perplexity", "crossing", "within"}:
        faults.add(node, "a target needs its unit", "give val_loss, in nats per token, or perplexity")
    perplexity = plain_at(node, "perplexity")
    if isinstance(perplexity, int | float) and 0 < perplexity <= 1:
        faults.add(node.entries["perplexity"], f"a perplexity is above 1, got {perplexity:g}")
    within = get(node, "within")
    if isinstance(within, Mapping):
        margins = [key for key in ("cost", "loss") if plain_at(within, key) is not None]
        if len(margins) == 2:
            faults.add(within.keys[margins[1]], "a second margin", "give cost or loss")
        elif not margins:
            faults.add(within, "a margin needs its unit", "give cost, such as 5%, or loss, in nats per token")


def _line_of_target(root: Mapping) -> tuple[int, int]:
    value = get(root, "target", "val_loss") or get(root, "target", "perplexity") or get(root, "target")
    assert value is not None
    return value.line, value.column


def _target(section: TargetSection) -> Target:
    kind: Literal["val_loss", "perplexity"] = "perplexity" if section.val_loss is None else "val_loss"
    margin = None
    if (within := section.within) is not None:
        unit: Literal["cost", "loss"] = "loss" if within.cost is None else "cost"
        margin = Margin(kind=unit, value=getattr(within, unit))
    return Target(kind=kind, value=getattr(section, kind), crossing=section.crossing, within=margin)


def _check_has_arms(root: Mapping, faults: Faults) -> None:
    arms = get(root, "arms")
    if "grid" not in root.entries and (arms is None or (isinstance(arms, Mapping) and not arms.entries)):
        faults.add(arms or root, "a study needs at least one arm", "under 'arms', or through a 'grid'")


def _baseline(root: Mapping, collector: ArmCollector, names: list[str], faults: Faults) -> str:
    """Return the baseline arm's name; the name of a folded cell stands for the arm that it equals."""
    node = get(root, "baseline")
    if not (isinstance(node, Scalar) and isinstance(node.value, str)):
        return ""
    folded = {cell.name: cell.into for cell in collector.folded}
    dropped = {cell.name: cell.reason for cell in collector.dropped}
    if node.value in collector.arms:
        return node.value
    if node.value in folded:
        return folded[node.value]
    if node.value in dropped:
        faults.add(node, f"the baseline {got_text(node)} was dropped", dropped[node.value])
    elif node.value not in names and names and not faults.any_within("grid"):
        listed = f"arms: {', '.join(names)}" if 0 < len(names) <= 8 else None
        faults.add(node, f"no arm {got_text(node)}", did_you_mean(node.value, names) or listed)
    return node.value
