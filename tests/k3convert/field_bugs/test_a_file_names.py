"""Field reports A9, A10 and A17: file names that a checkpoint names, and the links of a hub cache."""

from __future__ import annotations

import filecmp
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from k3convert.errors import BadIndex, BadInput, BadShard, PathEscape

Convert = Callable[..., object]
EditJson = Callable[[Path, Callable[[dict[str, Any]], None]], None]
Refused = Callable[..., str]

INDEX = "model.safetensors.index.json"
SHARD = "model-00002-of-000008.safetensors"


@pytest.fixture
def name_shard(edit_json: EditJson) -> Callable[[Path, object], None]:
    """Make an index call one shard by another name."""

    def edit(folder: Path, name: object) -> None:
        def change(index: dict[str, Any]) -> None:
            index["weight_map"] = {
                tensor: name if shard == SHARD else shard for tensor, shard in index["weight_map"].items()
            }

        edit_json(folder / INDEX, change)

    return edit


@pytest.mark.parametrize(
    "name",
    [
        "../evil.safetensors",
        "a/../../evil.safetensors",
        "./evil.safetensors",
        "..\\evil.safetensors",
        "C:evil.safetensors",
        "evil\0.safetensors",
        "evil\n.safetensors",
        "~/evil.safetensors",
        "",
        ".",
        "..",
        "\ud800.safetensors",
    ],
)
def test_a9_a_shard_name_that_leaves_the_folder_is_refused(
    small: Path, name_shard: Callable[[Path, object], None], refused_by_hf_to_dcp: Refused, name: str
) -> None:
    shutil.move(small / SHARD, small.parent / "evil.safetensors")
    name_shard(small, name)

    message = refused_by_hf_to_dcp(small, PathEscape)

    assert INDEX in message
    assert repr(name) in message


def test_a9_an_absolute_shard_name_is_refused(
    small: Path, name_shard: Callable[[Path, object], None], refused_by_hf_to_dcp: Refused
) -> None:
    evil = Path(shutil.move(small / SHARD, small.parent / "evil.safetensors"))
    name_shard(small, str(evil))

    message = refused_by_hf_to_dcp(small, PathEscape)

    assert f"{str(evil)!r} is an absolute path" in message


@pytest.mark.parametrize("value", [5, None, True, ["a"], {"a": 1}])
def test_a9_a_shard_name_that_is_no_text_is_refused(
    small: Path, name_shard: Callable[[Path, object], None], refused_by_hf_to_dcp: Refused, value: object
) -> None:
    name_shard(small, value)

    message = refused_by_hf_to_dcp(small, PathEscape)

    assert f"{value!r} is not a file name" in message


def test_a9_every_escaping_name_is_listed(small: Path, edit_json: EditJson, refused_by_hf_to_dcp: Refused) -> None:
    def change(index: dict[str, Any]) -> None:
        index["weight_map"] |= {f"t{number}": f"../{number}.safetensors" for number in range(7)}

    edit_json(small / INDEX, change)

    message = refused_by_hf_to_dcp(small, PathEscape)

    assert "7 shard names" in message
    assert all(f"../{number}.safetensors" in message for number in range(7))


@pytest.mark.parametrize("absolute", [True, False])
def test_a9_a_shard_that_is_a_link_out_of_the_folder_is_refused(
    small: Path, refused_by_hf_to_dcp: Refused, absolute: bool
) -> None:
    evil = Path(shutil.move(small / SHARD, small.parent / "evil.safetensors"))
    (small / SHARD).symlink_to(evil if absolute else Path("..") / evil.name)

    message = refused_by_hf_to_dcp(small, PathEscape)

    assert SHARD in message
    assert str(evil) in message


def test_a9_an_asset_that_is_a_link_out_of_the_folder_is_refused(small: Path, refused_by_hf_to_dcp: Refused) -> None:
    (small / "notes.txt").symlink_to("/etc/hostname")

    message = refused_by_hf_to_dcp(small, PathEscape)

    assert "notes.txt" in message


