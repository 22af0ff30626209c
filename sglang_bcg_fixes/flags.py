# SPDX-License-Identifier: Apache-2.0
"""Every setting, from the environment alone; no other module reads or writes it."""

from __future__ import annotations

import dataclasses
import difflib
import os
import pathlib
import tempfile
from collections.abc import Iterable, Mapping

from sglang_bcg_fixes.model import Fix, Kernel, Retired

PREFIX = "SGLANG_BCG_"
# without the line below it, so that a shell's user can guess it
EVERYTHING = "SGLANG_BCG"
OFF_LIST = "SGLANG_BCG_OFF"
FIXES = "SGLANG_BCG_FIXES"
KERNELS = "SGLANG_BCG_KERNELS"
REPORT_DIR = "SGLANG_BCG_REPORT_DIR"
CACHE_DIR = "SGLANG_BCG_CACHE_DIR"
PLAN_DIGEST = "SGLANG_BCG_PLAN_DIGEST"
INSTRUMENTS = "SGLANG_BCG_INSTRUMENTS"
SELFCHECK = "SGLANG_BCG_SELFCHECK"
CANARY = "SGLANG_BCG_CANARY"

# what SGLang itself has or had under our prefix, and what setup.py and tools/serve.py read
OF_SGLANG = ("SGLANG_BCG_TEXT_BUCKETS",)
PLUGINS = "SGLANG_PLUGINS"
# a name that is nobody's, by which people load none
NO_PLUGIN = "__none__"
# SGLang's own, for models that it does not have
MODELS_OF_ANOTHER_PACKAGE = "SGLANG_EXTERNAL_MODEL_PACKAGE"
OF_BUILDS = ("BCG_FIXES_CUDA_ARCHS", "BCG_FIXES_SKIP_CUDA", "BCG_FIXES_VENV")
# how much of a name has to be that of a flag
ALIKE = 0.8
LISTED = "`bcg-fixes list --flags` shows every flag"

SWITCHES = ("auto", "off")
MODES = ("auto", "off", "strict")
KERNELS_MODES = ("auto", "off")
FIX_STATES = ("auto", "off", "on")
SELFCHECK_STATES = ("off", "warn", "strict")
# of the flag of a fix or of a kernel
VALUES = {
    "auto": "the plugin decides, by the installed SGLang",
    "off": "SGLang's own code stays as it is",
    "on": "a fix: the server refuses to start where this fix is needed and cannot be applied",
    "NAME": "a kernel: this implementation runs, or the server refuses to start",
}
KERNEL_STATES = ("auto", "off", "reference", "triton", "fa3", "cuda")


class FlagError(Exception):
    """An invalid setting, with the nearest valid one."""


@dataclasses.dataclass(frozen=True)
class Flag:
    """One row of the table in docs/flags.md."""

    name: str
    values: str
    default: str
    doc: str


