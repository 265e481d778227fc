"""The report as a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from k3convert.parity.report import document as d
from k3convert.reporting.html_page import (
    Facts,
    HeatMap,
    Histogram,
    Mark,
    Node,
    Page,
    Preformatted,
    Section,
    Status,
    Table,
    Text,
    Tree,
    number_text,
    write_page,
)
from k3convert.reporting.page_blocks import Block, Value
from k3convert.reporting.to_text import count_text, size_text

STATUSES: Mapping[str, Status] = {
    "passed": Status.GOOD,
    "failed": Status.BAD,
    "nondeterministic": Status.BAD,
    "died": Status.BAD,
    "refused": Status.WARNING,
    "not run": Status.NEUTRAL,
}
SHOWN_POOLS = 15
SHOWN_TENSORS = 12


def write_html(report: d.ParityReport, path: Path) -> None:
    """Write the report as one HTML file."""
    write_page(page_of(report), path)


def page_of(report: d.ParityReport) -> Page:
    """The page of a report: the verdict first, then the cells, then what is behind them."""
    compared = [cell for cell in report.cells if cell.comparison is not None]
    sections = [
        _cells(report),
        *([_headroom(compared)] if compared else []),
        *_divergences(report),
        *([_distances(report, compared)] if any(_counts(cell) for cell in compared) else []),
        *_details(compared),
        _cost(report),
        *([_limits(report)] if report.limits else []),
        _session(report),
    ]
    numbers = ", ".join(f"{count} {status}" for status, count in report.counts.items())
    verdict = Mark(Status.GOOD, f"Passed: {numbers}") if report.passed else Mark(Status.BAD, f"Not passed: {numbers}")
    return Page(
        title=f"Parity of {Path(report.session.checkpoint).name}",
        sections=sections,
        verdict=verdict,
        subtitle=f"{report.tool}, weights {report.session.weights_digest[:16]}, level {report.session.level}",
    )


def worst_first(cells: Sequence[d.CellDocument]) -> list[d.CellDocument]:
    """Failures first, the worst of them before the others; what was not run comes last."""
    order = {Status.BAD: 0, Status.WARNING: 1, Status.GOOD: 2, Status.NEUTRAL: 3}
    return sorted(cells, key=lambda cell: (order[STATUSES[cell.status]], -_headroom_of(cell)))


def _cells(report: d.ParityReport) -> Section:
    rows: list[list[Value]] = []
    for cell in worst_first(report.cells):
        found = cell.comparison
        rows.append([
            cell.cell,
            Mark(STATUSES[cell.status], cell.status),
            None if found is None else found.verdict,
            None if found is None else float(found.headroom),
            None if found is None else f"{found.num_bitwise} of {found.num_tensors}",
            None if found is None else sum(layer.num_flips for layer in found.routing),
            cell.elapsed_s or None,
            _what_happened(cell),
        ])  # fmt: skip
    head = ("cell", "status", "verdict", "headroom", "bitwise tensors", "routing flips", "seconds", "what")
    return Section(
        "Cells",
        [Table(head, rows)],
        note="The worst first. Headroom is measured over allowed: 1 is the limit, 0 the baseline's own bits. A cell "
        "that was not run is not passed.",
    )


def _what_happened(cell: d.CellDocument) -> str:
    """The one line that a reader needs of a cell."""
    if cell.unsteady:
        return f"{count_text(len(cell.unsteady), 'tensor')} had other bits in a second run, first {cell.unsteady[0]}"
    found = cell.comparison
    if found is None:
        return cell.reason
    if found.first_outside is not None:
        first = found.first_outside
        reasons = [fault.reason for fault in found.faults if (fault.kind, fault.name) == (first.kind, first.name)]
        return f"begins at {first.name} ({first.kind})" + "".join(f": {reason}" for reason in reasons)
    if cell.status == "failed":
        return "predictions differ"
    bitwise = f"bitwise: {', '.join(found.bitwise_kinds)}; " if found.bitwise_kinds else ""
    return f"{bitwise}{found.bitwise_reason}"


def _headroom(compared: Sequence[d.CellDocument]) -> Section:
    found = {cell.cell: cell.comparison.layer_headroom for cell in worst_first(compared) if cell.comparison is not None}
    blocks: list[Block] = []
    for direction in ("forward", "backward"):
        by_cell = {cell: layers[direction] for cell, layers in found.items() if layers[direction]}
        named = dict.fromkeys(layer for layers in by_cell.values() for layer in layers)
        columns = sorted(named, key=lambda layer: (not layer.isdigit(), int(layer) if layer.isdigit() else 0))
        values = [[layers.get(layer) for layer in columns] for layers in by_cell.values()]
        if by_cell:
            blocks.append(HeatMap(list(by_cell), columns, values, direction, "cell \\ layer", zero_text="="))
    return Section(
        "Headroom by layer",
        blocks,
        note="The largest share of a limit that any tensor of the layer uses on its own; = where all are bitwise equal "
        "to the baseline or have none of the limit, ✗ beyond the limit. Small tensors are judged in pools only.",
    )


def _divergences(report: d.ParityReport) -> Iterator[Section]:
    nodes = [_divergence_node(cell) for cell in report.cells if _has_divergence(cell)]
    if nodes:
        yield Section(
            "Where differences begin",
            [Tree(nodes)],
            note="The first tensor in the order of execution that is outside of its limit. Its module is run again on "
            "the baseline's inputs, so that nothing upstream can be the cause; what still differs is listed.",
        )


def _has_divergence(cell: d.CellDocument) -> bool:
    if cell.status == "not run":
        return False
    found = cell.comparison
    return cell.divergence is not None or (found is not None and found.first_outside is not None) or bool(cell.unsteady)


def _divergence_node(cell: d.CellDocument) -> Node:
    children: list[Node] = []
    if cell.unsteady:
        names = [Node(name) for name in cell.unsteady[:SHOWN_TENSORS]]
        children.append(Node(f"not the same twice: {count_text(len(cell.unsteady), 'tensor')}", Status.BAD, {}, names))
    found = cell.comparison
    if found is not None and found.first_outside is not None:
        children.append(_tensor_node(found.first_outside, found))
    if cell.divergence is not None:
        inside = [
            Node(
                each.place,
                Status.BAD,
                {
                    "candidate": each.candidate_value,
                    "baseline": each.baseline_value,
                    "units in the last place": "across zero or not finite" if each.ulps is None else each.ulps,
                    "elements that differ": f"{each.num_different:,} of {each.num_values:,}",
                    "implementation": each.tensor.impl or "none of its own",
                },
            )
            for each in cell.divergence.differences
        ]
        label = f"{cell.divergence.module or 'no module'} on the baseline's inputs: origin {cell.divergence.origin}"
        children.append(Node(label, Status.BAD if inside else Status.NEUTRAL, {}, inside, is_open=True))
    return Node(cell.cell, STATUSES[cell.status], {}, children, is_open=True)


def _tensor_node(name: d.TensorName, found: d.ComparisonDocument) -> Node:
    label = f"first outside: {name.name} ({name.kind})"
    listed = next((t for t in found.tensors if (t.tensor.kind, t.tensor.name) == (name.kind, name.name)), None)
    facts: dict[str, Value] = {"class": name.module_type or "–", "implementation": name.impl or "none of its own"}
    for fault in found.faults:
        if (fault.kind, fault.name) == (name.kind, name.name):
            facts["fault"] = fault.reason
    if listed is not None:
        facts |= {
            f"{gate.limit}": f"{number_text(gate.measured)} of {number_text(gate.allowed)}" for gate in listed.gates
        }
        facts["largest difference"] = listed.place or "–"
        facts["values"] = (
            f"{listed.difference.candidate_value:.9g}, and the baseline has {listed.difference.baseline_value:.9g}"
        )
    return Node(label, Status.BAD, facts, is_open=True)


def _distances(report: d.ParityReport, compared: Sequence[d.CellDocument]) -> Section:
    blocks: list[Block] = []
    for cell in worst_first(compared):
        counts = _counts(cell)
        if counts:
            bars = dict(zip(report.ulp_classes, counts, strict=True))
            title = f"{cell.cell}: forward and backward"
            blocks.append(Histogram(bars, title, "elements by distance in units in the last place, up to", log_y=True))
    return Section(
        "Distances from the baseline",
        blocks,
        note="Elements by their distance from the baseline's in units in the last place of their own dtype. Changes of "
        "sign and values that are not finite are not among them.",
    )


def _counts(cell: d.CellDocument) -> tuple[int, ...]:
    """All tensors' distances, or nothing where none differs."""
    if cell.comparison is None:
        return ()
    sums = tuple(sum(column) for column in zip(*cell.comparison.ulp_counts.values(), strict=True))
    return sums if any(sums[1:]) else ()


