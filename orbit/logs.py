"""Where orbit's log lines go, for programs that have no logging of their own.

A library configures nothing by itself: its loggers are `orbit` and below, and nothing of this
happens unless a program asks for it.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Final, TextIO

from .errors import OrbitError, UsageError

# What `extra` of a record may carry, in the order in which a line shows it. `peer`: a node's id and
# incarnation; `reason`: a PathReason or the code of an error; `path`: rdma or tcp; `node`: the id
# of the node that logs; `left_out`: lines like this one that were not written.
FIELDS: Final = ("event", "node", "peer", "path", "reason", "left_out")
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """One JSON object a line: `ts` (UTC, ISO 8601), `level`, `logger`, `message`, those of FIELDS
    that the record carries, and `error`, `code` and `traceback` of an exception.
    """

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "ts": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in FIELDS:
            value = getattr(record, name, None)
            if value is not None:
                line[name] = value if isinstance(value, int | float) else str(value)
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            line["error"] = str(error)
            line["code"] = error.code if isinstance(error, OrbitError) else type(error).__name__
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class _Handler(logging.StreamHandler[TextIO]):
    """Ours, so that configuring again replaces it and nothing else."""


def configure_logging(
    level: str | int = "INFO", json: bool = False, stream: TextIO | None = None
) -> logging.Handler:
    """Write what orbit logs, from `level` up, to `stream` (stderr), as text or as JSON lines.

    Calling it again changes what it set up before. Other handlers stay, and records are no longer
    handed to the root logger, so that no line is written twice; returns the handler, for who wants
    to take it off. Raises UsageError: there is no such level.
    """
    number = level if isinstance(level, int) else logging.getLevelName(level.strip().upper())
    if not isinstance(number, int):
        raise UsageError(
            f"{level!r} is not a log level", hint="debug, info, warning, error or critical"
        )
    handler = _Handler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter() if json else logging.Formatter(_TEXT))
    logger = logging.getLogger("orbit")
    for old in [h for h in logger.handlers if isinstance(h, _Handler)]:
        logger.removeHandler(old)
    logger.addHandler(handler)
    logger.setLevel(number)
    logger.propagate = False
    return handler
