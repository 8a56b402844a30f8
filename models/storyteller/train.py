"""Training: the storyteller on the corpus."""

from __future__ import annotations

import math
import sys
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from models.storyteller import corpus
from models.storyteller.network import Network, Size

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch import Tensor


class Plan(NamedTuple):
    """How long and how fast to train."""

    steps: int
    rows: int  # of a step
    rate: float
    minutes: float  # stop by then, whatever `steps` says
    warm: int = 100
    decay: float = 0.05


class Rows(NamedTuple):
    """A corpus on the device: tokens and, for each, whether it is learnt."""

    tokens: Tensor
    weights: Tensor

    @classmethod
    def of(cls, tokens: np.ndarray, weights: np.ndarray, device: str) -> Rows:
        """Move a packed corpus to the device."""
        kept = torch.from_numpy(tokens.astype(np.int16)).to(device)
        return cls(kept, torch.from_numpy(weights).to(device))

    def take(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs, targets and weights of some rows."""
        tokens, weights = self.tokens[index].long(), self.weights[index]
        return tokens[:, :-1], tokens[:, 1:], weights[:, 1:].float()

    def __len__(self) -> int:
        return len(self.tokens)


def device() -> str:
    """The GPU where there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _fast() -> AbstractContextManager:
    return torch.autocast("cuda", torch.bfloat16) if device() == "cuda" else nullcontext()


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _rate(plan: Plan, done: float, step: int) -> float:
    """Rise, then fall along a cosine to a fiftieth."""
    rise = min(1.0, (step + 1) / plan.warm)
    return plan.rate * rise * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def _optimiser(network: Network, plan: Plan) -> torch.optim.Optimizer:
    matrices = [w for w in network.parameters() if w.dim() == 2]
    others = [w for w in network.parameters() if w.dim() != 2]
    groups = [
        {"params": matrices, "weight_decay": plan.decay},
        {"params": others, "weight_decay": 0.0},
    ]
    fused = device() == "cuda"
    return torch.optim.AdamW(groups, lr=plan.rate, betas=(0.9, 0.97), fused=fused)


Loss = "Callable[[Tensor, Tensor, Tensor], Tensor]"


def _run(network: Network, plan: Plan, batch: Callable[[], tuple], loss_of: Loss) -> None:
    """The loop: as many steps as the plan has, or as its minutes allow."""
    optimiser = _optimiser(network, plan)
    began, shown = time.monotonic(), 0.0
    step, done = 0, 0.0
    while done < 1.0:
        spent = (time.monotonic() - began) / (60 * plan.minutes)
        done = max(step / plan.steps, spent)
        for group in optimiser.param_groups:
            group["lr"] = _rate(plan, done, step)
        loss = loss_of(*batch())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        step += 1
        if step % 100 == 0 or done >= 1.0 or step in (1, 10):
            shown = loss.item()
            seconds = time.monotonic() - began
            speed = step * plan.rows * corpus.ROW / seconds / 1e6
            _say(f"step {step:5d}  loss {shown:.4f}  {seconds:5.0f} s  {speed:.2f} M tokens/s")


def _weighted(losses: Tensor, weights: Tensor) -> Tensor:
    return (losses * weights.flatten()).sum() / weights.sum().clamp_min(1.0)


def _sampler(rows: Rows, count: int) -> Callable[[], tuple]:
    """Rows in a new random order each time round."""
    order = iter(())

    def batch() -> tuple:
        nonlocal order
        index = next(order, None)
        if index is None or len(index) < count:
            shuffled = torch.randperm(len(rows), device=rows.tokens.device)
            order = iter(shuffled.split(min(count, len(rows))))
            index = next(order)
        return rows.take(index)

    return batch


def train_storyteller(size: Size, rows: Rows, plan: Plan, start: Path | None) -> Network:
    """Train the network on the corpus, from nothing or from saved weights."""
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    network = restore(start) if start else Network(size).to(device())

    def loss_of(inputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        with _fast():
            logits = network(inputs)
        losses = functional.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), reduction="none"
        )
        return _weighted(losses, weights)

    run = torch.compile(loss_of) if device() == "cuda" else loss_of
    _run(network, plan, _sampler(rows, plan.rows), run)
    return network


@torch.no_grad()
def perplexity(network: Network, rows: Rows, count: int = 64) -> float:
    """Perplexity on what is learnt in the first rows."""
    total = torch.zeros((), device=rows.tokens.device)
    weight = torch.zeros((), device=rows.tokens.device)
    for index in torch.arange(min(count, len(rows)), device=rows.tokens.device).split(8):
        inputs, targets, weights = rows.take(index)
        with _fast():
            logits = network(inputs)
        losses = functional.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), reduction="none"
        )
        total += (losses * weights.flatten()).sum()
        weight += weights.sum()
    return math.exp(total.item() / max(1.0, weight.item()))


def save(network: Network, path: Path) -> None:
    """Save weights, in half precision, and dimensions."""
    weights = {name: w.detach().half().cpu() for name, w in network.state_dict().items()}
    torch.save({"size": network.size.as_dict(), "weights": weights}, path)


def restore(path: Path) -> Network:
    """A network as it was saved."""
    saved = torch.load(path, map_location="cpu", weights_only=True)
    network = Network(Size(**saved["size"]))
    network.load_state_dict({name: w.float() for name, w in saved["weights"].items()})
    return network.to(device())
