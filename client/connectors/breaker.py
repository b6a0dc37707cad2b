"""The breaker of a connector: ``kvservice.storage.remote.breaker`` with the patience of an engine.

An answer slower than ``slow_s`` is a failure: a cache that answers late costs more than no cache.
"""

from kvservice.storage.remote.breaker import Breaker as AnyBreaker
from kvservice.storage.remote.breaker import BreakerState, Clock

__all__ = ["Breaker", "BreakerState", "Clock"]


class Breaker(AnyBreaker):
    """Every call that ``allows`` let through should be reported by ``succeeded`` or ``failed``."""

    def __init__(
        self,
        clock: Clock,
        *,
        failures_max: int = 5,
        slow_s: float = 1.0,
        pause_s: float = 2.0,
        pause_s_max: float = 30.0,
    ) -> None:
        super().__init__(clock, failures_max=failures_max, slow_s=slow_s, pause_s=pause_s, pause_s_max=pause_s_max)
