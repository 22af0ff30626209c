# SPDX-License-Identifier: Apache-2.0
"""Rules that a patched server must not break beside a stock one, on the same release, model and batches."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

Row = dict[str, Any]
NOT_A_NUMBER = float("inf")
STARTS_NOT = "does not serve"
FEWER_BUCKETS = "captures fewer buckets"
MORE_BREAKS = "has more breaks"
FEWER_REPLAYS = "replays fewer batches"
DIFFERS_MORE = "differs more from eager"
OTHER_EAGER = "answers otherwise without a graph"
RULES = (STARTS_NOT, FEWER_BUCKETS, MORE_BREAKS, FEWER_REPLAYS, DIFFERS_MORE, OTHER_EAGER)
# of logits of about one, in half precision, on another processor
SAME = 0.02
PLUGIN_FAILED = "bcg-fixes refuses to start"


class Slack(NamedTuple):
    """A difference may be so many times as large as stock's, or this large."""

    times: float
    rounding: float


# on another processor products are cut otherwise: two places of half precision behind a logit of about one
SAME_PROCESSOR, OTHER_PROCESSOR = Slack(1, 0.0), Slack(4, 2**-10)


def is_of_the_server(row: Row) -> bool:
    """Tell whether a row may be recorded: not where the plugin failed, such as while somebody edited it."""
    return PLUGIN_FAILED not in row.get("error", "")


def broken(stock: Row, patched: Row, slack: Slack = SAME_PROCESSOR) -> list[str]:
    """The rules that the patched server breaks; none where stock does not come that far itself."""
    if "error" in patched:
        return [] if "error" in stock else [STARTS_NOT]
    rules = [OTHER_EAGER] if "eager" in stock and not same_eager(stock, patched) else []
    return rules if "error" in stock else worse_graphs(stock, patched, slack) + rules


def worse_graphs(stock: Row, patched: Row, slack: Slack) -> list[str]:
    ours, theirs = patched["graphs"], stock["graphs"]
    both = [(ours[size][1], theirs[size][1]) for size in theirs if size in ours]
    pairs = list(zip(patched["batches"], stock["batches"], strict=True))
    found = {
        FEWER_BUCKETS: not set(theirs) <= set(ours),
        MORE_BREAKS: any(mine > stocks for mine, stocks in both),
        FEWER_REPLAYS: any(replays(stocks) and not replays(mine) for mine, stocks in pairs),
        DIFFERS_MORE: any(
            difference(mine) > max(slack.times * difference(stocks), slack.rounding) for mine, stocks in pairs
        ),
    }
    return [rule for rule in RULES if found.get(rule)]


def replays(batch: list[Any]) -> bool:
    return bool(batch[0])


def difference(batch: list[Any]) -> float:
    """An answer that is not there, or no number, is further off than any."""
    return batch[1] if isinstance(batch[1], float) else NOT_A_NUMBER


def same_eager(stock: Row, patched: Row) -> bool:
    """Bit for bit, or to a rounding where another processor recorded the one."""
    if stock["eager"] == patched["eager"]:
        return True
    pairs = zip(itertools.chain(*stock["eager values"]), itertools.chain(*patched["eager values"]), strict=True)
    return all(abs(one - other) <= SAME for one, other in pairs)


def is_wrong(row: Row) -> bool:
    """True where an answer is missing or is not the eager one, or the server ends."""
    return "error" in row or any(difference(batch) for batch in row["batches"])


def shape(row: Row) -> Any:
    """The part of a row that is the same on every machine."""
    return "error" in row, row.get("graphs"), [replays(batch) for batch in row.get("batches", [])]


def same(stock: Row, off: Row) -> bool:
    """True where two rows agree on everything but time."""
    told = ("error", "eager", "graphs", "batches", "calls", "calls eager")
    return all(stock.get(name) == off.get(name) for name in told)
