"""Models of these tests: a random Llama made in a second, and SmolLM2 from the demo's converter, both kept on disk."""

import json
import subprocess
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from kvservice.client.demo.model import TINY_CONFIG, TINY_STD

CONVERT_TIMEOUT_S = 300
ROOT = Path(__file__).resolve().parent.parent.parent


def tiny_llama(cache: Path, *, head_size: int = 32, layers: int = 4, seed: int = 0) -> Path:
    """Folder of a random Llama: vocab 1024, hidden 4 heads of ``head_size``, 2 KV heads. No tokenizer: give token ids.

    Its weights spread so wide (0.15) that greedy output depends on the whole prefix: a wrong block changes tokens.
    Equal arguments give equal weights.
    """
    target = cache / f"tiny-llama-{head_size}-{layers}-{seed}"
    if not target.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".tiny", dir=cache, ignore_cleanup_errors=True) as scratch:
            draft = Path(scratch) / "draft"
            draft.mkdir()
            _write_tiny(draft, head_size, layers, seed)
            draft.rename(target)
    return target


def smollm2(cache: Path, python: Path) -> Path:
    """Folder of SmolLM2-135M-Instruct, converted once by ``python``, an environment with the demo's requirements.

    vLLM's own has no reader of its file format. Takes 30-60 s the first time.
    """
    script = "import sys, pathlib, kvservice.client.demo.model as m; print(m.smollm2(pathlib.Path(sys.argv[1])))"
    done = subprocess.run(
        [python, "-W", "ignore", "-c", script, cache],
        capture_output=True,
        text=True,
        timeout=CONVERT_TIMEOUT_S,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return Path(done.stdout.splitlines()[-1])


def _write_tiny(target: Path, head_size: int, layers: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden = 4 * head_size
    config = {**TINY_CONFIG, "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers}
    config |= {"head_dim": head_size, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * TINY_STD).to(torch.bfloat16)

    tensors = {"model.embed_tokens.weight": normal(1024, hidden), "model.norm.weight": _ones(hidden)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = _ones(hidden)
        for name, rows, columns in (
            ("self_attn.q_proj", hidden, hidden),
            ("self_attn.k_proj", 2 * head_size, hidden),
            ("self_attn.v_proj", 2 * head_size, hidden),
            ("self_attn.o_proj", hidden, hidden),
            ("mlp.gate_proj", 2 * hidden, hidden),
            ("mlp.up_proj", 2 * hidden, hidden),
            ("mlp.down_proj", hidden, 2 * hidden),
        ):
            tensors[f"{prefix}.{name}.weight"] = normal(rows, columns)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True))


def _ones(size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.bfloat16)