# of ours; docs/flags.md has the rules
RETIRED: tuple[Retired, ...] = (
    Retired(
        "SGLANG_BCG_KERNEL_LIGHTNING_EXTEND",
        since="0.1.0",
        refused_from="0.3",
        why="no release ran this kernel by default, and it saved a few milliseconds at most",
    ),
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings in the environment."""

    mode: str
    fixes: Mapping[str, str]
    kernels: Mapping[str, str]
    parent_digest: str | None
    selfcheck: str = "warn"
    canary: int = 0
    # by the flag of what is off, why it is
    off_by: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # by SGLANG_BCG: SGLang is as it would be without this package
    is_off: bool = False

    @property
    def strict(self) -> bool:
        return self.mode == "strict"


def table(fixes: Iterable[Fix], kernels: Iterable[Kernel]) -> list[Flag]:
    """Every flag that `read` accepts, in the order of the documentation."""
    rows = [
        Flag(
            EVERYTHING,
            "|".join(SWITCHES),
            "auto",
            "off: change and check nothing, whatever the other flags say, and never refuse to start.",
        ),
        Flag(
            OFF_LIST, "names", "none", "Fixes and kernels to switch off, separated by commas; it wins over their flags."
        ),
        Flag(
            FIXES,
            "|".join(MODES),
            "auto",
            "auto: fix what the installed source needs. off: change nothing, and check nothing, except what its own "
            "flag asks for. strict: like auto, and refuse to start when a wanted fix is unread here or cannot be "
            "applied.",
        ),
    ]
    for fix in fixes:
        if fix.patches:
            rows.append(Flag(fix.flag, "|".join(FIX_STATES), fix.default, f"{fix.title}."))
    doc = "off: SGLang's own code in the place of every kernel of ours, but for those that their own flag names."
    rows.append(Flag(KERNELS, "|".join(KERNELS_MODES), "auto", doc))
    for kernel in kernels:
        names = [impl.name for impl in kernel.impls]
        values = [state for state in KERNEL_STATES if state in ("auto", "off") or state in names]
        rows.append(Flag(kernel.flag, "|".join(values), "auto", f"{kernel.title}."))
    rows += [
        Flag(
            SELFCHECK,
            "|".join(SELFCHECK_STATES),
            "warn",
            "Before the first request, compare replayed prefills with the same code run eagerly: docs/selfcheck.md. "
            "warn: where they differ, serve prefill eagerly. strict: refuse to serve. Under SGLANG_BCG_FIXES=off the "
            "default is off.",
        ),
        Flag(
            CANARY,
            "a number",
            "0",
            "N: run every N-th replayed prefill eagerly as well, answer with that, and compare. 0: never.",
        ),
        Flag(REPORT_DIR, "a folder", "a private one per user", "Where each process writes what it really has."),
        Flag(CACHE_DIR, "a folder", "~/.cache/sglang-bcg-fixes", "Where `doctor --release` keeps fetched wheels."),
        Flag(PLAN_DIGEST, "set by the parent", "unset", "How a child knows that it plans what its parent planned."),
        Flag(INSTRUMENTS, "set by `verify`", "none", "Counters of replays, and refusals to replay: docs/verify.md."),
    ]
    return rows


def read(
    fixes: Iterable[Fix],
    kernels: Iterable[Kernel],
    environ: Mapping[str, str] | None = None,
    retired: Iterable[Retired] = (),
) -> Settings:
    """The settings in force; every mistake is named in one error."""
    environ = os.environ if environ is None else environ
    fixes = [fix for fix in fixes if fix.patches]
    kernels, retired = list(kernels), list(retired)
    if is_off(environ):
        return all_off(fixes, kernels)
    rows = {flag.name: flag for flag in table(fixes, kernels)}
    given = {name: environ[name].strip() for name in environ if is_ours(name) and environ[name].strip()}
    refused = {flag.name: flag for flag in retired if flag.is_refused}
    for flag in sorted(retired, key=lambda flag: flag.name):
        if flag.name in given and flag.name not in refused:
            value = given.pop(flag.name)
            given |= {flag.now: value} if flag.now and flag.now not in given else {}
    mistakes = [f"{name} {why_none(name, rows, refused)}" for name in sorted(given) if name not in rows]
    chosen = {name: flag.default for name, flag in rows.items()}
    for name, value in sorted(given.items()):
        if name not in rows or "|" not in rows[name].values:
            continue
        allowed = rows[name].values.split("|")
        if value.lower() in allowed:
            chosen[name] = value.lower()
        else:
            mistakes.append(f"{name}={value} is none of {', '.join(allowed)}{nearest(value.lower(), allowed)}")
    every: list[Fix | Kernel] = [*fixes, *kernels]
    flag_of = {each.id: each.flag for each in every}
    gone = {flag.listed: flag for flag in retired if flag.listed}
    now = {name: flag.now for name, flag in gone.items() if not flag.is_refused} | flag_of
    listed = names_in(given.get(OFF_LIST, ""))
    mistakes += [
        f"{OFF_LIST} names {name}, which {why_not_listed(name, flag_of, gone)}" for name in listed if name not in now
    ]
    in_list = {now[name]: f"{OFF_LIST}={name}" for name in listed if name in now}
    canary = given.get(CANARY, rows[CANARY].default)
    if not canary.isdecimal():
        mistakes.append(f"{CANARY}={canary} is not a number of prefills; set 0 or more, such as 100")
    if mistakes:
        raise FlagError("; ".join([*mistakes, LISTED]))
    mode = chosen[FIXES]
    off_by: dict[str, str] = {}

    def state_of(flag: str, *switches: str) -> str:
        """The state by its own flag; `auto` gives way to a switch that is off, everything to the list."""
        if flag in in_list:
            off_by[flag] = in_list[flag]
            return "off"
        off = [name for name in switches if chosen[name] == "off"]
        if chosen[flag] == "auto" and off:
            off_by[flag] = f"{off[0]}=off"
            return "off"
        if chosen[flag] == "off":
            off_by[flag] = f"{flag}=off" if flag in given else f"{flag} is off by default"
        return chosen[flag]

    if mode == "off":
        chosen[SELFCHECK] = chosen[SELFCHECK] if SELFCHECK in given else "off"
    return Settings(
        mode=mode,
        fixes={fix.id: state_of(fix.flag, FIXES) for fix in fixes},
        kernels={kernel.op: state_of(kernel.flag, KERNELS, FIXES) for kernel in kernels},
        parent_digest=given.get(PLAN_DIGEST),
        selfcheck=chosen[SELFCHECK],
        canary=int(canary),
        off_by=off_by,
    )


def is_off(environ: Mapping[str, str] | None = None) -> bool:
    """Tell whether one switch turns everything off: it is read before all others, which may then hold anything."""
    return (os.environ if environ is None else environ).get(EVERYTHING, "").strip().lower() == "off"


def all_off(fixes: Iterable[Fix], kernels: Iterable[Kernel]) -> Settings:
    every: list[Fix | Kernel] = [*fixes, *kernels]
    return Settings(
        mode="off",
        fixes={each.id: "off" for each in every if isinstance(each, Fix)},
        kernels={each.id: "off" for each in every if isinstance(each, Kernel)},
        parent_digest=None,
        selfcheck="off",
        off_by={each.flag: f"{EVERYTHING}=off" for each in every},
        is_off=True,
    )


def without_the_switch(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables as if the one switch were not there."""
    return {name: value for name, value in environ.items() if name != EVERYTHING}


def environment_with(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables of this process and those of a command, which win."""
    return {**os.environ, **variables}


def is_ours(name: str) -> bool:
    return name == EVERYTHING or (name.startswith(PREFIX) and name not in OF_SGLANG)


def wants_colour(environ: Mapping[str, str] | None = None) -> bool:
    """False under NO_COLOR (https://no-color.org), and on a terminal that has none."""
    environ = os.environ if environ is None else environ
    return not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


def report_dir(environ: Mapping[str, str] | None = None) -> pathlib.Path:
    """This user's report folder: configured, or one that only this user can have made."""
    environ = os.environ if environ is None else environ
    return chosen_report_dir(environ) or pathlib.Path(tempfile.gettempdir()) / f"sglang-bcg-fixes-{os.getuid()}"


def report_dir_of(environ: Mapping[str, str], user: int) -> pathlib.Path:
    """The report folder of a process with this environment, which may be another user's."""
    temporary = [environ[name] for name in ("TMPDIR", "TEMP", "TMP") if environ.get(name)]
    base = next((folder for folder in temporary if os.path.isdir(folder)), "/tmp")
    return chosen_report_dir(environ) or pathlib.Path(base) / f"sglang-bcg-fixes-{user}"


def look_alikes(fixes: Iterable[Fix], kernels: Iterable[Kernel], environ: Mapping[str, str] | None = None) -> list[str]:
    """Settings that nobody reads and that look as if they were meant for us, each in a sentence."""
    environ = os.environ if environ is None else environ
    rows = {squeezed(flag.name): flag.name for flag in table(fixes, kernels)}
    found = []
    for name in sorted(environ):
        form = squeezed(name)
        if is_ours(name) or name in OF_SGLANG or name in OF_BUILDS or "BCG" not in form or not environ[name].strip():
            continue
        whole = form if form.startswith("SGLANG") else f"SGLANG{form}"
        close = difflib.get_close_matches(whole, rows, n=1, cutoff=ALIKE)
        if close or form.startswith(squeezed(PREFIX)):
            hint = f"did you mean {rows[close[0]]}?" if close else LISTED
            found.append(f"{name} is set, and nobody reads it; {hint}")
    return found


def said_of(retired: Iterable[Retired], environ: Mapping[str, str] | None = None) -> list[str]:
    """Settings by names that were flags and that stop no server yet, each in a sentence."""
    environ = os.environ if environ is None else environ
    found = []
    listed = names_in(environ.get(OFF_LIST, ""))
    for flag in sorted(retired, key=lambda flag: flag.name):
        end = f"from {flag.refused_from} on no server starts with it"
        if environ.get(flag.name, "").strip() and not flag.is_refused:
            is_used = flag.now and not environ.get(flag.now, "").strip()
            effect = f"it counts as {flag.now}" if is_used else f"{flag.now or 'nothing'} counts in its place"
            found.append(f"{flag.name} is set, and {flag.says}; {effect}, and {end}")
        if flag.listed in listed and not flag.is_refused:
            effect = f"it counts as {flag.now}=off" if flag.now else "nothing counts in its place"
            found.append(f"{OFF_LIST} names {flag.listed}, which {flag.says}; {effect}, and {end}")
    return found


def why_none(name: str, rows: Iterable[str], retired: Mapping[str, Retired]) -> str:
    """Say of a name that it is no flag, and why or which one was meant."""
    if flag := retired.get(name):
        return f"{flag.says}; {f'set {flag.now}' if flag.now else 'unset it'}"
    return f"is not a flag{nearest(name, rows)}"


def why_not_listed(name: str, known: Iterable[str], retired: Mapping[str, Retired]) -> str:
    """Say of a name in the list why it is no fix and no kernel, or which one was meant."""
    if flag := retired.get(name):
        return f"{flag.says}; {f'set {flag.now}=off' if flag.now else 'take it out'}"
    return f"is no fix and no kernel{nearest(name, known)}"


def names_in(value: str) -> list[str]:
    return [name.strip().lower() for name in value.split(",") if name.strip()]


def squeezed(name: str) -> str:
    """A name without the characters that are easily mistyped."""
    return name.replace("_", "").replace("-", "").upper()


def chosen_report_dir(environ: Mapping[str, str]) -> pathlib.Path | None:
    runtime = environ.get("XDG_RUNTIME_DIR", "").strip()
    return configured_report_dir(environ) or (pathlib.Path(runtime) / "sglang-bcg-fixes" if runtime else None)


def configured_report_dir(environ: Mapping[str, str] | None = None) -> pathlib.Path | None:
    environ = os.environ if environ is None else environ
    folder = environ.get(REPORT_DIR, "").strip()
    return pathlib.Path(folder) if folder else None


def of_ours(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Every setting of ours that is given, right or wrong, and the choice of plugins."""
    environ = os.environ if environ is None else environ
    names = list(filter(is_ours, environ))
    return {name: environ[name] for name in sorted([*names, *({PLUGINS} & environ.keys())])}


def names_of_others(environ: Mapping[str, str] | None = None) -> list[str]:
    """SGLang's own settings, whose values may be anybody's secret."""
    environ = os.environ if environ is None else environ
    return sorted(name for name in environ if name.startswith("SGLANG_") and name not in of_ours(environ))


def model_cache(environ: Mapping[str, str] | None = None) -> pathlib.Path:
    """The folder where Hugging Face's library keeps models."""
    environ = os.environ if environ is None else environ
    home = environ.get("HF_HOME") or pathlib.Path("~/.cache/huggingface").expanduser()
    return pathlib.Path(environ.get("HF_HUB_CACHE") or pathlib.Path(home, "hub"))


def cache_dir(environ: Mapping[str, str] | None = None) -> pathlib.Path:
    environ = os.environ if environ is None else environ
    folder = environ.get(CACHE_DIR, "").strip()
    if folder:
        return pathlib.Path(folder)
    # pathlib raises where there is neither HOME nor a user of this number, as in many containers
    base = environ.get("XDG_CACHE_HOME", "").strip() or os.path.expanduser("~/.cache")
    if base.startswith("~"):
        return pathlib.Path(tempfile.gettempdir()) / f"sglang-bcg-fixes-cache-{os.getuid()}"
    return pathlib.Path(base) / "sglang-bcg-fixes"


def export_digest(digest: str) -> None:
    """Let the processes that this one starts know what was planned here."""
    os.environ[PLAN_DIGEST] = digest


def instruments() -> list[str]:
    """The names of the instruments that `verify` wants in this process."""
    return [name.strip() for name in os.environ.get(INSTRUMENTS, "").split(",") if name.strip()]


def environment_without_ours() -> dict[str, str]:
    """The environment for a process that chooses its plugins and their settings itself."""
    return {name: value for name, value in os.environ.items() if not (name == PLUGINS or name.startswith(EVERYTHING))}


def environment_with_off(names: Iterable[str]) -> dict[str, str]:
    """The environment for a process without these fixes and kernels.

    Without the self-check, too, unless it is asked for: it would run prefill eagerly where a replay is wrong.
    """
    return {**os.environ, SELFCHECK: os.environ.get(SELFCHECK, "").strip() or "off", **dict.fromkeys(names, "off")}


def plugin_choice(environ: Mapping[str, str] | None = None) -> str:
    """SGLang's own SGLANG_PLUGINS: the names it will load; empty means every installed plugin."""
    return (os.environ if environ is None else environ).get(PLUGINS, "").strip()


def nearest(word: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """Name the one that was meant, by its letters alone; what follows this goes on with a semicolon."""
    names = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), names, n=1, cutoff=cutoff)
    return f"; did you mean {names[close[0]]}?" if close else ""
