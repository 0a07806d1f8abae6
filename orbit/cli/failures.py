"""How a command ends: exit statuses, and one line (with one hint) for what a person can act on.

Knows which error means which status. Prints no traceback for anything in orbit's error tree.
"""

from __future__ import annotations

import json
import signal
import sys
from enum import IntEnum

import click

from ..errors import (
    ConfigError,
    InternalError,
    OrbitError,
    PathUnavailable,
    PeerError,
    UnknownHandle,
    UsageError,
)


class ExitStatus(IntEnum):
    """What a shell sees. docs/reference/cli.md has the same table."""

    OK = 0
    FAILED = 1  # the transfer, or the local file, failed
    USAGE = 2  # an option, a ticket or a file name is wrong
    PEER = 3  # the other side cannot be reached, refused, was lost, or does not serve this any more
    PATH = 4  # the demanded path cannot be had
    INTEGRITY = 5  # the bytes are not the ones the ticket names
    WARNINGS = 6  # of a diagnosis: it works, less well or under a condition
    UNFIT = 7  # of a diagnosis: what was asked for cannot work here
    INTERRUPTED = 130  # SIGINT, as shells count it
    TERMINATED = 143  # SIGTERM


class Stopped(Exception):
    """A signal asked the command to stop, and everything it held has been given back."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"stopped by {number.name}")
        self.number = number


class LocalFileError(OrbitError):
    """A file on this machine cannot be read or written."""

    code = "local_file"

    @classmethod
    def of(cls, path: object, error: OSError, *, hint: str = "") -> LocalFileError:
        return cls(f"{path}: {error.strerror or error}", hint=hint)


class IntegrityError(OrbitError):
    """What arrived is not what the ticket names."""

    code = "integrity"


class ChildFailed(OrbitError):
    """A child process ended badly, and has said on stderr why."""

    code = "child"

    def __init__(self, name: str, status: int) -> None:
        super().__init__(f"{name} ended with status {status}")
        self.status = status


def status_of(error: BaseException) -> ExitStatus:
    """The exit status for an error that ended a command."""
    match error:
        case KeyboardInterrupt():
            return ExitStatus.INTERRUPTED
        case Stopped():
            interrupted = error.number == signal.SIGINT
            return ExitStatus.INTERRUPTED if interrupted else ExitStatus.TERMINATED
        case UsageError() | ConfigError() | click.UsageError():
            return ExitStatus.USAGE
        case PathUnavailable():
            return ExitStatus.PATH
        case PeerError() | UnknownHandle():
            return ExitStatus.PEER
        case IntegrityError():
            return ExitStatus.INTEGRITY
        case ChildFailed() if error.status in set(ExitStatus) - {ExitStatus.OK}:
            return ExitStatus(error.status)
    return ExitStatus.FAILED


def report(error: OrbitError | click.ClickException, *, as_json: bool) -> None:
    """Say on stderr what went wrong, in one line, and what to do about it in another."""
    if isinstance(error, OrbitError):
        code, message, hint = error.code, str(error), error.hint
    else:
        code, message, hint = "usage", error.format_message(), _usage_hint(error)
    if isinstance(error, InternalError):
        hint = hint or "this is a bug in orbit; please report it with what led to it"
    if as_json:
        line = json.dumps({"error": {"code": code, "message": message, "hint": hint}})
        print(line, file=sys.stderr)
        return
    print(f"orbit: {_one_line(message)}", file=sys.stderr)
    if hint:
        print(f"  hint: {_one_line(hint)}", file=sys.stderr)


def _usage_hint(error: click.ClickException) -> str:
    context = getattr(error, "ctx", None)
    return f"try: {context.command_path} --help" if context is not None else ""


def _one_line(text: str) -> str:
    return " ".join(text.split())
