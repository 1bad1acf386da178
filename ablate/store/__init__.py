"""The run store: plain files that hold everything a study computed. They are the truth; MLflow mirrors them.

::

    <storage>/<study>/plan.lock.json            the plan that was run last (arms, runs, search)
    <storage>/<study>/throughput.json           the last measurement of `ablate throughput`
    <storage>/<study>/runs/<id>/config.json     the resolved configuration, whose hash is the id
                                status.json     the run's state
                                metrics.jsonl   one JSON object a line, appended
                                environment.json  versions, hardware, back end of the last attempt
                                checkpoints/    the last two of a run that has not ended
                                system.jsonl      use of the machine during the run
                                attempts/<n>.json  the ledger: who executed attempt n, and how it ended
                                attempts/<n>.log   output of attempt n
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
