from pyverbs.base import PyverbsCM
from pyverbs.device import Context

class CompChannel(PyverbsCM):
    def __init__(self, context: Context) -> None: ...

class CQ(PyverbsCM):
    def __init__(
        self,
        context: Context,
        cqe: int,
        cq_context: object,
        channel: CompChannel | None,
        comp_vector: int,
    ) -> None: ...
    @property
    def cqe(self) -> int: ...
