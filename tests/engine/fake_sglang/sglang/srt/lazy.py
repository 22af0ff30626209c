# SPDX-License-Identifier: Apache-2.0
"""An object that would import a package when an attribute is asked for, as SGLang's LazyImport does."""


class LazyImport:
    def __getattr__(self, name):
        raise AssertionError(f"{name} was asked for, which would import a package")


class LazyMapping(dict[str, object]):
    """A mapping like those of transformers' models, which import each model at the first look."""

    def items(self):
        raise AssertionError("the items were asked for, which would import packages")

    __iter__ = keys = values = items


class Proxy:
    """A proxy that is an instance of whatever it stands for, once it has imported it."""

    @property  # type: ignore[misc]
    def __class__(self):
        raise AssertionError("the class was asked for, which would import a package")


class Holder:
    proxy = Proxy()


lazy = LazyImport()
proxy = Proxy()
proxies = [proxy]
mapping = LazyMapping(a=1)


def reader_of_a_variable_without_value(has_value=False):
    def read():
        return value

    if has_value:
        value = 1
    return read


unset = reader_of_a_variable_without_value()
