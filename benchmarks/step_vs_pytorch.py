"""Trains the same tiny GPT with PyTorch FSDP1, FSDP2 and FullShard, in turns.

    python3 benchmarks/step_vs_pytorch.py [--quick] [--out FILE]

Prints the median step time of each and how many times faster FullShard is than
the best of PyTorch's. All see the same tokens from the same weights; the script
fails if a loss differs by more than 1e-3 or the first gradient's norm by more
than 1e-4 of itself, and prints the largest difference. PyTorch's ranks get the
malloc settings of our launcher, without which FSDP2 is slower.

Needs a Python with torch 2.11: FULLSHARD_TEST_PYTHON, else the one that bazelw
names in .fullshard.bazelrc, else the caller's. Builds the binary
//benchmarks:step_benchmark if it is not there.
"""
import argparse
import datetime
import json
import os
import pathlib
import platform
import re
import socket
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
BINARY = ROOT / "bazel-bin/benchmarks/step_benchmark"
# As launch_ranks sets them.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20),
          "MALLOC_TRIM_THRESHOLD_": str(512 << 20),
          "MALLOC_TOP_PAD_": str(16 << 20)}


def torch_python():
    if "FULLSHARD_TEST_PYTHON" in os.environ:
        return os.environ["FULLSHARD_TEST_PYTHON"]
    settings = ROOT / ".fullshard.bazelrc"
    found = settings.exists() and re.search(
        "FULLSHARD_TEST_PYTHON=(.+)", settings.read_text())
    return found.group(1) if found else sys.executable


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_pytorch(mode, world, tokens, steps):
    port = free_port()
    ranks = []
    for rank in range(world):
        env = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(world),
                   LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world),
                   MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                   OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", **MALLOC)
        ranks.append(subprocess.Popen(
            [torch_python(), str(ROOT / "benchmarks/pytorch_peer.py"),
             f"--mode={mode}", f"--tokens={tokens}", f"--steps={steps}"],
            env=env, stdout=subprocess.PIPE, text=True))
    outputs = [r.communicate(timeout=600)[0] for r in ranks]
    if any(r.returncode for r in ranks):
        sys.exit(f"PyTorch {mode} failed with N = {world}")
    return json.loads(outputs[0])


def run_fullshard(mode, world, tokens, steps):
    out = subprocess.run(
        [str(BINARY), f"--mode={mode}", f"--world={world}",
         f"--tokens={tokens}", f"--steps={steps}"],
        check=True, stdout=subprocess.PIPE, text=True, timeout=600).stdout
    return json.loads(out)


def compare(world, tokens, steps, repeats, peers, log):
    runs = {mode: [] for mode in peers + ["fsdp", "floor"]}
    for _ in range(repeats):
        for mode in runs:  # In turns, so that all share the machine's moods.
            run = run_pytorch if mode in peers else run_fullshard
            result = run(mode, world, tokens, steps)
            runs[mode].append(result)
            log(result)
    ours = runs["fsdp"][0]
    worst = 0
    for mode in peers:
        for theirs in runs[mode]:
            worst = max([worst] + [abs(a - b) for a, b in zip(
                ours["losses"], theirs["losses"])])
            norms = ours["grad_norm0"], theirs["grad_norm0"]
            if abs(norms[0] - norms[1]) > 1e-4 * norms[1]:
                sys.exit(f"gradient norms of FullShard and {mode}: {norms}")
    if worst > 1e-3:
        sys.exit(f"losses of FullShard and PyTorch differ by {worst}")
    ms = {mode: statistics.median(r["step_ms"]["median"] for r in results)
          for mode, results in runs.items()}
    best = min(peers, key=lambda mode: ms[mode])
    print(f"N = {world}, {tokens} tokens per rank:", flush=True)
    for mode in peers:
        print(f"  PyTorch {mode:10} {ms[mode]:8.1f} ms")
    print(f"  FullShard          {ms['fsdp']:8.1f} ms  "
          f"{ms[best] / ms['fsdp']:.2f} x faster than {best}, "
          f"{ms['fsdp'] / ms['floor']:.2f} x the floor of {ms['floor']:.1f} ms; "
          f"losses within {worst:.0e}", flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true",
                        help="N = 2, 64 tokens, FSDP2 only")
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", help="file for the raw JSON lines")
    a = parser.parse_args()
    if not BINARY.exists() or a.quick:
        subprocess.run(["./bazelw", "build", "--noshow_progress",
                        "//benchmarks:step_benchmark"], cwd=ROOT, check=True)
    out = open(a.out, "w") if a.out else None

    def log(record):
        if out:
            print(json.dumps(record), file=out, flush=True)

    cpu = [line.split(":")[1].strip() for line in open("/proc/cpuinfo")
           if line.startswith("model name")]
    log({"command": " ".join(["step_vs_pytorch.py"] + sys.argv[1:]),
         "date": datetime.date.today().isoformat(), "cpu": cpu[0],
         "cores": os.cpu_count(), "kernel": platform.release(),
         "python": platform.python_version(),
         "compiler": subprocess.run(["g++", "-dumpfullversion"], text=True,
                                    stdout=subprocess.PIPE).stdout.strip(),
         "load": os.getloadavg()[0], "peer_environment": MALLOC})
    if a.quick:
        compare(2, 64, 8, 1, ["fsdp2"], log)
        return
    for world in a.worlds:
        for tokens in a.tokens:
            steps = a.steps if tokens == 64 else max(5, a.steps // 2)
            compare(world, tokens, steps, a.repeats,
                    ["fsdp1", "fsdp1_flat", "fsdp2"], log)


if __name__ == "__main__":
    main()
