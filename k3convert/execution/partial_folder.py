"""``DST.partial``: where a result grows until it is whole, and how it gets its final name.

The folder holds ``result/`` (the destination to be), ``plan.json`` (what is being done to which source), a journal a
part, and notes of failed ranks. It outlives a kill; the same command goes on from it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from k3convert.checkpoint.json_text import parse_json
from k3convert.errors import DestinationExists, ResumeRefused, UsageError, WorkerDied
from k3convert.planning.places import partial_path

RESULT = "result"
PLAN = "plan.json"
AT_FDCWD = -100
RENAME_EXCHANGE = 2
PROCESS_STARTED = time.time()
START_SKEW_S = 5.0
_OURS = re.compile(r"result|replaced|plan\.json(\.\d+)?|part-.+\.(lock|journal)|\.?failed-.+|ready-.+")
_CONSEQUENCES = {"files": 2, "num_items": 1}  # they follow from options and sources, which come first


class PartialFolder:
    """The growing result of one destination."""

    def __init__(self, destination: Path) -> None:
        self.destination = destination
        self.folder = partial_path(destination)
        self.result = self.folder / RESULT
        self._lock: int | None = None

    def check_destination(self, *, overwrite: bool) -> None:
        """Refuse a destination that is taken, before any work is done.

        Raises:
            DestinationExists: it exists, and ``overwrite`` is off or it is no checkpoint folder.
            UsageError: its parent is no folder.
        """
        if not self.destination.parent.is_dir():
            raise UsageError(f"{self.destination.parent} is not a folder")
        if not (self.destination.exists() or self.destination.is_symlink()):
            return
        if not overwrite:
            raise DestinationExists(
                f"{self.destination} exists", hint="--overwrite replaces it, once the new result is whole"
            )
        if self.destination.is_symlink() or not self.destination.is_dir():
            raise DestinationExists(f"{self.destination} is not a folder; it is not replaced")
        if not _replaceable(self.destination):
            raise DestinationExists(f"{self.destination} holds files that are no checkpoint; it is not replaced")

    def claim(self, identity: Mapping[str, Any], *, resume: bool) -> bool:
        """Make the folder ready for this plan; whether an earlier run is being continued.

        Raises:
            DestinationExists: the folder is there, and holds what no conversion wrote.
            ResumeRefused: an earlier run of another source or of other options lies there.
            UsageError: what is to be discarded is being written by another process.
        """
        self._check_ours()
        path = self.folder / PLAN
        published = path.exists() and not self.result.is_dir()
        if published or not resume:
            self._check_idle()
            self.discard()
        self.result.mkdir(parents=True, exist_ok=True)
        if path.exists():
            self._compare(path, identity)
            return True
        temporary = path.with_name(f"{PLAN}.{os.getpid()}")
        temporary.write_text(json.dumps(identity, indent=1, sort_keys=True))
        _sync_path(temporary)
        os.replace(temporary, path)
        return False

    def lock(self, part: str) -> None:
        """Hold this part for this process.

        Raises:
            UsageError: another process holds it.
        """
        descriptor = os.open(self.folder / f"{part}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            raise UsageError(f"{self.folder}: another process is writing {part} of this destination") from error
        self._lock = descriptor

    def _check_ours(self) -> None:
        """Refuse a folder of somebody else's under the same name: it would be removed at the end."""
        strangers = [path.name for path in self.folder.glob("*") if not _OURS.fullmatch(path.name)]
        if strangers:
            raise DestinationExists(
                f"{self.folder} holds {len(strangers)} files that no conversion wrote; it is not used",
                offenders=sorted(strangers),
                hint="rename it, or choose another destination",
            )

    def _check_idle(self) -> None:
        for path in sorted(self.folder.glob("*.lock")):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise UsageError(f"{self.folder}: another process is writing {path.stem}") from error
            finally:
                os.close(descriptor)

    def _compare(self, path: Path, identity: Mapping[str, Any]) -> None:
        try:
            earlier = parse_json(path.read_bytes())
        except ValueError as error:
            raise ResumeRefused(
                f"{path} is damaged: {error}", hint="--no-resume starts anew and discards the partial result"
            ) from error
        wanted = json.loads(json.dumps(identity))
        differences = list(_differences("", earlier, wanted))
        if differences:
            raise ResumeRefused(
                f"{self.folder} holds a partial result that differs in {len(differences)} points",
                offenders=differences,
                hint="repeat the earlier command to finish it, or --no-resume to discard it",
            )

    def publish(self, *, overwrite: bool) -> None:
        """Give the finished result its final name; an old destination is exchanged, then removed.

        Raises:
            DestinationExists: the name was taken meanwhile, and may not be overwritten; the result stays here.
        """
        _sync_tree(self.result)
        self.check_destination(overwrite=overwrite)
        if self.destination.exists():
            if not _exchange(self.result, self.destination):
                old = self.folder / "replaced"
                os.rename(self.destination, old)
                os.rename(self.result, self.destination)
        else:
            os.rename(self.result, self.destination)
        _sync_path(self.destination.parent)
        self.discard()

    def release(self) -> None:
        """Let go of the part that is held."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def discard(self) -> None:
        """Remove the folder and everything in it."""
        self.release()
        if self.folder.exists():
            shutil.rmtree(self.folder)

    def used_bytes(self) -> int:
        """Space that the partial result takes already."""
        return sum(path.stat().st_blocks * 512 for path in self.folder.rglob("*") if path.is_file())

    def fail(self, run: str, rank: int, message: Mapping[str, Any]) -> None:
        """Leave a failed rank's reason for the other ranks of the run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.folder / f".failed-{run}-{rank}"
        temporary.write_text(json.dumps({"rank": rank, **message}))
        os.replace(temporary, self.folder / f"failed-{run}-{rank}.json")

    def check_failures(self, run: str) -> None:
        """Stop if another rank of this run has failed.

        Raises:
            WorkerDied: with the other rank's reason and exit code.
        """
        for path in sorted(self.folder.glob(f"failed-{run}-*.json")):
            # rank 0 removes old notes, perhaps just now
            with suppress(FileNotFoundError):
                if not _is_of_earlier_attempt(path):
                    document = parse_json(path.read_bytes())
                    error = WorkerDied(
                        f"rank {document['rank']} failed: {document['message']}", hint=document.get("hint")
                    )
                    error.code, error.exit_code = document["code"], document["exit_code"]
                    raise error

    def forget_failures(self, run: str) -> None:
        """Remove this run's notes of failures that an earlier attempt left."""
        for path in self.folder.glob(f"failed-{run}-*.json"):
            if _is_of_earlier_attempt(path):
                path.unlink()

    def mark_ready(self, run: str) -> None:
        """Tell the other ranks of the run that the folder may be used."""
        (self.folder / f"ready-{run}").touch()

    def wait_ready(self, run: str, timeout_s: float) -> None:
        """Wait until rank 0 has prepared the folder.

        Raises:
            WorkerDied: rank 0 failed, or did not come within the time.
        """
        deadline = time.monotonic() + timeout_s
        while not (self.folder / f"ready-{run}").exists():
            self.check_failures(run)
            if time.monotonic() > deadline:
                raise WorkerDied(f"rank 0 did not prepare {self.folder} within {timeout_s:.0f} s")
            time.sleep(0.05)


def _is_of_earlier_attempt(note: Path) -> bool:
    """Whether a note is older than this process; its peers may have started a little earlier."""
    return note.stat().st_mtime < PROCESS_STARTED - START_SKEW_S


def _replaceable(folder: Path) -> bool:
    """A finished checkpoint, or an empty folder; a ``config.json`` alone may be anything."""
    names = {path.name for path in folder.iterdir()}
    return not names or bool(names & {".metadata", "model.safetensors.index.json", "model.safetensors"})


def _differences(where: str, earlier: Any, wanted: Any) -> list[str]:
    if isinstance(earlier, dict) and isinstance(wanted, dict):
        out = []
        for key in sorted(set(earlier) | set(wanted), key=lambda key: (_CONSEQUENCES.get(key, 0), key)):
            inside = f"{where}.{key}" if where else key
            out += _differences(inside, earlier.get(key, "absent"), wanted.get(key, "absent"))
        return out
    return [] if earlier == wanted else [f"{where}: it was {earlier!r}, it is {wanted!r}"]


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one step; False where the kernel or the file system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(other))


def _sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(folder: Path) -> None:
    for parent, _, files in os.walk(folder):
        for name in files:
            _sync_path(Path(parent) / name)
        _sync_path(Path(parent))
