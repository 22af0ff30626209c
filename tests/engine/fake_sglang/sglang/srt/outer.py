from sglang.srt.target import function


def outer(x):
    return ["outer", *function(x)]
