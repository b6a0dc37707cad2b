"""Which boots of which nodes may speak: no twin of a live node, no zombie of an earlier boot. Pure."""

from collections import OrderedDict
from uuid import UUID

from kvservice.model.errors import ConfigError, StaleEpochError
from kvservice.peers.member import NodeId

EPOCHS_MAX = 4096


def twin_error(node: NodeId, where: str, holder: NodeId, holder_where: str) -> ConfigError:
    """Two live nodes have one uuid."""
    return ConfigError(
        f"node {node} at {where} is refused: {holder_where} is live with the same uuid (epoch {holder.epoch}). The "
        "folder that holds node.json was copied, with a disk image or a snapshot. Stop one of the two, or remove "
        "node.json from the copy, so that it gets a uuid of its own; its caches stay"
    )


def zombie_error(node: NodeId, where: str, epoch: int) -> StaleEpochError:
    """A boot speaks after a later boot of the same node."""
    return StaleEpochError(
        f"node {node} at {where} is refused: it has booted again since (epoch {epoch}). End this process; if there is "
        "no other, its folder is an old copy: remove node.json from it and start it again"
    )


class Fence:
    """The highest epoch of every node seen lately, at most ``EPOCHS_MAX`` of them."""

    def __init__(self) -> None:
        self._epochs: OrderedDict[UUID, int] = OrderedDict()

    def epoch_of(self, uuid: UUID) -> int | None:
        """The highest epoch seen, None if the node is not known."""
        return self._epochs.get(uuid)

    def admit(self, node: NodeId, where: str) -> None:
        """Remember a boot. Raises StaleEpochError for one that a later boot has followed."""
        last = self._epochs.get(node.uuid)
        if last is not None and node.epoch < last:
            raise zombie_error(node, where, last)
        self._epochs[node.uuid] = node.epoch
        self._epochs.move_to_end(node.uuid)
        if len(self._epochs) > EPOCHS_MAX:
            self._epochs.popitem(last=False)
