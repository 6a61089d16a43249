"""PyTorch's side of checkpoint_io.py: one rank of a job, prints JSON on rank 0.

    checkpoint_io_peer.py --op OP --mib 1024 --folder DIR [--cold]

The same layers as checkpoint_io_benchmark.cc, sharded by FSDP2. save_full:
gather to rank 0 and torch.save; load_full, load_mmap: every rank torch.loads
the file and keeps its part; *_safetensors the same with that package;
*_sharded: torch.distributed.checkpoint. Everything written is synced.
"""
import argparse
import glob
import json
import os
import sys
import time
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_optimizer_state_dict,
    set_model_state_dict)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

warnings.filterwarnings("ignore")
WIDTH = 2048
LAYER_MIB = WIDTH * WIDTH * 4 >> 20
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Layers(torch.nn.Module):
    def __init__(self, mib):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(WIDTH, WIDTH, bias=False)
            for _ in range(mib // LAYER_MIB))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.mean()


def sync(path):
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def set_cached(folder, value):
    """Whether the page cache has the files."""
    for path in glob.glob(folder + "/**", recursive=True):
        if not os.path.isfile(path):
            continue
        with open(path, "rb", buffering=0) as f:
            if value:
                while f.read(1 << 20):
                    pass
            else:
                os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def memory_mib(field):
    for line in open("/proc/self/status"):
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--op", required=True)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--cold", action="store_true")
    a = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = Layers(a.mib)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    state = {}

    def optimizer_step():
        model(torch.ones(16, WIDTH)).backward()
        optimizer.step()
        optimizer.zero_grad()

    def train(steps):
        start = time.perf_counter()
        for _ in range(steps):
            optimizer_step()
        dist.barrier()
        return time.perf_counter() - start

    if "sharded" in a.op or "async" in a.op:
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer_step()
        state = {"model": get_model_state_dict(model),
                 "optim": get_optimizer_state_dict(model, optimizer)}
    pt, st = a.folder + "/m.pt", a.folder + "/m.safetensors"
    if "async" in a.op:
        own_group = dist.new_group(backend="gloo")

    def save_async():
        return dcp.async_save(state, checkpoint_id=a.folder + "/d",
                              process_group=own_group)

    def measure_async(out, steps=4):
        alone = train(steps)
        start = time.perf_counter()
        pending = save_async()
        dist.barrier()
        out["seconds"].append(time.perf_counter() - start)
        train(steps)
        out.setdefault("delay_seconds", []).append(
            time.perf_counter() - start - alone)
        pending.result()
        dist.barrier()

    def save():
        if "sharded" in a.op:
            dcp.save(state, checkpoint_id=a.folder + "/d")
        else:
            full = get_model_state_dict(model, options=FULL)
            if rank == 0 and "safetensors" in a.op:
                save_file(full, st)
                sync(st)
            elif rank == 0:
                torch.save(full, pt)
                sync(pt)

    def load():
        if "sharded" in a.op:
            dcp.load(state, checkpoint_id=a.folder + "/d")
            return
        if "safetensors" in a.op:
            full = load_file(st)
        else:
            full = torch.load(pt, weights_only=True, mmap="mmap" in a.op)
        set_model_state_dict(model, full,
                             options=StateDictOptions(full_state_dict=True))

    def once():
        start = time.perf_counter()
        (load if "load" in a.op else save)()
        dist.barrier()
        return time.perf_counter() - start

    parameters = a.mib // LAYER_MIB * LAYER_MIB << 20
    out = {"op": a.op, "cold": a.cold, "torch": torch.__version__,
           "bytes": 3 * parameters if state else parameters,
           "seconds": [], "extra_mib": []}
    if "load" in a.op:
        save()
    if "async" in a.op:
        save_async().result()
        dist.barrier()
    for _ in range(a.repeats):
        dist.barrier()
        if "load" in a.op and rank == 0:
            set_cached(a.folder, not a.cold)
        dist.barrier()
        with open("/proc/self/clear_refs", "w") as f:
            f.write("5")
        resident = memory_mib("VmRSS")
        if "async" in a.op:
            measure_async(out)
        else:
            out["seconds"].append(once())
        out["extra_mib"].append(memory_mib("VmHWM") - resident)
    if rank == 0:
        print(json.dumps(out), flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # Threads of torch sometimes abort in an orderly end.


main()
