"""Writes lr_schedule.json: the factors of transformers' schedules.

Run with a Python that has torch and transformers:
    python3 tests/optim/goldens/lr_schedule.py
"""

import json
import pathlib

import torch
import transformers
from transformers import optimization

T = 40


def factors(make):
    """The rates of steps 0 to T of an optimizer whose base rate is 1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = make(optimizer)
    values = []
    for _ in range(T + 1):
        values.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return values


def cases():
    for warmup in (3, 10):
        yield "linear-warmup+cosine-decay", {"warmup_steps": warmup}, (
            lambda o: optimization.get_cosine_schedule_with_warmup(
                o, warmup, T))
    yield "linear-warmup+cosine-decay", {"warmup_steps": 5,
                                         "min_lr_ratio": 0.1}, (
        lambda o: optimization.get_cosine_with_min_lr_schedule_with_warmup(
            o, 5, T, min_lr_rate=0.1))
    yield "constant", {"warmup_steps": 5}, (
        lambda o: optimization.get_constant_schedule(o))
    for warmup in (0, 7):
        yield "linear-warmup+constant", {"warmup_steps": warmup}, (
            lambda o: optimization.get_constant_schedule_with_warmup(
                o, warmup))
    for warmup in (0, 7):
        yield "inverse-square-root", {"warmup_steps": warmup}, (
            lambda o: optimization.get_inverse_sqrt_schedule(o, warmup))
    for shape in ("linear", "cosine", "1-sqrt"):
        for warmup, decay, floor in ((0, 10, 0.0), (5, 8, 0.1), (8, 32, 0.0)):
            options = {"warmup_steps": warmup, "decay_ratio": decay / T,
                       "decay_shape": shape, "min_lr_ratio": floor}
            yield "warmup-stable-decay", options, (
                lambda o: optimization.get_wsd_schedule(
                    o, warmup, decay, num_training_steps=T, decay_type=shape,
                    min_lr_ratio=floor))


def main():
    golden = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "total_steps": T,
        "cases": [{"type": name, "options": options, "factors": factors(make)}
                  for name, options, make in cases()],
    }
    # One case a line.
    text = json.dumps({**golden, "cases": []})[:-2] + "\n" + ",\n".join(
        json.dumps(case) for case in golden["cases"]) + "]}\n"
    path = pathlib.Path(__file__).with_suffix(".json")
    path.write_text(text, encoding="ascii")


if __name__ == "__main__":
    main()
