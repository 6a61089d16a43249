"""One rank of the tiny GPT under PyTorch FSDP; step_vs_pytorch.py starts it.

The model, weights and tokens are those of tiny_gpt.h: matrices from
splitmix64(fnv1a(name) + i), samples as arithmetic progressions.
"""
import argparse
import json
import os
import time
import warnings

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

LAYERS, WIDTH, HEADS, VOCAB = 12, 256, 8, 1024


def splitmix64(x):
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def fnv1a(text):
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        b, t, d = x.shape
        z = self.qkv(self.ln1(x)).view(b, t, 3, HEADS, d // HEADS)
        q, k, v = z.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class TinyGpt(nn.Module):
    def __init__(self, tokens):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, WIDTH)
        self.pos = nn.Embedding(tokens, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        scale = np.float32(0.02 * 3**0.5)
        for name, p in self.named_parameters():
            if p.dim() == 1:
                norm = "ln" in name and name.endswith("weight")
                nn.init.constant_(p, 1.0 if norm else 0.0)
                continue
            with np.errstate(over="ignore"):
                i = np.arange(p.numel(), dtype=np.uint64) + np.uint64(fnv1a(name))
            u = (splitmix64(i) >> np.uint64(40)).astype(np.float32)
            u = np.float32(2) * (u * np.float32(2.0**-24)) - np.float32(1)
            with torch.no_grad():
                p.copy_(torch.from_numpy(u * scale).view_as(p))

    def forward(self, tokens, targets):
        x = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln_f(x)).float()
        return F.cross_entropy(logits.view(-1, VOCAB), targets.view(-1))


def sample(step, rank, world, tokens):
    h = int(splitmix64(np.array([step * world + rank], dtype=np.uint64))[0])
    row = (h % VOCAB + np.arange(tokens + 1) * (1 + (h >> 32) % 7)) % VOCAB
    row = torch.from_numpy(row.astype(np.int64))[None]
    return row[:, :-1].contiguous(), row[:, 1:].contiguous()


def shard(mode, model, world):
    if mode == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        mesh = init_device_mesh("cpu", (world,))
        blocks = list(model.blocks)
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.set_modules_to_forward_prefetch(blocks[:1])
        model.set_modules_to_backward_prefetch(blocks[-1:])
        for a, b in zip(blocks, blocks[1:]):
            a.set_modules_to_forward_prefetch([b])
            b.set_modules_to_backward_prefetch([a])
        model._set_unshard_async_op(True)
        return model
    import functools
    from torch.distributed.fsdp import BackwardPrefetch
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
    policy = functools.partial(transformer_auto_wrap_policy,
                               transformer_layer_cls={Block})
    return FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), auto_wrap_policy=policy,
        use_orig_params=mode == "fsdp1", forward_prefetch=True,
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE)


def gradient_norm(net):
    """Of the whole gradient: tells a mean from a sum, which losses do not."""
    total = torch.zeros((), dtype=torch.float64)
    for p in net.parameters():
        if p.grad is not None:
            grad = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
            total += grad.double().square().sum()
    dist.all_reduce(total)
    return total.sqrt().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=["fsdp1", "fsdp1_flat", "fsdp2"])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    a = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    net = shard(a.mode, TinyGpt(a.tokens), world)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, betas=(0.9, 0.95),
                                  eps=1e-8, weight_decay=0.1, fused=True)
    losses, times = [], []
    for step in range(a.warmup + a.steps):
        if step == a.warmup:
            dist.barrier()
        start = time.perf_counter()
        loss = net(*sample(step, rank, world, a.tokens))
        loss.backward()
        if step == 0:
            norm = gradient_norm(net)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if step >= a.warmup:
            times.append(time.perf_counter() - start)
    mean = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(mean)
    if rank == 0:
        print(json.dumps({
            "bench": "pytorch_step", "mode": a.mode, "world": world,
            "tokens": a.tokens, "torch": torch.__version__,
            "step_ms": {"median": sorted(times)[len(times) // 2] * 1e3,
                        "min": min(times) * 1e3, "n": len(times)},
            "grad_norm0": round(norm, 6),
            "losses": [round(x, 5) for x in (mean / world).tolist()]}),
            flush=True)
    dist.barrier()
    dist.destroy_process_group()
    # Without it, Gloo sometimes aborts while the interpreter ends.
    os._exit(0)


main()
