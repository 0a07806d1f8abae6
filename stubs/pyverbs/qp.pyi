from pyverbs.base import PyverbsCM
from pyverbs.cq import CQ
from pyverbs.pd import PD
from pyverbs.srq import SRQ

class QPCap:
    def __init__(
        self,
        *,
        max_send_wr: int,
        max_recv_wr: int,
        max_send_sge: int,
        max_recv_sge: int,
        max_inline_data: int,
    ) -> None: ...

class QPInitAttr:
    def __init__(
        self, *, qp_type: int, scq: CQ, rcq: CQ, srq: SRQ | None, cap: QPCap, sq_sig_all: int
    ) -> None: ...
    @property
    def max_send_wr(self) -> int: ...
    @property
    def max_recv_wr(self) -> int: ...
    @property
    def max_inline_data(self) -> int: ...

class QP(PyverbsCM):
    def __init__(self, creator: PD, init_attr: QPInitAttr) -> None: ...
    @property
    def qp_num(self) -> int: ...
