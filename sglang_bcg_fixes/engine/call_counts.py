# SPDX-License-Identifier: Apache-2.0
"""Calls of each patched place: counted in its wrapper, shown to other processes once a batch.

What is shown lies in memory without a file on any disk, which nobody can cut short under a running server, and which is
gone with the process. `bcg-fixes status` opens it through /proc: the server needs no thread and no signal to answer.
"""

from __future__ import annotations

import array
import mmap
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

NAME = "bcg-fixes-reached"
FORMAT = "Q"
WIDTH = 8
CAPACITY = 4096
# what a wrapper counts on that no fix has made
NO_PLACE = 0


class Tally:
    """One counter for each place of each fix; threads may lose a count to each other, and none needs the exact sum.

    A wrapper adds with `counts[number] += 1`, the least that Python can do, so the list is one and the same for ever.
    """

    def __init__(self) -> None:
        self.counts = [0]
        self.places: dict[str, dict[str, int]] = {}
        self._descriptor: int | None = None
        self._shown: mmap.mmap | None = None
        self._knows_forks = False

    def number(self, fix_id: str, where: str) -> int:
        """The counter of a place, the same one again when a fix is applied again."""
        places = self.places.setdefault(fix_id, {})
        if where not in places:
            places[where] = len(self.counts)
            self.counts.append(0)
        return places[where]

    def sum(self, fix_id: str) -> int:
        return sum(self.counts[number] for number in self.places.get(fix_id, {}).values())

    def publish(self) -> None:
        """Have memory that other processes of this user can open; OSError where the kernel gives none."""
        if not self._knows_forks:
            # not at the import: a process in which nothing is counted gets no handler
            os.register_at_fork(after_in_child=self.start_anew)
            self._knows_forks = True
        if self._shown is None:
            descriptor = os.memfd_create(NAME)
            try:
                os.ftruncate(descriptor, WIDTH * CAPACITY)
                self._shown = mmap.mmap(descriptor, WIDTH * CAPACITY)
            except OSError:
                os.close(descriptor)
                raise
            self._descriptor = descriptor
        self.show()

    def show(self) -> None:
        if self._shown is not None:
            content = array.array(FORMAT, self.counts[:CAPACITY]).tobytes()
            self._shown[: len(content)] = content

    def start_anew(self) -> None:
        """In a forked child: what it reaches, its parent has not, and the memory is its parent's."""
        self.counts[:] = [0] * len(self.counts)
        self._shown = None
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def as_dict(self) -> dict[str, Any]:
        return {"descriptor": self._descriptor, "places": self.places}


TALLY = Tally()


def tracing_check() -> Callable[[], bool]:
    """A function that torch's compiler sees as true while it traces the caller, and that is false otherwise.

    A counter that it traces is a reason to compile again at every call. Where torch has not been imported nothing is
    traced: the code of SGLang that can be brings torch along, and is patched after its import.
    """
    compiler = getattr(sys.modules.get("torch"), "compiler", None)
    check: Callable[[], bool] = getattr(compiler, "is_dynamo_compiling", never)
    return check


def never() -> bool:
    return False


def calls(content: Mapping[str, Any]) -> dict[str, dict[str, int]] | None:
    """By fix and place, what the process with this report has shown last; None where nobody can know."""
    descriptor = content["reached"]["descriptor"]
    path = f"/proc/{content['pid']}/fd/{descriptor}"
    try:
        # a process that closes what it did not open may have something else there by now
        if descriptor is None or not os.readlink(path).startswith(f"/memfd:{NAME}"):
            return None
        with open(path, "rb") as file:
            counts = array.array(FORMAT, file.read(WIDTH * CAPACITY))
    except OSError:
        return None
    found = content["reached"]["places"]
    # those beyond are counted and not shown
    return {
        fix: {where: counts[number] for where, number in places.items() if number < CAPACITY}
        for fix, places in found.items()
    }
