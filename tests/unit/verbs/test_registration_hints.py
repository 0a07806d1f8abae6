"""What a refused registration tells a person: C37 and the counting part of C51."""

from __future__ import annotations

import asyncio
import errno

import pytest

from orbit.errors import DeviceError
from orbit.testing.memory_rig import PoolSettings, failed
from orbit.verbs.registration_hints import _out_of_memory, registration_hint
from tests.contract.pinned_memory_rigs import open_pool


def reader(mappings: int, limit: int, pinned_kib: int = 40) -> dict[str, str]:
    return {
        "/proc/self/maps": "7f00-7f01 rw-p\n" * mappings,
        "/proc/sys/vm/max_map_count": f"{limit}\n",
        "/proc/self/status": f"Name:\tpython\nVmPin:\t{pinned_kib:8} kB\n",
    }


def test_no_memory_names_both_limits() -> None:
    hint = registration_hint(errno.ENOMEM)
    assert "ulimit -l" in hint
    assert "vm.max_map_count" in hint


def test_the_limit_that_is_spent_comes_first() -> None:
    few = _out_of_memory(reader(100, 65_530).__getitem__)
    assert few.startswith("the limit of locked memory")
    assert "40960 bytes are pinned" in few
    assert "100 of 65530 mappings" in few
    many = _out_of_memory(reader(1_990, 2_000).__getitem__)
    assert many.startswith("the process has too many mappings: 1990 of 2000")
    unreadable = _out_of_memory(lambda path: "")
    assert "unknown" in unreadable


def test_bad_addresses_name_read_only_and_foreign_memory() -> None:
    hint = registration_hint(errno.EFAULT)
    assert "read-only" in hint
    assert "device memory" in hint
    assert registration_hint(errno.EBUSY) == ""


@pytest.mark.parametrize(
    ("number", "word"),
    [(errno.ENOMEM, "ulimit"), (errno.EFAULT, "foreign"), (errno.EINVAL, "whole huge pages")],
)
def test_the_hint_comes_with_the_error_of_a_device(number: int, word: str) -> None:
    async def main() -> None:
        async with open_pool(PoolSettings(), 1) as rig:
            rig.scripted[0].fail_verb("reg_mr", number)
            error = await failed(rig.memory.register(memoryview(bytearray(9))), DeviceError)
            assert isinstance(error, DeviceError)
            assert word in error.hint
            rig.scripted[0].fail_verb("reg_mr", number)
            busy = await failed(rig.memory.allocate(9), Exception)
            assert word in getattr(busy, "hint", "")

    asyncio.run(main())


def test_registering_over_and_over_splits_no_mapping() -> None:
    """C51: no advice is given per registration that would cut the caller's mapping in pieces."""

    def mappings() -> int:
        with open("/proc/self/maps") as maps:
            return sum(1 for _ in maps)

    async def main() -> None:
        async with open_pool(PoolSettings(budget_bytes=64 << 20), 1) as rig:
            memory = memoryview(bytearray(8 << 20))
            before = 0
            for number in range(400):
                begin = number * 20_011 % (7 << 20)
                held = await rig.memory.register(memory[begin : begin + 1 + number * 97 % 65_536])
                await rig.memory.deregister(held)
                before = before or mappings()
            assert abs(mappings() - before) <= 50

    asyncio.run(main())
