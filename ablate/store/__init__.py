"""The run store: plain files that hold everything a study computed. They are the truth; MLflow mirrors them.

::

    <storage>/<study>/plan.lock.json            the plan last run (what belongs to the study)
    <storage>/<study>/throughput.json           what `ablate throughput` measured last
    <storage>/<study>/runs/<id>/config.json     the resolved configuration, whose hash is the id
                                status.json     the run's state
                                metrics.jsonl   one JSON object a line, appended
                                environment.json  versions, hardware, back end of the last attempt
                                checkpoints/    the last two of a run that has not ended
                                system.jsonl      what the run used of its machine
                                attempts/<n>.json  the ledger: who executed attempt n, and how it ended
                                attempts/<n>.log   what it printed
"""

from ablate.store.runs import DAMAGED, END_STATES, STATES, RunDir, State, Status, StudyStore

__all__ = [
    "DAMAGED",
    "END_STATES",
    "STATES",
    "RunDir",
    "State",
    "Status",
    "StudyStore",
]
