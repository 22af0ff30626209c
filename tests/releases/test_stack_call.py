# SPDX-License-Identifier: Apache-2.0
"""Every release's own call of a model's layers, made to every stack of layers that it has, without and with the fix.

The call is cut out of the release's runner and the headers out of its models, so all of it is bound as Python binds it,
and nothing of SGLang is imported.
"""

from __future__ import annotations

import ast
import importlib.util
import pathlib
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sglang_bcg_fixes.engine import wrappers
from sglang_bcg_fixes.fixes import mamba_tracking_dropped
from sglang_bcg_fixes.fixes import stack_call_signature as fix
from sglang_bcg_fixes.model import How
from sglang_bcg_fixes.planning.plan import ask
from sglang_bcg_fixes.planning.registry import declared_in
from sglang_bcg_fixes.source.tree import Folder, Source
from tests.wheels import RELEASES

Root = Callable[[str], pathlib.Path]
CAPTURES_THE_WHOLE_MODEL = ("0.5.11",)
TAKES_FORWARD_BATCH_FIRST = {"PersimmonModel", "PhiModel"}
TAKES_NO_EMBEDDINGS = {"BaiChuanModel", "CohereModel", "XverseModel"}
TAKES_A_PROXY_FIRST = {"NemotronHModel", "OPTDecoder"}
SAYS_INPUTS_EMBEDS = {
    *("BailingMoELinearModel", "DeciModel", "FalconH1Model", "GraniteMoeHybridModel", "GraniteMoeModel"),
    *("KimiLinearModel", "Lfm2MoeModel", "NemotronHModel", "OrionModel", "Phi3SmallModel", "Qwen3NextModel"),
    *("SolarModel", "Starcoder2Model"),
}
# no call of a runner suits these: they need something else, or take no positions
TAKES_OTHER_INPUTS = {
    *("FalconMambaModel", "Mamba2Model", "MllamaTextModel", "MossVLTextModel", "NemotronHMultiTokenPredictor"),
    "WhisperDecoder",
}
# 0.5.12 passes no embeddings
NEEDS_EMBEDDINGS = {"DeepseekV4Model", "Phi3SmallModel"}


def mended_in(release: str) -> set[str]:
    """The stacks that this release calls wrongly, as read in its source."""
    number = RELEASES.index(release)
    mended = set(TAKES_FORWARD_BATCH_FIRST)
    if release.startswith("0.5.13"):
        mended |= TAKES_NO_EMBEDDINGS | SAYS_INPUTS_EMBEDS
    if RELEASES.index("0.5.14") <= number <= RELEASES.index("0.5.18"):
        mended |= TAKES_NO_EMBEDDINGS | TAKES_A_PROXY_FIRST
    if number >= RELEASES.index("0.5.16"):
        mended |= {"GlmImageTextModel"}
    return mended


class Stacks:
    """The release's stacks of layers, which answer with their arguments, and its runner's call of them."""

    def __init__(self, release: str, root: pathlib.Path, folder: pathlib.Path) -> None:
        self.release = release
        self.source = Source(Folder(root))
        runner = self.source.need(*fix.RUN_FORWARD)
        (call,) = (node for node in ast.walk(runner.node) if is_call_of_layers(node))
        helper = self.source.find(fix.NAMES_BY_SIGNATURE)
        kwargs = "_build_layer_model_forward_kwargs(self.layer_model, forward_batch, None)" if helper else "{}"
        lines = [
            "from __future__ import annotations",
            "import inspect",
            helper.text if helper else "",
            "def run_forward(self, forward_batch, num_tokens):",
            "    input_ids, positions = forward_batch.input_ids, forward_batch.positions",
            f"    kwargs = {kwargs}",
            f"    return {ast.unparse(call)}",
            "STACKS = {}",
        ]
        for place, header in headers(root):
            # two modules may have classes of one name
            name = place.partition(":")[2]
            lines += [f"class {name}:", textwrap.indent(ast.unparse(header), "    "), f"STACKS[{place!r}] = {name}"]
        file = folder / "stacks.py"
        file.write_text("\n".join(lines))
        spec = importlib.util.spec_from_file_location("stacks", file)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self.run_forward: Callable[..., dict[str, Any]] = module.run_forward
        self.classes: dict[str, Any] = module.STACKS

    def call(self, place: str, batch: Any, with_fix: bool = True, gate: Any = None, **settings: Any) -> dict[str, Any]:
        """The stack's arguments as {parameter: value}, with a note if something stood in for its forward."""
        layers = self.classes[place]()
        runner = type("Runner", (types.SimpleNamespace,), {"can_run": gate})()
        vars(runner).update(layer_model=layers, model_runner=model_runner(**settings))
        try:
            if with_fix:
                received: dict[str, Any] = fix.call_layers_by_name(self.run_forward, runner, batch, 8)
            else:
                received = self.run_forward(runner, batch, 8)
            return received
        finally:
            assert vars(layers) == {}, "something is left in the place of forward"


