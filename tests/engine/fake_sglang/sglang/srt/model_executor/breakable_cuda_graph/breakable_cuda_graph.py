# SPDX-License-Identifier: Apache-2.0
"""`eager_on_graph` in the three forms that releases have, cut down to what replay keeps; FORM picks one."""

import functools
import os

FORM = os.environ["FAKE_FORM"]
breaks: list[object] = []
capturing = False


def wrapped(inner, capture_stub):
    def wrapper(*args, **kwargs):
        if not capturing:
            return inner(*args, **kwargs)
        output = (capture_stub or inner)(*args, **kwargs)
        breaks.append(lambda: inner(*args, **kwargs))
        return output

    return wrapper


class _EagerOnGraphCallable:
    def __init__(self, graph_call, eager_call):
        self._graph_call = graph_call
        self._eager_call = eager_call

    def __call__(self, *args, **kwargs):
        return self._graph_call(*args, **kwargs)

    def run_eager(self, *args, **kwargs):
        return self._eager_call(*args, **kwargs)

    def __get__(self, instance, owner=None):
        if instance is None:
            return self
        return _EagerOnGraphCallable(
            functools.partial(self._graph_call, instance), functools.partial(self._eager_call, instance)
        )


def enable_only(enable):
    return (lambda inner: wrapped(inner, None)) if enable else (lambda inner: inner)


def enable_and_stub(enable, capture_stub=None):
    return (lambda inner: wrapped(inner, capture_stub)) if enable else (lambda inner: inner)


def callable_object(fn=None, capture_stub=None, *, enable=None):
    def decorator(inner):
        return functools.update_wrapper(_EagerOnGraphCallable(wrapped(inner, capture_stub), inner), inner)

    return decorator(fn) if fn is not None else decorator


eager_on_graph = {"enable": enable_only, "stub": enable_and_stub, "object": callable_object}[FORM]
