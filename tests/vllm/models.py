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


def tiny_gemma3(cache: Path) -> Path:
    """Folder of a random Gemma 3: two of three layers see a window of 64 tokens only. No tokenizer: give token ids."""
    target = cache / "tiny-gemma3"
    if not target.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".tiny", dir=cache, ignore_cleanup_errors=True) as scratch:
            draft = Path(scratch) / "draft"
            draft.mkdir()
            _write_gemma3(draft)
            draft.rename(target)
    return target


def tiny_qwen(cache: Path, kind: str) -> Path:
    """Folder of a random `qwen2` (biases at Q, K, V), `qwen3` (norms of Q and K) or `qwen3_moe` (four experts too).

    No tokenizer: give token ids.
    """
    target = cache / f"tiny-{kind}"
    if not target.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".tiny", dir=cache, ignore_cleanup_errors=True) as scratch:
            draft = Path(scratch) / "draft"
            draft.mkdir()
            _write_qwen(draft, kind)
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


def tiny_adapter(folder: Path, *, seed: int, rank: int = 8) -> Path:
    """A random LoRA adapter of ``tiny_llama``, large enough to change every answer. Returns the folder."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(4):
        for name, rows in (("q_proj", 128), ("v_proj", 64)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, 128, generator=generator) * TINY_STD
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(rows, rank, generator=generator)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj", "v_proj"]}
    config |= {"bias": "none", "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


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


GEMMA3_CONFIG = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "torch_dtype": "bfloat16", "vocab_size": 1024,
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "query_pre_attn_scalar": 32, "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window": 64,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "bos_token_id": 2, "eos_token_id": 1,
    "pad_token_id": 0,
}  # fmt: skip


def _write_gemma3(target: Path) -> None:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * TINY_STD).to(torch.bfloat16)

    small = normal(1024, 128) / 10  # else what attention adds changes no token
    tensors = {"model.embed_tokens.weight": small, "model.norm.weight": _ones(128) * 0}
    for layer in range(6):
        prefix = f"model.layers.{layer}"
        for name, size in (
            ("input_layernorm", 128),
            ("post_attention_layernorm", 128),
            ("pre_feedforward_layernorm", 128),
            ("post_feedforward_layernorm", 128),
            ("self_attn.q_norm", 32),
            ("self_attn.k_norm", 32),
        ):
            tensors[f"{prefix}.{name}.weight"] = _ones(size) * 0  # Gemma adds 1
        for name, rows, columns in (
            ("self_attn.q_proj", 128, 128),
            ("self_attn.k_proj", 64, 128),
            ("self_attn.v_proj", 64, 128),
            ("self_attn.o_proj", 128, 128),
            ("mlp.gate_proj", 256, 128),
            ("mlp.up_proj", 256, 128),
            ("mlp.down_proj", 128, 256),
        ):
            tensors[f"{prefix}.{name}.weight"] = normal(rows, columns)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(GEMMA3_CONFIG, indent=2, sort_keys=True))


QWEN_CONFIGS: dict[str, dict[str, object]] = {
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2,
                  "moe_intermediate_size": 64, "decoder_sparse_step": 1, "norm_topk_prob": True, "mlp_only_layers": []},
}  # fmt: skip


def _write_qwen(target: Path, kind: str) -> None:
    generator = torch.Generator().manual_seed(4)
    config: dict[str, object] = {**TINY_CONFIG, **QWEN_CONFIGS[kind], "model_type": kind}
    config |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * TINY_STD).to(torch.bfloat16)

    def mlp(prefix: str, size: int) -> dict[str, torch.Tensor]:
        gates = {f"{prefix}.{name}_proj.weight": normal(size, 128) for name in ("gate", "up")}
        return {**gates, f"{prefix}.down_proj.weight": normal(128, size)}

    tensors = {"model.embed_tokens.weight": normal(1024, 128), "model.norm.weight": _ones(128)}
    for layer in range(4):
        prefix = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = _ones(128)
        for name, rows in (("q", 128), ("k", 64), ("v", 64), ("o", 128)):
            tensors[f"{prefix}.self_attn.{name}_proj.weight"] = normal(rows, 128)
            if kind == "qwen2" and name != "o":
                tensors[f"{prefix}.self_attn.{name}_proj.bias"] = normal(rows)
            if kind != "qwen2" and name in "qk":
                tensors[f"{prefix}.self_attn.{name}_norm.weight"] = _ones(32) + normal(32)
        if kind != "qwen3_moe":
            tensors |= mlp(f"{prefix}.mlp", 256)
            continue
        tensors[f"{prefix}.mlp.gate.weight"] = normal(4, 128)
        for expert in range(4):
            tensors |= mlp(f"{prefix}.mlp.experts.{expert}", 64)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True))


def _ones(size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.bfloat16)
