"""Errors that their reader can act on, and the exit codes of the command line.

Library code below the file layer raises ``ValueError`` or ``KeyError``; a ``K3Error`` begins where a file or a user
is involved. Every class has a stable ``code`` for scripts and an ``exit_code`` for shells.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from enum import IntEnum

SHOWN_OFFENDERS = 5
NO_SPACE_CODES = (errno.ENOSPC, errno.EDQUOT)


class ExitCode(IntEnum):
    """What the process tells its caller."""

    DONE = 0
    VERDICT_NO = 1
    USAGE = 2
    NOT_POSSIBLE_HERE = 3
    BAD_INPUT = 4
    WORKER_DIED = 5
    OUR_BUG = 70
    INTERRUPTED = 130


class K3Error(Exception):
    """A stable code, a message, every offender and a next step."""

    code = "error"
    exit_code = ExitCode.USAGE

    def __init__(
        self, message: str, *, cause: str | None = None, hint: str | None = None, offenders: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.cause = cause
        self.hint = hint
        self.offenders = tuple(offenders)

    def lines(self) -> list[str]:
        """The error as lines for a person: the first few offenders, and how many more there are."""
        out = [f"error[{self.code}]: {self}"]
        out += [f"  - {offender}" for offender in self.offenders[:SHOWN_OFFENDERS]]
        if len(self.offenders) > SHOWN_OFFENDERS:
            out.append(f"  ... and {len(self.offenders) - SHOWN_OFFENDERS} more (all of them with --json)")
        if self.cause:
            out.append(f"  cause: {self.cause}")
        if self.hint:
            out.append(f"  hint: {self.hint}")
        return out

    def document(self) -> dict[str, object]:
        """The error as the JSON document that ``--json`` prints."""
        return {
            "error": {
                "code": self.code,
                "message": str(self),
                "cause": self.cause,
                "hint": self.hint,
                "offenders": list(self.offenders),
                "num_offenders": len(self.offenders),
            },
            "exit_code": int(self.exit_code),
        }


class UsageError(K3Error):
    """The command cannot mean anything as it was typed."""

    code = "usage"
    exit_code = ExitCode.USAGE


class NotPossibleHere(K3Error):
    """A device, a package or a capability is missing on this machine."""

    code = "not-possible-here"
    exit_code = ExitCode.NOT_POSSIBLE_HERE


class NoSpace(NotPossibleHere):
    """The destination's file system cannot hold the result."""

    code = "no-space"


class BadInput(K3Error):
    """A file that was given is wrong. Subclasses say how."""

    code = "bad-input"
    exit_code = ExitCode.BAD_INPUT


class BadConfig(BadInput):
    """``config.json`` is missing, contradicts itself or describes no K3 network."""

    code = "bad-config"


class BadShard(BadInput):
    """A safetensors file breaks the format, or is not a safetensors file at all."""

    code = "bad-shard"


class BadIndex(BadInput):
    """``model.safetensors.index.json`` and the shards disagree, or a name in it leaves the folder."""

    code = "bad-index"


class IncompleteCheckpoint(BadInput):
    """Files or tensors that the checkpoint names are not there."""

    code = "incomplete-checkpoint"


class CensusMismatch(BadInput):
    """The tensors found are not the tensors that the config calls for."""

    code = "census-mismatch"


class BadQuantization(BadInput):
    """Packed weights, scales and the quantization config do not belong together."""

    code = "bad-quantization"


class UnrepresentableBlocks(BadInput):
    """Blocks whose values have no finite bf16 form."""

    code = "unrepresentable-blocks"


class BadMetadata(BadInput):
    """A DCP ``.metadata`` file is damaged, hostile or of an unknown version."""

    code = "bad-metadata"


class DigestMismatch(BadInput):
    """Bytes that were read are not the bytes that were recorded."""

    code = "digest-mismatch"


class PathEscape(BadInput):
    """A file name inside a checkpoint points outside its folder."""

    code = "path-escape"


class UnmappedNames(BadInput):
    """Tensor names that no mapping rule knows."""

    code = "unmapped-names"


class DestinationExists(UsageError):
    """The destination is there already and may not be replaced without being asked."""

    code = "destination-exists"


class ResumeRefused(UsageError):
    """A partial result exists, but of another source or of other options."""

    code = "resume-refused"


class WorkerDied(K3Error):
    """A worker or another rank failed or stopped answering."""

    code = "worker-died"
    exit_code = ExitCode.WORKER_DIED


class Interrupted(K3Error):
    """The user, or the system on its behalf, ended the command."""

    code = "interrupted"
    exit_code = ExitCode.INTERRUPTED


def error_of_system(error: OSError) -> NotPossibleHere:
    """What the operating system refused, as an error for its reader."""
    what = error.strerror or str(error)
    if error.errno in NO_SPACE_CODES:
        return NoSpace(
            f"the destination's file system is full: {what}",
            hint="free some space and repeat the command: it goes on where it stopped",
        )
    where = " and ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
    return NotPossibleHere(f"{where}: {what}" if where else f"the system refused: {what}")