def test_a9_a_linked_folder_out_of_the_checkpoint_is_refused(small: Path, refused_by_hf_to_dcp: Refused) -> None:
    (small / "figures").symlink_to("/etc")

    message = refused_by_hf_to_dcp(small, PathEscape)

    assert "figures" in message


def test_a9_a_link_inside_the_folder_is_followed(
    small: Path, tmp_path: Path, to_dcp: Convert, to_hf: Convert, small_source: Path
) -> None:
    (small / SHARD).rename(small / "real.safetensors.data")
    (small / SHARD).symlink_to("real.safetensors.data")

    to_dcp(small, tmp_path / "dcp")
    to_hf(tmp_path / "dcp", tmp_path / "hf")

    assert filecmp.cmp(small_source / SHARD, tmp_path / "hf" / SHARD, shallow=False)


def test_a9_a_shard_that_is_a_link_to_itself_is_refused(small: Path, refused_by_hf_to_dcp: Refused) -> None:
    (small / SHARD).unlink()
    (small / SHARD).symlink_to(SHARD)

    message = refused_by_hf_to_dcp(small)

    assert SHARD in message


def test_a9_a_name_that_is_too_long_for_the_file_system_is_refused(
    small: Path, name_shard: Callable[[Path, object], None], refused_by_hf_to_dcp: Refused
) -> None:
    name_shard(small, "x" * 300 + ".safetensors")

    message = refused_by_hf_to_dcp(small)

    assert "too long" in message


@pytest.mark.parametrize("name", [SHARD, "notes.txt"])
def test_a9_a_pipe_is_refused_and_not_waited_for(small: Path, refused_by_hf_to_dcp: Refused, name: str) -> None:
    (small / name).unlink(missing_ok=True)
    os.mkfifo(small / name)

    message = refused_by_hf_to_dcp(small)

    assert f"{name}" in message
    assert "not a regular file" in message


def test_a9_a_folder_under_a_shards_name_is_refused(small: Path, refused_by_hf_to_dcp: Refused) -> None:
    (small / SHARD).unlink()
    (small / SHARD).mkdir()

    assert SHARD in refused_by_hf_to_dcp(small, BadShard)


def test_a9_a_file_name_that_is_not_text_is_refused_before_anything_is_written(
    small: Path, tmp_path: Path, refused_by_hf_to_dcp: Refused
) -> None:
    with open(os.fsencode(small) + b"/\xff.txt", "wb"):
        pass

    message = refused_by_hf_to_dcp(small, BadInput)

    assert "UTF-8" in message
    assert not list(tmp_path.glob("*.partial"))


def test_a10_names_from_the_hub_are_checked_before_they_become_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    from k3convert.checkpoint.hub import resolve_source

    class Api:
        def model_info(self, repo: str, revision: str | None = None) -> Any:
            class Sibling:
                rfilename = "../../other/repo/resolve/main/config.json"

            class Config:
                rfilename = "config.json"

            class Info:
                sha = "0" * 40
                siblings = (Config, Sibling)

            return Info

    def fetch(*_: object, **__: object) -> str:
        raise AssertionError("a name was fetched before all were checked")

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)

    with pytest.raises(PathEscape, match="1 file names leave"):
        resolve_source("owner/name", download=True)


@pytest.mark.parametrize("source", ["owner/..", "../name", "owner/name@../../x", "owner/name@a/../b", "owner//name"])
def test_a10_a_hub_id_with_dot_segments_is_no_hub_id(source: str) -> None:
    from k3convert.checkpoint.hub import resolve_source
    from k3convert.errors import UsageError

    with pytest.raises(UsageError, match=r"is not a folder, nor a hub id"):
        resolve_source(source, download=False)


