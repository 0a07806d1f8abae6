"""Where providers depart from the InfiniBand specification: the one table, so that no other module
knows a vendor.

What can be measured at start (does a window enforce its range?) is measured and not read here; the
row then says what to expect. The C helper and the fake device repeat two of the numbers, and a test
holds them to this table.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Quirks:
    """One row. The defaults are the specification."""

    name: str
    vendor_id: int = 0
    enforces_window_range: bool = True  # else a window opens its whole parent
    with_inv_flag: int = 0x8  # in wc_flags of a receive with invalidate
    last_wqe_event: bool = True  # after a queue pair on a shared receive queue went to ERR
    endless_retry_cnt: int | None = None  # this retry_cnt never gives up
    invalidate_ends_kernel: bool = False  # of a window that is not bound
    bound_window_blocks_destroy: bool = False  # of its queue pair, for 50 s
    remote_key_without_access: bool = True  # a region has an rkey even if nothing remote is allowed


SPECIFICATION = Quirks("specification")

RXE = Quirks(
    "rxe",
    vendor_id=0xFFFFFF,
    enforces_window_range=False,
    with_inv_flag=0x4,
    last_wqe_event=False,
    endless_retry_cnt=7,
    invalidate_ends_kernel=True,
    bound_window_blocks_destroy=True,
    remote_key_without_access=False,
)

TABLE = (RXE,)


def quirks_of(vendor_id: int) -> Quirks:
    """The row of a device (`DeviceLimits.vendor_id`); the specification for an unknown one."""
    for row in TABLE:
        if row.vendor_id == vendor_id:
            return row
    return SPECIFICATION
