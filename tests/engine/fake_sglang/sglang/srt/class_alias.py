from sglang.srt.target import Thing


class Other:
    borrowed = Thing.method