@pytest.fixture
def hub_cache(small_source: Path, tmp_path: Path) -> Path:
    """The small checkpoint as a hub cache holds it: links in ``snapshots/<revision>`` to ``blobs``."""
    repository = tmp_path / "hub" / "models--owner--name"
    revision = "a" * 40
    blobs, snapshot = repository / "blobs", repository / "snapshots" / revision
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(small_source.iterdir())):
        shutil.copyfile(path, blobs / f"{number:064x}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"{number:064x}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    return snapshot


@pytest.fixture
def read_only(hub_cache: Path) -> Iterator[Path]:
    """The cached snapshot, without write permission anywhere in the cache."""
    folders = [path for path in (hub_cache.parents[1], *hub_cache.parents[1].rglob("*")) if path.is_dir()]
    for path in folders:
        path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    yield hub_cache
    for path in folders:
        path.chmod(stat.S_IRWXU)


def listing(folder: Path) -> list[tuple[str, int, int]]:
    return sorted((str(path), path.lstat().st_size, path.lstat().st_mtime_ns) for path in folder.rglob("*"))


def test_a17_a_read_only_hub_cache_converts_and_nothing_is_written_in_it(
    read_only: Path, small_source: Path, tmp_path: Path, to_dcp: Convert, to_hf: Convert
) -> None:
    before = listing(read_only.parents[1])

    to_dcp(read_only, tmp_path / "dcp")
    to_hf(tmp_path / "dcp", tmp_path / "hf")

    assert listing(read_only.parents[1]) == before
    names = sorted(path.name for path in small_source.iterdir())
    assert filecmp.cmpfiles(small_source, tmp_path / "hf", names, shallow=False)[0] == names


def test_a17_a_relative_path_into_the_cache_works(
    hub_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to_dcp: Convert
) -> None:
    monkeypatch.chdir(hub_cache)

    to_dcp(Path("."), tmp_path / "dcp")

    assert (tmp_path / "dcp" / ".metadata").exists()


def test_a17_a_link_to_a_snapshot_works(hub_cache: Path, tmp_path: Path, to_dcp: Convert) -> None:
    (tmp_path / "k3").symlink_to(hub_cache)

    to_dcp(tmp_path / "k3", tmp_path / "dcp")

    assert (tmp_path / "dcp" / ".metadata").exists()


def test_a17_a_snapshot_whose_link_leaves_the_cache_is_refused(
    hub_cache: Path, tmp_path: Path, refused_by_hf_to_dcp: Refused
) -> None:
    target = (hub_cache / SHARD).resolve()
    shutil.move(target, tmp_path / "evil")
    (hub_cache / SHARD).unlink()
    (hub_cache / SHARD).symlink_to(tmp_path / "evil")

    assert SHARD in refused_by_hf_to_dcp(hub_cache, PathEscape)


def test_a16_a_cached_shard_that_never_arrived_is_an_interrupted_download(
    hub_cache: Path, refused_by_hf_to_dcp: Refused
) -> None:
    (hub_cache / SHARD).resolve().unlink()

    message = refused_by_hf_to_dcp(hub_cache)

    assert SHARD in message
    assert "interrupted download" in message


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_a16_a_cached_file_that_never_arrived_is_named(
    hub_cache: Path, refused_by_hf_to_dcp: Refused, name: str
) -> None:
    (hub_cache / name).resolve().unlink()

    message = refused_by_hf_to_dcp(hub_cache)

    assert name in message
    assert "interrupted download" in message


def test_a16_a_single_file_that_never_arrived_is_an_interrupted_download(
    small: Path, refused_by_hf_to_dcp: Refused
) -> None:
    (small / INDEX).unlink()
    for path in small.glob("*.safetensors"):
        path.unlink()
    (small / "model.safetensors").symlink_to("blobs/gone")

    assert "interrupted download" in refused_by_hf_to_dcp(small)


def test_a9_an_index_that_is_no_file_is_refused(small: Path, refused_by_hf_to_dcp: Refused) -> None:
    (small / INDEX).unlink()
    (small / INDEX).mkdir()

    assert INDEX in refused_by_hf_to_dcp(small, BadIndex)
