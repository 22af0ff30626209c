# SPDX-License-Identifier: Apache-2.0
"""Applied patch points: all of a fix or none of it, recorded, read back, and undone exactly."""

from __future__ import annotations

import types
from collections.abc import Callable

from sglang_bcg_fixes.engine.holders import rebind_copies, refuse_stale_holders
from sglang_bcg_fixes.engine.slots import MISSING, Change, PatchError, core, locate
from sglang_bcg_fixes.engine.wrappers import describe, is_foreign, layers, load_body, rebuild
from sglang_bcg_fixes.model import Patched, PatchPoint


class Ledger:
    """The changes in this process."""

    def __init__(self) -> None:
        self._changes: dict[str, list[Change]] = {}
        # changed since the last `check`
        self._unchecked: list[Patched] = []
        # patched within another that failed, and not again
        self._failed: dict[str, Exception] = {}

    def applied(self) -> list[str]:
        return list(self._changes)

    def apply(self, fix: Patched) -> None:
        """Change every patch point of the fix, or raise and leave everything as it was."""
        self.change(fix)
        for error in self.check().values():
            raise error

    def change(self, fix: Patched) -> None:
        """Like `apply`, but leave the search for stale holders, which walks all of SGLang, to a later `check`."""
        if fix.id in self._changes:
            raise PatchError(f"{fix.id} is applied already")
        done: list[Change] = []
        began = len(self._unchecked)
        try:
            for point in fix.patches:
                change_point(fix.id, point, done)
            problems = self._differences(done)
            if problems:
                raise PatchError("; ".join(problems))
        except BaseException:
            # what was patched within may stand around ours: all come off, and the others are patched anew
            within = self._unchecked[began:]
            del self._unchecked[began:]
            done += (change for other in within for change in self._changes.pop(other.id))
            put_back(sorted(done, key=lambda change: change.number))
            self._failed |= one_by_one(within, self.change)
            raise
        self._changes[fix.id] = done
        self._unchecked.append(fix)

    def check(self) -> dict[str, Exception]:
        """Search once for stale holders of all that was changed; by id, why a fix was undone."""
        unchecked, self._unchecked = self._unchecked, []
        failed, self._failed = self._failed, {}
        changes = sorted((change for fix in unchecked for change in self._changes[fix.id]), key=lambda c: c.number)
        try:
            refuse_stale_holders(changes)
        except Exception as error:
            put_back(changes)
            for fix in unchecked:
                del self._changes[fix.id]
            return failed | ({unchecked[0].id: error} if len(unchecked) == 1 else one_by_one(unchecked, self.apply))
        return failed

    def read_back(self, fix_id: str) -> list[str]:
        """List the places that are no longer live, by themselves or inside a later wrapper."""
        return self._differences(self._changes[fix_id])

    def wrapped(self, fix_id: str) -> list[str]:
        """List the places where a foreign wrapper stands around ours."""
        found = [(change.slot.where, change.slot.today()) for change in self._changes[fix_id] if is_live(change)]
        return [f"{where} is inside {describe(value)}" for where, value in found if is_foreign(core(value))]

    def undo(self, fix_id: str) -> None:
        """Restore every slot to the very object that stood there, or raise and leave everything as it is."""
        if fix_id not in self._changes:
            raise PatchError(f"{fix_id} is not applied")
        above = [change.slot for change in self._changes[fix_id] if change.slot.own() is not change.after]
        if above:
            problems = "; ".join(f"{slot.where} holds {describe(slot.own())}" for slot in above)
            raise PatchError(f"{fix_id} cannot be undone, undo what came later first: {problems}")
        put_back(self._changes.pop(fix_id))

    @staticmethod
    def _differences(changes: list[Change]) -> list[str]:
        held = ((change.slot.where, change.slot.today()) for change in changes if not is_live(change))
        return [f"{where} holds {describe(value)}" for where, value in held]


def one_by_one(fixes: list[Patched], patch: Callable[[Patched], None]) -> dict[str, Exception]:
    """Patch what can be; only so does each answer for its own failure."""
    failed: dict[str, Exception] = {}
    for fix in fixes:
        try:
            patch(fix)
        except Exception as error:
            failed[fix.id] = error
    return failed


def is_live(change: Change) -> bool:
    """Tell whether the slot still holds our function, by itself or inside a later wrapper."""
    return any(value is core(change.after) for value in layers(core(change.slot.today())))


def change_point(fix_id: str, point: PatchPoint, done: list[Change]) -> None:
    # first all that this imports: what has waited for it is patched within, and may be this very place
    body = load_body(point.body)
    slot, *aliases = places = [locate(where) for where in (point.where, *((alias,) for alias in point.aliases))]
    while True:
        before = slot.raw()
        after = rebuild(slot.where, before, point.how, body, fix_id)
        # a break imports SGLang's own
        if slot.raw() is before:
            break
    for alias in aliases:
        if alias.raw() is not before:
            raise PatchError(f"the declared alias {alias.where} holds {describe(alias.raw())}, not {slot.where}")
    for place in places:
        # written down first, so that a failure halfway is rolled back too
        done.append(Change(place, place.own(), after))
        place.put(after)
    if isinstance(slot.owner, types.ModuleType):
        rebind_copies(before, after, done)


def put_back(changes: list[Change]) -> None:
    in_modules: dict[int, Change] = {}
    while changes:
        change = changes.pop()
        if change.slot.own() is not change.before:
            change.slot.put(change.before)
        if isinstance(change.slot.owner, types.ModuleType) and change.before is not MISSING:
            in_modules.setdefault(id(change.after), change)
    # modules imported since then have taken copies of ours; one search for each object, latest first
    for change in in_modules.values():
        rebind_copies(change.after, change.before, [])
