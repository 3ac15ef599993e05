"""Requests that come at once, computed together, against the same ones computed one after another."""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path
from typing import Any, List, NamedTuple, Optional

import numpy as np
import plots
import xserv

from tables.device import Device
from tables.report import Column, Row, Section, Table
from tables.scale import Scale


class Timed(NamedTuple):
    """Seconds of one request, by the library's own clock: the interpreter would take several tokens at once."""

    #: From the arrival of all requests.
    first: float
    last: float
    #: Between two tokens, on average.
    gap: float
    tokens: int


async def _one(model: xserv.Model, prompt: List[int], count: int, began: float) -> Timed:
    waited = time.perf_counter() - began
    stream = model.generate_async(stream=False, tokens=prompt, max_tokens=count, ignore_eos=True, temperature=0.0)
    result = await stream.wait()
    if len(result.token_ids) != count:
        raise RuntimeError(f"a request of {count} tokens gave {len(result.token_ids)}")
    first, last = waited + result.time_to_first_token_seconds, waited + result.total_seconds
    return Timed(first, last, 1 / result.tokens_per_second, count)


async def _round(model: xserv.Model, prompts: List[List[int]], count: int, together: bool) -> List[Timed]:
    began = time.perf_counter()
    if together:
        return list(await asyncio.gather(*(_one(model, prompt, count, began) for prompt in prompts)))
    return [await _one(model, prompt, count, began) for prompt in prompts]


def _row(rounds: List[List[Timed]], requests: int, how: str) -> Row:
    everyone = [one for timed in rounds for one in timed]
    whole = statistics.median(max(one.last for one in timed) for timed in rounds)
    return dict(
        requests=requests, how=how, first_ms=statistics.median(one.first for one in everyone) * 1e3,
        first_last_ms=statistics.median(max(one.first for one in timed) for timed in rounds) * 1e3,
        gap_ms=statistics.median(one.gap for one in everyone) * 1e3,
        gap_most_ms=statistics.median(max(one.gap for one in timed) for timed in rounds) * 1e3,
        whole_ms=whole * 1e3, tokens_per_second=sum(one.tokens for one in rounds[0]) / whole,
    )  # fmt: skip


def prompt_of(seed: int, length: int, vocab_size: int) -> List[int]:
    """Token ids that no other prompt begins with."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocab_size, length)]


def open_model(device: Device, folder: Path, random_weights: bool, requests: int, tokens: int) -> xserv.Model:
    """The model, with room for these requests and no more, and without shared prefixes, which would be too fast."""
    options: Any = dict(device=device.name, random_weights=random_weights, prefix_cache=False)
    return xserv.Model(str(folder), kv_cache_tokens=requests * (tokens + 64), **options)


def run(device: Device, scale: Scale, folder: Optional[Path], random_weights: bool) -> Table:
    """The table."""
    table = Table("scheduling", "Requests at once and one after another")
    if folder is None:
        table.failures.append("--model FOLDER is missing")
        return table
    table.settings = dict(
        model=folder.resolve().name, prompt=f"{scale.prompt_tokens} random tokens", answer=f"{scale.answer_tokens} tokens",
        repeats=scale.repeats,
    )  # fmt: skip
    columns = [
        Column("requests", "requests", "d"), Column("how", "computed"), Column("first_ms", "first token, ms", ".4g"),
        Column("first_last_ms", "of the last request, ms", ".4g"), Column("gap_ms", "between tokens, ms", ".4g"),
        Column("gap_most_ms", "of the slowest request, ms", ".4g"), Column("whole_ms", "all done, ms", ".4g"),
        Column("tokens_per_second", "tokens/s", ",.0f"),
    ]  # fmt: skip
    section = Section("scheduling", "First tokens and times between tokens", columns)
    most = max(scale.concurrency)
    with open_model(device, folder, random_weights, most, scale.prompt_tokens + scale.answer_tokens) as model:
        table.settings.update(runs_on=model.info.device, dtype=model.info.dtype)
        vocab = model.info.vocab_size

        def rounds(requests: int, together: bool, first_seed: int, repeats: int) -> List[List[Timed]]:
            made = []
            for repeat in range(repeats):
                seeds = range(first_seed + repeat * requests, first_seed + (repeat + 1) * requests)
                prompts = [prompt_of(seed, scale.prompt_tokens, vocab) for seed in seeds]
                made.append(asyncio.run(_round(model, prompts, scale.answer_tokens, together)))
            return made

        for requests in scale.concurrency:
            rounds(requests, True, 10**6, 1)  # loads kernels and records graphs
            for together, how in ((True, "at once"), (False, "one after another")):
                section.rows.append(_row(rounds(requests, together, 1000 * requests, scale.repeats), requests, how))
    section.notes.append(
        "All requests are there at the beginning, from which first tokens are counted; one after another, a request is "
        "submitted when the one before it has ended. Times are those of the library's clock."
    )
    x = [float(requests) for requests in scale.concurrency]
    for name, key, label in (
        ("scheduling", "first_ms", "first token, ms (median)"),
        ("scheduling-gaps", "gap_ms", "between tokens, ms (median)"),
        ("scheduling-rate", "tokens_per_second", "tokens/s"),
    ):
        series = [
            plots.Series(how, [row[key] for row in section.rows if row["how"] == how])
            for how in ("at once", "one after another")
        ]
        title = f"{table.settings['model']} on {device.name}: {label}"
        section.plots.append((name, plots.lines(title, "requests", label, x, series, x_name=lambda n: f"{n:.0f}")))
    table.sections = [section]
    return table
