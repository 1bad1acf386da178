"""The run store: plain files that hold everything a study computed. They are the truth; MLflow mirrors them.

``docs/architecture.md`` shows each file of ``<storage>/<study>`` and of its ``runs/<id>``.
"""

from ablate.store.runs import END_STATES, STATES, RunDir, State, Status, StudyStore

__all__ = ["END_STATES", "STATES", "RunDir", "State", "Status", "StudyStore"]
