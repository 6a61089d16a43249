"""Saves and loads the same layers with PyTorch and FullShard, in turns.

    python3 benchmarks/checkpoint_io.py [--mib 1024] [--out FILE]

Prints the median speed of each and of plain system calls in the same folder,
what an asynchronous save costs training per GiB of a rank's state (until it
goes on, and with the steps beside it), and the memory that rank 0 took
meanwhile. Needs a Python with torch 2.11 and safetensors, as step_vs_pytorch.py
does, and about 20 times --mib of disk.
"""
import argparse
import datetime
import json
import os
import pathlib
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile

from step_vs_pytorch import MALLOC, ROOT, free_port, torch_python

BINARY = ROOT / "bazel-bin/benchmarks/checkpoint_io_benchmark"
# What is measured: FullShard's name of it, PyTorch's names, cold or warm.
ROWS = [("save_full", ["save_full"], False),
        ("save_safetensors", ["save_safetensors"], False),
        ("save_sharded", ["save_sharded"], False),
        ("save_async", ["save_async"], False),
        ("load_full", ["load_full", "load_mmap"], True),
        ("load_full", ["load_full", "load_mmap"], False),
        ("load_safetensors", ["load_safetensors"], True),
        ("load_safetensors", ["load_safetensors"], False),
        ("load_sharded", ["load_sharded"], True),
        ("load_sharded", ["load_sharded"], False)]


def run_pytorch(op, world, mib, cold):
    port = free_port()
    folder = tempfile.mkdtemp(prefix="checkpoint_io_")
    ranks = []
    for rank in range(world):
        env = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(world),
                   LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world),
                   MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                   OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", **MALLOC)
        ranks.append(subprocess.Popen(
            [torch_python(), str(ROOT / "benchmarks/checkpoint_io_peer.py"),
             "--op", op, "--mib", str(mib), "--folder", folder]
            + (["--cold"] if cold else []),
            env=env, stdout=subprocess.PIPE, text=True))
    outputs = [r.communicate(timeout=900)[0] for r in ranks]
    shutil.rmtree(folder)
    if any(r.returncode for r in ranks):
        sys.exit(f"PyTorch {op} failed")
    return dict(json.loads(outputs[0]), by="pytorch", world=world)


def run_fullshard(op, world, mib, cold):
    folder = tempfile.mkdtemp(prefix="checkpoint_io_")
    out = subprocess.run(
        [str(BINARY), f"--op={op}", f"--world={world}", f"--mib={mib}",
         f"--folder={folder}", "--repeats=1"] + (["--cold"] if cold else []),
        check=True, stdout=subprocess.PIPE, text=True, timeout=900).stdout
    shutil.rmtree(folder)
    return dict(json.loads(out), by="fullshard")


def median(runs, key="seconds"):
    return statistics.median(value for run in runs for value in run[key])


def compare(row, world, mib, repeats, log):
    ours, peers, cold = row
    disk_op = "disk_read" if "load" in ours else "disk_write"
    runs = {"disk": [], "fullshard": [], **{peer: [] for peer in peers}}
    for _ in range(repeats):
        for name in runs:  # In turns, so that all share the machine's moods.
            if name == "disk":
                result = run_fullshard(disk_op, 1, mib, False)
            elif name == "fullshard":
                result = run_fullshard(ours, world, mib, cold)
            else:
                result = run_pytorch(name, world, mib, cold)
            log(result)
            runs[name].append(result)
    gib = runs["fullshard"][0]["bytes"] / 2**30
    title = ours + (" cold" if cold else " warm" if "load" in ours else "")
    if ours == "save_async":
        for key, what in [("seconds", "until training goes on"),
                          ("delay_seconds", "longer in all, with the steps "
                           "beside it")]:
            per_gib = {name: 1000 * median(runs[name], key) / (gib / world)
                       for name in ["fullshard"] + peers}
            print(f"{title}: ms per GiB of a rank's state {what}: " +
                  ", ".join(f"{n} {v:.0f}" for n, v in per_gib.items()),
                  flush=True)
        return
    speed = {name: 1.073741824 * gib / median(runs[name])
             for name in ["fullshard"] + peers}
    extra = {name: median(runs[name], "extra_mib")
             for name in ["fullshard"] + peers}
    cached, direct = (1.073741824 * mib / 1024 / median(runs["disk"], key)
                      for key in ("seconds", "seconds_direct"))
    print(f"{title}: GB/s " +
          ", ".join(f"{n} {v:.2f}" for n, v in speed.items()) +
          f", disk {cached:.2f}, past the page cache {direct:.2f}; "
          f"{speed['fullshard'] / max(cached, direct):.2f} of the disk, "
          f"{speed['fullshard'] / max(speed[p] for p in peers):.1f} x the peer; "
          "MiB more on rank 0 " +
          ", ".join(f"{n} {v:.0f}" for n, v in extra.items()), flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", help="part of the names of what to measure")
    parser.add_argument("--out", help="file for the raw JSON lines")
    a = parser.parse_args()
    if not BINARY.exists():
        subprocess.run(["./bazelw", "build", "--noshow_progress",
                        "//benchmarks:checkpoint_io_benchmark"], cwd=ROOT,
                       check=True)
    out = open(a.out, "w") if a.out else None

    def log(record):
        if out:
            print(json.dumps(record), file=out, flush=True)

    cpu = [line.split(":")[1].strip() for line in open("/proc/cpuinfo")
           if line.startswith("model name")]
    log({"command": " ".join(["checkpoint_io.py"] + sys.argv[1:]),
         "date": datetime.date.today().isoformat(), "cpu": cpu[0],
         "cores": os.cpu_count(), "kernel": platform.release(),
         "python": platform.python_version(), "load": os.getloadavg()[0]})
    for row in ROWS:
        if not a.only or a.only in row[0]:
            compare(row, a.world, a.mib, a.repeats, log)


if __name__ == "__main__":
    main()
