"""Restores requests beside the engine's hierarchical cache (HiCache), where that lies on device and host alone.

Behind the m tokens that the device holds of a request, the host may hold more: its host hit. The engine would load
those pages and lengthen the prefix by them. A restored request takes them from its copy, so its host hit is put aside.

    |<- m: the tree's, on the device ->|<- host hit, put aside ->|
    |<- m: the tree's, locked -------->|<- n - m: taken, loaded from the copy ->| 1 |

Nothing else is in the way. Pages on their way to or from the host belong to nodes that the engine keeps locked until
they have arrived, so they are not taken here; and what is loaded here is published after its first forward.
"""

from __future__ import annotations

from typing import Any

HIT = ("host_hit_length", "swa_host_hit_length")  # attributes of a request, which each match sets anew


def has_storage(tree: Any) -> bool:
    """Returns whether a storage backend was attached to the prefix cache, perhaps while the server ran and was idle."""
    return bool(getattr(tree, "enable_storage", False))


def put_aside(req: Any) -> dict[str, int]:
    """Takes the host hit from ``req`` and returns it."""
    hit = {name: getattr(req, name) for name in HIT}
    give_back(req, dict.fromkeys(HIT, 0))
    return hit


def give_back(req: Any, hit: dict[str, int]) -> None:
    """Undoes ``put_aside``."""
    for name, tokens in hit.items():
        setattr(req, name, tokens)


def wait_for_loads(tree: Any) -> None:
    """Orders the current stream behind the load-backs in flight, before a save reads pages of the tree.

    The pages of a request that was just restored may come from one: its first step waits for them, but its retract
    does not wait for that step.
    """
    controller = getattr(tree, "cache_controller", None)
    for ack in controller.ack_load_queue if controller is not None else ():
        ack.finish_event.wait()
