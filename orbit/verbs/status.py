"""Names of the numbers in a completion: `ibv_wc_status` and `ibv_wc_opcode`.

Fixed by the verbs ABI, so that no foreign module is needed to read a completion. Knows nothing of
what they mean for an operation.
"""

from __future__ import annotations

SUCCESS = 0
LOC_LEN_ERR = 1
LOC_QP_OP_ERR = 2
LOC_PROT_ERR = 4
WR_FLUSH_ERR = 5
MW_BIND_ERR = 6
REM_INV_REQ_ERR = 9
REM_ACCESS_ERR = 10
REM_OP_ERR = 11
RETRY_EXC_ERR = 12
RNR_RETRY_EXC_ERR = 13

OPCODE_SEND, OPCODE_WRITE, OPCODE_READ = 0, 1, 2
OPCODE_BIND, OPCODE_LOCAL_INV = 5, 6
OPCODE_RECV = 128

_STATUS_NAMES = (
    "success",
    "local length error",
    "local QP operation error",
    "local EE context operation error",
    "local protection error",
    "flushed",
    "memory window bind error",
    "bad response",
    "local access error",
    "remote invalid request",
    "remote access error",
    "remote operation error",
    "transport retries exceeded",
    "receiver-not-ready retries exceeded",
    "local RDD violation",
    "remote invalid RD request",
    "remote aborted",
    "invalid EE context number",
    "invalid EE context state",
    "fatal error",
    "response timeout",
    "general error",
    "tag matching error",
    "tag matching rendezvous incomplete",
)

_OPCODE_NAMES = {
    OPCODE_SEND: "SEND",
    OPCODE_WRITE: "WRITE",
    OPCODE_READ: "READ",
    3: "COMP_SWAP",
    4: "FETCH_ADD",
    OPCODE_BIND: "BIND_WINDOW",
    OPCODE_LOCAL_INV: "LOCAL_INV",
    OPCODE_RECV: "RECV",
    129: "RECV_WITH_IMM",
}


def status_name(status: int) -> str:
    return _STATUS_NAMES[status] if 0 <= status < len(_STATUS_NAMES) else f"status {status}"


def opcode_name(opcode: int) -> str:
    """Only of a successful completion: the field means nothing in a failed one."""
    return _OPCODE_NAMES.get(opcode, f"opcode {opcode}")
