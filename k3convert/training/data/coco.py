"""COCO captions as conversations: one JSON line a caption, in an order that depends on the annotations alone."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from k3convert.checkpoint.json_text import parse_json
from k3convert.checkpoint.member_paths import resolve_member
from k3convert.errors import BadInput, DestinationExists, PathEscape, UsageError

PROMPT = "Describe the image."
PROGRESS_LINES = 1000

Progress = Callable[[int, int], None]
"""Called with captions done and in all."""


class BadAnnotations(BadInput):
    """The annotations are no COCO captions, or images are missing."""

    code = "bad-annotations"


@dataclass(frozen=True, slots=True)
class CocoReport:
    """What was written.

    Attributes:
        num_conversations: lines of the result.
        num_images: images that they speak of.
        num_resumed: lines that an earlier run had written.
        without_caption: names of images that nobody captioned.
        missing: names of captioned images that are not in the folder.
    """

    destination: str
    num_conversations: int
    num_images: int
    num_resumed: int
    without_caption: tuple[str, ...]
    missing: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """The report as a JSON object."""
        return {
            "destination": self.destination,
            "num_conversations": self.num_conversations,
            "num_images": self.num_images,
            "num_resumed": self.num_resumed,
            "without_caption": list(self.without_caption),
            "missing": list(self.missing),
        }


@dataclass(frozen=True, slots=True)
class _Caption:
    image_id: int
    caption_id: int
    file_name: str
    text: str

    @property
    def key(self) -> str:
        return f"{self.image_id}-{self.caption_id}"

    def line(self, prompt: str) -> bytes:
        """The conversation: the image and the prompt, then the caption."""
        question = [{"type": "image", "image": self.file_name}, {"type": "text", "text": prompt}]
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": self.text}]
        return json.dumps({"id": self.key, "messages": messages}, ensure_ascii=False).encode() + b"\n"


def coco_to_conversations(
    annotations: Path,
    images: Path,
    destination: Path,
    *,
    captions: Literal["first", "all"] = "first",
    prompt: str = PROMPT,
    skip_missing: bool = False,
    overwrite: bool = False,
    on_progress: Progress | None = None,
) -> CocoReport:
    """Write a conversation a caption.

    Captions are ordered by image id, then by their own. Lines grow in ``DST.partial``; the same command goes on behind
    those that are there and right, and ``DST`` appears when it is complete.

    Args:
        annotations: COCO captions: an object with ``images`` and ``annotations``.
        images: the folder that file names are relative to.
        destination: the JSON lines.
        captions: the first of every image, or all.
        prompt: what the user asks.
        skip_missing: leave out captions of missing images and list these, rather than refuse.
        overwrite: replace an existing destination.
        on_progress: hears of captions done and in all.

    Raises:
        BadAnnotations: no COCO captions, or images are missing; all of them are listed, and nothing is written.
        PathEscape: file names that leave the folder, all of them; nothing is written.
        DestinationExists, UsageError: the destination cannot be written to.
    """
    if not annotations.is_file() or not images.is_dir() or not destination.parent.is_dir():
        wrong = [f"{annotations} is not a file"] if not annotations.is_file() else []
        wrong += [f"{folder} is not a folder" for folder in (images, destination.parent) if not folder.is_dir()]
        raise UsageError(wrong[0], offenders=wrong if len(wrong) > 1 else ())
    if destination.exists() and not overwrite:
        raise DestinationExists(f"{destination} exists", hint="--overwrite replaces it once the new file is whole")
    files, found = _read(annotations)
    chosen = list(_chosen(found, captions))
    missing = _missing(images, dict.fromkeys(caption.file_name for caption in chosen))
    if missing and not skip_missing:
        raise BadAnnotations(
            f"{len(missing)} captioned images are not in {images}",
            offenders=missing,
            hint="fetch them, or leave them out with --skip-missing",
        )
    absent = set(missing)
    written = [caption for caption in chosen if caption.file_name not in absent]
    num_resumed = _write(destination, [caption.line(prompt) for caption in written], on_progress)
    captioned = {caption.file_name for caption in found}
    return CocoReport(
        str(destination),
        num_conversations=len(written),
        num_images=len({caption.file_name for caption in written}),
        num_resumed=num_resumed,
        without_caption=tuple(name for name in files if name not in captioned),
        missing=tuple(missing),
    )


def _read(path: Path) -> tuple[list[str], list[_Caption]]:
    """File names of all images by id, and all captions in order."""
    try:
        document = parse_json(path.read_bytes())
    except ValueError as error:
        raise BadAnnotations(f"{path} is no JSON: {error}") from error
    if not isinstance(document, dict) or not all(isinstance(document.get(k), list) for k in ("images", "annotations")):
        raise BadAnnotations(f"{path} is no COCO file: it has no lists images and annotations")
    faults: list[str] = []
    names: dict[int, str] = {}
    for position, image in enumerate(document["images"]):
        number, name = (image.get("id"), image.get("file_name")) if isinstance(image, dict) else (None, None)
        if not isinstance(number, int) or not isinstance(name, str):
            faults.append(f"images[{position}] has no id and file_name")
        elif number in names:
            faults.append(f"images[{position}]: the id {number} is there twice")
        else:
            names[number] = name
    found: list[_Caption] = []
    for position, entry in enumerate(document["annotations"]):
        fields = entry if isinstance(entry, dict) else {}
        number, image, text = fields.get("id"), fields.get("image_id"), fields.get("caption")
        if not isinstance(number, int) or not isinstance(image, int) or not isinstance(text, str):
            faults.append(f"annotations[{position}] has no id, image_id and caption")
        elif image not in names:
            faults.append(f"annotations[{position}]: no image has the id {image}")
        elif text.strip():
            found.append(_Caption(image, number, names[image], " ".join(text.split())))
    if faults:
        raise BadAnnotations(f"{path}: {len(faults)} entries are wrong", offenders=faults)
    found.sort(key=lambda caption: (caption.image_id, caption.caption_id))
    return [names[number] for number in sorted(names)], found


def _chosen(found: Iterable[_Caption], captions: Literal["first", "all"]) -> Iterator[_Caption]:
    seen: set[int] = set()
    for caption in found:
        if captions == "all" or caption.image_id not in seen:
            yield caption
        seen.add(caption.image_id)


def _missing(folder: Path, names: Iterable[str]) -> list[str]:
    """Names of files that are not there; links that lead out of the folder are refused."""
    missing, escapes = [], []
    for name in names:
        try:
            path = resolve_member(folder, name)
        except PathEscape as error:
            escapes.append(str(error))
            continue
        if not path.is_file():
            missing.append(name)
    if escapes:
        raise PathEscape(f"{len(escapes)} images lie outside {folder}", offenders=escapes)
    return missing


def _write(destination: Path, lines: Sequence[bytes], on_progress: Progress | None) -> int:
    """Write all lines; how many of them an earlier run had written."""
    partial = destination.with_name(f"{destination.name}.partial")
    with partial.open("a+b") as file:
        file.seek(0)
        num_resumed = num_bytes = 0
        for held, line in zip(file, lines, strict=False):
            if held != line:
                break
            num_resumed, num_bytes = num_resumed + 1, num_bytes + len(line)
        # A line that was cut short, and all lines of another job.
        file.truncate(num_bytes)
        for number, line in enumerate(lines[num_resumed:], start=num_resumed + 1):
            file.write(line)
            if number % PROGRESS_LINES == 0 and on_progress is not None:
                file.flush()
                on_progress(number, len(lines))
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, destination)
    if on_progress is not None:
        on_progress(len(lines), len(lines))
    return num_resumed
