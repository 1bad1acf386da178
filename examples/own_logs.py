"""Your own logs as a study: CSV and plain text in, token costs with intervals out. Nothing is trained.

Run it as a script, or cell by cell in an editor that knows `# %%`. The logs are made up in the first cell, so
that it runs anywhere; put your own files in their place.
"""

# %% [markdown]
# ## Logs
# Three runs of each arm: CSV with a row an evaluation, and the plain text that a training script prints.

# %%
import math
import random
import subprocess
import sys
from pathlib import Path

import ablate

TOKENS_PER_STEP = 65_536
LOGS = Path("logs")
draw = random.Random(0)  # noqa: S311  no secret
for arm, cost in (("fp8", 0.0), ("fp4", 0.15)):  # fp4 needs 15 % more tokens
    for seed in range(3):
        pace = (1 + cost) * math.exp(draw.gauss(0, 0.01))
        losses = {
            step: 2.2 + 9 * (step / pace) ** -0.4 + draw.gauss(0, 0.002)
            for step in range(100, 4001, 100)
        }
        table = "".join(f"{step},{loss:.4f}\n" for step, loss in losses.items())
        text = "".join(
            f"step {step}/4000 | val {loss:.4f}\n" for step, loss in losses.items()
        )
        for suffix, content in ((".csv", f"step,eval/loss\n{table}"), (".log", text)):
            file = LOGS / arm / f"seed{seed}{suffix}"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)

# %% [markdown]
# ## Import
# In a notebook: `!ablate import csv …`. The columns of your files are named by `--columns`; a loss is in nats
# per token. Without `--target` arms are compared by their final losses.


# %%
def import_logs(kind: str, study: str, *options: str) -> None:
    """Call `ablate import`; a line that does not parse is named, and ends the call with an error."""
    arms = [part for arm in ("fp8", "fp4") for part in ("--arm", f"{arm}={LOGS / arm}")]
    common = [
        "--baseline",
        "fp8",
        "--target",
        "val_loss=2.6",
        "--tokens-per-step",
        str(TOKENS_PER_STEP),
    ]
    command = [sys.executable, "-m", "ablate", "import", kind, "--study", study]
    subprocess.run(
        [*command, *arms, *common, "--storage", "ablate-runs", *options], check=True
    )


import_logs("csv", "own-csv", "--columns", "tokens=step,val_loss=eval/loss")
import_logs(
    "text", "own-text", "--pattern", r"step (?P<step>\d+)/\d+ \| val (?P<val_loss>\S+)"
)

# %% [markdown]
# ## Costs
# The frames are the report's own. Both imports hold the same numbers.

# %%
study = ablate.open_study("own-csv", storage="ablate-runs")
costs = study.costs().set_index("arm")
print(costs[["n", "hit", "token_cost_estimate", "token_cost_low", "token_cost_high"]])
same = ablate.open_study("own-text", storage="ablate-runs").costs().set_index("arm")
print(
    "by CSV and by text:",
    costs.loc["fp4", "token_cost_estimate"],
    same.loc["fp4", "token_cost_estimate"],
)

# %% [markdown]
# ## The report
# The same page as of a study that was trained here.

# %%
subprocess.run(
    [sys.executable, "-m", "ablate", "report", "own-csv", "--storage", "ablate-runs"],
    check=True,
)
