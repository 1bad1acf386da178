"""Fill the tables, figures and data of ``docs/findings`` from the storage that its studies were run in.

A page says what goes where, and this script writes it there, so that no figure in a table is typed::

    <!-- ablate: STUDY TABLE [baseline=ARM] [target=VALUE] [columns=A,B] -->
    …
    <!-- end -->

TABLE is ``headline``, ``steps``, ``effects``, ``power``, ``evaluation`` or ``diagnoses`` for a table,
``contrasts`` for arms over parents of their own (``of=ARM:PARENT;ARM:PARENT``), ``places`` for token costs or
``losses`` for loss differences in several places (``after=TOKENS,TOKENS``; with ``change=FROM,TO`` how much
the difference changes between two), ``verdict`` for the report's sentences, or ``figure=NAME`` for one of its
figures. With ``evaluated=bf16`` places and losses are those of the evaluations in bf16, with
``evaluated=alone`` losses are what the arm's own evaluation has above that. STUDY may be several, ``A,B``,
for what ``ablate compare`` says of their trend: ``trend`` (of token costs), ``verdict``, ``figure=trend`` or
``places`` (the changes alone).
``--check`` writes nothing and fails where a page is not what the storage says. Without ``--storage`` the runs
are made again of the losses in ``docs/findings/data`` and the study files, for all but ``diagnoses``, which
need the runs themselves.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import tempfile
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ablate.base.files import append_line, write_record
from ablate.data.identity import DataIdentity
from ablate.plan import build_plan, to_lock
from ablate.reports import analyse, load_frames
from ablate.reports.figures import draw_figures
from ablate.reports.figures.diagnoses import draw_diagnoses
from ablate.reports.figures.trend import draw_trend
from ablate.reports.findings.diagnoses import diagnose_study
from ablate.reports.findings.trend import trend
from ablate.reports.pages.csv_files import csv_text
from ablate.reports.pages.render import escape_markdown
from ablate.reports.read.against import read_against, target_after
from ablate.reports.statistics.intervals import mean_interval
from ablate.reports.statistics.losses import common_grid
from ablate.reports.words import tables, words
from ablate.reports.words.beside import trend_sentences, trend_tables
from ablate.reports.words.diagnoses import diagnosis_table
from ablate.reports.words.evaluation import evaluation_table
from ablate.reports.words.table import Table
from ablate.reports.words.verdict import write_verdict
from ablate.store import Status, StudyStore
from ablate.study import load_study

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from ablate.reports import Analysis
    from ablate.reports.figures import Drawing
    from ablate.reports.findings.trend import Trend
    from ablate.reports.statistics.losses import Curve
    from ablate.store import RunDir

FOLDER = Path(__file__).parents[1] / "docs" / "findings"
STUDIES = Path(__file__).parents[1] / "studies" / "findings"
BLOCK = re.compile(r"(<!-- ablate: (.*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
TABLES = {
    "headline": tables.headline,
    "steps": tables.step_table,
    "effects": tables.effect_table,
    "power": tables.power_table,
    "evaluation": evaluation_table,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--storage", type=Path, help="the storage of the studies (default: made of docs/findings/data)"
    )
    parser.add_argument("pages", nargs="*", help="only these pages, such as ladder.md (default: all)")
    parser.add_argument("--check", action="store_true", help="only tell which files would change")
    options = parser.parse_args()
    if options.storage is None:
        with tempfile.TemporaryDirectory() as folder:
            rebuild(Path(folder))
            return fill_pages(options, Path(folder), rebuilt=True)
    return fill_pages(options, options.storage, rebuilt=False)


def rebuild(storage: Path) -> None:
    """Make a run store of each study from the losses beside the pages and its study file.

    What losses do not tell (environment, timing, diagnostics) is not there.
    """
    for path in sorted((FOLDER / "data").glob("*.csv")):
        evals = pd.read_csv(path)
        study = load_study(STUDIES / f"{path.stem}.yaml")
        plan = build_plan(study, lambda _: DataIdentity(digest="losses alone", vocab_size=256, num_bytes=0))
        lock, store = to_lock(plan), StudyStore(storage / path.stem)
        ids = {
            (arm, seed): run for arm, seed, run in evals[["arm", "seed", "run_id"]].itertuples(index=False)
        }
        arms = []
        for arm in lock.arms:
            runs = tuple(
                replace(run, id=ids[arm.name, run.seed]) for run in arm.runs if (arm.name, run.seed) in ids
            )
            arms += [replace(arm, runs=runs)] * bool(runs)
        store.write_plan(replace(lock, arms=tuple(arms)))
        for arm in arms:
            config = plan.arm(arm.name).config
            for run in arm.runs:
                own = evals[evals["run_id"] == run.id]
                write_run(store.run(run.id), asdict(config.with_seed(run.seed)), own)


def write_run(run: RunDir, config: dict[str, Any], evals: pd.DataFrame) -> None:
    """Write one finished run of these evaluations."""
    run.create(config)
    write_record(run.environment_path, {"backend": "cpu", "backend_mode": "emulated", "timing_valid": False})
    rows = evals.drop(columns=["run_id", "arm", "seed"]).to_dict("records")
    for number, row in enumerate(rows):
        known = {key: value for key, value in row.items() if pd.notna(value)}
        append_line(run.metrics_path, {"kind": "eval", **known, "time_unix": float(number)})
    run.write_status(
        Status(state="finished", attempt=1, tokens=rows[-1]["tokens"], step=rows[-1]["step"], ended_unix=0.0)
    )


def fill_pages(options: argparse.Namespace, storage: Path, *, rebuilt: bool) -> int:
    """Write what the storage says into the pages; return the exit code. ``rebuilt``: from losses alone."""
    files: dict[Path, bytes] = {}
    studies: dict[str, None] = {}
    for page in [FOLDER / name for name in options.pages] or sorted(FOLDER.glob("*.md")):
        text = page.read_text(encoding="utf-8")

        def fill(match: re.Match[str]) -> str:
            study, what, *settings = shlex.split(match[2])
            if "," not in study:
                studies[study] = None
            if rebuilt and what == "diagnoses":
                return match[0]
            body, drawn = block(storage, study, what, dict(one.split("=", 1) for one in settings))
            files.update(drawn)
            return f"{match[1]}{body}\n{match[4]}"

        files[page] = BLOCK.sub(fill, text).encode()
    for study in studies:
        frames = load_frames(StudyStore(storage / study))
        ended = frames.runs.loc[frames.runs["state"].isin(["finished", "diverged"]), "run_id"]
        evals = frames.evals[frames.evals["run_id"].isin(ended)]
        files[FOLDER / "data" / f"{study}.csv"] = csv_text(evals).encode()
    changed = [path for path, body in files.items() if not path.exists() or path.read_bytes() != body]
    for path in changed:
        print(("differs: " if options.check else "written: ") + str(path.relative_to(FOLDER)))
        if not options.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(files[path])
    return 1 if options.check and changed else 0


def block(storage: Path, study: str, what: str, settings: dict[str, str]) -> tuple[str, dict[Path, bytes]]:
    """Return what stands in a page's block, and the figures that it shows."""
    if "," in study:
        return trend_block(storage, study.split(","), what, settings)
    target = settings.get("target")
    baseline = settings.get("baseline")
    analysis = read(storage, study, baseline, None if target is None else float(target))
    if what.startswith("figure="):
        name = what.partition("=")[2]
        drawing = next(one for one in drawings(storage, study, analysis) if one.name == name)
        return as_figure(drawing, (study, baseline, target, name))
    if what == "verdict":
        verdict = write_verdict(analysis)
        lines = [f"**{escape_markdown(verdict.count)}**", ""]
        return "\n".join(
            ["", *lines, *(f"- {escape_markdown(one.text)}" for one in verdict.findings), ""]
        ), {}
    if what == "diagnoses":
        table = diagnosis_table(diagnose_study(StudyStore(storage / study), analysis)[0])
    elif what == "places":
        in_bf16 = settings.get("evaluated") == "bf16"
        table = cost_places(storage, study, baseline, whole_numbers(settings["after"]), in_bf16=in_bf16)
    elif what == "contrasts":
        table = contrasts(storage, study, [one.split(":") for one in settings["of"].split(";")])
    elif what == "losses":
        change = whole_numbers(settings["change"]) if "change" in settings else []
        table = loss_places(analysis, settings.get("evaluated"), whole_numbers(settings["after"]), change)
    else:
        table = TABLES[what](analysis)
    assert table.rows, f"{study} has no {what}"
    return as_markdown(table, settings.get("columns")), {}


