"""An object that would import a package when an attribute is asked for, as SGLang's LazyImport does."""


class LazyImport:
    def __getattr__(self, name):
        raise AssertionError(f"{name} was asked for, which would import a package")


lazy = LazyImport()


def reader_of_a_deleted_variable():
    value = 1

    def read():
        return value

    del value
    return read


unset = reader_of_a_deleted_variable()
