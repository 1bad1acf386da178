from tests.workflow.fakes import executor

__all__ = ["executor"]
