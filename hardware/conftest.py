"""The fixtures of the project's own tests."""

from tests.conftest import loop_kind, run_async

__all__ = ["loop_kind", "run_async"]
