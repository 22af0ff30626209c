# SPDX-License-Identifier: Apache-2.0
"""A package that declares a fix wrongly is named, and breaks no command but what is asked of that fix."""

from __future__ import annotations

import json
import subprocess

import pytest

from sglang_bcg_fixes.model import Fix, Kernel, Retired
from sglang_bcg_fixes.planning import registry, well_formed
from tests import processes
from tests.engine import test_plugin
from tests.engine.test_plugin import AFFECTED, EXTRA, OTHERS_OFF, Extra, with_kernel

extra = test_plugin.extra
NAMED = "extra-fixes contributes extra_fix, which cannot be used: "
WRONG = [
    ('doc="Something is extra."', "doc=None", f"{NAMED}its Fix's doc is None, not a text"),
    ('upstream=("https://example.org",)', 'upstream="https://a.b"', "its Fix's upstream is 'https://a.b', not a tuple"),
    ("known={}", "known=None", f"{NAMED}its Fix's known is None, not a mapping"),
    ("probe=lambda source: PROBE", "probe=None", f"{NAMED}its Fix's probe is None, not a function"),
    ('("sglang.srt.target:function",)', '"sglang.srt.target:function"', "its PatchPoint's where is 'sglang.srt.target"),
    ("How.AROUND", '"around"', f"{NAMED}its PatchPoint's how is 'around', not a How"),
    ('id="extra_fix"', 'id="Extra fix"', "its Fix's id is 'Extra fix', not a name such as wrong_answer"),
    ('id="extra_fix",', "", "a fix or kernel, which cannot be used: its Fix's id is '', not a name such as"),
    ('doc="Something is extra.",', "", f"{NAMED}its Fix's doc is '', not a text"),
    ("known={}", 'known={}, default="yes"', "its Fix's default is 'yes', not auto, off or on"),
    ("known={}", 'known={}, after="other"', "its Fix's after is 'other', not a tuple of ids"),
    (
        "return [Fix(",
        "return ['x'] or [Fix(",
        "extra-fixes contributes a fix or kernel, which cannot be used: it declares",
    ),
    ("return [Fix(", "return 7 or [Fix(", "extra-fixes: its bcg_fixes() gives 7, which is not a list"),
    ("    return [Fix(", "    1 / 0\n    return [Fix(", "extra-fixes: its bcg_fixes() fails (ZeroDivisionError: "),
    ("def bcg_fixes", "def bcg_fixxes", "of extra-fixes cannot be loaded (PluginValidationError: unknown hook"),
    ('id="extra_fix"', 'id="no_bucket_fits"', "more than one package declares the fix id no_bucket_fits"),
]


def command(extra: Extra, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    whole = {"FAKE_FORM": "enable", "SGLANG_BCG_REPORT_DIR": str(extra.site / "reports"), **OTHERS_OFF, **environ}
    return processes.python(
        *("-m", "sglang_bcg_fixes", *arguments), paths=[processes.FAKE_SGLANG, extra.site], environment=whole
    )


def healthy(done: subprocess.CompletedProcess[str], code: int = 0) -> None:
    assert done.returncode == code and "Traceback" not in done.stderr, done.stdout + done.stderr


@pytest.mark.parametrize(("old", "new", "words"), WRONG, ids=[words[-40:] for *_, words in WRONG])
def test_a_fix_that_is_declared_wrongly_is_named_with_its_package(extra: Extra, old: str, new: str, words: str) -> None:
    assert old in EXTRA
    site = extra(text=EXTRA.replace(old, new))
    for arguments in (["list"], ["status"], ["explain", "linear_attention_captured"]):
        done = command(site, *arguments)
        healthy(done)
        assert done.stdout and words in done.stderr and "mend or uninstall extra-fixes" in done.stderr, done.stderr
    examined = command(site, "doctor")
    healthy(examined, 1)
    assert "known defects" in examined.stdout and words in examined.stdout, examined.stdout
    [problem] = json.loads(command(site, "doctor", "--json").stdout)["problems"]
    assert words in problem
    refused = site.load(status=1)
    assert "Traceback" not in refused.stderr, refused.stderr
    assert refused.stderr.startswith("bcg-fixes refuses to start: ") and words in refused.stderr


RETIRING = """
from sglang_bcg_fixes.model import Retired

@hookimpl
def bcg_retired_flags():
    return [Retired("SGLANG_BCG_FIX_GONE", "1.0", "1.2", "nobody needs it")]
"""


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"1.0"', '"one"', "SGLANG_BCG_FIX_GONE, which cannot be used: its Retired's since is 'one', not a version"),
        ('"SGLANG_BCG_FIX_GONE"', '"FIX_GONE"', "its Retired's name is 'FIX_GONE', not a name such as SGLANG_BCG_FIX_"),
        ('"SGLANG_BCG_FIX_GONE"', '"SGLANG_BCG_FIX_EXTRA_FIX"', "which cannot be: it is a flag still; mend or"),
        ('"nobody needs it"', '"", "SGLANG_BCG_FIX_EXTRA"', "its Retired's why is '', not a text"),
        ('it")', 'it", "SGLANG_BCG_FIX_EXTR_FIX")', "EXTR_FIX is no flag; did you mean SGLANG_BCG_FIX_EXTRA_FIX?"),
        ('it")]', 'it")] * 2', "more than one package declares the retired flag SGLANG_BCG_FIX_GONE, extra-fixes is"),
    ],
)
def test_a_flag_that_is_retired_wrongly_is_named(extra: Extra, old: str, new: str, words: str) -> None:
    assert RETIRING.count(old) == 1
    site = extra(text=EXTRA + RETIRING.replace(old, new))
    done = command(site, "list")
    healthy(done)
    assert words in done.stderr and "mend or uninstall extra-fixes" in done.stderr and "extra_fix" in done.stdout
    healthy(command(site, "doctor"), 1)


