"""Fill the tables, figures and data of ``docs/findings`` from the storage that its studies were run in.

A page says what goes where, and this script writes it there, so that no figure in a table is typed::

    <!-- ablate: STUDY TABLE [baseline=ARM] -->
    …
    <!-- end -->

TABLE is ``evaluation`` for that table of the report, ``contrasts`` for arms over parents of their
own (``of=ARM:PARENT;ARM:PARENT``), ``places`` for token costs in several places (``after=TOKENS,TOKENS``), or
``figure=NAME`` for one of the report's figures, shown with its title. STUDY may
be several, ``A,B,C``, for ``figure=trend``, which ``ablate compare`` draws of them.
``--check`` writes nothing and fails where a page is not what the storage says. Without ``--storage`` the runs
are made again of the losses in ``docs/findings/data`` and the study files.
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

import pandas as pd

from ablate.base.files import append_line, write_record
from ablate.data.identity import DataIdentity
from ablate.plan import build_plan
from ablate.reports import analyse, load_frames
from ablate.reports.figures import draw_figures
from ablate.reports.figures.panels import draw_comparison
from ablate.reports.findings.compare import compare
from ablate.reports.pages.document import csv_text
from ablate.reports.pages.render import escape_markdown
from ablate.reports.read.rebase import read_against, target_after
from ablate.reports.words import format as words
from ablate.reports.words import tables
from ablate.reports.words.format import Table
from ablate.store import Status, StudyStore
from ablate.study import load_study

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from ablate.reports import Analysis
    from ablate.reports.figures import Drawing
    from ablate.store import RunDir

FOLDER = Path(__file__).parents[1] / "docs" / "findings"
STUDIES = Path(__file__).parents[1] / "studies" / "findings"
BLOCK = re.compile(r"(<!-- ablate: (.*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--storage",
        type=Path,
        help="the storage of the studies (default: made of docs/findings/data)",
    )
    parser.add_argument(
        "pages", nargs="*", help="only these pages, such as ladder.md (default: all)"
    )
    parser.add_argument(
        "--check", action="store_true", help="only tell which files would change"
    )
    options = parser.parse_args()
    if options.storage is None:
        with tempfile.TemporaryDirectory() as folder:
            rebuild(Path(folder))
            return fill_pages(options, Path(folder))
    return fill_pages(options, options.storage)


def rebuild(storage: Path) -> None:
    """Make a run store of each study from the losses beside the pages and its study file.

    What losses do not tell (environment, timing, diagnostics) is not there.
    """
    for path in sorted((FOLDER / "data").glob("*.csv")):
        evals = pd.read_csv(path)
        study = load_study(next(STUDIES.parent.rglob(f"{path.stem}.yaml")))
        plan = build_plan(
            study,
            lambda _: DataIdentity(digest="losses alone", vocab_size=256, num_bytes=0),
        )
        lock, store = plan, StudyStore(storage / path.stem)
        ids = {
            (arm, seed): run
            for arm, seed, run in evals[["arm", "seed", "run_id"]].itertuples(
                index=False
            )
        }
        arms = []
        for arm in lock.arms:
            runs = tuple(
                replace(run, id=ids[arm.name, run.seed])
                for run in arm.runs
                if (arm.name, run.seed) in ids
            )
            arms += [replace(arm, runs=runs)] * bool(runs)
        store.write_plan(replace(lock, arms=tuple(arms)))
        for arm in arms:
            config = plan.arm(arm.name).config
            for run in arm.runs:
                run_evals = evals[evals["run_id"] == run.id]
                write_run(
                    store.run(run.id), asdict(config.with_seed(run.seed)), run_evals
                )


def write_run(run: RunDir, config: dict[str, Any], evals: pd.DataFrame) -> None:
    """Write one finished run of these evaluations."""
    run.create(config)
    write_record(run.environment_path, {"backend": "cpu", "backend_mode": "emulated"})
    rows = evals.drop(columns=["run_id", "arm", "seed"]).to_dict("records")
    for number, row in enumerate(rows):
        known = {key: value for key, value in row.items() if pd.notna(value)}
        append_line(
            run.metrics_path, {"kind": "eval", **known, "time_unix": float(number)}
        )
    run.write_status(
        Status(
            state="finished",
            attempt=1,
            tokens=rows[-1]["tokens"],
            step=rows[-1]["step"],
            ended_unix=0.0,
        )
    )


def fill_pages(options: argparse.Namespace, storage: Path) -> int:
    """Write what the storage says into the pages and the data, and return the exit code."""
    files: dict[Path, bytes] = {}
    for page in [FOLDER / name for name in options.pages] or sorted(
        FOLDER.glob("*.md")
    ):

        def fill(match: re.Match[str]) -> str:
            study, kind, *settings = shlex.split(match[2])
            body, drawn = block(
                storage, study, kind, dict(one.split("=", 1) for one in settings)
            )
            files.update(drawn)
            return f"{match[1]}{body}\n{match[4]}"

        files[page] = BLOCK.sub(fill, page.read_text(encoding="utf-8")).encode()
    for path in [] if options.pages else sorted((FOLDER / "data").glob("*.csv")):
        frames = load_frames(StudyStore(storage / path.stem))
        ended = [run_id for run_id, run in frames.runs.items() if run.has_result]
        files[path] = csv_text(
            frames.evals[frames.evals["run_id"].isin(ended)]
        ).encode()
    changed = [
        path
        for path, body in files.items()
        if not path.exists() or path.read_bytes() != body
    ]
    for path in changed:
        print(
            ("differs: " if options.check else "written: ")
            + str(path.relative_to(FOLDER))
        )
        if not options.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(files[path])
    return 1 if options.check and changed else 0


def block(
    storage: Path, study: str, what: str, settings: dict[str, str]
) -> tuple[str, dict[Path, bytes]]:
    """Return what stands in a page's block, and the figures that it shows."""
    if "," in study:
        assert what == "figure=trend", f"{what} is not of a trend"
        return trend_figure(storage, study.split(","))
    baseline = settings.get("baseline")
    if what == "places":
        table = cost_places(storage, study, baseline, settings["after"])
    elif what == "contrasts":
        table = contrasts(
            storage, study, [pair.split(":") for pair in settings["of"].split(";")]
        )
    elif what.startswith("figure="):
        name = what.partition("=")[2]
        drawing = next(
            figure
            for figure in draw_figures(read(storage, study, baseline))
            if figure.name == name
        )
        return as_figure(drawing, (study, baseline, name))
    else:
        assert what == "evaluation", what
        table = tables.evaluation_table(read(storage, study, baseline))
    assert table.rows, f"{study} has no {what}"
    return as_markdown(table), {}


