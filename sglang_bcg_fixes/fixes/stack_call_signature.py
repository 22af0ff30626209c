# SPDX-License-Identifier: Apache-2.0
"""The server does not start with prefill graphs (Phi, Persimmon, Cohere and others)

Symptom: The server stops at start-up while prefill graphs are captured, with a TypeError about input_embeds or the
number of arguments, or with "'ForwardBatch' object has no attribute 'flatten'"; from 0.5.15 no flag is needed. The
models depend on the release: Phi and Persimmon on all from 0.5.12; Cohere, Baichuan and XverseMoe on 0.5.13 to 0.5.18;
GLM-Image from 0.5.16; on 0.5.13 also every model that spells it inputs_embeds: Qwen3-Next, NemotronH, Kimi-Linear,
Bailing linear, Granite MoE and StarCoder2 among them.
Cause: The runner calls the layers by position, or with a keyword that not every model has: three positional arguments
on 0.5.12, plus a keyword input_embeds on 0.5.13, four positional ones from 0.5.14, three and those that the signature
names from 0.5.19. Phi, Persimmon and GLM-Image take forward_batch before positions, NemotronH takes pp_proxy_tensors
before inputs_embeds.
Change: Where a model's layers do not take the runner's call, or an argument would land in another's place, a wrapper
replaces their forward while the runner calls it. It passes each argument to the parameter of that name, and drops a
None that no parameter takes; an argument that it cannot place is an error, as for Phi-3-small on 0.5.12. Replay needs
no change: it passes nothing on to the layers, and SGLang writes the embeddings of images where the graph reads them. On
0.5.13 some graphs would be wrong once they can be captured, so the server still stops, and says why: a draft model,
and, where mamba_tracking_dropped is not applied, Falcon-H1, NemotronH and Bailing linear with the extra-buffer strategy
of the Mamba prefix cache.
Remove when: Every release that has to be served binds these arguments by name.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sglang_bcg_fixes.anatomy.launches import PREFILL_GRAPHS
from sglang_bcg_fixes.anatomy.runners import OLD_PREFILL, PREFILL, PREFILL_MODULE
from sglang_bcg_fixes.anatomy.workarounds import PREFILL_GRAPHS_OFF
from sglang_bcg_fixes.concern import Condition, Launch
from sglang_bcg_fixes.engine import wrappers
from sglang_bcg_fixes.model import flag_of
from sglang_bcg_fixes.writing import Finding, Fix, How, PatchPoint, Source, absent, affected, ends, fixed, unknown

ID = "stack_call_signature"
MODELS = "sglang/srt/models"
RUN_FORWARD = (
    f"{PREFILL}._run_forward",
    f"{OLD_PREFILL}._run_forward",
)
NAMES_BY_SIGNATURE = f"{PREFILL_MODULE}:_build_layer_model_forward_kwargs"
CALLEE = "self.layer_model.forward"
# in the order that every release passes them in
PASSED = ("input_ids", "positions", "forward_batch", "input_embeds")
# from another file of models
IMPORTED = re.compile(r"^from sglang\.srt\.models\.([\w.]+) import", re.MULTILINE)
SPELLINGS = {"positions": ("positions", "position_ids"), "input_embeds": ("input_embeds", "inputs_embeds")}
# parameters of pipelined models and multi-token predictors that no runner passes
KNOWN_FOR_OTHERS = frozenset({"hidden_states", "pp_proxy_tensors"})

# the fix that makes such a runner refuse them
CHECKPOINTS_BY = "mamba_tracking_dropped"
# models that 0.5.13 cannot call, and would capture wrongly where the prefix cache wants state checkpoints
WITHOUT_CHECKPOINTS = frozenset({"BailingMoELinearModel", "FalconH1Model", "NemotronHModel"})


class Call(NamedTuple):
    """A runner's call of the layers: some of PASSED by position, others by name; None means **kwargs."""

    positional: int
    keywords: frozenset[str | None]


class Parameters(NamedTuple):
    """Parameters of a forward besides self."""

    names: tuple[str, ...]
    required: frozenset[str]
    # any other keyword as well
    takes_more: bool = False

    def spelling(self, passed: str) -> str | None:
        """Return the parameter for the argument of this name in the runner, or None."""
        return next((name for name in SPELLINGS.get(passed, (passed,)) if name in self.names), None)


