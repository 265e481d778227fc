"""COCO captions as conversations: the same bytes every time, resumed, and nothing from outside the folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from k3convert.errors import DestinationExists, PathEscape, UsageError
from k3convert.training.data.coco import BadAnnotations, coco_to_conversations
from k3convert.training.data.conversations import Conversations
from k3model.tokenizer import KimiTokenizer
from k3model.vision.image_processing import ImageProcessor

IMAGES = [{"id": 30, "file_name": "c.png"}, {"id": 10, "file_name": "a.png"}, {"id": 20, "file_name": "b.png"}]
CAPTIONS = [
    {"id": 5, "image_id": 30, "caption": "  a tall\nbox "},
    {"id": 2, "image_id": 10, "caption": "a dot"},
    {"id": 9, "image_id": 20, "caption": "über “alles”"},
    {"id": 1, "image_id": 10, "caption": "the first"},
]
GOLDEN = [
    {
        "id": f"{image}-{caption}",
        "messages": [
            {
                "role": "user",
                "content": [{"type": "image", "image": name}, {"type": "text", "text": "Describe the image."}],
            },
            {"role": "assistant", "content": text},
        ],
    }
    for image, caption, name, text in (
        (10, 1, "a.png", "the first"),
        (10, 2, "a.png", "a dot"),
        (20, 9, "b.png", "über “alles”"),
        (30, 5, "c.png", "a tall box"),
    )
]


@pytest.fixture
def annotate(tmp_path: Path) -> Any:
    def write(images: list[Any] = IMAGES, captions: list[Any] = CAPTIONS) -> Path:
        path = tmp_path / "captions.json"
        path.write_text(json.dumps({"images": images, "annotations": captions}), "utf-8")
        return path

    return write


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_all_captions_are_written_in_the_order_of_their_ids(annotate: Any, pictures: Path, tmp_path: Path) -> None:
    report = coco_to_conversations(annotate(), pictures, tmp_path / "out.jsonl", captions="all")

    assert lines(tmp_path / "out.jsonl") == GOLDEN
    assert (report.num_conversations, report.num_images) == (4, 3)
    assert not list(tmp_path.glob("*.partial"))


def test_the_first_caption_of_every_image_is_the_one_with_the_lowest_id(
    annotate: Any, pictures: Path, tmp_path: Path
) -> None:
    coco_to_conversations(annotate(), pictures, tmp_path / "out.jsonl")

    assert lines(tmp_path / "out.jsonl") == [GOLDEN[0], GOLDEN[2], GOLDEN[3]]


def test_the_order_of_the_annotations_changes_no_byte(annotate: Any, pictures: Path, tmp_path: Path) -> None:
    coco_to_conversations(annotate(), pictures, tmp_path / "one.jsonl", captions="all")

    coco_to_conversations(annotate(IMAGES[::-1], CAPTIONS[::-1]), pictures, tmp_path / "two.jsonl", captions="all")

    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "two.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("kept", "num_resumed"),
    [
        (lambda content: content[: len(content) // 2], 2),
        (lambda content: content[: content.index(b"\n") + 1], 1),
        (lambda content: content[: content.index(b"\n")], 0),
        (lambda content: b"", 0),
        (lambda content: b"{}\n" + content, 0),
        (lambda content: content + b"more\n", 4),
    ],
)
def test_a_partial_result_is_gone_on_with_as_far_as_it_is_right(
    annotate: Any, pictures: Path, tmp_path: Path, kept: Any, num_resumed: int
) -> None:
    out = tmp_path / "out.jsonl"
    coco_to_conversations(annotate(), pictures, out, captions="all")
    whole = out.read_bytes()
    out.unlink()
    (tmp_path / "out.jsonl.partial").write_bytes(kept(whole))

    report = coco_to_conversations(annotate(), pictures, out, captions="all")

    assert out.read_bytes() == whole
    assert report.num_resumed == num_resumed


def test_missing_images_are_all_named_and_nothing_is_written(annotate: Any, pictures: Path, tmp_path: Path) -> None:
    (pictures / "a.png").unlink()
    (pictures / "c.png").unlink()

    with pytest.raises(BadAnnotations) as caught:
        coco_to_conversations(annotate(), pictures, tmp_path / "out.jsonl")

    assert caught.value.offenders == ("a.png", "c.png")
    assert not list(tmp_path.glob("out.jsonl*"))


def test_missing_images_can_be_left_out_and_are_reported(annotate: Any, pictures: Path, tmp_path: Path) -> None:
    (pictures / "b.png").unlink()

    report = coco_to_conversations(annotate(), pictures, tmp_path / "out.jsonl", captions="all", skip_missing=True)

    assert report.missing == ("b.png",)
    assert lines(tmp_path / "out.jsonl") == [GOLDEN[0], GOLDEN[1], GOLDEN[3]]


def test_images_without_a_caption_are_reported(annotate: Any, pictures: Path, tmp_path: Path) -> None:
    report = coco_to_conversations(annotate(captions=CAPTIONS[:1]), pictures, tmp_path / "out.jsonl")

    assert report.without_caption == ("a.png", "b.png")


@pytest.mark.parametrize("name", ["../a.png", "/etc/passwd", "x/../../a.png", "a\\b.png"])
def test_file_names_that_leave_the_folder_are_refused(annotate: Any, pictures: Path, tmp_path: Path, name: str) -> None:
    images = [*IMAGES[1:], {"id": 30, "file_name": name}]

    with pytest.raises(PathEscape):
        coco_to_conversations(annotate(images), pictures, tmp_path / "out.jsonl")

    assert not list(tmp_path.glob("out.jsonl*"))


def test_a_link_out_of_the_folder_is_refused(annotate: Any, pictures: Path, tmp_path: Path) -> None:
    (pictures / "a.png").rename(tmp_path / "outside.png")
    (pictures / "a.png").symlink_to(tmp_path / "outside.png")

    with pytest.raises(PathEscape):
        coco_to_conversations(annotate(), pictures, tmp_path / "out.jsonl")


@pytest.mark.parametrize(
    ("images", "captions", "num_faults"),
    [
        ([{"id": 1}], [], 1),
        ([*IMAGES, IMAGES[0]], CAPTIONS, 1),
        (IMAGES, [{"id": 1, "image_id": 99, "caption": "x"}, {"id": 2}], 2),
        (["x"], ["y"], 2),
    ],
)
def test_entries_that_are_no_captions_are_all_listed(
    annotate: Any, pictures: Path, tmp_path: Path, images: list[Any], captions: list[Any], num_faults: int
) -> None:
    with pytest.raises(BadAnnotations) as caught:
        coco_to_conversations(annotate(images, captions), pictures, tmp_path / "out.jsonl")

    assert len(caught.value.offenders) == num_faults


@pytest.mark.parametrize("content", ["", "[]", '{"images": []}', '{"images": 1, "annotations": []}'])
def test_another_file_is_bad_input(pictures: Path, tmp_path: Path, content: str) -> None:
    path = tmp_path / "captions.json"
    path.write_text(content)

    with pytest.raises(BadAnnotations):
        coco_to_conversations(path, pictures, tmp_path / "out.jsonl")


def test_a_destination_is_replaced_only_when_asked(annotate: Any, pictures: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("old\n")

    with pytest.raises(DestinationExists):
        coco_to_conversations(annotate(), pictures, out)
    coco_to_conversations(annotate(), pictures, out, overwrite=True)

    assert len(lines(out)) == 3


def test_places_that_are_not_there_are_named(annotate: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere"):
        coco_to_conversations(annotate(), tmp_path / "nowhere", tmp_path / "out.jsonl")


def test_the_result_is_what_training_reads(
    annotate: Any, pictures: Path, tmp_path: Path, tokenizer: KimiTokenizer
) -> None:
    coco_to_conversations(annotate(), pictures, tmp_path / "out.jsonl")

    source = Conversations(tmp_path / "out.jsonl", pictures, tokenizer, ImageProcessor())

    assert len(source) == 3
    assert "a tall box" in tokenizer.decode(source.document(2).input_ids.tolist())
