"""What decides a request's KV besides its token ids: cache salt, LoRA adapter, images. All of it goes into the keys."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvservice.client.connectors.vllm.chunks import Item
from kvservice.client.connectors.vllm.weights_digest import weights_digest
from kvservice.model.errors import InvalidInputError
from kvservice.model.segment import digest

ADAPTERS_MAX = 1024
"""Adapters remembered; the oldest is forgotten, and read again when it comes back."""


@dataclass(frozen=True, slots=True)
class RequestExtras:
    """For ``ChunkChain``: ``extra`` and ``items``. ``refusal``: why nothing of the request may be reused or saved."""

    extra: bytes = b""
    items: tuple[Item, ...] = ()
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class _Adapter:
    digest: str
    stamp: tuple[tuple[str, int, int], ...]


class ExtrasReader:
    """Reads requests of one engine. Used by one thread; reads an adapter's files when it sees it for the first time.

    ``adapters``: digests by adapter name, as the user gave them; they are believed.
    """

    def __init__(self, adapters: Mapping[str, str]) -> None:
        self._given = dict(adapters)
        self._adapters: dict[tuple[str, int, str], _Adapter] = {}

    def of(self, request: Any) -> RequestExtras:
        """Extras of a vLLM ``Request``. A request without any has the empty ones, and the keys of plain prompts."""
        if getattr(request, "prompt_embeds", None) is not None or request.prompt_token_ids is None:
            return RequestExtras(refusal="its prompt holds embeddings, which have no token ids")
        try:
            adapter = self._adapter_parts(getattr(request, "lora_request", None))
        except InvalidInputError as error:
            return RequestExtras(refusal=str(error))
        extra = request_extra(getattr(request, "cache_salt", None) or "", *adapter)
        return RequestExtras(extra, tuple(_item(one) for one in getattr(request, "mm_features", None) or ()))

    def _adapter_parts(self, adapter: Any) -> tuple[str, ...]:
        if adapter is None:
            return ()
        return (adapter.lora_name, self._given.get(adapter.lora_name) or self._digest_on_disk(adapter))

    def _digest_on_disk(self, adapter: Any) -> str:
        """As of when the engine first used it: what is in its files later may not be what it has loaded."""
        key = (adapter.lora_name, int(adapter.lora_int_id), adapter.lora_path)
        stamp = _stamp(Path(adapter.lora_path))
        known = self._adapters.get(key)
        if known is None or getattr(adapter, "load_inplace", False):
            known = self._adapters[key] = _Adapter(weights_digest(Path(adapter.lora_path)), stamp)
            if len(self._adapters) > ADAPTERS_MAX:
                del self._adapters[next(iter(self._adapters))]
        if known.stamp != stamp:
            raise InvalidInputError(
                f"the files of adapter {adapter.lora_name!r} changed under its name; load it under another id or name"
            )
        return known.digest


def request_extra(cache_salt: str, *adapter: str) -> bytes:
    """For ``ChunkChain``, of a request with this salt and adapter (its name and digest); empty if it has neither."""
    parts = [part.encode() for part in (cache_salt, *adapter)]
    return digest(b"kvservice request\0", *parts) if cache_salt or adapter else b""


def _stamp(folder: Path) -> tuple[tuple[str, int, int], ...]:
    try:
        files = sorted(folder.iterdir()) if folder.is_dir() else [folder]
        stats = [(file.name, file.stat()) for file in files]
    except OSError as error:
        raise InvalidInputError(
            f"adapter at {folder} cannot be read ({error}); give its digest: "
            'kv_connector_extra_config {"adapters": {"<its name>": "<digest or revision>"}}'
        ) from error
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _item(feature: Any) -> Item:
    place = feature.mm_position
    parts = (str(feature.modality).encode(), str(feature.identifier).encode(), str(place.length).encode())
    return Item(int(place.offset), digest(b"kvservice item\0", *parts))
