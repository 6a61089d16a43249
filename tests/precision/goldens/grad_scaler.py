"""Writes grad_scaler.json: what torch.amp.GradScaler does with good steps and
with steps whose gradient is infinite.

Run with a Python that has torch:
    python3 tests/precision/goldens/grad_scaler.py
"""

import json
import pathlib

import torch

SEQUENCES = {
    "good": "..........",
    "one_bad": "..x.......",
    "bad_at_growth": "...x...x..",
    "bad_row": "xxxx......",
    "mixed": ".x..xx...x",
}


def run(flags, interval):
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.125)
    scaler = torch.amp.GradScaler("cpu", growth_interval=interval)
    scales, trackers, weights = [], [], []
    for flag in flags:
        optimizer.zero_grad()
        loss = (weight * (float("inf") if flag == "x" else 1.0)).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        state = scaler.state_dict()
        scales.append(state["scale"])
        trackers.append(state["_growth_tracker"])
        weights.append(weight.item())
    return {"flags": flags, "interval": interval, "scales": scales,
            "trackers": trackers, "weights": weights}


def main():
    cases = [run(flags, interval)
             for flags in SEQUENCES.values() for interval in (1, 3, 2000)]
    path = pathlib.Path(__file__).with_suffix(".json")
    path.write_text(json.dumps({"torch": torch.__version__, "cases": cases},
                               indent=1) + "\n")


if __name__ == "__main__":
    main()