def trend_figure(storage: Path, studies: list[str]) -> tuple[str, dict[Path, bytes]]:
    frames = [
        read_against(load_frames(StudyStore(storage / study))) for study in studies
    ]
    drawing = draw_comparison(compare([analyse(frame) for frame in frames], frames))
    return as_figure(drawing, (*studies, "trend"))


def cost_places(storage: Path, study: str, baseline: str | None, after: str) -> Table:
    """Each arm's token cost at the losses that the study's baseline reaches after so many tokens."""
    frames = load_frames(StudyStore(storage / study))
    places = [int(number) for number in after.split(",")]
    targets = [target_after(frames, place) for place in places]
    analyses = [read(storage, study, baseline, target) for target in targets]
    costs = [
        {arm.name: words.cost(arm.token_cost) for arm in analysis.others}
        for analysis in analyses
    ]
    heads = (
        f"After {words.tokens(place)} tokens ({target:.3f})"
        for place, target in zip(places, targets, strict=True)
    )
    return Table(
        name="targets",
        title="Targets",
        caption=(
            f"Token cost over {analyses[0].baseline}, with its 95 % interval, at the loss (nats/token, in "
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
        table = tables.arms_table(read(storage, study, parent))
        cost, loss = (
            table.columns.index(head)
            for head in ("Token cost", "Final loss difference")
        )
        row = next(row for row in table.rows if row[0] == name)
        rows.append((name, parent, row[cost], row[loss]))
    return Table(
        name="pairs",
        title="Pairs of arms",
        caption="",  # the pages' README says what the columns hold
        columns=("Arm", "Over", "Token cost", "Final loss difference"),
        rows=tuple(rows),
        numeric={2, 3},
    )


@cache
def read(
    storage: Path, study: str, baseline: str | None, target: float | None = None
) -> Analysis:
    return analyse(
        read_against(
            load_frames(StudyStore(storage / study)), baseline=baseline, target=target
        )
    )


def as_figure(
    drawing: Drawing, parts: Iterable[str | None]
) -> tuple[str, dict[Path, bytes]]:
    name = (
        "-".join(re.sub(r"[^a-z0-9.]+", "-", part.lower()) for part in parts if part)
        + ".svg"
    )
    caption = drawing.caption
    if drawing.name == "token-cost":  # the pages' README explains the marks once
        caption = caption.partition(". ")[0] + "."
    body = f"\n![{escape_markdown(drawing.title)}](figures/{name})\n\n*{escape_markdown(caption)}*\n"
    return body, {FOLDER / "figures" / name: drawing.svg}


def as_markdown(table: Table) -> str:
    places = range(len(table.columns))
    lines = [table.columns, ["---:" if i in table.numeric else "---" for i in places]]
    rows = [[escape_markdown(cell) for cell in row] for row in table.rows]
    body = "\n".join(f"| {' | '.join(cells)} |" for cells in (*lines, *rows))
    caption = f"\n*{escape_markdown(table.caption)}*\n" if table.caption else ""
    return f"\n{body}\n{caption}"


if __name__ == "__main__":
    sys.exit(main())