def _details(compared: Sequence[d.CellDocument]) -> Iterator[Section]:
    for cell in worst_first(compared):
        found = cell.comparison
        if found is None or found.verdict == "bitwise":
            continue
        blocks: list[Block] = [_scalars(found)] if found.scalars else []
        blocks.append(_pools(found))
        if found.tensors:
            blocks.append(_tensors(found))
        if found.logits is not None:
            blocks.append(_predictions(found.logits))
        if any(layer.num_flips for layer in found.routing):
            blocks.append(_routing(found))
        if found.faults:
            rows = [[fault.name, fault.kind, fault.reason] for fault in found.faults]
            blocks.append(Table(("name", "kind", "fault"), rows))
        blocks += [Text(note) for note in found.notes]
        yield Section(cell.cell, blocks)


def _scalars(found: d.ComparisonDocument) -> Block:
    rows: list[list[Value]] = [
        [each.kind.replace("_", " "), *(f"{value:.9g}" for value in (each.candidate, each.baseline, each.golden))]
        for each in found.scalars
    ]
    return Table(("", "candidate", "baseline", "golden"), rows)


def _pools(found: d.ComparisonDocument) -> Block:
    rows: list[list[Value]] = [
        [
            pool.path, pool.layer_kind, pool.kind, _share(pool.headroom, pool.is_outside), float(pool.rms_ratio),
            float(pool.max_ratio), float(pool.candidate_rms), float(pool.baseline_rms), pool.num_values,
        ]
        for pool in found.pools[:SHOWN_POOLS]
    ]  # fmt: skip
    head = ("pool", "layer", "kind", "headroom", "rms ratio", "max ratio", "candidate rms", "baseline rms", "values")
    return Table(head, rows, f"Pools, the worst {len(rows)} of {len(found.pools)}")


