"""What callers pass as a payload or a transport, checked and brought into one form."""

from __future__ import annotations

from ...errors import UsageError
from ...memory.buffer import BufferExport
from ...model import PathName

_TRANSPORTS = {"tcp": PathName.TCP, "rdma": PathName.RDMA, "auto": None}


def payload_of(payload: object, copied_bytes_max: int) -> bytes | memoryview:
    """Bytes of its own up to `copied_bytes_max`, so that the caller may change its buffer at once;
    a view of the caller's memory above. Raises UsageError for what is no contiguous buffer.
    """
    if type(payload) is bytearray and len(payload) <= copied_bytes_max:
        return bytes(payload)
    export = BufferExport(payload)
    view = export.view
    if view.nbytes > copied_bytes_max:
        return view
    data = bytes(view)
    del view
    export.release()
    return data


def is_plain(view: memoryview) -> bool:
    """Whether it is one piece of unsigned bytes already, as received payloads are: a BufferExport
    of it would be the same view.
    """
    return view.format == "B" and view.ndim == 1 and view.contiguous


def transport_of(value: object) -> PathName | None:
    """Of a Transport, a PathName or its text; None for "auto". Raises UsageError."""
    try:
        return _TRANSPORTS[str(value).strip().lower()]
    except KeyError:
        raise UsageError(f"transport={value!r} is none of auto, rdma, tcp") from None