def test_the_flag_of_a_fix_that_was_refused_is_said_beside_why(extra: Extra) -> None:
    old, new, words = WRONG[0]
    asked = command(extra(text=EXTRA.replace(old, new)), "doctor", SGLANG_BCG_FIX_EXTRA_FIX="off")
    healthy(asked, 2)
    assert "SGLANG_BCG_FIX_EXTRA_FIX is not a flag" in asked.stderr and words in asked.stderr, asked.stderr


def test_a_missing_section_concerns_its_own_page_alone(extra: Extra) -> None:
    site = extra()
    asked = command(site, "explain", "extra_fix")
    healthy(asked, 2)
    [line] = asked.stderr.splitlines()
    assert line.startswith("bcg-fixes explain: extra_fix: its docstring has no section 'Symptom:'; "), line
    assert line.endswith("in the package extra-fixes") and asked.stdout == ""
    for arguments in (["list"], ["status"], ["explain", "linear_attention_captured"], ["doctor"]):
        done = command(site, *arguments)
        healthy(done)
        assert done.stderr == "", done.stderr
    # a server needs no page
    site.load()


def test_a_probe_that_gives_no_finding_is_unknown(extra: Extra) -> None:
    site = extra("None")
    done = command(site, "doctor")
    healthy(done, 3)
    assert "NOT READ  (1): extra_fix" in done.stdout
    assert "its probe gives a NoneType, which is not a Finding" in command(site, "doctor", "--all").stdout


def test_a_kernel_that_takes_the_id_of_a_fix_is_named(extra: Extra) -> None:
    text = with_kernel()
    assert "'extra_op'" in text or '"extra_op"' in text
    site = extra(text=text.replace("extra_op", "no_bucket_fits"))
    done = command(site, "list")
    healthy(done)
    words = "extra-fixes contributes no_bucket_fits, which cannot be used: more than one package declares the fix id"
    assert words in done.stderr and "extra_fix" in done.stdout


def test_a_kernel_that_is_declared_wrongly_is_named_and_the_fixes_are_used(extra: Extra) -> None:
    site = extra(text=with_kernel().replace("{}, points, True)", "{}, points, None)"))
    done = command(site, "list")
    healthy(done)
    words = "extra-fixes contributes extra_op, which cannot be used: its Kernel's bit_exact is None, not True or False"
    assert words in done.stderr and "extra_fix" in done.stdout and "extra_op" not in done.stdout


def test_what_is_right_is_used_and_its_package_known(extra: Extra) -> None:
    site = extra(text=with_kernel(), probe=AFFECTED)
    code = "from sglang_bcg_fixes.planning import registry; print(sorted(registry.discover().owners.items()))"
    done = processes.python("-c", code, paths=[processes.FAKE_SGLANG, site.site])
    assert done.stdout.strip() == "[('extra_fix', 'extra-fixes'), ('extra_op', 'extra-fixes')]", done.stderr


def test_all_of_ours_is_well_formed() -> None:
    known = registry.discover()
    assert [well_formed.fault(fix, Fix) for fix in known.fixes] == [None] * len(known.fixes)
    assert [well_formed.fault(kernel, Kernel) for kernel in known.kernels] == [None] * len(known.kernels)
    assert [well_formed.fault(flag, Retired) for flag in known.retired] == [None] * len(known.retired)
