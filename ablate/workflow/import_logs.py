"""Reads logs that others wrote, arm by arm, for ``ablate import``: files, a chart of W&B, runs of MLflow.

How it fails: with a ``UserError`` for options that do not fit the format, or name nothing. What cannot be read
in a log is a line of ``faults``, and the rest is read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from ablate.base.errors import UserError, as_user_error
from ablate.reports.read import tables
from ablate.reports.read.mllog import read_mllog
from ablate.reports.read.names import arms_by_folders, by_pattern
from ablate.reports.read.rows import read_csv, read_jsonl, read_wandb_chart
from ablate.run.log_formats import FORMATS
from ablate.run.log_rows import LogSource

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ablate.reports.read.imported import ImportedRun
    from ablate.run.log_rows import Evaluations
    from ablate.run.loss_units import LoggedUnit

    Runs = Mapping[str, Sequence[ImportedRun]]

_FILES = {
    **{name: form.files for name, form in FORMATS.items()},
    "text": ("*.txt", "*.log", "*.out"),
    "csv": ("*.csv",),
    "jsonl": ("*.jsonl", "*.json"),
    "wandb-export": ("*.csv",),
}


@dataclass(kw_only=True)
class LogImport:
    """Reads logs of one format; the fields are what the command line says.

    ``arms``: where the logs of each arm are. ``sizes``: the tokens of a step by arm; '' of every other.
    ``faults``: gets a line for each fault of the logs; ``notes``: for each folder that was searched.
    """

    kind: str
    files: Sequence[Path]
    arms: Mapping[str, Sequence[str]]
    sizes: Mapping[str, tables.Stages]
    columns: dict[str, str]
    patterns: Sequence[str]
    tokens_per_sample: int | None
    set_name: str | None
    loss_unit: LoggedUnit | None
    evaluations: Evaluations | None
    metric: str | None
    tracking_uri: str | None
    experiment: str | None
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def unit(self) -> LoggedUnit:
        """The unit of the losses."""
        if self.loss_unit is None and self.kind in FORMATS:
            return FORMATS[self.kind].unit
        return self.loss_unit or "nats"

    def read(self) -> Runs:
        """Read the runs of each arm."""
        for name in self.sizes:
            if name and name not in self.arms:
                raise UserError(f"--tokens-per-step: no --arm {name}=… is given")
        for name in self.columns:
            if name not in tables.COLUMNS:
                raise UserError(
                    f"--columns: no column of ours is '{name}' (expected {', '.join(tables.COLUMNS)})"
                )
        if self.kind == "mlflow":
            return self._read_mlflow()
        if self.kind == "wandb-export":
            return self._read_charts()
        return self._read_files()

    def _read_mlflow(self) -> Runs:
        from ablate.reports.read.tracking import read_mlflow

        if self.files or not self.arms:
            raise UserError("mlflow: expected --arm NAME=… for each arm")
        if not self.tracking_uri or not self.experiment:
            raise UserError("mlflow: expected --tracking-uri and --experiment")
        return read_mlflow(
            self.tracking_uri,
            self.experiment,
            self.faults,
            metric=self.metric or "val_loss",
            arms=self.arms,
            stages={arm: self._stages(arm) for arm in self.arms},
        )

    def _read_charts(self) -> Runs:
        if not (self.files and self.arms):
            raise UserError(
                "wandb-export: expected the chart's file and --arm NAME=… for each arm"
            )
        if any(self.sizes):
            raise UserError(
                "--tokens-per-step: a chart has one axis of steps for all arms (leave ARM= out)"
            )
        runs: list[ImportedRun] = []
        for path in self._listed(self.files, "FILES"):
            with as_user_error(f"{path}: cannot be read"):
                rows = read_wandb_chart(path, self.faults, self.metric)
                by_arm = tables.runs_of_table(
                    path, rows, self.faults, self._reading("")
                )
            runs += by_arm.get(None, [])
        return by_pattern(runs, self.arms, self.faults)

    def _read_files(self) -> Runs:
        if bool(self.files) == bool(self.arms):
            raise UserError(
                f"{self.kind}: expected FILES, or --arm NAME=FILE for each arm (of FILES a column `arm` or the "
                "names of their folders are the arms)"
            )
        source = self._log_source()
        runs_by_arm: dict[str, list[ImportedRun]] = {name: [] for name in self.arms}
        files: list[tuple[str, Path]] = []  # the arm that --arm names, and its file
        for name, places in self.arms.items():
            listed = self._listed(map(Path, places), f"--arm {name}")
            files += [(name, path) for path in listed]
        arms_of_files = arms_by_folders(self._listed(self.files, "FILES"))
        files += [("", path) for path in arms_of_files]
        for arm_of_file, path in files:
            try:
                by_arm = self._read_file(path, arm_of_file, source)
            except (OSError, EOFError) as error:
                reason = getattr(error, "strerror", None) or error
                self.faults.append(f"{path}: cannot be read: {reason}")
                continue
            for arm_of_row, runs in by_arm.items():
                arm = arm_of_file or arm_of_row or arms_of_files[path]
                if not arm:
                    column = self.columns.get("arm", "arm")
                    raise UserError(
                        f"{path}: neither a column '{column}' nor a folder names its arm (--columns arm=…, or "
                        "--arm NAME=FILE)"
                    )
                if arm == arm_of_row or "arm" not in self.columns:
                    runs_by_arm.setdefault(arm, []).extend(runs)
        return runs_by_arm

    def _read_file(
        self, path: Path, arm: str, source: LogSource | None
    ) -> Mapping[str | None, Sequence[ImportedRun]]:
        """Read a file's runs by the arm that its rows name. ``source``: how a log is read; None: no log."""
        if self.kind == "mllog":
            tokens_per_sample = self.tokens_per_sample
            run = read_mllog(path, self.faults, tokens_per_sample=tokens_per_sample)
            return {None: [run] if run else []}
        reading = self._reading(arm)
        if source is not None:
            return tables.runs_of_log(path, source, self.faults, reading)
        read_rows = read_csv if self.kind == "csv" else read_jsonl
        rows = read_rows(path, self.faults)
        return tables.runs_of_table(path, rows, self.faults, reading)

    def _stages(self, arm: str) -> tables.Stages | None:
        return self.sizes.get(arm, self.sizes.get(""))

    def _reading(self, arm: str) -> tables.Reading:
        return tables.Reading(
            names=self.columns,
            stages=self._stages(arm),
            sample_tokens=self.tokens_per_sample,
            set_name=self.set_name,
            loss_unit=self.unit,
            evaluations=self.evaluations,
            is_repeated=self.kind in FORMATS and FORMATS[self.kind].repeats,
        )

    def _log_source(self) -> LogSource | None:
        """Return how logs of this format are read; None if they are no logs of rows.

        Raises:
            UserError: a pattern that cannot work.
        """
        if self.kind in ("csv", "jsonl", "mllog"):
            return None
        if self.kind == "tensorboard" and self.columns:
            return LogSource(tensorboard=self.columns, file="", set=self.set_name)
        if self.kind != "text":
            return LogSource(preset=self.kind, file="", set=self.set_name)
        if not self.patterns:
            raise UserError("text: expected --pattern")
        try:
            return LogSource(patterns=list(self.patterns), set=self.set_name)
        except ValidationError as error:
            fault = error.errors()[0].get("ctx", {})
            raise UserError(
                f"--pattern: {fault.get('what', error)}", hint=fault.get("hint")
            ) from None

    def _listed(self, places: Iterable[Path], option: str) -> dict[Path, None]:
        """List each file that places name, once: files, folders, and shell patterns of both."""
        files: dict[Path, None] = {}
        for place in places:
            matches = [place]
            if not place.exists():
                names = sorted(glob(str(place), recursive=True))  # noqa: PTH207
                matches = [Path(name) for name in names]
            if not matches:
                raise UserError(f"{option}: {place} does not exist")
            for match in matches:
                if match.is_file():
                    files[match] = None
                else:
                    files |= dict.fromkeys(self._files_in(match, option))
        return files

    def _files_in(self, folder: Path, option: str) -> list[Path]:
        """Return all files of a folder, at any depth, that match the first pattern with a match.

        They are sorted. Hidden files are skipped. The number of files that are not read is a note.
        """
        files = []
        for path in sorted(folder.rglob("*")):
            parts = path.relative_to(folder).parts
            if path.is_file() and not any(part.startswith(".") for part in parts):
                files.append(path)
        patterns = _FILES[self.kind]
        for pattern in patterns:
            matching = [path for path in files if fnmatchcase(path.name, pattern)]
            if matching:
                num_others = len(files) - len(matching)
                self.notes.append(
                    f"{folder}: {len(matching)} files like {pattern}, {num_others} others not read"
                )
                return matching
        raise UserError(
            f"{option}: nothing like {' or '.join(patterns)} in {folder} or its folders"
        )
