"""Make tables of losses over sizes and budgets for ``ablate trend --losses``.

python benchmarks/scaling.py findings > findings.csv
python benchmarks/scaling.py quartet notebooks/plots.ipynb > quartet.csv

``findings``: evaluations in ``docs/findings/data`` of the studies of three sizes, and of the longer budget at
the middle one, read as ``ablate trend`` with the names of the studies reads their runs: at a constant rate,
from its end down to a quarter of it. ``quartet``: final losses in that file of
https://github.com/IST-DASLab/Quartet, one run a cell.
"""

from __future__ import annotations

import argparse
import ast
import csv
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from ablate.models.arithmetic import model_size
from ablate.run.config import ModelConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
STUDIES = {"small": 10**9, "ladder": 10**9, "large": 10**9, "longer": 2_415_000}
"""Of the findings, and the tokens up to which they are read: the last decays from the step after on."""
ARMS = ("bf16", "F", "W", "F+D+W", "F+D+W SR", "F+D+W RHT16", "F+D+W DHT16")
"""What all four have."""
SIZES = {
    "30M": 30482560, "50M": 49556736, "100M": 102777856, "200M": 203188480, "430M": 443068288,
    "800M": 822151168,
}  # fmt: skip
QUARTET = {
    ("BF16", "BF16"): "bf16",
    ("BF16", "AlbertTsengQuantizer"): "SR in Dgrad and Wgrad",
    ("QuEST", "BF16"): "QuEST in Fprop",
    ("QuEST", "AlbertTsengQuantizer"): "Quartet",
}


def findings() -> Iterator[tuple[Any, ...]]:
    for study, last in STUDIES.items():
        name = f"findings-{study}"
        base = yaml.safe_load((ROOT / "studies" / "findings" / f"{name}.yaml").read_text())["base"]
        size = model_size(ModelConfig(**base["model"]), vocab_size=256, seq_len=128).parameters
        with (ROOT / "docs" / "findings" / "data" / f"{name}.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if row["arm"] in ARMS and int(row["seed"]) < 5]
        known = np.array(sorted({int(row["tokens"]) for row in rows if int(row["tokens"]) <= last}))
        wanted = known[-1] / 2 ** (np.arange(5) / 2)
        places = {int(known[np.abs(np.log(known / place)).argmin()]) for place in wanted}
        for row in rows:
            if int(row["tokens"]) in places:
                yield row["arm"], size, row["tokens"], row["seed"], row["val_loss"], row["run_id"]


def quartet(path: Path) -> Iterator[tuple[Any, ...]]:
    cells = ("".join(cell["source"]) for cell in json.loads(path.read_text())["cells"])
    source = next(cell for cell in cells if cell.startswith("size_fwd_bwd_iters_loss"))
    for size, found in ast.literal_eval(source.partition("=")[2].strip()).items():
        for (fprop, others), arm in QUARTET.items():
            for steps, loss in found.get(fprop, {}).get(others, {}).items():
                yield arm, SIZES[size], steps * 512 * 512, 0, loss, ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("data", choices=["findings", "quartet"])
    parser.add_argument("file", nargs="?", type=Path, help="the file of theirs")
    options = parser.parse_args()
    rows = findings() if options.data == "findings" else quartet(options.file)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(("arm", "parameters", "tokens", "seed", "val_loss", "run"))
    writer.writerows(rows)


if __name__ == "__main__":
    main()
