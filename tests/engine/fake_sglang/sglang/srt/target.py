# SPDX-License-Identifier: Apache-2.0
"""One definition of every kind that can be patched."""


def function(x, y=1):
    return ["function", x, y]


class Base:
    def inherited(self, x):
        return ["inherited", x]

    @classmethod
    def inherited_class(cls, x):
        return ["inherited_class", cls.__name__, x]

    @staticmethod
    def inherited_static(x):
        return ["inherited_static", x]


class Thing(Base):
    width = 3

    def method(self, x):
        return ["method", self.width, x]

    @classmethod
    def made(cls, x):
        return ["made", cls.__name__, x]

    @staticmethod
    def static(x):
        return ["static", x]

    @property
    def size(self):
        return ["size", self.width]


class Kernel:
    """Launched as kernel[grid](...), as Triton's are."""

    def __getitem__(self, grid):
        return lambda *args: [grid, *args]

    def __call__(self, *args):
        raise TypeError("launch with a grid")


kernel = Kernel()
