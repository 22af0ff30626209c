"""An object that would import a package when an attribute is asked for, as SGLang's LazyImport does."""


class LazyImport:
    def __getattr__(self, name):
        raise AssertionError(f"{name} was asked for, which would import a package")


lazy = LazyImport()


def reader_of_a_variable_without_value(has_value=False):
    def read():
        return value

    if has_value:
        value = 1
    return read


unset = reader_of_a_variable_without_value()