def probe(source: Source) -> Finding:
    runner = source.need(*RUN_FORWARD)
    calls = calls_of_layers(runner.node)
    if not calls:
        return absent("the whole model is captured, called as usual", runner)
    if len(calls) > 1:
        return unknown("the runner calls the layers in more than one way", runner)
    call, read = calls[0], [runner]
    if None in call.keywords:
        read.append(source.need(NAMES_BY_SIGNATURE))
    troubles: dict[str, list[str]] = {}
    for model, parameters in layer_stacks(source):
        trouble = misfit(parameters, call)
        if trouble and can_be_mended(parameters, call):
            troubles.setdefault(trouble, []).append(model)
    if troubles:
        return affected("; ".join(f"{trouble}: {', '.join(models)}" for trouble, models in troubles.items()), *read)
    return fixed("every model takes its layers' arguments as they are passed", *read)


@functools.cache
def calls_made_by(run_forward: Callable[..., Any]) -> list[Call]:
    return calls_of_layers(ast.parse(textwrap.dedent(inspect.getsource(run_forward))))


def calls_of_layers(tree: ast.AST) -> list[Call]:
    return [
        Call(len(node.args), frozenset(keyword.arg for keyword in node.keywords))
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == CALLEE
    ]


def layer_stacks(source: Source) -> Iterator[tuple[str, Parameters]]:
    """Every class that has layers and runs them on a batch of tokens.

    Found in the text: parsing every model would take a second in every process, and a header is all that is needed.
    """
    for path in source.files.modules(MODELS):
        for text in (source.text(path) or "").split("\nclass ")[1:]:
            start = text.find("\n    def forward(")
            header = text[start : text.find(")", start)].strip()
            if "self.layers" in text and "input_ids" in header and "forward_batch" in header:
                (function,) = ast.parse(f"{header}): pass").body
                yield re.split(r"\W", text, maxsplit=1)[0], written_parameters(function)


def written_parameters(function: ast.stmt) -> Parameters:
    assert isinstance(function, ast.FunctionDef)
    names = [argument.arg for argument in function.args.args[1:]]
    return Parameters(tuple(names), frozenset(names[: len(names) - len(function.args.defaults)]))


def live_parameters(forward: Callable[..., Any]) -> Parameters | None:
    """Parameters of a bound method, decorated or not; None where it takes everything."""
    parameters = inspect.signature(forward).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return None
    named = [parameter for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    return Parameters(
        tuple(parameter.name for parameter in named),
        frozenset(parameter.name for parameter in named if parameter.default is parameter.empty),
        any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters),
    )


def misfit(parameters: Parameters, call: Call) -> str | None:
    """Describe why these layers cannot be called in this way, or None."""
    for index, passed in enumerate(PASSED[: call.positional]):
        if index >= len(parameters.names):
            return f"no parameter for {passed}"
        if is_surely_another(parameters, index, passed):
            return f"{passed} is taken for {parameters.names[index]}"
    for name in call.keywords:
        # **kwargs are chosen by the names in the signature
        if name and name not in parameters.names and not parameters.takes_more:
            return f"no parameter {name}"
    left = parameters.required - set(parameters.names[: call.positional]) - call.keywords
    return f"{min(left)} is required and not passed" if left and None not in call.keywords else None


def is_surely_another(parameters: Parameters, index: int, passed: str) -> bool:
    """Tell whether an argument belongs elsewhere, or lands in a parameter known to be for another.

    A name that SGLang's own models do not use proves nothing: a user's own stack may take the call as it is.
    """
    name, own = parameters.names[index], parameters.spelling(passed)
    return name != own and (own is not None or name in KNOWN_FOR_OTHERS or name in spellings_of_others(passed))


def spellings_of_others(passed: str) -> Iterator[str]:
    for other in PASSED:
        if other != passed:
            yield from SPELLINGS.get(other, (other,))


def can_be_mended(parameters: Parameters, call: Call) -> bool:
    """Check that each argument of a text batch, which has no embeddings, can be passed by name."""
    try:
        by_name(parameters, (*PASSED[:3], None)[: call.positional], dict.fromkeys(filter(None, call.keywords)))
    except Unplaced:
        return False
    return True


class Unplaced(Exception):
    """An argument without a parameter, or a parameter without an argument."""


