"""A source named by its hub id is found in the local cache."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Command = Callable[..., Any]


@pytest.fixture
def cache(small_source: Path, tmp_path: Path) -> Path:
    """A hub cache that holds the small checkpoint as ``owner/k3``, at ``main`` and at ``v1``."""
    repository = tmp_path / "hub" / "models--owner--k3"
    revision = "0123456789abcdef0123456789abcdef01234567"
    snapshot = repository / "snapshots" / revision
    (repository / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(small_source.iterdir())):
        shutil.copyfile(path, repository / "blobs" / f"{number:064x}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"{number:064x}")
    (repository / "refs").mkdir()
    for name in ("main", "v1"):
        (repository / "refs" / name).write_text(revision)
    return tmp_path / "hub"


@pytest.fixture
def hub(process: Command, cache: Path) -> Command:
    """Run a command with that cache, and without a network."""

    def call(*arguments: object) -> Any:
        return process(*arguments, HF_HUB_CACHE=str(cache), HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")

    return call


@pytest.mark.parametrize("name", ["owner/k3", "owner/k3@v1"])
def test_a_hub_id_is_resolved_in_the_cache(hub: Command, small_dcp: Path, tmp_path: Path, name: str) -> None:
    outcome = hub("hf-to-dcp", name, tmp_path / "dcp", "--quiet")

    assert outcome.code == 0, outcome.err
    for path in small_dcp.glob("*.distcp"):
        assert (tmp_path / "dcp" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("name", "words"),
    [("owner/other", "owner/other is not in the local hub cache"), ("owner/k3@v2", "at revision v2")],
)
def test_an_id_that_is_not_cached_is_exit_4_and_names_the_option_that_fetches(
    hub: Command, tmp_path: Path, name: str, words: str
) -> None:
    outcome = hub("hf-to-dcp", name, tmp_path / "dcp", "--json")

    assert outcome.code == 4
    assert words in outcome.document["error"]["message"]
    assert "--download" in outcome.document["error"]["hint"]
    assert not list(tmp_path.glob("dcp*"))


def test_shards_that_the_cache_lacks_are_named(hub: Command, cache: Path, tmp_path: Path) -> None:
    links = sorted(cache.rglob("model-*.safetensors"))
    links[0].unlink()
    links[1].resolve().unlink()

    document = hub("hf-to-dcp", "owner/k3", tmp_path / "dcp", "--json").document

    assert document["error"]["code"] == "incomplete-checkpoint"
    assert sorted(document["error"]["offenders"]) == [links[0].name, links[1].name]


def test_a_download_that_cannot_be_is_exit_3(hub: Command, tmp_path: Path) -> None:
    outcome = hub("hf-to-dcp", "owner/other", tmp_path / "dcp", "--download")

    assert outcome.code == 3
    assert outcome.err.startswith("error[not-possible-here]: owner/other cannot be fetched")


@pytest.mark.parametrize("name", ["k3", "owner/k3/more", "https://host/owner/k3", "owner/..", "-/k3"])
def test_what_is_no_hub_id_is_exit_2(command: Command, tmp_path: Path, name: str) -> None:
    outcome = command("hf-to-dcp", "--", name, tmp_path / "dcp")

    assert outcome.code == 2
    assert name in outcome.err
