"""Several nodes on one machine: one is killed and another joins while a study runs."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ablate.store.leases import Leases

HERE = Path(__file__).parent

SCRIPT = """
    import dataclasses, sys
    from pathlib import Path

    sys.path.insert(0, {here!r})
    from four_runs import requests_of
    from ray.cluster_utils import Cluster

    from ablate.run.config import ResourcesConfig
    from ablate.base.errors import UserError
    from ablate.execute import driver
    from ablate.execute.driver import execute_study

    driver.PAUSES_SEC = (0.5, 0.5, 0.5)
    store, requests = requests_of(Path({storage!r}))
    cluster = Cluster(initialize_head=True, head_node_args={{"num_cpus": 0, "include_dashboard": False}})
    first = cluster.add_node(num_cpus=2, resources={{"mi355x": 2}})
    asked = [
        dataclasses.replace(request, resources=ResourcesConfig(custom={{"mi355x": 1.0}}))
        for request in requests
    ]
    try:
        greedy = ResourcesConfig(custom={{"mi355x": 8.0}})
        execute_study(store, [dataclasses.replace(asked[0], resources=greedy)], address=cluster.address)
    except UserError as error:
        print(error)
    done = []

    def watch():
        running = [request for request in requests if store.run(request.run_id).metrics_path.exists()]
        if running and not done:
            done.append(1)
            cluster.remove_node(first, allow_graceful=False)
            cluster.add_node(num_cpus=2, resources={{"mi355x": 2}})

    outcome = execute_study(
        store, asked, address=cluster.address, on_poll=watch, trainer="fake_trainers:slow"
    )
    print(sorted(outcome.states.values()), len(done))
    cluster.shutdown()
"""


@pytest.mark.exhaustive
def test_a_node_is_killed_in_the_middle_and_another_joins(study):
    store, requests = study
    script = textwrap.dedent(SCRIPT.format(here=str(HERE), storage=str(store.path)))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    refused, ends = [line for line in done.stdout.splitlines() if "mi355x" in line or "finished" in line]
    assert "a run asks for 1 × (1 CPU, 0 GPU, 8 mi355x), which the cluster does not have" in refused
    assert ends == f"{['finished'] * 4} 1"
    lost = 0
    for request in requests:
        run = store.run(request.run_id)
        assert [row["step"] for row in run.metrics() if row["kind"] == "train"] == [1, 2, 3, 4, 5]
        records = [Leases(run.attempts).read(n) for n in range(1, Leases(run.attempts).latest() + 1)]
        assert [record.outcome for record in records].count("finished") == 1
        lost += sum(record.outcome is None for record in records)
    assert lost >= 1, "no run was on the node that was killed"
