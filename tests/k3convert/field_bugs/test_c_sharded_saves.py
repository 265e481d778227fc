"""Field reports C7, C8, C10 and C15: what torch saves and loads from several ranks, uneven shards included."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k3convert.execution.conversion import RunOptions
from k3convert.execution.parts import Part
from k3convert.planning.inspection import inspect_checkpoint

Convert = Callable[..., Any]

# Four processes of one script, forked after the import of torch: seconds instead of half a minute.
FOUR_RANKS = '''
import json, os, sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as processes
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, zeros

WORLD = 4


def read(folder):
    reader = FileSystemReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in stored.items()}
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def placements(kind, tensor):
    if not tensor.dim():
        return None
    columns = min(1, tensor.dim() - 1)
    return {
        "fsdp": ((4,), [Shard(0)]),
        "columns": ((4,), [Shard(columns)]),
        "hsdp": ((2, 2), [Replicate(), Shard(0)]),
        "fsdp+tp": ((2, 2), [Shard(0), Shard(columns)]),
        "fsdp+fsdp": ((2, 2), [Shard(0), Shard(0)]),
    }[kind]


def save(rank, folder, out, kinds, cut):
    state = read(folder)
    if cut:
        state = {name: tensor[:cut] if name.endswith("A_log") else tensor for name, tensor in state.items()}
    meshes = {}
    for kind in kinds:
        model = {}
        for name, tensor in state.items():
            shape, places = placements(kind, tensor)
            mesh = meshes.setdefault(shape, None) or init_device_mesh("cpu", shape)
            meshes[shape] = mesh
            model[name] = distribute_tensor(tensor, mesh, places)
        moment = next(name for name in model if name.endswith("b_proj.weight"))
        model["optim.exp_avg." + moment] = model[moment]
        dcp.save(model, checkpoint_id=f"{out}/{kind}")


def load(rank, folder, out):
    """Expert stacks at EP 2 and EP 4, against the whole tensors."""
    whole = read(folder)
    for degree, (shape, places) in {2: ((2, 2), [Shard(0), Replicate()]), 4: ((4,), [Shard(0)])}.items():
        mesh = init_device_mesh("cpu", shape)
        model = {
            name: zeros(*tensor.shape, dtype=tensor.dtype, device_mesh=mesh, placements=places)
            for name, tensor in whole.items() if ".experts.w" in name
        }
        dcp.load(model, checkpoint_id=folder)
        for name, tensor in model.items():
            local = tensor.to_local()
            assert local.shape[0] == whole[name].shape[0] // degree, name
            first = mesh.get_coordinate()[0] * local.shape[0]
            assert torch.equal(local, whole[name][first : first + local.shape[0]]), name
        if rank == 0:
            open(f"{out}.ep{degree}", "w").write(str(len(model)))


def rank_main(rank, jobs):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD))
    torch.set_num_threads(1)
    rendezvous = f"file://{sys.argv[1]}.rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=WORLD)
    for work, *arguments in jobs:
        {"save": save, "load": load}[work](rank, *arguments)
    dist.destroy_process_group()


if __name__ == "__main__":
    jobs = json.load(open(sys.argv[1]))
    processes.start_processes(rank_main, (jobs,), nprocs=WORLD, start_method="fork")
'''

KINDS = ("fsdp", "columns", "hsdp", "fsdp+tp", "fsdp+fsdp")


def make(folder: Path, *, num_layers: int, num_experts: int, **options: Any) -> Path:
    """A generated checkpoint in ``source`` and its DCP in ``ours``."""
    from k3convert.execution.conversion import run_conversion
    from k3convert.planning.hf_to_dcp import ToDcpOptions, plan_hf_to_dcp
    from k3convert.synthesis import make_checkpoint

    folder.mkdir()
    source = folder / "source"
    make_checkpoint(source, preset="tiny", num_layers=num_layers, num_experts=num_experts, seed=2, sparse=False)
    run_conversion(plan_hf_to_dcp(source, folder / "ours", ToDcpOptions(**options)), RunOptions())
    return folder


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, small_dcp: Path) -> Path:
    """Two sources saved by torch from 4 ranks, and a DCP of ours loaded by them; all in one run of the script.

    ``uneven`` has 7 experts and 6 heads, saved in every placement: nothing divides by 4. ``seventeen`` has 17 experts,
    saved over a 2 x 2 mesh.
    """
    folder = tmp_path_factory.mktemp("ranks")
    uneven = make(folder / "uneven", num_layers=3, num_experts=7)
    seventeen = make(folder / "seventeen", num_layers=2, num_experts=17, experts="bf16", keep_scales=False)
    jobs = [
        ("save", str(uneven / "ours"), str(uneven / "saved"), KINDS, 6),
        ("save", str(seventeen / "ours"), str(seventeen / "saved"), ["fsdp+tp"], 0),
        ("load", str(small_dcp), str(folder / "loaded")),
    ]
    script, list_of_jobs = folder / "ranks.py", folder / "jobs.json"
    script.write_text(FOUR_RANKS)
    list_of_jobs.write_text(json.dumps(jobs))
    command = [sys.executable, "-W", "ignore", str(script), str(list_of_jobs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def uneven(work: Path) -> Path:
    return work / "uneven"


@pytest.fixture(scope="module")
def seventeen(work: Path) -> Path:
    return work / "seventeen"


def assert_files_equal(one: Path, other: Path) -> None:
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


@pytest.mark.parametrize("kind", KINDS)
def test_c7_shards_that_do_not_divide_come_back_byte_for_byte(
    uneven: Path, tmp_path: Path, to_hf: Convert, kind: str
) -> None:
    """Rows 6 and 7 over 4 ranks; rank 3 holds nothing of the 6 when they are cut as 2, 2, 2, 0."""
    report = to_hf(uneven / "saved" / kind, tmp_path / "hf", like=uneven / "source")

    assert_files_equal(uneven / "source", tmp_path / "hf")
    assert all(name.startswith("optim.") for name in report.details["left_out"])


@pytest.mark.parametrize("parts", [3, 8])
def test_c7_the_result_is_the_same_from_3_and_from_8_processes(
    uneven: Path, tmp_path: Path, to_hf: Convert, parts: int
) -> None:
    saved = uneven / "saved" / "fsdp"
    for index in range(parts):
        to_hf(saved, tmp_path / "hf", RunOptions(part=Part(index, parts)), like=uneven / "source")

    to_hf(saved, tmp_path / "hf", RunOptions(finish_only=True), like=uneven / "source")

    assert_files_equal(uneven / "source", tmp_path / "hf")


def test_c10_replicas_are_stored_once(uneven: Path) -> None:
    sizes = {
        kind: sum(path.stat().st_size for path in (uneven / "saved" / kind).glob("*.distcp"))
        for kind in ("fsdp", "hsdp")
    }

    assert sizes["hsdp"] <= sizes["fsdp"]


def test_c8_a_width_of_17_over_a_mesh_comes_back_byte_for_byte(seventeen: Path, tmp_path: Path, to_hf: Convert) -> None:
    report = to_hf(seventeen / "saved" / "fsdp+tp", tmp_path / "hf", like=seventeen / "source")

    assert report.details["mxfp4"]["blocks_changed"] == 0
    assert_files_equal(seventeen / "source", tmp_path / "hf")


def test_c8_inspect_reads_a_sharded_save(seventeen: Path, tmp_path: Path) -> None:
    saved = seventeen / "saved" / "fsdp+tp"
    (saved / "config.json").write_bytes((seventeen / "source" / "config.json").read_bytes())

    inspection = inspect_checkpoint(saved)

    assert inspection.ok
    assert len(inspection.other_entries) == 1


@pytest.mark.parametrize("degree", [2, 4])
def test_c15_stacks_load_over_expert_ranks_of_stock_torch(work: Path, degree: int) -> None:
    num_stacks = 4 * 6

    assert (work / f"loaded.ep{degree}").read_text() == str(num_stacks)
