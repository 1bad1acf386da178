"""A study from Python: write it, let the pilot choose the target, run it, read what FP4 costs.

Run it as a script, or cell by cell in an editor that knows `# %%`. Four small runs take a minute on a CPU.
"""

# %% [markdown]
# ## One run
# The words are those of a study file. Nothing is kept but what is returned.

# %%
from pathlib import Path

import ablate
from ablate.workflow import Where
from ablate.workflow.pilot import pilot_study
from ablate.workflow.run import run_study

SMALL = {"width": 64, "layers": 1, "heads": 2, "ffn": 96}
BUDGET = {
    "tokens": 16_384,
    "seq_len": 64,
    "batch_size": 16,
    "eval_every_tokens": 1024,
    "eval_tokens": 1024,
}

run = ablate.train_run(
    model=SMALL,
    recipe="mxfp4",
    data={"source": "stdlib", "max_bytes": 1_000_000},
    device="cpu",
    **BUDGET | {"tokens": 4096},
)
print(run.evaluations)  # columns: tokens, step, val_loss in nats per token

# %% [markdown]
# ## A study
# A study file is YAML: text, which is easily made from values. `target: null` leaves the target to the pilot.

# %%
STUDY = Path("from-python.yaml")
STUDY.write_text(f"""\
name: from-python
baseline: bf16
target: null
seeds: 2
base:
  model: {SMALL}
  data: {{source: stdlib, max_bytes: 1_000_000}}
  training: {BUDGET}
arms:
  bf16: {{recipe: bf16}}
  all three: {{recipe: mxfp4}}
""")
where = Where(storage=Path("ablate-runs"))

# %% [markdown]
# ## The pilot
# Two runs of the baseline, which are runs of the study. `write=True` puts the target into the file.

# %%
_, advice = pilot_study(STUDY, where, write=True)
print(
    f"target: {advice.take.val_loss} nats per token, reached after {advice.take.tokens} tokens (by seed)"
)
for row in advice.needed:
    print(f"to find a cost of {row.cost:.0%}: {row.seeds} seeds")

# %% [markdown]
# ## The rest of the study, and its costs
# `run_study` trains what is missing. After an interruption the same call goes on.

# %%
end = run_study(STUDY, where)
print("report:", end.report)

study = ablate.open_study("from-python", storage=where.storage)
costs = study.costs()  # one row an arm
print(
    costs[
        ["arm", "n", "hit", "token_cost_estimate", "token_cost_low", "token_cost_high"]
    ]
)
# one row a run
print(study.runs()[["arm", "seed", "end", "tokens_to_target", "seconds"]])

# %% [markdown]
# ## The curves
# One row an evaluation, and one row of training after another, with units in the names.

# %%
print(
    study.curves()
    .pivot_table(index="tokens", columns=["arm", "seed"], values="val_loss")
    .tail(3)
)
print(study.training().groupby("arm")[["loss_nats_per_token", "tokens_per_sec"]].mean())
