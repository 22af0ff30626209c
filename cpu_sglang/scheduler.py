# SPDX-License-Identifier: Apache-2.0
"""SGLang's own scheduler in this process: its queue, its prefix cache and its loop, and no server before it.

Requests are put into the scheduler where it would receive them, and its loop ends when it has answered them all.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import importlib
import inspect
import types
import unittest.mock
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import one_batch

# as SGLang names them
PYTHON, RUST = "python", "rust"


class Idle(BaseException):
    """Leaves the scheduler's loop, past all handlers of Exception, where it would wait for requests."""


class Failed(BaseException):
    """Leaves the scheduler's process function, past its handler, because of an exception."""


def run(program: Callable[[Scheduler], None], model: str, **server_args: Any) -> None:
    """Run a program where the scheduler's process would run its loop; one per process.

    import_sglang() and load_plugins() come first.
    """
    args = one_batch.server_arguments(model, **server_args)
    from sglang.srt.server_args import PortArgs

    module: Any = importlib.import_module("sglang.srt.managers.scheduler")

    def dispatch_event_loop(scheduler: Any) -> None:
        try:
            program(Scheduler(scheduler))
        except Exception as error:
            # the handler would end this process and its parent
            raise Failed from error

    module.dispatch_event_loop = dispatch_event_loop
    parameters = inspect.signature(module.run_scheduler_process).parameters
    ranks = {name: 0 for name in parameters if name.endswith("_rank") and not name.startswith(("display", "dp_"))}
    module.run_scheduler_process(
        server_args=args,
        port_args=PortArgs.init_new(args),
        gpu_id=0,
        dp_rank=None,
        pipe_writer=types.SimpleNamespace(send=lambda ready: None),
        **ranks,
    )


@dataclasses.dataclass
class Answer:
    """The logits of each new token, and how many tokens of the prompt were found in the cache."""

    logits: list[Any] = dataclasses.field(default_factory=list)
    found: int = 0


class Scheduler:
    """A running scheduler that is asked directly."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self._process = scheduler.process_batch_result
        scheduler.process_batch_result = self._remember
        self._sample = scheduler.launch_batch_sample_if_needed
        scheduler.launch_batch_sample_if_needed = self._sample_and_keep
        scheduler.on_idle = self._leave
        self.tree = tree_of(scheduler)
        self.model = scheduler.tp_worker.model_runner.model
        one_batch.randomize(self.model)
        one_batch.derive(self.model)
        one_batch.freeze_for_good()
        # stand-ins of streams can be entered once
        scheduler.forward_stream_ctx = scheduler.copy_stream_ctx = contextlib.nullcontext()
        # the loop makes what the cache is emptied with
        self._loop()

    def answer(
        self,
        prompts: Mapping[str, Sequence[int]],
        tokens: int,
        later: Mapping[str, Sequence[int]] | None = None,
        after: int = 0,
    ) -> dict[str, Answer]:
        """Generate that many tokens greedily for each of the requests, which arrive together.

        Those that arrive later do so once one of the first has so many tokens.
        """
        self._answers = {name: Answer() for name in prompts}
        self._later = [(name, ids, tokens) for name, ids in (later or {}).items()]
        self._after = after
        self.scheduler.process_input_requests([request(name, ids, tokens) for name, ids in prompts.items()])
        self._loop()
        assert not self._later, f"no request got {after} tokens"
        return self._answers

    def tokens(self, prompts: Mapping[str, Sequence[int]], tokens: int) -> dict[str, list[int]]:
        """Generate at least so many tokens by a diffusion LLM, whose answers have no logits of a next token."""
        found: dict[str, list[int]] = {}

        def remember(batch: Any, result: Any, *args: Any, **kwargs: Any) -> Any:
            processed = self._process(batch, result, *args, **kwargs)
            found.update({asked.rid: list(asked.output_ids) for asked in batch.reqs})
            return processed

        with unittest.mock.patch.object(self.scheduler, "process_batch_result", remember):
            self.scheduler.process_input_requests([request(name, ids, tokens) for name, ids in prompts.items()])
            self._loop()
        return found

    def forget(self) -> None:
        """Empty the prefix cache."""
        assert self.scheduler.flush_cache()

    def _loop(self) -> None:
        try:
            if self.scheduler.enable_overlap:
                self.scheduler.event_loop_overlap()
            else:
                self.scheduler.event_loop_normal()
        except Idle:
            pass

    def _sample_and_keep(self, result: Any, *args: Any) -> Any:
        """Sample late, as for structured output beside overlap; SGLang lets the logits go then."""
        output = result and result.logits_output
        logits = output and output.next_token_logits
        sampled = self._sample(result, *args)
        if output:
            output.next_token_logits = logits
        return sampled

    def _remember(self, batch: Any, result: Any, *args: Any, **kwargs: Any) -> Any:
        lengths = [len(asked.output_ids) for asked in batch.reqs]
        logits = result.logits_output.next_token_logits
        processed = self._process(batch, result, *args, **kwargs)
        for row, (asked, length) in enumerate(zip(batch.reqs, lengths, strict=True)):
            # chunks that do not end a prompt have logits too, and so have requests that have just ended
            if len(asked.output_ids) > length:
                answer = self._answers[asked.rid]
                answer.logits.append(logits[row].float().clone())
                answer.found = asked.cached_tokens
                if len(answer.logits) == self._after and self._later:
                    arrived, self._later = self._later, []
                    self._answers |= {name: Answer() for name, _, _ in arrived}
                    self.scheduler.process_input_requests([request(*asked) for asked in arrived])
        return processed

    def _leave(self) -> None:
        raise Idle


def tree_switch() -> Any:
    """SGLang's switch between prefix trees, in Python or in Rust; none in a release that has one in Python alone."""
    environ: Any = importlib.import_module("sglang.srt.environ")
    return getattr(environ.envs, "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", None)


def tree_of(scheduler: Any) -> str:
    """Name the language of its prefix tree; SGLang may take Python's in place of that in Rust, and says so at info."""
    core = getattr(scheduler.tree_cache, "tree_core", None)
    if core is None:
        return PYTHON
    language = RUST if "rust_tree_core" in type(core).__module__ else PYTHON
    switch = tree_switch()
    wanted = PYTHON if switch is None else switch.get()
    assert language == wanted, f"SGLang was to take the tree in {wanted}, and took that in {language}"
    return language


def request(name: str, ids: Sequence[int], tokens: int) -> Any:
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    fields = inspect.signature(TokenizedGenerateReqInput).parameters
    sampling = SamplingParams(max_new_tokens=tokens, temperature=0, ignore_eos=True)
    sampling.normalize(None)
    # later releases require a value for each of them
    given: dict[str, Any] = {field: None for field, kind in fields.items() if kind.default is kind.empty}
    given |= {
        "rid": name,
        # an array from 0.5.13 on
        "input_ids": array.array("q", ids) if "array" in str(fields["input_ids"].annotation) else list(ids),
        "input_text": "",
        "sampling_params": sampling,
        "return_logprob": False,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "stream": False,
    }
    return TokenizedGenerateReqInput(**given)
