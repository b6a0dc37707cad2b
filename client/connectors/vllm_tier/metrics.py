"""What the tier counts, as ``Counts`` of the connector keeps it. Imports no engine.

``rows_asked`` is ``rows_hit_host + rows_hit_ssd + rows_missed``, always: each question counts when it is answered.
"""

COUNTERS: dict[str, str] = {
    "rows_asked": "Chunks that a request asked this tier for, since vLLM's own memory did not have them.",
    "tokens_asked": "Tokens of those chunks.",
    "rows_hit_host": "Chunks found in the service's memory.",
    "rows_hit_ssd": "Chunks found on the service's SSD.",
    "rows_missed": "Chunks not found, late ones and those of failed lookups among them.",
    "lookups": "Lookups answered; one for each step that asked.",
    "lookups_failed": "Lookups that failed, or were not made while the breaker was open.",
    "lookups_late": "Lookups that had no answer when the deadline came; the chunks were computed.",
    "lookup_seconds": "Time that answered lookups took, added up.",
    "rows_loaded": "Chunks copied to vLLM's memory.",
    "tokens_loaded": "Tokens of those chunks.",
    "bytes_loaded": "Bytes copied to vLLM's memory.",
    "load_seconds": "Time from a load's order to its end, added up.",
    "rows_load_failed": "Chunks found and then not loaded; they were computed.",
    "rows_corrupt": "Those among them whose bytes were not what was stored. They are not found again.",
    "rows_stored": "Chunks that the service holds now, those that it held already among them.",
    "bytes_stored": "Bytes of those chunks.",
    "store_seconds": "Time from a store's order to its end, added up.",
    "rows_store_failed": "Chunks that the service did not take.",
    "rows_store_dropped": "Chunks not stored since the service was away, or too many waited (stores_waiting_max).",
    "rows_refused": "Chunks neither asked for nor stored, since their keys are no cryptographic hashes.",
    "hook_errors": "Exceptions that a hook kept from the engine. Every one is a defect: see the log.",
}
GAUGES: dict[str, str] = {
    "breaker_lookups": "The breaker of lookups and loads: 0 closed, 1 half open, 2 open.",
    "breaker_stores": "The breaker of stores: 0 closed, 1 half open, 2 open.",
    "rows_waiting": "Chunks of loads and stores that are not finished. They pin vLLM's memory.",
}
