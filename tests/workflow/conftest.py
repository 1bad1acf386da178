from tests.workflow.fakes import executed

__all__ = ["executed"]
