"""Writes optimizers.json: what torch.optim does to a small model in 100 steps.

Run with a Python that has torch:
    python3 tests/optim/goldens/optimizers.py

Values and gradients follow formulas that are exact in float, so that the test
has the same ones; see GoldenModel in tests/optim/optimizer_golden_test.cc.
"""

import json
import pathlib

import torch

SHAPES = {
    "body.weight": [5, 3], "body.bias": [5],
    "head.weight": [3, 7], "head.bias": [3],
    "unused.weight": [2, 2], "unused.bias": [2],  # Never has a gradient.
}
STEPS = 100
SAVED_AT = 50


def value(place, shape):
    i = torch.arange(torch.Size(shape).numel())
    return ((i * 29 + place * 17) % 64 - 32).float().div(32).view(shape)


def gradient(step, place, shape):
    i = torch.arange(torch.Size(shape).numel())
    return ((i * 37 + step * 101 + place * 53) % 64 - 32).float().div(
        64).view(shape)


def in_group(name, group):
    if "module" in group and not name.startswith(group["module"] + "."):
        return False
    return "ndim" not in group or len(SHAPES[name]) == group["ndim"]


def numbers(tensor):
    """Enough digits for a float."""
    return [float(f"{x:.9g}") for x in tensor.flatten().tolist()]


def run(kind, options, groups):
    params = {name: torch.nn.Parameter(value(i, shape))
              for i, (name, shape) in enumerate(SHAPES.items())}
    lists, left = [], dict(params)
    for group in groups:
        names = [n for n in left if in_group(n, group)]
        lists.append({"params": [(n, left.pop(n)) for n in names],
                      **group.get("options", {})})
    if left:
        lists.append({"params": list(left.items())})
    options = dict(options)
    optimizer = getattr(torch.optim, kind)(lists, **options)
    result = {}
    for step in range(STEPS):
        for i, (name, p) in enumerate(params.items()):
            if not name.startswith("unused."):
                p.grad = gradient(step, i, SHAPES[name])
        optimizer.step()
        if step + 1 in (1, SAVED_AT, STEPS):
            result[f"after_{step + 1}"] = {
                n: numbers(p.detach()) for n, p in params.items()}
        if step + 1 == SAVED_AT:
            result["state"] = {
                n: {k: numbers(v) for k, v in optimizer.state[p].items()}
                for n, p in params.items() if p in optimizer.state}
            result["param_groups"] = [
                {**g, "params": g["param_names"]}
                for g in optimizer.state_dict()["param_groups"]]
            for g in result["param_groups"]:
                del g["param_names"]
    return result


def cases():
    half_rate = {"module": "head", "options": {"lr": 0.005,
                                               "weight_decay": 0.3}}
    yield "AdamW", {"lr": 0.01, "weight_decay": 0.1}, []
    yield "AdamW", {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}, []
    yield "AdamW", {"lr": 0.01, "weight_decay": 0.1, "maximize": True,
                    "betas": [0.8, 0.95], "eps": 1e-4}, []
    yield "AdamW", {"lr": 0.01, "weight_decay": 0.1}, [half_rate]
    yield "SGD", {"lr": 0.1}, []
    yield "SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}, []
    yield "SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}, []
    yield "SGD", {"lr": 0.1, "momentum": 0.8, "nesterov": True,
                  "weight_decay": 0.01, "maximize": True}, []
    yield "Adagrad", {"lr": 0.1}, []
    yield "Adagrad", {"lr": 0.1, "lr_decay": 0.05, "weight_decay": 0.01,
                      "initial_accumulator_value": 0.5, "eps": 1e-6}, []
    yield "Adagrad", {"lr": 0.1, "maximize": True}, []


def main():
    golden = {"torch": torch.__version__, "shapes": SHAPES, "cases": []}
    lines = []
    for kind, options, groups in cases():
        lines.append(json.dumps({"optimizer": kind, "options": options,
                                 "groups": groups,
                                 **run(kind, options, groups)}))
    text = json.dumps(golden)[:-2] + "\n" + ",\n".join(lines) + "]}\n"
    path = pathlib.Path(__file__).with_suffix(".json")
    path.write_text(text, encoding="ascii")


if __name__ == "__main__":
    main()
