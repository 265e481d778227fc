"""Documents of the library as text for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

INDENT = "  "
SHOWN = 5


def size_text(nbytes: float) -> str:
    """Bytes for a person, with the exact number where it is short."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"


def count_text(count: int, noun: str) -> str:
    """``1 worker``, ``2 workers``, ``1,510 tensors``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def table_text(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table: columns of numbers to the right, columns of text to the left."""
    cells = [[str(cell) if not isinstance(cell, int) else f"{cell:,}" for cell in row] for row in rows]
    widths = [max(len(line[column]) for line in [list(head), *cells]) for column in range(len(head))]
    numeric = [bool(rows) and all(isinstance(row[column], int) for row in rows) for column in range(len(head))]

    def line(values: Sequence[str]) -> str:
        columns = zip(values, widths, numeric, strict=True)
        return "  ".join(
            value.rjust(width) if right else value.ljust(width) for value, width, right in columns
        ).rstrip()

    return "\n".join([line(head), *(line(row) for row in cells)])


def notes_text(notes: Sequence[str]) -> list[str]:
    """Notes as lines."""
    return [f"note: {note}" for note in notes]


def made_text(document: Mapping[str, Any]) -> str:
    """The result of ``make-tiny``."""
    holes = ", its data are holes" if document.get("sparse") else ""
    return (
        f"{document['destination']}: {document['num_tensors']:,} tensors in {document['num_shards']} shards, "
        f"{size_text(document['total_bytes'])}{holes}"
    )


def plan_text(document: Mapping[str, Any]) -> str:
    """A plan, for ``--dry-run``."""
    lines = [
        f"{document['job']}: {document['source']} -> {document['destination']}",
        f"{INDENT}writes {size_text(document['bytes_to_write'])} in {document['num_files']} files "
        f"({document['num_items']:,} items), the largest {size_text(document['largest_file_bytes'])}",
        f"{INDENT}needs  {size_text(document['bytes_needed'])} of space",
    ]
    if "bytes_free" in document:
        lines.append(f"{INDENT}free   {size_text(document['bytes_free'])}")
    lines += [f"{INDENT}{name}: {value:,}" for name, value in document["counts"].items()]
    lines += [f"{INDENT}{name} = {value}" for name, value in document["options"].items() if value is not None]
    return "\n".join(lines)


def conversion_text(document: Mapping[str, Any]) -> str:
    """The report of a conversion."""
    if not document["complete"]:
        return f"part written to {document['destination']} in {document['elapsed_s']:.1f} s; --finish completes it"
    rate = document["bytes_written"] / max(document["elapsed_s"], 1e-9)
    memory = f"{size_text(document['peak_memory_bytes'])} of memory at most"
    if document["num_workers"]:
        how = f"{size_text(rate)}/s, {count_text(document['num_workers'], 'worker')}, {memory}"
    else:
        how = f"completed from its parts, {memory}"
    lines = [
        f"{document['destination']}: {count_text(document['counts'].get('tensors', 0), 'tensor')}, "
        f"{size_text(document['bytes_written'])} in {document['elapsed_s']:.2f} s ({how})"
    ]
    for name, value in document["details"].items():
        if isinstance(value, dict):
            entries = (f"{key} {entry}" for key, entry in value.items() if entry is not None)
            lines.append(f"{INDENT}{name}: " + ", ".join(entries))
        elif isinstance(value, list):
            if value:
                lines.append(f"{INDENT}{name}: {len(value)}, for example {value[0]}")
        else:
            lines.append(f"{INDENT}{name}: {value}")
    return "\n".join(lines)


