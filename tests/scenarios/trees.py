# SPDX-License-Identifier: Apache-2.0
"""A program with each prefix tree of a release: from 0.5.21 on, users have one in Rust, and may ask for Python's."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from cpu_sglang import scheduler

Program = Callable[[scheduler.Scheduler], Any]


def given_by_each(program: Program, model: str, **server_args: Any) -> dict[str, Any]:
    """Give what the program gives, by the language of the tree; the one that users have comes last."""

    def run() -> dict[str, Any]:
        given: dict[str, Any] = {}
        scheduler.run(lambda served: given.update({served.tree: program(served)}), model, **server_args)
        return given

    def run_with_python(parent: Connection) -> None:
        scheduler.tree_switch().set(scheduler.PYTHON)
        parent.send(json.dumps(run()))

    switch = scheduler.tree_switch()
    if switch is None or switch.get() == scheduler.PYTHON:
        return run()
    # a process has one scheduler, and two at once would take the same port
    context = multiprocessing.get_context("fork")
    reading, writing = context.Pipe(duplex=False)
    other = context.Process(target=run_with_python, args=(writing,))
    other.start()
    writing.close()
    # raises where the other has failed, which has said why
    with_python: dict[str, Any] = json.loads(reading.recv())
    other.join()
    return with_python | run()


def the_same(given: dict[str, Any]) -> Any:
    """Give what the program gave with the tree that users have, if it gave the same with the other."""
    print("prefix trees:", *given)
    *others, of_users = (json.dumps(found) for found in given.values())
    assert all(found == of_users for found in others), given
    return json.loads(of_users)