def trend_block(
    storage: Path, studies: list[str], what: str, settings: dict[str, str]
) -> tuple[str, dict[Path, bytes]]:
    baseline = settings.get("baseline")
    if what == "places":
        places = whole_numbers(settings["after"])
        return as_markdown(places_table(storage, studies, baseline, places), None), {}
    found = read_trend(storage, studies, baseline, None)
    if what == "figure=trend":
        return as_figure(draw_trend(found), (*studies, baseline, "trend"))
    if what == "verdict":
        return "\n".join(["", *(f"- {escape_markdown(line)}" for line in trend_sentences(found)), ""]), {}
    assert what == "trend", f"{what} is not of a trend"
    return as_markdown(dict(trend_tables(found))["Token cost"], None), {}


def places_table(storage: Path, studies: list[str], baseline: str | None, places: list[int]) -> Table:
    """Each arm's change per tenfold, with the studies read in several places of their baselines' curves."""
    trends = [read_trend(storage, studies, baseline, place) for place in places]
    names = dict.fromkeys(arm.name for found in trends for arm in found.arms)
    changes = [
        {arm.name: words.percent_interval(arm.cost.change) for arm in found.arms if arm.cost is not None}
        for found in trends
    ]
    return Table(
        caption=(
            f"Change of (1 + token cost over {trends[0].against}) for each tenfold of parameters, with its "
            f"{words.coverage(*trends[0].rules)} interval, each study read at the loss that the baseline of "
            "its file reaches after so many tokens. The same runs in all columns."
        ),
        columns=("Arm", *(f"After {words.tokens(place)} tokens" for place in places)),
        rows=tuple((name, *(change.get(name, words.DASH) for change in changes)) for name in names),
        numeric=frozenset(range(1, len(places) + 1)),
    )


