"""Copy a study's runs from MLflow to Weights & Biases while it runs.

    python examples/to_wandb.py sqlite:///ablate-runs/mlflow.db my-study

It needs ``pip install wandb``. The token count is W&B's step, an arm is a group.
"""

import sys
import time

import wandb
from mlflow import MlflowClient

uri, study = sys.argv[1:]
client = MlflowClient(uri)
copies = {}
sent = {}
left = 1
while left:
    experiment = client.get_experiment_by_name(study)
    runs = client.search_runs([experiment.experiment_id], max_results=1000)
    for run in runs:
        key = run.info.run_id
        tags = run.data.tags
        ended = run.info.status != "RUNNING"
        # the run that holds the report has no arm
        if "ablate.arm" not in tags or sent.get(key) == "all":
            continue
        if key not in copies:
            copies[key] = wandb.init(
                project=study,
                id=key,
                name=run.info.run_name,
                group=tags["ablate.arm"],
                config=run.data.params,
                resume="allow",
                reinit="create_new",
            )
        rows = {}
        for name in run.data.metrics:
            for point in client.get_metric_history(key, name):
                rows.setdefault(point.step, {})[name] = point.value
        # more may come for the last step
        for step in sorted(rows)[: None if ended else -1]:
            if step > sent.get(key, -1):
                copies[key].log(rows[step], step=step)
                sent[key] = step
        if ended:
            copies[key].finish()
            sent[key] = "all"
    left = sum(run.info.status == "RUNNING" for run in runs)
    time.sleep(30 if left else 0)
