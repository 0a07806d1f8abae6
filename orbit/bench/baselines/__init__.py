"""The same bytes between the same two processes without orbit: what its figures are compared with.

`baseline_rows` runs at the client, `BaselineServer` answers it at the other end; how a request gets
there is the caller's. No baseline touches memory, queue pairs or connections of a node.
"""

from .asking import ANSWER_S
from .measuring import baseline_rows
from .server import BaselineServer

__all__ = ["ANSWER_S", "BaselineServer", "baseline_rows"]
