"""Writes checkpoint_gradients.json: losses and gradients of a small block under
torch.utils.checkpoint, several frames, and two backwards of a retained graph.

Run with a Python that has torch:
    python3 tests/activation_ckpt/goldens/checkpoint_gradients.py
"""

import json
import pathlib

import torch
from torch.utils.checkpoint import checkpoint


def values(count, phase):
    """What both languages can write down without a random generator."""
    steps = torch.arange(count, dtype=torch.float64)
    return torch.sin(0.7 * steps + phase).to(torch.float32)


def main():
    first = values(24, 0.1).view(6, 4).requires_grad_()
    second = values(24, 0.2).view(4, 6).requires_grad_()
    scale = values(4, 0.3).requires_grad_()
    x = values(12, 0.4).view(3, 4).requires_grad_()

    def block(x, scale):
        hidden = torch.nn.functional.gelu(x @ first.t())
        return x + torch.tanh(hidden @ second.t()) * scale

    y = x
    for _ in range(3):
        y = checkpoint(block, y, scale, use_reentrant=False)
    loss = y.pow(2).mean()
    loss.backward(retain_graph=True)
    loss.backward()
    golden = {"loss": loss.item()}
    for name, tensor in [("first", first), ("second", second),
                         ("scale", scale), ("x", x)]:
        golden[name] = tensor.grad.flatten().tolist()
    path = pathlib.Path(__file__).with_suffix(".json")
    path.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
