# SPDX-License-Identifier: Apache-2.0
"""Errors of kvstrata as exceptions: one class for each code, so that `except NotFound` works.

Every error has `code` (gRPC's number), `reason` (stable, for programs: "PLAN_UNKNOWN") and `message`
(for people: the field, its value, what to do).
"""

from __future__ import annotations


class KvstrataError(Exception):
    """Base of all errors; used itself for codes that have no class."""

    code: int = 2

    def __init__(self, message: str, reason: str = "", code: int | None = None) -> None:
        super().__init__(f"{reason}: {message}" if reason else message)
        self.message = message
        self.reason = reason
        if code is not None:
            self.code = code


class InvalidArgument(KvstrataError):
    code = 3


class DeadlineExceeded(KvstrataError):
    code = 4


class NotFound(KvstrataError):
    code = 5


class AlreadyExists(KvstrataError):
    code = 6


class PermissionDenied(KvstrataError):
    code = 7


class ResourceExhausted(KvstrataError):
    code = 8


class FailedPrecondition(KvstrataError):
    code = 9


class Aborted(KvstrataError):
    code = 10


class OutOfRange(KvstrataError):
    code = 11


class Unimplemented(KvstrataError):
    code = 12


class Internal(KvstrataError):
    code = 13


class Unavailable(KvstrataError):
    code = 14


class DataLoss(KvstrataError):
    code = 15


class Unauthenticated(KvstrataError):
    code = 16


_BY_CODE: dict[int, type[KvstrataError]] = {c.code: c for c in KvstrataError.__subclasses__()}


def error_of(code: int, reason: str, message: str) -> KvstrataError:
    """The exception of a code."""
    return _BY_CODE.get(code, KvstrataError)(message, reason, code)
