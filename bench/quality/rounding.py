"""What a lossy identity costs: answers behind prompts that were stored as 8 bits and restored, against an engine's own.

Every reader of every world computes its prompt in full, stores it under an identity with ``lossy = "int8"``, by the
real client, and restores all of it elsewhere. Both are asked the world's questions. Without rounding the two would be
equal bit for bit. ``moved``: by how much restored values differ, root of the mean square, over that of the values.

python -m bench.quality.rounding          # SmolLM2, all worlds: minutes of one core
"""

import argparse
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from bench.quality.arrangements import Order, reader_parts
from bench.quality.reference import follow, refer
from bench.quality.scenes import SCENES
from bench.quality.trial import HOST_BYTES, LEASE_TTL_S, RESTORE_TIMEOUT_S
from bench.quality.worlds import Model, World, build_world, load_model
from kvservice.app import LocalNode
from kvservice.client import Client, RoundPrompt
from kvservice.client.demo.measure import Closeness, closeness
from kvservice.client.demo.model import smollm2
from kvservice.config import Settings
from kvservice.model.identity import INT8

NAME: Final = "SmolLM2-135M-Instruct"


@dataclass(frozen=True, slots=True)
class Loss:
    """Of one reader: agreement and distance of next tokens, and how far K and V moved."""

    close: Closeness
    tokens: int
    moved: tuple[float, float]


def lose(model: Model, world: World, client: Client, reader: int) -> Loss:
    """One prompt, computed, stored and restored."""
    decoder, kv = model.decoder, model.decoder.kv
    views = [kv.plane_views(layer) for layer in range(kv.shape.layers)]
    prompt = RoundPrompt.from_parts(client.namespace, reader_parts(world, Order.SAME, reader))
    own, restored = kv.allocate(prompt.token_count), kv.allocate(prompt.token_count)
    decoder.prefill(torch.tensor(prompt.tokens), own)
    reference = refer(decoder, world, own, is_judged=False)
    client.store(prompt, views, own)
    with client.lookup([prompt]) as plans:
        assert plans[0].exact_prefix_tokens == prompt.token_count
        client.restore(plans, views, [restored]).wait(RESTORE_TIMEOUT_S)
    logits = follow(decoder, restored, world.tails, reference.answers)
    close = Closeness.mean([closeness(*pair) for pair in zip(reference.logits, logits, strict=True)])
    moved = tuple(_moved([layer[plane] for layer in views], own, restored) for plane in range(2))
    kv.free(own)
    kv.free(restored)
    return Loss(close, sum(map(len, reference.answers)), (moved[0], moved[1]))


def _moved(planes: list[Tensor], own: Tensor, restored: Tensor) -> float:
    """Over all layers of a plane, views ``[blocks, block_size, heads, head_size]``."""
    before, after = (torch.cat([one.flatten(0, 1)[slots] for one in planes]).double() for slots in (own, restored))
    return float((after - before).square().mean().sqrt() / before.square().mean().sqrt())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/kvservice/models")
    parser.add_argument("--worlds", nargs="+", choices=SCENES, default=list(SCENES))
    parser.add_argument("--readers", type=int, default=4)
    asked = parser.parse_args()
    model = load_model(NAME, smollm2(asked.cache))
    losses: list[Loss] = []
    settings = Settings(
        socket="/nonexistent/kv.sock", grpc_port=-1, http_port=-1, host_bytes=HOST_BYTES, worker_threads=1
    )
    with LocalNode(settings) as node:
        for name in asked.worlds:
            world = build_world(model, SCENES[name])
            identity = replace(model.identity, salt=name, lossy=INT8)
            with Client.in_process(node, identity, lease_ttl_s=LEASE_TTL_S) as client:
                found = [lose(model, world, client, reader) for reader in world.readers(asked.readers)]
                client.delete()
            show(name, found)
            losses += found
    show("all", losses)


def show(name: str, losses: list[Loss]) -> None:
    """One line."""
    close, tokens = Closeness.mean([one.close for one in losses]), sum(one.tokens for one in losses)
    key, value = (statistics.fmean(one.moved[plane] for one in losses) for plane in range(2))
    print(
        f"{name:12s} {len(losses)} readers, {tokens} next tokens: agreement {close.agreement:.3f}, "
        f"KL {close.kl:.5f} nats; K moved by {key:.2%}, V by {value:.2%}",
        flush=True,
    )


if __name__ == "__main__":
    main()
