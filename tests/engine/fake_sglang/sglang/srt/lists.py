from sglang.srt import target

IN_ORDER = [len, target.function]