def _tensors(found: d.ComparisonDocument) -> Block:
    rows: list[list[Value]] = [
        [
            tensor.tensor.name, tensor.tensor.kind, _share(tensor.headroom, tensor.is_outside),
            tensor.difference.num_different, tensor.num_values, tensor.difference.max_ulp,
            float(tensor.difference.max_abs), float(tensor.candidate.norm_ratio), tensor.place or "",
        ]
        for tensor in found.tensors[:SHOWN_TENSORS]
    ]  # fmt: skip
    head = (
        "tensor",
        "kind",
        "headroom",
        "different",
        "values",
        "max ULP",
        "max abs",
        "norm ratio",
        "largest at",
    )
    num_different = found.num_tensors - found.num_bitwise
    return Table(head, rows, f"Tensors that differ, the worst {len(rows)} of {num_different}")


def _predictions(logits: d.LogitsDocument) -> Block:
    rows: list[list[Value]] = [
        [
            name, float(run.mean_kl), float(run.p99_kl), float(run.max_kl), float(run.mean_reverse_kl),
            float(run.top_1), float(run.top_5), None if run.nll_delta is None else float(run.nll_delta),
        ]
        for name, run in (("candidate", logits.candidate), ("baseline", logits.baseline))
    ]  # fmt: skip
    head = ("run", "mean KL", "p99 KL", "max KL", "mean reverse KL", "top-1", "top-5", "NLL delta")
    return Table(head, rows, f"Predictions beside the golden run, {logits.num_tokens:,} tokens")


def _routing(found: d.ComparisonDocument) -> Block:
    rows: list[list[Value]] = [
        [
            layer.name, layer.num_flips, layer.num_following, _share(float(layer.num_beyond), layer.num_beyond > 0),
            max((float(flip.margin) for flip in layer.flips), default=0.0), float(layer.noise_bound),
        ]
        for layer in found.routing if layer.num_flips
    ]  # fmt: skip
    head = ("router", "flips", "of these following", "beyond noise", "largest margin", "noise bound")
    return Table(head, rows, "Tokens that go to other experts")


def _share(value: float, is_outside: bool) -> Mark:
    return Mark(Status.BAD if is_outside else Status.GOOD, number_text(value))


def _cost(report: d.ParityReport) -> Section:
    rows: list[list[Value]] = [
        [cell.cell, cell.step_s, cell.baseline_step_s, size_text(cell.peak_bytes), cell.elapsed_s]
        for cell in report.cells if cell.step_s
    ]  # fmt: skip
    head = ("cell", "step, s", "baseline's step, s", "peak memory of a rank", "all of the cell, s")
    return Section(
        "Time and memory",
        [Table(head, rows)],
        note="Steps are forward and backward passes with every tensor recorded: they compare cells, and are no "
        "measure of speed.",
    )


def _limits(report: d.ParityReport) -> Section:
    rows: list[list[Value]] = [[limit.name, float(limit.value), limit.origin] for limit in report.limits]
    return Section("Limits", [Table(("limit", "value", "why this value"), rows)])


def _session(report: d.ParityReport) -> Section:
    session: dict[str, Value] = dict(report.session.model_dump())
    flags = sorted({f"{name}={value}" for cell in report.cells for name, value in cell.flags.items()})
    blocks: list[Block] = [Facts(session), Facts(dict(report.environment))]
    if flags:
        blocks += [Text("Flags in effect on the ranks:"), Preformatted("\n".join(flags))]
    return Section(
        "Session",
        blocks,
        note=f"Schema version {report.schema_version}.",
    )


def _headroom_of(cell: d.CellDocument) -> float:
    return float(cell.comparison.headroom) if cell.comparison is not None else 0.0
