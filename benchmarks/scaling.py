"""Make tables of losses over sizes and budgets for ``ablate trend --losses``.

python benchmarks/scaling.py findings > findings.csv
python benchmarks/scaling.py quartet notebooks/plots.ipynb > quartet.csv
python benchmarks/scaling.py quartet-ii for_plots/runs.json > quartet-ii.csv

``findings``: evaluations in ``docs/findings/data`` of the studies of three sizes, and of the longer budget at
the middle one, read as ``ablate trend`` with the names of the studies reads their runs: at a constant rate,
from its end down to a quarter of it. ``quartet``, ``quartet-ii``: final losses in those files of
https://github.com/IST-DASLab/Quartet and https://github.com/IST-DASLab/Quartet-II, one run a cell; of the
latter the recipes of all three GEMMs, one of Fprop and one of Wgrad alone.
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
FOUR_OVER_SIX = {"fsquare": False, "ffour_over_six": True, "fscale_override": 1.0, "fhadamard_dim": 1}
MS_EDEN = {"bbackward_scheme": "EW_Q(Et)Q(Xt)t", "bunbiased": "eden", "bscale_override": 0.93}
QUARTET_II: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16": ("baseline", {}),
    "NVIDIA": ("nvidia", {"sfour_over_six": False}),
    "NVIDIA 4/6": ("nvidia", {"sfour_over_six": True}),
    "TetraJet-v2": ("tetrajetv2", {}),
    "Quartet II": ("quartetv2", {"shadamard_dim": 128, "sdelayed_amax": False, "sfour_over_six": True}),
    "Fprop 4/6": ("forward_main", FOUR_OVER_SIX),
    "Wgrad MS-EDEN": ("backward_main", MS_EDEN),
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


def quartet_ii(path: Path) -> Iterator[tuple[Any, ...]]:
    found = json.loads(path.read_text())
    for arm, (group, settings) in QUARTET_II.items():
        seeds: dict[tuple[int, int], int] = {}
        for run in found[group]:
            if all(run[key] == value for key, value in settings.items()):
                cell = (run["N"], run["D"])
                seed = seeds[cell] = seeds.get(cell, -1) + 1
                yield arm, *cell, seed, run["final_loss"], ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("data", choices=["findings", "quartet", "quartet-ii"])
    parser.add_argument("file", nargs="?", type=Path, help="the file of theirs")
    options = parser.parse_args()
    readers = {"quartet": quartet, "quartet-ii": quartet_ii}
    rows = findings() if options.data == "findings" else readers[options.data](options.file)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(("arm", "parameters", "tokens", "seed", "val_loss", "run"))
    writer.writerows(rows)


if __name__ == "__main__":
    main()