def inspection_text(document: Mapping[str, Any]) -> str:
    """The result of ``inspect``."""
    head = (
        f"{document['path']}: {document['kind']}, {document['num_tensors']:,} tensors in {document['num_files']} "
        f"files, {size_text(document['total_bytes'])} ({document['total_bytes']:,} bytes)"
    )
    lines = [
        head,
        f"experts: {document['experts']}, {document['packed_pairs']:,} packed pairs",
        f"values: {document['packed_values']:,} packed, {document['plain_values']:,} plain",
    ]
    if document["kept_scales"]:
        lines.append(f"scales kept beside decoded experts: {document['kept_scales']:,}")
    for title, tallies in (("component", document["components"]), ("dtype", document["dtypes"])):
        rows = [(name, tally["tensors"], tally["bytes"], tally["values"]) for name, tally in tallies.items()]
        lines += ["", table_text((title, "tensors", "bytes", "values"), rows)]
    if document["other_entries"]:
        lines += ["", f"other entries: {len(document['other_entries'])}, for example {document['other_entries'][0]}"]
    lines += ["", census_text(document["census"])]
    return "\n".join(lines)


def census_text(census: Mapping[str, Any] | None) -> str:
    """The verdict of a census, with the first few names of each kind."""
    if census is None:
        return "census: not run, there is no config.json"
    if census["ok"]:
        return f"census: ok, {census['found']:,} tensors are the {census['expected']:,} that config.json calls for"
    lines = [f"census: DIFFERENT, {census['found']:,} found, {census['expected']:,} expected"]
    for kind in ("missing", "unexpected", "wrong_shape", "wrong_dtype"):
        if census[kind]["count"]:
            lines.append(f"{INDENT}{kind.replace('_', ' ')}: {census[kind]['count']:,}")
            lines += [f"{INDENT}{INDENT}{name}" for name in census[kind]["names"][:SHOWN]]
    return "\n".join(lines)


def verification_text(document: Mapping[str, Any]) -> str:
    """The verdict of ``verify``."""
    what = "structure and digests" if document["digests_known"] else "structure (no digests are recorded)"
    lines = [
        f"{document['path']}: {document['kind']}, {document['num_tensors']:,} tensors, "
        f"{size_text(document['num_bytes'])} read, "
        f"{'recorded ' if document['digests_known'] else ''}content {document['content_digest'][:16]}",
        f"{what}: {'ok' if not document['faults'] else count_text(len(document['faults']), 'FAULT')}",
        *_shown(document["faults"]),
    ]
    if document["against"] is not None:
        count = len(document["differences"])
        lines.append(f"against {document['against']}: {'identical' if not count else count_text(count, 'DIFFERENCE')}")
        lines += _shown(document["differences"])
    return "\n".join(lines)


def diff_text(document: Mapping[str, Any]) -> str:
    """The result of ``diff``."""
    differences = document["differences"]
    equal = (
        f"{document['tensors_bitwise_equal']:,} of {document['tensors_compared']:,} common tensors are bitwise equal"
    )
    lines = [f"{document['first']} and {document['second']}: {equal}"]
    counts: dict[str, int] = {}
    for difference in differences:
        counts[difference["kind"]] = counts.get(difference["kind"], 0) + 1
    lines += [f"{INDENT}{kind}: {count:,}" for kind, count in counts.items()]
    for difference in differences[:SHOWN]:
        figures = (
            f" (max {difference['max_ulp']} ULP, max abs {difference['max_abs']:.3g})"
            if difference["kind"] == "values"
            else ""
        )
        lines.append(f"{INDENT}{difference['kind']} {difference['name']}: {difference['detail']}{figures}")
    return "\n".join(lines)


def ops_text(document: Mapping[str, Any]) -> str:
    """The result of ``ops``."""
    rows = document["rows"]
    lines = [
        (row["op"], row["variant"], row["impl"], row["device"], "yes" if row["usable"] else f"no: {row['reason']}")
        for row in rows
    ]
    usable = sum(row["usable"] for row in rows)
    return "\n".join(
        [
            table_text(("op", "variant", "impl", "device", "usable here"), lines),
            "",
            f"{usable} of {len(rows)} implementations are usable on this machine's {document['device']}",
        ]
    )


def _shown(lines: Sequence[str]) -> list[str]:
    more = [f"{INDENT}... and {len(lines) - SHOWN:,} more"] if len(lines) > SHOWN else []
    return [f"{INDENT}{line}" for line in lines[:SHOWN]] + more
