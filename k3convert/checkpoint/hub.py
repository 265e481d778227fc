"""A source named by a hub id: found in the local hub cache, or fetched into it when asked."""

from __future__ import annotations

import re
from pathlib import Path

from k3convert.checkpoint.hf_folder import CONFIG_NAME, INDEX_NAME, SINGLE_NAME, read_index
from k3convert.checkpoint.member_paths import unsafe_reason
from k3convert.errors import IncompleteCheckpoint, NotPossibleHere, PathEscape, UsageError

_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+?)(@(?P<revision>[\w./-]+))?")


def resolve_source(source: str, *, download: bool) -> Path:
    """The folder of a source: the path itself, or the snapshot of a hub id in the local cache.

    Args:
        source: a path, or ``owner/name`` with an optional ``@revision``.
        download: fetch what the cache lacks, shard by shard.

    Raises:
        UsageError: neither a folder nor a hub id.
        IncompleteCheckpoint: the cache does not hold the snapshot, or lacks shards of it.
        NotPossibleHere: the hub cannot be reached.
        PathEscape: the hub names files that would leave the repository.
    """
    path = Path(source)
    if path.is_dir():
        return path
    found = _HUB_ID.fullmatch(source)
    if found is None or path.exists() or source.startswith((".", "/", "~")):
        raise UsageError(f"{source} is not a folder" + ("" if found else ", nor a hub id owner/name[@revision]"))
    repo, revision = found["repo"], found["revision"]
    for part in (repo, revision or "main"):
        if reason := unsafe_reason(part):
            raise UsageError(f"{source} is not a folder, nor a hub id: {part!r} {reason}")
    return _download(repo, revision) if download else _cached(repo, revision)


def _cached(repo: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(repo, revision=revision, local_files_only=True))
    except HFValidationError as error:
        raise UsageError(f"{repo} is not a folder, nor a hub id: {error}") from error
    except (LocalEntryNotFoundError, ValueError) as error:
        raise IncompleteCheckpoint(
            f"{repo} is not in the local hub cache" + (f" at revision {revision}" if revision else ""),
            hint="--download fetches it, or give the path of a folder",
        ) from error
    missing = _missing_shards(folder)
    if missing:
        raise IncompleteCheckpoint(
            f"{repo}: {len(missing)} shards are not in the local cache",
            offenders=missing,
            hint="--download fetches them, shard by shard",
        )
    return folder


def _missing_shards(folder: Path) -> list[str]:
    index = folder / INDEX_NAME
    names = read_index(index).shard_names if index.exists() else [SINGLE_NAME]
    return [name for name in names if not (folder / name).exists()]


def _download(repo: str, revision: str | None) -> Path:
    from httpx import HTTPError
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        info = HfApi().model_info(repo, revision=revision)
        names = sorted(sibling.rfilename for sibling in info.siblings or [])
        if CONFIG_NAME not in names:
            raise IncompleteCheckpoint(f"{repo} has no {CONFIG_NAME}")
        escapes = [f"{name!r} {reason}" for name in names if (reason := unsafe_reason(name))]
        if escapes:
            raise PathEscape(f"{repo}: {len(escapes)} file names leave the repository", offenders=escapes)
        weights_last = sorted(names, key=lambda name: (name.endswith(".safetensors"), name))
        folders = [Path(hf_hub_download(repo, name, revision=info.sha)) for name in weights_last]
        return folders[weights_last.index(CONFIG_NAME)].parent
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, HTTPError, OSError) as error:
        raise NotPossibleHere(
            f"{repo} cannot be fetched: {error}", hint="what was fetched stays in the cache"
        ) from error