def by_name(parameters: Parameters, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the runner's arguments to the layers' own parameter names."""
    found = {}
    for passed, value in [*zip(PASSED[: len(args)], args, strict=True), *kwargs.items()]:
        name = parameters.spelling(passed)
        if name:
            found[name] = value
        elif parameters.takes_more and passed in kwargs:
            found[passed] = value
        elif value is not None:
            raise Unplaced(f"no parameter for {passed}")
    left = parameters.required - found.keys()
    if left:
        raise Unplaced(f"a parameter {min(left)}, which the prefill runner does not pass")
    return found


def call_layers_by_name(original: Callable[..., Any], self: Any, forward_batch: Any, num_tokens: int) -> Any:
    """Put by_name between the runner and layers that it calls wrongly, while it runs."""
    layers = self.layer_model
    # torch.compile captures the whole model
    if layers is None:
        return original(self, forward_batch, num_tokens)
    forward = layers.forward
    parameters = live_parameters(forward)
    calls = calls_made_by(original)
    if parameters is None or all(misfit(parameters, call) is None for call in calls):
        return original(self, forward_batch, num_tokens)
    if not parameters.takes_more and any(call.keywords - {*parameters.names, None} for call in calls):
        refuse_what_was_kept_away(self, layers)

    # from 0.5.19 the runner reads the signature of the attribute
    @functools.wraps(forward, updated=())
    def take(*args: Any, **kwargs: Any) -> Any:
        try:
            named = by_name(parameters, args, kwargs)
        except Unplaced as reason:
            raise TypeError(advice(f"{type(layers).__name__}.forward has {reason}")) from None
        return forward(**named)

    before = vars(layers).get("forward")
    layers.forward = take
    try:
        return original(self, forward_batch, num_tokens)
    finally:
        if before is None:
            del layers.forward
        else:
            layers.forward = before


def refuse_what_was_kept_away(runner: Any, layers: Any) -> None:
    """Raise where only SGLang's own TypeError has prevented a graph that would answer wrongly."""
    names = {base.__name__ for base in type(layers).__mro__}
    server_args = runner.model_runner.server_args
    checkpoints = server_args.enable_mamba_extra_buffer() and not server_args.disable_radix_cache
    if runner.model_runner.is_draft_worker:
        cause = "replay drops the target's hidden states"
    elif checkpoints and names & WITHOUT_CHECKPOINTS and not mends_checkpoints(runner):
        cause = f"{CHECKPOINTS_BY} is not applied"
    else:
        return
    raise TypeError(advice(f"{type(layers).__name__} can be captured now, but its graph would be wrong: {cause}"))


def mends_checkpoints(runner: Any) -> bool:
    """Check that the runner asks that fix, perhaps among others, before it replays."""
    return CHECKPOINTS_BY in wrappers.fixes_in(getattr(type(runner), "can_run", None))


def advice(trouble: str) -> str:
    ways = " or ".join(way.flags for way in PREFILL_GRAPHS_OFF)
    return f"bcg-fixes, {ID}: {trouble}. Start with {ways}; {flag_of(ID)}=off leaves the call to SGLang"


def has_such_layers(launch: Launch) -> bool | None:
    """A class that the runner cannot call stands in the file of the model, or in one that this file imports from."""
    named = set(re.findall(r"\w+", probe(launch.source).reason))
    files = {path: launch.source.text(path) or "" for path in launch.source.files.modules(MODELS)}
    waiting = [path for path, text in files.items() if any(f"\nclass {name}(" in text for name in launch.architectures)]
    if not waiting:
        return None
    read: set[str] = set()
    while waiting:
        path = waiting.pop()
        read.add(path)
        imported = {f"{MODELS}/{name.replace('.', '/')}.py" for name in IMPORTED.findall(files[path])}
        waiting += sorted((imported & files.keys()) - read)
    return any(f"\nclass {name}(" in files[path] for path in read for name in named)


FIX = Fix(
    probe=probe,
    patches=(PatchPoint(where=RUN_FORWARD, how=How.AROUND, body=call_layers_by_name),),
    workarounds=PREFILL_GRAPHS_OFF,
    verify=("phi_prefill_graph", "cohere_prefill_graph", "qwen3_next_prefill_graph"),
    concerns=ends(PREFILL_GRAPHS, Condition("a model whose layers take other arguments", has_such_layers)),
)
