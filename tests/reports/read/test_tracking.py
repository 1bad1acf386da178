"""A real MLflow store, read back."""

import pytest

from ablate.base.errors import UserError
from ablate.reports.read.tables import TOKENS
from ablate.reports.read.tracking import read_mlflow


@pytest.fixture(scope="module")
def uri(tmp_path_factory):
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"
    client = MlflowClient(tracking_uri=uri)
    experiment = client.create_experiment("theirs")
    for recipe, seed, losses in (
        ("fp8", 3, (4.0, 3.0)),
        ("fp8", 4, (4.1, 3.1)),
        ("fp4", 3, (5.0, float("nan"))),
    ):
        run = client.create_run(experiment, tags={"recipe": recipe}, run_name=f"{recipe}-{seed}")
        client.log_param(run.info.run_id, "seed", seed)
        for step, loss in enumerate(losses, 1):
            client.log_metric(run.info.run_id, "eval/loss", loss, step=step)
        client.set_terminated(run.info.run_id)
    empty = client.create_run(experiment, tags={"recipe": "fp4"}, run_name="empty")
    client.set_terminated(empty.info.run_id, "KILLED")
    return uri


ARMS = {"FP8": ["tags.recipe = 'fp8'"], "FP4": ["tags.recipe = 'fp4'"]}


def test_runs_by_filter(uri):
    arms, faults = read_mlflow(
        uri, "theirs", metric="eval/loss", arms=ARMS, stages=dict.fromkeys(ARMS, ((0, 100),))
    )
    assert sorted((run.seed, run.evals) for run in arms["FP8"]) == [
        (3, ((100, 4.0), (200, 3.0))), (4, ((100, 4.1), (200, 3.1))),
    ]  # fmt: skip
    (diverged,) = arms["FP4"]
    assert (diverged.state, diverged.evals) == ("diverged", ((100, 5.0),))
    assert len(faults) == 1
    assert "run 'empty'" in faults[0]
    assert "no metric 'eval/loss'" in faults[0]


@pytest.mark.parametrize(
    ("experiment", "arms", "line"),
    [
        ("ours", ARMS, r"no experiment 'ours' at sqlite:.*there are: Default, theirs"),
        ("theirs", {"a": ["recipe is fp8"]}, "MLflow at sqlite:"),
    ],
)
def test_what_cannot_be_asked_is_one_line(uri, experiment, arms, line):
    with pytest.raises(UserError, match=line) as caught:
        read_mlflow(uri, experiment, metric="eval/loss", arms=arms, stages=dict.fromkeys(arms, TOKENS))
    assert "\n" not in str(caught.value)
