"""Pictures of processes: the mesh, and the schedule of a pipeline, as HTML."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, Final

__all__ = ["gpipe", "mesh_picture", "one_f_one_b", "schedule_picture"]

MOST_RANKS: Final = 512
MOST_CELLS: Final = 2000


def mesh_picture(head: Mapping[str, Any]) -> str:
    """Return nested boxes, one for each index of a dimension.

    Ranks are in the innermost. They count along the last dimension first. Empty for a process that is alone.
    """
    ranks = int(head.get("processes", 1))
    dims = list((head.get("mesh") or {"processes": ranks}).items())
    if ranks == 1:
        return ""
    sizes = escape(" × ".join(f"{name} {size}" for name, size in dims))
    if ranks > MOST_RANKS:
        return f"<p>{sizes}</p>"
    return f'<p class="note">{sizes}</p><div class="mesh">{"".join(_boxes(dims, 0, ranks))}</div>'


def _boxes(dims: list[tuple[str, int]], first: int, ranks: int) -> Iterator[str]:
    (name, size), *inner = dims
    each = ranks // size
    if not inner:
        cells = "".join(f'<span class="rank">{first + at}</span>' for at in range(size))
        yield f'<div class="dim"><span>{escape(name)}</span><div>{cells}</div></div>'
        return
    for at in range(size):
        nested = "".join(_boxes(inner, first + at * each, each))
        yield f'<div class="dim"><span>{escape(name)} {at}</span><div>{nested}</div></div>'


def schedule_picture(head: Mapping[str, Any]) -> str:
    """Return a table of the stages' tasks, if the options name a schedule."""
    options = {str(path): value for path, value, _ in head.get("config", [])}
    stages, count = options.get("parallelism.pp") or 1, options.get("gradient_accumulation_steps") or 1
    draws = {"1F1B": one_f_one_b, "GPipe": gpipe}
    name = str(options.get("fsdp.pp_schedule"))
    if stages < 2:
        return ""
    text = f"{name}: {stages} stages, {count} micro-batches (gradient_accumulation_steps)"
    rows = draws[name](stages, count) if name in draws and stages * count < MOST_CELLS else None
    if rows is None:
        return f'<p class="note">{escape(text)}; not drawn.</p>'
    body = "".join(
        f"<tr><th>stage {stage}</th>{''.join(_slot(slot) for slot in row)}</tr>"
        for stage, row in enumerate(rows)
    )
    text = f"{name}: {stages} stages, {count} micro-batches; F forward, B backward, drawn as equally long."
    return (
        f'<p class="note">{escape(text)}</p><div class="table"><table class="schedule">{body}</table></div>'
    )


def _slot(what: str) -> str:
    return f'<td class="{what[:1]}">{what}</td>' if what else "<td></td>"


def gpipe(stages: int, count: int) -> list[list[str]]:
    """Return what each stage does in each slot: all forwards, then all backwards."""
    return _played([[*_all("F", count), *_all("B", count)] for _ in range(stages)])


def one_f_one_b(stages: int, count: int) -> list[list[str]]:
    """Return each stage's tasks: forwards and backwards in turn once it is full."""
    orders = []
    for stage in range(stages):
        ahead = min(count, stages - stage)
        order = _all("F", count)[:ahead]
        for at in range(count):
            order += [f"B{at}", *([f"F{ahead + at}"] if ahead + at < count else [])]
        orders.append(order)
    return _played(orders)


def _all(what: str, count: int) -> list[str]:
    return [f"{what}{at}" for at in range(count)]


def _played(orders: list[list[str]]) -> list[list[str]]:
    """Give each task the first slot in which what it needs is done."""
    done: dict[tuple[int, str], int] = {}
    rows: list[list[str]] = [[] for _ in orders]
    last, now = len(orders) - 1, 0
    waiting = [list(order) for order in orders]
    while any(waiting):
        for stage, order in enumerate(waiting):
            ready = bool(order) and _is_ready(stage, order[0], last, done, now)
            rows[stage].append(order.pop(0) if ready else "")
            if ready:
                done[stage, rows[stage][-1]] = now
        now += 1
    return rows


def _is_ready(stage: int, task: str, last: int, done: Mapping[tuple[int, str], int], now: int) -> bool:
    if task[0] == "F":
        return stage == 0 or done.get((stage - 1, task), now) < now
    needed = (stage, f"F{task[1:]}") if stage == last else (stage + 1, task)
    return done.get(needed, now) < now
