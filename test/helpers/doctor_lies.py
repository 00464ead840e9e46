"""Backends for the doctor, of ``dynamic``: all of a process hold the same objects, as of one store."""

from typing import ClassVar

from lying_backend import Lying


class Shared(Lying):
    """Keeps what it is told, unless ``extra_config["orders"]`` says otherwise."""

    everything: ClassVar[dict[str, bytes]] = {}

    def __init__(self, *given):
        super().__init__(*given)
        self.objects = self.everything


class KeepsTheFirst(Shared):
    """Says that it put what it has already, and keeps what it had."""

    def batch_set_v2(self, transfers, extra_info=None):
        before = dict(self.objects)
        done = super().batch_set_v2(transfers, extra_info)
        self.objects.update({key: raw for key, raw in before.items() if "start-check" not in key})
        return done
