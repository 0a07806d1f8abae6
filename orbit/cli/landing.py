"""Where fetched bytes land: a reserved temporary file beside the final name, then a rename.

The final name holds the whole payload or is not touched. Space is taken before a byte is fetched,
so a full disk is known at once. Knows nothing of transfers.
"""

from __future__ import annotations

import asyncio
import os
import stat
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from ..errors import UsageError
from .failures import LocalFileError

_WRITE_BYTES = 16 << 20  # a signal is noticed between two pieces


def destination(output: Path, name: str) -> Path:
    """The final path: `output` itself, or `name` in it when it is a directory."""
    if output.is_dir():
        return output / name
    if not output.parent.is_dir():
        raise UsageError(f"{output.parent}: no such directory")
    if output.name in ("", ".", ".."):
        raise UsageError(f"{output}: not a file name")
    return output


class Landing:
    """A context manager: `reserve` on entry, `write`, `commit`; leaves nothing unless committed."""

    def __init__(self, final: Path, nbytes: int, *, replace: bool) -> None:
        self.final = final
        self._nbytes = nbytes
        self._replace = replace
        self._temporary: Path | None = None
        self._fd = -1

    def __enter__(self) -> Self:
        """Raises LocalFileError (no space, no permission) and UsageError (the name is taken)."""
        self._check_final()
        try:
            # The final name may be as long as names get, so only a part of it is reused.
            self._fd, name = tempfile.mkstemp(
                prefix=f".{self.final.name[:32]}.", suffix=".part", dir=self.final.parent
            )
            self._temporary = Path(name)
            if self._nbytes:
                os.posix_fallocate(self._fd, 0, self._nbytes)
        except OSError as error:
            self._discard()
            raise LocalFileError.of(
                self.final, error, hint=f"{self._nbytes} bytes are needed"
            ) from error
        except BaseException:
            self._discard()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._discard()

    async def write(self, payload: memoryview) -> None:
        """Write everything from the start. Raises LocalFileError.

        In this thread on purpose: a worker thread could not be cancelled, and would write to a
        descriptor that was closed under it.
        """
        try:
            offset = 0
            while offset < len(payload):
                offset += os.pwrite(self._fd, payload[offset : offset + _WRITE_BYTES], offset)
                await asyncio.sleep(0)
            os.fsync(self._fd)
        except OSError as error:
            raise LocalFileError.of(self.final, error) from error

    def commit(self) -> None:
        """Give the file its name. Raises LocalFileError; UsageError when it was taken meanwhile."""
        assert self._temporary is not None
        try:
            os.fchmod(self._fd, 0o666 & ~_umask())  # mkstemp made it private
            if self._replace:
                os.replace(self._temporary, self.final)
            else:
                _rename_to_free_name(self._temporary, self.final)
            self._temporary = None
            _sync_directory(self.final.parent)
        except FileExistsError as error:
            raise _taken(self.final) from error
        except OSError as error:
            raise LocalFileError.of(self.final, error) from error

    def _check_final(self) -> None:
        try:
            mode = os.lstat(self.final).st_mode
        except FileNotFoundError:
            return
        except OSError as error:
            raise LocalFileError.of(self.final, error) from error
        if not stat.S_ISREG(mode):
            raise UsageError(f"{self.final}: exists and is not a regular file")
        if not self._replace:
            raise _taken(self.final)

    def _discard(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._temporary is not None:
            self._temporary.unlink(missing_ok=True)
            self._temporary = None


def _taken(final: Path) -> UsageError:
    return UsageError(f"{final}: exists already", hint="--force replaces it")


def _rename_to_free_name(temporary: Path, final: Path) -> None:
    """Rename, but never over a file that appeared meanwhile. Raises FileExistsError."""
    try:
        os.link(temporary, final)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links: check and rename is the best there is
        if os.path.lexists(final):
            raise FileExistsError(str(final)) from None
        os.rename(temporary, final)
    else:
        os.unlink(temporary)


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _umask() -> int:
    mask = os.umask(0)  # the only way to ask for it is to set it
    os.umask(mask)
    return mask
