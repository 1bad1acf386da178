"""Print each arm's mean loss gap to BF16 over the settings of Quartet II's repository.

``for_plots/runs.json`` of github.com/IST-DASLab/Quartet-II holds the final losses behind the figures of its
paper (arXiv 2601.22813). Kept: runs with one or all GEMMs in NVFP4 whose scales are those of the paper.

    python benchmarks/quartet2.py runs.json
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from ablate.results.intervals import mean_interval

_GEMMS = {
    "EW_Q(Et)Q(Xt)t": "Wgrad",
    "Q(E)Q(Wt)t_EtX": "Dgrad",
    "Q(E)Q(Wt)t_Q(Et)Q(Xt)t": "Dgrad + Wgrad",
}


def _forward(run: dict[str, Any]) -> str | None:
    if run["fscale_override"] != 1:
        return None
    words = (
        "16x16" if run["fsquare"] else "1x16",
        "4/6" * run["ffour_over_six"],
        _hadamard(run),
    )
    return " ".join(("Fprop", *filter(None, words)))


def _hadamard(run: dict[str, Any]) -> str:
    return "H16" if run["fhadamard_dim"] == 16 else ""


def _backward(run: dict[str, Any]) -> str:
    return f"{_GEMMS[run['bbackward_scheme']]} {'SR' if run['bunbiased'] == 'sr' else 'MS-EDEN'}"


def _four_six(name: str, run: dict[str, Any]) -> str:
    return f"{name} 4/6" if run["sfour_over_six"] else name


_ARMS = {
    "baseline": lambda _run: "bf16",
    "forward_main": _forward,
    "forward_quartet": lambda run: f"Fprop QuEST {_hadamard(run)}".strip(),
    "backward_main": _backward,
    "nvidia": lambda run: _four_six("NVIDIA", run),
    "tetrajetv2": lambda _run: "TetraJet-v2",
    "quartetv2": lambda run: (
        None
        if run["sdelayed_amax"]
        else _four_six(f"Quartet II H{run['shadamard_dim']}", run)
    ),
}

if __name__ == "__main__":
    groups = json.loads(Path(sys.argv[1]).read_text())
    losses: dict[str, dict[tuple[int, int], float]] = defaultdict(dict)
    for group, arm_of in _ARMS.items():
        for run in groups[group]:
            # six settings were run twice, from the same seed
            if (arm := arm_of(run)) is not None:
                losses[arm].setdefault((run["N"], run["D"]), run["final_loss"])
    bf16 = losses.pop("bf16")
    for arm, arm_losses in losses.items():
        gaps = [
            loss - bf16[setting]
            for setting, loss in arm_losses.items()
            if setting in bf16
        ]
        interval = mean_interval(gaps)
        print(
            f"{arm}: {interval.estimate:.4f} [{interval.low:.4f}, {interval.high:.4f}] nats, {len(gaps)} settings"
        )
