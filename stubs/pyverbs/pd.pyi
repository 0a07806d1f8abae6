from pyverbs.base import PyverbsCM
from pyverbs.device import Context

class PD(PyverbsCM):
    def __init__(self, creator: Context) -> None: ...
    @property
    def handle(self) -> int: ...