def cost_places(
    storage: Path, study: str, baseline: str | None, places: list[int], *, in_bf16: bool
) -> Table:
    """Each arm's token cost at the losses that the study's baseline reaches after so many tokens."""
    frames = load_frames(StudyStore(storage / study))
    targets = [target_after(frames, place) for place in places]
    found = [read(storage, study, baseline, target) for target in targets]
    costs = [
        {
            arm.name: words.cost((arm.in_bf16 if in_bf16 and arm.in_bf16 else arm).token_cost)
            for arm in analysis.others
        }
        for analysis in found
    ]
    heads = (
        f"After {words.tokens(place)} tokens ({target:.3f})"
        for place, target in zip(places, targets, strict=True)
    )
    return Table(
        caption=(
            f"Token cost {'in bf16 ' if in_bf16 else ''}over {found[0].baseline}, with its 95 % interval, at "
            "the loss (nats/token, in "
            "brackets) that the study's baseline reaches after so many tokens. The same runs in all columns."
        ),
        columns=("Arm", *heads),
        rows=tuple((name, *(cost[name] for cost in costs)) for name in costs[0]),
        numeric=frozenset(range(1, len(places) + 1)),
    )


def contrasts(storage: Path, study: str, pairs: list[list[str]]) -> Table:
    """Each arm over a parent of its own: token cost and final loss difference, as the report states them."""
    rows = []
    for name, parent in pairs:
        table = tables.headline(read(storage, study, parent, None))
        cost, loss = (table.columns.index(head) for head in ("Token cost", "Final loss difference"))
        row = next(row for row in table.rows if row[0] == name)
        rows.append((name, parent, row[cost], row[loss]))
    return Table(
        caption=(
            "Token cost and final loss (nats/token) of an arm over those of the arm beside it. "
            "Brackets: 95 % intervals over pairs of seeds, each for its own comparison."
        ),
        columns=("Arm", "Over", "Token cost", "Final loss difference"),
        rows=tuple(rows),
        numeric={2, 3},
    )