def is_call_of_layers(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "self.layer_model.forward"


def headers(root: pathlib.Path) -> Iterator[tuple[str, ast.FunctionDef]]:
    """The forward of every class with layers and a batch of tokens, with a body that returns what it received."""
    for file in sorted((root / "sglang/srt/models").glob("*.py")):
        text = file.read_text(encoding="utf-8-sig")
        lines = text.splitlines()
        for node in ast.parse(text).body:
            if not isinstance(node, ast.ClassDef) or "self.layers" not in "".join(lines[node.lineno : node.end_lineno]):
                continue
            for forward in node.body:
                if isinstance(forward, ast.FunctionDef) and forward.name == "forward":
                    arguments = forward.args
                    parameters = [*arguments.args, *arguments.kwonlyargs]
                    if {"input_ids", "forward_batch"} <= {parameter.arg for parameter in parameters}:
                        for parameter in filter(None, (*parameters, arguments.vararg, arguments.kwarg)):
                            parameter.annotation = None
                        arguments.defaults = [ast.Constant("default") for _ in arguments.defaults]
                        body = ast.parse("return {**locals(), 'taken_over': 'forward' in vars(self)}").body
                        yield f"{file.stem}:{node.name}", ast.FunctionDef("forward", arguments, body, [], lineno=1)


def model_runner(draft: bool = False, extra_buffer: bool = False, prefix_cache: bool = True) -> Any:
    server_args = types.SimpleNamespace(
        enable_mamba_extra_buffer=lambda: extra_buffer, disable_radix_cache=not prefix_cache
    )
    return types.SimpleNamespace(is_draft_worker=draft, server_args=server_args)


def batch(input_embeds: Any = None) -> Any:
    return types.SimpleNamespace(input_ids=["ids"], positions=["positions"], input_embeds=input_embeds)


def is_right(received: dict[str, Any], sent: Any) -> bool:
    """True where each of the runner's arguments is where it belongs, and nothing is anywhere else."""
    rest = {name: value for name, value in received.items() if name not in ("self", "taken_over")}
    positions = [rest.pop(name) for name in ("positions", "position_ids") if name in rest]
    embeddings = [rest.pop(name) for name in ("input_embeds", "inputs_embeds") if name in rest]
    nothing = (None, "default") if sent.input_embeds is None else (sent.input_embeds,)
    return (
        rest.pop("input_ids") is sent.input_ids
        and rest.pop("forward_batch") is sent
        and [value is sent.positions for value in positions] == [True]
        and all(value in nothing for value in embeddings)
        and all(value in ("default", {}) for value in rest.values())
    )


@pytest.fixture(scope="module", params=[release for release in RELEASES if release not in CAPTURES_THE_WHOLE_MODEL])
def stacks(request: pytest.FixtureRequest, release_root: Root, tmp_path_factory: pytest.TempPathFactory) -> Stacks:
    return Stacks(request.param, release_root(request.param), tmp_path_factory.mktemp("stacks"))


def test_every_stack_receives_what_the_runner_passes(stacks: Stacks) -> None:
    mended: set[str] = set()
    left_alone: set[str] = set()
    refused: set[str] = set()
    for place in stacks.classes:
        name, sent = place.partition(":")[2], batch()
        try:
            right_without = is_right(stacks.call(place, sent, with_fix=False), sent)
        except TypeError:
            right_without = False
        try:
            received = stacks.call(place, sent)
        except TypeError as error:
            assert not right_without and name in str(error) and declared_in(fix).flag in str(error)
            refused.add(name)
            continue
        assert is_right(received, sent), f"{place} received {received}"
        assert received["taken_over"] is not right_without, f"{place} is right without the fix: {right_without}"
        (left_alone if right_without else mended).add(name)
    assert mended == mended_in(stacks.release)
    assert len(left_alone) > 50
    assert refused <= TAKES_OTHER_INPUTS | (NEEDS_EMBEDDINGS if stacks.release.startswith("0.5.12") else set())
    # found in the text there, in the syntax tree here
    parts = ask(declared_in(fix), stacks.source).reason.split("; ")
    assert {name for part in parts for name in part.partition(": ")[2].split(", ")} == mended


def test_embeddings_of_images_reach_their_parameter_or_stop_the_server(stacks: Stacks) -> None:
    if stacks.release.startswith("0.5.12"):
        pytest.skip("the runner passes none")
    reached = 0
    for place, stack in stacks.classes.items():
        sent = batch(["embeddings"])
        try:
            received = stacks.call(place, sent)
        except TypeError as error:
            parameters = stack.forward.__code__.co_varnames
            unplaced = "no parameter for input_embeds" in str(error) and not {"input_embeds", "inputs_embeds"} & set(
                parameters
            )
            assert unplaced or place.partition(":")[2] in TAKES_OTHER_INPUTS, error
        else:
            assert is_right(received, sent), f"{place} received {received}"
            reached += 1
    assert reached > 50


@pytest.mark.parametrize("stacks", ["0.5.13.post1"], indirect=True)
class TestKeptAway:
    """Models that 0.5.13 could not capture, and would now capture wrongly."""

    @pytest.mark.parametrize(
        ("place", "settings", "cause"),
        [
            ("falcon_h1:FalconH1Model", {"extra_buffer": True}, "mamba_tracking_dropped"),
            ("nemotron_h:NemotronHModel", {"extra_buffer": True}, "mamba_tracking_dropped"),
            ("bailing_moe_linear:BailingMoELinearModel", {"extra_buffer": True}, "mamba_tracking_dropped"),
            ("qwen3_next:Qwen3NextModel", {"draft": True}, "hidden states"),
        ],
    )
    def test_the_server_still_stops_and_says_why(
        self, stacks: Stacks, place: str, settings: dict[str, bool], cause: str
    ) -> None:
        with pytest.raises(
            TypeError, match=f"{place.partition(':')[2]} .* would be wrong: .*{cause}.*{declared_in(fix).flag}"
        ):
            stacks.call(place, batch(), **settings)

    def test_so_it_does_for_a_class_derived_from_one(self, stacks: Stacks, monkeypatch: pytest.MonkeyPatch) -> None:
        derived = type("MyFalcon", (stacks.classes["falcon_h1:FalconH1Model"],), {})
        monkeypatch.setitem(stacks.classes, "mine:MyFalcon", derived)
        with pytest.raises(TypeError, match="MyFalcon can be captured now, but its graph would be wrong"):
            stacks.call("mine:MyFalcon", batch(), extra_buffer=True)

    @pytest.mark.parametrize(
        ("place", "settings"),
        [
            ("falcon_h1:FalconH1Model", {}),
            ("nemotron_h:NemotronHModel", {}),
            ("nemotron_h:NemotronHModel", {"extra_buffer": True, "prefix_cache": False}),
            ("qwen3_next:Qwen3NextModel", {"extra_buffer": True}),
        ],
    )
    def test_the_rest_is_captured(self, stacks: Stacks, place: str, settings: dict[str, bool]) -> None:
        sent = batch()
        assert is_right(stacks.call(place, sent, **settings), sent)


@pytest.mark.parametrize("stacks", ["0.5.14", "0.5.18"], indirect=True)
def test_what_starts_by_itself_is_not_kept_away(stacks: Stacks) -> None:
    sent = batch()
    assert is_right(stacks.call("nemotron_h:NemotronHModel", sent, draft=True, extra_buffer=True), sent)


@pytest.mark.parametrize("stacks", ["0.5.13.post1"], indirect=True)
@pytest.mark.parametrize("others_after", [False, True])
def test_what_would_lose_its_checkpoints_is_captured_where_such_batches_are_refused(
    stacks: Stacks, others_after: bool
) -> None:
    def gate(self: Any, forward_batch: Any) -> bool:
        return True

    for fix_id in (declared_in(mamba_tracking_dropped).id, *(["another_fix"] if others_after else [])):
        gate = wrappers.rebuild("a:gate", gate, How.AROUND, mamba_tracking_dropped.can_run, fix_id)
    sent = batch()
    place = "nemotron_h:NemotronHModel"
    assert is_right(stacks.call(place, sent, gate=gate, extra_buffer=True), sent)
