"""Shapes cut into boxes, for properties of what ranks store."""

from __future__ import annotations

from hypothesis import strategies as st

from accel_core.storage.leaves import Box


@st.composite
def tilings(draw, shape=None):
    """A shape cut into boxes, by cutting boxes again and again."""
    shape = shape or tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 8))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        if box.shape[dim] < 2:
            boxes.append(box)
            continue
        cut = draw(st.integers(1, box.shape[dim] - 1))
        boxes.append(Box(box.offset, (*box.shape[:dim], cut, *box.shape[dim + 1 :])))
        offset = (*box.offset[:dim], box.offset[dim] + cut, *box.offset[dim + 1 :])
        boxes.append(Box(offset, (*box.shape[:dim], box.shape[dim] - cut, *box.shape[dim + 1 :])))
    return shape, draw(st.permutations(boxes))