def loss_places(analysis: Analysis, evaluated: str | None, places: list[int], change: list[int]) -> Table:
    """Each arm's loss difference at the evaluations nearest to so many tokens, and its change between two."""
    what, curves = evaluations(analysis, evaluated)
    assert analysis.plan.paired_seeds, "the change of a difference needs seeds in pairs"
    grids = {arm.name: common_grid([one for one in curves if one.arm == arm.name]) for arm in analysis.arms}
    base = grids.pop(analysis.baseline)
    assert all(grid.tokens.tolist() == base.tokens.tolist() for grid in grids.values())
    assert all(grid.seeds == base.seeds for grid in grids.values())
    at = {place: int(np.abs(base.tokens - place).argmin()) for place in (*places, *change)}
    rows = []
    for name, grid in grids.items():
        difference = grid.loss - base.loss
        cells = [difference[:, at[place]] for place in places]
        if change:
            cells.append(difference[:, at[change[1]]] - difference[:, at[change[0]]])
        rows.append((name, *(words.loss_interval(mean_interval(one), difference=True) for one in cells)))
    heads = [f"{words.tokens(int(base.tokens[at[place]]))} tokens" for place in places]
    if change:
        first, last = (words.tokens(int(base.tokens[at[place]])) for place in change)
        heads.append(f"Change, {first} to {last}")
    return Table(
        caption=(
            f"{what} at equal tokens (nats/token), with its 95 % interval over pairs of seeds, at the "
            "evaluations nearest to so many. The same runs in all columns."
        ),
        columns=("Arm", *heads),
        rows=tuple(rows),
        numeric=frozenset(range(1, len(heads) + 1)),
    )


def evaluations(analysis: Analysis, evaluated: str | None) -> tuple[str, Iterable[Curve]]:
    """Return the curves by one evaluation, or by how much the two differ, and what they are."""
    if evaluated is None:
        return f"Validation loss minus that of {analysis.baseline}", analysis.curves
    if evaluated == "bf16":
        return f"Validation loss in bf16 minus that of {analysis.baseline}", analysis.curves_in_bf16
    assert evaluated == "alone", f"evaluated={evaluated} is neither bf16 nor alone"
    own = {one.run_id: one for one in analysis.curves}
    return "Validation loss by the arm's own evaluation minus that in bf16", [
        replace(one, loss=own[one.run_id].loss[np.isin(own[one.run_id].tokens, one.tokens)] - one.loss)
        for one in analysis.curves_in_bf16
    ]


def whole_numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def read_trend(storage: Path, studies: list[str], baseline: str | None, after: int | None) -> Trend:
    frames = []
    for study in studies:
        own = load_frames(StudyStore(storage / study))
        target = None if after is None else target_after(own, after)
        frames.append(read_against(own, baseline=baseline, target=target))
    return trend([analyse(frame) for frame in frames], frames)


@cache
def read(storage: Path, study: str, baseline: str | None, target: float | None) -> Analysis:
    return analyse(read_against(load_frames(StudyStore(storage / study)), baseline=baseline, target=target))


def drawings(storage: Path, study: str, analysis: Analysis) -> tuple[Drawing, ...]:
    diagnosed, _ = diagnose_study(StudyStore(storage / study), analysis)
    return (*draw_figures(analysis), *draw_diagnoses(diagnosed))


def as_figure(drawing: Drawing, parts: Iterable[str | None]) -> tuple[str, dict[Path, bytes]]:
    name = "-".join(re.sub(r"[^a-z0-9.]+", "-", part.lower()) for part in parts if part) + ".svg"
    alt, caption = escape_markdown(drawing.alt), escape_markdown(drawing.caption)
    return f"\n![{alt}](figures/{name})\n\n*{caption}*\n", {FOLDER / "figures" / name: drawing.svg}


def as_markdown(table: Table, columns: str | None) -> str:
    names = table.columns if columns is None else columns.split(",")
    places = [table.columns.index(name) for name in names]
    lines = [[table.columns[i] for i in places], ["---:" if i in table.numeric else "---" for i in places]]
    rows = [[escape_markdown(row[i]) for i in places] for row in table.rows]
    body = "\n".join(f"| {' | '.join(cells)} |" for cells in (*lines, *rows))
    return f"\n{body}\n\n*{escape_markdown(table.caption)}*\n"


if __name__ == "__main__":
    sys.exit(main())
